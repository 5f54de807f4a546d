"""Draws the heat in a volume as a sheet of slices along its first axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8

from camkit.drawing.figure import resized
from camkit.drawing.overlay import blend, colorize
from camkit.drawing.pixels import size_within
from camkit.drawing.text import GREY, Canvas
from camkit.types import Pixels

_MOST = 16
"""Slices on a sheet: four rows of four stay large enough to read."""
_SIDE = 200
"""The longer side of a slice, in pixels."""
_GAP = 8
_CAPTION = 20
_SIZE = 13


def chosen_slices(heatmap: Float[np.ndarray, "d h w"]) -> list[int]:
    """Return the numbers of the slices to draw, from 0: all of them, or some evenly spaced and the strongest.

    >>> chosen_slices(np.eye(40, dtype=np.float32)[:, :, None])[:4]
    [0, 3, 5, 8]
    """
    depth = len(heatmap)
    if depth <= _MOST:
        return list(range(depth))
    numbers = np.rint(np.linspace(0, depth - 1, _MOST)).astype(int)
    strongest = int(heatmap.max((1, 2)).argmax())
    numbers[np.abs(numbers - strongest).argmin()] = strongest
    return [int(number) for number in numbers]


def draw_slices(
    heatmap: Float[np.ndarray, "d h w"],
    volume: UInt8[np.ndarray, "d h w 3"] | None,
    colormap: str,
    alpha: float,
    names: Sequence[str] = (),
) -> Pixels:
    """Return a sheet of slices, each with its name or number; without a volume to draw on, of the colours alone."""
    numbers = chosen_slices(heatmap)
    columns = math.ceil(math.sqrt(len(numbers)))
    rows = math.ceil(len(numbers) / columns)
    height, width = size_within(heatmap.shape[1:], _SIDE)
    canvas = Canvas(columns * (width + _GAP) - _GAP, rows * (height + _CAPTION + _GAP) - _GAP)
    for place, number in enumerate(numbers):
        left, top = place % columns * (width + _GAP), place // columns * (height + _CAPTION + _GAP)
        if volume is None:
            tile = resized(colorize(heatmap[number], colormap), (height, width))
        else:
            tile = blend(
                resized(volume[number], (height, width)), heatmap[number], None, colormap=colormap, alpha=alpha
            )
        canvas.picture(left, top, tile)
        words = names[number] if names else f"slice {number + 1} of {len(heatmap)}"
        canvas.text(left, top + height + _CAPTION / 2, words, size=_SIZE, colour=GREY)
    return canvas.pixels()
