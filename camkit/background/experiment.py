"""What the model is asked: about every picture as it is, with its heat, and about the edits of the sample.

Each picture gets a row of either kind, which the journal keeps.

Evidence 1 is where the heat lies, compared with a blind map and with a perfect map on the same regions. Notation for
each image: h >= 0 is the class map at the size of the input, M is the object's region; both are (H, W).
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from pydantic import PlainSerializer, PlainValidator, TypeAdapter
from torch import Tensor

from camkit.background.data import Item, Row
from camkit.background.edits import (
    COMPRESSION,
    Backgrounds,
    Edit,
    Edits,
    PreparedPicture,
    draw_partners,
    edits_of,
)
from camkit.background.plan import NO_ANSWER, Answer, Plan, answers_of
from camkit.background.regions import object_region, widened_boxes
from camkit.engine.heatmap import enlarge
from camkit.engine.passes import passes_at_once
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, advice
from camkit.explaining.explanation import Explanation
from camkit.images.filling import POINTING_TOLERANCE, dilated
from camkit.images.prepare import prepare
from camkit.images.read import LOSSLESS, jpeg_quality
from camkit.images.regions import CropBoxes, check_crop, extent, preprocess_region
from camkit.kit.store import PictureRow, RowKind, packed, unpacked
from camkit.models import black_box_in
from camkit.targets import EachTarget, logits_of
from camkit.targets.scores import ScoreReading, Scores
from camkit.types import EVEN, Failure, Placement

Answers: TypeAlias = dict[Edit, Answer]


_Floats: TypeAlias = Annotated[Float[np.ndarray, " n"], PlainValidator(unpacked), PlainSerializer(packed)]
"""Values in float32, as in the file, so that a resumed check gives the same report."""


@dataclass(frozen=True, eq=False)
class EditsRow(PictureRow):
    """The model's answers to the edits of a picture.

    ``why`` says why the picture was not shown on backgrounds of both kinds; it is "" if it was. ``alone`` has the
    model's pooled features of the picture without its object, the mean over the fills; it is empty if a fill has none.
    ``box`` has the sides of what was removed and its share of the picture; zeros if that is the middle.
    """

    answers: list[tuple[Edit, Answer]]
    why: str = ""
    alone: _Floats = field(default_factory=lambda: np.empty(0, np.float32))
    box: tuple[float, ...] = (0.0,) * 5


EDITS = RowKind("edits", TypeAdapter(EditsRow))
"""The rows of the experiment."""


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
        error: why the picture cannot be used; "" if it can.
    """

    answer: Answer = field(default_factory=lambda: Answer(NO_ANSWER, None))
    status: str = ""
    method: str = ""
    layer: str = ""
    layer_reason: str = ""
    cropped: bool = False
    in_region: MapInRegion | None = None
    error: str = ""


HEAT = RowKind("heat", TypeAdapter(HeatRow))
"""The rows of the heat pass."""


def heat_rows(plan: Plan, items: Sequence[Item]) -> Iterator[HeatRow]:
    """Explain pictures, compare each map with its region, and yield a row for each picture, in order.

    If the model cannot be explained, it is only asked, and the pictures that cannot be used come last.
    """
    if plan.draws_heat:
        numbers, boxes = tuple(range(1, len(items) + 1)), CropBoxes()  # the parts of the pictures that the model sees
        classes = tuple(plan.outputs[item.label] for item in items)
        target = _RecordingTarget(classes, activation=plan.model.activation, numbers=numbers)
        for number, item, explanation in zip(numbers, items, plan.explain(items, target), strict=True):
            try:
                if isinstance(explanation, Failure):
                    raise explanation.error
                row = _compared(plan, boxes, item, explanation, target.answers[number])
            except CamkitError as error:
                row = HeatRow(item.name, error=item.named_in(error))
            yield row
        return
    unusable = list[HeatRow]()
    why = f"no heat: the model is a {'detector' if plan.detects else 'black box'}"

    def readable() -> Iterator[tuple[Item, Tensor]]:
        for item in items:
            try:
                if plan.detects:
                    plan.wanted(item)
                yield item, prepare(item.open(), plan.preprocess, item.name).tensor
            except CamkitError as error:
                unusable.append(HeatRow(item.name, error=item.named_in(error)))

    for batch in batches_of_one_shape(readable(), plan.batch_size):
        shown, inputs = zip(*batch, strict=True)
        for item, answer in zip(shown, plan.answer(torch.stack(inputs), shown)[0], strict=True):
            cropped = plan.detects and not len(plan.wanted(item))
            yield HeatRow(item.name, answer, NO_HEAT, "none", "no layer", why, cropped)
    yield from unusable


def _compared(plan: Plan, boxes: CropBoxes, item: Item, explanation: Explanation, answer: Answer) -> HeatRow:
    """Compare a map with its picture's region, unless the map is empty or the object was cropped away.

    Raises:
        CamkitError: the region cannot be drawn, or cannot be followed through the preprocessing.
    """
    row = HeatRow(
        item.name, answer, explanation.status, explanation.method, explanation.layer, explanation.layer_reason
    )
    if answer.output == NO_ANSWER or not item.objects:
        return row
    # Without a box, the explanation's picture is the model's input, and the original's size is read from the file.
    original = explanation.picture if explanation.box is not None else None
    size = item.open().size if original is None else (original.shape[1], original.shape[0])
    if isinstance(explanation.shown, Tensor):
        check_crop(plan.preprocess, item.open(), explanation.shown, boxes)
    original_region = object_region(item.objects, size)
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


@dataclass(frozen=True)
class _RecordingTarget(EachTarget):
    """Explains each picture for the best output of its own class, and records what the model answered.

    ``answers`` has the answers by the number of the picture in the call, from 1; ``numbers`` has those of a pass.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()

    def of_pictures(self, numbers: Sequence[int]) -> _RecordingTarget:
        """Return the target for a batch of pictures, given their numbers from 1."""
        of_batch = tuple(self.numbers[number - 1] for number in numbers)
        return replace(self, classes=super().of_pictures(numbers).classes, numbers=of_batch)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Record the answers, and return the scores."""
        reading = ScoreReading.of(logits_of(output, batch))
        self.answers.update(zip(self.numbers, answers_of(reading, self.classes, self.activation), strict=True))
        return super().__call__(output, batch)


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
    drawn = "set check.method to 'occlusion'", "pass --method occlusion"
    return f"no heat: {box.lacks(f'{advice(*drawn)}, which needs neither')}"


_CACHE_BYTES, _MIN_CACHED = 1 << 30, 16
"""The memory for loaded pictures, each of which is a background for several others, and the least number to keep."""


_ROOM_CELLS = 32
"""Cells along each side of the grid that stores how much room is beside a picture's objects."""


class Experiment:
    """The pictures of a check as the model sees them, their edits, and the model's answers.

    The last pictures stay in memory as long as this object.

    Args:
        plan: the check.

    Attributes:
        plan: the check.
        partners: the pictures that may lend their backgrounds to each picture of the sample.
        load: returns a picture and its regions as the model sees them; None if it cannot be read.
        filled: returns how much of each cell of a coarse grid is filled if a picture lends its background; None if it
            cannot lend one: it cannot be read, its objects leave no room, or it has not the shape that is needed.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        check = plan.settings.check
        self.partners = draw_partners(plan.sample, plan.backgrounds, check.pastes, check.seed)
        self._unreadable: dict[str, str] = {}
        first = self._load(plan.sample[0]) if plan.sample else None
        size = _CACHE_BYTES if first is None else first.tensor.nbytes
        # Tensors kept of each picture: itself, and one as a background for each fill
        self.load = functools.lru_cache(maxsize=max(_MIN_CACHED, _CACHE_BYTES // (3 * size)))(self._load)
        self.filled = functools.cache(self._filled)

    def _load(self, item: Item) -> PreparedPicture | None:
        plan, preprocess = self.plan, self.plan.preprocess
        try:
            picture = item.open()
            tensor = prepare(picture, preprocess, item.name).tensor.float()
            shades = plan.shades.of(picture.size)
            quality = (
                LOSSLESS if COMPRESSION not in plan.cues or isinstance(item.source, Row) else jpeg_quality(item.source)
            )
            if not plan.with_regions:
                return PreparedPicture(tensor, shades, quality=quality)
            everything = [*item.objects, *item.others]
            drawn_own = object_region(item.objects, picture.size, round_boxes=True)
            drawn_all = object_region(everything, picture.size)
            region = preprocess_region(drawn_own, preprocess, shades)
            alike = np.array_equal(drawn_own, drawn_all)
            silhouettes = (region if alike else preprocess_region(drawn_all, preprocess, shades)) > 0
            hole = preprocess_region(widened_boxes(everything, picture.size), preprocess, shades) > 0
        except CamkitError as error:
            self._unreadable[item.name] = str(error)
            return None
        # What is filled in a background is widened by 8 of 224 pixels, which covered soft edges and shadows of outlines
        # that were drawn by hand
        growth = max(1, round(0.035 * min(silhouettes.shape)))
        return PreparedPicture(tensor, shades, region, hole, dilated(silhouettes, growth), quality)

    def edits(self, item: Item, wanted: int) -> Edits:
        """List the edits of a picture of the sample, with up to ``wanted`` backgrounds of either kind.

        There are none if the picture cannot be read, or has regions but no object or no background beside it.
        """
        picture, plan = self.load(item), self.plan
        if picture is None or self._obstacle(item):
            return {}
        same, other = (self._with_most_room(picture, entries, wanted) for entries in self.partners[item])
        return edits_of(picture, same, other, plan.cues, plan.settings.check.ring)

    def why_untested(self, item: Item, edits: Collection[Edit]) -> str:
        """Return why a picture with these edits was not shown on backgrounds of both kinds; "" if it was."""
        if {"same", "other"} <= {edit.arm for edit in edits}:
            return ""
        return self._obstacle(item) or (
            "no picture of another group lends it a background of its own class and one of another class"
        )

    def _obstacle(self, item: Item) -> str:
        """Return why a picture has no edits; "" if it has some."""
        picture = self.load(item)
        if picture is None:
            return self._unreadable[item.name]
        if picture.region is not None and not bool((picture.region > 0.5).any()):
            return "its object lies outside the part that the model sees"
        alone = self.plan.with_regions and not picture.has_background
        return "its objects leave too little background beside them" if alone else ""

    def _with_most_room(self, picture: PreparedPicture, entries: Sequence[Sequence[Item]], wanted: int) -> Backgrounds:
        """Return a background for each of the first entries that have a usable candidate, ``wanted`` at most.

        From each entry, this takes the first candidate in which nearly the least remains filled beside the pasted
        object, because filling destroys the background. No background is used twice.
        """
        covered = 0.0 if picture.region is None else coarse(picture.region)
        shape = None if self.plan.with_regions else picture.tensor.shape
        backgrounds: dict[str, PreparedPicture] = {}
        for candidates in entries:
            filled = {item: self.filled(item, shape) for item in candidates if item.name not in backgrounds}
            in_sight = {item: float((grid * (1 - covered)).mean()) for item, grid in filled.items() if grid is not None}
            # A background may be filled by this share of the picture more than the background with the most room, and
            # is still used. Otherwise the same few backgrounds would serve again and again, for a gain that nobody
            # sees.
            most = min(in_sight.values(), default=0.0) + 0.05
            item = next((item for item, share in in_sight.items() if share <= most), None)
            background = None if item is None else self.load(item)
            if item is not None and background is not None:
                backgrounds[item.name] = background
            if len(backgrounds) == wanted:
                break
        return backgrounds

    def _filled(self, item: Item, shape: torch.Size | None) -> Float[Tensor, "r c"] | None:
        picture = self.load(item)
        if picture is None or shape not in (None, picture.tensor.shape):
            return None
        hole = torch.zeros_like(picture.shades.view) if picture.silhouettes is None else picture.silhouettes
        return coarse(hole) if picture.has_background or not self.plan.with_regions else None

    def rows(self, items: Sequence[Item]) -> Iterator[EditsRow]:
        """Show the edits of some pictures of the sample to the model, and yield a row of answers for each picture.

        Threads make the edits. The model sees the edits of several pictures in full batches.
        """
        pastes = self.plan.settings.check.pastes
        at_once = passes_at_once(self.plan.memory.record)
        workers = min(4, os.cpu_count() or 1)  # threads that make edits while the model answers earlier ones

        def made(item: Item) -> dict[Edit, Float[Tensor, "c h w"]]:
            return {edit: make() for edit, make in self.edits(item, pastes).items()}

        def shown() -> Iterator[tuple[tuple[Item, Edit], Float[Tensor, "c h w"]]]:
            tasks = (Task(functools.partial(made, item), in_thread=True) for item in items)
            for item, of_picture in zip(items, in_order(tasks, workers=workers, ahead=workers + 1), strict=True):
                expected[item] = len(of_picture)
                yield from (((item, edit), tensor) for edit, tensor in of_picture.items())

        def answered(
            batch: list[tuple[tuple[Item, Edit], Float[Tensor, "c h w"]]],
        ) -> list[tuple[tuple[Item, Edit], Answer, Float[Tensor, " d"]]]:
            edited, tensors = zip(*batch, strict=True)
            answers, features = self.plan.answer(torch.stack(tensors), [item for item, _ in edited])
            return list(zip(edited, answers, features, strict=True))

        passes = (
            Task(functools.partial(answered, batch), in_thread=at_once > 1)
            for batch in batches_of_one_shape(shown(), self.plan.batch_size)
        )
        cores = torch.get_num_threads() // at_once
        expected: dict[Item, int] = {}
        answers: dict[Item, list[tuple[Edit, Answer, Float[Tensor, " d"]]]] = defaultdict(list)
        for batch in in_order(passes, workers=at_once, ahead=at_once, cores=cores):
            for (item, edit), answer, pooled in batch:
                answers[item].append((edit, answer, pooled))
                if len(answers[item]) == expected[item]:
                    own = answers.pop(item)
                    features = [features for edit, _, features in own if edit.arm == "removed"] or [torch.empty(0)]
                    hole = None if (picture := self.load(item)) is None else picture.hole
                    box = (0.0,) * 5 if hole is None else (*map(float, extent(hole)), float(hole.double().mean()))
                    alike = len({len(each) for each in features}) == 1
                    mean = torch.stack(features if alike else [torch.empty(0)]).mean(0).numpy()
                    why = self.why_untested(item, [edit for edit, *_ in own])
                    yield EditsRow(item.name, [(edit, answer) for edit, answer, _ in own], why, mean, box)
        yield from (EditsRow(item.name, [], self.why_untested(item, [])) for item in expected if not expected[item])


_About = TypeVar("_About")


def batches_of_one_shape(
    inputs: Iterable[tuple[_About, Float[Tensor, "c h w"]]], size: int
) -> Iterator[list[tuple[_About, Float[Tensor, "c h w"]]]]:
    """Join inputs (C, H, W) that follow each other into batches of at most ``size``, each of one shape.

    With each input goes what it is about.
    """
    batch: list[tuple[_About, Float[Tensor, "c h w"]]] = []
    for about, tensor in inputs:
        if len(batch) == size or (batch and batch[0][1].shape != tensor.shape):
            yield batch
            batch = []
        batch.append((about, tensor))
    if batch:
        yield batch


def coarse(region: Shaped[Tensor, "h w"]) -> Float[Tensor, "r c"]:
    """Return the share of each cell of a coarse grid that a region covers."""
    return torch.nn.functional.adaptive_avg_pool2d(region[None].float(), _ROOM_CELLS)[0]
