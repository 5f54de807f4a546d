"""Evidence 1: where the heat lies, compared with a blind map and with a perfect map on the same regions.

Notation for each image: h >= 0 is the class map at the size of the input, M is the object's region; both are (H, W).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from pydantic import PlainSerializer, PlainValidator, TypeAdapter
from torch import Tensor

from camkit.background.data import Item
from camkit.background.experiment import batches_of_one_shape
from camkit.background.plan import NO_ANSWER, Answer, Plan, answers_of
from camkit.background.regions import in_pixels, object_region
from camkit.engine.heatmap import enlarge
from camkit.errors import CamkitError, advice
from camkit.explaining.explanation import Explanation
from camkit.images.filling import POINTING_TOLERANCE, dilated
from camkit.images.prepare import prepare
from camkit.images.read import open_picture
from camkit.images.regions import CropBoxes, check_crop, preprocess_region
from camkit.kit.store import PictureRow, RowKind, packed, unpacked
from camkit.models import black_box_in
from camkit.targets import EachTarget, logits_of
from camkit.targets.scores import ScoreReading, Scores, Target
from camkit.types import EVEN, Activation, Failure, Placement


def measure(
    heat: Float[Tensor, "h w"],
    region: Bool[Tensor, "h w"],
    view: Bool[Tensor, "h w"],
    grid: tuple[int, int],
    placement: Placement = EVEN,
) -> dict[str, float]:
    """Measure how one map fits one region, without regard to the other maps, by the names in ``ImageRow``.

    The map must have some heat and the region some pixels.

    Args:
        heat: the map at the size of the model's input.
        region: the object's pixels.
        view: the pixels that show the picture and not padding.
        grid: rows and columns of the map before upsampling.
        placement: where its cells lie on the input.

    Returns:
        ``ceiling``: the energy that a perfect map would have: the region averaged to the map's cells and upsampled
        again. ``hit``: the share of the hottest pixels that lie within POINTING_TOLERANCE pixels of the region: 1 or 0
        unless several tie. ``rank``: for a region of n pixels, the share of the n hottest pixels that lies in the
        region (relevance rank accuracy; Arras et al. 2022, arXiv:2003.07258); if pixels of equal heat compete for the
        last places among the n, it is the mean over all choices. ``area``: the region's share of the pixels that the
        model saw.
    """
    near, pixels = dilated(region, POINTING_TOLERANCE), int(region.sum())
    coldest = torch.topk(heat.flatten(), pixels).values[-1]  # of the hottest pixels, as many as the region has
    hotter, tied = heat > coldest, heat == coldest
    places = pixels - int(hotter.sum())
    return {
        "ceiling": ceiling(region, grid, placement),
        "hit": float(near[heat == heat.max()].double().mean()),
        "rank": (int(region[hotter].sum()) + places * float(region[tied].double().mean())) / pixels,
        "area": pixels / max(1, int(view.sum())),
    }


def ceiling(region: Bool[Tensor, "h w"], grid: tuple[int, int], placement: Placement = EVEN) -> float:
    """Return the energy of the best map that the cells allow: the region averaged to the cells and upsampled."""
    cells = region.double()
    for axis, places in enumerate(placement.centres(grid, tuple(region.shape))):
        cells = _averaged(cells, axis, places)
    best = enlarge(cells[None].float(), region.shape, placement)[0].double()
    return float(best[region].sum() / best.sum())


def _averaged(pixels: Float[Tensor, "h w"], axis: int, places: Sequence[float]) -> Float[Tensor, "h2 w2"]:
    """Average along an axis the pixels of each cell, which reach to the middle between it and the next one."""
    side = pixels.shape[axis]
    # Decimals of the edges between cells: without rounding, an edge between two pixels might count another pixel
    middles = [round((place + following + 1) / 2, 6) for place, following in itertools.pairwise(places)]
    means = []
    for begin, end in itertools.pairwise((0.0, *middles, float(side))):
        first = min(max(0, math.floor(begin)), side - 1)
        last = min(max(first + 1, math.ceil(end)), side)
        means.append(pixels.narrow(axis, first, last - first).mean(axis))
    return torch.stack(means, axis)


def heat_in_cells(
    region: Bool[Tensor, "h w"], grid: tuple[int, int], placement: Placement
) -> Float[np.ndarray, " cells"]:
    """Return, for each cell of a map, the heat that one unit in the cell puts into a region after upsampling.

    Upsampling is linear, so the heat within a region is a weighted sum over the cells. The energy E of a map is its
    heat within the region divided by its heat within the whole picture. With these weights, any map can be compared
    with any region, and neither is upsampled.
    """
    cells = torch.zeros(1, *grid, requires_grad=True)
    with torch.enable_grad():
        upsampled = enlarge(cells, region.shape, placement)[0]
        within = torch.autograd.grad(upsampled[region].sum(), cells)[0]
    return np.asarray(within.double().numpy().ravel())


def energies(
    maps: Float[np.ndarray, "n cells"], within: Float[np.ndarray, "n cells"], everywhere: Float[np.ndarray, " cells"]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Return each map's energy E in its own region, and the mean energy S of the other maps in that region.

    Args:
        maps: the positive part of each map, on its grid; each must have some heat.
        within: for each region, the weights that ``heat_in_cells`` returns.
        everywhere: the same weights for the whole picture.

    Returns:
        E and S. S, the shuffled baseline, is NaN if there is only one map.
    """
    shares = maps / (maps @ everywhere)[:, None]
    own = (shares * within).sum(1)
    if len(maps) < 2:
        return own, np.full(len(maps), np.nan)
    # Subtracting the map's own part from the sum over all maps gives the mean over the others without a loop.
    return own, ((within @ shares.sum(0)) - own) / (len(maps) - 1)


def headroom(within: Float[np.ndarray, "n cells"], everywhere: Float[np.ndarray, " cells"]) -> Float[np.ndarray, " n"]:
    """Return how much more heat perfect maps have in their own region than in the regions of other pictures.

    If objects lie at the same place in every picture, the headroom is small: no map can show which object it follows.
    It is 0 if there is only one region, or if no cell of the map reaches a region.
    """
    gain = np.zeros(len(within))
    reached = within.any(1)
    if reached.sum() > 1:
        own, shuffled = energies(within[reached], within[reached], everywhere)
        gain[reached] = own - shuffled
    return gain


NO_HEAT = "no_heat"
"""The status of a picture that was not explained, because the model is a black box or a detector."""


_Floats: TypeAlias = Annotated[Float[np.ndarray, " n"], PlainValidator(unpacked), PlainSerializer(packed)]
"""Values in float32, as in the file, so that a resumed check gives the same report."""


@dataclass(frozen=True, eq=False)
class MapInRegion:
    """A map and the region of its picture's objects.

    Attributes:
        measures: how the map fits the region, as ``measure`` returns it.
        grid: rows and columns of the map.
        size: rows and columns of the model's input.
        placement: where the cells lie on the input.
        cells: the positive part of the map.
        within: the weights of the region that ``heat_in_cells`` returns.
    """

    measures: dict[str, Any]
    grid: tuple[int, int]
    size: tuple[int, int]
    placement: Placement
    cells: _Floats
    within: _Floats


@dataclass(frozen=True, eq=False)
class HeatRow(PictureRow):
    """What the model answers to a picture, and where its heat lies.

    Attributes:
        answer: the model's answer.
        status, method, layer, layer_reason: as in the picture's ``Explanation``.
        cropped: whether the objects lie outside the part of the picture that the model sees.
        in_region: the map and its region; None if there is no map or no region.
    """

    answer: Answer
    status: str
    method: str
    layer: str
    layer_reason: str
    cropped: bool = False
    in_region: MapInRegion | None = None


@dataclass(frozen=True, eq=False)
class Unusable(PictureRow):
    """A picture that cannot be used, and why; ``broken`` if the model answers NaN or infinity."""

    error: str
    broken: bool = False


HEAT: RowKind[HeatRow | Unusable] = RowKind("heat", TypeAdapter(HeatRow | Unusable))
"""The rows of the heat pass."""


def heat_rows(plan: Plan, items: Sequence[Item]) -> Iterator[HeatRow | Unusable]:
    """Explain pictures, compare each map with its region, and yield a row for each picture, in order."""
    if not plan.draws_heat:
        yield from _rows_without_heat(plan, items)
        return
    classes = tuple(plan.outputs[item.label] for item in items)
    boxes = CropBoxes()  # the parts of the pictures that the model sees
    own_class = EachTarget(classes, activation=plan.model.activation)
    target = _RecordingTarget(own_class, {}, tuple(range(1, len(items) + 1)))
    explanations = plan.explain(items, target=target)
    for number, (item, explanation) in enumerate(zip(items, explanations, strict=True), start=1):
        yield _row(plan, boxes, item, explanation, target.answers.get(number))


def _rows_without_heat(plan: Plan, items: Sequence[Item]) -> Iterator[HeatRow | Unusable]:
    """Ask the model about pictures, and yield a row for each; those that cannot be used come last."""
    unusable = list[Unusable]()
    why = f"no heat: the model is a {'detector' if plan.detects else 'black box'}"

    def readable() -> Iterator[tuple[Item, Tensor]]:
        for item in items:
            try:
                if plan.detects:
                    plan.wanted(item)
                yield item, prepare(item.path, plan.preprocess, item.name).tensor
            except CamkitError as error:
                unusable.append(_unusable(item, error))

    for batch in batches_of_one_shape(readable(), plan.batch_size):
        shown, inputs = zip(*batch, strict=True)
        for item, answer in zip(shown, plan.answer(torch.stack(inputs), shown), strict=True):
            cropped = plan.detects and not len(plan.wanted(item))
            row = HeatRow(item.name, answer, NO_HEAT, "none", "no layer", why, cropped)
            yield _broken(item) if answer.output == NO_ANSWER else row
    yield from unusable


def _row(
    plan: Plan, boxes: CropBoxes, item: Item, explanation: Explanation | Failure, answer: Answer | None
) -> HeatRow | Unusable:
    try:
        if isinstance(explanation, Failure):
            raise explanation.error
        if answer is None or answer.output == NO_ANSWER:
            return _broken(item)
        about = (explanation.status, explanation.method, explanation.layer, explanation.layer_reason)
        row = HeatRow(item.name, answer, *about)
        return _compared(plan, boxes, row, item, explanation) if item.objects else row
    except CamkitError as error:
        return _unusable(item, error)


def _compared(plan: Plan, boxes: CropBoxes, row: HeatRow, item: Item, explanation: Explanation) -> HeatRow:
    """Compare a map with its picture's region, unless the map is empty or the object was cropped away.

    Raises:
        CamkitError: the region cannot be drawn, or cannot be followed through the preprocessing.
    """
    # Without a box, the explanation's picture is the model's input, and the original's size is read from the file.
    original = explanation.picture if explanation.box is not None else None
    size = open_picture(item.path).size if original is None else (original.shape[1], original.shape[0])
    if isinstance(explanation.shown, Tensor):
        check_crop(plan.preprocess, open_picture(item.path), explanation.shown, boxes)
    original_region = object_region([in_pixels(annotation, size) for annotation in item.objects], size)
    shades = plan.shades.of(size)
    region = preprocess_region(original_region, plan.preprocess, shades) > 0.5
    if not bool(region.any()):
        return replace(row, cropped=True)
    if explanation.status != "ok" or explanation.heatmap.ndim != 2:
        return row
    grid = (explanation.raw.shape[0], explanation.raw.shape[1])
    heat, placement = torch.from_numpy(np.asarray(explanation.heatmap)), explanation.placement
    in_region = MapInRegion(
        measures=measure(heat, region, shades.view, grid, placement),
        grid=grid,
        size=(region.shape[0], region.shape[1]),
        placement=placement,
        cells=np.maximum(explanation.raw, 0).ravel().astype(np.float32),
        within=heat_in_cells(region, grid, placement).astype(np.float32),
    )
    return replace(row, in_region=in_region)


def _broken(item: Item) -> Unusable:
    return Unusable(item.name, f"{item.name}: the model's output holds NaN or infinity", broken=True)


def _unusable(item: Item, error: CamkitError) -> Unusable:
    text = str(error).replace(str(item.path), item.name)  # the report must not depend on where the data lies
    return Unusable(item.name, text if item.name in text else f"{item.name}: {text}")


@dataclass(frozen=True)
class _RecordingTarget(Target):
    """Explains each picture for the best output of its own class, and records what the model answered.

    ``answers`` has the answers by the number of the picture in the call, from 1; ``numbers`` has those of a pass.
    """

    for_threads = True

    own_class: EachTarget
    answers: dict[int, Answer]
    numbers: tuple[int, ...]

    @property
    def activation(self) -> Activation | None:
        """What turns the model's scores into probabilities."""
        return self.own_class.activation

    def of_pictures(self, numbers: Sequence[int]) -> _RecordingTarget:
        """Return the target for a batch of pictures, given their numbers from 1."""
        return replace(self, numbers=tuple(self.numbers[number - 1] for number in numbers))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Record the answers, and return the scores."""
        reading = ScoreReading.of(logits_of(output, batch))
        classes = [self.own_class.classes[number - 1] for number in self.numbers]
        self.answers.update(zip(self.numbers, answers_of(reading, classes, self.activation), strict=True))
        return self.own_class.of_pictures(self.numbers)(output, batch)


def compare_maps(items: Sequence[Item], heat: Mapping[str, HeatRow]) -> dict[str, dict[str, float]]:
    """Compare each map with the regions of all pictures whose map has the same grid, size and placement.

    The values have their names in ``ImageRow``; a map that is alone has nothing to be compared with.
    """
    by_geometry: dict[tuple[tuple[int, int], tuple[int, int], Placement], dict[str, MapInRegion]] = defaultdict(dict)
    for item in items:
        if item.name in heat and (own := heat[item.name].in_region):
            by_geometry[own.grid, own.size, own.placement][item.name] = own
    compared: dict[str, dict[str, float]] = {}
    for (grid, size, placement), of_pictures in by_geometry.items():
        maps = np.array([own.cells for own in of_pictures.values()])
        within = np.array([own.within for own in of_pictures.values()])
        everywhere = heat_in_cells(torch.ones(size, dtype=torch.bool), grid, placement)
        columns = (*energies(maps, within, everywhere), headroom(within, everywhere))
        names = ("energy", "shuffled", "room") if len(maps) > 1 else ("energy",)
        for name, *values in zip(of_pictures, *(column.tolist() for column in columns), strict=True):
            compared[name] = dict(zip(names, values, strict=False))
    return compared


def remark_on_heat(plan: Plan) -> str:
    """Return why the heat of all pictures is not measured; "" if it is."""
    if plan.detects:
        return "a detector's heat is not measured; camkit explain draws the heat of each box"
    box = black_box_in(plan.model.module)
    if box is None or plan.draws_heat:
        return ""
    drawn = advice(
        "set check.method to 'occlusion', which needs neither", "pass --method occlusion, which needs neither"
    )
    return f"no heat: {box.lacks(drawn)}"
