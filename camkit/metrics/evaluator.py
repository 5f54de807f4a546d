"""The Evaluator: one picture and one target, for which maps are judged.

In the order of this file: the fills, which replace removed pixels; the Evaluator; the curves along which it removes
them; Heat, a map as metrics read it; the reference maps; the table of metrics; and the values that they return.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from camkit.engine.heatmap import cell_means, enlarge
from camkit.errors import InputError, LayerError, did_you_mean, whole_number
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation
from camkit.images.filling import fill_linearly, fill_smoothly
from camkit.layers.names import find_layers
from camkit.methods.registry import check_name
from camkit.models.loaded import Loadable
from camkit.tables import Rows, Tabular, markdown_table
from camkit.targets import Target, TargetLike
from camkit.targets.places import names_cells
from camkit.types import WHOLE_MODEL, ImageLike, TargetLayer

BLUR = 0.05
"""Standard deviation of the Gaussian blur as a share of each side: 11 pixels of 224. On 20 photos it leaves SqueezeNet
0.6 % of its mean confidence, and MobileNetV2 less than 0.1 %; with the 5 pixels of Petsiuk et al., SqueezeNet keeps
5 %."""

ROAD_NOISE = 0.01
"""Standard deviation of ROAD's noise, as a share of the picture's: the authors' code adds 0.01 to pictures whose
standard deviation is 1."""


def _draws(picture: Float[Tensor, "c *size"], seed: int) -> Float[Tensor, "c *size"]:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(picture.shape), np.float32))


def blur(
    picture: Float[Tensor, "c *size"],
    removed: Bool[Tensor, "m *size"],
    seed: int,  # noqa: ARG001 - nothing is drawn
) -> Float[Tensor, "m c *size"]:
    """Removed pixels come from the picture after a Gaussian blur along each axis.

    The window reaches three standard deviations to each side; beyond the picture's edges, the nearest pixel repeats.
    """
    smooth = picture
    for axis in range(1, picture.dim()):
        deviation = BLUR * picture.shape[axis]
        reach = max(1, round(3 * deviation))
        weights = np.exp(-((np.arange(-reach, reach + 1) / deviation) ** 2) / 2)
        lines = smooth.movedim(axis, -1)
        rows = np.ascontiguousarray(lines.reshape(-1, lines.shape[-1]).numpy())
        mean = cv2.sepFilter2D(rows, -1, weights / weights.sum(), np.ones(1), borderType=cv2.BORDER_REPLICATE)
        smooth = torch.from_numpy(mean.reshape(lines.shape)).movedim(-1, axis)
    return torch.where(removed[:, None], smooth.contiguous(), picture)


def mean(
    picture: Float[Tensor, "c *size"],
    removed: Bool[Tensor, "m *size"],
    seed: int,  # noqa: ARG001 - nothing is drawn
) -> Float[Tensor, "m c *size"]:
    """Removed pixels take the picture's mean colour."""
    return torch.where(removed[:, None], _channel(picture.flatten(1).mean(1), picture), picture)


def noise(picture: Float[Tensor, "c *size"], removed: Bool[Tensor, "m *size"], seed: int) -> Float[Tensor, "m c *size"]:
    """Removed pixels are normal noise with the mean and the standard deviation of each channel of the picture."""
    middle, spread = picture.flatten(1).mean(1), picture.flatten(1).std(1, unbiased=False)
    drawn = _channel(middle, picture) + _channel(spread, picture) * _draws(picture, seed)
    return torch.where(removed[:, None], drawn, picture)


def inpaint(
    picture: Float[Tensor, "c *size"],
    removed: Bool[Tensor, "m *size"],
    seed: int,  # noqa: ARG001 - nothing is drawn
) -> Float[Tensor, "m c *size"]:
    """Removed pixels are filled smoothly from what remains, as the background check does (Gortler et al. 1996, 3.4)."""
    if picture.dim() > 3:
        raise InputError("the fill 'inpaint' works on pictures and signals; choose 'blur', 'mean' or 'noise'")
    flat = picture if picture.dim() == 3 else picture[:, None]
    return torch.stack([fill_smoothly(flat, hole.reshape(flat.shape[1:])).reshape(picture.shape) for hole in removed])


def linear(
    picture: Float[Tensor, "c *size"], removed: Bool[Tensor, "m *size"], seed: int
) -> Float[Tensor, "m c *size"]:
    """Removed pixels are ROAD's noisy linear imputation: the weighted mean of their neighbours, and a little noise."""
    added = ROAD_NOISE * float(picture.std(unbiased=False)) * _draws(picture, seed)
    return torch.stack([fill_linearly(picture, hole) + hole * added for hole in removed])


def _channel(values: Float[Tensor, " c"], picture: Float[Tensor, "c *size"]) -> Tensor:
    return values.reshape(-1, *[1] * (picture.dim() - 1))


FILLS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "blur": blur,
    "mean": mean,
    "noise": noise,
    "inpaint": inpaint,
    "linear": linear,
}
"""The fills by name: ``fill=`` takes one of them. ``fill(picture, removed, seed)`` returns a copy of the picture
(C, *size) for each mask (M, *size), with new values where the mask is True; ``seed`` seeds random values."""

STEPS = 20
"""Steps of a curve: 5 % of the picture each. On photos, areas differ from those of 224 steps by less than 0.01."""

DEFAULTS = ("srg", "insertion", "deletion", "average-drop", "increase", "complexity", "feature-srg")
"""The metrics of a call that names none: those that need neither a region nor the map of another picture."""


class Evaluator:
    """Judges maps of one picture for one target.

    The picture is prepared, scored and filled once, and all maps share this. The model comes back from each call
    exactly as it went in. Every score is the probability of the target's class; a target without probabilities, such as
    a function, is judged by its own score.

    Args:
        model: an ``Explainer``, or what it takes as a model. Its preprocessing, precision and labels are used, and its
            layer for metrics in feature space.
        picture: what ``explainer(picture)`` takes.
        target: None for the picture's best class, or what ``explainer(picture, target)`` takes. The class that it is
            for the unchanged picture is judged in all changed ones.
        region: the pixels of the object, for metrics that compare the map with it: (H, W), True or above 0.5 inside,
            at the size of the model's input.
        fill: what replaces removed pixels: "blur", "mean", "noise", "inpaint" (as the background check fills)
            or "linear" (as ROAD fills); None for each metric's own.
        steps: into how many steps an order of cells is divided.
        layer: the layer of the metrics in feature space; None for the Explainer's.
        seed: of all random draws, from 0; equal calls give equal numbers.
        batch_size: pictures per pass; halved if memory runs out. None means 32 on a GPU and 4 on a CPU.

    Raises:
        InputError: an argument, the model or the picture is wrong.

    Attributes:
        scores: the model as a function from changed pictures to their scores.
        cells_of: the layer whose cells the metrics in feature space removed; empty before the first of them.

    Examples:
        >>> import camkit
        >>> explainer = camkit.Explainer("demo-fair")
        >>> plane = camkit.scenes.scene_paths()["plane-sky"]
        >>> evaluator = camkit.metrics.Evaluator(explainer, plane)
        >>> values = evaluator(explainer(plane), ["srg", "complexity"])
        >>> values["srg"].number > 0.1
        True
    """

    def __init__(
        self,
        model: Explainer | Loadable,
        picture: ImageLike,
        target: TargetLike | None = None,
        *,
        region: np.ndarray | Tensor | None = None,
        fill: str | None = None,
        steps: int = STEPS,
        layer: str | TargetLayer | None = None,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        if fill is not None and fill not in FILLS:
            raise InputError(f"fill must be one of {', '.join(FILLS)}, not {fill!r}")
        steps, seed = whole_number(steps, "steps", 1), whole_number(seed, "seed", 0)
        self.explainer = model if isinstance(model, Explainer) else Explainer(model)
        if layer is not None:
            find_layers(self.explainer.model, layer)
        self.scores = self.explainer.scores_of(picture, target, batch_size=batch_size)
        self.picture: Float[Tensor, "c *size"] = self.scores.picture.to("cpu", torch.float32)
        self.fill, self.steps, self.layer, self.seed = fill, steps, layer, seed
        self.region: Bool[Tensor, "*size"] | None = None
        if region is not None:
            numbers = _numbers(region)
            if tuple(numbers.shape) != self.size:
                raise InputError(
                    f"the region has shape {tuple(numbers.shape)}; it must have the size of the model's input, "
                    f"{self.size}"
                )
            self.region = numbers > 0.5
        self._emptied: dict[str, float] = {}
        self.emptied_features: dict[str, Tensor] = {}
        self.cells_of = ""

    @property
    def size(self) -> tuple[int, ...]:
        """The size of the model's input: (H, W), (L,) or (D, H, W)."""
        return tuple(self.picture.shape[1:])

    @property
    def target(self) -> Target:
        """The target, fixed."""
        return self.scores.target

    @property
    def confidence(self) -> float:
        """The score of the unchanged picture.

        Raises:
            UndefinedError: it is NaN or infinite.
        """
        if not math.isfinite(self.scores.confidence):
            raise UndefinedError("non_finite", "the model's score of the unchanged picture is NaN or infinite")
        return self.scores.confidence

    @property
    def positive_confidence(self) -> float:
        """The score of the unchanged picture, for metrics that return a share of it.

        Raises:
            UndefinedError: it is NaN or infinite, or not positive.
        """
        if not self.confidence > 0:
            reason = f"this metric needs a positive score; it is {self.confidence:.3g}"
            raise UndefinedError("undefined", reason)
        return self.confidence

    def __call__(self, given: MapLike, metrics: str | Iterable[str] | None = None) -> Values:
        """Judge one map.

        Args:
            given: an explanation of this picture, or an array: at the size of the model's input, or coarser, which is
                enlarged bilinearly.
            metrics: names from ``camkit.metrics.METRICS``; None for ``camkit.metrics.DEFAULTS``.

        Returns:
            A ``Value`` for each metric. A metric that has no value says so in its ``status``.

        Raises:
            InputError: a name is unknown, or the map is not one of this picture.
        """
        chosen, heat = _chosen(metrics), self.heat(given)
        return Values({metric.name: self._value(metric, heat) for metric in chosen})

    def table(self, maps: Mapping[str, MapLike], metrics: str | Iterable[str] | None = None) -> ValueTable:
        """Judge several maps and the reference maps: a random one, a centred blob, and the best single colour.

        Args:
            maps: the maps by the names of their rows.
            metrics: as for one map.

        Raises:
            InputError: as for one map.
        """
        named = [metric.name for metric in _chosen(metrics)]
        rows = {name: self(given, named) for name, given in maps.items()}
        known = {f"{name} map" if name in rows else name: heat for name, heat in self.references().items()}
        return ValueTable(rows | {name: self(heat, named) for name, heat in known.items()}, tuple(known))

    def references(self, *, colour: bool = True) -> dict[str, Heat]:
        """Return the reference maps of the picture: "random", "centre" and "colour".

        "random" differs between pictures and between seeds; "centre" is a blob in the middle. "colour" is the best
        single colour: of the maps of all colours, the one whose hotter half keeps the score highest and loses it most
        when it is removed (SRG in two steps, which takes two passes for each colour).

        Args:
            colour: False leaves out "colour", for which the model runs 16 times.
        """
        size, seed = self.size, self.seed

        def at_random(picture: Tensor) -> Tensor:
            # With one random map for all pictures, chance would not average out over a folder. The map would also be
            # coherent, since a changed picture would have the same one.
            return random_map(size, (seed, zlib.crc32(picture.contiguous().numpy().tobytes())))

        def reference(make: Callable[[Tensor], Tensor], problem: UndefinedError | None = None) -> Heat:
            # The reference maps of other pictures need no model
            return Heat(make(self.picture), remake=lambda pictures, _: [*map(make, pictures)], problem=problem)

        found = {"random": reference(at_random), "centre": reference(lambda _: centred_map(size))}
        if colour:
            best, problem = 0, None
            colours = colours_of(self.picture)
            halves = torch.cat([hot_sets(colour_map(self.picture, each), [0.5]) for each in colours])
            try:
                best = int((self.without(~halves, "blur") - self.without(halves, "blur")).argmax())
            except UndefinedError as error:  # the model has no score for a changed picture
                problem = error
            found["colour"] = reference(functools.partial(colour_map, colour=colours[best]), problem)
        return found

    def heat(self, given: MapLike) -> Heat:
        """Return a map as metrics read it.

        Args:
            given: as for one map.

        Raises:
            InputError: the map belongs to another picture or target.
        """
        wanted = "x".join(map(str, self.size))
        if isinstance(given, Explanation):
            mine = self.scores.answer.indices
            if given.target is not None and mine is not None and given.target != mine[0]:
                raise InputError(
                    f"the explanation is of class {given.target}, and class {mine[0]} is judged; pass target"
                )
            given = _of_explanation(given, self.explainer, self.target)
        elif not isinstance(given, Heat):
            values = _numbers(given)
            if values.dim() != len(self.size) or not values.numel():
                raise InputError(
                    f"the map has shape {tuple(values.shape)}, and the model's input has size {wanted}; pass a map "
                    f"with {len(self.size)} axes"
                )
            given = Heat(values if tuple(values.shape) == self.size else enlarge(values[None], self.size)[0])
        if tuple(given.values.shape) != self.size:
            raise InputError(
                f"the map is for an input of {'x'.join(map(str, given.values.shape))}, but this picture's input is "
                f"{wanted}; pass the picture that was explained, or the map as an array"
            )
        if given.problem is None and not bool(torch.isfinite(given.values).all()):
            return replace(given, problem=UndefinedError("non_finite", "the map contains NaN or infinity"))
        if given.problem is None and not bool(given.values.any()):
            return replace(given, problem=UndefinedError("empty_map", "the map is zero everywhere"))
        return given

    def _value(self, metric: Metric, heat: Heat) -> Value:
        fill = metric.fill and (self.fill or metric.fill)
        try:
            if heat.problem is not None:
                raise heat.problem
            measured: Any = metric.measure(self, heat)
        except UndefinedError as error:
            return Value(metric.name, None, error.status, str(error), fill)
        number = float(measured.detach() if isinstance(measured, Tensor) else measured)
        if not math.isfinite(number):
            return Value(metric.name, None, "non_finite", f"{metric.title} is {number} for this map", fill)
        return Value(metric.name, number, fill=fill)

    # --- what metrics use

    def without(self, removed: Bool[Tensor, "m *size"], fill: str) -> Float[np.ndarray, " m"]:
        """Return the scores of the picture without the pixels of each mask, filled one pass at a time.

        Args:
            removed: the masks, True where pixels are removed.
            fill: what takes their place.

        Raises:
            UndefinedError: a score is NaN or infinite.
        """
        parts = removed.split(self.scores.at_once)
        filled = (FILLS[fill](self.picture, part, self.seed) for part in parts)
        return np.concatenate([np.zeros(0), *map(self.scored, filled)])

    def scored(self, pictures: Float[Tensor, "m c *size"]) -> Float[np.ndarray, " m"]:
        """Return the scores of changed pictures, as float64.

        Raises:
            UndefinedError: a score is NaN or infinite.
        """
        scores = self.scores(pictures).double().numpy()
        if not np.isfinite(scores).all():
            raise UndefinedError("non_finite", "the model's score of a changed picture is NaN or infinite")
        return np.asarray(scores)

    def emptied_picture(self, fill: str) -> Float[Tensor, "c *size"]:
        """Return the picture with all pixels removed."""
        return FILLS[fill](self.picture, torch.ones(1, *self.size, dtype=torch.bool), self.seed)[0]

    def emptied(self, fill: str) -> float:
        """Return the score of the picture with all pixels removed."""
        if fill not in self._emptied:
            self._emptied[fill] = float(self.scored(self.emptied_picture(fill)[None])[0])
        return self._emptied[fill]

    def curve(self, heat: Heat, usual_fill: str, *, kept: bool) -> Curve:
        """Return the score along the hot sets: of what the sets hold (``kept``), or of the picture without them.

        Args:
            heat: the map; it keeps the curve, which several metrics share.
            usual_fill: what replaces removed pixels, unless the Evaluator has a fill for all metrics.
            kept: which of the two curves.

        Raises:
            UndefinedError: all cells of the map are equal, or a score is not finite.
        """
        fill = self.fill or usual_fill
        key = (self.scores, fill, kept)
        if key not in heat.curves:
            heat.curves[key] = self._along(heat, even_shares(self.steps), fill, kept=kept)
        return heat.curves[key]

    def scores_at(self, heat: Heat, shares: Sequence[float], usual_fill: str, *, kept: bool) -> Float[np.ndarray, " k"]:
        """Return the score at some shares of a curve.

        If equal cells leave no hot set of a share, the score is interpolated between the next smaller and the next
        larger set, as it is for the area under a curve.

        Args:
            heat, usual_fill, kept: as for ``curve``.
            shares: ascending, above 0 and below 1.

        Raises:
            UndefinedError: as for ``curve``.
        """
        curve = self._along(heat, shares, self.fill or usual_fill, kept=kept)
        wanted = np.array(cells_of(shares, heat.values.numel())) / heat.values.numel()
        return np.asarray(np.interp(wanted, curve.shares, curve.scores))

    def _along(self, heat: Heat, shares: Sequence[float], fill: str, *, kept: bool) -> Curve:
        """Return the curve through the hot sets of these shares, and through the empty set and that of all cells."""
        heat.check_order()
        sets = curve_sets(heat.values, shares)
        between = self.without(~sets if kept else sets, fill)
        ends = (self.emptied(fill), self.confidence)
        first, last = ends if kept else ends[::-1]
        return Curve(sets, np.concatenate([[first], between, [last]]))


def _chosen(metrics: str | Iterable[str] | None) -> list[Metric]:
    names = DEFAULTS if metrics is None else (metrics,) if isinstance(metrics, str) else metrics
    return [find_metric(name) for name in names]


class Curve:
    """The model's confidence along the hot sets of a map, from the empty set to all cells.

    Args:
        sets: the hot sets between these two.
        scores: the confidence for each set, the empty one and that of all cells included.

    Attributes:
        shares: the share of the cells in each hot set, from 0 to 1.
        scores: the confidence for each.
    """

    def __init__(self, sets: Bool[Tensor, "k *size"], scores: Float[np.ndarray, " k+2"]) -> None:
        shares = sets.flatten(1).double().mean(1).numpy()
        self.shares, self.scores = np.concatenate([[0.0], shares, [1.0]]), scores

    @property
    def area(self) -> float:
        """The area under the curve, by trapezoids; in the unit of the scores."""
        return float(((self.scores[1:] + self.scores[:-1]) / 2 * np.diff(self.shares)).sum())


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
    counts, first = np.unique(both.flatten(1).sum(1).numpy(), return_index=True)  # in order, each size once
    return both[first[(counts > 0) & (counts < heat.numel())]]


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


MapLike: TypeAlias = "Explanation | Heat | np.ndarray | Tensor"
"""What is judged: an explanation; or an array of the input's size, or a coarser one that is enlarged bilinearly."""


@dataclass(frozen=True, eq=False)
class Heat:
    """A map to be judged.

    Attributes:
        values: the map at the size of the input, float32 on the CPU. An explanation's heatmap is 0..1; an array may
            have any sign and scale, of which metrics that order cells read the order only.
        cells: the map on the grid of its layer, without negative values; None for a map of no single layer.
        remake: ``remake(pictures, model)`` makes the maps of other pictures (N, C, *size), with another model unless
            that is None; None if camkit does not know how.
        problem: why the map cannot be judged; None if it can.
        curves: the curves that were already measured for this map.
    """

    values: Float[Tensor, "*size"]
    cells: Float[Tensor, "*grid"] | None = None
    remake: Callable[[Tensor, nn.Module | None], Sequence[Tensor]] | None = None
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
                "this metric computes the map again, and an array or a row of a table does not say how; pass the "
                "explanation of the picture",
            )
        return [made.detach().to("cpu", torch.float32) for made in self.remake(pictures, model)]


def _numbers(given: np.ndarray | Tensor) -> Float[Tensor, "..."]:
    if isinstance(given, Tensor):
        return given.detach().to("cpu", torch.float32)
    return torch.from_numpy(np.array(given, np.float32))  # a copy: PyTorch takes no mirrored or big-endian array


def _of_explanation(explanation: Explanation, explainer: Explainer, target: Target) -> Heat:
    """Return the heat of an explanation; one of a table does not say how it was made."""
    values = torch.from_numpy(np.asarray(explanation.heatmap, np.float32))
    problem = cells = remake = None
    if explanation.status == "non_finite":
        problem = UndefinedError("non_finite", "the map contains NaN or infinity")
    elif explanation.status != "ok":
        problem = UndefinedError("empty_map", f"the map is empty ({explanation.status})")
    is_single = len(explanation.maps.raws) == 1 and not explanation.placement.extent
    if is_single and explanation.layer != str(WHOLE_MODEL):
        cells = torch.from_numpy(np.maximum(explanation.raw, 0))
    if (made := explanation.made) is not None:
        options, method = explainer.choices.options, made.choices.method
        own = made.choices.but(progress=options["progress"], batch_size=options["batch_size"])
        own = replace(own, target_layer=explanation.layer if method.layer else None)
        remake = functools.partial(_made_again, explainer.choosing(own), made.target or target)
    return Heat(values, cells, remake, problem)


def _made_again(explainer: Explainer, target: Target, pictures: Tensor, model: nn.Module | None) -> Sequence[Tensor]:
    """Return the heatmaps of other pictures; with another model, at the same layers."""
    if model is not None:
        layers = None
        if explainer.method.layer:
            # The model itself chooses the layers; shuffled weights must not.
            with contextlib.suppress(LayerError):
                layers = explainer.layers
            if layers is None:
                explainer(pictures[0], target)
                layers = explainer.layers
        explainer = explainer.using(target_layer=layers, model=model)
    return [torch.from_numpy(made.heatmap) for made in explainer.batch(list(pictures), target)]


def grid_of(size: Sequence[int]) -> tuple[int, ...]:
    """Return the grid of the reference maps for an input of this size."""
    # Cells along each axis of the reference maps: the grid of the usual networks at 224 pixels. Heat that is scattered
    # over single pixels would break any picture, and be a baseline that is too easy to beat.
    return tuple(min(7, side) for side in size)


def random_map(size: tuple[int, ...], seed: int | Sequence[int] = 0) -> Float[Tensor, "*size"]:
    """Return uniform random cells on a grid of 7 x 7, enlarged as heatmaps are; 0..1.

    >>> random_map((14, 14), seed=1).shape
    torch.Size([14, 14])
    """
    cells = np.random.default_rng(seed).uniform(size=grid_of(size)).astype(np.float32)
    return _scaled(enlarge(torch.from_numpy(cells)[None], size)[0])


def centred_map(size: tuple[int, ...]) -> Float[Tensor, "*size"]:
    """Return a Gaussian in the middle of the picture, whose standard deviation is a quarter of each side; 0..1.

    Photographers put objects into the middle, so it is a strong baseline.
    """
    blob = torch.ones(())
    for side in size:
        places = (torch.arange(side) + 0.5) / side - 0.5
        blob = blob[..., None] * torch.exp(-((places / 0.25) ** 2) / 2)
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
    cells = cell_means(-distance[None], grid_of(size))[0]
    return _scaled(enlarge((cells - cells.amin())[None], size)[0])


def _scaled(values: Float[Tensor, "*size"]) -> Float[Tensor, "*size"]:
    """Divide a map without negative values by its maximum."""
    largest = values.max()
    return values / torch.where(largest > 0, largest, 1)


Better: TypeAlias = Literal["higher", "lower"]
Space: TypeAlias = Literal["input", "features", "map", "model"]
Measure: TypeAlias = Callable[..., float]
"""``measure(evaluator, heat)`` returns a metric's value for a map, or raises ``UndefinedError``."""


@dataclass(frozen=True)
class Metric:
    """One way to judge a map.

    Attributes:
        name: what ``metrics=`` takes.
        title: the name as people write it.
        summary: one line of what it says.
        paper: where the formula comes from.
        better: whether a "higher" or a "lower" value is better.
        space: what is changed: the "input" of the model, the "features" of a layer (the head alone is run), the
            "model" and its weights, or nothing at all: a value of the "map" alone. Values of different spaces do not
            belong into one column.
        cost: the time it takes, in plain passes of the model for one picture.
        faithful: whether it tests that the map shows what the model used. The others test the map's form, its
            stability, or where it lies.
        fill: what replaces removed pixels unless the call says otherwise; empty if none are removed, or if
            the metric's definition fixes it.
        needs_region: whether it compares the map with the region of an object, so that the Evaluator needs one.
        measure: ``measure(evaluator, heat)`` returns the value, or raises ``UndefinedError``.
    """

    name: str
    title: str
    summary: str
    paper: str
    better: Better
    space: Space
    cost: str
    faithful: bool
    fill: str
    needs_region: bool
    measure: Measure


METRICS: dict[str, Metric] = {}
"""Every metric by its name, the user's own included."""


def register_metric(
    name: str,
    *,
    title: str | None = None,
    summary: str = "",
    paper: str = "",
    better: Better = "higher",
    space: Space = "input",
    cost: str = "",
    faithful: bool = False,
    fill: str = "",
    needs_region: bool = False,
    replace: bool = False,
) -> Callable[[Measure], Measure]:
    """Add a metric to ``camkit.metrics.METRICS`` under a name, as a decorator.

    The function gets the ``Evaluator``, which runs the model on changed pictures, and the ``Heat``, and returns a
    number. It raises ``camkit.metrics.UndefinedError`` if there is none.

    Args:
        name: what ``metrics=`` takes: letters, digits, ``+``, ``-``, ``_`` and ``.``.
        title, summary, paper, better, space, cost, faithful, fill, needs_region: as in ``Metric``.
        replace: allow a name that is taken, for example when a notebook cell runs again.

    Raises:
        InputError: the name is taken or has other characters.

    Examples:
        >>> from camkit import metrics
        >>> @metrics.register_metric("peak-share", better="higher", space="map", cost="0")
        ... def peak_share(evaluator, heat):
        ...     return float(heat.values.max() / heat.values.sum())
        >>> del metrics.METRICS["peak-share"]  # forgets it again
    """
    check_name(name, "metric", InputError, taken=name in METRICS and not replace)

    def add(function: Measure) -> Measure:
        METRICS[name] = Metric(
            name, title or name, summary, paper, better, space, cost, faithful, fill, needs_region, function
        )
        return function

    return add


def find_metric(name: str) -> Metric:
    """Return the metric with a name.

    Raises:
        InputError: there is none; the message suggests the nearest.
    """
    if name in METRICS:
        return METRICS[name]
    raise InputError(f"unknown metric {name!r}{did_you_mean(name, METRICS) or '; choose from ' + ', '.join(METRICS)}")


# --- what metrics return

Row = TypeVar("Row")


@dataclass(frozen=True, eq=False)
class OfModel(Tabular, Generic[Row]):
    """Results that were measured on one model.

    Attributes:
        model: the model's name.
        rows: the results.
        unreadable: pictures that could not be used, with the reason.
    """

    model: str
    rows: tuple[Row, ...]
    unreadable: dict[str, str]


ValueStatus: TypeAlias = Literal[
    "ok", "empty_map", "constant_map", "non_finite", "needs_method", "needs_region", "undefined"
]


class UndefinedError(Exception):
    """A metric has no value for a map; it becomes the status of a ``Value``, and no error.

    Args:
        status: one of the statuses of ``Value``.
        reason: a sentence without a full stop.
    """

    def __init__(self, status: ValueStatus, reason: str) -> None:
        super().__init__(reason)
        self.status: ValueStatus = status


@dataclass(frozen=True)
class Value:
    """The value of one metric for one map.

    Attributes:
        metric: the metric's name.
        number: the value; None unless ``status`` is "ok".
        status: "ok", or why there is no number: "empty_map", the map shows no evidence; "constant_map", all its cells
            are equal, so they have no order; "non_finite", the map or a score of the model is NaN or infinite;
            "needs_method", the map was passed as an array, and the metric makes it anew; "needs_region", the metric
            compares the map with a region and there is none; "undefined" for everything else, as ``reason`` says.
        reason: a sentence about the status; empty for "ok".
        fill: what replaced removed pixels; empty if nothing was removed.
    """

    metric: str
    number: float | None
    status: ValueStatus = "ok"
    reason: str = ""
    fill: str = ""

    def __str__(self) -> str:
        """Return the number with three digits, or the status in words."""
        words = {"non_finite": "not finite", "needs_method": "needs the method", "needs_region": "needs a region"}
        said = words.get(self.status, self.status.replace("_", " "))
        return said if self.number is None else f"{self.number:.3f}"

    def to_dict(self) -> dict[str, Any]:
        """Return the value as plain JSON values."""
        return {"value" if name == "number" else name: value for name, value in asdict(self).items()}


class Values(dict[str, Value]):
    """The values of one map, by the metric's name."""

    def numbers(self) -> dict[str, float | None]:
        """Return the plain numbers; None where there is none."""
        return {name: value.number for name, value in self.items()}

    def __repr__(self) -> str:
        """Return, for example, ``<srg 0.412, insertion 0.721>``."""
        return f"<{', '.join(f'{name} {value}' for name, value in self.items())}>"


@dataclass(frozen=True, repr=False)
class ValueTable(Tabular):
    """The values of several maps of one picture: a row for each map, and one for each reference map.

    Attributes:
        rows: the values by the map's name; the reference maps come last.
        references: the names of the rows that are reference maps.
    """

    rows: Mapping[str, Values]
    references: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the table in Markdown; the arrow behind a metric shows which direction is better."""
        names = list(dict.fromkeys(name for row in self.rows.values() for name in row))
        arrows = [f"{name} {'↑' if METRICS[name].better == 'higher' else '↓'}" for name in names]
        rows = []
        for title, row in self.rows.items():
            shown = f"({title})" if title in self.references else title
            rows.append([shown, *(str(row[name]) if name in row else "" for name in names)])
        return markdown_table(["map", *arrows], rows)

    def __repr__(self) -> str:
        """Return a line with the names of the maps."""
        return f"<ValueTable of {', '.join(self.rows)}>"

    def table(self) -> Rows:
        """Return a row for each map, with the number of each metric; None where there is none."""
        return [
            {"map": name, "reference": name in self.references, **values.numbers()}
            for name, values in self.rows.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain JSON values."""
        rows = {title: {name: value.to_dict() for name, value in values.items()} for title, values in self.rows.items()}
        return {"rows": rows, "references": list(self.references)}


# --- in one call


def evaluate(
    model: Explainer | Loadable,
    given: MapLike,
    picture: ImageLike,
    metrics: str | Iterable[str] | None = None,
    *,
    target: TargetLike | None = None,
    **options: Any,
) -> Values:
    """Judge one map of one picture. For several maps, an ``Evaluator`` prepares the picture once.

    Args:
        model: an ``Explainer``, or what it takes as a model.
        given: an explanation of this picture, or an array: at the size of the model's input, or coarser, which is
            enlarged bilinearly.
        picture: what was explained.
        metrics: names from ``METRICS``; None for ``DEFAULTS``.
        target: what the map is for; None for the class of the explanation, or for the picture's best class if the map
            is an array.
        **options: ``region``, ``fill``, ``steps``, ``layer``, ``seed`` and ``batch_size`` as for ``Evaluator``.

    Returns:
        A ``Value`` for each metric: a number, or the reason why there is none.

    Raises:
        InputError: an argument, the model, the picture or the map is wrong.

    Examples:
        >>> import camkit
        >>> plane = camkit.scenes.scene_paths()["plane-sky"]
        >>> camkit.metrics.evaluate("demo-fair", camkit.explain("demo-fair", plane), plane, ["complexity"])
        <complexity 0...>
    """
    if isinstance(given, Explanation) and target is None:
        if given.target is None or (given.made is None and names_cells(given.quantity)):
            raise InputError(
                f"the explanation of {given.name!r} ({given.quantity}) is not of a single class; pass its target"
            )
        target = given.target if given.made is None else given.made.target or given.target
    return Evaluator(model, picture, target, **options)(given, metrics)


def references(
    model: Explainer | Loadable, picture: ImageLike, target: TargetLike | None = None, **options: Any
) -> dict[str, Heat]:
    """Return the maps that every table has for comparison: "random", "centre" and "colour".

    A random map of 7 x 7 cells; a Gaussian in the middle; and how near the cells are to a single colour, for the best
    of the corners of the picture's colour cube. The best is the colour whose hotter half of the picture keeps the score
    highest and loses it most when it is removed. Apart from that choice, none of them uses the model.

    Args:
        model, picture, target: as for ``evaluate``.
        **options: as for ``evaluate``; ``seed`` is that of the random map.

    Returns:
        A ``Heat`` for each, which ``Evaluator`` judges like an explanation; ``.values`` is the map at the size of the
        model's input.

    Raises:
        InputError: an argument, the model or the picture is wrong.
    """
    return Evaluator(model, picture, target, **options).references()
