"""The heat of every picture, held against its region: one pass of the model, its rows kept as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from camkit.background import evidence, hints
from camkit.background.answers import NO_ANSWER, answers_of
from camkit.background.data import in_pixels
from camkit.background.experiment import Answer
from camkit.background.journal import Journal, Row, packed
from camkit.background.plan import Plan
from camkit.background.render import object_region, picture_size
from camkit.background.values import Item, Progress
from camkit.errors import CamkitError
from camkit.explainer import explain_many
from camkit.explanation import Explanation
from camkit.images.regions import measure_shades, preprocess_region
from camkit.targets import EachTarget, logits_of
from camkit.targets.scores import Scores, Target
from camkit.types import Failure


def heat_pass(plan: Plan, journal: Journal, progress: Progress) -> None:
    """Explain every picture that has no row yet, and measure its map against its region."""
    todo = [item for item in plan.data.items if item.name not in journal.rows("heat")]
    done = len(plan.data.items) - len(todo)
    progress("heat", done, len(plan.data.items))
    if not todo:
        return
    waiting: list[Row] = []
    for number, row in enumerate(heat_rows(plan, todo), start=1):
        waiting.append(row)
        if len(waiting) >= plan.settings.check.batch_size:
            journal.append(waiting)
            waiting = []
            progress("heat", done + number, len(plan.data.items))
    journal.append(waiting)
    progress("heat", len(plan.data.items), len(plan.data.items))


def heat_rows(plan: Plan, items: Sequence[Item]) -> Iterator[Row]:
    """Explain pictures, and measure each map against its region; a row for each, in order."""
    target = _Recorded([plan.matched.indices[item.label] for item in items])
    check = plan.settings.check
    explained = explain_many(
        plan.model,
        [item.path for item in items],
        check.layer,
        method=check.method,
        target=target,
        precision=check.precision,
        batch_size=check.batch_size,
        on_error="yield",
    )
    for number, (item, found) in enumerate(zip(items, explained, strict=True), start=1):
        yield _heat_row(plan, item, found, target.answers.get(number))


def _heat_row(plan: Plan, item: Item, found: Explanation | Failure, answer: Answer | None) -> Row:
    row: Row = {"kind": "heat", "name": item.name}
    try:
        if isinstance(found, Failure):
            raise found.error
        if answer is None or answer["answer"] == NO_ANSWER:
            return {**row, "error": f"{item.name}: the model's output holds NaN or infinity", "broken": True}
        said = {
            "answer": answer["answer"],
            "probability": answer["share"],
            "margin": answer["margin"],
            "status": found.status,
            "layer": found.layer,
            "layer_reason": found.layer_reason,
        }
        if item.objects:
            return {**row, **said, **_against_region(plan, item, found)}
        return {**row, **said, **({} if plan.with_regions else hints.row_of(found, plan.settings.check.ring))}
    except CamkitError as error:
        text = str(error).replace(str(item.path), item.name)  # the same on every machine
        return {**row, "error": text if item.name in text else f"{item.name}: {text}"}


def _against_region(plan: Plan, item: Item, found: Explanation) -> Row:
    """Measure a map against its picture's region, where both have something.

    Raises:
        CamkitError: the region cannot be drawn, or not followed through the preprocessing.
    """
    assert plan.model.preprocess is not None
    original = found.picture if found.box is not None else None  # else it is the model's input that is shown
    size = picture_size(item.path) if original is None else (original.shape[1], original.shape[0])
    region = (
        preprocess_region(object_region([in_pixels(one, size) for one in item.objects], size), plan.model.preprocess)
        > 0.5
    )
    if not bool(region.any()):
        return {"cropped": True}
    if found.status != "ok" or found.heatmap.ndim != 2:
        return {}
    grid = (found.raw.shape[0], found.raw.shape[1])
    view = measure_shades(plan.model.preprocess, size).view
    measured = evidence.measure(torch.from_numpy(np.asarray(found.heatmap)), region, view, grid)
    within = evidence.heat_in_cells(region, grid, found.extent)
    return {
        **vars(measured),
        "grid": list(grid),
        "extent": found.extent,
        "size": list(region.shape),
        "cells": packed(np.maximum(found.raw, 0)),
        "within": packed(within),
    }


class _Recorded:
    """The best of each picture's own outputs, and on the side what the model answered."""

    def __init__(self, classes: Sequence[tuple[int, ...]]) -> None:
        self._each = EachTarget(tuple(classes))
        self.answers: dict[int, Answer] = {}

    def of_pictures(self, numbers: Sequence[int]) -> Target:
        """Return the target for a batch of pictures."""
        target = self._each.of_pictures(numbers)

        def scored(output: Any, batch: int) -> Scores:
            logits = logits_of(output, batch).detach().float()
            classes = [self._each.classes[number - 1] for number in numbers]
            self.answers |= dict(zip(numbers, answers_of(logits, classes), strict=True))
            return target(output, batch)

        return scored

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the scores of the first pictures."""
        return self.of_pictures(range(1, batch + 1))(output, batch)
