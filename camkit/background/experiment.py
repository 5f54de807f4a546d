"""Evidence 2: what the model does when the picture changes.

Each picture of the sample gets a handful of edits. The model sees each edit, and its answer is recorded. The statistics
of the whole picture are exchanged for the statistics of a picture of its own class, and of another class (``cues.py``).
With regions, the object is pasted on backgrounds of its own class and of other classes, the object is removed, either
part is smoothed, and noise is added to either part. Without regions, the outer ring is exchanged for the ring of a
picture of its own class or of another class, and the middle is made grey.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from camkit.background import cues, edits
from camkit.background.values import Item
from camkit.engine.streams import Task, in_order
from camkit.images.filling import fill_smoothly
from camkit.images.quality import LOSSLESS
from camkit.images.regions import Shades
from camkit.kit.statistics import MIN_GROUPS

Arm: TypeAlias = Literal[
    "same",
    "other",
    "same-cue",
    "other-cue",
    "removed",
    "smooth-object",
    "smooth-background",
    "noisy-object",
    "noisy-background",
]
"""What an edit does: paste the object on a background of its own class or of another class, or exchange the outer ring;
exchange a statistic with a picture of its own class or of another class; remove the object; smooth either part, or add
noise to it."""


class Edit(NamedTuple):
    """An edit of a picture.

    Attributes:
        arm: what the edit does.
        fill: how holes are filled, or RING; for an exchanged statistic, its name.
        lender: the picture that lends its background or its statistic.
    """

    arm: Arm
    fill: str = ""
    lender: str = ""


MakeEdit: TypeAlias = Callable[[], Float[Tensor, "c h w"] | None]
"""Makes an edited picture; None if the edit is not possible."""

Edits: TypeAlias = dict[Edit, MakeEdit]


class Answer(NamedTuple):
    """The model's answer to one picture.

    Attributes:
        output: the output with the highest logit; NO_ANSWER for logits with NaN or infinity.
        share: the probability of the picture's own class.
        margin: the best logit of that class minus the best logit of all others.
    """

    output: int
    share: float
    margin: float


NO_ANSWER = -1
"""The output that stands for logits with NaN or infinity."""

Answers: TypeAlias = dict[Edit, Answer]

NOISE = 0.25
"""Standard deviation of the noise, as a share of the distance from black to white (Moayeri et al. 2022)."""

_BLOCKS = 14
"""Blocks along the shorter side. Random blocks of the background are smoothed until they cover the object's area."""


@dataclass(frozen=True, eq=False)
class PreparedPicture:
    """One picture of the sample as the model sees it.

    Attributes:
        tensor: the model's input (C, H, W).
        shades: black and white after the preprocessing.
        region: how much of each pixel the objects of the picture's own class cover, 0..1; None without regions.
        hole: the slightly widened boxes of all objects of the checked classes; None without regions.
        silhouettes: the slightly widened outlines of the same objects; None without regions.
        quality: the quality of the JPEG file; LOSSLESS if the file is not a JPEG.
    """

    tensor: Float[Tensor, "c h w"]
    shades: Shades
    region: Float[Tensor, "h w"] | None = None
    hole: Bool[Tensor, "h w"] | None = None
    silhouettes: Bool[Tensor, "h w"] | None = None
    quality: float = LOSSLESS

    @property
    def has_cues(self) -> bool:
        """Whether the statistics of the whole picture can be measured: it has three colours."""
        return len(self.tensor) == 3

    def value_of(self, cue: str) -> Float[np.ndarray, " k"]:
        """Return the value of a statistic of the whole picture."""
        return np.array([self.quality]) if cue == cues.COMPRESSION else self._values[cue]

    @functools.cached_property
    def _values(self) -> dict[str, Float[np.ndarray, " k"]]:
        """The statistics of the pixels. They are kept because the picture lends them to others."""
        pixels, where = self._pixels
        return {name: cue.measure(pixels, where) for name, cue in cues.CUES.items() if cue.measure is not None}

    @property
    def _pixels(self) -> tuple[Float[np.ndarray, "h w 3"], Bool[np.ndarray, "h w"]]:
        """The picture with values 0..1, and where its statistics are measured."""
        hole = torch.zeros_like(self.shades.view) if self.hole is None else self.hole
        pixels = self.shades.pixels(self.tensor).permute(1, 2, 0).numpy()
        return np.ascontiguousarray(pixels), cues.beside(hole.numpy(), self.shades.view.numpy())

    def with_value(self, cue: str, value: Float[np.ndarray, " k"]) -> Float[Tensor, "c h w"]:
        """Return the picture with another value of a statistic."""
        pixels, where = self._pixels
        imposed = torch.from_numpy(np.ascontiguousarray(cues.CUES[cue].impose(pixels, where, value)))
        tensor = self.shades.black + imposed.permute(2, 0, 1) * self.shades.contrast
        return torch.where(self.shades.view, tensor, self.tensor)

    def without(self, fill: str) -> Float[Tensor, "c h w"]:
        """Return the picture with its objects' boxes filled. If there is no texture to copy, the fill is smooth."""
        assert self.hole is not None
        return self._with_fill(fill, self.hole)

    def as_background(self, fill: str) -> Float[Tensor, "c h w"]:
        """Return the picture with only its objects' silhouettes filled, to paste another object onto.

        The boxes cover far more: filling them would destroy much of the background.
        """
        return self._as_background[fill]

    @functools.cached_property
    def _as_background(self) -> dict[str, Float[Tensor, "c h w"]]:
        """The background for each fill. It is kept because several pictures are pasted on it."""
        assert self.silhouettes is not None
        return {fill: self._with_fill(fill, self.silhouettes) for fill in edits.FILLS}

    def _with_fill(self, fill: str, hole: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
        unknown = hole | ~self.shades.view
        filled = edits.FILLS[fill](self.tensor, unknown)
        if filled is None:
            filled = fill_smoothly(self.tensor, unknown)
        return torch.where(hole & self.shades.view, filled, self.tensor)

    @functools.cached_property
    def has_background(self) -> bool:
        """Whether enough of the picture lies beside its objects to serve as a background."""
        return self._has_room_beside(self.silhouettes)

    @functools.cached_property
    def can_lose_boxes(self) -> bool:
        """Whether enough of the picture is left if the objects' boxes are removed."""
        return self._has_room_beside(self.hole)

    def _has_room_beside(self, hole: Bool[Tensor, "h w"] | None) -> bool:
        return hole is not None and edits.largest_rectangle(hole | ~self.shades.view) is not None


@dataclass(frozen=True)
class Partners:
    """The pictures that lend their backgrounds to a picture: of its own class, and of other classes.

    Each entry holds the candidates for one background, all of one class. The first entries that have a usable candidate
    are used. From each, the first candidate with nearly the most room is taken.
    """

    same: tuple[tuple[Item, ...], ...] = ()
    other: tuple[tuple[Item, ...], ...] = ()


MOST_CANDIDATES = 8
"""The number of candidates for each background, in a large class. On photos of Caltech-101, 0.15 of the picture is then
filled and in sight behind the object, and 0.25 with a random candidate; a network with real weights is right for 0.57
instead of 0.52 of the objects on backgrounds of their own class (scripts/lab/validate_fills.py)."""

_GROUPS_PER_CANDIDATE = 8
"""The number of groups of a class for each candidate. If n backgrounds differ in room and c of them are drawn each
time, the choice is as varied as a choice among n * (2 * c - 1) / c**2 backgrounds. Here these are at least 12;
intervals need 5 groups."""

_SPARES = 3
"""How many more backgrounds of either kind get candidates, because some classes have no usable background."""


def draw_partners(sample: Sequence[Item], backgrounds: Sequence[Item], wanted: int, seed: int) -> dict[Item, Partners]:
    """Draw each picture's partners: always of another group, and for ``Partners.other`` of another class.

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
    counts = {label: min(MOST_CANDIDATES, max(1, count // _GROUPS_PER_CANDIDATE)) for label, count in groups.items()}
    rotation = _Rotation(by_class, seed)
    turns = Counter[str]()
    drawn: dict[Item, Partners] = {}
    for item in sample:
        others = sorted(set(enough) - {item.label}) or sorted(by_class.keys() - {item.label})
        start, turns[item.label] = turns[item.label], turns[item.label] + wanted
        rng, entries = own_generator(item.name, seed), range(wanted + _SPARES)
        in_turn = [others[(start + entry) % len(others)] for entry in entries] if others else []
        same, other = (
            [
                _candidates(item, by_class[label], rotation.next(item, label), counts[label], rng)
                for label in labels
                if label in by_class
            ]
            for labels in ([item.label] * len(entries), in_turn)
        )
        own, foreign = tuple(filter(None, same)), tuple(filter(None, other))
        drawn[item] = Partners(own, foreign) if own and foreign else Partners()
    return drawn


class _Rotation:
    """Hands out the backgrounds of a class to the pictures of a class, in a random order that then repeats."""

    def __init__(self, by_class: Mapping[str, Sequence[Item]], seed: int) -> None:
        self._by_class = by_class
        self._seed = seed
        self._shuffled: dict[tuple[str, str], list[Item]] = {}
        self._handed_out = Counter[tuple[str, str]]()

    def next(self, item: Item, label: str) -> Item | None:
        """Return the next background of a class for a picture; None if all are of the picture's own group."""
        pair = (item.label, label)
        if pair not in self._shuffled:
            order = own_generator(f"{item.label}\0{label}", self._seed).permutation(len(self._by_class[label]))
            self._shuffled[pair] = [self._by_class[label][number] for number in order.tolist()]
        backgrounds = self._shuffled[pair]
        for _ in backgrounds:
            self._handed_out[pair] += 1
            background = backgrounds[self._handed_out[pair] % len(backgrounds)]
            if background.group != item.group:
                return background
        return None


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
    return np.random.default_rng([seed, zlib.crc32(name.encode(errors="surrogateescape"))])


Backgrounds: TypeAlias = Mapping[str, PreparedPicture]
"""The pictures that lend their background or their statistics, by name."""


def region_edits(picture: PreparedPicture, same: Backgrounds, other: Backgrounds, seed: int) -> Edits:
    """List the edits of a picture whose object's region is known. ``seed`` belongs to this picture."""
    assert picture.region is not None
    listed: Edits = {}
    for fill in edits.FILLS:
        for edit, background in _lent(fill, ("same", same), ("other", other)):
            listed[edit] = functools.partial(_paste_on, picture, background, fill)
        if picture.can_lose_boxes:
            listed[Edit("removed", fill)] = functools.partial(picture.without, fill)
    inside, view = picture.region > 0.5, picture.shades.view
    beside = view & (picture.region == 0)
    listed[Edit("smooth-object")] = functools.partial(fill_smoothly, picture.tensor, inside)
    listed[Edit("smooth-background")] = functools.partial(_smooth_background, picture, beside, seed)
    listed[Edit("noisy-object")] = functools.partial(_add_noise, picture, inside, seed)
    listed[Edit("noisy-background")] = functools.partial(_add_noise, picture, view & ~inside, seed)
    return listed


def cue_edits(picture: PreparedPicture, same: Backgrounds, other: Backgrounds, names: Sequence[str]) -> Edits:
    """List the exchanges of the picture's statistics: with a picture of its own class, and one of another class."""
    if not (picture.has_cues and same and other):
        return {}
    first_same, first_other = (dict([next(iter(backgrounds.items()))]) for backgrounds in (same, other))
    return {
        edit: functools.partial(_exchange_cue, picture, lender, cue)
        for cue in names
        for edit, lender in _lent(cue, ("same-cue", first_same), ("other-cue", first_other))
    }


def ring_edits(picture: PreparedPicture, same: Backgrounds, other: Backgrounds, share: float) -> Edits:
    """List the edits of a picture without regions: its middle in the rings of other pictures, and its ring alone."""
    outer = edits.outer_ring((picture.tensor.shape[1], picture.tensor.shape[2]), share)
    listed: Edits = {
        edit: functools.partial(_exchange_ring, picture, background, outer)
        for edit, background in _lent(edits.RING, ("same", same), ("other", other))
    }
    listed[Edit("removed", edits.RING)] = functools.partial(_make_middle_grey, picture, outer)
    return listed


def _lent(fill: str, *arms: tuple[Arm, Backgrounds]) -> Iterator[tuple[Edit, PreparedPicture]]:
    """Yield an edit for each background, with the picture that lends it."""
    for arm, backgrounds in arms:
        for lender, background in backgrounds.items():
            yield Edit(arm, fill, lender), background


def _exchange_cue(picture: PreparedPicture, lender: PreparedPicture, cue: str) -> Float[Tensor, "c h w"]:
    return picture.with_value(cue, lender.value_of(cue))


def _paste_on(picture: PreparedPicture, background: PreparedPicture, fill: str) -> Float[Tensor, "c h w"]:
    assert picture.region is not None
    return edits.paste(picture.tensor, picture.region, background.as_background(fill))


def _exchange_ring(
    picture: PreparedPicture, background: PreparedPicture, outer: Bool[Tensor, "h w"]
) -> Float[Tensor, "c h w"]:
    return torch.where(outer, background.tensor, picture.tensor)


def _make_middle_grey(picture: PreparedPicture, outer: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
    grey = (picture.shades.black + picture.shades.white) / 2
    return torch.where(outer, picture.tensor, grey)


def _smooth_background(
    picture: PreparedPicture, allowed: Bool[Tensor, "h w"], seed: int
) -> Float[Tensor, "c h w"] | None:
    assert picture.region is not None
    step = max(1, min(allowed.shape) // _BLOCKS)
    chosen = edits.random_blocks(allowed, float((picture.region > 0.5).sum()), seed, step)
    return None if chosen is None else fill_smoothly(picture.tensor, chosen)


def _add_noise(picture: PreparedPicture, region: Bool[Tensor, "h w"], seed: int) -> Float[Tensor, "c h w"]:
    draws = np.random.default_rng([seed, 1]).standard_normal(picture.tensor.shape, dtype=np.float32)
    strength = NOISE * (picture.shades.white - picture.shades.black)
    return picture.tensor + region * strength * torch.from_numpy(draws)


MakeEdits: TypeAlias = Callable[[Item], dict[Edit, Tensor]]
"""Makes a picture's edits; runs in a worker thread."""

AnswerBatch: TypeAlias = Callable[[Tensor, Sequence[str]], list[Answer]]
"""Returns the answers to a batch of edits (N, C, H, W), given the class of each edit's picture."""


def run(
    items: Sequence[Item], make: MakeEdits, answer: AnswerBatch, batch_size: int, workers: int, at_once: int = 1
) -> Iterator[tuple[Item, Answers]]:
    """Make the edits of each picture, show them to the model in full batches, and yield the answers of each picture.

    Args:
        items: the pictures, in order.
        make: makes a picture's edits.
        answer: shows a batch of edits to the model.
        batch_size: edits per forward pass.
        workers: threads that make edits.
        at_once: how many passes run at the same time, each on a part of the cores.
    """
    tasks = (Task(functools.partial(make, item), in_thread=True) for item in items)
    made = in_order(tasks, workers=workers, ahead=workers + 1)
    gathered = _Gathered()
    batches = _batches(zip(items, made, strict=True), batch_size, gathered)
    passes = (Task(functools.partial(_answered, answer, batch), in_thread=at_once > 1) for batch in batches)
    cores = torch.get_num_threads() // at_once
    for batch, given in in_order(passes, workers=at_once, ahead=at_once, cores=cores):
        gathered.add(batch, given)
        yield from gathered.pop_complete()
    yield from gathered.pop_complete()


class _Shown(NamedTuple):
    """An edit that is to be shown to the model."""

    item: Item
    edit: Edit
    tensor: Tensor


def _batches(
    pictures: Iterable[tuple[Item, Mapping[Edit, Tensor]]], batch_size: int, gathered: _Gathered
) -> Iterator[list[_Shown]]:
    """Join the edits of pictures into batches of one shape, and tell ``gathered`` how many edits each picture has."""
    batch: list[_Shown] = []
    for item, made in pictures:
        gathered.expect(item, len(made))
        for edit, tensor in made.items():
            if len(batch) == batch_size or (batch and batch[0].tensor.shape != tensor.shape):
                yield batch
                batch = []
            batch.append(_Shown(item, edit, tensor))
    if batch:
        yield batch


def _answered(answer: AnswerBatch, batch: list[_Shown]) -> tuple[list[_Shown], list[Answer]]:
    return batch, answer(torch.stack([shown.tensor for shown in batch]), [shown.item.label for shown in batch])


@dataclass
class _Gathered:
    """Gathers the answers to the edits of each picture."""

    answers: dict[Item, Answers] = field(default_factory=dict)
    expected: dict[Item, int] = field(default_factory=dict)

    def expect(self, item: Item, edits: int) -> None:
        """Expect answers to this many edits of a picture."""
        self.expected[item], self.answers[item] = edits, {}

    def add(self, batch: Sequence[_Shown], given: Sequence[Answer]) -> None:
        """Add the answers to a batch."""
        for shown, answer in zip(batch, given, strict=True):
            self.answers[shown.item][shown.edit] = answer

    def pop_complete(self) -> Iterator[tuple[Item, Answers]]:
        """Remove the pictures whose edits are all answered, and yield them."""
        for item in [item for item, answers in self.answers.items() if len(answers) == self.expected[item]]:
            yield item, self.answers.pop(item)
