"""Edits of pictures, as pure functions of tensors: objects removed, pasted elsewhere, rings exchanged.

All act on model inputs (C, H, W): a preprocessing changes colours the same way at every pixel, so pasting before or
after it is the same.
"""

from __future__ import annotations

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

LEAST_REST = 0.02
"""Share of a picture that a rectangle beside the objects must have for its texture to stand for the background."""

_CELLS = 32
"""Rows, and columns, of the grid on which that rectangle is searched."""


def blurred(picture: Float[Tensor, "c h w"], hole: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
    """Fill a hole smoothly from its surroundings (push-pull: Gortler et al. 1996, The Lumigraph, 3.4).

    What is known is averaged down level by level until nothing is missing, and what is missing is taken from the level
    above on the way back. A picture that is all hole becomes zero.
    """
    known = (~hole).numpy()
    if not known.any():
        return torch.zeros_like(picture)
    pixels = np.ascontiguousarray(picture.float().permute(1, 2, 0).numpy())
    filled = _pushed(pixels * known[..., None], known.astype(np.float32))
    return torch.where(hole, torch.from_numpy(filled).permute(2, 0, 1).to(picture), picture)


def _pushed(known: Float[np.ndarray, "h w c"], weight: Float[np.ndarray, "h w"]) -> Float[np.ndarray, "h w c"]:
    """Fill where the weight is zero; ``known`` is multiplied with it, so that means are those of known pixels alone."""
    height, width = weight.shape
    means: Float[np.ndarray, "h w c"] = known / np.maximum(weight, 1e-12)[..., None]
    if (weight > 0).all():
        return means
    size = ((width + 1) // 2, (height + 1) // 2)
    coarse, share = _resized(known, size, cv2.INTER_AREA), cv2.resize(weight, size, interpolation=cv2.INTER_AREA)
    above = _resized(_pushed(coarse, share.reshape(size[::-1])), (width, height), cv2.INTER_LINEAR)
    return np.asarray(np.where(weight[..., None] > 0, means, above))


_AT_ONCE = 4
"""Channels that OpenCV resizes at once."""


def _resized(
    values: Float[np.ndarray, "h w c"], size: tuple[int, int], interpolation: int
) -> Float[np.ndarray, "h2 w2 c"]:
    """Resize to (width, height)."""
    parts = [values[..., start : start + _AT_ONCE] for start in range(0, values.shape[2], _AT_ONCE)]
    resized = [cv2.resize(part, size, interpolation=interpolation).reshape(*size[::-1], -1) for part in parts]
    return np.concatenate(resized, 2)


def tiled(picture: Float[Tensor, "c h w"], hole: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"] | None:
    """Fill a hole with the texture of the largest rectangle beside it, repeated as between mirrors.

    As ImageNet-9's backgrounds are made (Xiao et al. 2020, arXiv:2006.09994), with mirrors against seams. None where no
    rectangle is large enough.
    """
    found = largest_rectangle(hole)
    if found is None:
        return None
    left, top, right, bottom = found
    rows, columns = _mirrored(hole.shape[0], top, bottom), _mirrored(hole.shape[1], left, right)
    return torch.where(hole, picture[:, rows][:, :, columns], picture)


def _mirrored(length: int, start: int, end: int) -> Tensor:
    """Return for each place of an axis the place within start..end that mirrors at both would show there."""
    span = end - start
    places = (torch.arange(length) - start) % (2 * span)
    return start + torch.where(places < span, places, 2 * span - 1 - places)


def largest_rectangle(hole: Bool[Tensor, "h w"]) -> tuple[int, int, int, int] | None:
    """Return the largest rectangle (left, top, right, bottom) without a hole; None where all are too small."""
    height, width = hole.shape
    step = max(1, min(height, width) // _CELLS)
    cells = functional.max_pool2d(hole.float()[None, None], step)[0, 0].numpy() > 0
    rows, columns = cells.shape
    tops, bottoms = np.triu_indices(rows)
    counts = np.pad(cells.cumsum(0), ((1, 0), (0, 0)))
    free = counts[bottoms + 1] == counts[tops]  # of each range of rows, the columns without a hole
    run, longest, end = np.zeros(len(tops), int), np.zeros(len(tops), int), np.zeros(len(tops), int)
    for column in range(columns):
        run = np.where(free[:, column], run + 1, 0)
        end = np.where(run > longest, column + 1, end)
        longest = np.maximum(longest, run)
    areas = longest * (bottoms + 1 - tops)
    best = int(areas.argmax())
    if areas[best] * step * step < LEAST_REST * height * width:
        return None
    left, top, right, bottom = end[best] - longest[best], tops[best], end[best], bottoms[best] + 1
    return int(left) * step, int(top) * step, int(right) * step, int(bottom) * step


FILLS = {"tile": tiled, "blur": blurred}
"""How the place of an object is filled; two of them must agree before a build fails."""


def pasted(
    picture: Float[Tensor, "c h w"], region: Float[Tensor, "h w"], background: Float[Tensor, "c h w"]
) -> Float[Tensor, "c h w"]:
    """Return a picture's region, at its place, on another background; ``region`` is the share of each pixel, 0..1."""
    return picture * region + background * (1 - region)


def ring(size: tuple[int, int], share: float) -> Bool[Tensor, "h w"]:
    """Return the outer ring of a picture (height, width), ``share`` of each side wide."""
    height, width = size
    down, across = max(1, round(share * height)), max(1, round(share * width))
    outer = torch.ones(size, dtype=torch.bool)
    outer[down : height - down, across : width - across] = False
    return outer


def blocks(allowed: Bool[Tensor, "h w"], area: float, seed: int, step: int) -> Bool[Tensor, "h w"] | None:
    """Choose blocks at random within an allowed region until they cover an area in pixels; None where it is too small.

    The last block is cut, so that the area is met to within a row of a block.
    """
    height, width = allowed.shape
    rng = np.random.default_rng(seed)
    rows, columns = -(-height // step), -(-width // step)
    chosen = torch.zeros_like(allowed)
    missing = area
    for number in rng.permutation(rows * columns):
        top, left = int(number) // columns * step, int(number) % columns * step
        block = allowed[top : top + step, left : left + step]
        count = int(block.sum())
        if count > missing:
            lines = block.sum(1).cumsum(0) <= missing
            block = block & lines[:, None]
        chosen[top : top + step, left : left + step] = block
        missing -= int(block.sum())
        if missing < step:
            return chosen
    return None
