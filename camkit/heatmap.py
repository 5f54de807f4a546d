"""From weights to a heatmap: sum over the channels, ReLU, upsample, divide by the maximum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def weighted_sum(
    weights: Float[Tensor, "n c *broadcast"], activations: Float[Tensor, "n c *grid"]
) -> Float[Tensor, "n *grid"]:
    """Sum weights times activations over the channels, in float32: the signed map."""
    maps = activations.float()
    if weights[0, 0].numel() == 1 and maps.dim() == 4:
        return torch.einsum("nc,nchw->nhw", weights.float().flatten(1), maps)
    return (weights.float() * maps).sum(1)


def upsample(maps: Float[Tensor, "n *grid"], size: Sequence[int]) -> Float[Tensor, "n *size"]:
    """Interpolate maps linearly along each axis, cell centres kept in place (``align_corners=False``)."""
    return functional.interpolate(maps[:, None], size=tuple(size), mode=_MODES[len(size)], align_corners=False)[:, 0]


def scale(maps: Float[Tensor, "n *size"]) -> Float[Tensor, "n *size"]:
    """Divide each non-negative map by its maximum, so that 0 stays 0: no evidence. A map without any stays zero."""
    largest = maps.flatten(1).amax(1).reshape(-1, *[1] * (maps.dim() - 1))
    return maps / torch.where(largest > 0, largest, 1)


def to_heatmap(raw: Float[Tensor, "n *grid"], size: Sequence[int]) -> Float[Tensor, "n *size"]:
    """Turn signed maps on the grid into heatmaps 0..1 at the size of the input.

    ReLU comes before the upsampling, the division by the maximum after it. A map with a value that is not finite
    becomes zero: there is nothing true to draw.
    """
    finite = torch.isfinite(raw).flatten(1).all(1).reshape(-1, *[1] * (raw.dim() - 1))
    return scale(upsample(torch.where(finite, raw, 0).relu(), size))


def fuse(raws: Sequence[Float[Tensor, "n *_"]], size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Fuse the signed maps of several layers by their mean, each scaled by its own largest absolute value first.

    Returns:
        The fused signed map (N, *grid) on the finest of the grids, and the heatmap (N, *size): the mean of the layers'
        own heatmaps, scaled, or zero where a layer's map is not finite. One layer's map passes through as it is.

    """
    if len(raws) == 1:
        return raws[0], to_heatmap(raws[0], size)
    finest = max((raw.shape[1:] for raw in raws), key=lambda grid: grid.numel())
    signed = [torch.copysign(scale(raw.abs()), raw) for raw in raws]
    mean = torch.stack([upsample(raw, finest) for raw in signed]).mean(0)
    heatmap = torch.stack([to_heatmap(raw, size) for raw in raws]).mean(0)
    finite = torch.stack([torch.isfinite(raw).flatten(1).all(1) for raw in raws]).all(0)
    return mean, scale(torch.where(finite.reshape(-1, *[1] * len(size)), heatmap, 0))
