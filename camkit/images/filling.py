"""Fill holes in pictures from their surroundings, and widen regions."""

from __future__ import annotations

import itertools

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

_OPENCV_CHANNELS = 4
"""The most channels that OpenCV resizes in one call."""

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
    filled = _push_pull(pixels * known[..., None], known.astype(np.float32))
    return torch.where(hole, torch.from_numpy(filled).permute(2, 0, 1).to(picture), picture)


def _push_pull(weighted: Float[np.ndarray, "h w c"], weight: Float[np.ndarray, "h w"]) -> Float[np.ndarray, "h w c"]:
    """Fill the pixels whose weight is zero. ``weighted`` is pixel times weight, so that means use known pixels only."""
    height, width = weight.shape
    means: Float[np.ndarray, "h w c"] = weighted / np.maximum(weight, _TINY_WEIGHT)[..., None]
    if (weight > 0).all():
        return means
    size = ((width + 1) // 2, (height + 1) // 2)
    coarse = _resized(weighted, size, cv2.INTER_AREA)
    coarse_weight = cv2.resize(weight, size, interpolation=cv2.INTER_AREA).reshape(size[::-1])
    above = _resized(_push_pull(coarse, coarse_weight), (width, height), cv2.INTER_LINEAR)
    return np.asarray(np.where(weight[..., None] > 0, means, above))


def _resized(
    values: Float[np.ndarray, "h w c"], size: tuple[int, int], interpolation: int
) -> Float[np.ndarray, "h2 w2 c"]:
    """Resize to (width, height), with any number of channels."""
    parts = [values[..., start : start + _OPENCV_CHANNELS] for start in range(0, values.shape[2], _OPENCV_CHANNELS)]
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


def fill_linearly(picture: Float[Tensor, "c *size"], hole: Bool[Tensor, "*size"]) -> Float[Tensor, "c *size"]:
    """Make each pixel of a hole the weighted mean of its neighbours (Rong et al. 2022, arXiv:2202.00449, 4.1).

    A direct neighbour weighs twice as much as a diagonal one: in a picture 1/6 and 1/12. The neighbours that lie
    outside the picture have no weight. This is a sparse system of linear equations, one for each pixel of the hole,
    which is solved exactly. A picture that is all hole becomes the mean of its colours.
    """
    from scipy.sparse import csc_array  # noqa: PLC0415 - SciPy takes long to import, and few calls fill linearly
    from scipy.sparse.linalg import splu  # noqa: PLC0415

    if not bool(hole.any()):
        return picture.clone()
    if bool(hole.all()):
        return picture.flatten(1).mean(1).reshape(-1, *[1] * hole.dim()).expand_as(picture).clone()
    missing = hole.numpy()
    number = np.full(missing.shape, -1)
    number[missing] = np.arange(missing.sum())
    pixels = np.moveaxis(picture.double().numpy(), 0, -1)
    where = np.argwhere(missing)
    weight_of_all, known = np.zeros(len(where)), np.zeros((len(where), len(picture)))
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for step in itertools.product((-1, 0, 1), repeat=hole.dim()):
        if not any(step):
            continue
        weight = 2.0 ** step.count(0)
        beside = where + np.array(step)
        rows = np.flatnonzero(((beside >= 0) & (beside < missing.shape)).all(1))
        places = tuple(beside[rows].T)
        weight_of_all[rows] += weight
        unknown = missing[places]
        entries.append((rows[unknown], number[places][unknown], np.full(int(unknown.sum()), -weight)))
        known[rows[~unknown]] += weight * pixels[places][~unknown]
    diagonal = np.arange(len(where))
    rows, columns, weights = map(np.concatenate, zip(*entries, (diagonal, diagonal, weight_of_all), strict=True))
    system = csc_array((weights, (rows, columns)), shape=(len(where), len(where)))
    # The matrix is symmetric and diagonally dominant, so it needs no pivots; this order of columns is made for it.
    solver = splu(system, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    filled = picture.clone()
    filled[:, hole] = torch.from_numpy(solver.solve(known).T.copy()).to(picture)
    return filled
