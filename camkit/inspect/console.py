"""A diagnosis for a terminal, as rich renderables: a table of layers and the findings."""

from __future__ import annotations

from typing import Literal

from rich.table import Table
from rich.text import Text

from camkit.errors import printable
from camkit.inspect.diagnosis import Diagnosis
from camkit.inspect.layer_statistics import LayerStatistics
from camkit.inspect.picture import magnitude_span
from camkit.kit.wording import bounded_share, counted, figure

_BARS = " ▁▂▃▄▅▆▇█"
_SPARKS = 12  # characters of a distribution
_SERIOUS = {"nan", "infinity", "exploding", "no gradient", "dead"}

_HEADINGS = (
    ("layer", "left"),
    ("type", "left"),
    ("output", "left"),
    ("parameters", "right"),
    ("mean", "right"),
    ("std", "right"),
    ("least", "right"),
    ("largest", "right"),
    ("zeros", "right"),
    ("dead", "right"),
    ("NaN/Inf", "right"),
    ("gradient", "right"),
    ("of parameters", "right"),
)


_COMPACT = ("layer", "mean", "std", "zeros", "dead", "gradient", "activations")
"""The columns that fit into 80 characters."""


def table(result: Diagnosis, *, sparks: bool = True, complete: bool = True) -> Table:
    """Return a row for each layer in execution order, coloured if it has a finding.

    Args:
        result: the diagnosis.
        sparks: whether to draw the distributions of activations, from smallest to largest, and of gradient magnitudes,
            from the smallest to the largest in the model; the terminal must have the characters.
        complete: whether to show all columns; the others fit into 80 characters, in which long names are folded.
    """
    layers = Table(box=None, pad_edge=False)
    headings = [*_HEADINGS, *((("activations", "left"), ("gradient sizes", "left")) if sparks else ())]
    shown = [place for place, (heading, _) in enumerate(headings) if complete or heading in _COMPACT]
    for heading, side in (headings[place] for place in shown):
        justify: Literal["right", "left"] = "right" if side == "right" else "left"
        layers.add_column(heading, no_wrap=complete or heading != "layer", overflow="fold", justify=justify)
    serious = {layer for finding in result.findings if finding.kind in _SERIOUS for layer in finding.layers}
    affected = {layer for finding in result.findings for layer in finding.layers}
    span = magnitude_span(result.rows)
    for row in result.rows:
        style = "red" if row.layer in serious else "yellow" if row.layer in affected else ""
        cells = _cells(row)
        if sparks:
            sizes = None if row.gradients is None else row.gradients.magnitudes
            cells += [_spark(row.activations.histogram.counts), _spark(sizes.counts[slice(*span)] if sizes else ())]
        layers.add_row(*(Text(printable(cells[place])) for place in shown), style=style)
    return layers


def _cells(row: LayerStatistics) -> list[str]:
    activations, gradients = row.activations, row.gradients
    broken = activations.nan + activations.inf
    return [
        row.name,
        row.kind,
        "x".join(map(str, row.shape)),
        f"{row.parameters:,}" if row.parameters else "",
        *(figure(number) for number in (activations.mean, activations.std, activations.low, activations.high)),
        bounded_share(activations.zeros),
        "" if row.dead is None else f"{len(row.dead)}/{row.channels}",
        f"{broken:,}" if broken else "",
        "" if gradients is None else "NaN/Inf" if gradients.nan + gradients.inf else figure(gradients.norm),
        "" if row.parameter_gradient is None else figure(row.parameter_gradient),
    ]


def _spark(counts: tuple[int, ...]) -> str:
    """Return counts as bars of text; heights are square roots, since most values of many layers are zero."""
    width = min(_SPARKS, len(counts))
    joined = [0] * width
    for number, count in enumerate(counts):
        joined[number * width // len(counts)] += count
    most = max(joined, default=0)
    if not most:
        return ""
    return "".join(
        _BARS[-(-8 * count // most) if count == most else round(8 * (count / most) ** 0.5)] for count in joined
    )


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
