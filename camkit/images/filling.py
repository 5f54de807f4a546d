"""Fill holes in pictures from their surroundings, and widen regions."""

from __future__ import annotations

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

OPENCV_CHANNELS = 4
"""The most channels of a picture that OpenCV resizes in one call."""

_TINY_WEIGHT = 1e-12
"""Keeps the division by a weight of zero finite; the result of that division is never used."""


def fill_smoothly(picture: Float[Tensor, "c h w"], hole: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
    """Fill a hole smoothly from its surroundings (push-pull: Gortler et al. 1996, The Lumigraph, 3.4).

    The known pixels are averaged down, level by level, until no pixel is missing. On the way back up, each missing
    pixel is taken from the coarser level. A picture that is all hole becomes zero.
    """
    known = (~hole).numpy()
    if not known.any():
        return torch.zeros_like(picture)
    pixels = np.ascontiguousarray(picture.float().permute(1, 2, 0).numpy())
    weight = known.astype(np.float32)
    filled = _push_pull(pixels * _for_channels(weight, pixels.shape[2]), weight)
    return torch.where(hole, torch.from_numpy(filled).permute(2, 0, 1).to(picture), picture)


def _push_pull(weighted: Float[np.ndarray, "h w c"], weight: Float[np.ndarray, "h w"]) -> Float[np.ndarray, "h w c"]:
    """Fill the pixels whose weight is zero. ``weighted`` is pixel times weight, so that means use known pixels only."""
    height, width = weight.shape
    weights = _for_channels(weight, weighted.shape[2])
    means: Float[np.ndarray, "h w c"] = weighted / np.maximum(weights, _TINY_WEIGHT)
    if (weight > 0).all():
        return means
    size = ((width + 1) // 2, (height + 1) // 2)
    coarse = _resized(weighted, size, cv2.INTER_AREA)
    coarse_weight = cv2.resize(weight, size, interpolation=cv2.INTER_AREA).reshape(size[::-1])
    filled = _resized(_push_pull(coarse, coarse_weight), (width, height), cv2.INTER_LINEAR)
    np.copyto(filled, means, where=weights > 0)
    return filled


def _for_channels(weight: Float[np.ndarray, "h w"], channels: int) -> Float[np.ndarray, "h w c"]:
    """Repeat a weight for each channel: NumPy is several times as fast if arrays have the same shape."""
    return np.repeat(weight[..., None], channels, 2)


def _resized(
    values: Float[np.ndarray, "h w c"], size: tuple[int, int], interpolation: int
) -> Float[np.ndarray, "h2 w2 c"]:
    """Resize to (width, height), with any number of channels."""
    parts = [values[..., start : start + OPENCV_CHANNELS] for start in range(0, values.shape[2], OPENCV_CHANNELS)]
    resized = [cv2.resize(part, size, interpolation=interpolation).reshape(*size[::-1], -1) for part in parts]
    return np.concatenate(resized, 2)


POINTING_TOLERANCE = 15
"""Pixels by which a maximum may miss its region in the pointing game (Zhang et al. 2016, arXiv:1608.00507)."""


def dilated(region: Bool[Tensor, "*size"], pixels: int) -> Bool[Tensor, "*size"]:
    """Widen a region by a number of pixels along each axis, diagonals included."""
    near = region.float()
    for axis in range(region.dim()):
        lines = near.movedim(axis, -1)
        widest = functional.max_pool1d(lines.reshape(1, -1, lines.shape[-1]), 2 * pixels + 1, 1, pixels)
        near = widest.reshape(lines.shape).movedim(-1, axis)
    return near > 0
