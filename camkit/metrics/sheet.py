"""The sheet of a comparison: the original at the left, the methods' maps beside it, one block below the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from camkit.drawing.text import AMBER, GREY, INK, LINE, Canvas, wrapped
from camkit.types import Pixels

_WIDTH = 256
"""Width of a picture on the sheet. Seven beside each other are as wide as a slide of 1920 pixels."""
_FLATTEST, _TALLEST = 0.25, 2.0
"""The least and the largest height of a picture as a share of its width. Other pictures are squeezed to fit: a strip of
a few pixels shows no heat, and a very tall picture leaves no room for the others."""
_ACROSS = 6
"""Methods in one line of a block, beside the original."""
_BESIDE = 5
"""With at most this many methods, a block is one line, and the text about the picture stands beside it. Below the
picture, the text would be higher than the maps, and the sheet of several pictures would be too tall for a slide."""
_GAP, _MARGIN = 14, 16
_TITLE, SMALL, _REASON = 26, 23, 20
"""About 13, 12 and 10 points on a slide that is filled by a sheet of a dozen methods, or of 3 methods on 3 pictures."""
_LEADING = 1.3
_LINES = 2
"""The most lines of a title and of a note."""
_ABOUT = 6
"""The most lines of each text about a picture, including a sentence on what the number does not say."""
_HEADER = 3800
"""The most pixels of the header's lines together: two lines of the widest sheet."""


@dataclass(frozen=True, eq=False)
class MapPanel:
    """One method's place on the sheet.

    Attributes:
        title: the method.
        note: a few words below the picture; if there is no picture, why.
        drawn: the drawn map; None if there is none.
    """

    title: str
    note: str
    drawn: Pixels | None = None


@dataclass(frozen=True, eq=False)
class SheetRow:
    """One block of the sheet.

    Attributes:
        original: the picture.
        title: its name.
        lines: what the model says, and what the notes compare with.
        panels: the methods.
    """

    original: Pixels
    title: str
    lines: tuple[str, ...]
    panels: tuple[MapPanel, ...]


def draw_sheet(rows: Sequence[SheetRow], header: str = "") -> Pixels:
    """Draw the blocks one below the other, separated by lines, under a header that says what the notes mean."""
    blocks = [_Block(row) for row in rows]
    width = 2 * _MARGIN + max(block.width for block in blocks)
    words = wrapped(header, width - 2 * _MARGIN, SMALL, math.ceil(_HEADER / width)) if header else []
    head = _height(len(words), SMALL) + _GAP * bool(words)
    canvas = Canvas(width, 2 * _MARGIN + head + sum(block.height for block in blocks) + _GAP * (len(blocks) - 1))
    _write(canvas, (_MARGIN, _MARGIN), words, SMALL, INK)
    top = _MARGIN + head
    for number, block in enumerate(blocks):
        if number:
            canvas.line((_MARGIN, top - _GAP // 2), (width - _MARGIN, top - _GAP // 2), LINE)
        block.draw(canvas, top)
        top += block.height + _GAP
    return canvas.pixels()


def least_height(rows: int) -> int:
    """Return the height that a sheet with this many rows has at least."""
    return rows * (_height(1, _TITLE) + math.ceil(_FLATTEST * _WIDTH) + _height(1, SMALL) + _GAP)


class _Block:
    """One row of the sheet with its measures, in pixels."""

    def __init__(self, row: SheetRow) -> None:
        self._row = row
        count = len(row.panels)
        self._beside = count <= _BESIDE
        lines = 1 if self._beside else max(2, math.ceil(count / _ACROSS))
        self._columns = math.ceil(count / lines)
        height, width = row.original.shape[:2]
        self._size = (round(_WIDTH * min(max(height / width, _FLATTEST), _TALLEST)), _WIDTH)
        titles = [row.title, *(panel.title for panel in row.panels)]
        self._titles = _height(max(len(_broken(title, _TITLE)) for title in titles), _TITLE)
        notes = [len(_broken(panel.note, SMALL)) for panel in row.panels if panel.drawn is not None]
        self._line = self._titles + self._size[0] + _height(max(notes, default=0), SMALL) + _GAP
        self._words = [wrapped(words, _WIDTH, SMALL, _ABOUT) for words in row.lines]
        about = _height(sum(map(len, self._words)), SMALL)
        left = self._titles + (max(self._size[0], about) if self._beside else self._size[0] + about)
        columns = 1 + self._beside + self._columns
        self.width = columns * _WIDTH + (columns - 1) * _GAP
        self.height = max(lines * self._line, left + _GAP)

    def draw(self, canvas: Canvas, top: int) -> None:
        """Draw the block."""
        self._draw_panel(canvas, _MARGIN, top, MapPanel(self._row.title, "", self._row.original))
        x, y = _MARGIN, top + self._titles
        x, y = (x + _WIDTH + _GAP, y) if self._beside else (x, y + self._size[0])
        for number, words in enumerate(self._words):
            _write(canvas, (x, y), words, SMALL, GREY if number else INK)
            y += _height(len(words), SMALL)
        first = 1 + self._beside
        for number, panel in enumerate(self._row.panels):
            line, column = divmod(number, self._columns)
            left = _MARGIN + (first + column) * (_WIDTH + _GAP)
            self._draw_panel(canvas, left, top + line * self._line, panel)

    def _draw_panel(self, canvas: Canvas, left: int, top: int, panel: MapPanel) -> None:
        title = _broken(panel.title, _TITLE)
        picture = top + self._titles
        _write(canvas, (left, picture - _height(len(title), _TITLE)), title, _TITLE, INK)
        below = picture + self._size[0]
        if panel.drawn is not None:
            canvas.picture(left, picture, _shaped(panel.drawn, self._size))
            _write(canvas, (left, below), _broken(panel.note, SMALL), SMALL, GREY)
            return
        canvas.box(left, picture, left + _WIDTH, below, LINE)
        most = max(1, self._size[0] // _height(1, _REASON))
        _write(canvas, (left + _GAP // 2, picture), wrapped(panel.note, _WIDTH - _GAP, _REASON, most), _REASON, AMBER)


def _height(lines: int, size: int) -> int:
    """Return the height of lines of text."""
    return math.ceil(lines * size * _LEADING)


def _broken(words: str, size: int) -> list[str]:
    """Break words into lines as wide as a picture."""
    return wrapped(words, _WIDTH, size, _LINES)


def _write(
    canvas: Canvas, corner: tuple[int, int], lines: Sequence[str], size: int, colour: tuple[int, int, int]
) -> None:
    """Write lines of text below a corner."""
    left, top = corner
    for number, words in enumerate(lines):
        canvas.text(left, top + (number + 0.5) * size * _LEADING, words, size=size, colour=colour)


def _shaped(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Return a picture with another height and width, in any proportion; enlarged pixels stay squares."""
    height, width = min(pixels.shape[0], size[0]), min(pixels.shape[1], size[1])
    smaller = cv2.resize(np.ascontiguousarray(pixels), (width, height), interpolation=cv2.INTER_AREA)
    return np.asarray(cv2.resize(smaller, size[::-1], interpolation=cv2.INTER_NEAREST))
