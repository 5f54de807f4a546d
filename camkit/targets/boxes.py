"""Targets on detections: the score of one box, by number, by label, or by where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_iou

from camkit.errors import TargetError
from camkit.targets.names import class_of
from camkit.targets.outputs import describe, detections_of
from camkit.targets.scores import Scores
from camkit.types import Activation

Detections = dict[str, Tensor]


def best_box(found: Sequence[Detections], chosen: Callable[[Detections], Tensor], rank: int = 1) -> Scores:
    """Return for each image the score of the box with the highest score (or second highest ...) among the chosen."""
    places: list[int | None] = []
    for item in found:
        among = torch.nonzero(chosen(item)).flatten()
        order = item["scores"].detach()[among].argsort(descending=True, stable=True)
        places.append(int(among[order[rank - 1]]) if len(order) >= rank else None)
    return replace(box_scores(found, places, "no such box among the detections"), fewer=rank > 1)


def nearest_box(found: Sequence[Detections], box: tuple[float, float, float, float]) -> Scores:
    """Return for each image the score of the detection that overlaps most with a box (intersection over union)."""
    places: list[int | None] = []
    for item in found:
        overlaps = box_iou(item["boxes"].detach().float(), torch.tensor([box], device=item["boxes"].device))[:, 0]
        places.append(int(overlaps.argmax()) if len(overlaps) and bool(overlaps.amax() > 0) else None)
    return box_scores(found, places, f"no detection overlaps with the box {tuple(round(side, 1) for side in box)}")


def box_scores(found: Sequence[Detections], places: Sequence[int | None], absence: str) -> Scores:
    """Return the scores of one detection of each image; images without it are not present."""
    values = [
        item["scores"].sum() * 0 if place is None else item["scores"][place]
        for item, place in zip(found, places, strict=True)
    ]
    labels = [
        int(item["labels"][place]) if place is not None and "labels" in item else -1
        for item, place in zip(found, places, strict=True)
    ]
    boxes = [
        None if place is None else tuple(item["boxes"][place].detach().float().tolist())
        for item, place in zip(found, places, strict=True)
    ]
    stacked = torch.stack(values)
    return Scores(
        values=stacked,
        indices=tuple(labels) if all("labels" in item for item in found) else None,
        probabilities=tuple(stacked.detach().float().tolist()),
        present=tuple(place is not None for place in places),
        absence=absence,
        boxes=tuple(boxes),
    )


@dataclass(frozen=True)
class BoxTarget:
    """One detection: by its number in the model's order, by its label (the best of them), or by where it is.

    ``near`` is (left, top, right, bottom) in pixels of the model's input: the detection that overlaps most with it.
    """

    number: int | None = None
    label: int | str | None = None
    near: tuple[float, float, float, float] | None = None

    def __post_init__(self) -> None:
        """Check that one way of choosing was given.

        Raises:
            TargetError: none, several, a negative number, or a box without an inside.
        """
        given = [value for value in (self.number, self.label, self.near) if value is not None]
        if len(given) != 1:
            raise TargetError("a box is chosen by its number, its label, or a box near it: give one of the three")
        if self.number is not None and self.number < 0:
            raise TargetError(f"boxes are counted from 0, so {self.number} is none")
        if self.near is not None and (self.near[2] <= self.near[0] or self.near[3] <= self.near[1]):
            raise TargetError(f"a box is (left, top, right, bottom) with something inside, not {self.near}")

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> BoxTarget:  # noqa: ARG002
        """Look the label up."""
        return self if self.label is None else replace(self, label=class_of(self.label, labels))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the detection's score for each image."""
        found = detections_of(output, batch)
        if found is None:
            raise TargetError(f"the model returned {describe(output)}, which holds no boxes; it is not a detector")
        if self.near is not None:
            return nearest_box(found, self.near)
        if self.label is not None:
            if not all("labels" in item for item in found):
                raise TargetError("the detections have no labels; choose a box by its number or where it is")
            index = int(self.label)
            return best_box(found, lambda item: item["labels"].eq(index))
        number = self.number or 0
        places = [number if number < len(item["scores"]) else None for item in found]
        return box_scores(
            found, places, f"there is no box {number}: so many were not found in it (they are counted from 0)"
        )
