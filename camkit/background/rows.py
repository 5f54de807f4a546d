"""From what is on disk to one row per picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from camkit.background import evidence
from camkit.background.experiment import Answer
from camkit.background.journal import Row, unpacked
from camkit.background.measures import ImageRow
from camkit.background.plan import Plan
from camkit.background.values import Item

_MARGIN_DIGITS = 3
"""Of logits, whose last digits differ with the number of threads and the size of a batch."""


def image_rows(plan: Plan, heat: Mapping[str, Row], edited: Mapping[str, Row]) -> list[ImageRow]:
    """Join what is known of each picture; the maps of one grid are held against each other's regions."""
    energies: dict[str, tuple[float, float, float]] = {}
    by_grid: dict[tuple[Any, Any, Any], list[str]] = defaultdict(list)
    for name in (item.name for item in plan.data.items if item.name in heat):
        if "cells" in heat[name]:
            row = heat[name]
            by_grid[tuple(row["grid"]), tuple(row["size"]), tuple(map(tuple, row["extent"]))].append(name)
    for (grid, size, extent), names in by_grid.items():
        maps, within = (np.stack([unpacked(heat[name][part]) for name in names]) for part in ("cells", "within"))
        everywhere = evidence.heat_in_cells(torch.ones(size, dtype=torch.bool), grid, extent)
        own, shuffled = evidence.energies(maps, within, everywhere)
        room = evidence.room(within, everywhere)
        energies |= dict(zip(names, zip(own.tolist(), shuffled.tolist(), room.tolist(), strict=True), strict=True))
    known = {item.name: item for item in plan.data.items}
    return [
        _image_row(
            plan, known, item, heat[item.name], energies.get(item.name), edited.get(item.name, {}).get("answers", {})
        )
        for item in plan.data.items
        if item.name in heat
    ]


def _image_row(
    plan: Plan,
    known: Mapping[str, Item],
    item: Item,
    heat: Row,
    energy: tuple[float, float, float] | None,
    answers: Mapping[str, Answer],
) -> ImageRow:
    own = plan.matched.indices[item.label]
    by_arm: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    pasted: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for name, answer in answers.items():
        arm, what, *rest = name.split(".", 3)
        if arm in ("same", "other"):
            background, named = known[rest[1]], plan.name_of(int(answer["answer"]))
            if plan.settings.expects_anything(background.label) and named == background.label:
                continue  # as that class may be recognised by anything
            pasted[what].append((background.label, background.group, named))
        by_arm[arm][what].append(int(answer["answer"]) in own)
    has_both = by_arm["same"].keys() & by_arm["other"].keys()

    def fall(name: str) -> float | None:
        return round(heat["margin"] - answers[name]["margin"], _MARGIN_DIGITS) if name in answers else None

    def right(name: str) -> bool | None:
        return int(answers[name]["answer"]) in own if name in answers else None

    comparable = energy is not None and math.isfinite(energy[1])
    return ImageRow(
        name=item.name,
        label=item.label,
        group=item.group,
        right=heat["answer"] in own,
        answer=plan.name_of(heat["answer"]),
        probability=heat["probability"],
        status=heat["status"],
        energy=energy[0] if energy else None,
        shuffled=energy[1] if energy and comparable else None,
        room=energy[2] if energy and comparable else None,
        grid=tuple(heat["grid"]) if "grid" in heat else None,
        **{what: heat.get(what) for what in ("ceiling", "hit", "centre_hit", "rank", "area")},
        same={fill: float(np.mean(by_arm["same"][fill])) for fill in sorted(has_both)},
        other={fill: float(np.mean(by_arm["other"][fill])) for fill in sorted(has_both)},
        pasted={fill: tuple(pasted[fill]) for fill in sorted(has_both)},
        removed={fill: found[0] for fill, found in by_arm["removed"].items()},
        named={fill: plan.name_of(int(answers[f"removed.{fill}"]["answer"])) for fill in by_arm["removed"]},
        background_change=fall("edited.background"),
        object_change=fall("edited.object"),
        right_with_noise_on_object=right("noise.object"),
        right_with_noise_on_background=right("noise.background"),
    )
