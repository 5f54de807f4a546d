"""Rows and tables for a terminal, as rich renderables. Names are text, never markup.

The results are imported for the type checker only, so that ``camkit methods`` does not wait for PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from camkit.cli.terminal import QuietConsole
from camkit.errors import printable

if TYPE_CHECKING:
    from camkit.demo.poster import DemoResult
    from camkit.layers.costs import Costs
    from camkit.layers.decision import Decision
    from camkit.methods import Method
    from camkit.metrics.judge import MethodJudgement
    from camkit.scale.folder import Written
    from camkit.scale.video import WrittenVideo
    from camkit.types import Failure, Layout, TargetLayer

_NOTES = {
    "no_positive_evidence": "no positive evidence: nothing in the picture speaks for this target at this layer",
    "no_influence": (
        "no influence: the target's gradient is zero at this layer. Either the target does not depend on the layer, or "
        "it is saturated (a probability very close to 0 or 1). Choose another layer, or a target that uses the logits"
    ),
    "non_finite": "the map contains NaN or infinity, so no heat is drawn",
}

_UNKNOWN_CROP = "drawn on the model's input: camkit cannot tell which part of the picture the preprocessing shows"


def failure(failed: Failure) -> Text:
    """Return the line for a picture that could not be explained."""
    return Text.assemble((printable(failed.source), "bold"), "  ", (printable(f"error: {failed.error}"), "red"))


def row(written: Written) -> Text:
    """Return the lines for one picture and target."""
    from camkit.drawing.figure import percent

    explanation = written.explanation
    probability = "" if explanation.probability is None else f" {percent(explanation.probability)}"
    text = Text.assemble(
        (printable(explanation.source), "bold"),
        "  ",
        (f"{printable(explanation.name)}{probability}", "green"),
        f"  layer {printable(f'{explanation.layer} ({explanation.layer_reason})')}\n",
    )
    if explanation.box is None and explanation.heatmap.ndim == 2:
        text.append(f"  {_UNKNOWN_CROP}\n", "yellow")
    if explanation.doubt:
        text.append(f"  {explanation.doubt}\n", "yellow")
    if explanation.status in _NOTES:
        text.append(f"  {_NOTES[explanation.status]}\n", "yellow")
    elif written.file is not None:
        text.append(f"  colours from {explanation.colour_scale(written.drawing.scale)}\n")
    return text.append(f"  wrote {printable(str(written.file))}" if written.file is not None else "  not drawn")


_MOST_LABELS = 3
"""Labels that the lines for a video name."""


def video(written: WrittenVideo) -> Text:
    """Return the lines for one video."""
    labels = [f"{label} in {count}" for label, count in list(written.labels.items())[:_MOST_LABELS]]
    more = ", ..." if len(written.labels) > _MOST_LABELS else ""
    text = Text.assemble(
        (printable(written.source), "bold"),
        f"  {written.frames} frame{'' if written.frames == 1 else 's'}, {written.rate:.3g} per second: ",
        (printable(", ".join(labels) + more), "green"),
        f"  layer {printable(f'{written.first.layer} ({written.first.layer_reason})')}\n",
    )
    scale = "on each frame's own scale" if written.scale is None else f"from {written.scale}"
    if written.status in _NOTES:
        text.append(f"  {_NOTES[written.status]}\n", "yellow")
    else:
        text.append(f"  colours {scale}\n")
    if written.problem:
        text.append(f"  {printable(written.problem)}; the frames before that are drawn\n", "red")
    sheet = "" if written.sheet is None else f" and {printable(str(written.sheet))}"
    return text.append(f"  wrote {printable(str(written.file))}{sheet}")


def methods(rows: Iterable[Method]) -> Table:
    """Return the table of methods."""
    table = Table(box=None, pad_edge=False)
    for heading in ("method", "what it weights by", "needs", "time in plain passes", "paper"):
        table.add_column(heading, no_wrap=heading == "method")
    for method in rows:
        table.add_row(Text(method.name, "bold"), *map(Text, (method.summary, method.words, method.cost, method.paper)))
    return table


JUDGEMENT_MARKS = (
    "[95% interval]   * as good as the best   ? not significantly better than a random map   ! significantly worse"
)
"""What the marks in the table of a judgement mean. They also work where there is no bold type."""

_LONGEST_NAME = 30
"""Longer names take two lines, so that the table of a judgement fits into 120 columns."""


def judgement(found: MethodJudgement) -> Table:
    """Return the table of a judgement: the metrics that decide, with their intervals, and what a map costs."""
    from camkit.metrics.judge import DECIDING, column_title

    table = Table(box=None, pad_edge=False)
    table.add_column("\nmethod", max_width=_LONGEST_NAME, overflow="fold")
    for heading in (*(f"\n{column_title(name)}" for name in DECIDING), "shuffled\nweights ↓", "plain\npasses"):
        table.add_column(heading, no_wrap=True, justify="right")
    for row in found.rows:
        cells = []
        for figure in (row.metrics[metric] for metric in DECIDING):
            style = "bold" if figure.mark == "*" else "dim" if figure.mark or not row.method else ""
            # A blank replaces a missing mark, so that the numbers line up.
            cells.append(Text(f"{figure}{figure.mark or ' '} {figure.span}".rstrip(), style))
        table.add_row(Text(printable(row.title), "" if row.method else "dim"), *cells, *row.last_cells)
    return table


def layers(decision: Decision, used: Sequence[TargetLayer], costs: Costs, *, complete: bool = False) -> Table:
    """Return a table of every call of every module in execution order, with its costs and the chosen layers marked.

    Args:
        decision: the layers.
        used: the layers that camkit chooses.
        costs: what each costs.
        complete: whether to show the grid, the memory and why a layer is not chosen; the table then may be wider than
            80 columns.
    """
    chosen = [layer.ref for layer in used]
    headings = ["", "layer", "type", "output", "grid", "parameters", "mult-adds", "memory", "remark"]
    shown = [heading for heading in headings if complete or heading not in ("grid", "memory", "remark")]
    table = Table(box=None, pad_edge=False)
    for heading in shown:
        side: Literal["right", "left"] = "right" if heading in ("parameters", "mult-adds", "memory") else "left"
        folds = not complete and heading in ("layer", "type")
        table.add_column(heading, no_wrap=not folds, overflow="fold", justify=side)
    for line in decision.rows:
        is_chosen = line.ref in chosen
        cost = costs.of(line.ref)
        cells = {
            "": ">" if is_chosen else "",
            "layer": printable(str(line.ref)) if line.ref.name else "(the model)",
            "type": printable(line.kind),
            "output": "" if line.shape is None else "x".join(map(str, line.shape)),
            "grid": _grid(line.layout),
            "parameters": "" if cost is None else _amount(cost.parameters),
            "mult-adds": "" if cost is None else _amount(cost.mult_adds),
            "memory": "" if cost is None else _size(cost.memory),
            "remark": "chosen" if is_chosen else line.verdict,
        }
        table.add_row(
            *(Text(cells[heading]) for heading in shown),
            style="bold green" if is_chosen else "dim" if line.verdict else "",
        )
    return table


def total(costs: Costs) -> Text:
    """Return what the whole model costs, with a remark on how far the numbers hold."""
    text = Text()
    if costs.total is not None:
        whole = costs.total
        text.append(
            f"{whole.parameters:,} parameters, {_amount(whole.mult_adds) or 0} multiply-adds and {_size(whole.memory)} "
            "of layer outputs for one picture"
        )
    if costs.remark:
        text.append(f"\n{printable(costs.remark)}" if text else printable(costs.remark), "yellow")
    return text


def _amount(number: int) -> str:
    """Return a number with three digits and its unit; an empty string for 0.

    >>> _amount(25_557_032), _amount(4_089_184_256), _amount(640), _amount(0)
    ('25.6M', '4.09G', '640', '')
    """
    return _in_units(number, {"T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3}) if number else ""


def _size(number: int) -> str:
    """Return bytes in KiB, MiB or GiB; an empty string for 0.

    >>> _size(3_211_264), _size(4000), _size(0)
    ('3.06 MiB', '3.91 KiB', '')
    """
    return _in_units(number, {" GiB": 2**30, " MiB": 2**20, " KiB": 2**10, " B": 1}) if number else ""


def _in_units(number: int, units: dict[str, int]) -> str:
    for unit, size in units.items():
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return str(number)


def _grid(layout: Layout | None) -> str:
    if layout is None:
        return ""
    grid = "x".join(map(str, layout.grid))
    kind = "" if layout.kind == "channels_first" else f" {layout.kind.replace('_', ' ')}"
    return f"{grid}{kind}" + (f", {layout.prefix} before" if layout.prefix else "")


def wide(table: Table, console: Console) -> Console:
    """Return a console wide enough for a table, so that no cell is cut off."""
    natural = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    return QuietConsole(file=console.file, highlight=False, width=max(natural, console.width))


def narrow(console: Console) -> Console:
    """Return a console of the terminal's width, or of 80 columns if there is no terminal; long names are folded."""
    return QuietConsole(file=console.file, highlight=False, width=console.width if console.is_terminal else 80)


def choice(decision: Decision, used: Sequence[TargetLayer]) -> Text:
    """Return which layers ``explain`` uses, why, and which come next."""
    next_best = () if decision.layer is None else decision.layer.runners_up
    others = ", ".join(str(ref) for ref in next_best if ref not in [layer.ref for layer in used])
    return Text.assemble(
        "explain would use ",
        (printable("+".join(map(str, used))), "bold green"),
        printable(f": {used[-1].reason}"),
        f"\nnext best: {printable(others)}" if others else "",
    )


def demo(result: DemoResult) -> Text:
    """Return each demo network's answer to each scene, and the file that shows them."""
    text = Text()
    for scene, by_model in result.answers.items():
        text.append(f"{scene.replace('-', ' on ')}\n", "bold")
        for model, answer in by_model.items():
            label = f"{answer.explanation.name} ({answer.explanation.probability:.1%})"
            text.append(f"  {model:<12} says {label:<16} {answer.on_object:4.0%} of its heat lies on the plane\n")
    return text.append(f"wrote {printable(str(result.file))}")
