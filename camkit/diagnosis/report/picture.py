"""A diagnosis as one picture: for each layer how its activations and the sizes of its gradients are distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from camkit.diagnosis import Diagnosis, Finding, LayerStatistics
from camkit.diagnosis.report.console import figure, magnitude_span, share
from camkit.diagnosis.statistics import DECADES, PER_DECADE
from camkit.diagnosis.values import Histogram, counted
from camkit.drawing.canvas import GREY, INK, LINE, Canvas, Colour, fitting, width_of
from camkit.types import Pixels

_BLUE: Colour = (66, 114, 180)
_ORANGE: Colour = (217, 125, 40)
_RED: Colour = (196, 40, 40)
_PALE_RED: Colour = (253, 238, 236)
_GREEN: Colour = (40, 130, 70)

_MARGIN = 24
_ROW = 50
_BARS_HIGH = 27
_NAME = 232
_ACTIVATIONS = 210
_GRADIENTS = 250
_SPACE = 22
_PANEL = _NAME + _ACTIVATIONS + _GRADIENTS + 3 * _SPACE + 14
_HEAD = 46
_LINE = 21
_MOST_ROWS = 40
_MOST_FINDINGS = 8


def draw(result: Diagnosis) -> Pixels:
    """Return the picture, height x width x 3, uint8 RGB: the findings, and below a strip for each layer.

    The axis of the gradients' sizes is logarithmic and the same for all layers, so that vanishing and exploding
    gradients are seen as a drift to the left or the right. Heights of bars are square roots of shares.
    """
    panels = max(1, math.ceil(len(result.rows) / _MOST_ROWS))
    rows = math.ceil(len(result.rows) / panels)
    width = max(2 * _MARGIN + panels * _PANEL, 980)
    lines = _lines(result, width - 2 * _MARGIN)
    top = 62 + _LINE * len(lines) + 12
    canvas = Canvas(width, top + _HEAD + rows * _ROW + _MARGIN)
    canvas.text(_MARGIN, 30, f"{result.model}: how its layers fare", size=24)
    for number, (words, colour) in enumerate(lines):
        canvas.text(_MARGIN, 62 + _LINE * number, words, size=14, colour=colour)
    span = magnitude_span(result)
    wrong = _wrong(result.findings)
    for panel in range(panels):
        left, shown = _MARGIN + panel * _PANEL, result.rows[panel * rows : (panel + 1) * rows]
        for number, row in enumerate(shown):
            _ground(canvas, left, top + _HEAD + number * _ROW, wrong.get(row.layer, ""))
        _head(canvas, left, top, span, rows=len(shown))
        for number, row in enumerate(shown):
            _strip(canvas, left, top + _HEAD + number * _ROW, row, span, wrong.get(row.layer, ""))
    return canvas.pixels()


def _lines(result: Diagnosis, width: int) -> list[tuple[str, Colour]]:
    mode = "as in training" if result.training else "in evaluation mode"
    loss = "" if result.loss is None else f", loss {result.loss:.3g}"
    lines = [(f"{counted(result.pictures, 'picture')} {mode}, {counted(len(result.rows), 'layer')}{loss}", GREY)]
    for one in result.findings[:_MOST_FINDINGS]:
        lines += [(part, _RED) for part in _wrapped(f"{one.kind}: {one.text}", width)]
    more = len(result.findings) - _MOST_FINDINGS
    if more > 0:
        lines.append((f"and {counted(more, 'more finding')}", _RED))
    if not result.findings:
        lines.append(("nothing wrong was found", _GREEN))
    key = "a bar's height is the square root of its share; a mark below an axis stands at zero"
    return [*lines, (key, GREY)]


def _wrapped(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width_of(longer, 14) > width:
            lines.append(f"    {word}")
        else:
            lines[-1] = longer if lines[-1].strip() else word
    return lines


def _wrong(findings: Sequence[Finding]) -> dict[str, str]:
    """Return for each layer of a finding what it is about; of several the first, which is the gravest."""
    kinds: dict[str, str] = {}
    for one in findings:
        for layer in one.layers:
            kinds.setdefault(layer, one.kind)
    return kinds


def _columns(left: int) -> tuple[int, int]:
    activations = left + _NAME + _SPACE
    return activations, activations + _ACTIVATIONS + _SPACE


def _head(canvas: Canvas, left: int, top: int, span: tuple[int, int], rows: int) -> None:
    activations, gradients = _columns(left)
    canvas.text(left + 8, top + 10, "layer", size=13, colour=GREY)
    canvas.text(activations, top + 10, "activations, least to largest", size=13, colour=_BLUE)
    canvas.text(gradients, top + 10, "sizes of the gradient's numbers", size=13, colour=_ORANGE)
    bottom = top + _HEAD + rows * _ROW
    for exponent in _ticks(span):
        x = gradients + _GRADIENTS * _place(exponent, span)
        canvas.line((x, top + _HEAD - 6), (x, bottom))
        canvas.text(x, top + _HEAD - 15, f"1e{exponent}", size=11, colour=GREY, anchor="middle")


def _ticks(span: tuple[int, int]) -> list[int]:
    """Return the powers of ten that are labelled: no more than six."""
    if span[0] == span[1]:
        return []
    first = DECADES[0] + math.ceil(span[0] / PER_DECADE)
    last = DECADES[0] + span[1] // PER_DECADE
    step = max(1, math.ceil((last - first + 1) / 6))
    return [exponent for exponent in range(first, last + 1) if exponent % step == 0]


def _place(exponent: int, span: tuple[int, int]) -> float:
    return ((exponent - DECADES[0]) * PER_DECADE - span[0]) / (span[1] - span[0])


def _ground(canvas: Canvas, left: int, top: int, wrong: str) -> None:
    if wrong:
        canvas.box(left, top + 1, left + _PANEL - 14, top + _ROW - 1, _PALE_RED)
        canvas.box(left, top + 1, left + 4, top + _ROW - 1, _RED)
    canvas.line((left, top), (left + _PANEL - 14, top))


def _strip(canvas: Canvas, left: int, top: int, row: LayerStatistics, span: tuple[int, int], wrong: str) -> None:
    activations, gradients = _columns(left)
    shape = "x".join(map(str, row.shape))
    canvas.text(left + 10, top + 16, fitting(row.name, _NAME - 10, 14), size=14)
    space = width_of(wrong, 12) + 10 if wrong else 0
    canvas.text(left + 10, top + 35, fitting(f"{row.kind} {shape}", _NAME - 10 - space, 12), size=12, colour=GREY)
    canvas.text(left + _NAME, top + 35, wrong, size=12, colour=_RED, anchor="right")
    _activations(canvas, activations, top, row)
    _gradients(canvas, gradients, top, row, span)


def _activations(canvas: Canvas, left: int, top: int, row: LayerStatistics) -> None:
    found = row.activations
    floor = top + 6 + _BARS_HIGH
    below = floor + 9
    if found.nan + found.inf == found.count:
        canvas.text(left, floor - 8, "NaN or infinity throughout", size=12, colour=_RED)
        return
    _bars(canvas, left, floor, _ACTIVATIONS, found.histogram.counts, _BLUE)
    _zero(canvas, left, floor, found.histogram)
    canvas.text(left, below, figure(found.low), size=11, colour=GREY)
    canvas.text(left + _ACTIVATIONS, below, figure(found.high), size=11, colour=GREY, anchor="right")
    dead = f", {len(row.dead)} dead" if row.dead else ""
    middle = f"{share(found.zeros)} zero{dead}" if found.zeros >= 0.005 else ""
    middle = f"{found.nan + found.inf:,} NaN/Inf" if found.nan + found.inf else middle
    canvas.text(left + _ACTIVATIONS / 2, below, middle, size=11, colour=GREY, anchor="middle")


def _zero(canvas: Canvas, left: int, floor: int, histogram: Histogram) -> None:
    """Mark where zero lies within the histogram."""
    if histogram.low < 0 < histogram.high:
        x = left + _ACTIVATIONS * -histogram.low / (histogram.high - histogram.low)
        canvas.line((x, floor), (x, floor + 4), INK)


def _gradients(canvas: Canvas, left: int, top: int, row: LayerStatistics, span: tuple[int, int]) -> None:
    found = row.gradients
    floor = top + 6 + _BARS_HIGH
    if found is None or found.magnitudes is None:
        canvas.text(left, floor - 8, "no gradient", size=12, colour=GREY)
        return
    if found.nan + found.inf:
        canvas.text(left, floor - 8, f"{found.nan + found.inf:,} NaN or infinite", size=12, colour=_RED)
        return
    if not found.norm:
        canvas.text(left, floor - 8, "zero throughout", size=12, colour=_RED)
        return
    _bars(canvas, left, floor, _GRADIENTS, found.magnitudes.counts[span[0] : span[1]], _ORANGE)
    zeros = f", {share(found.zeros)} zero" if found.zeros >= 0.005 else ""
    canvas.text(left, floor + 9, f"norm {figure(found.norm)}{zeros}", size=11, colour=GREY)


def _bars(canvas: Canvas, left: int, floor: int, width: int, counts: Sequence[int], colour: Colour) -> None:
    canvas.line((left, floor), (left + width, floor), LINE)
    most = max(counts, default=0)
    if not most:
        return
    step = width / len(counts)
    for number, count in enumerate(counts):
        high = max(_BARS_HIGH * math.sqrt(count / most), 1.0) if count else 0.0
        canvas.box(round(left + number * step), floor - high, round(left + (number + 1) * step), floor, colour)
