"""Targets on a part of the picture: the mean of a map of numbers such as depth, and the mask of what lies there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import tree_leaves

from camkit.errors import TargetError
from camkit.targets.names import box_corners, direction_of, points
from camkit.targets.outputs import depth_of, describe, scores_in, takes_prompts
from camkit.targets.scores import OnPicture, Scores, ToInput

Corners = tuple[float, float, float, float]
Points: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class RegionTarget(OnPicture):
    """The mean of a map of numbers in a part of the picture.

    Attributes:
        region: (left, top, right, bottom) in pixels of the picture; None for all of it.
        sign: 1, or -1 for what lowers the mean.
        mirrored: whether the pictures are mirrored along their last axis.
        parts: the region as shares of the input of each image; filled in for each batch.
    """

    region: Corners | None = None
    sign: int = 1
    mirrored: bool = False
    parts: tuple[Corners, ...] = field(default=(), compare=False, repr=False)

    def on_inputs(self, to_inputs: Sequence[ToInput], size: tuple[int, ...]) -> RegionTarget:
        """Return the target with its region as shares of the inputs."""
        if self.region is None or self.parts:
            return self
        left, top, right, bottom = self.region
        height, width = size[-2:]
        parts: list[Corners] = []
        for to_input in to_inputs:
            (first_x, first_y), (last_x, last_y) = to_input(left, top), to_input(right, bottom)
            parts.append((first_x / width, first_y / height, last_x / width, last_y / height))
        return replace(self, parts=tuple(parts))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the mean for each image, negated for a downward direction.

        Raises:
            TargetError: the output is not a map of numbers.
        """
        numbers = _numbers_of(output, batch)
        what = "output" if depth_of(output) is None else "depth"
        cells = torch.stack([_inside(numbers[0], part) for part in self.parts or (None,)]).expand_as(numbers)
        cells = cells.flip(-1) if self.mirrored else cells
        counts = cells.sum((1, 2))
        values = numbers.float()  # in fp16 the sum over the cells would overflow
        means = (values * cells).sum((1, 2)) / counts.clamp_min(1)
        where = "of the picture" if self.region is None else f"in {','.join(f'{side:g}' for side in self.region)}"
        return Scores(
            values=self.sign * means,
            description=f"{'+' if self.sign > 0 else '-'} mean {what} {where}",
            quantity=f"mean {what}, with this sign",
            present=tuple((counts > 0).tolist()),
            absence="the region lies outside the part of the picture that the model sees",
        )


def _numbers_of(output: Any, batch: int) -> Float[Tensor, "n h w"]:
    depth = depth_of(output)
    found = scores_in(output) if depth is None else depth
    if isinstance(found, Tensor) and found.dim() == 4 and found.shape[1] == 1:
        found = found[:, 0]
    if isinstance(found, Tensor) and found.is_floating_point() and found.dim() == 3 and len(found) == batch:
        return found
    raise TargetError(f"the model returned {describe(output)}, which is not a map of numbers (N, h, w), such as depth")


def _inside(numbers: Float[Tensor, "h w"], part: Corners | None) -> Bool[Tensor, "h w"]:
    """Return the cells of a map whose middles lie in a part of the input."""
    if part is None:
        return torch.ones_like(numbers, dtype=torch.bool)
    left, top, right, bottom = part
    down, across = ((torch.arange(side, device=numbers.device) + 0.5) / side for side in numbers.shape)
    return ((top <= down) & (down < bottom))[:, None] & ((left <= across) & (across < right))


def region(
    left: float | int | None = None,
    top: float | int | None = None,
    right: float | int | None = None,
    bottom: float | int | None = None,
    *,
    sign: Literal["+", "-"] = "+",
) -> RegionTarget:
    """Return a target for the mean of a map of numbers, such as depth, in a part of the picture.

    Args:
        left, top, right, bottom: the part, in pixels of the picture; without them, the whole picture.
        sign: "+" explains what raises the mean, "-" what lowers it.

    Raises:
        TargetError: the part is not four finite numbers with an area, or the sign is neither "+" nor "-".

    Examples:
        >>> region(10, 20, 50, 60, sign="-").region
        (10.0, 20.0, 50.0, 60.0)
    """
    sides = (left, top, right, bottom)
    whole = all(side is None for side in sides)
    return RegionTarget(None if whole else box_corners("region", sides), direction_of(sign))


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
