"""What a model answers to a picture of the check: a classifier by its logits, a detector by its boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torchvision.ops import box_iou

from camkit.targets.boxes import Detections
from camkit.targets.probabilities import ScoreReading, probabilities, rows_that_sum_to
from camkit.types import Activation


class Answer(NamedTuple):
    """The model's answer to one picture.

    Attributes:
        output: the output with the highest logit, or the class of the box at the place of the picture's objects;
            NO_ANSWER for values with NaN or infinity, and NOTHING_FOUND if there is no such box.
        share: the probability of the picture's own class, or the mean score of the boxes of its objects; None if the
            model has no probabilities.
    """

    output: int
    share: float | None


NO_ANSWER = -1
"""The output that stands for values with NaN or infinity."""

NOTHING_FOUND = -2
"""The output that stands for no box at the place of the picture's objects."""

OVERLAP = 0.5
"""The intersection over union from which a box counts as the box of an object, as in Pascal VOC and COCO's AP50."""

ENOUGH = 0.5
"""The share of the objects of its class that a detector must find in a picture. If all had to be found, one missed
small object would make the picture wrong; if one were enough, a crowd would hide that the others are lost."""


def answers_of(scores: ScoreReading, classes: Sequence[tuple[int, ...]], activation: Activation | None) -> list[Answer]:
    """Turn class scores (N, outputs) into answers; NO_ANSWER for a row with NaN or infinity.

    Args:
        scores: the class scores.
        classes: for each row, the outputs of its picture's class.
        activation: what turns the model's scores into probabilities.
    """
    logits = scores.values.float()
    own = torch.zeros_like(logits, dtype=torch.bool)
    for row, indices in enumerate(classes):
        own[row, list(indices)] = True
    finite = logits.isfinite().all(1)
    named = logits.argmax(1).where(finite, NO_ANSWER)
    by_class = probabilities(scores, activation)
    shares: Sequence[float | None] = [None] * len(logits)
    if by_class is not None:  # the sum if the outputs exclude each other, else the largest
        of_class = by_class * own
        share = of_class.sum(1).where(rows_that_sum_to(1, by_class), of_class.amax(1))
        shares = share.where(finite, 0.0).tolist()
    return [Answer(*values) for values in zip(named.tolist(), shares, strict=True)]


def found_if(threshold: float | int) -> str:
    """Say when a picture counts as found."""
    return (
        "a picture counts as found if the detector finds at least half of its objects of its class: a box of the class "
        f"with a score above {threshold:g}, whose intersection over union with the annotated box is at least "
        f"{OVERLAP:g}"
    )


def answer_of_boxes(
    found: Detections, wanted: Float[Tensor, "k 4"], own: Sequence[int], threshold: float | int
) -> Answer:
    """Turn a detector's boxes for one picture into its answer.

    The answer is right if enough of the wanted boxes are found: each must overlap a box of the class with a score above
    the threshold. Otherwise, the answer is the class of the best other box there.

    Args:
        found: the boxes (n, 4), their scores and their labels (n,).
        wanted: the boxes of the picture's objects.
        own: the outputs of the picture's class.
        threshold: the score above which a box counts.
    """
    boxes, scores, labels = (found[name].detach().cpu() for name in ("boxes", "scores", "labels"))
    scores = scores.float()
    if not bool(boxes.isfinite().all() and scores.isfinite().all()):
        return Answer(NO_ANSWER, 0.0)
    if not len(wanted) or not len(boxes):
        return Answer(NOTHING_FOUND, 0.0)
    there = box_iou(boxes.float(), wanted) >= OVERLAP
    is_own = torch.isin(labels, torch.tensor(own))
    best_own = (scores[:, None] * (there & is_own[:, None])).amax(0)
    is_right = bool((best_own > threshold).float().mean() >= ENOUGH)
    named = there.any(1) & (scores > threshold) & (is_own == is_right)
    output = int(labels[(scores * named).argmax()]) if bool(named.any()) else NOTHING_FOUND
    return Answer(output, float(best_own.mean()))
