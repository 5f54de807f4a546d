"""A sheet like ``Canvas`` that becomes an SVG file: text stays text, and pictures are embedded."""

from __future__ import annotations

import html

from camkit.drawing.encode import as_address
from camkit.drawing.text import INK, Anchor, Colour, Position, legible, width_of
from camkit.types import Pixels

_ANCHORS = {"left": "start", "middle": "middle", "right": "end"}
_BASELINE = 0.36
"""How far the baseline lies below the middle of a line, in font sizes."""


class SvgCanvas:
    """A white sheet of ``width`` x ``height`` pixels, with the methods of ``Canvas`` that a slide uses."""

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._parts: list[str] = []

    def text(
        self, x: Position, y: Position, words: str, *, size: int = 14, colour: Colour = INK, anchor: Anchor = "left"
    ) -> None:
        """Write a line of text, as wide as ``Canvas`` writes it whatever font the reader has."""
        if not words:
            return
        red, green, blue = colour
        self._parts.append(
            f'<text x="{x:.1f}" y="{y + _BASELINE * size:.1f}" font-size="{size}" fill="rgb({red},{green},{blue})" '
            f'text-anchor="{_ANCHORS[anchor]}" textLength="{width_of(words, size):.1f}" '
            f'lengthAdjust="spacingAndGlyphs">{html.escape(legible(words))}</text>'
        )

    def picture(self, x: int, y: int, pixels: Pixels) -> None:
        """Embed a picture with its upper left corner at (x, y)."""
        height, width = pixels.shape[:2]
        self._parts.append(
            f'<image x="{x}" y="{y}" width="{width}" height="{height}" href="{as_address(pixels, "png")}"/>'
        )

    def svg(self) -> str:
        """Return the file."""
        size = f'width="{self._width}" height="{self._height}" viewBox="0 0 {self._width} {self._height}"'
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
        )
