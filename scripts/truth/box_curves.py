"""Insertion and deletion for one box: how its own score changes while pixels come back, or are removed.

As in camkit's metrics, pixels come back into a blurred picture, and removed ones take the picture's mean colour.

The score in a changed picture is that of the best box of the class at the box's place (intersection over union of at
least 0.5 with it), and 0 if there is none. camkit's own metrics of a box multiply this by the overlap, as D-RISE does;
this script leaves the overlap out, so that the score is not the one that D-RISE's maps are made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torchvision.ops import box_iou

import camkit
from camkit.metrics import Evaluator
from camkit.targets import Target
from camkit.targets.outputs import detections_of
from camkit.targets.scores import Scores

COLUMNS = ("insertion", "deletion")
STEPS = 10
AT_ONCE = 16
"""Changed pictures in one pass."""
OVERLAP = 0.5
MASKS, CELLS = 400, 8
"""Of D-RISE here; the paper has 5,000 masks of 16 cells, which take too long for a table."""


@dataclass(frozen=True)
class AtItsPlace(Target):
    """The score of the best box of a class that overlaps enough with given corners, in pixels of the input."""

    corners: tuple[float, ...]
    label: int

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score for each picture; 0 if there is no such box."""
        images = detections_of(output, batch)
        assert images is not None
        values: list[Tensor] = []
        for found in images:
            overlaps = box_iou(found["boxes"].float(), torch.tensor([self.corners]))[:, 0]
            right = (overlaps >= OVERLAP) & found["labels"].eq(self.label)
            values.append(torch.cat([found["scores"].float()[right], torch.zeros(1)]).amax())
        return Scores(torch.stack(values), quantity="score of the box at its place")


def evaluator_of(
    explainer: camkit.Explainer, picture: Image.Image | Tensor, corners: tuple[float, ...], label: int
) -> Evaluator:
    """Return what scores changed versions of a picture for one box."""
    return Evaluator(explainer, picture, AtItsPlace(corners, label), steps=STEPS, batch_size=AT_ONCE)


def areas(evaluator: Evaluator, heat: Float[Tensor, "h w"]) -> dict[str, float]:
    """Return the columns for one map; none if all its pixels are equal."""
    values = evaluator(heat, COLUMNS)
    return {name: number for name in COLUMNS if (number := values[name].number) is not None}


def drise() -> Any:
    """Return the method of D-RISE's rows."""
    return camkit.methods.variant("rise", masks=MASKS, cells=CELLS)
