"""Targets on the maps of a segmentation network (N, K, h, w): a class, everywhere or within a mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import interpolate

from camkit.errors import TargetError
from camkit.targets.names import check_index, class_of
from camkit.targets.outputs import describe, maps_of
from camkit.targets.probabilities import ScoreReading, probabilities
from camkit.targets.scores import OfClasses, Scores
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
    by_class = probabilities(reading, "sigmoid" if apart else "softmax")
    assert by_class is not None
    shares = by_class[images, indices]
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
        by_class = probabilities(ScoreReading.of(maps), "sigmoid")
        assert by_class is not None
        areas = (by_class > _PREDICTED).flatten(2).sum(2).float()
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
class SegmentTarget(OfClasses):
    """One class of a segmentation network: where it is predicted, everywhere, or inside a mask over the input."""

    index: int | str
    mask: Any = None
    everywhere: bool = False

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> SegmentTarget:
        """Return the target with the label looked up and the mask checked.

        Raises:
            TargetError: the label is unknown or the mask is invalid.
        """
        bound = replace(super().bind(labels, activation), index=class_of(self.index, labels))
        if self.mask is None:
            return bound
        array = self.mask.detach().cpu().numpy() if isinstance(self.mask, Tensor) else np.asarray(self.mask)
        if array.ndim != 2 or array.dtype.kind not in "biuf":
            raise TargetError(f"the mask must be an array (H, W) of truth values, not {describe(self.mask)}")
        if not np.nan_to_num(array).any():
            raise TargetError("the mask is empty: nothing in it is true (in a picture: white)")
        return replace(bound, mask=torch.from_numpy(np.nan_to_num(array).astype(bool)))

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the mean logit of the class for each image."""
        maps = maps_of(output, batch)
        if maps is None:
            raise TargetError(
                f"the model returned {describe(output)}, which holds no maps (N, classes, h, w) of class scores; "
                "pass a segmentation network, those of Hugging Face by name (hf:NAME)"
            )
        index = int(self.index)
        check_index(index, maps.shape[1])
        indices = torch.full((batch,), index, device=maps.device)
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
