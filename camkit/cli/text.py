"""Rows and tables for a terminal, as rich renderables: names are text, never markup.

What is printed is imported for the type checker alone, so that ``camkit methods`` does not wait for PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from camkit.demo.poster import DemoResult
    from camkit.layers.choose import Decision
    from camkit.layers.costs import Costs
    from camkit.methods import Method
    from camkit.scale.folder import Written
    from camkit.types import Failure, Layout

_NOTES = {
    "no_positive_evidence": "no positive evidence: nothing in the picture speaks for this target at this layer",
    "no_influence": "no influence: this target does not change with this layer's cells; choose another layer or target",
    "non_finite": "the map holds NaN or infinity, so nothing was drawn",
}


def failure(failed: Failure) -> Text:
    """Return what is printed for a picture that could not be explained."""
    return Text.assemble((failed.source, "bold"), "  ", (f"error: {failed.error}", "red"))


def row(written: Written) -> Text:
    """Return what is printed for one picture and target."""
    found = written.explanation
    share = "" if found.probability is None else f" {found.probability:.1%}"
    text = Text.assemble(
        (str(found.source), "bold"),
        "  ",
        (f"{found.name}{share}", "green"),
        f"  layer {found.layer} ({found.layer_reason})\n",
    )
    if found.status in _NOTES:
        text.append(f"  {_NOTES[found.status]}\n", "yellow")
    return text.append(f"  wrote {written.file}")


def methods(table: Iterable[Method]) -> Table:
    """Return the table of methods."""
    drawn = Table(box=None, pad_edge=False)
    for heading in ("method", "what it weights by", "paper"):
        drawn.add_column(heading, no_wrap=heading == "method")
    for method in table:
        drawn.add_row(Text(method.name, "bold"), Text(method.summary), Text(method.paper))
    return drawn


def layers(decision: Decision, costs: Costs) -> Table:
    """Return every call of every module in execution order, the chosen layer marked, with what each costs."""
    chosen = None if decision.layer is None else decision.layer.ref
    drawn = Table(box=None, pad_edge=False)
    for heading in ("", "layer", "type", "output", "grid"):
        drawn.add_column(heading, no_wrap=True)
    for heading in ("parameters", "mult-adds", "memory"):
        drawn.add_column(heading, no_wrap=True, justify="right")
    drawn.add_column("", no_wrap=True)
    for line in decision.rows:
        is_chosen = line.ref == chosen
        cost = costs.of(line.ref)
        drawn.add_row(
            ">" if is_chosen else "",
            Text(str(line.ref) if line.ref.name else "(the model)"),
            Text(line.kind),
            Text("" if line.shape is None else "x".join(map(str, line.shape))),
            Text(_grid(line.layout)),
            *(
                ("", "", "")
                if cost is None
                else (_amount(cost.parameters), _amount(cost.mult_adds), _size(cost.memory))
            ),
            Text("chosen" if is_chosen else line.verdict),
            style="bold green" if is_chosen else "dim" if line.verdict else "",
        )
    return drawn


def total(costs: Costs) -> Text:
    """Return what the whole model costs, and what should be known of the numbers."""
    text = Text()
    if costs.total is not None:
        whole = costs.total
        text.append(
            f"{whole.parameters:,} parameters, {_amount(whole.mult_adds) or 0} multiply-adds and {_size(whole.memory)} "
            "of layers' outputs for one picture"
        )
    if costs.remark:
        text.append(f"\n{costs.remark}" if text else costs.remark, "yellow")
    return text


def _amount(number: int) -> str:
    """Return a number with three digits and its unit; nothing for none.

    >>> _amount(25_557_032), _amount(4_089_184_256), _amount(640), _amount(0)
    ('25.6M', '4.09G', '640', '')
    """
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return str(number) if number else ""


def _size(number: int) -> str:
    """Return bytes in KiB, MiB or GiB; nothing for none.

    >>> _size(3_211_264), _size(4000), _size(0)
    ('3.06 MiB', '3.91 KiB', '')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 999.5 * size else f"{number / size:.0f} {unit}"
    return f"{number} B" if number else ""


def _grid(layout: Layout | None) -> str:
    if layout is None:
        return ""
    grid = "x".join(map(str, layout.grid))
    kind = "" if layout.kind == "channels_first" else f" {layout.kind.replace('_', ' ')}"
    return f"{grid}{kind}" + (f", {layout.prefix} before" if layout.prefix else "")


def wide(table: Table, console: Console) -> Console:
    """Return a console wide enough for a table, so that nothing is cut off where lines may be long."""
    natural = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    return Console(file=console.file, highlight=False, width=max(natural, console.width))


def choice(decision: Decision) -> Text:
    """Return which layer explain would use, why, and the next best."""
    if decision.equals:
        listed = " ".join(f"--layer {row.ref}" for row in decision.equals)
        return Text(f"the model ends in branches that are equally deep; name one, or all: {listed}", "yellow")
    if decision.layer is None:
        return Text("no layer could be chosen: none with a spatial grid influences the score", "yellow")
    others = ", ".join(map(str, decision.layer.runners_up))
    return Text.assemble(
        "explain would use ",
        (str(decision.layer), "bold green"),
        f": {decision.layer.reason}",
        f"\nnext best: {others}" if others else "",
    )


def demo(result: DemoResult) -> Text:
    """Return what each demo network said to each scene, and where the pictures are."""
    text = Text()
    for scene, by_model in result.answers.items():
        text.append(f"{scene.replace('-', ' on ')}\n", "bold")
        for model, answer in by_model.items():
            said = f"{answer.explanation.name} ({answer.explanation.probability:.1%})"
            text.append(f"  {model:<12} says {said:<16} {answer.on_object:4.0%} of its heat lies on the plane\n")
    return text.append(f"wrote {result.file}")
