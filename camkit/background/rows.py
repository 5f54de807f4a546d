"""One row per picture, from the journal's rows for the heat and for the edits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from camkit.background import evidence
from camkit.background.experiment import Answer
from camkit.background.journal import Row, unpacked
from camkit.background.measures import ImageRow
from camkit.background.plan import Plan
from camkit.background.values import Item

_MARGIN_DIGITS = 3
"""Digits kept of a change of margin: the last digits of logits differ with the number of threads and the batch size."""


class _Energy(NamedTuple):
    """A map's energy in its own region, the mean energy of the other maps there, and the headroom between the two."""

    own: float
    shuffled: float
    headroom: float


def image_rows(plan: Plan, heat: Mapping[str, Row], edited: Mapping[str, Row]) -> list[ImageRow]:
    """Join what was measured of each picture.

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
    by_geometry: dict[tuple[Any, Any, Any], list[str]] = defaultdict(list)
    for item in plan.data.items:
        row = heat.get(item.name, {})
        if "cells" in row:
            by_geometry[tuple(row["grid"]), tuple(row["size"]), tuple(map(tuple, row["extent"]))].append(item.name)
    energies: dict[str, _Energy] = {}
    for (grid, size, extent), names in by_geometry.items():
        maps, within = (np.stack([unpacked(heat[name][part]) for name in names]) for part in ("cells", "within"))
        everywhere = evidence.heat_in_cells(torch.ones(size, dtype=torch.bool), grid, extent)
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
    own_outputs = plan.matched.indices[item.label]
    by_arm: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    pasted: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for edit, answer in answers.items():
        arm, fill, *rest = edit.split(".", 3)
        if arm in ("same", "other"):
            background, named = items[rest[1]], plan.name_of(int(answer["answer"]))
            if plan.settings.expects_anything(background.label) and named == background.label:
                continue  # the config lets anything, also this background, be recognised as that class
            pasted[fill].append((background.label, background.group, named))
        by_arm[arm][fill].append(int(answer["answer"]) in own_outputs)
    fills = sorted(by_arm["same"].keys() & by_arm["other"].keys())

    def margin_drop(edit: str) -> float | None:
        return round(heat["margin"] - answers[edit]["margin"], _MARGIN_DIGITS) if edit in answers else None

    def right(edit: str) -> bool | None:
        return int(answers[edit]["answer"]) in own_outputs if edit in answers else None

    comparable = energy is not None and math.isfinite(energy.shuffled)
    return ImageRow(
        name=item.name,
        label=item.label,
        group=item.group,
        right=heat["answer"] in own_outputs,
        answer=plan.name_of(heat["answer"]),
        probability=heat["probability"],
        status=heat["status"],
        energy=energy.own if energy else None,
        shuffled=energy.shuffled if energy and comparable else None,
        room=energy.headroom if energy and comparable else None,
        grid=tuple(heat["grid"]) if "grid" in heat else None,
        **{measure: heat.get(measure) for measure in ("ceiling", "hit", "centre_hit", "rank", "area")},
        same={fill: float(np.mean(by_arm["same"][fill])) for fill in fills},
        other={fill: float(np.mean(by_arm["other"][fill])) for fill in fills},
        pasted={fill: tuple(pasted[fill]) for fill in fills},
        removed={fill: answers_right[0] for fill, answers_right in by_arm["removed"].items()},
        named={fill: plan.name_of(int(answers[f"removed.{fill}"]["answer"])) for fill in by_arm["removed"]},
        background_change=margin_drop("edited.background"),
        object_change=margin_drop("edited.object"),
        right_with_noise_on_object=right("noise.object"),
        right_with_noise_on_background=right("noise.background"),
    )
