"""A sheet for text, lines and pictures, drawn with Pillow. Pictures are RGB, height x width x 3, uint8."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw

from camkit.drawing import text
from camkit.drawing.text import Anchor, Colour
from camkit.types import Pixels

INK: Colour = (32, 33, 36)
GREY: Colour = (110, 114, 120)
LINE: Colour = (222, 224, 228)
AMBER: Colour = (176, 92, 0)
PAPER: Colour = (255, 255, 255)

Position: TypeAlias = float | int
"""Pixels from the left or from the top."""


class Canvas:
    """A white sheet of ``width`` x ``height`` pixels; whatever crosses its edges is cut off."""

    def __init__(self, width: int, height: int) -> None:
        self._sheet = Image.new("RGB", (width, height), PAPER)
        self._pen = ImageDraw.Draw(self._sheet)

    def text(
        self, x: Position, y: Position, words: str, *, size: int = 14, colour: Colour = INK, anchor: Anchor = "left"
    ) -> None:
        """Write a line of text centred vertically on ``y``, with its left end, middle or right end at ``x``."""
        text.write(self._sheet, x, y, words, size=size, colour=colour, anchor=anchor)

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
