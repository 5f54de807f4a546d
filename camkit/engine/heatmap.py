"""Turn weights into a heatmap: sum over the channels, ReLU, upsample, divide by the maximum."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from camkit.types import EVEN, CellPositions, Extent, Fusion, Placement


def weighted_sum(
    weights: Float[Tensor, "n *broadcast"], activations: Float[Tensor, "n c *grid"]
) -> Float[Tensor, "n *grid"]:
    r"""Return the signed map: weights times activations, summed over the channels in float32.

    Weights without channels (N, \*grid) are the signed map itself.
    """
    if weights.dim() < activations.dim():
        return weights.float()
    maps = activations.float()
    if weights[0, 0].numel() == 1 and maps.dim() == 4:
        return torch.bmm(weights.float().flatten(1)[:, None], maps.flatten(2)).reshape(maps.shape[0], *maps.shape[2:])
    return (weights.float() * maps).sum(1)


def margins(size: Sequence[int], extent: Extent) -> list[int]:
    """Return how many pixels a grid extends before and after an input of this size, from the last axis to the first.

    This is the order that ``torch.nn.functional.pad`` takes. A negative number means that the grid misses pixels.
    """
    amounts: list[int] = []
    for side, (start, end) in zip(reversed(size), reversed(extent), strict=True):
        whole = round(side / (end - start))
        before = round(start * whole)
        amounts += [before, whole - before - side]
    return amounts


def upsample(maps: Float[Tensor, "n *grid"], size: Sequence[int]) -> Float[Tensor, "n *size"]:
    """Interpolate maps linearly along each axis; cell centres stay in place (``align_corners=False``)."""
    mode = ("linear", "bilinear", "trilinear")[len(size) - 1]
    return functional.interpolate(maps[:, None], size=tuple(size), mode=mode, align_corners=False)[:, 0]


def scale(maps: Float[Tensor, "n *size"]) -> Float[Tensor, "n *size"]:
    """Divide each non-negative map by its maximum, so that 0 always means no evidence. A map of zeros stays zero."""
    largest = maps.flatten(1).amax(1).reshape(-1, *[1] * (maps.dim() - 1))
    return maps / torch.where(largest > 0, largest, 1)


def positive(
    raw: Float[Tensor, "n *grid"], size: Sequence[int], placement: Placement = EVEN
) -> Float[Tensor, "n *size"]:
    """Return the positive part of signed maps at the size of the input, in their own units.

    ReLU comes before the upsampling. A map with a non-finite value becomes zero, since nothing true can be drawn.
    """
    finite = torch.isfinite(raw).flatten(1).all(1).reshape(-1, *[1] * (raw.dim() - 1))
    return enlarge(torch.where(finite, raw, 0).relu(), size, placement)


def cell_means(values: Float[Tensor, "n *size"], grid: tuple[int, ...]) -> Float[Tensor, "n *grid"]:
    """Return the means of maps' pixels over the cells of a grid."""
    pools: Any = functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d
    return torch.as_tensor(pools[len(grid) - 1](values[:, None], grid)[:, 0])


def enlarge(
    cells: Float[Tensor, "n *grid"], size: Sequence[int], placement: Placement = EVEN
) -> Float[Tensor, "n *size"]:
    """Interpolate a grid to the input's size, linearly between its cells; beyond the outermost cell it is constant.

    If it is not known where each cell looks, the cells are spread evenly. The result is linear in the cells. Along the
    first axis of a stepped placement, each place has the value of the cell nearest to it.
    """
    if placement.stepped:
        centres = np.asarray(placement.centres(tuple(cells.shape[1:]), tuple(size))[0])
        nearest = np.abs(np.arange(size[0])[:, None] - centres).argmin(1)
        frames = cells[:, torch.from_numpy(nearest).to(cells.device)]
        within = Placement(placement.extent[1:], placement.positions[1:])
        pictures = enlarge(frames.flatten(0, 1), size[1:], within)
        return pictures.reshape(*frames.shape[:2], *size[1:])
    if placement.positions:
        for axis, side in reversed(list(enumerate(size))):
            cells = resample(cells, axis + 1, placement.positions[axis], tuple(map(float, range(side))))
        return cells
    beside = margins(size, placement.extent or ((0.0, 1.0),) * len(size))
    whole = [side + before + after for side, before, after in zip(size, beside[-2::-2], beside[::-2], strict=True)]
    return functional.pad(upsample(cells, whole), [-amount for amount in beside])


def resample(
    cells: Float[Tensor, "n *grid"], axis: int, places: tuple[float, ...], wanted: tuple[float, ...]
) -> Float[Tensor, "n *_"]:
    """Interpolate cells along an axis from the places where they lie to other places.

    Cells that lie at the same place count as their mean there.
    """
    means, low, high, share = _between(places, wanted, cells.device, cells.dtype)
    if means is not None:
        cells = (cells.movedim(axis, -1) @ means).movedim(-1, axis)
    share = share.reshape([-1 if place == axis else 1 for place in range(cells.dim())])
    return torch.lerp(cells.index_select(axis, low), cells.index_select(axis, high), share)


@functools.lru_cache(maxsize=256)
def _between(
    places: tuple[float, ...], wanted: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Return, for each wanted place, the cells before and after it, and how far it lies between them.

    The first tensor is None, or a matrix that averages the cells that lie at the same place.
    """
    distinct, groups, counts = np.unique(places, return_inverse=True, return_counts=True)
    low = np.clip(np.searchsorted(distinct, wanted, side="right") - 1, 0, len(distinct) - 1)
    high = np.minimum(low + 1, len(distinct) - 1)
    share = (np.asarray(wanted) - distinct[low]) / np.where(high > low, distinct[high] - distinct[low], 1)
    with torch.inference_mode(mode=False):  # the tensors are kept, and another caller may need gradients
        means = None
        if len(distinct) < len(places):
            means = torch.from_numpy(np.eye(len(distinct))[groups] / counts).to(device, dtype)
        first, second = (torch.from_numpy(ends).to(device) for ends in (low, high))
        return means, first, second, torch.from_numpy(share.clip(0, 1)).to(device, dtype)


def finest(grids: Sequence[Sequence[int]]) -> int:
    """Return the number of the grid with the most cells; the first such grid if there are several."""
    return max(range(len(grids)), key=lambda number: math.prod(grids[number]))


def fuse(
    raws: Sequence[Float[Tensor, "n *_"]], how: Fusion = "mean", placements: Sequence[Placement] = ()
) -> Float[Tensor, "n *grid"]:
    """Fuse the signed maps of several layers, each scaled by its own largest absolute value first.

    Args:
        raws: a map on its own grid for each layer. A single layer's map is returned unchanged.
        how: "mean"; "max", if one layer's evidence is enough; "product", if all layers must agree.
        placements: where the cells of each grid lie on the input.

    Returns:
        The fused map on the finest of the grids. A product is of the maps' positive parts.
    """
    if len(raws) == 1:
        return raws[0]
    signed = [torch.copysign(scale(raw.abs()), raw) for raw in raws]
    goal = finest([raw.shape[1:] for raw in raws])
    if placements and all(placement.positions for placement in placements):
        wanted = placements[goal].positions
        moved = [moved_to(wanted, raw, own.positions) for raw, own in zip(signed, placements, strict=True)]
    else:
        moved = [upsample(raw, raws[goal].shape[1:]) for raw in signed]
    grids = torch.stack(moved)
    return _fused(grids.relu() if how == "product" else grids, how)


def moved_to(wanted: CellPositions, cells: Float[Tensor, "n *_"], own: CellPositions) -> Float[Tensor, "n *grid"]:
    """Interpolate a grid from its own places to the places of another grid."""
    for axis, (places, others) in enumerate(zip(own, wanted, strict=True), start=1):
        cells = resample(cells, axis, places, others)
    return cells


def fuse_heatmaps(
    raws: Sequence[Float[Tensor, "n *_"]],
    size: Sequence[int],
    how: Fusion = "mean",
    placements: Sequence[Placement] = (),
    limits: Sequence[float] | None = None,
) -> Float[Tensor, "n *size"]:
    """Turn the signed maps of one or more layers into heatmaps 0..1; zero if a layer's map is not finite.

    Args:
        raws: a signed map on its own grid for each layer.
        size: the size of the input.
        how: as for ``fuse``.
        placements: where the cells of each grid lie on the input.
        limits: for each layer the value that becomes 1, in the units of its map; larger values become 1 as well. None
            stands for the map's own maximum, and for that of the result.
    """
    placements = placements or [EVEN] * len(raws)
    drawn = [positive(raw, size, placement) for raw, placement in zip(raws, placements, strict=True)]
    if limits is not None:
        drawn = [(values / (limit or 1)).clamp(max=1) for values, limit in zip(drawn, limits, strict=True)]
        return drawn[0] if len(drawn) == 1 else _fused(torch.stack(drawn), how)
    heatmaps = list(map(scale, drawn))
    if len(heatmaps) == 1:
        return heatmaps[0]
    finite = torch.stack([torch.isfinite(raw).flatten(1).all(1) for raw in raws]).all(0)
    return scale(torch.where(finite.reshape(-1, *[1] * len(size)), _fused(torch.stack(heatmaps), how), 0))


def _fused(stacked: Float[Tensor, "layers n *size"], how: Fusion) -> Float[Tensor, "n *size"]:
    if how == "mean":
        return stacked.mean(0)
    return stacked.amax(0) if how == "max" else stacked.prod(0)
