"""The experiment: which picture lends its background to which, and what the model answers to the edits."""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Shaped
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn import functional

from camkit.background.data import Item
from camkit.background.edits import (
    COMPRESSION,
    Backgrounds,
    Edit,
    Edits,
    PreparedPicture,
    cue_edits,
    region_edits,
    ring_edits,
)
from camkit.background.plan import Answer, Plan
from camkit.background.regions import in_pixels, object_region, widened_boxes
from camkit.engine.passes import passes_at_once
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError
from camkit.images.filling import dilated
from camkit.images.prepare import prepare
from camkit.images.read import LOSSLESS, jpeg_quality, open_picture
from camkit.images.regions import preprocess_region
from camkit.kit.statistics import MIN_GROUPS, seed_of
from camkit.kit.store import PictureRow, RowKind

Answers: TypeAlias = dict[Edit, Answer]


@dataclass(frozen=True, eq=False)
class EditsRow(PictureRow):
    """The model's answers to the edits of a picture.

    ``why`` says why the picture was not shown on backgrounds of both kinds; it is "" if it was.
    """

    answers: list[tuple[Edit, Answer]]
    why: str = ""


EDITS = RowKind("edits", TypeAdapter(EditsRow))
"""The rows of the experiment."""


Partners: TypeAlias = tuple[tuple[tuple[Item, ...], ...], tuple[tuple[Item, ...], ...]]
"""The pictures that lend their backgrounds to a picture: of its own class, and of other classes.

Each entry holds the candidates for one background, all of one class. The first entries that have a usable candidate are
used. From each, the first candidate with nearly the most room is taken.
"""

MOST_CANDIDATES = 8
"""The number of candidates for each background, in a large class. On photos of Caltech-101, 0.15 of the picture is then
filled and in sight behind the object, and 0.25 with a random candidate; a network with real weights is right for 0.57
instead of 0.52 of the objects on backgrounds of their own class (scripts/results/validation.md)."""


def draw_partners(sample: Sequence[Item], backgrounds: Sequence[Item], wanted: int, seed: int) -> dict[Item, Partners]:
    """Draw each picture's partners: always of another group, and in the second part of another class.

    The pictures of a class meet the other classes in turn. The first candidates from a class come in a random order, in
    which no background repeats before all have been first. The other candidates are drawn at random. A class with fewer
    than MIN_GROUPS groups is used only if there is no other. If either kind has no candidate, the picture gets no
    partners.
    """
    by_class: dict[str, list[Item]] = defaultdict(list)
    for background in backgrounds:
        by_class[background.label].append(background)
    groups = {label: len({item.group for item in items}) for label, items in by_class.items()}
    enough = [label for label, count in groups.items() if count >= MIN_GROUPS]
    # The number of groups of a class for each candidate. If n backgrounds differ in room and c of them are drawn each
    # time, the choice is as varied as a choice among n * (2 * c - 1) / c**2 backgrounds. Here these are at least 12;
    # intervals need 5 groups.
    counts = {label: min(MOST_CANDIDATES, max(1, count // 8)) for label, count in groups.items()}
    rotations: dict[tuple[str, str], Iterator[Item]] = {}
    turns = Counter[str]()
    drawn: dict[Item, Partners] = {}
    for item in sample:
        others = sorted(set(enough) - {item.label}) or sorted(by_class.keys() - {item.label})
        start, turns[item.label] = turns[item.label], turns[item.label] + wanted
        # How many more backgrounds of either kind get candidates, because some classes have no usable background
        rng, turn = own_generator(item.name, seed), [""] * wanted + [" to spare"] * 3
        in_turn = [others[(start + entry) % len(others)] for entry in range(len(turn))] if others else []
        own, foreign = (
            tuple(
                _candidates(item, of_class, _next_background(rotations, item, of_class, seed, kind), counts[label], rng)
                for kind, label in zip(turn, labels, strict=False)
                if (of_class := by_class.get(label))
            )
            for labels in ([item.label] * len(turn), in_turn)
        )
        own, foreign = tuple(filter(None, own)), tuple(filter(None, foreign))
        drawn[item] = (own, foreign) if own and foreign else ((), ())
    return drawn


def _next_background(
    rotations: dict[tuple[str, str], Iterator[Item]], item: Item, of_class: Sequence[Item], seed: int, kind: str
) -> Item | None:
    """Return the next background of a class for a picture; None if all are of the picture's own group.

    The pictures of a class get the backgrounds of a class in a random order that repeats. Spare backgrounds have a
    rotation of their own ``kind``: with a common one, each picture would skip the spares of the picture before, and in
    a class of 12 pictures only 3 might ever serve.
    """
    pair = (item.label, of_class[0].label + kind)
    if pair not in rotations:
        random = own_generator("\0".join(pair), seed)
        first, *others = random.permutation(len(of_class)).tolist()
        rotations[pair] = itertools.cycle([of_class[number] for number in (*others, first)])
    tried = itertools.islice(rotations[pair], len(of_class))
    return next((background for background in tried if background.group != item.group), None)


def _candidates(
    item: Item, backgrounds: Sequence[Item], first: Item | None, count: int, rng: np.random.Generator
) -> tuple[Item, ...]:
    """Return ``count`` candidates: the first one and others drawn at random; none if there is no first one."""
    if first is None:
        return ()
    others = [background for background in backgrounds if background.group != item.group and background != first]
    drawn = rng.choice(len(others), min(count - 1, len(others)), replace=False).tolist() if others else []
    return (first, *(others[number] for number in drawn))


def own_generator(name: str, seed: int) -> np.random.Generator:
    """Return a random generator that depends on a name and the seed alone."""
    return np.random.default_rng([seed, seed_of(name)])


WORKERS = min(4, os.cpu_count() or 1)
"""Threads that make edits while the model answers earlier ones."""

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
            cannot lend one: it cannot be read, or its objects leave no room.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        check = plan.settings.check
        self.partners = draw_partners(plan.sample, plan.backgrounds, check.pastes, check.seed)
        self._unreadable: dict[str, str] = {}
        first = self._load(plan.sample[0]) if plan.sample else None
        size = _CACHE_BYTES if first is None else first.tensor.nbytes
        # Tensors kept of each picture: itself, and one as a background for each fill
        kept = max(_MIN_CACHED, _CACHE_BYTES // (3 * size))
        self.load = functools.lru_cache(maxsize=kept)(self._load)
        self.filled = functools.cache(self._filled)

    def _load(self, item: Item) -> PreparedPicture | None:
        try:
            return self._prepare(item)
        except CamkitError as error:
            self._unreadable[item.name] = str(error)
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
        # What is filled in a background is widened by 8 of 224 pixels, which covered soft edges and shadows of outlines
        # that were drawn by hand
        growth = max(1, round(0.035 * min(silhouettes.shape)))
        return PreparedPicture(tensor, shades, region, hole, dilated(silhouettes, growth), quality)

    def edits(self, item: Item, wanted: int) -> Edits:
        """List the edits of a picture of the sample, with up to ``wanted`` backgrounds of either kind.

        There are none if the picture cannot be read, or has regions but no object or no background beside it.
        """
        picture, plan = self.load(item), self.plan
        if picture is None or (plan.with_regions and not (_shows_object(picture) and picture.has_background)):
            return {}
        same, other = (self._with_most_room(picture, entries, wanted) for entries in self.partners[item])
        exchanges = cue_edits(picture, same, other, plan.cues)
        check = plan.settings.check
        if not plan.with_regions:
            return ring_edits(picture, same, other, check.ring) | exchanges
        return region_edits(picture, same, other) | exchanges

    def why_untested(self, item: Item, edits: Collection[Edit]) -> str:
        """Return why a picture with these edits was not shown on backgrounds of both kinds; "" if it was."""
        if {"same", "other"} <= {edit.arm for edit in edits}:
            return ""
        picture = self.load(item)
        if picture is None:
            return self._unreadable.get(item.name, "it cannot be read")
        if self.plan.with_regions and not _shows_object(picture):
            return "its object lies outside the part that the model sees"
        if self.plan.with_regions and not picture.has_background:
            return "its objects leave too little background beside them"
        return "no picture of another group lends it a background of its own class and one of another class"

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
                # A background may be filled by this share of the picture more than the background with the most room,
                # and is still used. Otherwise the same few backgrounds would serve again and again, for a gain that
                # nobody sees.
                item = next(item for item, share in in_sight.items() if share <= least + 0.05)
                background = self.load(item)
                if background is not None and (
                    self.plan.with_regions or background.tensor.shape == picture.tensor.shape
                ):
                    backgrounds[item.name] = background
                    break
                del in_sight[item]
            if len(backgrounds) == wanted:
                break
        return backgrounds

    def _filled(self, item: Item) -> Float[Tensor, "r c"] | None:
        picture = self.load(item)
        if picture is not None and not self.plan.with_regions:
            return torch.zeros(_ROOM_CELLS, _ROOM_CELLS)
        if picture is None or picture.silhouettes is None or not picture.has_background:
            return None
        return coarse(picture.silhouettes)

    def rows(self, items: Sequence[Item]) -> Iterator[EditsRow]:
        """Show the edits of some pictures of the sample to the model, and yield a row of answers for each picture.

        Threads make the edits. The model sees the edits of several pictures in full batches.
        """
        pastes = self.plan.settings.check.pastes
        tasks = (Task(functools.partial(self._made, item, pastes), in_thread=True) for item in items)
        made = in_order(tasks, workers=WORKERS, ahead=WORKERS + 1)
        expected: dict[Item, int] = {}

        def shown() -> Iterator[tuple[tuple[Item, Edit], Float[Tensor, "c h w"]]]:
            for item, of_picture in zip(items, made, strict=True):
                expected[item] = len(of_picture)
                yield from (((item, edit), tensor) for edit, tensor in of_picture.items())

        at_once = passes_at_once(self.plan.memory.record)
        passes = (
            Task(functools.partial(self._answered, batch), in_thread=at_once > 1)
            for batch in batches_of_one_shape(shown(), self.plan.batch_size)
        )
        cores = torch.get_num_threads() // at_once
        answers: dict[Item, Answers] = defaultdict(dict)
        for batch in in_order(passes, workers=at_once, ahead=at_once, cores=cores):
            for (item, edit), answer in batch:
                answers[item][edit] = answer
                if len(answers[item]) == expected[item]:
                    yield self._row(item, answers.pop(item))
        yield from (self._row(item, {}) for item, count in expected.items() if not count)

    def _row(self, item: Item, answers: Answers) -> EditsRow:
        return EditsRow(item.name, list(answers.items()), self.why_untested(item, answers))

    def _made(self, item: Item, wanted: int) -> dict[Edit, Float[Tensor, "c h w"]]:
        return {edit: make() for edit, make in self.edits(item, wanted).items()}

    def _answered(
        self, batch: list[tuple[tuple[Item, Edit], Float[Tensor, "c h w"]]]
    ) -> list[tuple[tuple[Item, Edit], Answer]]:
        edited, tensors = zip(*batch, strict=True)
        return list(zip(edited, self.plan.answer(torch.stack(tensors), [item for item, _ in edited]), strict=True))


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
    return functional.adaptive_avg_pool2d(region[None].float(), _ROOM_CELLS)[0]


def _shows_object(picture: PreparedPicture) -> bool:
    return picture.region is not None and bool((picture.region > 0.5).any())
