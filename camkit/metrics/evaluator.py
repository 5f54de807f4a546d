"""The Evaluator: one picture and one target, for which maps are judged; and what replaces removed pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from camkit.errors import InputError, refusing_other_arguments
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation
from camkit.images.filling import fill_linearly, fill_smoothly
from camkit.layers.names import find_layers
from camkit.metrics.heat import (
    Curve,
    Heat,
    as_heat,
    cells_of,
    curve_sets,
    even_shares,
    real_values,
    reference_maps,
    shares_of,
)
from camkit.metrics.registry import Metric, UndefinedError, Value, Values, ValueTable, find_metric
from camkit.targets.outputs import describe
from camkit.types import ImageLike

if TYPE_CHECKING:
    from camkit.metrics.heat import MapLike
    from camkit.models.loaded import Loadable
    from camkit.targets import Target, TargetLike
    from camkit.types import TargetLayer


Remove: TypeAlias = Callable[[Tensor], Tensor]

BLUR = 0.05
"""Standard deviation of the Gaussian blur as a share of each side: 11 pixels of 224. On 20 photos it leaves SqueezeNet
0.6 % of its mean confidence, and MobileNetV2 less than 0.1 %; with the 5 pixels of Petsiuk et al., SqueezeNet keeps
5 %."""

ROAD_NOISE = 0.01
"""Standard deviation of ROAD's noise, as a share of the picture's: the authors' code adds 0.01 to pictures whose
standard deviation is 1."""


def _replaced(picture: Float[Tensor, "c *size"], other: Float[Tensor, "c *size"]) -> Remove:
    def filled(removed: Bool[Tensor, "m *size"]) -> Float[Tensor, "m c *size"]:
        return torch.where(removed[:, None], other, picture)

    return filled


def _draws(picture: Float[Tensor, "c *size"], seed: int) -> Float[Tensor, "c *size"]:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(picture.shape), np.float32))


def blurred(picture: Float[Tensor, "c *size"]) -> Float[Tensor, "c *size"]:
    """Return a picture after a Gaussian blur along each axis; beyond its edges, the nearest pixel repeats.

    The window reaches three standard deviations to each side.
    """
    for axis in range(1, picture.dim()):
        deviation = BLUR * picture.shape[axis]
        reach = max(1, round(3 * deviation))
        weights = np.exp(-((np.arange(-reach, reach + 1) / deviation) ** 2) / 2)
        lines = picture.movedim(axis, -1)
        rows = np.ascontiguousarray(lines.reshape(-1, lines.shape[-1]).numpy())
        mean = cv2.sepFilter2D(rows, -1, weights / weights.sum(), np.ones(1), borderType=cv2.BORDER_REPLICATE)
        picture = torch.from_numpy(mean.reshape(lines.shape)).movedim(-1, axis)
    return picture.contiguous()


def blur(picture: Float[Tensor, "c *size"], seed: int) -> Remove:  # noqa: ARG001 - nothing is drawn
    """Removed pixels come from the blurred picture."""
    return _replaced(picture, blurred(picture))


def mean(picture: Float[Tensor, "c *size"], seed: int) -> Remove:  # noqa: ARG001 - nothing is drawn
    """Removed pixels take the picture's mean colour."""
    return _replaced(picture, _channel(picture.flatten(1).mean(1), picture).expand_as(picture))


def noise(picture: Float[Tensor, "c *size"], seed: int) -> Remove:
    """Removed pixels are normal noise with the mean and the standard deviation of each channel of the picture."""
    middle, spread = picture.flatten(1).mean(1), picture.flatten(1).std(1, unbiased=False)
    return _replaced(picture, _channel(middle, picture) + _channel(spread, picture) * _draws(picture, seed))


def inpaint(picture: Float[Tensor, "c *size"], seed: int) -> Remove:  # noqa: ARG001 - nothing is drawn
    """Removed pixels are filled smoothly from what remains, as the background check does (Gortler et al. 1996, 3.4)."""
    if picture.dim() > 3:
        raise InputError("the fill 'inpaint' works on pictures and signals; choose 'blur', 'mean' or 'noise'")
    flat = picture if picture.dim() == 3 else picture[:, None]

    def filled(removed: Bool[Tensor, "m *size"]) -> Float[Tensor, "m c *size"]:
        made = [fill_smoothly(flat, hole.reshape(flat.shape[1:])).reshape(picture.shape) for hole in removed]
        return torch.stack(made)

    return filled


def linear(picture: Float[Tensor, "c *size"], seed: int) -> Remove:
    """Removed pixels are ROAD's noisy linear imputation: the weighted mean of their neighbours, and a little noise."""
    added = ROAD_NOISE * float(picture.std(unbiased=False)) * _draws(picture, seed)

    def filled(removed: Bool[Tensor, "m *size"]) -> Float[Tensor, "m c *size"]:
        return torch.stack([fill_linearly(picture, hole) + hole * added for hole in removed])

    return filled


def _channel(values: Float[Tensor, " c"], picture: Float[Tensor, "c *size"]) -> Tensor:
    return values.reshape(-1, *[1] * (picture.dim() - 1))


FILLS: Mapping[str, Callable[[Tensor, int], Remove]] = {
    "blur": blur,
    "mean": mean,
    "noise": noise,
    "inpaint": inpaint,
    "linear": linear,
}
"""The fills by name: ``fill=`` takes one of them."""


ModelLike: TypeAlias = "Explainer | Loadable"

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
        model: ModelLike,
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
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise InputError(f"steps must be a whole number from 1, not {steps!r}")
        check_seed(seed)
        self.explainer = model if isinstance(model, Explainer) else Explainer(model)
        if layer is not None:
            find_layers(self.explainer.model, layer)
        self.scores = self.explainer.scores_of(picture, target, batch_size=batch_size)
        self.picture: Float[Tensor, "c *size"] = self.scores.picture.to("cpu", torch.float32)
        self.fill, self.steps, self.layer, self.seed = fill, steps, layer, seed
        self.region: Bool[Tensor, "*size"] | None = None
        if region is not None:
            numbers = real_values(region, "the region is an array")
            if tuple(numbers.shape) != self.size:
                raise InputError(
                    f"the region has shape {tuple(numbers.shape)}; it must have the size of the model's input, "
                    f"{self.size}"
                )
            self.region = numbers > 0.5
        self._fills: dict[str, Remove] = {}
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
        chosen = [find_metric(name) for name in _names(metrics)]
        heat = self.heat(given)
        return Values({metric.name: self._value(metric, heat) for metric in chosen})

    def table(self, maps: Mapping[str, MapLike], metrics: str | Iterable[str] | None = None) -> ValueTable:
        """Judge several maps and the reference maps: a random one, a centred blob, and the best single colour.

        Args:
            maps: the maps by the names of their rows.
            metrics: as for one map.

        Raises:
            InputError: as for one map.
        """
        named = list(_names(metrics))
        rows = {name: self(given, named) for name, given in maps.items()}
        known = {f"{name} map" if name in rows else name: heat for name, heat in self.references().items()}
        return ValueTable(rows | {name: self(heat, named) for name, heat in known.items()}, tuple(known))

    def references(self, *, colour: bool = True) -> dict[str, Heat]:
        """Return the reference maps of the picture: "random", "centre" and "colour", as ``references`` describes.

        Args:
            colour: False leaves out "colour", for which the model runs 16 times.
        """
        return reference_maps(self.picture, self.seed, partial(self.without, fill="blur") if colour else None)

    def heat(self, given: MapLike) -> Heat:
        """Return a map as metrics read it.

        Args:
            given: as for one map.

        Raises:
            InputError: the map is not one of this picture and target.
        """
        if isinstance(given, Explanation):
            mine = self.scores.answer.indices
            if given.target is not None and mine is not None and given.target != mine[0]:
                raise InputError(
                    f"the explanation is of class {given.target}, and class {mine[0]} is judged; pass target"
                )
        return as_heat(given, self.explainer, self.target, self.picture)

    def _value(self, metric: Metric, heat: Heat) -> Value:
        fill = metric.fill and (self.fill or metric.fill)
        try:
            if heat.problem is not None:
                raise heat.problem
            with refusing_other_arguments(metric.measure, 2, InputError, f"metric {metric.name!r}"):
                measured = metric.measure(self, heat)
        except UndefinedError as error:
            return Value(metric.name, None, error.status, str(error), fill)
        try:
            number = float(measured.detach() if isinstance(measured, Tensor) else measured)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # NumPy and PyTorch raise several
            raise InputError(f"metric {metric.name!r} must return a number, not {describe(measured)}") from error
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
        return np.concatenate([np.zeros(0), *(self.scored(self._filled(part, fill)) for part in parts)])

    def _filled(self, removed: Bool[Tensor, "m *size"], fill: str) -> Float[Tensor, "m c *size"]:
        if fill not in self._fills:
            self._fills[fill] = FILLS[fill](self.picture, self.seed)
        return self._fills[fill](removed)

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
        return self._filled(torch.ones(1, *self.size, dtype=torch.bool), fill)[0]

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
        return Curve(np.concatenate([[0.0], shares_of(sets), [1.0]]), np.concatenate([[first], between, [last]]))


def check_seed(seed: object) -> None:
    """Refuse what numpy's generators do not take as a seed.

    Raises:
        InputError: it is no whole number from 0.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed must be a whole number from 0, not {seed!r}")


def _names(metrics: str | Iterable[str] | None) -> Iterable[str]:
    if metrics is None:
        return DEFAULTS
    return (metrics,) if isinstance(metrics, str) else tuple(metrics)
