"""The heat pass: explain every picture once, compare its map with its region, and save a row for each picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from camkit.images.crop import check_crop
from camkit.images.read import open_picture
from camkit.images.regions import measure_shades, preprocess_region
from camkit.targets import EachTarget, logits_of
from camkit.targets.scores import Scores, Target
from camkit.types import Failure


def heat_pass(plan: Plan, journal: Journal, progress: Progress) -> None:
    """Explain every picture that has no row in the journal yet, and save its row."""
    todo = [item for item in plan.data.items if item.name not in journal.rows("heat")]
    done = len(plan.data.items) - len(todo)
    progress("heat", done, len(plan.data.items))
    if not todo:
        return
    unsaved: list[Row] = []
    for number, row in enumerate(heat_rows(plan, todo), start=1):
        unsaved.append(row)
        if len(unsaved) >= plan.settings.check.batch_size:
            journal.append(unsaved)
            unsaved = []
            progress("heat", done + number, len(plan.data.items))
    journal.append(unsaved)
    progress("heat", len(plan.data.items), len(plan.data.items))


def heat_rows(plan: Plan, items: Sequence[Item]) -> Iterator[Row]:
    """Explain pictures, compare each map with its region, and yield a row for each picture, in order."""
    target = _RecordingTarget([plan.matched.indices[item.label] for item in items])
    check = plan.settings.check
    explanations = explain_many(
        plan.model,
        [item.path for item in items],
        check.layer,
        method=check.method,
        target=target,
        precision=check.precision,
        batch_size=check.batch_size,
        on_error="yield",
    )
    for number, (item, explanation) in enumerate(zip(items, explanations, strict=True), start=1):
        yield _heat_row(plan, item, explanation, target.answers.get(number))


def _heat_row(plan: Plan, item: Item, explanation: Explanation | Failure, answer: Answer | None) -> Row:
    row: Row = {"kind": "heat", "name": item.name}
    try:
        if isinstance(explanation, Failure):
            raise explanation.error
        if answer is None or answer["answer"] == NO_ANSWER:
            return {**row, "error": f"{item.name}: the model's output holds NaN or infinity", "broken": True}
        row |= {
            "answer": answer["answer"],
            "probability": answer["share"],
            "margin": answer["margin"],
            "status": explanation.status,
            "layer": explanation.layer,
            "layer_reason": explanation.layer_reason,
        }
        if item.objects:
            return row | _region_measures(plan, item, explanation)
        if plan.with_regions:
            return row
        return row | hints.row_of(explanation, plan.settings.check.ring)
    except CamkitError as error:
        text = str(error).replace(str(item.path), item.name)  # the report must not depend on where the data lies
        return {
            "kind": "heat",
            "name": item.name,
            "error": text if item.name in text else f"{item.name}: {text}",
        }


def _region_measures(plan: Plan, item: Item, explanation: Explanation) -> Row:
    """Compare a map with its picture's region. An empty map has no measures, and neither has a cropped-away object.

    Raises:
        CamkitError: the region cannot be drawn, or cannot be followed through the preprocessing.
    """
    assert plan.model.preprocess is not None
    # Without a box, the explanation's picture is the model's input, and the original's size must be read from the file.
    original = explanation.picture if explanation.box is not None else None
    size = picture_size(item.path) if original is None else (original.shape[1], original.shape[0])
    if isinstance(explanation.shown, Tensor):
        check_crop(plan.model.preprocess, open_picture(item.path), explanation.shown)
    original_region = object_region([in_pixels(annotation, size) for annotation in item.objects], size)
    region = preprocess_region(original_region, plan.model.preprocess) > 0.5
    if not bool(region.any()):
        return {"cropped": True}
    if explanation.status != "ok" or explanation.heatmap.ndim != 2:
        return {}
    grid = (explanation.raw.shape[0], explanation.raw.shape[1])
    view = measure_shades(plan.model.preprocess, size).view
    measures = evidence.measure(torch.from_numpy(np.asarray(explanation.heatmap)), region, view, grid)
    within = evidence.heat_in_cells(region, grid, explanation.extent)
    return {
        **vars(measures),
        "grid": list(grid),
        "extent": explanation.extent,
        "size": list(region.shape),
        "cells": packed(np.maximum(explanation.raw, 0)),
        "within": packed(within),
    }


class _RecordingTarget:
    """Explains each picture for the best output of its own class, and records what the model answered."""

    def __init__(self, classes: Sequence[tuple[int, ...]]) -> None:
        self._own_class = EachTarget(tuple(classes))
        self.answers: dict[int, Answer] = {}

    def of_pictures(self, numbers: Sequence[int]) -> Target:
        """Return the target for a batch of pictures, given their numbers from 1."""
        target = self._own_class.of_pictures(numbers)

        def record_and_score(output: Any, batch: int) -> Scores:
            logits = logits_of(output, batch).detach().float()
            classes = [self._own_class.classes[number - 1] for number in numbers]
            self.answers |= dict(zip(numbers, answers_of(logits, classes), strict=True))
            return target(output, batch)

        return record_and_score

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the scores of the first ``batch`` pictures."""
        return self.of_pictures(range(1, batch + 1))(output, batch)
