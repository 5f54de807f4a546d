"""A sheet to draw on: text, lines and pictures, with Pillow. Pictures are RGB, height x width x 3, uint8."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from camkit.types import Pixels

Colour: TypeAlias = tuple[int, int, int]

INK: Colour = (32, 33, 36)
GREY: Colour = (110, 114, 120)
LINE: Colour = (222, 224, 228)
PAPER: Colour = (255, 255, 255)

Place: TypeAlias = float | int
"""Pixels from the left or from above."""

Anchor: TypeAlias = Literal["left", "middle", "right"]
_ANCHORS = {"left": "lm", "middle": "mm", "right": "rm"}


class Canvas:
    """A white sheet of ``width`` x ``height`` pixels; what lies beyond its edges is cut off."""

    def __init__(self, width: int, height: int) -> None:
        self._sheet = Image.new("RGB", (width, height), PAPER)
        self._pen = ImageDraw.Draw(self._sheet)

    def text(
        self, x: Place, y: Place, words: str, *, size: int = 14, colour: Colour = INK, anchor: Anchor = "left"
    ) -> None:
        """Write a line whose middle lies at height ``y`` and whose end, or middle, lies at ``x``."""
        self._pen.text((x, y), words, fill=colour, font=_font(size), anchor=_ANCHORS[anchor])

    def box(self, left: Place, top: Place, right: Place, bottom: Place, colour: Colour) -> None:
        """Fill a rectangle, right and bottom exclusive; of less than a pixel nothing is drawn."""
        if right - left >= 1 and bottom - top >= 1:
            self._pen.rectangle((left, top, right - 1, bottom - 1), fill=colour)

    def line(self, start: tuple[Place, Place], end: tuple[Place, Place], colour: Colour = LINE) -> None:
        """Draw a thin line."""
        self._pen.line((*start, *end), fill=colour)

    def picture(self, x: int, y: int, pixels: Pixels) -> None:
        """Lay a picture with its upper left corner at a place."""
        self._sheet.paste(Image.fromarray(pixels), (x, y))

    def pixels(self) -> Pixels:
        """Return what was drawn."""
        return np.asarray(self._sheet)


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def width_of(words: str, size: int = 14) -> float:
    """Return how many pixels a line takes."""
    return float(_font(size).getlength(words))


def fitting(words: str, width: Place, size: int = 14) -> str:
    """Return a line, shortened in its middle where it is wider than ``width`` pixels.

    >>> fitting("features.denseblock4.denselayer16.conv1", 150)
    'features.d...r16.conv1'
    """
    if width_of(words, size) <= width:
        return words
    for kept in range(len(words) - 1, 1, -1):
        short = f"{words[: kept // 2]}...{words[len(words) - (kept - kept // 2) :]}"
        if width_of(short, size) <= width:
            return short
    return "..."
