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
from camkit.targets.scores import Scores
from camkit.types import Activation


def class_on_map(
    maps: Float[Tensor, "n k h w"], indices: Int[Tensor, " n"], mask: Bool[Tensor, "height width"] | None
) -> Scores:
    """Return one class's mean logit for each image, over a mask or the cells where it is the best class.

    Where it is nowhere the best, it is the mean over all cells: what speaks for the class at all (Vinogradova et al.
    2020 sum the logits over the cells of interest; the mean differs by a factor).

    Raises:
        TargetError: a mask that covers nothing.

    """
    chosen = maps[torch.arange(len(maps), device=maps.device), indices].float()  # in fp16 a sum of cells is infinite
    alone = maps.shape[1] == 1  # one map of logits: the class or not
    if mask is None:
        where = maps.detach()[:, 0] > 0 if alone else maps.detach().argmax(1) == indices[:, None, None]
        where = where | ~where.any((1, 2), keepdim=True)
    else:
        covered = interpolate(mask[None, None].to(maps), size=maps.shape[2:], mode="area")[0]
        if not bool(covered.any()):
            raise TargetError("the mask covers no part of the picture")
        where = (covered >= 0.5 * covered.amax()).expand(len(maps), -1, -1)
    cells = where.to(chosen)
    logits = maps.detach().float()
    shares = (logits.sigmoid() if alone else logits.softmax(1))[torch.arange(len(maps), device=maps.device), indices]
    return Scores(
        values=(chosen * cells).sum((1, 2)) / cells.sum((1, 2)),
        indices=tuple(indices.tolist()),
        probabilities=tuple(((shares * cells).sum((1, 2)) / cells.sum((1, 2))).tolist()),
        classes=maps.shape[1],
    )


def biggest_class(maps: Float[Tensor, "n k h w"], rank: int, *, skip_first: bool) -> Scores:
    """Return the class that covers most cells of each image (rank 1), second most, and so on.

    Raises:
        TargetError: there are not so many classes.

    """
    best = maps.detach().argmax(1).flatten(1)
    areas = torch.stack([(best == index).sum(1) for index in range(maps.shape[1])], dim=1).float()
    # Among classes that cover nothing, the one with the highest logit anywhere comes first.
    areas += maps.detach().float().flatten(2).amax(2).softmax(1) * 0.5
    if skip_first and maps.shape[1] > 1:
        areas[:, 0] = -1
    if rank > maps.shape[1]:
        raise TargetError(f"the model has {maps.shape[1]} classes, so there are no {rank} best")
    return class_on_map(maps, areas.topk(rank, dim=1).indices[:, -1], None)


@dataclass(frozen=True, eq=False)
class SegmentTarget:
    """One class of a segmentation network: where it is predicted, everywhere, or within a mask over the input."""

    index: int | str
    mask: Any = None
    everywhere: bool = False

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> SegmentTarget:  # noqa: ARG002
        """Look the label up and check the mask.

        Raises:
            TargetError: an unknown label, or a mask that is none.
        """
        index = class_of(self.index, labels)
        if self.mask is None:
            return replace(self, index=index)
        array = self.mask.detach().cpu().numpy() if isinstance(self.mask, Tensor) else np.asarray(self.mask)
        if array.ndim != 2 or array.dtype.kind not in "biuf":
            raise TargetError(f"a mask is an array (H, W) of truth values, not {describe(self.mask)}")
        if not np.nan_to_num(array).any():
            raise TargetError("the mask is empty: nothing in it is true (of a picture: white)")
        mask = torch.from_numpy(np.nan_to_num(array).astype(bool))
        return replace(self, index=index, mask=mask)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the class's mean logit over the cells."""
        maps = maps_of(output, batch)
        if maps is None:
            raise TargetError(f"the model returned {describe(output)}, which holds no maps of class scores to segment")
        index = int(self.index)
        check_index(index, maps.shape[1])
        mask = torch.ones(maps.shape[2:], dtype=torch.bool) if self.everywhere else self.mask
        return class_on_map(
            maps, torch.full((batch,), index, device=maps.device), None if mask is None else mask.to(maps.device)
        )
