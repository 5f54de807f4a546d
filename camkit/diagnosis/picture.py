"""A diagnosis as one picture: for each layer the distributions of its activations and gradient magnitudes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from camkit.diagnosis.findings import Finding
from camkit.diagnosis.layer_statistics import LayerStatistics
from camkit.diagnosis.tensor_statistics import DECADES, PER_DECADE
from camkit.drawing.text import GREY, INK, LINE, Canvas, Colour, fitting, width_of
from camkit.kit.wording import bounded_share, figure
from camkit.types import Pixels

_BLUE: Colour = (66, 114, 180)
_ORANGE: Colour = (217, 125, 40)
_RED: Colour = (196, 40, 40)
_PALE_RED: Colour = (253, 238, 236)

_MARGIN = 24
_ROW = 50
_BARS_HIGH = 27
_NAME = 232
_ACTIVATIONS = 210
_GRADIENTS = 250
_SPACE = 22
_PANEL = _NAME + _ACTIVATIONS + _GRADIENTS + 3 * _SPACE + 14
_TOP = 116
_HEAD = 46
_MOST_ROWS = 40
_MOST_TICKS = 6


def draw(title: str, summary: str, rows: Sequence[LayerStatistics], findings: Sequence[Finding]) -> Pixels:
    """Return the picture that ``Diagnosis.sheet`` describes, under a title and a line about the batch."""
    panels = max(1, math.ceil(len(rows) / _MOST_ROWS))
    high = math.ceil(len(rows) / panels)
    width = max(2 * _MARGIN + panels * _PANEL, 980)
    canvas = Canvas(width, _TOP + _HEAD + high * _ROW + _MARGIN)
    canvas.text(_MARGIN, 30, title, size=24)
    canvas.text(_MARGIN, 62, summary, size=14, colour=GREY)
    key = "the height of a bar is the square root of its share; a mark below an axis is at zero"
    canvas.text(_MARGIN, 83, key, size=14, colour=GREY)
    span = magnitude_span(rows)
    # The first finding of a layer is the most serious.
    faults = {layer: finding.kind for finding in reversed(findings) for layer in finding.layers}
    for panel in range(panels):
        left, shown = _MARGIN + panel * _PANEL, rows[panel * high : (panel + 1) * high]
        for number, row in enumerate(shown):
            _background(canvas, left, _TOP + _HEAD + number * _ROW, faults.get(row.layer, ""))
        _head(canvas, left, _TOP, span, rows=len(shown))
        for number, row in enumerate(shown):
            _strip(canvas, left, _TOP + _HEAD + number * _ROW, row, span, faults.get(row.layer, ""))
    return canvas.pixels()


def magnitude_span(rows: Sequence[LayerStatistics]) -> tuple[int, int]:
    """Return the range of bins that the layers' gradient magnitudes use, the end exclusive; (0, 0) without gradients.

    Bins with less than a thousandth of a layer's numbers don't count.
    """
    used: set[int] = set()
    for row in rows:
        sizes = None if row.gradients is None else row.gradients.magnitudes
        if sizes is not None:
            used |= {number for number, count in enumerate(sizes.counts) if count > sum(sizes.counts) / 1000}
    return (min(used), max(used) + 1) if used else (0, 0)


def _columns(left: int) -> tuple[int, int]:
    activations = left + _NAME + _SPACE
    return activations, activations + _ACTIVATIONS + _SPACE


def _head(canvas: Canvas, left: int, top: int, span: tuple[int, int], rows: int) -> None:
    activations, gradients = _columns(left)
    canvas.text(left + 8, top + 10, "layer", size=13, colour=GREY)
    canvas.text(activations, top + 10, "activations, smallest to largest", size=13, colour=_BLUE)
    canvas.text(gradients, top + 10, "gradient magnitudes", size=13, colour=_ORANGE)
    bottom = top + _HEAD + rows * _ROW
    for exponent in _ticks(span):
        x = gradients + _GRADIENTS * ((exponent - DECADES[0]) * PER_DECADE - span[0]) / (span[1] - span[0])
        canvas.line((x, top + _HEAD - 6), (x, bottom))
        canvas.text(x, top + _HEAD - 15, f"1e{exponent}", size=11, colour=GREY, anchor="middle")


def _ticks(span: tuple[int, int]) -> list[int]:
    """Return the powers of ten to label, six at most."""
    if span[0] == span[1]:
        return []
    first = DECADES[0] + math.ceil(span[0] / PER_DECADE)
    last = DECADES[0] + span[1] // PER_DECADE
    step = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
    return [exponent for exponent in range(first, last + 1) if exponent % step == 0]


def _background(canvas: Canvas, left: int, top: int, fault: str) -> None:
    if fault:
        canvas.box(left, top + 1, left + _PANEL - 14, top + _ROW - 1, _PALE_RED)
        canvas.box(left, top + 1, left + 4, top + _ROW - 1, _RED)
    canvas.line((left, top), (left + _PANEL - 14, top))


def _strip(canvas: Canvas, left: int, top: int, row: LayerStatistics, span: tuple[int, int], fault: str) -> None:
    activations, gradients = _columns(left)
    shape = "x".join(map(str, row.shape))
    canvas.text(left + 10, top + 16, fitting(row.name, _NAME - 10, 14), size=14)
    space = width_of(fault, 12) + 10 if fault else 0
    canvas.text(left + 10, top + 35, fitting(f"{row.kind} {shape}", _NAME - 10 - space, 12), size=12, colour=GREY)
    canvas.text(left + _NAME, top + 35, fault, size=12, colour=_RED, anchor="right")
    _activations(canvas, activations, top, row)
    _gradients(canvas, gradients, top, row, span)


def _activations(canvas: Canvas, left: int, top: int, row: LayerStatistics) -> None:
    activations = row.activations
    floor = top + 6 + _BARS_HIGH
    below = floor + 9
    if activations.nan + activations.inf == activations.count:
        canvas.text(left, floor - 8, "NaN or infinity throughout", size=12, colour=_RED)
        return
    _bars(canvas, left, floor, _ACTIVATIONS, activations.histogram.counts, _BLUE)
    low, high = activations.histogram.low, activations.histogram.high
    if low < 0 < high:
        x = left + _ACTIVATIONS * -low / (high - low)
        canvas.line((x, floor), (x, floor + 4), INK)
    canvas.text(left, below, figure(activations.low), size=11, colour=GREY)
    canvas.text(left + _ACTIVATIONS, below, figure(activations.high), size=11, colour=GREY, anchor="right")
    dead = f", {len(row.dead)} dead" if row.dead else ""
    middle = f"{bounded_share(activations.zeros)} zero{dead}" if activations.zeros >= 0.005 else ""
    middle = f"{activations.nan + activations.inf:,} NaN/Inf" if activations.nan + activations.inf else middle
    canvas.text(left + _ACTIVATIONS / 2, below, middle, size=11, colour=GREY, anchor="middle")


def _gradients(canvas: Canvas, left: int, top: int, row: LayerStatistics, span: tuple[int, int]) -> None:
    gradients = row.gradients
    floor = top + 6 + _BARS_HIGH
    if gradients is None or gradients.magnitudes is None:
        canvas.text(left, floor - 8, "no gradient", size=12, colour=GREY)
        return
    broken = gradients.nan + gradients.inf
    if broken or not gradients.norm:
        canvas.text(
            left, floor - 8, f"{broken:,} NaN or infinite" if broken else "zero throughout", size=12, colour=_RED
        )
        return
    _bars(canvas, left, floor, _GRADIENTS, gradients.magnitudes.counts[span[0] : span[1]], _ORANGE)
    zeros = f", {bounded_share(gradients.zeros)} zero" if gradients.zeros >= 0.005 else ""
    canvas.text(left, floor + 9, f"norm {figure(gradients.norm)}{zeros}", size=11, colour=GREY)


def _bars(canvas: Canvas, left: int, floor: int, width: int, counts: Sequence[int], colour: Colour) -> None:
    canvas.line((left, floor), (left + width, floor), LINE)
    most = max(counts, default=0)
    if not most:
        return
    step = width / len(counts)
    for number, count in enumerate(counts):
        high = max(_BARS_HIGH * math.sqrt(count / most), 1.0) if count else 0.0
        canvas.box(round(left + number * step), floor - high, round(left + (number + 1) * step), floor, colour)
