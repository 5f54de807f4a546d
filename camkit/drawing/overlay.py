"""Draws a heatmap onto a picture, with OpenCV. Pictures are RGB, height x width x 3, uint8."""

from __future__ import annotations

import functools
import math

import cv2
import numpy as np
from jaxtyping import Float, UInt8

from camkit.drawing.pixels import Drawable, pixels_of, size_of, size_within, strips_into
from camkit.errors import InputError, did_you_mean
from camkit.types import Box, Pixels, Style

COLORMAPS: dict[str, int] = {
    name.removeprefix("COLORMAP_").lower().replace("_", "-"): getattr(cv2, name)
    for name in dir(cv2)
    if name.startswith("COLORMAP_")
}
"""OpenCV's colour maps by name."""

STYLES: tuple[Style, ...] = ("overlay", "side-by-side", "heatmap", "figure")

_CROPPED_BRIGHTNESS = 0.45
"""Brightness of the part of a picture that the preprocessing cropped away: the model did not see it."""
_VISIBLE = 1 / 200
"""The share of a side from which a cropped strip is worth a word. The box of a preprocessing that crops nothing is
measured, and was off by up to 0.0012 of a side for inputs of 32 to 384 pixels."""
_OUTLINE_WIDTH = 1 / 200
"""Width of a detection's outline, as a share of the picture's shorter side."""


def check(style: str, colormap: str, alpha: float, max_side: int | None = None) -> None:
    """Check the options for drawing.

    Raises:
        InputError: the style or the colormap is unknown, alpha is outside 0..1, or max_side is not a number of pixels.
    """
    for kind, word, choices in (("style", style, STYLES), ("colormap", colormap, tuple(COLORMAPS))):
        if word not in choices:
            hint = did_you_mean(word, choices) or f"; choose from {', '.join(choices)}"
            raise InputError(f"unknown {kind} {word!r}{hint}")
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha must be a weight between 0 and 1, not {alpha}")
    if max_side is not None and (not isinstance(max_side, int) or max_side < 1):
        raise InputError(f"max_side must be at least 1 pixel, or None for any size, not {max_side!r}")


def colorize(heatmap: Float[np.ndarray, "h w"], colormap: str = "turbo") -> Pixels:
    """Return the colours of a heatmap with values 0..1."""
    return np.asarray(cv2.applyColorMap(_levels(heatmap), _colours(colormap)))


def _levels(heatmap: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "h w"]:
    """Return a heatmap with values 0..1 in 8 bit."""
    return np.asarray(np.clip(np.rint(heatmap * 255), 0, 255), np.uint8)


@functools.cache
def _colours(colormap: str) -> UInt8[np.ndarray, "256 1 3"]:
    """Return the 256 colours of a colour map. OpenCV applies such a table in half the time of its own colour map."""
    table = cv2.applyColorMap(np.arange(256, dtype=np.uint8)[:, None], COLORMAPS[colormap])
    return np.ascontiguousarray(table[..., ::-1])


def stretch(heatmap: Float[np.ndarray, "h w"], box: Box, size: tuple[int, int]) -> Float[np.ndarray, "height width"]:
    """Stretch a heatmap over its box on a picture of ``size`` (height, width); NaN outside the box."""
    placed = np.full(size, np.nan, np.float32)
    covered = _pixels_in(box, size)
    placed[covered] = _warped(heatmap, box, size)[covered]
    return placed


def _warped(heatmap: Float[np.ndarray, "h w"], box: Box, size: tuple[int, int]) -> Float[np.ndarray, "height width"]:
    """Stretch a heatmap over its box on a picture of ``size`` (height, width), and repeat its edges outside."""
    across = (box.right - box.left) / heatmap.shape[1]
    down = (box.bottom - box.top) / heatmap.shape[0]
    # Pixel centres lie at +0.5: heatmap column u is centred on x = left + (u + 0.5) * across - 0.5 of the picture.
    onto_picture = np.array(
        [[across, 0, box.left + across / 2 - 0.5], [0, down, box.top + down / 2 - 0.5]], dtype=np.float64
    )
    flags, border = cv2.INTER_LINEAR, cv2.BORDER_REPLICATE
    return np.asarray(cv2.warpAffine(heatmap, onto_picture, size[::-1], flags=flags, borderMode=border))


def _pixels_in(box: Box, size: tuple[int, int]) -> tuple[slice, slice]:
    """Return the rows and the columns of the pixels whose centres lie in a box."""
    height, width = size
    return _between(box.top, box.bottom, height), _between(box.left, box.right, width)


def hides(box: Box, size: tuple[int, int]) -> bool:
    """Tell whether a visible part of a picture of ``size`` (height, width) lies outside a box."""
    height, width = size
    beside = max(box.left, width - box.right) / width, max(box.top, height - box.bottom) / height
    return max(beside) > _VISIBLE


def _between(start: float | int, end: float | int, length: int) -> slice:
    first, last = max(math.ceil(start - 0.5), 0), min(math.floor(end - 0.5), length - 1)
    return slice(first, max(last + 1, first))


def blend(
    picture: Drawable,
    heatmap: Float[np.ndarray, "h w"],
    box: Box | None,
    *,
    colormap: str = "turbo",
    alpha: float = 0.5,
) -> Pixels:
    """Blend the heat into the part of the picture that the model saw, and darken the rest.

    Args:
        picture: the original picture.
        heatmap: values 0..1. An all-zero map adds no colour: no evidence, no colours.
        box: the part of the picture that the model saw; None for all of it.
        colormap: a name from ``COLORMAPS``.
        alpha: weight of the colours, 0..1; the picture has the weight 1 - alpha.
    """
    height, width = size_of(picture)
    box = box or Box(0, 0, width, height)
    rows, columns = _pixels_in(box, (height, width))
    levels = _levels_in(heatmap, box, rows, columns)
    seen_rows = rows.stop - rows.start
    level_of = np.arange(seen_rows) * len(levels) // max(seen_rows, 1)
    share = alpha if heatmap.any() else 0.0
    drawn = np.empty((height, width, 3), np.uint8)
    for top, strip in strips_into(drawn, picture):
        bottom = top + len(strip)
        first, last = min(max(rows.start, top), bottom), max(min(rows.stop, bottom), top)
        seen = np.s_[first - top : last - top, columns]
        _darken(strip, seen)
        if strip[seen].size:
            numbers = level_of[first - rows.start : last - rows.start]
            colours = cv2.applyColorMap(levels[numbers[0] : numbers[-1] + 1], _colours(colormap))
            if len(colours) < len(numbers):
                colours = colours[numbers - numbers[0]]
            cv2.addWeighted(strip[seen], 1 - share, colours, share, 0, dst=strip[seen])
    return drawn


def _darken(strip: Pixels, seen: tuple[slice, slice]) -> None:
    """Darken a strip, except the rows and columns that the model saw."""
    rows, columns = seen
    for part in (np.s_[: rows.start], np.s_[rows.stop :], np.s_[rows, : columns.start], np.s_[rows, columns.stop :]):
        if strip[part].size:
            cv2.convertScaleAbs(strip[part], dst=strip[part], alpha=_CROPPED_BRIGHTNESS)


_UNSEEN_SHIFT = 4
"""If a pixel of the heatmap covers at least this many pixels of the picture along each side, the heat may be shifted by
half a pixel of the picture, which nobody can see."""


def _levels_in(
    heatmap: Float[np.ndarray, "h w"], box: Box, rows: slice, columns: slice
) -> UInt8[np.ndarray, "rows width"]:
    """Return the heat of the pixels in these rows and columns in 8 bit, where the heatmap covers ``box``.

    If the heat hardly changes from row to row, each row of the result stands for several rows of the picture.
    """
    height, width = rows.stop - rows.start, columns.stop - columns.start
    if not height or not width:
        return np.empty((height, width), np.uint8)
    enlarged = min(height / heatmap.shape[0], width / heatmap.shape[1])
    lost = box.right - box.left - width, box.bottom - box.top - height
    if enlarged >= _UNSEEN_SHIFT and max(lost) <= 1:  # the whole box lies in the picture
        levels = _levels(heatmap)
        count = max(1, height // _alike_rows(levels, height / len(levels)))
        return np.asarray(cv2.resize(levels, (width, count), interpolation=cv2.INTER_LINEAR))
    left, top = columns.start, rows.start
    moved = Box(box.left - left, box.top - top, box.right - left, box.bottom - top)
    return _levels(_warped(heatmap, moved, (height, width)))


_UNSEEN_STEP = 2
"""Levels of 256 by which the heat may jump from one row of the picture to the next: nobody can see a smaller step."""

_MOST_ALIKE = 8
"""The most rows of the picture that get the colours of one row; more save no time."""


def _alike_rows(levels: UInt8[np.ndarray, "h w"], enlarged: float) -> int:
    """Return how many rows of a picture may have the same colours, if a row of the heatmap covers ``enlarged`` rows."""
    steepest = int(cv2.absdiff(levels[1:], levels[:-1]).max(initial=0)) if len(levels) > 1 else 0
    return _MOST_ALIKE if not steepest else min(_MOST_ALIKE, max(1, int(_UNSEEN_STEP * enlarged / steepest)))


def render(
    picture: Drawable | None,
    heatmap: Float[np.ndarray, "h w"],
    box: Box | None,
    *,
    style: Style = "overlay",
    colormap: str = "turbo",
    alpha: float = 0.5,
    detection: Box | None = None,
) -> Pixels:
    """Draw a heatmap in one of the styles, and outline the detection if there is one.

    "overlay" blends the heat into the picture, "side-by-side" puts the original picture to the left of that, and
    "heatmap" draws the colours only, at the size of the model's input. Without a picture every style draws the colours
    only.

    Raises:
        InputError: the style or the colormap is unknown, or alpha is out of range.
    """
    check(style, colormap, alpha)
    if style == "heatmap" or picture is None:
        return colorize(heatmap, colormap)
    blended = blend(picture, heatmap, box, colormap=colormap, alpha=alpha)
    if detection is not None:
        blended = outlined(blended, detection)
    return blended if style == "overlay" else np.concatenate([pixels_of(picture), blended], axis=1)


def limited(picture: Drawable, most: int) -> Drawable:
    """Return a picture with its longer side reduced to at most ``most`` pixels.

    A picture of more than twice the size is first reduced by means of squares of whole pixels, which are cheap. What
    does not fill a square at the right or the lower edge, less than a pixel of the result, is left out.
    """
    height, width = size_of(picture)
    ratio = most / max(height, width)
    if ratio >= 1:
        return picture
    side, method, pixels = int(1 / ratio), cv2.INTER_LINEAR, np.ascontiguousarray(pixels_of(picture))
    if side > 1 and min(height, width) >= side:
        columns, rows = width // side, height // side
        pixels = cv2.resize(pixels[: rows * side, : columns * side], (columns, rows), interpolation=cv2.INTER_AREA)
        method = cv2.INTER_AREA
    return np.asarray(cv2.resize(pixels, size_within((height, width), most)[::-1], interpolation=method))


def outlined(pixels: Pixels, box: Box) -> Pixels:
    """Outline a box in white on black, so that it shows on any colour."""
    drawn = np.ascontiguousarray(pixels)
    height, width = pixels.shape[:2]
    start = max(round(box.left), 0), max(round(box.top), 0)
    end = min(round(box.right), width) - 1, min(round(box.bottom), height) - 1
    line = max(1, round(min(height, width) * _OUTLINE_WIDTH))
    cv2.rectangle(drawn, start, end, (0, 0, 0), line + 2)
    cv2.rectangle(drawn, start, end, (255, 255, 255), line)
    return drawn
