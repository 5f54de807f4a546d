"""Lines of text in any script: measuring, shortening, wrapping and drawing them; and a sheet for text and pictures.

Pillow's own font has the letters of plain English. OpenCV 5 brings fonts for Latin, Greek, Cyrillic, Hebrew, Arabic,
Chinese, Japanese and Korean, and a line that needs more letters is drawn with these. What no font has is escaped as in
Python, so that a caption never shows empty boxes.
"""

from __future__ import annotations

import bisect
import html
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from camkit.drawing.encode import as_address
from camkit.errors import printable
from camkit.types import Pixels

Colour: TypeAlias = tuple[int, int, int]
Anchor: TypeAlias = Literal["left", "middle", "right"]

INK: Colour = (32, 33, 36)
GREY: Colour = (110, 114, 120)
LINE: Colour = (222, 224, 228)
AMBER: Colour = (176, 92, 0)
PAPER: Colour = (255, 255, 255)

Position: TypeAlias = float | int
"""Pixels from the left or from the top."""

_NO_CHARACTER = "\U0010ffff"
"""A code that Unicode never assigns: a font draws it as its sign for a missing letter."""
_BASELINE = 0.36
"""How far the baseline lies below the middle of a line, in font sizes."""
_PROBE_SIZE = 24
"""The font size at which the pixels of letters are compared with those of the sign for a missing letter."""
_CACHED_LETTERS = 4096
"""More than the letters of any list of labels but the longest Chinese ones."""

_OPENCV_LOCK = threading.RLock()
"""OpenCV draws wrong letters if two threads draw text at the same time."""


def legible(words: str) -> str:
    r"""Return a line in which control characters, and letters that no font here has, are escaped as in Python.

    >>> legible("K\u00e4fer\n\U0010fffe")
    'Käfer\\n\\U0010fffe'
    """
    letters = (
        letter if _has_letter(letter) else letter.encode("unicode_escape").decode() for letter in printable(words)
    )
    return "".join(letters)


def width_of(words: str, size: int = 14) -> float:
    """Return the width of a line of text in pixels."""
    words = legible(words)
    if _suits_pillow(words):
        return float(_font(size).getlength(words))
    return float(_with_opencv(words, size).shape[1])


def fitting(words: str, width: float | int, size: int = 14) -> str:
    """Return a line of text, shortened in its middle if it is wider than ``width`` pixels.

    >>> fitting("features.denseblock4.denselayer16.conv1", 150)
    'features.d...r16.conv1'
    """
    if width_of(words, size) <= width:
        return words
    kept = _most_fitting(lambda count: _shortened(words, count), len(words), width, size)
    return _shortened(words, kept) if kept > 1 else "..."


def short_name(name: str, most: int = 36) -> str:
    """Return a dotted name, without parts of its middle if it has more than ``most`` letters; its end says most.

    >>> short_name("model.encoder.vision.tower.layers.11.output")
    'model.encoder.….layers.11.output'
    """
    parts = name.split(".")
    for kept in range(len(parts) - 1, 1, -1):
        if len(name) <= most:
            break
        start = (kept - 1) // 2
        name = ".".join([*parts[:start], "…", *parts[len(parts) - kept + start :]])
    return name


def _most_fitting(start: Callable[[int], str], letters: int, width: float | int, size: int) -> int:
    """Return how many of the letters of a text that is too wide can stay; ``start`` returns the text with that many."""
    return bisect.bisect_right(range(1, letters), width, key=lambda count: width_of(start(count), size))


def _shortened(words: str, kept: int) -> str:
    return f"{words[: kept // 2]}...{words[len(words) - (kept - kept // 2) :]}"


def wrapped(words: str, width: float | int, size: int = 14, lines: int = 2) -> list[str]:
    """Return a text in at most ``lines`` lines, each at most ``width`` pixels wide; the last is shortened if needed.

    >>> wrapped("prairie chicken, prairie grouse, prairie fowl", 200)
    ['prairie chicken, prairie grouse,', 'prairie fowl']
    """
    broken: list[str] = []
    rest = words.strip()
    while rest and len(broken) < lines - 1 and width_of(rest, size) > width:
        end = _longest_start(rest, width, size)
        broken.append(rest[:end].rstrip())
        rest = rest[end:].lstrip()
    return [*broken, fitting(rest, width, size)] if rest else broken


def _longest_start(words: str, width: float | int, size: int) -> int:
    """Return where to break a text that is too wide, so that its first part fits."""
    fewest = max(1, _most_fitting(lambda count: words[:count].rstrip(), len(words), width, size))
    if words[fewest] == " ":
        return fewest
    for signs in (" ", "/_-.+,"):  # after a space, or else after one of these signs, or else anywhere
        after = max(words.rfind(sign, 0, fewest) for sign in signs) + 1
        if after > fewest // 2:  # a break far to the left would leave a nearly empty line
            return after
    return fewest


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


@cache
def _opencv_font() -> Any:
    """Return OpenCV's font for all scripts; None before OpenCV 5."""
    return cv2.FontFace("uni") if hasattr(cv2, "FontFace") else None


def _suits_pillow(words: str) -> bool:
    return words.isascii() or all(map(_pillow_has, words))


@lru_cache(_CACHED_LETTERS)
def _pillow_has(letter: str) -> bool:
    font = _font(_PROBE_SIZE)
    drawn, missing = font.getmask(letter), font.getmask(_NO_CHARACTER)
    return letter.isascii() or drawn.size != missing.size or bytes(drawn) != bytes(missing)


@lru_cache(_CACHED_LETTERS)
def _has_letter(letter: str) -> bool:
    if letter.isascii() or _pillow_has(letter):
        return True
    if _opencv_font() is None:
        return False
    drawn, missing = _with_opencv(letter, _PROBE_SIZE), _with_opencv(_NO_CHARACTER, _PROBE_SIZE)
    return drawn.shape != missing.shape or not np.array_equal(drawn, missing)


def _with_opencv(words: str, size: int) -> UInt8[np.ndarray, "height width"]:
    """Return how much ink each pixel of a line has, 0 to 255, as high as two font sizes."""
    size = max(round(size * 0.92), 1)  # so that capitals are as high as those of Pillow's font
    with _OPENCV_LOCK:
        font = _opencv_font()
        width = cv2.getTextSize((0, 0), words, (0, 0), font, size)[2]
        paper = np.full((2 * size, max(width, 1)), 255, np.uint8)
        cv2.putText(paper, words, (0, round(size * (1 + _BASELINE))), (0,), font, size)
    return 255 - paper


class Canvas:
    """A white sheet of ``width`` x ``height`` pixels; whatever crosses its edges is cut off."""

    def __init__(self, width: int, height: int) -> None:
        self._sheet = Image.new("RGB", (width, height), PAPER)
        self._pen = ImageDraw.Draw(self._sheet)

    def text(
        self, x: Position, y: Position, words: str, *, size: int = 14, colour: Colour = INK, anchor: Anchor = "left"
    ) -> None:
        """Write a line of text centred vertically on ``y``, with its left end, middle or right end at ``x``."""
        words = legible(words)
        if _suits_pillow(words):
            anchored = f"{anchor[0]}m"  # Pillow's "lm" is left and in the middle of the line's height
            self._pen.text((x, y), words, fill=colour, font=_font(size), anchor=anchored)
            return
        mask = _with_opencv(words, size)
        height, width = mask.shape
        left = x - {"left": 0, "middle": width / 2, "right": width}[anchor]
        self._sheet.paste(colour, (round(left), round(y - height / 2)), Image.fromarray(mask))

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
        anchors = {"left": "start", "middle": "middle", "right": "end"}
        self._parts.append(
            f'<text x="{x:.1f}" y="{y + _BASELINE * size:.1f}" font-size="{size}" fill="rgb({red},{green},{blue})" '
            f'text-anchor="{anchors[anchor]}" textLength="{width_of(words, size):.1f}" '
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
