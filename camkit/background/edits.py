"""Edits of pictures as pure functions of tensors: remove an object, paste it elsewhere, exchange the outer ring.

All edits act on model inputs (C, H, W). A preprocessing changes colours the same way at every pixel, so pasting before
it and pasting after it give the same result.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from camkit.images.filling import fill_smoothly

MIN_RECTANGLE = 0.02
"""Share of the picture that a rectangle beside the objects must cover. The texture of a smaller rectangle does not
represent the background."""

_SEARCH_CELLS = 32
"""Cells along the shorter side of the grid on which that rectangle is searched."""


def fill_with_texture(picture: Float[Tensor, "c h w"], hole: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"] | None:
    """Fill a hole with mirrored copies of the largest rectangle beside it; None if no rectangle is large enough.

    The backgrounds of ImageNet-9 are made this way (Xiao et al. 2020, arXiv:2006.09994); the mirrors avoid seams.
    """
    rectangle = largest_rectangle(hole)
    if rectangle is None:
        return None
    left, top, right, bottom = rectangle
    rows, columns = _mirrored_indices(hole.shape[0], top, bottom), _mirrored_indices(hole.shape[1], left, right)
    return torch.where(hole, picture[:, rows][:, :, columns], picture)


def _mirrored_indices(length: int, start: int, end: int) -> Tensor:
    """Return, for each index of an axis, the index in start..end that shows there if both ends are mirrors."""
    span = end - start
    offsets = (torch.arange(length) - start) % (2 * span)
    return start + torch.where(offsets < span, offsets, 2 * span - 1 - offsets)


def largest_rectangle(hole: Bool[Tensor, "h w"]) -> tuple[int, int, int, int] | None:
    """Return the largest rectangle (left, top, right, bottom) without a hole; None if all are below MIN_RECTANGLE."""
    height, width = hole.shape
    step = max(1, min(height, width) // _SEARCH_CELLS)
    cells = functional.max_pool2d(hole.float()[None, None], step)[0, 0].numpy() > 0
    rows, columns = cells.shape
    tops, bottoms = np.triu_indices(rows)
    counts = np.pad(cells.cumsum(0), ((1, 0), (0, 0)))
    free = counts[bottoms + 1] == counts[tops]  # for each range of rows, the columns without a hole
    run, longest, end = np.zeros(len(tops), int), np.zeros(len(tops), int), np.zeros(len(tops), int)
    for column in range(columns):
        run = np.where(free[:, column], run + 1, 0)
        end = np.where(run > longest, column + 1, end)
        longest = np.maximum(longest, run)
    areas = longest * (bottoms + 1 - tops)
    best = int(areas.argmax())
    if areas[best] * step * step < MIN_RECTANGLE * height * width:
        return None
    left, top, right, bottom = end[best] - longest[best], tops[best], end[best], bottoms[best] + 1
    return int(left) * step, int(top) * step, int(right) * step, int(bottom) * step


TILE, BLUR = "tile", "blur"
FILLS = {TILE: fill_with_texture, BLUR: fill_smoothly}
"""How the hole of an object is filled. Both ways must agree before a model fails."""

RING = "ring"
"""Stands in place of a fill's name if the data has no regions, so that the outer ring is exchanged."""


def paste(
    picture: Float[Tensor, "c h w"], region: Float[Tensor, "h w"], background: Float[Tensor, "c h w"]
) -> Float[Tensor, "c h w"]:
    """Paste a region of a picture onto another background, at the same place.

    ``region`` is the share of each pixel, 0..1, that belongs to the region.
    """
    return picture * region + background * (1 - region)


def outer_ring(size: tuple[int, int], share: float) -> Bool[Tensor, "h w"]:
    """Return the outer ring of a picture of ``size`` (height, width). Its width is ``share`` of each side."""
    height, width = size
    down, across = max(1, round(share * height)), max(1, round(share * width))
    outer = torch.ones(size, dtype=torch.bool)
    outer[down : height - down, across : width - across] = False
    return outer


def random_blocks(allowed: Bool[Tensor, "h w"], area: float, seed: int, step: int) -> Bool[Tensor, "h w"] | None:
    """Choose random blocks of ``step`` pixels within a region until they cover ``area`` pixels; None if they cannot.

    The last block is cut, so that the area is met to within one row of a block.
    """
    height, width = allowed.shape
    rng = np.random.default_rng(seed)
    rows, columns = -(-height // step), -(-width // step)
    chosen = torch.zeros_like(allowed)
    missing = area
    for number in rng.permutation(rows * columns):
        top, left = int(number) // columns * step, int(number) % columns * step
        block = allowed[top : top + step, left : left + step]
        if int(block.sum()) > missing:
            lines = block.sum(1).cumsum(0) <= missing
            block = block & lines[:, None]
        chosen[top : top + step, left : left + step] = block
        missing -= int(block.sum())
        if missing < step:
            return chosen
    return None
