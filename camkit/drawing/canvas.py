"""A sheet for text, lines and pictures, drawn with Pillow. Pictures are RGB, height x width x 3, uint8."""

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

Position: TypeAlias = float | int
"""Pixels from the left or from the top."""

Anchor: TypeAlias = Literal["left", "middle", "right"]
_ANCHORS = {"left": "lm", "middle": "mm", "right": "rm"}


class Canvas:
    """A white sheet of ``width`` x ``height`` pixels; whatever crosses its edges is cut off."""

    def __init__(self, width: int, height: int) -> None:
        self._sheet = Image.new("RGB", (width, height), PAPER)
        self._pen = ImageDraw.Draw(self._sheet)

    def text(
        self, x: Position, y: Position, words: str, *, size: int = 14, colour: Colour = INK, anchor: Anchor = "left"
    ) -> None:
        """Write a line of text centred vertically on ``y``, with its left end, middle or right end at ``x``."""
        self._pen.text((x, y), words, fill=colour, font=_font(size), anchor=_ANCHORS[anchor])

    def box(self, left: Position, top: Position, right: Position, bottom: Position, colour: Colour) -> None:
        """Fill a rectangle, right and bottom exclusive; one smaller than a pixel is not drawn."""
        if right - left >= 1 and bottom - top >= 1:
            self._pen.rectangle((left, top, right - 1, bottom - 1), fill=colour)

    def line(self, start: tuple[Position, Position], end: tuple[Position, Position], colour: Colour = LINE) -> None:
        """Draw a thin line."""
        self._pen.line((*start, *end), fill=colour)

    def picture(self, x: int, y: int, pixels: Pixels) -> None:
        """Paste a picture with its upper left corner at (x, y)."""
        self._sheet.paste(Image.fromarray(pixels), (x, y))

    def pixels(self) -> Pixels:
        """Return the sheet as a picture."""
        return np.asarray(self._sheet)


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def width_of(words: str, size: int = 14) -> float:
    """Return the width of a line of text in pixels."""
    return float(_font(size).getlength(words))


def fitting(words: str, width: Position, size: int = 14) -> str:
    """Return a line of text, shortened in its middle if it is wider than ``width`` pixels.

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
