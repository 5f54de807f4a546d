"""One row per picture, from the journal's rows for the heat and for the edits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from camkit.background import evidence
from camkit.background.experiment import (
    EDITED_BACKGROUND,
    EDITED_OBJECT,
    NOISY_BACKGROUND,
    NOISY_OBJECT,
    OTHER,
    OTHER_CUE,
    REMOVED,
    SAME,
    SAME_CUE,
    Answer,
    EditName,
)
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


def image_rows(plan: Plan, heat: Mapping[str, Row], edited: Mapping[str, Row]) -> list[ImageRow]:
    """Join what was measured on each picture.

    Args:
        plan: the check.
        heat: the journal's heat row of each usable picture, by name.
        edited: the journal's rows of the experiment, by name.
    """
    energies = _energies(plan, heat)
    items = {item.name: item for item in plan.data.items}
    return [
        _image_row(plan, items, item, heat[name], energies.get(name), edited.get(name, {}).get("answers", {}))
        for name, item in items.items()
        if name in heat
    ]


def _energies(plan: Plan, heat: Mapping[str, Row]) -> dict[str, _Energy]:
    """Compare each map with the regions of all pictures whose map has the same grid, size and extent."""
    by_geometry: dict[tuple[Any, Any, Placement], list[str]] = defaultdict(list)
    for item in plan.data.items:
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
    plan: Plan,
    items: Mapping[str, Item],
    item: Item,
    heat: Row,
    energy: _Energy | None,
    answers: Mapping[str, Answer],
) -> ImageRow:
    edits = _EditAnswers(plan, item, heat["margin"], answers)
    shares, pasted = edits.on_backgrounds(items)
    fills = sorted(shares[SAME].keys() & shares[OTHER].keys())
    removed = [EditName.of(edit).fill for edit in answers if EditName.of(edit).arm == REMOVED]
    comparable = energy is not None and math.isfinite(energy.shuffled)
    return ImageRow(
        name=item.name,
        label=item.label,
        group=item.group,
        right=heat["answer"] in plan.matched.indices[item.label],
        answer=plan.name_of(heat["answer"]),
        probability=heat["probability"],
        status=heat["status"],
        energy=energy.own if energy else None,
        shuffled=energy.shuffled if energy and comparable else None,
        room=energy.headroom if energy and comparable else None,
        grid=tuple(heat["grid"]) if "grid" in heat else None,
        **{measure: heat.get(measure) for measure in ("ceiling", "hit", "centre_hit", "rank", "area")},
        same={fill: shares[SAME][fill] for fill in fills},
        other={fill: shares[OTHER][fill] for fill in fills},
        pasted={fill: tuple(pasted[fill]) for fill in fills},
        removed={fill: edits.is_right(f"{REMOVED}.{fill}") for fill in removed},
        named={fill: edits.named(f"{REMOVED}.{fill}") for fill in removed},
        same_cue=edits.with_cues(SAME_CUE),
        other_cue=edits.with_cues(OTHER_CUE),
        background_change=edits.margin_drop(EDITED_BACKGROUND),
        object_change=edits.margin_drop(EDITED_OBJECT),
        right_with_noise_on_object=edits.is_right(NOISY_OBJECT) if NOISY_OBJECT in answers else None,
        right_with_noise_on_background=edits.is_right(NOISY_BACKGROUND) if NOISY_BACKGROUND in answers else None,
    )


_Pasted = tuple[str, str, str]
"""The class and the group of a background, and the class that the model named on it."""


@dataclass(frozen=True)
class _EditAnswers:
    """The model's answers to the edits of one picture; ``margin`` is the margin of the unedited picture."""

    plan: Plan
    item: Item
    margin: float
    answers: Mapping[str, Answer]

    def is_right(self, edit: str) -> bool:
        """Return whether the model named the picture's own class."""
        return int(self.answers[edit]["answer"]) in self.plan.matched.indices[self.item.label]

    def named(self, edit: str) -> str:
        """Return the class that the model named."""
        return self.plan.name_of(int(self.answers[edit]["answer"]))

    def with_cues(self, arm: str) -> dict[str, bool]:
        """Return by statistic whether the answer was right with the values of pictures of one kind."""
        return {EditName.of(edit).fill: self.is_right(edit) for edit in self.answers if EditName.of(edit).arm == arm}

    def margin_drop(self, edit: str) -> float | None:
        """Return how far the margin fell; None if the edit was not possible."""
        return round(self.margin - self.answers[edit]["margin"], _MARGIN_DIGITS) if edit in self.answers else None

    def on_backgrounds(self, items: Mapping[str, Item]) -> tuple[dict[str, dict[str, float]], dict[str, list[_Pasted]]]:
        """Return the share of right answers by arm and fill, and for each fill the backgrounds and the classes named.

        If the config lets anything be recognised as a background's class, an answer of that class does not count.
        """
        right: dict[str, dict[str, list[bool]]] = {SAME: defaultdict(list), OTHER: defaultdict(list)}
        pasted: dict[str, list[_Pasted]] = defaultdict(list)
        for edit in self.answers:
            name = EditName.of(edit)
            if name.arm not in right:
                continue
            background, named = items[name.background], self.named(edit)
            if self.plan.settings.expects_anything(background.label) and named == background.label:
                continue
            pasted[name.fill].append((background.label, background.group, named))
            right[name.arm][name.fill].append(self.is_right(edit))
        shares = {
            arm: {fill: float(np.mean(answers)) for fill, answers in by_fill.items()} for arm, by_fill in right.items()
        }
        return shares, pasted
