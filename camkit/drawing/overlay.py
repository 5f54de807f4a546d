"""Draws a heatmap onto a picture, with OpenCV. Pictures are RGB, height x width x 3, uint8."""

from __future__ import annotations

import functools
import math
from typing import get_args

import cv2
import numpy as np
from jaxtyping import Float, UInt8

from camkit.drawing.encode import Drawable, pixels_of, shrink, size_of
from camkit.errors import InputError, did_you_mean, whole_number
from camkit.types import Box, Opacity, Pixels, Style

COLORMAPS: dict[str, int] = {
    name.removeprefix("COLORMAP_").lower().replace("_", "-"): getattr(cv2, name)
    for name in dir(cv2)
    if name.startswith("COLORMAP_")
}
"""OpenCV's colour maps by name."""

STYLES: tuple[Style, ...] = ("overlay", "side-by-side", "heatmap", "figure")


_FULL = 0.2
"""From this heat on, the colours have their whole weight; below it they fade out smoothly. On photos, 0.02 is then
invisible, 0.05 faint, and 0.1 to 0.3 can be told apart. With 0.3, a heat of 0.2 could not be seen on a blue sky."""


def check(style: str, colormap: str, alpha: float, opacity: str = "evidence", max_side: int | None = None) -> None:
    """Check the options for drawing.

    Raises:
        InputError: the style, the colormap or the opacity is unknown, alpha is outside 0..1, or max_side is not a
            number of pixels.
    """
    words = (
        ("style", style, STYLES),
        ("colormap", colormap, tuple(COLORMAPS)),
        ("opacity", opacity, get_args(Opacity)),
    )
    for kind, word, choices in words:
        if word not in choices:
            hint = did_you_mean(word, choices) or f"; choose from {', '.join(choices)}"
            raise InputError(f"unknown {kind} {word!r}{hint}")
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha must be a weight between 0 and 1, not {alpha}")
    if max_side is not None:
        whole_number(max_side, "max_side", 1)


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
    # From this share of a side, a cropped strip is worth a word. The box of a preprocessing that crops nothing is
    # measured, and was off by up to 0.0012 of a side for inputs of 32 to 384 pixels.
    return max(beside) > 1 / 200


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
    opacity: Opacity = "evidence",
) -> Pixels:
    """Blend the heat into the part of the picture that the model saw, and darken the rest.

    Args:
        picture: the original picture.
        heatmap: values 0..1. An all-zero map adds no colour: no evidence, no colours.
        box: the part of the picture that the model saw; None for all of it.
        colormap: a name from ``COLORMAPS``.
        alpha: weight of the colours, 0..1; the picture has the weight 1 - alpha.
        opacity: "evidence" fades the colours out where the heat is low, and leaves the picture as it is where the heat
            is 0; "even" gives all colours the weight alpha.
    """
    drawn = np.array(picture, order="C")
    height, width = drawn.shape[:2]
    box = box or Box(0, 0, width, height)
    rows, columns = _pixels_in(box, (height, width))
    left, top = columns.start, rows.start
    moved = Box(box.left - left, box.top - top, box.right - left, box.bottom - top)
    for unseen in (np.s_[: rows.start], np.s_[rows.stop :], np.s_[rows, : columns.start], np.s_[rows, columns.stop :]):
        if drawn[unseen].size:
            cv2.convertScaleAbs(drawn[unseen], dst=drawn[unseen], alpha=0.45)  # the model did not see it
    seen = drawn[rows, columns]
    if seen.size:
        levels = _warped(_levels(heatmap), moved, seen.shape[:2])
        if opacity == "even":
            share = alpha if heatmap.any() else 0.0
            cv2.addWeighted(seen, 1 - share, cv2.applyColorMap(levels, _colours(colormap)), share, 0, dst=seen)
        else:
            rising = np.clip(np.arange(256) / (255 * _FULL), 0, 1)[:, None, None]
            kept = np.rint(255 - 255 * alpha * rising**2 * (3 - 2 * rising)).repeat(3, axis=2)
            added = np.rint((1 - kept / 255) * _colours(colormap))
            # Two tables of 256 colours, which OpenCV looks up fast
            cv2.multiply(seen, cv2.applyColorMap(levels, kept.astype(np.uint8)), dst=seen, scale=1 / 255)
            cv2.add(seen, cv2.applyColorMap(levels, added.astype(np.uint8)), dst=seen)
    return drawn


def render(
    picture: Drawable | None,
    heatmap: Float[np.ndarray, "h w"],
    box: Box | None,
    *,
    style: Style = "overlay",
    colormap: str = "turbo",
    alpha: float = 0.5,
    opacity: Opacity = "evidence",
    detection: Box | None = None,
) -> Pixels:
    """Draw a heatmap in one of the styles, and outline the detection if there is one.

    "overlay" blends the heat into the picture, "side-by-side" puts the original picture to the left of that, and
    "heatmap" draws the colours only, at the size of the model's input. Without a picture every style draws the colours
    only.
    """
    if style == "heatmap" or picture is None:
        return colorize(heatmap, colormap)
    blended = blend(picture, heatmap, box, colormap=colormap, alpha=alpha, opacity=opacity)
    if detection is not None:
        blended = outlined(blended, detection)
    return blended if style == "overlay" else np.concatenate([pixels_of(picture), blended], axis=1)


def limited(picture: Drawable, most: int) -> Drawable:
    """Return a picture with its longer side reduced to at most ``most`` pixels."""
    return picture if max(size_of(picture)) <= most else shrink(np.ascontiguousarray(pixels_of(picture)), most)


def outlined(pixels: Pixels, box: Box) -> Pixels:
    """Outline a box in white on black, so that it shows on any colour."""
    drawn = np.ascontiguousarray(pixels)
    height, width = pixels.shape[:2]
    start = max(round(box.left), 0), max(round(box.top), 0)
    end = min(round(box.right), width) - 1, min(round(box.bottom), height) - 1
    line = max(1, round(min(height, width) / 200))
    cv2.rectangle(drawn, start, end, (0, 0, 0), line + 2)
    cv2.rectangle(drawn, start, end, (255, 255, 255), line)
    return drawn
