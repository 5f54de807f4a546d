"""A diagnosis as one picture and on a terminal: for each layer its activations and gradients, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from camkit.drawing.text import GREY, INK, LINE, Canvas, Colour, fitting, width_of
from camkit.errors import printable
from camkit.inspect.findings import Finding
from camkit.inspect.layer_statistics import DECADES, PER_DECADE, LayerStatistics
from camkit.kit.wording import bounded_share, counted, figure
from camkit.types import Pixels

if TYPE_CHECKING:
    from camkit.inspect.diagnosis import Diagnosis


_BLUE: Colour = (66, 114, 180)
_ORANGE: Colour = (217, 125, 40)
_RED: Colour = (196, 40, 40)

_MARGIN = 24
_ROW = 50
_BARS_HIGH = 27
_NAME = 232
_ACTIVATIONS = 210
_GRADIENTS = 250
_SPACE = 22
_TO_ACTIVATIONS = _NAME + _SPACE
_TO_GRADIENTS = _TO_ACTIVATIONS + _ACTIVATIONS + _SPACE
_PANEL = _NAME + _ACTIVATIONS + _GRADIENTS + 3 * _SPACE + 14
_TOP = 116
_HEAD = 46


def draw(title: str, summary: str, rows: Sequence[LayerStatistics], findings: Sequence[Finding]) -> Pixels:
    """Return the picture that ``Diagnosis.sheet`` describes, under a title and a line about the batch."""
    panels = max(1, math.ceil(len(rows) / 40))
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
    strips = []
    for number, row in enumerate(rows):
        panel, place = divmod(number, high)
        strips.append((_MARGIN + panel * _PANEL, _TOP + _HEAD + place * _ROW, row, faults.get(row.layer, "")))
    for left, top, _, fault in strips:
        if fault:
            canvas.box(left, top + 1, left + _PANEL - 14, top + _ROW - 1, (253, 238, 236))
            canvas.box(left, top + 1, left + 4, top + _ROW - 1, _RED)
        canvas.line((left, top), (left + _PANEL - 14, top))
    for panel in range(panels):
        _head(canvas, _MARGIN + panel * _PANEL, span, rows=min(high, len(rows) - panel * high))
    for left, top, row, fault in strips:
        output = f"{row.kind} {'x'.join(map(str, row.shape))}"
        space = width_of(fault, 12) + 10 if fault else 0
        canvas.text(left + 10, top + 16, fitting(row.name, _NAME - 10, 14), size=14)
        canvas.text(left + 10, top + 35, fitting(output, _NAME - 10 - space, 12), size=12, colour=GREY)
        canvas.text(left + _NAME, top + 35, fault, size=12, colour=_RED, anchor="right")
        _activations(canvas, left + _TO_ACTIVATIONS, top + 6 + _BARS_HIGH, row)
        _gradients(canvas, left + _TO_GRADIENTS, top + 6 + _BARS_HIGH, row, span)
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


def _head(canvas: Canvas, left: int, span: tuple[int, int], rows: int) -> None:
    activations, gradients = left + _TO_ACTIVATIONS, left + _TO_GRADIENTS
    canvas.text(left + 8, _TOP + 10, "layer", size=13, colour=GREY)
    canvas.text(activations, _TOP + 10, "activations, smallest to largest", size=13, colour=_BLUE)
    canvas.text(gradients, _TOP + 10, "gradient magnitudes", size=13, colour=_ORANGE)
    first, last = DECADES[0] + math.ceil(span[0] / PER_DECADE), DECADES[0] + span[1] // PER_DECADE
    step = max(1, math.ceil((last - first + 1) / 6))  # so that six powers of ten at most are labelled
    for exponent in range(first, last + 1) if span[0] < span[1] else ():
        if exponent % step == 0:
            x = gradients + _GRADIENTS * ((exponent - DECADES[0]) * PER_DECADE - span[0]) / (span[1] - span[0])
            canvas.line((x, _TOP + _HEAD - 6), (x, _TOP + _HEAD + rows * _ROW))
            canvas.text(x, _TOP + _HEAD - 15, f"1e{exponent}", size=11, colour=GREY, anchor="middle")


def _activations(canvas: Canvas, left: int, floor: int, row: LayerStatistics) -> None:
    activations = row.activations
    broken = activations.nan + activations.inf
    if broken == activations.count:
        canvas.text(left, floor - 8, "NaN or infinity throughout", size=12, colour=_RED)
        return
    _bars(canvas, left, floor, _ACTIVATIONS, activations.histogram.counts, _BLUE)
    low, high = activations.histogram.ends
    if low < 0 < high:
        x = left + _ACTIVATIONS * -low / (high - low)
        canvas.line((x, floor), (x, floor + 4), INK)
    canvas.text(left, floor + 9, figure(activations.low), size=11, colour=GREY)
    canvas.text(left + _ACTIVATIONS, floor + 9, figure(activations.high), size=11, colour=GREY, anchor="right")
    dead = f", {len(row.dead)} dead" if row.dead else ""
    zeros = f"{bounded_share(activations.zeros)} zero{dead}" if activations.zeros >= 0.005 else ""
    middle = f"{broken:,} NaN/Inf" if broken else zeros
    canvas.text(left + _ACTIVATIONS / 2, floor + 9, middle, size=11, colour=GREY, anchor="middle")


def _gradients(canvas: Canvas, left: int, floor: int, row: LayerStatistics, span: tuple[int, int]) -> None:
    gradients = row.gradients
    broken = 0 if gradients is None else gradients.nan + gradients.inf
    if gradients is None or gradients.magnitudes is None:
        canvas.text(left, floor - 8, "no gradient", size=12, colour=GREY)
    elif broken or not gradients.norm:
        problem = f"{broken:,} NaN or infinite" if broken else "zero throughout"
        canvas.text(left, floor - 8, problem, size=12, colour=_RED)
    else:
        _bars(canvas, left, floor, _GRADIENTS, gradients.magnitudes.counts[slice(*span)], _ORANGE)
        zeros = f", {bounded_share(gradients.zeros)} zero" if gradients.zeros >= 0.005 else ""
        canvas.text(left, floor + 9, f"norm {figure(gradients.norm)}{zeros}", size=11, colour=GREY)


def _bars(canvas: Canvas, left: int, floor: int, width: int, counts: Sequence[int], colour: Colour) -> None:
    canvas.line((left, floor), (left + width, floor), LINE)
    most = max(counts, default=0)
    for number, count in enumerate(counts):
        if count:
            start, end = (round(left + edge * width / len(counts)) for edge in (number, number + 1))
            canvas.box(start, floor - max(_BARS_HIGH * math.sqrt(count / most), 1.0), end, floor, colour)


_SERIOUS = {"nan", "infinity", "exploding", "no gradient", "dead"}


def table(result: Diagnosis, *, complete: bool = True) -> Table:
    """Return a row for each layer in execution order, coloured if it has a finding.

    Args:
        result: the diagnosis.
        complete: whether to show all columns; the others fit into 80 characters, in which long names are folded.
    """
    layers = Table(box=None, pad_edge=False)
    rows = [_cells(row, complete=complete) for row in result.rows]
    for heading in rows[0] if rows else ():
        justify: Literal["right", "left"] = "left" if heading in ("layer", "type", "output") else "right"
        layers.add_column(heading, no_wrap=complete or heading != "layer", overflow="fold", justify=justify)
    serious = {layer for finding in result.findings if finding.kind in _SERIOUS for layer in finding.layers}
    affected = {layer for finding in result.findings for layer in finding.layers}
    for row, cells in zip(result.rows, rows, strict=True):
        style = "red" if row.layer in serious else "yellow" if row.layer in affected else ""
        layers.add_row(*(Text(printable(cell)) for cell in cells.values()), style=style)
    return layers


def _cells(row: LayerStatistics, *, complete: bool) -> dict[str, str]:
    activations, gradients = row.activations, row.gradients
    broken = activations.nan + activations.inf
    cells = {
        "layer": row.name,
        "type": row.kind,
        "output": "x".join(map(str, row.shape)),
        "parameters": f"{row.parameters:,}" if row.parameters else "",
        "mean": figure(activations.mean),
        "std": figure(activations.std),
        "least": figure(activations.low),
        "largest": figure(activations.high),
        "zeros": bounded_share(activations.zeros),
        "dead": "" if row.dead is None else f"{len(row.dead)}/{row.channels}",
        "NaN/Inf": f"{broken:,}" if broken else "",
        "gradient": "" if gradients is None else "NaN/Inf" if gradients.nan + gradients.inf else figure(gradients.norm),
        "of parameters": "" if row.parameter_gradient is None else figure(row.parameter_gradient),
    }
    short = ("layer", "mean", "std", "zeros", "dead", "gradient")  # fits into 80 characters
    return cells if complete else {heading: cells[heading] for heading in short}


def findings(result: Diagnosis) -> Text:
    """Return the summary, a line for each finding, and the remarks."""
    text = Text.assemble(
        (printable(result.model), "bold"),
        f" with {result.batch_text}: {counted(len(result.rows), 'layer')}, "
        f"{counted(result.parameters, 'parameter')}, {result.trained:,} of them trained{result.loss_text}\n",
    )
    for finding in result.findings:
        style = "bold red" if finding.kind in _SERIOUS else "bold yellow"
        text.append(f"{finding.kind}: ", style).append(f"{printable(finding.text)}\n")
    if not result.findings:
        text.append("nothing wrong was found\n", "green")
    for remark in result.remarks:
        text.append(f"note: {printable(remark)}\n", "dim")
    text.rstrip()
    return text
