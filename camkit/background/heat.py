"""The heat pass: explain every picture once, compare its map with its region, and save a row for each picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camkit.background import evidence
from camkit.background.answers import answers_of
from camkit.background.data import in_pixels
from camkit.background.deep import hints
from camkit.background.experiment import NO_ANSWER, Answer
from camkit.background.journal import HEAT, Journal, Row, packed
from camkit.background.plan import Plan
from camkit.background.render import object_region, picture_size
from camkit.background.values import Item, Progress, RowsOf
from camkit.errors import CamkitError, InputError, advice
from camkit.explanation import Explanation
from camkit.images.crop import CropBoxes, check_crop
from camkit.images.read import open_picture
from camkit.images.regions import preprocess_region
from camkit.targets import EachTarget, logits_of
from camkit.targets.scores import OfPictures, Scores, Target
from camkit.types import Failure

_REPEATED = 8
"""A resumed run computes this many finished pictures again, spread over the folder: one small batch."""

_ROUNDING_FP32, _ROUNDING_AUTOCAST = 1e-3, 5e-2
"""How far margins of the same code may differ, as a share of the largest: batches of another size round differently,
about as much as the two memory formats in ``engine/passes.py``."""


class Heat:
    """The heat of a check: each picture's map, compared with its region.

    Args:
        plan: the check.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._boxes = CropBoxes()  # the parts of the pictures that the model sees

    def run(self, journal: Journal, progress: Progress, rows_of: RowsOf) -> None:
        """Explain every picture that has no row in the journal yet, and save its row.

        ``rows_of`` computes the rows, as ``rows`` does.
        """
        items = self._plan.data.items
        todo = [item for item in items if item.name not in journal.rows(HEAT)]
        done = len(items) - len(todo)
        progress("heat", done, len(items))
        if not todo:
            return
        unsaved: list[Row] = []
        for number, row in enumerate(rows_of(todo), start=1):
            unsaved.append(row)
            if len(unsaved) >= self._plan.batch_size:
                journal.append(unsaved)
                unsaved = []
                progress("heat", done + number, len(items))
        journal.append(unsaved)
        progress("heat", len(items), len(items))

    def check_same_answers(self, journal: Journal) -> None:
        """Compute a few rows of an interrupted run again, and refuse its rows if the model now answers differently.

        The run's key covers the weights and the files of the code, but not everything that the code reads or calls.

        Raises:
            InputError: the model answers differently, or another layer is explained.
        """
        finished = journal.rows(HEAT)
        answered = [item for item in self._plan.data.items if "margin" in finished.get(item.name, {})]
        repeated = answered[:: max(1, len(answered) // _REPEATED)][:_REPEATED]
        rows = [(finished[item.name], row) for item, row in zip(repeated, self.rows(repeated), strict=True)]
        largest = max((abs(before["margin"]) for before, _ in rows), default=0.0)
        is_fp32 = self._plan.settings.check.precision == "fp32"
        tolerance = largest * (_ROUNDING_FP32 if is_fp32 else _ROUNDING_AUTOCAST)
        for before, now in rows:
            same_margin = abs(now.get("margin", math.inf) - before["margin"]) <= tolerance
            if not same_margin or now["layer"] != before["layer"]:
                raise InputError(
                    f"the interrupted run cannot be resumed: for {before['name']} the model now answers differently, "
                    "so its code or its preprocessing has changed; "
                    + advice(
                        "start again without resume=True, or choose another out folder",
                        "start again without --resume, or choose another --out",
                    )
                )

    def rows(self, items: Sequence[Item]) -> Iterator[Row]:
        """Explain pictures, compare each map with its region, and yield a row for each picture, in order."""
        target = _RecordingTarget([self._plan.matched.indices[item.label] for item in items])
        explanations = self._plan.explain(items, target=target)
        for number, (item, explanation) in enumerate(zip(items, explanations, strict=True), start=1):
            yield self._row(item, explanation, target.answers.get(number))

    def _row(self, item: Item, explanation: Explanation | Failure, answer: Answer | None) -> Row:
        row: Row = {"kind": HEAT, "name": item.name}
        try:
            if isinstance(explanation, Failure):
                raise explanation.error
            if answer is None or answer.output == NO_ANSWER:
                return {**row, "error": f"{item.name}: the model's output holds NaN or infinity", "broken": True}
            row |= {
                "answer": answer.output,
                "probability": answer.share,
                "margin": answer.margin,
                "status": explanation.status,
                "layer": explanation.layer,
                "layer_reason": explanation.layer_reason,
            }
            if item.objects:
                return row | self._region_measures(item, explanation)
            if self._plan.with_regions:
                return row
            return row | hints.row_of(explanation, self._plan.settings.check.ring)
        except CamkitError as error:
            text = str(error).replace(str(item.path), item.name)  # the report must not depend on where the data lies
            return {"kind": HEAT, "name": item.name, "error": text if item.name in text else f"{item.name}: {text}"}

    def _region_measures(self, item: Item, explanation: Explanation) -> Row:
        """Compare a map with its picture's region.

        Without measures if the map is empty or the object was cropped away.

        Raises:
            CamkitError: the region cannot be drawn, or cannot be followed through the preprocessing.
        """
        plan = self._plan
        # Without a box, the explanation's picture is the model's input, and the original's size is read from the file.
        original = explanation.picture if explanation.box is not None else None
        size = picture_size(item.path) if original is None else (original.shape[1], original.shape[0])
        if isinstance(explanation.shown, Tensor):
            check_crop(plan.preprocess, open_picture(item.path), explanation.shown, self._boxes)
        original_region = object_region([in_pixels(annotation, size) for annotation in item.objects], size)
        shades = plan.shades.of(size)
        region = preprocess_region(original_region, plan.preprocess, shades) > 0.5
        if not bool(region.any()):
            return {"cropped": True}
        if explanation.status != "ok" or explanation.heatmap.ndim != 2:
            return {}
        grid = (explanation.raw.shape[0], explanation.raw.shape[1])
        measures = evidence.measure(torch.from_numpy(np.asarray(explanation.heatmap)), region, shades.view, grid)
        within = evidence.heat_in_cells(region, grid, explanation.placement)
        return {
            **vars(measures),
            "grid": list(grid),
            "extent": explanation.extent,
            "size": list(region.shape),
            "cells": packed(np.maximum(explanation.raw, 0)),
            "within": packed(within),
        }


class _RecordingTarget(OfPictures):
    """Explains each picture for the best output of its own class, and records what the model answered."""

    for_threads = True

    def __init__(self, classes: Sequence[tuple[int, ...]]) -> None:
        self._own_class = EachTarget(tuple(classes))
        self.answers: dict[int, Answer] = {}

    def of_pictures(self, numbers: Sequence[int]) -> Target:
        """Return the target for a batch of pictures, given their numbers from 1."""
        return _RecordingPart(self._own_class, tuple(numbers), self.answers)


@dataclass(frozen=True)
class _RecordingPart(Target):
    """The part of a recording target that explains the pictures of one pass; it adds their answers to the others."""

    own_class: EachTarget
    numbers: tuple[int, ...]
    answers: dict[int, Answer]

    def __call__(self, output: Any, batch: int) -> Scores:
        """Record the answers, and return the scores."""
        logits = logits_of(output, batch).detach().float()
        classes = [self.own_class.classes[number - 1] for number in self.numbers]
        self.answers.update(zip(self.numbers, answers_of(logits, classes), strict=True))
        return self.own_class.of_pictures(self.numbers)(output, batch)
