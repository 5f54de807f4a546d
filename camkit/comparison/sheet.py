"""The sheet of a comparison: the original at the left, the methods' maps beside it, one block below the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from camkit.drawing.canvas import AMBER, GREY, INK, LINE, Canvas
from camkit.drawing.figure import resized
from camkit.drawing.text import wrapped
from camkit.types import Pixels

_WIDTH = 248
"""Width of a picture on the sheet. Seven beside each other are as wide as a slide of 1920 pixels."""
_ACROSS = 6
"""Methods in one line of a block, beside the original."""
_GAP, _MARGIN = 16, 24
_TITLE, _SMALL = 18, 14
_LEADING = 1.35
_NOTE_LINES = 3
_REASON_LINES = 9


@dataclass(frozen=True, eq=False)
class Panel:
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
class Row:
    """One block of the sheet.

    Attributes:
        original: the picture.
        title: its name.
        lines: what the model says, below the picture.
        panels: the methods.
    """

    original: Pixels
    title: str
    lines: tuple[str, ...]
    panels: tuple[Panel, ...]


def draw_sheet(rows: Sequence[Row]) -> Pixels:
    """Draw the blocks one below the other; a line separates them."""
    columns = min(_ACROSS, max(len(row.panels) for row in rows))
    width = 2 * _MARGIN + (columns + 1) * _WIDTH + columns * _GAP
    heights = [_block_height(row, columns) for row in rows]
    canvas = Canvas(width, sum(heights) + 2 * _MARGIN + _GAP * (len(rows) - 1))
    top = _MARGIN
    for number, (row, height) in enumerate(zip(rows, heights, strict=True)):
        if number:
            canvas.line((_MARGIN, top - _GAP // 2), (width - _MARGIN, top - _GAP // 2), LINE)
        _draw_block(canvas, row, top, columns)
        top += height + _GAP
    return canvas.pixels()


def _picture_height(row: Row) -> int:
    height, width = row.original.shape[:2]
    return max(1, int(_WIDTH * height / width + 0.5))


def _line_height(row: Row) -> int:
    """Return the height of one line of maps: the title, the picture and the note."""
    return math.ceil(_TITLE * _LEADING + _picture_height(row) + _SMALL * _LEADING + _GAP)


def _notes(row: Row) -> list[str]:
    return [line for words in row.lines for line in wrapped(words, _WIDTH, _SMALL, _NOTE_LINES)]


def _block_height(row: Row, columns: int) -> int:
    lines = math.ceil(len(row.panels) / columns)
    beside = math.ceil(_TITLE * _LEADING + _picture_height(row) + len(_notes(row)) * _SMALL * _LEADING + _GAP)
    return max(lines * _line_height(row), beside)


def _draw_block(canvas: Canvas, row: Row, top: int, columns: int) -> None:
    _draw_panel(canvas, _MARGIN, top, Panel(row.title, "", row.original), _picture_height(row))
    below = top + _TITLE * _LEADING + _picture_height(row)
    for number, words in enumerate(_notes(row)):
        canvas.text(
            _MARGIN, below + (number + 0.7) * _SMALL * _LEADING, words, size=_SMALL, colour=INK if not number else GREY
        )
    for number, panel in enumerate(row.panels):
        left = _MARGIN + (number % columns + 1) * (_WIDTH + _GAP)
        _draw_panel(canvas, left, top + number // columns * _line_height(row), panel, _picture_height(row))


def _draw_panel(canvas: Canvas, left: int, top: int, panel: Panel, height: int) -> None:
    title = wrapped(panel.title, _WIDTH, _TITLE, 1)[0]
    canvas.text(left, top + _TITLE * _LEADING / 2, title, size=_TITLE, colour=INK)
    picture_top = round(top + _TITLE * _LEADING)
    if panel.drawn is not None:
        canvas.picture(left, picture_top, resized(panel.drawn, (height, _WIDTH)))
        canvas.text(left, picture_top + height + _SMALL * _LEADING * 0.7, panel.note, size=_SMALL, colour=GREY)
        return
    canvas.box(left, picture_top, left + _WIDTH, picture_top + height, LINE)
    most = max(1, min(_REASON_LINES, int(height / (_SMALL * _LEADING)) - 1))
    for number, words in enumerate(wrapped(panel.note, _WIDTH - _GAP, _SMALL, most)):
        canvas.text(left + _GAP / 2, picture_top + (number + 0.9) * _SMALL * _LEADING, words, size=_SMALL, colour=AMBER)
