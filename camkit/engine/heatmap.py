"""Turn weights into a heatmap: sum over the channels, ReLU, upsample, divide by the maximum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from camkit.engine.grid import margins
from camkit.types import Extent, Fusion

_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


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
        return torch.bmm(weights.float().flatten(1)[:, None], maps.flatten(2)).reshape(len(maps), *maps.shape[2:])
    return (weights.float() * maps).sum(1)


def upsample(maps: Float[Tensor, "n *grid"], size: Sequence[int]) -> Float[Tensor, "n *size"]:
    """Interpolate maps linearly along each axis; cell centres stay in place (``align_corners=False``)."""
    return functional.interpolate(maps[:, None], size=tuple(size), mode=_MODES[len(size)], align_corners=False)[:, 0]


def scale(maps: Float[Tensor, "n *size"]) -> Float[Tensor, "n *size"]:
    """Divide each non-negative map by its maximum, so that 0 always means no evidence. A map of zeros stays zero."""
    largest = maps.flatten(1).amax(1).reshape(-1, *[1] * (maps.dim() - 1))
    return maps / torch.where(largest > 0, largest, 1)


def to_heatmap(raw: Float[Tensor, "n *grid"], size: Sequence[int], extent: Extent = ()) -> Float[Tensor, "n *size"]:
    """Turn signed maps on the grid into heatmaps 0..1 at the size of the input.

    ReLU comes before the upsampling, the division by the maximum after it. A map with a non-finite value becomes zero,
    since nothing true can be drawn. ``extent`` is the part of the grid that lies on the input.
    """
    return scale(positive(raw, size, extent))


def positive(raw: Float[Tensor, "n *grid"], size: Sequence[int], extent: Extent = ()) -> Float[Tensor, "n *size"]:
    """Return the positive part of signed maps at the size of the input, in their own units.

    A map with a non-finite value becomes zero.
    """
    finite = torch.isfinite(raw).flatten(1).all(1).reshape(-1, *[1] * (raw.dim() - 1))
    return enlarge(torch.where(finite, raw, 0).relu(), size, extent)


def enlarge(cells: Float[Tensor, "n *grid"], size: Sequence[int], extent: Extent = ()) -> Float[Tensor, "n *size"]:
    """Interpolate the part of a grid that lies on the input to the input's size. The result is linear in the cells."""
    beside = margins(size, extent or ((0.0, 1.0),) * len(size))
    whole = [side + before + after for side, before, after in zip(size, beside[-2::-2], beside[::-2], strict=True)]
    return functional.pad(upsample(cells, whole), [-amount for amount in beside])


def fuse(raws: Sequence[Float[Tensor, "n *_"]], how: Fusion = "mean") -> Float[Tensor, "n *grid"]:
    """Fuse the signed maps of several layers, each scaled by its own largest absolute value first.

    Args:
        raws: a map on its own grid for each layer. A single layer's map is returned unchanged.
        how: "mean"; "max", if one layer's evidence is enough; "product", if all layers must agree.

    Returns:
        The fused map on the finest of the grids. A product is of the maps' positive parts.
    """
    if len(raws) == 1:
        return raws[0]
    finest = max((raw.shape[1:] for raw in raws), key=lambda grid: grid.numel())
    signed = [torch.copysign(scale(raw.abs()), raw) for raw in raws]
    grids = torch.stack([upsample(raw, finest) for raw in signed])
    return _fused(grids.relu() if how == "product" else grids, how)


def fuse_heatmaps(
    raws: Sequence[Float[Tensor, "n *_"]], size: Sequence[int], how: Fusion = "mean", extents: Sequence[Extent] = ()
) -> Float[Tensor, "n *size"]:
    """Fuse the heatmaps of several layers and scale the result; zero if a layer's map is not finite.

    Args:
        raws: a signed map on its own grid for each layer.
        size: the size of the input.
        how: as for ``fuse``.
        extents: the part of each grid that lies on the input.
    """
    extents = extents or [()] * len(raws)
    heatmaps = [to_heatmap(raw, size, extent) for raw, extent in zip(raws, extents, strict=True)]
    if len(heatmaps) == 1:
        return heatmaps[0]
    finite = torch.stack([torch.isfinite(raw).flatten(1).all(1) for raw in raws]).all(0)
    return scale(torch.where(finite.reshape(-1, *[1] * len(size)), _fused(torch.stack(heatmaps), how), 0))


def on_scale(
    raws: Sequence[Float[Tensor, "n *_"]],
    size: Sequence[int],
    limits: Sequence[float],
    how: Fusion = "mean",
    extents: Sequence[Extent] = (),
) -> Float[Tensor, "n *size"]:
    """Return heatmaps in which 1 stands for a given value of each layer's map, and not for its own maximum.

    Args:
        raws, size, how, extents: as for ``fuse_heatmaps``.
        limits: for each layer the value that becomes 1, in the units of its map; larger values become 1 as well.
    """
    extents = extents or [()] * len(raws)
    heatmaps = [
        (positive(raw, size, extent) / (limit or 1)).clamp(max=1)
        for raw, extent, limit in zip(raws, extents, limits, strict=True)
    ]
    return heatmaps[0] if len(heatmaps) == 1 else _fused(torch.stack(heatmaps), how)


def _fused(stacked: Float[Tensor, "layers n *size"], how: Fusion) -> Float[Tensor, "n *size"]:
    if how == "mean":
        return stacked.mean(0)
    return stacked.amax(0) if how == "max" else stacked.prod(0)
