"""The experiment over the sample: threads make edits, the model sees full batches, each picture's row is saved."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from camkit.background import experiment
from camkit.background.cues import COMPRESSION
from camkit.background.data import in_pixels
from camkit.background.experiment import Answer, Answers, Backgrounds, Edit, Edits, Partners, PreparedPicture
from camkit.background.journal import EDITS, Journal, Row
from camkit.background.plan import Plan
from camkit.background.render import object_region, widened_boxes
from camkit.background.values import Item, Progress, RowsOf
from camkit.engine.passes import passes_at_once
from camkit.errors import CamkitError
from camkit.images.filling import dilated
from camkit.images.prepare import prepare
from camkit.images.quality import LOSSLESS, jpeg_quality
from camkit.images.read import open_picture
from camkit.images.regions import preprocess_region

WORKERS = min(4, os.cpu_count() or 1)
"""Threads that make edits while the model answers earlier ones."""

_CACHE_BYTES, _MIN_CACHED = 1 << 30, 16
"""The memory for loaded pictures, each of which is a background for several others, and the least number to keep."""

_COPIES = 3
"""Tensors kept of each picture: itself, and one as a background for each fill."""

_PROBED = 20
"""Pictures of the sample that are tried when the size of a loaded picture is measured: the first may be unreadable."""

_GROWTH = 0.035
"""How far the silhouettes that are filled in a background are widened, as a share of the shorter side: 8 of 224 pixels,
which covered soft edges and shadows of hand-drawn outlines."""

_ROOM_CELLS = 32
"""Cells along each side of the grid that stores how much room is beside a picture's objects."""

LITTLE_MORE = 0.05
"""A background may be filled by this share of the picture more than the background with the most room, and is still
used. Otherwise the same few backgrounds would serve again and again, for a gain that nobody sees."""


class Trial:
    """The pictures of a check as the model sees them, their edits, and the model's answers.

    The last pictures stay in memory as long as this object.

    Args:
        plan: the check.

    Attributes:
        plan: the check.
        partners: the pictures that may lend their backgrounds to each picture of the sample.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        check = plan.settings.check
        self.partners = experiment.draw_partners(plan.sample, plan.backgrounds, check.pastes, check.seed)
        loaded = (self._load(item) for item in plan.sample[:_PROBED])
        size = next((picture.tensor.nbytes for picture in loaded if picture is not None), _CACHE_BYTES)
        kept = max(_MIN_CACHED, _CACHE_BYTES // (_COPIES * size))
        self._cached = functools.lru_cache(maxsize=kept)(self._load)
        self._filled: dict[str, Float[Tensor, "r c"] | None] = {}

    def load(self, item: Item) -> PreparedPicture | None:
        """Return a picture and its regions as the model sees them; None if it cannot be read."""
        return self._cached(item)

    def _load(self, item: Item) -> PreparedPicture | None:
        try:
            return self._prepare(item)
        except CamkitError:
            return None

    def _prepare(self, item: Item) -> PreparedPicture:
        plan, preprocess = self.plan, self.plan.preprocess
        picture = open_picture(item.path)
        tensor = prepare(picture, preprocess, item.name).tensor.float()
        shades = plan.shades.of(picture.size)
        quality = jpeg_quality(item.path) if COMPRESSION in plan.cues else LOSSLESS
        if not plan.with_regions:
            return PreparedPicture(tensor, shades, quality=quality)
        own = [in_pixels(annotation, picture.size) for annotation in item.objects]
        others = [in_pixels(annotation, picture.size) for annotation in item.others]
        drawn_own = object_region(own, picture.size, round_boxes=True)
        drawn_all = object_region([*own, *others], picture.size)
        region = preprocess_region(drawn_own, preprocess, shades)
        alike = np.array_equal(drawn_own, drawn_all)
        silhouettes = (region if alike else preprocess_region(drawn_all, preprocess, shades)) > 0
        hole = preprocess_region(widened_boxes([*own, *others], picture.size), preprocess, shades) > 0
        growth = max(1, round(_GROWTH * min(silhouettes.shape)))
        return PreparedPicture(tensor, shades, region, hole, dilated(silhouettes, growth), quality)

    def edits(self, item: Item, wanted: int) -> Edits:
        """List the edits of a picture of the sample, with up to ``wanted`` backgrounds of either kind.

        There are none if the picture cannot be read, or has regions but no object or no background beside it.
        """
        picture, plan = self.load(item), self.plan
        if picture is None or (plan.with_regions and not _has_object_and_background(picture)):
            return {}
        partners = self.partners[item] if wanted else Partners()
        same = self._with_most_room(picture, partners.same, wanted)
        other = self._with_most_room(picture, partners.other, wanted)
        exchanges = experiment.cue_edits(picture, same, other, plan.cues)
        check = plan.settings.check
        if not plan.with_regions:
            return experiment.ring_edits(picture, same, other, check.ring) | exchanges
        own_seed = int(experiment.own_generator(item.name, check.seed).integers(1 << 62))
        return experiment.region_edits(picture, same, other, own_seed) | exchanges

    def _with_most_room(self, picture: PreparedPicture, entries: Sequence[Sequence[Item]], wanted: int) -> Backgrounds:
        """Return a background for each of the first entries that have a usable candidate, ``wanted`` at most.

        From each entry, this takes the first candidate in which nearly the least remains filled beside the pasted
        object, because filling destroys the background. No background is used twice.
        """
        covered = 0.0 if picture.region is None else coarse(picture.region)
        backgrounds: dict[str, PreparedPicture] = {}
        for candidates in entries:
            filled = {item: self.filled(item) for item in candidates if item.name not in backgrounds}
            in_sight = {item: float((grid * (1 - covered)).mean()) for item, grid in filled.items() if grid is not None}
            while in_sight:
                least = min(in_sight.values())
                item = next(item for item, share in in_sight.items() if share <= least + LITTLE_MORE)
                background = self.load(item)
                if background is not None and background.tensor.shape == picture.tensor.shape:
                    backgrounds[item.name] = background
                    break
                del in_sight[item]
            if len(backgrounds) == wanted:
                break
        return backgrounds

    def filled(self, item: Item) -> Float[Tensor, "r c"] | None:
        """Return how much of each cell of a coarse grid is filled if a picture lends its background.

        None if it cannot lend one: it cannot be read, or its objects leave no room.
        """
        if item.name not in self._filled:
            self._filled[item.name] = self._measure(self.load(item))
        return self._filled[item.name]

    def _measure(self, picture: PreparedPicture | None) -> Float[Tensor, "r c"] | None:
        if picture is None:
            return None
        if not self.plan.with_regions:
            return torch.zeros(_ROOM_CELLS, _ROOM_CELLS)
        if not picture.has_background:
            return None
        assert picture.silhouettes is not None
        return coarse(picture.silhouettes)

    def answers(self, pictures: Sequence[Float[Tensor, "c h w"]], label: str) -> list[Answer]:
        """Return the answers to edits of pictures of a class."""
        size = self.plan.batch_size
        batches = (list(pictures[start : start + size]) for start in range(0, len(pictures), size))
        return [answer for batch in batches for answer in self.plan.answer(torch.stack(batch), [label] * len(batch))]

    def rows(self, items: Sequence[Item]) -> Iterator[Row]:
        """Show the edits of some pictures of the sample to the model, and yield a row of answers for each picture."""
        plan = self.plan
        at_once = passes_at_once(plan.memory.record)
        for item, answers in experiment.run(items, self._make, plan.answer, plan.batch_size, WORKERS, at_once):
            yield {"kind": EDITS, "name": item.name, "answers": [[*edit, *answer] for edit, answer in answers.items()]}

    def _make(self, item: Item) -> dict[Edit, Tensor]:
        made = {edit: make() for edit, make in self.edits(item, self.plan.settings.check.pastes).items()}
        return {edit: tensor for edit, tensor in made.items() if tensor is not None}

    def run(self, journal: Journal, progress: Progress, usable: Callable[[Item], bool], rows_of: RowsOf) -> None:
        """Run the experiment on every usable picture of the sample that has no row in the journal yet.

        ``rows_of`` computes the rows, as ``rows`` does.
        """
        done = journal.rows(EDITS)
        sample = [item for item in self.plan.sample if usable(item)]
        todo = [item for item in sample if item.name not in done]
        progress("experiment", len(sample) - len(todo), len(sample))
        for count, row in enumerate(rows_of(todo), start=len(sample) - len(todo) + 1):
            journal.append([row])
            progress("experiment", count, len(sample))


def answers_in(row: Row) -> Answers:
    """Return the answers in a row of the experiment."""
    return {
        Edit(arm, fill, lender): Answer(output, share, margin)
        for arm, fill, lender, output, share, margin in row["answers"]
    }


def coarse(region: Shaped[Tensor, "h w"]) -> Float[Tensor, "r c"]:
    """Return the share of each cell of a coarse grid that a region covers."""
    return functional.adaptive_avg_pool2d(region[None].float(), _ROOM_CELLS)[0]


def _has_object_and_background(picture: PreparedPicture) -> bool:
    return picture.region is not None and picture.has_background and bool((picture.region > 0.5).any())
