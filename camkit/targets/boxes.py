"""Targets on detections: the score of one box, chosen by number, by label or by position."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_iou

from camkit.errors import TargetError
from camkit.targets.names import class_of, label_of, whole_number
from camkit.targets.outputs import describe, detections_of
from camkit.targets.scores import Scores, Target
from camkit.types import Activation

Detections = dict[str, Tensor]


def best_box(
    images: Sequence[Detections], eligible: Callable[[Detections], Tensor], rank: int = 1, what: str = ""
) -> Scores:
    """Return the score of each image's best eligible box (rank 1), second best (rank 2), and so on.

    ``what`` says in the error which boxes are eligible, such as "of class 'car'".
    """
    numbers: list[int | None] = []
    for detections in images:
        candidates = torch.nonzero(eligible(detections)).flatten()
        order = detections["scores"].detach()[candidates].argsort(descending=True, stable=True)
        numbers.append(int(candidates[order[rank - 1]]) if len(order) >= rank else None)
    absence = (
        f"no such box among the detections: there are fewer than {rank}" if rank > 1 else "the detector found no box"
    )
    if what:
        absence = f"no such box among the detections: the detector found none {what}"
    return replace(box_scores(images, numbers, absence), fewer=rank > 1)


def boxes_of_class(images: Sequence[Detections], index: int, name: str | None = None) -> Scores:
    """Return the score of each image's best box of a class; ``name`` is its label, for the error."""
    what = f"of class {index}" if name is None else f"of class {name!r}"
    return best_box(images, lambda detections: detections["labels"].eq(index), what=what)


def nearest_box(images: Sequence[Detections], box: tuple[float, float, float, float]) -> Scores:
    """Return the score of each image's box that overlaps most with a given box (intersection over union)."""
    numbers: list[int | None] = []
    for detections in images:
        boxes = detections["boxes"]
        overlaps = box_iou(boxes.detach().float(), torch.tensor([box], device=boxes.device))[:, 0]
        numbers.append(int(overlaps.argmax()) if len(overlaps) and bool(overlaps.amax() > 0) else None)
    return box_scores(images, numbers, f"no detection overlaps with the box {tuple(round(side, 1) for side in box)}")


def numbered_box(images: Sequence[Detections], number: int) -> Scores:
    """Return the score of the box at a position in each image's detections, from 0."""
    counts = [len(detections["scores"]) for detections in images]
    most = max((count for count in counts if count <= number), default=0)
    return box_scores(
        images,
        [number if number < count else None for count in counts],
        f"no box {number}: the detector found only {most} box{'' if most == 1 else 'es'}, and numbers start at 0",
    )


def _explained(detections: Detections) -> Tensor:
    """Return what is differentiated: the boxes' logits if the detector returns these too, else their scores."""
    return detections.get("logits", detections["scores"])


def box_scores(images: Sequence[Detections], numbers: Sequence[int | None], absence: str) -> Scores:
    """Return the score of one box of each image; None marks an image without such a box."""
    values: list[Tensor] = []
    scores: list[float] = []
    labels: list[int] = []
    boxes: list[tuple[float, ...] | None] = []
    for detections, number in zip(images, numbers, strict=True):
        if number is None:
            values.append(_explained(detections).sum() * 0)
            scores.append(0.0)
            labels.append(-1)
            boxes.append(None)
        else:
            values.append(_explained(detections)[number])
            scores.append(float(detections["scores"][number].detach()))
            labels.append(int(detections["labels"][number]) if "labels" in detections else -1)
            boxes.append(tuple(detections["boxes"][number].detach().float().tolist()))
    stacked = torch.stack(values)
    return Scores(
        values=stacked,
        indices=tuple(labels) if all("labels" in detections for detections in images) else None,
        probabilities=tuple(scores),
        present=tuple(number is not None for number in numbers),
        absence=absence,
        quantity="logit of the box" if all("logits" in detections for detections in images) else "score of the box",
        boxes=tuple(boxes),
    )


@dataclass(frozen=True)
class BoxTarget(Target):
    """One box of a detector, chosen in one of three ways.

    Attributes:
        number: its position in the model's output, from 0.
        label: a class; the box of this class with the highest score is meant.
        near: (left, top, right, bottom) in pixels of the model's input; the box that overlaps most with it is meant.
        name: the label of the class, for the error; filled in when the target is bound to a model.
    """

    for_threads = True

    number: int | None = None
    label: int | str | None = None
    near: tuple[float, float, float, float] | None = None
    name: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            TargetError: not exactly one of the three is given, the number is negative, or the box ``near`` is empty.
        """
        given = [value for value in (self.number, self.label, self.near) if value is not None]
        if len(given) != 1:
            raise TargetError("choose a box by its number, its label, or a box near it: pass one of the three")
        if self.number is not None and self.number < 0:
            raise TargetError(f"the numbers of boxes start at 0, so there is no box {self.number}")
        if self.near is not None and (self.near[2] <= self.near[0] or self.near[3] <= self.near[1]):
            raise TargetError(f"near must be (left, top, right, bottom) with an area inside, not {self.near}")

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> BoxTarget:  # noqa: ARG002
        """Return the target with the label looked up."""
        if self.label is None:
            return self
        index = class_of(self.label, labels)
        return replace(self, label=index, name=label_of(index, labels))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score of the box for each image."""
        images = detections_of(output, batch)
        if images is None:
            raise TargetError(f"the model returned {describe(output)}, which holds no boxes; it is not a detector")
        if self.near is not None:
            return nearest_box(images, self.near)
        if self.label is not None:
            if not all("labels" in detections for detections in images):
                raise TargetError("the detections have no labels; choose a box by its number or its position")
            return boxes_of_class(images, int(self.label), self.name)
        return numbered_box(images, self.number or 0)


def box(
    number: int | None = None,
    *,
    label: int | str | None = None,
    near: Sequence[float | int] | None = None,
) -> BoxTarget:
    """Return a target for one box of a detector.

    Args:
        number: the position of the box in the model's output, from 0.
        label: the index or the label of a class; its box with the highest score is explained.
        near: (left, top, right, bottom) in pixels of the model's input; the box that overlaps it most is explained.

    Raises:
        TargetError: not exactly one of the three is given, or one is invalid.
    """
    corners: Any = None
    if near is not None:
        with contextlib.suppress(TypeError, ValueError):
            corners = tuple(float(side) for side in near)
        if corners is None or len(corners) != 4:
            raise TargetError(f"near must be (left, top, right, bottom), not {near!r}")
    return BoxTarget(None if number is None else whole_number(number, "the number of a box"), label, corners)
