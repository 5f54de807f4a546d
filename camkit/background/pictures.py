"""What was measured on each picture: one row for it, from its heat and the answers to its edits."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import TypeAdapter

from camkit.background.data import Item
from camkit.background.edits import Arm, Edit
from camkit.background.experiment import Answers
from camkit.background.heat import HeatRow, compare_maps
from camkit.background.plan import Plan


class Pasted(NamedTuple):
    """An answer to the object on another background: the background's class and group, and the class that is named."""

    background: str
    group: str
    named: str


@dataclass(frozen=True)
class ImageRow:
    """What was measured on one picture. docs/check.md explains the measures.

    Attributes:
        name, label, group: the picture's name, class and group.
        right, answer, probability: whether the answer to the unedited picture is right, the class it names, and the
            probability of the picture's own class, if the model has probabilities.
        status: whether the map has evidence.
        energy, shuffled, ceiling: E, S and C of the map.
        room: the headroom: how much more energy perfect maps have in their own region than in other pictures' regions.
        hit, rank, area: as ``heat.measure`` returns them.
        grid: rows and columns of the map.
        same, other: by fill, the share of right answers on backgrounds of its own class, and of other classes.
        pasted: by fill, the answers to the object on each background that it was shown on.
        removed, named: by fill, whether the answer was right with the object removed, and the class named then.
        same_cue, other_cue: by statistic of the whole picture, whether the answer was right with the value of a picture
            of its own class, and of another class.
    """

    name: str
    label: str
    group: str
    right: bool
    answer: str
    probability: float | None
    status: str
    energy: float | None = None
    shuffled: float | None = None
    ceiling: float | None = None
    room: float | None = None
    hit: float | None = None
    rank: float | None = None
    area: float | None = None
    grid: tuple[int, ...] | None = None
    same: Mapping[str, float] = field(default_factory=dict)
    other: Mapping[str, float] = field(default_factory=dict)
    pasted: Mapping[str, Sequence[Pasted]] = field(default_factory=dict)
    removed: Mapping[str, bool] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    same_cue: Mapping[str, bool] = field(default_factory=dict)
    other_cue: Mapping[str, bool] = field(default_factory=dict)

    @functools.cached_property
    def by_background(self) -> dict[str, list[bool]]:
        """Whether the answers on the backgrounds of each class are right, with all fills."""
        right: dict[str, list[bool]] = defaultdict(list)
        for pasted in itertools.chain.from_iterable(self.pasted.values()):
            right[pasted.background].append(pasted.named == self.label)
        return right

    @property
    def skill(self) -> tuple[float, float] | None:
        """How far the map and a perfect map beat the maps of other pictures; None if they could not be compared."""
        if self.energy is None or self.shuffled is None or self.ceiling is None:
            return None
        return self.energy - self.shuffled, self.ceiling - self.shuffled


def named_without_object(rows: Sequence[ImageRow], label: str, *, own: bool = True) -> tuple[int, int]:
    """Count the pictures on which the model names a class with the object removed, and the pictures that were tried.

    ``own`` counts pictures of the class; otherwise those of other classes count. Any way of filling the hole counts.
    """
    named = [label in row.named.values() for row in rows if row.named and (row.label == label) is own]
    return sum(named), len(named)


IMAGES = TypeAdapter(ImageRow)
"""How the row of a picture becomes JSON, and is read from it."""


def image_rows(plan: Plan, heat: Mapping[str, HeatRow], answers: Mapping[str, Answers]) -> list[ImageRow]:
    """Join what was measured on each picture.

    Args:
        plan: the check.
        heat: the journal's heat row of each usable picture, by name.
        answers: the answers to each picture's edits, by name.
    """
    energies = compare_maps(plan.data.items, heat)
    items = {item.name: item for item in plan.data.items}
    return [
        _image_row(plan, items, item, heat[name], energies.get(name, {}), answers.get(name, {}))
        for name, item in items.items()
        if name in heat
    ]


def _image_row(
    plan: Plan,
    items: Mapping[str, Item],
    item: Item,
    heat: HeatRow,
    energies: Mapping[str, Any],
    answers: Answers,
) -> ImageRow:
    outputs = plan.matched.indices[item.label]
    right = {edit: answer.output in outputs for edit, answer in answers.items()}
    named = {edit: plan.name_of(answer.output) for edit, answer in answers.items()}
    lent = {edit: items[edit.lender] for edit in answers if edit.arm in ("same", "other")}
    counted = {edit: behind for edit, behind in lent.items() if not plan.excuses(named[edit], behind)}
    same, other = (_shares({edit: right[edit] for edit in counted}, arm) for arm in ("same", "other"))
    fills = sorted(same.keys() & other.keys())
    answered = {edit: Pasted(behind.label, behind.group, named[edit]) for edit, behind in counted.items()}
    pasted = {fill: tuple(answer for edit, answer in answered.items() if edit.fill == fill) for fill in fills}
    return ImageRow(
        name=item.name,
        label=item.label,
        group=item.group,
        right=heat.answer.output in outputs,
        answer=plan.name_of(heat.answer.output),
        probability=heat.answer.share,
        status=heat.status,
        grid=None if heat.in_region is None else heat.in_region.grid,
        **energies,
        **({} if heat.in_region is None else heat.in_region.measures),
        same={fill: same[fill] for fill in fills},
        other={fill: other[fill] for fill in fills},
        pasted=pasted,
        removed=_by_fill(right, "removed"),
        named=_by_fill(named, "removed"),
        same_cue=_by_fill(right, "same-cue"),
        other_cue=_by_fill(right, "other-cue"),
    )


_T = TypeVar("_T")


def _by_fill(values: Mapping[Edit, _T], arm: Arm) -> dict[str, _T]:
    """Return the values of the edits of one arm, by fill."""
    return {edit.fill: value for edit, value in values.items() if edit.arm == arm}


def _shares(right: Mapping[Edit, bool], arm: Arm) -> dict[str, float]:
    """Return the share of right answers to the edits of one arm, by fill."""
    by_fill: dict[str, list[bool]] = defaultdict(list)
    for edit, is_right in right.items():
        if edit.arm == arm:
            by_fill[edit.fill].append(is_right)
    return {fill: float(np.mean(answers)) for fill, answers in by_fill.items()}
