"""The target for networks that segment what is at a point or in a box: the mask's mean logit where it is positive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from camkit.errors import TargetError
from camkit.targets.names import box_corners, points
from camkit.targets.outputs import describe, takes_prompts
from camkit.targets.scores import OnPicture, Scores, ToInput

Points: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class MaskTarget(OnPicture):
    """The mask of what is at a point or in a box; of several masks, the one that the network expects to be the best.

    The network returns ``image_embeddings``, and ``decode``: a function of these and of prompts, to masks (N, K, h, w)
    with logits and how good each is (N, K). Prompts are ``input_points`` (N, 1, P, 2) with ``input_labels`` (N, 1, P),
    or ``input_boxes`` (N, 1, 4), in pixels of the input.

    Attributes:
        points: the point (x, y), or two opposite corners of the box, in pixels of the picture.
        on_input: the same in pixels of the input of each image; filled in for each batch.
    """

    for_threads = True

    points: Points
    on_input: tuple[Points, ...] = field(default=(), compare=False, repr=False)

    def on_inputs(self, to_inputs: Sequence[ToInput], size: tuple[int, ...]) -> MaskTarget:  # noqa: ARG002
        """Return the target with its points in pixels of the inputs."""
        if self.on_input:
            return self
        return replace(self, on_input=tuple(tuple(to_input(*point) for point in self.points) for to_input in to_inputs))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the mean logit of each image's mask where it is positive; of all cells if it is nowhere.

        Raises:
            TargetError: the network takes no points or boxes.
        """
        if not takes_prompts(output):
            raise TargetError(
                f"the model returned {describe(output)}; points and boxes are for networks such as SAM, passed by name "
                "(hf:NAME)"
            )
        given = torch.tensor(self.on_input or (self.points,), dtype=torch.float32).expand(batch, -1, -1)
        given = given.to(tree_leaves(output["image_embeddings"])[0].device)
        is_point = len(self.points) == 1
        prompts = {"input_points": given[:, None]} if is_point else {"input_boxes": given.flatten(1)[:, None]}
        if is_point:
            prompts["input_labels"] = torch.ones_like(given[:, None, :, 0], dtype=torch.long)
        masks, quality = output["decode"](output["image_embeddings"], prompts)
        logits = masks[torch.arange(batch, device=masks.device), quality.argmax(1)]
        inside = logits.detach() > 0
        found = inside.any((1, 2), keepdim=True)
        cells = (inside | ~found).to(logits)
        where = ("in the mask" if some else "of all cells, since the mask is empty" for some in found.flatten())
        words = ",".join(f"{number:g}" for point in self.points for number in point)
        return Scores(
            values=(logits * cells).sum((1, 2)) / cells.sum((1, 2)),
            description=f"mask {'at' if is_point else 'in'} {words}",
            quantity=tuple(f"mean logit {part}" for part in where),
        )


def mask_at(x: float | int, y: float | int) -> MaskTarget:
    """Return a target for the mask of what lies at a point, in pixels of the picture, for networks such as SAM.

    Raises:
        TargetError: x or y is not a finite number.

    Examples:
        >>> mask_at(120, 80).points
        ((120.0, 80.0),)
    """
    return MaskTarget(points("mask_at takes x and y", x, y))


def mask_in(left: float | int, top: float | int, right: float | int, bottom: float | int) -> MaskTarget:
    """Return a target for the mask of what lies in a box, in pixels of the picture, for networks such as SAM.

    Raises:
        TargetError: the box is not four finite numbers with an area.

    Examples:
        >>> mask_in(10, 20, 50, 60).points
        ((10.0, 20.0), (50.0, 60.0))
    """
    return MaskTarget(points("", *box_corners("mask_in", (left, top, right, bottom))))
