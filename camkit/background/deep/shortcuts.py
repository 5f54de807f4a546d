"""What gives a class away in its backgrounds: the smallest part that makes the model name the class elsewhere.

Parts of the class's backgrounds are pasted onto backgrounds of other classes, at the same place in the frame. No
picture shows an object. The parts that raise the class most are chosen on some backgrounds and tested on others, so
that the choice does not flatter the result. Each is also pasted without its colours, and with its pixels shuffled,
which leaves the colours and destroys everything else.

CRAFT (Fel et al. 2023, arXiv:2211.10154) shows crops too, but ranks them by a factorisation of feature maps.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from scipy.stats import binomtest
from torch import Tensor
from torch.nn import functional

from camkit.background.data import Item
from camkit.background.deep import DeepFinding, Material
from camkit.background.edits import BLUR
from camkit.background.experiment import Experiment, own_generator
from camkit.images.regions import Shades
from camkit.types import Box

Look: TypeAlias = Literal["", "grey", "shuffled"]
"""A part as it is, without its colours, or with its pixels shuffled."""

SEARCHED = 12
"""How many pictures of a class have their backgrounds searched. With a third of the sides, each of them has 25
parts."""

HOSTS = 24
"""Backgrounds of other classes onto which parts are pasted: half of them for the choice, half for the test."""

CROPS = 3
"""How many parts are tested and shown."""

SIDES = (1 / 3, 1 / 2, 2 / 3)
"""Sides of the parts as shares of the picture's, in the order in which they are tried."""

_STEP = 1 / 2
"""The distance of neighbouring parts, as a share of their side."""

_MOST_FILLED = 0.25
"""The share of a part's pixels that may have been filled where an object was."""

_SIGNIFICANT = 0.01
"""The p-value below which parts count as a shortcut; three sizes are tried for each class. The test counts the
backgrounds onto which the parts are pasted, not the parts, because these are alike."""

_IN_ONE_THIRD = 0.55
"""If more than this share of the rise lies in one third of the frame, the report names that third. An even rise has a
third there; the rise by a mark in a corner spreads over all parts that touch the mark."""

_STAYS = 0.5
"""A variant of the parts works like the parts themselves if it keeps more than this share of their effect."""


@dataclass(frozen=True)
class Crop:
    """A part of a picture.

    Attributes:
        name: the picture.
        box: the part, in pixels of the model's input.
    """

    name: str
    box: Box


@dataclass(frozen=True)
class Shortcut:
    """What the model takes from the backgrounds of one class.

    Attributes:
        label: the class.
        crops: the parts of backgrounds that raise the class most, each of another group.
        pasted: how many backgrounds of other classes with one of the parts were shown to the model.
        before: on how many of them the model names this class without the part.
        after: on how many of them the model names this class with the part.
        grey: on how many with the part in grey.
        shuffled: on how many with the part's pixels shuffled.
        place: where in the frame the parts that raise the class lie.
    """

    label: str
    crops: tuple[Crop, ...]
    pasted: int
    before: int
    after: int
    grey: int
    shuffled: int
    place: str

    @property
    def look(self) -> str:
        """Which property of the parts has the effect, as a clause: colours, texture and shape, either, or both."""
        without_colours, without_shape = (
            count - self.before > _STAYS * (self.after - self.before) for count in (self.grey, self.shuffled)
        )
        if without_colours and without_shape:
            return "their colours alone suffice, and so do their texture and shape alone"
        if without_colours:
            return "their texture and shape suffice without the colours"
        if without_shape:
            return "their colours suffice without texture and shape"
        return "neither their colours alone nor their texture and shape alone suffice"

    @property
    def sentences(self) -> tuple[str, str, str]:
        """What was found, which property of the parts has the effect, and which pictures would help, in words."""
        return (
            f"Small parts of the backgrounds of {self.label} suffice: pasted onto backgrounds of other classes, "
            f"without any object, they make the model answer {self.label} {self.after} of {self.pasted} times. Without "
            f"the parts, it does so {self.before} times.",
            f"In grey, the parts do so {self.grey} times; with their pixels shuffled, {self.shuffled} times: "
            f"{self.look}. Such parts lie {self.place}.",
            f"Collect pictures of {self.label} without such parts, and pictures of other classes with them.",
        )


@dataclass(frozen=True, eq=False)
class _Background:
    """One picture without its objects.

    Attributes:
        name: the picture.
        group: pictures with the same group belong together.
        tensor: the model's input.
        shades: black and white after the preprocessing.
        own: where the pixels are the picture's own.
    """

    name: str
    group: str
    tensor: Float[Tensor, "c h w"]
    shades: Shades
    own: Bool[Tensor, "h w"]


@dataclass(frozen=True)
class Shortcuts(DeepFinding):
    """The shortcuts of the classes that have one."""

    found: tuple[Shortcut, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """Each shortcut in words."""
        return tuple(" ".join(shortcut.sentences) for shortcut in self.found)

    def as_json(self) -> list[dict[str, Any]]:
        """Return plain values for the report."""
        return [{**asdict(shortcut), "sentences": list(shortcut.sentences)} for shortcut in self.found]


def find(material: Material) -> Shortcuts:
    """Find the shortcuts of the first few suspects; a class without one is left out. See ``find_shortcut``.

    It returns none for a detector, which has no answer to a picture without objects.
    """
    suspects = [] if material.plan.detects else material.suspects[: material.plan.settings.check.shortcuts]
    found = (find_shortcut(material.experiment, label) for label in suspects)
    return Shortcuts(tuple(shortcut for shortcut in found if shortcut is not None))


def find_shortcut(experiment: Experiment, label: str) -> Shortcut | None:
    """Find the parts of a class's backgrounds that make the model name the class.

    Args:
        experiment: the pictures, and the model.
        label: the class.

    Returns:
        None if no part of them, up to two thirds of the picture's sides, makes the model name the class elsewhere, or
        if the pictures differ in size, or too few have an object to remove.
    """
    plan = experiment.plan
    rng = own_generator(label, plan.settings.check.seed)
    shuffled = _groups_in_turn([plan.sample[number] for number in rng.permutation(len(plan.sample)).tolist()])
    of_class = _backgrounds(experiment, [item for item in shuffled if item.label == label])
    of_others = _backgrounds(experiment, [item for item in shuffled if item.label != label])
    own, hosts = list(itertools.islice(of_class, SEARCHED)), list(itertools.islice(of_others, HOSTS))
    if not own or len(hosts) < 2 or len({background.tensor.shape for background in (*own, *hosts)}) != 1:
        return None
    found = (_find(experiment, label, own, hosts, side) for side in SIDES)
    return next((shortcut for shortcut in found if shortcut is not None), None)


def _groups_in_turn(items: Sequence[Item]) -> list[Item]:
    """Return the first picture of each group, then the second of each, and so on."""
    seen = Counter[str]()
    turn: dict[Item, int] = {}
    for item in items:
        turn[item] = seen[item.group]
        seen[item.group] += 1
    return sorted(items, key=lambda item: turn[item])


def _backgrounds(experiment: Experiment, items: Sequence[Item]) -> Iterator[_Background]:
    """Remove the objects of the usable pictures."""
    for item in items:
        picture = experiment.load(item)
        for edit, make in experiment.edits(item, wanted=0).items():
            if edit.arm == "removed" and edit.fill != BLUR and picture is not None:
                tensor = make()
                own = (tensor == picture.tensor).all(0) & picture.shades.view
                yield _Background(item.name, item.group, tensor, picture.shades, own)


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of a background, and by how much it raised the class's margin on a background of another class."""

    background: _Background
    box: Box
    rise: float = 0.0

    @property
    def window(self) -> tuple[slice, slice]:
        """The rows and the columns of the part."""
        return slice(int(self.box.top), int(self.box.bottom)), slice(int(self.box.left), int(self.box.right))

    def on(self, host: Float[Tensor, "c h w"], look: Look = "") -> Float[Tensor, "c h w"]:
        """Return a background with the part at its own place."""
        rows, columns = self.window
        pasted = host.clone()
        pasted[:, rows, columns] = self._changed(self.background.tensor[:, rows, columns], look)
        return pasted

    def _changed(self, part: Float[Tensor, "c h w"], look: Look) -> Float[Tensor, "c h w"]:
        if look == "shuffled":
            order = torch.randperm(part[0].numel(), generator=torch.Generator().manual_seed(0))
            return part.flatten(1)[:, order].reshape(part.shape)
        if look == "grey":
            shades = self.background.shades
            brightness = shades.pixels(self.background.tensor).mean(0, keepdim=True)
            return (shades.black + brightness * shades.contrast)[:, *self.window]
        return part


def _find(
    experiment: Experiment, label: str, own: Sequence[_Background], hosts: Sequence[_Background], side: float
) -> Shortcut | None:
    """Search parts of one size; None if those that raise the class most on some backgrounds do not do so on others."""
    chosen_on, tested_on = hosts[::2], [host.tensor for host in hosts[1::2]]
    parts = _with_rises(experiment, label, _parts(own, side), chosen_on)
    best = _best_of_each_group(parts)[:CROPS]
    if not best:
        return None

    def named_with(look: Look) -> Bool[Tensor, "part host"]:
        return torch.stack([_named(experiment, label, [part.on(host, look) for host in tested_on]) for part in best])

    before, after = torch.stack([_named(experiment, label, tested_on)] * len(best)), named_with("")
    change = (after.float() - before.float()).mean(0)  # of each background
    higher, lower = int((change > 0).sum()), int((change < 0).sum())
    if not higher or binomtest(higher, higher + lower, alternative="greater").pvalue > _SIGNIFICANT:
        return None
    return Shortcut(
        label,
        crops=tuple(Crop(part.background.name, part.box) for part in best),
        place=_place(parts),
        pasted=before.numel(),
        before=int(before.sum()),
        after=int(after.sum()),
        grey=int(named_with("grey").sum()),
        shuffled=int(named_with("shuffled").sum()),
    )


def _parts(backgrounds: Sequence[_Background], side: float) -> list[_Part]:
    """List the parts of one size that are mostly the pictures' own."""
    parts = []
    for background in backgrounds:
        height, width = background.own.shape
        down, across = max(1, round(side * height)), max(1, round(side * width))
        for top, left in itertools.product(_starts(height, down), _starts(width, across)):
            part = _Part(background, Box(left, top, left + across, top + down))
            if float(background.own[part.window].float().mean()) >= 1 - _MOST_FILLED:
                parts.append(part)
    return parts


def _starts(length: int, side: int) -> list[int]:
    """Return where parts of a side begin on an axis: evenly spread, the last one at the end."""
    steps = max(1, round((length - side) / (_STEP * side)))
    return [round(number * (length - side) / steps) for number in range(steps + 1)]


def _with_rises(
    experiment: Experiment, label: str, parts: Sequence[_Part], hosts: Sequence[_Background]
) -> list[_Part]:
    """Paste each part onto one background, and note by how much that raises the class's margin."""
    alone = _margins(experiment, label, [host.tensor for host in hosts])
    on = [number % len(hosts) for number in range(len(parts))]
    pasted = _margins(experiment, label, [part.on(hosts[host].tensor) for part, host in zip(parts, on, strict=True)])
    return [replace(part, rise=margin - alone[host]) for part, host, margin in zip(parts, on, pasted, strict=True)]


def _best_of_each_group(parts: Sequence[_Part]) -> list[_Part]:
    """Return each group's part with the largest rise, the largest first; parts without a rise are left out."""
    best: dict[str, _Part] = {}
    for part in sorted(parts, key=lambda part: -part.rise):
        if part.rise > 0:
            best.setdefault(part.background.group, part)
    return list(best.values())


def _margins(experiment: Experiment, label: str, pictures: Sequence[Float[Tensor, "c h w"]]) -> list[float]:
    """Return the class's best logit minus the best other logit, for each picture."""
    return [answer.margin for answer in experiment.answers(pictures, label)]


def _named(experiment: Experiment, label: str, pictures: Sequence[Float[Tensor, "c h w"]]) -> Bool[Tensor, " n"]:
    """Return whether the model names the class, for each picture."""
    outputs = experiment.plan.matched.indices[label]
    return torch.tensor([answer.output in outputs for answer in experiment.answers(pictures, label)])


def _place(parts: Sequence[_Part]) -> str:
    """Say where in the frame the parts that raise the class lie."""
    heat = torch.zeros(parts[0].background.own.shape, dtype=torch.float64)
    for part in parts:
        heat[part.window] += max(0.0, part.rise)
    seen = torch.zeros_like(heat)
    for part in parts:
        seen[part.window] += 1
    return place_of(heat / seen.clamp(min=1))


def place_of(heat: Float[Tensor, "h w"]) -> str:
    """Say where in the frame most of the heat lies: in one ninth of it, in one third, or all over it.

    >>> spot = torch.zeros(9, 9)
    >>> spot[7, 1] = 1
    >>> place_of(spot), place_of(torch.ones(9, 9))
    ('at the bottom left', 'all over the frame')
    """
    zones = functional.adaptive_avg_pool2d(heat.double()[None, None], 3)[0, 0]
    shares = zones / zones.sum().clamp(min=torch.finfo(zones.dtype).tiny)
    rows, columns = ("top", "middle", "bottom"), ("left", "middle", "right")
    row, column = (
        thirds[int(totals.argmax())] if float(totals.amax()) >= _IN_ONE_THIRD else ""
        for thirds, totals in ((rows, shares.sum(1)), (columns, shares.sum(0)))
    )
    if row and column:
        names = [name for name in (row, column) if name != "middle"]
        return f"at the {' '.join(names)}" if names else "in the middle"
    if row or column:
        third = row or column
        return "mostly in the middle" if third == "middle" else f"mostly at the {third}"
    return "all over the frame"
