"""Draws a heatmap in one of the styles on a picture, on the frames of a clip, or on the slices of a volume."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, UInt8

from camkit.drawing.figure import resized, scaled_box
from camkit.drawing.overlay import blend, colorize, render
from camkit.drawing.pixels import Drawable, pixels_of, size_of, size_within
from camkit.drawing.text import GREY, Canvas
from camkit.errors import InputError
from camkit.types import Box, Pixels, Style

Resize: TypeAlias = Callable[[Drawable], Drawable]
"""Makes a picture smaller or larger before it is drawn on."""

_MOST = 16
"""Slices on a sheet: four rows of four stay large enough to read."""
_SIDE = 200
"""The longer side of a slice, in pixels."""
_GAP = 8
_CAPTION = 20
_SIZE = 13


def draw(
    heatmap: Float[np.ndarray, "*size"],
    picture: Drawable | None,
    box: Box | None = None,
    detection: Box | None = None,
    *,
    volume: UInt8[np.ndarray, "d h w 3"] | None = None,
    names: Sequence[str] = (),
    style: Style = "overlay",
    colormap: str = "turbo",
    alpha: float = 0.5,
    resize: Resize | None = None,
) -> Pixels:
    """Draw a heatmap without a caption, on the picture as ``resize`` returns it; a volume is a sheet of slices.

    Args:
        heatmap: values 0..1.
        picture: the picture; None draws the colours alone.
        box: the part of the picture that the model saw; None for all of it.
        detection: the box to outline.
        volume: the slices or frames, if the map has three axes.
        names: the names of the frames.
        style, colormap, alpha: as for ``render``.
        resize: what is done with the picture before.

    Raises:
        InputError: the style or the colormap is unknown, alpha is out of range, or the map has one axis.
    """
    if heatmap.ndim == 3:
        return draw_slices(heatmap, volume, colormap, alpha, names)
    if heatmap.ndim != 2:
        raise InputError("the map of a signal has one axis and cannot be drawn as a picture; plot its heatmap")
    boxes = [box, detection]
    if resize is not None:
        if picture is None:
            return pixels_of(resize(colorize(heatmap, colormap)))
        before, picture = size_of(picture), resize(picture)
        boxes = [None if each is None else scaled_box(each, before, size_of(picture)) for each in boxes]
    return render(picture, heatmap, boxes[0], style=style, colormap=colormap, alpha=alpha, detection=boxes[1])


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
