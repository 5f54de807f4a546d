"""A check as one picture for a pull request's comment: the verdict, and three pictures with their edits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from camkit.background.report import words
from camkit.background.result import CheckResult
from camkit.background.showcase import Panel, Showcase, Strip
from camkit.drawing.encode import encode
from camkit.drawing.figure import fitted
from camkit.drawing.text import AMBER, GREY, INK, Canvas, Colour, wrapped
from camkit.types import Pixels

_WIDTH = 800
"""About as wide as a comment on GitHub, so that nothing is reduced there."""

_MARGIN, _GAP = 20, 14
_SIDE = (_WIDTH - 2 * _MARGIN - 2 * _GAP) // 3
"""The longer side of each of the three pictures in a row."""

_LARGE, _SMALL = 20, 15
"""Font sizes."""
_LEADING = 1.4
"""The distance of lines, in font sizes."""
_HEAD_LINES, _TITLE_LINES = 5, 2

_COLOURS: Mapping[str, Colour] = MappingProxyType(
    {"FAIL": (179, 38, 30), "WARN": AMBER, "PASS": (27, 107, 58), "INCONCLUSIVE": (63, 85, 115), "": GREY}
)


def render(result: CheckResult, showcase: Showcase | None = None) -> bytes:
    """Return the picture as a PNG: the verdict, and up to three triptychs, on white.

    Args:
        result: the check.
        showcase: its pictures; None draws them.
    """
    triptychs = (showcase or Showcase(result)).triptychs
    head = [
        *_lines(f"{result.verdict}: {words.sentence(result)}", _LARGE, _COLOURS[result.verdict], _HEAD_LINES),
        *_lines(words.why_undecided(result), _SMALL, INK, _HEAD_LINES),
        *(line for change in result.regressed for line in _lines(change, _SMALL, AMBER, _TITLE_LINES)),
        *_lines(f"camkit check of {result.plan.model.name} on {result.plan.data.root.name}", _SMALL, GREY, 1),
    ]
    return encode(_stacked([_block(head), *map(_triptych, triptychs)]))


_Line = tuple[str, int, Colour]
"""A line of text with its font size and colour."""


def _lines(text: str, size: int, colour: Colour, most: int, width: int = _WIDTH - 2 * _MARGIN) -> list[_Line]:
    return [(line, size, colour) for line in wrapped(text, width, size, most)]


def _triptych(strip: Strip) -> Pixels:
    """Draw a picture's edits side by side, with the answer to each below it."""
    shown = [(fitted(panel.pixels, _SIDE), _caption(panel)) for panel in strip.triptych]
    top, height = _SMALL * _LEADING, max(pixels.shape[0] for pixels, _ in shown)
    below = max(_height(caption) for _, caption in shown)
    canvas = Canvas(_WIDTH, round(top + height + below) + _GAP)
    _write(canvas, _MARGIN, 0, [(strip.row.label, _SMALL, INK)])
    for left, (pixels, caption) in zip(itertools.count(_MARGIN, _SIDE + _GAP), shown, strict=False):
        canvas.picture(left, round(top), pixels)
        _write(canvas, left, top + height, caption)
    return canvas.pixels()


def _caption(panel: Panel) -> list[_Line]:
    answer, verdict = panel.comment
    return [*_lines(answer, _SMALL, _COLOURS[verdict], 1, _SIDE), *_lines(panel.title, _SMALL, GREY, 3, _SIDE)]


def _height(lines: Sequence[_Line]) -> float | int:
    return sum(size * _LEADING for _, size, _ in lines)


def _block(lines: Sequence[_Line]) -> Pixels:
    canvas = Canvas(_WIDTH, round(_height(lines)))
    _write(canvas, _MARGIN, 0, lines)
    return canvas.pixels()


def _write(canvas: Canvas, left: int, top: float | int, lines: Sequence[_Line]) -> None:
    for line, size, colour in lines:
        canvas.text(left, top + size * _LEADING / 2, line, size=size, colour=colour)
        top += size * _LEADING


def _stacked(blocks: Sequence[Pixels]) -> Pixels:
    """Put pictures of the same width below one another, with a margin."""
    tops: Iterator[int] = itertools.accumulate((block.shape[0] + _GAP for block in blocks), initial=_MARGIN)
    placed = list(zip(tops, blocks, strict=False))
    last, block = placed[-1]
    canvas = Canvas(_WIDTH, last + block.shape[0] + _GAP)
    for top, pixels in placed:
        canvas.picture(0, top, pixels)
    return canvas.pixels()
