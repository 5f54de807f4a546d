"""Fill holes in pictures from their surroundings, and widen regions.

Linear imputation makes each missing pixel the weighted mean of its neighbours, which is a linear equation for each.
Conjugate gradients solve these equations. A multigrid cycle improves each step, since it also corrects errors on
coarser and coarser grids (Briggs et al. 2000, A Multigrid Tutorial). A direct solution takes several times as long.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

OPENCV_CHANNELS = 4
"""The most channels of a picture that OpenCV resizes in one call."""


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
    # The least weight keeps the division finite; where a weight is zero, its result is never used.
    means: Float[np.ndarray, "h w c"] = weighted / np.maximum(weights, 1e-12)
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
        widest = torch.nn.functional.max_pool1d(lines.reshape(1, -1, lines.shape[-1]), 2 * pixels + 1, 1, pixels)
        near = widest.reshape(lines.shape).movedim(-1, axis)
    return near > 0


Values = Float[np.ndarray, "*size c"]

_TOLERANCE = 1e-4
"""The error that may remain, as a share of the standard deviation: a hundredth of ROAD's noise."""


def fill_linearly(
    picture: Float[Tensor, "c *size"], hole: Bool[Tensor, "*size"], tolerance: float = _TOLERANCE
) -> Float[Tensor, "c *size"]:
    """Make each pixel of a hole the weighted mean of its neighbours (Rong et al. 2022, arXiv:2202.00449, 4.1).

    A direct neighbour weighs twice as much as a diagonal one: in a picture 1/6 and 1/12. The neighbours that lie
    outside the picture have no weight. A picture that is all hole becomes the mean of its colours.

    Args:
        picture: a signal, a picture or a volume.
        hole: True where pixels are missing.
        tolerance: about how large a pixel's error may be, as a share of the standard deviation of the known pixels.
    """
    if bool(hole.all()):
        return picture.flatten(1).mean(1).reshape(-1, *[1] * hole.dim()).expand_as(picture).clone()
    size = hole.shape if hole.dim() > 1 else (1, *hole.shape)  # the neighbours in a signal have equal weights, too
    # In float32, rounding would add up along a signal.
    exact = picture.double() if hole.dim() == 1 or picture.dtype == torch.float64 else picture.float()
    known = exact.reshape(len(exact), -1)[:, ~hole.flatten()]
    spread, largest = float(known.std(unbiased=False)), float(known.abs().max())
    # A correction of at most 8 times the rounding of the largest value counts as none.
    limit = max(tolerance * spread, 8 * torch.finfo(exact.dtype).eps * largest)
    filled = [
        _solved(np.ascontiguousarray(np.moveaxis(part.numpy(), 0, -1)), hole.reshape(size).numpy(), limit)
        for part in exact.reshape(-1, *size).split(OPENCV_CHANNELS)
    ]
    found = torch.from_numpy(np.moveaxis(np.concatenate(filled, -1), -1, 0))
    return torch.where(hole, found.reshape(picture.shape).to(picture), picture)


def _solved(values: Values, missing: Bool[np.ndarray, "*size"], most: float) -> Values:
    """Solve for the missing pixels by conjugate gradients, until the next correction is at most ``most``."""
    grid = _Grid(missing, values.shape[-1], values.dtype)
    values = np.where(missing[..., None], values[~missing].mean(0), values)
    residual = -grid.applied(values)
    correction = grid.correction(residual)
    step, product = correction, np.vdot(residual, correction)
    # Pictures take 5 to 10 steps; volumes, which have no coarser grids, take up to a few hundred.
    for _ in range(500):
        if not max(correction.max(), -correction.min()) > most:
            break
        applied = grid.applied(step)
        length = values.dtype.type(product / np.vdot(step, applied))
        values += length * step
        residual -= length * applied
        correction = grid.correction(residual)
        before, product = product, np.vdot(residual, correction)
        step = correction + values.dtype.type(product / before) * step
    return values


class _Grid:
    """The equations of the missing cells of a grid, and the coarser grid that corrects them.

    Args:
        missing: the cells that are solved for; the others keep their values.
        channels: how many values a cell has.
        dtype: their type.
    """

    def __init__(self, missing: Bool[np.ndarray, "*size"], channels: int, dtype: Any) -> None:
        ones = np.ones((*missing.shape, channels), dtype)
        self._missing = ones * missing[..., None]
        self._all = _with_neighbours(ones)
        self._inverse = self._missing / (self._all - 2**missing.ndim)
        self._scale = 2 if 1 in missing.shape else 1  # sums of pairs have half the weight of sums of four
        self._coarser: _Grid | None = None
        # A grid with at most three cells along each axis gets no coarser one.
        if missing.ndim == 2 and max(missing.shape) > 3:
            even = np.pad(missing, [(0, side % 2) for side in missing.shape], mode="edge")
            coarser = even[::2, ::2] & even[1::2, ::2] & even[::2, 1::2] & even[1::2, 1::2]  # only missing pixels
            self._coarser = _Grid(coarser, channels, dtype) if coarser.any() else None

    def applied(self, values: Values) -> Values:
        """Return by how much each missing cell exceeds its neighbours: the sum of weight times difference."""
        exceeding: Values = self._all * values
        exceeding -= _with_neighbours(values)
        exceeding *= self._missing
        return exceeding

    def correction(self, residual: Values) -> Values:
        """Return an estimate of the values with this residual: smooth, correct on the coarser grid, smooth again.

        The estimate is a symmetric function of the residual, as conjugate gradients require.
        """
        found: Values = self._inverse * residual
        if self._coarser is not None:
            rest = self._scale * _summed_up(residual - self.applied(found))
            coarse = self._coarser.correction(self._coarser._missing * rest)
            found += self._missing * _doubled(coarse)[tuple(map(slice, self._missing.shape))]
        # The coarsest grid is smoothed four times.
        for _ in range(1 if self._coarser is not None else 4):
            found += self._inverse * (residual - self.applied(found))
        return found


def _with_neighbours(values: Values) -> Values:
    """Sum up neighbourhoods with weights of 1, 2 and 1 along each axis; there is nothing beyond the edges."""
    if values.ndim == 3:
        weights = np.array([1, 2, 1], values.dtype)
        sums = cv2.sepFilter2D(values, -1, weights, weights, borderType=cv2.BORDER_CONSTANT)
        return np.asarray(sums).reshape(values.shape)
    for axis in range(values.ndim - 1):
        around = np.pad(values, [(int(other == axis),) * 2 for other in range(values.ndim)])
        first, middle, last = (np.take(around, range(at, at + values.shape[axis]), axis) for at in range(3))
        values = first + 2 * middle + last
    return values


def _summed_up(values: Float[np.ndarray, "h w c"]) -> Float[np.ndarray, "h2 w2 c"]:
    """Sum up values on a grid of half the size; the transpose of ``_doubled``."""
    even = np.pad(values, [*((0, side % 2) for side in values.shape[:2]), (0, 0)])
    weights = np.array([1, 3, 3, 1], values.dtype) / 4
    summed = cv2.sepFilter2D(even, -1, weights, weights, anchor=(1, 1), borderType=cv2.BORDER_REPLICATE)
    return np.ascontiguousarray(summed.reshape(even.shape)[::2, ::2])


def _doubled(values: Float[np.ndarray, "h w c"]) -> Float[np.ndarray, "h2 w2 c"]:
    """Interpolate values on a grid of twice the size."""
    height, width, channels = values.shape
    doubled = cv2.resize(values, (2 * width, 2 * height), interpolation=cv2.INTER_LINEAR)
    return np.asarray(doubled).reshape(2 * height, 2 * width, channels)
