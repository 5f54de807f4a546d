"""Targets on maps, and on a part of the picture.

A class of a segmentation network (N, K, h, w), the mean of a map of numbers such as depth, the mask of what lies at a
point or in a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils._pytree import tree_leaves

from camkit.errors import TargetError
from camkit.targets.scores import (
    OfClass,
    OnPicture,
    ScoreReading,
    Scores,
    ToInput,
    box_corners,
    check_index,
    depth_of,
    describe,
    direction_of,
    maps_of,
    points,
    scores_in,
    takes_prompts,
)
from camkit.types import Activation

_MASKED = 0.5
"""Cells that the mask covers at least this much count, as a share of the cell it covers most: a small mask may cover no
cell fully."""

_PREDICTED = 0.5
"""A network with one class predicts it where the probability is above this, that is, where the logit is positive."""

_WHERE_PREDICTED = "where the class is predicted"
_PREDICTED_NOWHERE = "of all cells, since the class is predicted nowhere"
_INSIDE_MASK = "inside the mask"
_EVERYWHERE = "of all cells"


def class_on_map(
    maps: Float[Tensor, "n k h w"],
    indices: Int[Tensor, " n"],
    mask: Bool[Tensor, "*n height width"] | None,
    part: str = _INSIDE_MASK,
    activation: Activation | None = None,
) -> Scores:
    """Return the mean logit of one class for each image, over a mask or over the cells where the class is predicted.

    If it is predicted nowhere, the mean goes over all cells. Vinogradova et al. 2020 sum the logits over the cells of
    interest; the mean differs by a factor. There is one mask for all images, or one for each. ``part`` says in words
    which cells it covers.

    Raises:
        TargetError: the mask covers nothing.
    """
    images = torch.arange(len(maps), device=maps.device)
    class_maps = maps[images, indices].float()  # in fp16 the sum over the cells would overflow
    reading, apart = ScoreReading.of(maps), _are_apart(maps, activation)
    shares = reading.probabilities("sigmoid" if apart else "softmax")[images, indices]
    quantity: str | tuple[str, ...] = f"mean {reading.kind} {part}"
    if mask is None:
        inside = shares > _PREDICTED if apart else maps.detach().argmax(1) == indices[:, None, None]
        predicted = inside.any((1, 2), keepdim=True)
        inside = inside | ~predicted
        parts = (_WHERE_PREDICTED if found else _PREDICTED_NOWHERE for found in predicted.flatten().tolist())
        quantity = tuple(f"mean {reading.kind} {where}" for where in parts)
    else:
        masks = mask.view(-1, 1, *mask.shape[-2:]).to(maps)
        covered = interpolate(masks, size=maps.shape[2:], mode="area")[:, 0]
        if not bool(covered.any()):
            raise TargetError("the mask covers no part of the picture")
        inside = (covered >= _MASKED * covered.amax((1, 2), keepdim=True)).expand(len(maps), -1, -1)
    cells = inside.to(class_maps)
    return Scores(
        values=(class_maps * cells).sum((1, 2)) / cells.sum((1, 2)),
        indices=tuple(indices.tolist()),
        probabilities=tuple(((shares * cells).sum((1, 2)) / cells.sum((1, 2))).tolist()),
        classes=maps.shape[1],
        quantity=quantity,
        cells=inside,
        activation=reading.activation,
    )


def names_cells(quantity: str) -> bool:
    """Tell whether a score is the mean over cells that the caller named, from the words for it."""
    return quantity.endswith((_INSIDE_MASK, _EVERYWHERE))


def _are_apart(maps: Tensor, activation: Activation | None) -> bool:
    """Tell whether each class is predicted independently of the others; a single class always is."""
    return maps.shape[1] == 1 or activation == "sigmoid"


def class_by_area(
    maps: Float[Tensor, "n k h w"], rank: int, *, skip_first: bool, activation: Activation | None = None
) -> Scores:
    """Return the mean logit of the class that covers the most cells of each image (rank 1), or fewer (higher ranks).

    Raises:
        TargetError: the model has fewer classes than ``rank``.
    """
    if _are_apart(maps, activation):
        areas = (ScoreReading.of(maps).probabilities("sigmoid") > _PREDICTED).flatten(2).sum(2).float()
    else:
        best = maps.detach().argmax(1).flatten(1)
        areas = torch.stack([(best == index).sum(1) for index in range(maps.shape[1])], dim=1).float()
    # Less than one cell is added, which only ranks classes of equal area, above all those that cover nothing.
    areas += maps.detach().float().flatten(2).amax(2).softmax(1) * 0.5
    if skip_first and maps.shape[1] > 1:
        areas[:, 0] = -1
    if rank > maps.shape[1]:
        raise TargetError(f"there are no {rank} best classes: the model has only {maps.shape[1]} classes")
    return class_on_map(maps, areas.topk(rank, dim=1).indices[:, -1], None, activation=activation)


@dataclass(frozen=True, eq=False)
class SegmentTarget(OfClass):
    """One class of a segmentation network: where it is predicted, everywhere, or inside a mask over the input."""

    mask: Any = None
    everywhere: bool = False

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> SegmentTarget:
        """Return the target with the label looked up and the mask checked.

        Raises:
            TargetError: the label is unknown or the mask is invalid.
        """
        bound = super().bind(labels, activation)
        if self.mask is None:
            return bound
        array = self.mask.detach().cpu().numpy() if isinstance(self.mask, Tensor) else np.asarray(self.mask)
        if array.ndim != 2 or array.dtype.kind not in "biuf":
            raise TargetError(f"the mask must be an array (H, W) of truth values, not {describe(self.mask)}")
        return replace(bound, mask=torch.from_numpy(np.nan_to_num(array).astype(bool)))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the mean logit of the class for each image."""
        maps = maps_of(output, batch)
        if maps is None:
            raise TargetError(
                f"the model returned {describe(output)}, which holds no maps (N, classes, h, w) of class scores; "
                "pass a segmentation network, those of Hugging Face by name (hf:NAME)"
            )
        check_index(self.number, maps.shape[1])
        indices = torch.full((batch,), self.number, device=maps.device)
        mask, part = None if self.mask is None else self.mask.to(maps.device), _INSIDE_MASK
        if self.everywhere:
            mask, part = torch.ones_like(maps[0, 0], dtype=torch.bool), _EVERYWHERE
        return class_on_map(maps, indices, mask, part, self.activation)


def segment(target: int | str, mask: Any = None, *, everywhere: bool = False) -> SegmentTarget:
    """Return a target for a class of a segmentation network.

    Args:
        target: the index or the label of the class.
        mask: truth values (H, W) over the model's input; only the masked part of the output is explained.
        everywhere: explain the whole output. Without ``mask`` and ``everywhere``, the part where the class is predicted
            is explained.

    Raises:
        TargetError: both ``mask`` and ``everywhere`` are given.
    """
    if mask is not None and everywhere:
        raise TargetError("pass a mask or everywhere=True, not both")
    return SegmentTarget(target, mask, everywhere)


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
        depth = depth_of(output)
        numbers = scores_in(output) if depth is None else depth
        if isinstance(numbers, Tensor) and numbers.dim() == 4 and numbers.shape[1] == 1:
            numbers = numbers[:, 0]
        is_float = isinstance(numbers, Tensor) and numbers.is_floating_point()
        if not is_float or numbers.dim() != 3 or len(numbers) != batch:
            raise TargetError(
                f"the model returned {describe(output)}, which is not a map of numbers (N, h, w), such as depth"
            )
        what = "output" if depth is None else "depth"
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
