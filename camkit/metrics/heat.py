"""A map to be judged: its values at the size of the input, and how it is made for another picture or model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from camkit.engine.heatmap import enlarge
from camkit.errors import InputError, LayerError
from camkit.explainer import Explainer
from camkit.explanation import Explanation
from camkit.methods import known_method
from camkit.metrics.curves import Curve
from camkit.metrics.registry import UndefinedError
from camkit.targets import Target
from camkit.types import WHOLE_MODEL

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
    choices = replace(
        how,
        method=method,
        target_layer=explanation.layer if method.layer else None,
        fuse=explanation.maps.fuse,
        smooth=explanation.smooth,
        progress=own.progress,
        batch_size=own.batch_size,
    )
    kept = None if made is None else made.target
    table_row = None if made is not None else (picture, explanation.heatmap)
    return _Remake(explainer.choosing(choices), target if kept is None else kept, table_row)


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
