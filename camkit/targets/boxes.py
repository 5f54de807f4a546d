"""Targets on detections: the score of one box, chosen by number, by label or by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchvision.ops import box_iou

from camkit.errors import TargetError, whole_number
from camkit.targets.scores import (
    OnPicture,
    Scores,
    Target,
    ToInput,
    box_corners,
    class_of,
    describe,
    detections_of,
    label_of,
    points,
)
from camkit.types import Activation

Detections = dict[str, Tensor]

Part: TypeAlias = Literal["left", "top", "right", "bottom", "objectness", "mask"]
"""What can be explained of a box besides the score of its class: where one side lies, that there is an object, or its
mask."""

_SIDES: Mapping[str, tuple[int, int]] = {"left": (0, -1), "top": (1, -1), "right": (2, 1), "bottom": (3, 1)}
"""The place of each side in a box, and the sign with which it moves outwards."""

_KINDS: Mapping[str, str] = {"objectness": "objectness", "mask": "mean logit, inside the mask,"}


def ranked_box(
    images: Sequence[Detections],
    rank: int = 1,
    eligible: Callable[[Detections], Tensor] | None = None,
    what: str = "",
    part: Part | None = None,
    threshold: float | None = None,
) -> Scores:
    """Return the score of each image's best eligible box (rank 1), second best (rank 2), and so on.

    ``what`` says in the error which boxes are eligible, such as "of class 'car'". Only boxes whose score is above the
    threshold are, if there is one.
    """
    scores = [detections["scores"].detach() for detections in images]
    absence = "the detector found no box"
    if what:
        absence = f"no such box among the detections: the detector found none {what}"
    elif threshold is not None:
        best = [f"the best box has a score of {float(torch.cat(scores).amax()):.2g}"] if any(map(len, scores)) else []
        absence = f"no box above the threshold of {threshold:g}: {(best or [absence])[0]}"
    elif rank > 1:
        absence = f"no such box among the detections: there are fewer than {rank}"
    may_be = [torch.ones_like(each, dtype=torch.bool) if threshold is None else each > threshold for each in scores]
    if eligible is not None:
        may_be = [eligible(detections) for detections in images]
    candidates = [_best_first(*pair) for pair in zip(images, may_be, strict=True)]
    return replace(box_scores(images, candidates, absence, part, rank), fewer=rank > 1)


def boxes_of_class(
    images: Sequence[Detections], index: int, name: str | None = None, part: Part | None = None
) -> Scores:
    """Return the score of each image's best box of a class; ``name`` is its label, for the error.

    Raises:
        TargetError: the detections have no labels.
    """
    if not all("labels" in detections for detections in images):
        raise TargetError("the detections have no labels; choose a box by its number or its position")
    what = f"of class {index}" if name is None else f"of class {name!r}"
    return ranked_box(images, eligible=lambda detections: detections["labels"].eq(index), what=what, part=part)


def box_scores(
    images: Sequence[Detections],
    candidates: Sequence[Int[Tensor, " k"]],
    absence: str,
    part: Part | None = None,
    rank: int = 1,
) -> Scores:
    """Return the score of one box of each image: its first candidate (rank 1), its second, and so on.

    Args:
        images: the detections.
        candidates: the numbers of each image's boxes that may be meant, in order of preference.
        absence: the error for an image with fewer candidates.
        part: what is explained of the box.
        rank: which candidate is meant.
    """
    numbers = [int(order[rank - 1]) if len(order) >= rank else None for order in candidates]
    pairs = list(zip(images, numbers, strict=True))
    explained = [_explained(detections, part) for detections in images]
    have_labels = all("labels" in detections for detections in images)
    kind = "logit" if all("logits" in detections for detections in images) else "score"
    if part is not None:
        kind = _KINDS.get(part, f"distance in pixels, outwards, of the {part} side")
    return Scores(
        values=torch.stack(
            [
                scores.sum() * 0 if number is None else scores[number]
                for scores, number in zip(explained, numbers, strict=True)
            ]
        ),
        indices=tuple(-1 if number is None else int(found["labels"][number]) for found, number in pairs)
        if have_labels
        else None,
        probabilities=tuple(
            0.0 if number is None else float(found["scores"][number].detach()) for found, number in pairs
        ),
        present=tuple(number is not None for number in numbers),
        absence=absence,
        quantity=f"{kind} of the box",
        boxes=tuple(
            None if number is None else tuple(found["boxes"][number].detach().float().tolist())
            for found, number in pairs
        ),
    )


def _best_first(detections: Detections, eligible: Bool[Tensor, " k"]) -> Int[Tensor, " e"]:
    """Return the numbers of the eligible boxes, that with the highest score first."""
    numbers = torch.nonzero(eligible).flatten()
    return numbers[detections["scores"].detach()[numbers].argsort(descending=True, stable=True)]


def _overlaps(detections: Detections, corners: Sequence[float]) -> Float[Tensor, " k"]:
    """Return the overlap of each box with a given one (intersection over union)."""
    boxes = detections["boxes"].float()
    overlaps: Tensor = box_iou(boxes, torch.tensor([corners], device=boxes.device))[:, 0]
    return overlaps


def _explained(detections: Detections, part: Part | None) -> Tensor:
    """Return what is differentiated: the boxes' logits if the detector returns these too, else their scores.

    Raises:
        TargetError: the detector does not return the part.
    """
    if part is None:
        return detections.get("logits", detections["scores"])
    if part in _SIDES:
        place, sign = _SIDES[part]
        return detections["boxes"][:, place] * sign
    if part not in detections:
        raise TargetError(f"the detector returns no {part}; explain the score of the box's class, or one of its sides")
    return detections[part]


@dataclass(frozen=True)
class BoxTarget(Target):
    """One box of a detector, chosen in one of three ways.

    Attributes:
        number: its position in the model's output, from 0.
        label: a class; the box of this class with the highest score is meant.
        near: (left, top, right, bottom) in pixels of the model's input; the box that overlaps most with it is meant.
        part: what is explained of the box; None for the score of its class.
        name: the label of the class, for the error; filled in when the target is bound to a model.
    """

    number: int | None = None
    label: int | str | None = None
    near: tuple[float, float, float, float] | None = None
    part: Part | None = None
    name: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            TargetError: not exactly one of the three is given, the number is negative, or the box ``near`` is empty.
        """
        _check_part(self.part)
        given = [value for value in (self.number, self.label, self.near) if value is not None]
        if len(given) != 1:
            raise TargetError("choose a box by its number, its label, or a box near it: pass one of the three")

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> BoxTarget:  # noqa: ARG002
        """Return the target with the label looked up."""
        if self.label is None:
            return self
        index = class_of(self.label, labels)
        return replace(self, label=index, name=label_of(index, labels))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score of the box for each image."""
        images = boxes_in(output, batch)
        if self.label is not None:
            return boxes_of_class(images, int(self.label), self.name, self.part)
        if self.near is not None:
            overlaps = [_overlaps(detections, self.near).detach() for detections in images]
            nearest = [
                overlap.argsort(descending=True, stable=True)[: int((overlap > 0).sum())] for overlap in overlaps
            ]
            absence = f"no detection overlaps with the box {tuple(round(side, 1) for side in self.near)}"
            return box_scores(images, nearest, absence, self.part)
        number = self.number or 0
        counts = [len(detections["scores"]) for detections in images]
        most = max((count for count in counts if count <= number), default=0)
        absence = f"no box {number}: the detector found only {most} box{'' if most == 1 else 'es'}"
        absence += ", and numbers start at 0"
        return box_scores(images, [torch.arange(count) for count in counts], absence, self.part, number + 1)


@dataclass(frozen=True)
class BoxAtTarget(OnPicture):
    """The box with the highest score of those that contain a point.

    Attributes:
        point: (x, y) in pixels of the picture.
        part: what is explained of the box; None for the score of its class.
        points: the point in pixels of the input of each image; filled in for each batch.
    """

    point: tuple[float, float]
    part: Part | None = None
    points: tuple[tuple[float, float], ...] = field(default=(), compare=False, repr=False)

    def on_inputs(self, to_inputs: Sequence[ToInput], size: tuple[int, ...]) -> BoxAtTarget:  # noqa: ARG002
        """Return the target with its point in pixels of the inputs."""
        return self if self.points else replace(self, points=tuple(to_input(*self.point) for to_input in to_inputs))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score of the box for each image."""
        images, around = boxes_in(output, batch), []
        for detections, (x, y) in zip(images, self.points or (self.point,) * batch, strict=True):
            left, top, right, bottom = detections["boxes"].detach().unbind(1)
            around.append(_best_first(detections, (left <= x) & (x < right) & (top <= y) & (y < bottom)))
        x, y = self.point
        return box_scores(images, around, f"the detector found no box around the point {x:g},{y:g}", self.part)


@dataclass(frozen=True)
class SameBoxTarget(Target):
    """How well a changed picture's boxes match one box of the picture (Petsiuk et al. 2021, D-RISE, arXiv:2006.03204).

    It is the largest product of a box's score and its overlap with that box, among the boxes of the same class. The
    paper compares the probabilities of all classes, of which a list of boxes has only the largest.

    Attributes:
        corners: that box (left, top, right, bottom) in pixels of the input.
        label: its class; None if the boxes have no classes.
    """

    corners: tuple[float, ...]
    label: int | None

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the match for each image; 0 if no box overlaps."""
        values: list[Tensor] = []
        for detections in boxes_in(output, batch):
            alike = detections["scores"].float() * _overlaps(detections, self.corners)
            if self.label is not None:
                alike = alike * detections["labels"].eq(self.label)
            values.append(torch.cat([alike, alike.new_zeros(1)]).amax())
        return Scores(torch.stack(values), quantity="score of the best matching box, times its overlap")


def boxes_in(output: Any, batch: int) -> list[Detections]:
    """Return each image's detections.

    Raises:
        TargetError: there are none that camkit can read.
    """
    images = detections_of(output, batch)
    if images is None:
        raise TargetError(
            f"the model returned {describe(output)}, which camkit cannot read as boxes; pass a detector by its name "
            "or file (hf:NAME, yolo11n.pt), or a module that returns a list with a dictionary for each picture"
        )
    return images


def _check_part(part: Any) -> None:
    if part is not None and part not in get_args(Part):
        raise TargetError(f"part must be one of {', '.join(get_args(Part))}, not {part!r}")


def box(
    number: int | None = None,
    *,
    label: int | str | None = None,
    near: Sequence[float | int] | None = None,
    part: Part | None = None,
) -> BoxTarget:
    """Return a target for one box of a detector.

    Args:
        number: the position of the box in the model's output, from 0.
        label: the index or the label of a class; its box with the highest score is explained.
        near: (left, top, right, bottom) in pixels of the model's input; the box that overlaps it most is explained.
        part: explain where the "left", "top", "right" or "bottom" side of the box lies, so that heat moves it outwards,
            or the "objectness" or the "mask" (its mean logit inside), if the detector returns one; None explains the
            score of the box's class.

    Raises:
        TargetError: not exactly one of the three is given, or one is invalid.
    """
    corners = None if near is None else box_corners("near", near)
    chosen = None if number is None else whole_number(number, "the number of a box", 0, TargetError)
    return BoxTarget(chosen, label, corners, part)


def best_box(label: int | str, *, part: Part | None = None) -> BoxTarget:
    """Return a target for the box of a class with the highest score.

    Args:
        label: the index or the label of the class.
        part: as for ``box``.

    Examples:
        >>> best_box("person").label
        'person'
    """
    return BoxTarget(label=label, part=part)


def box_at(x: float | int, y: float | int, *, part: Part | None = None) -> BoxAtTarget:
    """Return a target for the box around a point; of several boxes, that with the highest score.

    Args:
        x, y: the point, in pixels of the picture.
        part: as for ``box``.

    Raises:
        TargetError: the part is unknown, or x or y is not a finite number.

    Examples:
        >>> box_at(120, 80).point
        (120.0, 80.0)
    """
    _check_part(part)
    (point,) = points("box_at takes x and y", x, y)
    return BoxAtTarget(point, part)
