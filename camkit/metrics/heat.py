"""A map to be judged, the order of its cells, and the reference maps that know nothing about the model."""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from camkit.engine.heatmap import enlarge
from camkit.errors import InputError, LayerError
from camkit.explaining.choices import Choices
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation
from camkit.methods import known_method
from camkit.metrics.registry import UndefinedError
from camkit.targets import Target
from camkit.types import WHOLE_MODEL


@dataclass(frozen=True, eq=False)
class Curve:
    """The model's confidence along the hot sets of a map, from the empty set to all cells.

    Attributes:
        shares: the share of the cells in each hot set, from 0 to 1.
        scores: the confidence for each.
    """

    shares: Float[np.ndarray, " k"]
    scores: Float[np.ndarray, " k"]

    @property
    def area(self) -> float:
        """The area under the curve, by trapezoids; in the unit of the scores."""
        return area(self.shares, self.scores)


def even_shares(steps: int) -> tuple[float, ...]:
    """Return the shares of ``steps`` equal steps, without 0: ``(0.25, 0.5, 0.75, 1.0)`` for 4."""
    return tuple((number + 1) / steps for number in range(steps))


def hot_sets(heat: Float[Tensor, "*size"], shares: Sequence[float]) -> Bool[Tensor, "k *size"]:
    """Return the set of the hottest cells for each share, as near to it in size as equal cells allow.

    Args:
        heat: the map; it may have any sign.
        shares: ascending, above 0 and up to 1.
    """
    wanted, sets, hotter = _sets(heat, shares)
    counts, fewer = sets.flatten(1).sum(1), hotter.flatten(1).sum(1)
    nearer = (wanted - fewer < counts - wanted) & (fewer > 0)
    return torch.where(nearer.reshape(-1, *[1] * heat.dim()), hotter, sets)


def curve_sets(heat: Float[Tensor, "*size"], shares: Sequence[float]) -> Bool[Tensor, "m *size"]:
    """Return the sets of a curve, from the smallest to the largest, without the empty set and that of all cells.

    Args:
        heat, shares: as for ``hot_sets``.
    """
    wanted, sets, hotter = _sets(heat, shares)
    tied = sets.flatten(1).sum(1) > wanted
    both = torch.cat([sets, hotter[tied]])
    counts = both.flatten(1).sum(1)
    order = [number for number in counts.argsort(stable=True).tolist() if 0 < counts[number] < heat.numel()]
    kept = [number for place, number in enumerate(order) if not place or counts[number] != counts[order[place - 1]]]
    return both[kept]


def _sets(
    heat: Float[Tensor, "*size"], shares: Sequence[float]
) -> tuple[Int[Tensor, " k"], Bool[Tensor, "k *size"], Bool[Tensor, "k *size"]]:
    """Return for each share its number of cells, the cells at least as hot as the last of them, and the hotter ones."""
    cells = heat.numel()
    wanted = cells_of(shares, cells)
    ranks = [cells - count for count in wanted]
    ordered = np.partition(heat.numpy(), ranks, axis=None)  # puts these ranks in order, which is faster than sorting
    limits = torch.from_numpy(ordered[ranks]).reshape(-1, *[1] * heat.dim())
    return torch.tensor(wanted), heat[None] >= limits, heat[None] > limits


def cells_of(shares: Sequence[float], cells: int) -> list[int]:
    """Return how many of a map's cells make up each share: rounded up, and at least one."""
    return [min(cells, max(1, math.ceil(share * cells - _ROUNDING))) for share in shares]


_ROUNDING = 1e-6
"""Cells by which a share times the number of cells may exceed a whole number by rounding."""


def shares_of(sets: Bool[Tensor, "k *size"]) -> Float[np.ndarray, " k"]:
    """Return the share of the cells in each set."""
    return np.asarray(sets.flatten(1).double().mean(1).numpy())


def area(shares: Float[np.ndarray, " k"], scores: Float[np.ndarray, " k"]) -> float:
    """Return the area under a curve by trapezoids."""
    return float(((scores[1:] + scores[:-1]) / 2 * np.diff(shares)).sum())


Remake: TypeAlias = "Callable[[Tensor, nn.Module | None], Sequence[Tensor]]"
"""``remake(pictures, model)`` makes the maps of pictures (N, C, *size); None is the Evaluator's own model."""

MapLike: TypeAlias = "Explanation | Heat | np.ndarray | Tensor"
"""What is judged: an explanation; or an array of the input's size, or a coarser one that is enlarged bilinearly."""


_SAME_HEAT = 0.02
"""How far two maps from 0 to 1 may differ and count as one. A table rounds by 0.0005; other ways to spread the cells or
to smooth a map move its edges by more than this."""


@dataclass(frozen=True, eq=False)
class Heat:
    """A map to be judged.

    Attributes:
        values: the map at the size of the input, float32 on the CPU. An explanation's heatmap is 0..1; an array may
            have any sign and scale, of which metrics that order cells read the order only.
        name: the name of the method or of the reference map.
        cells: the map on the grid of the layer ``layer``, without negative values; None for a map of no single layer.
        layer: the name of that layer.
        remake: makes the map for other pictures, and with another model; None if it is not known how.
        problem: why the map cannot be judged; None if it can.
        curves: the curves that were already measured for this map.
    """

    values: Float[Tensor, "*size"]
    name: str = "array"
    cells: Float[Tensor, "*grid"] | None = None
    layer: str = ""
    remake: Remake | None = None
    problem: UndefinedError | None = None
    curves: dict[object, Curve] = field(default_factory=dict, repr=False)

    @property
    def unit(self) -> Float[Tensor, "*size"]:
        """The map's positive part divided by its maximum, 0..1: an explanation's heatmap as it is.

        Raises:
            UndefinedError: no cell is positive.
        """
        positive = self.values.relu()
        largest = float(positive.max())
        if not largest > 0:
            raise UndefinedError("empty_map", "the map has no positive value")
        return positive / largest

    def check_order(self) -> None:
        """Refuse a map whose cells have no order.

        Raises:
            UndefinedError: all cells are equal.
        """
        if bool((self.values == self.values.flatten()[0]).all()):
            raise UndefinedError("constant_map", "all cells of the map are equal, so they have no order")

    def made_anew(self, pictures: Float[Tensor, "n c *size"], model: nn.Module | None = None) -> list[Tensor]:
        """Return the maps of other pictures, float32 on the CPU.

        Raises:
            UndefinedError: it is not known how the map was made.
        """
        if self.remake is None:
            raise UndefinedError(
                "needs_method",
                f"the metric makes the map again, and camkit has no method {self.name!r} to make it with; pass an "
                "explanation, and an Explainer with its method",
            )
        return [made.detach().to("cpu", torch.float32) for made in self.remake(pictures, model)]


def as_heat(given: object, explainer: Explainer, target: Target, picture: Float[Tensor, "c *size"]) -> Heat:
    """Return what was passed as a map to be judged.

    Args:
        given: the map.
        explainer: explains pictures with the model.
        target: the target of the map, fixed.
        picture: the model's input.

    Raises:
        InputError: it is no map of real numbers, or has another number of axes than the input.
    """
    size = tuple(picture.shape[1:])
    if isinstance(given, Heat):
        if tuple(given.values.shape) != size:
            raise InputError(
                f"the values of a Heat have shape {tuple(given.values.shape)}, and the model's input has size {size}; "
                "pass an array, which is enlarged"
            )
        return given if given.problem is not None else replace(given, problem=_problem(given.values))
    if isinstance(given, Explanation):
        return _of_explanation(given, explainer, target, picture)
    values = real_values(given, "a map is an explanation or an array")
    if values.dim() != len(size) or not values.numel():
        raise InputError(
            f"the map has shape {tuple(values.shape)}, and the model's input has size {'x'.join(map(str, size))}; pass "
            f"a map with {len(size)} axes"
        )
    enlarged = values if tuple(values.shape) == size else enlarge(values[None], size)[0]
    return Heat(enlarged, problem=_problem(values))


def real_values(given: object, what: str) -> Float[Tensor, "..."]:
    """Return an array as float32 on the CPU.

    Args:
        given: the array.
        what: what it must be, as the first words of the error.

    Raises:
        InputError: it is no array of real numbers.
    """
    if not isinstance(given, (np.ndarray, Tensor)):
        raise InputError(f"{what}, not {type(given).__name__}")
    if not (given.dtype.kind in "biuf" if isinstance(given, np.ndarray) else not given.is_complex()):
        raise InputError(f"{what} of real numbers, not of {given.dtype}")
    if isinstance(given, np.ndarray):
        return torch.from_numpy(np.array(given, np.float32))  # a copy: PyTorch takes no mirrored or big-endian array
    return given.detach().to("cpu", torch.float32)


def pooled(values: Float[Tensor, "*size"], grid: tuple[int, ...]) -> Float[Tensor, "*grid"]:
    """Return the means of a map's pixels over the cells of a grid."""
    pool: Any = {
        1: functional.adaptive_avg_pool1d,
        2: functional.adaptive_avg_pool2d,
        3: functional.adaptive_avg_pool3d,
    }
    return torch.as_tensor(pool[len(grid)](values[None, None], grid)[0, 0])


def _problem(values: Tensor) -> UndefinedError | None:
    if not bool(torch.isfinite(values).all()):
        return UndefinedError("non_finite", "the map contains NaN or infinity")
    return None if bool(values.any()) else UndefinedError("empty_map", "the map is zero everywhere")


def _of_explanation(explanation: Explanation, explainer: Explainer, target: Target, picture: Tensor) -> Heat:
    size = tuple(picture.shape[1:])
    if explanation.maps.size != size:
        raise InputError(
            f"the explanation is of an input of {'x'.join(map(str, explanation.maps.size))} and the picture of one of "
            f"{'x'.join(map(str, size))}; pass the picture that was explained"
        )
    values = torch.from_numpy(np.asarray(explanation.heatmap, np.float32))
    problem = None
    if explanation.status == "non_finite":
        problem = UndefinedError("non_finite", "the map contains NaN or infinity")
    elif explanation.status != "ok":
        problem = UndefinedError("empty_map", f"the map is empty ({explanation.status})")
    single = len(explanation.maps.raws) == 1 and not explanation.placement.extent
    single = single and explanation.layer != str(WHOLE_MODEL)
    cells = torch.from_numpy(np.maximum(explanation.raw, 0)) if single else None
    remake = _remake_of(explanation, explainer, target, picture)
    return Heat(values, explanation.method, cells, explanation.layer, remake, problem)


def _remake_of(explanation: Explanation, explainer: Explainer, target: Target, picture: Tensor) -> Remake | None:
    """Return how the map of an explanation is made: as the explanation says, or else with the Explainer's choices."""
    own, made = explainer.choices, explanation.made
    how = own if made is None else made.choices
    used = own.method if made is None else made.method
    method = used if used.name == explanation.method else known_method(explanation.method)
    if method is None:
        return None
    kept = {name: own.options[name] for name in ("progress", "batch_size")}
    options = {**how.options, **kept, "fuse": explanation.maps.fuse, "smooth": explanation.smooth}
    choices = Choices(method, explanation.layer if method.layer else None, options)
    asked = None if made is None else made.target
    table_row = None if made is not None else (picture, explanation.heatmap)
    return _Remake(explainer.choosing(choices), target if asked is None else asked, table_row)


@dataclass(eq=False)
class _Remake:
    """Makes the maps of a method for other pictures.

    Attributes:
        explainer, target: what makes them.
        to_try: the picture and the map of an explanation from a table, which does not say how the cells were spread,
            for example. So the map of the picture itself is made first, and must be the one in the table.
    """

    explainer: Explainer
    target: Target
    to_try: tuple[Tensor, Float[np.ndarray, "*size"]] | None

    def __call__(self, pictures: Tensor, model: nn.Module | None) -> Sequence[Tensor]:
        """Return the heatmaps; with another model, at the same layers.

        Raises:
            UndefinedError: the map of the picture itself is another one.
        """
        explainer = self.explainer
        if self.to_try is not None:
            picture, heatmap = self.to_try
            if float(np.abs(explainer(picture, self.target).heatmap - heatmap).max()) > _SAME_HEAT:
                raise UndefinedError(
                    "needs_method",
                    "the metric makes the map again, and gets another map for the picture itself; pass the picture, "
                    "and an Explainer with the options, with which the map was made",
                )
            self.to_try = None
        if model is not None:
            layers = None
            if explainer.method.layer:
                # The layers are read on the model itself: weights without meaning must not decide on them.
                with contextlib.suppress(LayerError):
                    layers = explainer.layers
                if layers is None:
                    explainer(pictures[0], self.target)
                    layers = explainer.layers
            explainer = explainer.using(target_layer=layers, model=model)
        return [torch.from_numpy(made.heatmap) for made in explainer.batch(list(pictures), self.target)]


ScoresWithout: TypeAlias = Callable[[Bool[Tensor, "m *size"]], Float[np.ndarray, " m"]]
"""A function from masks, True where pixels are removed, to the scores of the picture without these pixels."""

GRID = 7
"""Cells along each axis of the reference maps: the grid of the usual networks at 224 pixels. Heat that is scattered
over single pixels would break any picture, and be a baseline that is too easy to beat."""

SIGMA = 0.25
"""Standard deviation of the centred blob as a share of each side."""


def grid_of(size: Sequence[int]) -> tuple[int, ...]:
    """Return the grid of the reference maps for an input of this size."""
    return tuple(min(GRID, side) for side in size)


def random_map(size: tuple[int, ...], seed: int | Sequence[int] = 0) -> Float[Tensor, "*size"]:
    """Return uniform random cells on a grid of 7 x 7, enlarged as heatmaps are; 0..1.

    >>> random_map((14, 14), seed=1).shape
    torch.Size([14, 14])
    """
    cells = np.random.default_rng(seed).uniform(size=grid_of(size)).astype(np.float32)
    return _scaled(enlarge(torch.from_numpy(cells)[None], size)[0])


def centred_map(size: tuple[int, ...]) -> Float[Tensor, "*size"]:
    """Return a Gaussian in the middle of the picture, SIGMA of each side wide; 0..1.

    Photographers put objects into the middle, so it is a strong baseline.
    """
    blob = torch.ones(())
    for side in size:
        places = (torch.arange(side) + 0.5) / side - 0.5
        blob = blob[..., None] * torch.exp(-((places / SIGMA) ** 2) / 2)
    return _scaled(blob)


def colours_of(picture: Float[Tensor, "c *size"]) -> Float[Tensor, "k c"]:
    """Return the single colours of a picture: each channel alone at its largest and at its smallest value, and all.

    Channels range from the smallest to the largest value of the picture. For RGB these are the 8 corners of the cube:
    black, white, red, green, blue, cyan, magenta and yellow; for grey pictures, black and white.
    """
    channels = len(picture)
    low, high = picture.flatten(1).amin(1), picture.flatten(1).amax(1)
    alone = torch.eye(channels, dtype=torch.bool)
    corners = torch.cat([torch.zeros(1, channels, dtype=torch.bool), alone])
    corners = torch.cat([corners, ~corners]).unique(dim=0)
    return torch.where(corners, high, low)


def colour_map(picture: Float[Tensor, "c *size"], colour: Float[Tensor, " c"]) -> Float[Tensor, "*size"]:
    """Return how near each cell of a 7 x 7 grid is to a colour: 1 at the nearest, 0 at the farthest; enlarged.

    The distance of a pixel is Euclidean, in the units of the model's input; a cell has the mean of its pixels.
    """
    distance = (picture - colour.reshape(-1, *[1] * (picture.dim() - 1))).norm(dim=0)
    size = tuple(distance.shape)
    cells = pooled(-distance, grid_of(size))
    return _scaled(enlarge((cells - cells.amin())[None], size)[0])


def reference_maps(
    picture: Float[Tensor, "c *size"], seed: int, without: ScoresWithout | None = None
) -> dict[str, Heat]:
    """Return the reference maps of a picture, as what an Evaluator judges.

    "random" differs between pictures and between seeds; "centre" is the blob. "colour" is the best single colour: of
    the maps of all colours, the one whose hotter half keeps the score highest and loses it most when it is removed
    (SRG in two steps, which takes two passes for each colour). If ``without`` is None, there is no "colour".
    """
    size = tuple(picture.shape[1:])

    def random(changed: Tensor) -> Tensor:
        # With one random map for all pictures, chance would not average out over a folder. The map would also be
        # coherent, since a changed picture would have the same one.
        return random_map(size, (seed, zlib.crc32(changed.contiguous().numpy().tobytes())))

    def centre(changed: Tensor) -> Tensor:  # noqa: ARG001 - every maker takes the picture
        return centred_map(size)

    makers: dict[str, Callable[[Tensor], Tensor]] = {"random": random, "centre": centre}
    problem = None
    if without is not None:
        colours = colours_of(picture)
        halves = torch.cat([hot_sets(colour_map(picture, colour), [0.5]) for colour in colours])
        try:
            best = int((without(~halves) - without(halves)).argmax())
        except UndefinedError as error:  # the model has no score for a changed picture
            problem, best = error, 0
        makers["colour"] = functools.partial(colour_map, colour=colours[best])
    return {
        name: Heat(
            make(picture),
            name,
            remake=functools.partial(_remade, make),
            problem=problem if name == "colour" else None,
        )
        for name, make in makers.items()
    }


def _remade(make: Callable[[Tensor], Tensor], pictures: Tensor, model: nn.Module | None) -> Sequence[Tensor]:  # noqa: ARG001
    """Return the reference maps of other pictures; they depend on no model."""
    return [make(picture.contiguous()) for picture in pictures]


def _scaled(values: Float[Tensor, "*size"]) -> Float[Tensor, "*size"]:
    """Divide a map without negative values by its maximum."""
    largest = values.max()
    return values / torch.where(largest > 0, largest, 1)
