"""One row per picture, from the journal's rows for the heat and for the edits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from camkit.background import evidence
from camkit.background.experiment import Answers, Arm, Edit
from camkit.background.journal import Row, unpacked
from camkit.background.measures import ImageRow
from camkit.background.plan import Plan
from camkit.background.values import Item
from camkit.types import Placement

_MARGIN_DIGITS = 3
"""Digits kept of a change of margin: the last digits of logits differ with the number of threads and the batch size."""


class _Energy(NamedTuple):
    """A map's energy in its own region, the mean energy of the other maps there, and the headroom between the two."""

    own: float
    shuffled: float
    headroom: float


def image_rows(plan: Plan, heat: Mapping[str, Row], answers: Mapping[str, Answers]) -> list[ImageRow]:
    """Join what was measured on each picture.

    Args:
        plan: the check.
        heat: the journal's heat row of each usable picture, by name.
        answers: the answers to each picture's edits, by name.
    """
    energies = _energies(plan.data.items, heat)
    items = {item.name: item for item in plan.data.items}
    return [
        _image_row(plan, items, item, heat[name], energies.get(name), answers.get(name, {}))
        for name, item in items.items()
        if name in heat
    ]


def _energies(items: Sequence[Item], heat: Mapping[str, Row]) -> dict[str, _Energy]:
    """Compare each map with the regions of all pictures whose map has the same grid, size and extent."""
    by_geometry: dict[tuple[Any, Any, Placement], list[str]] = defaultdict(list)
    for item in items:
        row = heat.get(item.name, {})
        if "cells" in row:
            placement = Placement(tuple(map(tuple, row["extent"])))
            by_geometry[tuple(row["grid"]), tuple(row["size"]), placement].append(item.name)
    energies: dict[str, _Energy] = {}
    for (grid, size, placement), names in by_geometry.items():
        maps, within = (np.stack([unpacked(heat[name][part]) for name in names]) for part in ("cells", "within"))
        everywhere = evidence.heat_in_cells(torch.ones(size, dtype=torch.bool), grid, placement)
        own, shuffled = evidence.energies(maps, within, everywhere)
        headroom = evidence.headroom(within, everywhere)
        columns = zip(own.tolist(), shuffled.tolist(), headroom.tolist(), strict=True)
        energies |= {name: _Energy(*values) for name, values in zip(names, columns, strict=True)}
    return energies


def _image_row(
    plan: Plan, items: Mapping[str, Item], item: Item, heat: Row, energy: _Energy | None, answers: Answers
) -> ImageRow:
    outputs = plan.matched.indices[item.label]
    right = {edit: answer.output in outputs for edit, answer in answers.items()}
    named = {edit: plan.name_of(answer.output) for edit, answer in answers.items()}
    lent = {edit: items[edit.lender] for edit in answers if edit.arm in ("same", "other")}
    counted = {edit: behind for edit, behind in lent.items() if not plan.excuses(named[edit], behind)}
    same, other = (_shares({edit: right[edit] for edit in counted}, arm) for arm in ("same", "other"))
    fills = sorted(same.keys() & other.keys())
    pasted = {
        fill: tuple((behind.label, behind.group, named[edit]) for edit, behind in counted.items() if edit.fill == fill)
        for fill in fills
    }
    comparable = energy is not None and math.isfinite(energy.shuffled)

    def margin_drop(edit: Edit) -> float | None:
        return round(heat["margin"] - answers[edit].margin, _MARGIN_DIGITS) if edit in answers else None

    return ImageRow(
        name=item.name,
        label=item.label,
        group=item.group,
        right=heat["answer"] in outputs,
        answer=plan.name_of(heat["answer"]),
        probability=heat["probability"],
        status=heat["status"],
        energy=energy.own if energy else None,
        shuffled=energy.shuffled if energy and comparable else None,
        room=energy.headroom if energy and comparable else None,
        grid=tuple(heat["grid"]) if "grid" in heat else None,
        **{measure: heat.get(measure) for measure in ("ceiling", "hit", "centre_hit", "rank", "area")},
        same={fill: same[fill] for fill in fills},
        other={fill: other[fill] for fill in fills},
        pasted=pasted,
        removed=_by_fill(right, "removed"),
        named=_by_fill(named, "removed"),
        same_cue=_by_fill(right, "same-cue"),
        other_cue=_by_fill(right, "other-cue"),
        background_change=margin_drop(Edit("smooth-background")),
        object_change=margin_drop(Edit("smooth-object")),
        right_with_noise_on_object=right.get(Edit("noisy-object")),
        right_with_noise_on_background=right.get(Edit("noisy-background")),
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
