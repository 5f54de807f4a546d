"""A diagnosis for a terminal, as rich renderables: a table of layers and the findings."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from camkit.diagnosis import Diagnosis, LayerStatistics
from camkit.diagnosis.values import Histogram, TensorStatistics, counted
from camkit.errors import printable

_BARS = " ▁▂▃▄▅▆▇█"
_SPARKS = 12  # characters of a distribution
_SERIOUS = {"nan", "infinity", "exploding", "no gradient", "dead"}
_NONE = "-"
_RARE = 1000
"""Bins that hold less than one in this many of a layer's numbers do not widen the shared axis."""

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


def table(result: Diagnosis, *, sparks: bool = True) -> Table:
    """Return a row for each layer in execution order, coloured if it has a finding.

    Args:
        result: the diagnosis.
        sparks: whether to draw the distributions of activations, from smallest to largest, and of gradient magnitudes,
            from the smallest to the largest in the model; the terminal must have the characters.
    """
    layers = Table(box=None, pad_edge=False)
    for heading, side in _HEADINGS:
        layers.add_column(heading, no_wrap=True, justify="right" if side == "right" else "left")
    for heading in ("activations", "gradient sizes") if sparks else ():
        layers.add_column(heading, no_wrap=True)
    serious = {layer for finding in result.findings if finding.kind in _SERIOUS for layer in finding.layers}
    affected = {layer for finding in result.findings for layer in finding.layers}
    span = magnitude_span(result)
    for row in result.rows:
        style = "red" if row.layer in serious else "yellow" if row.layer in affected else ""
        cells = _cells(row)
        if sparks:
            cells += [_spark(row.activations.histogram.counts), _magnitudes(row.gradients, span)]
        layers.add_row(*map(Text, map(printable, cells)), style=style)
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
        share(activations.zeros),
        "" if row.dead is None else f"{len(row.dead)}/{row.channels}",
        f"{broken:,}" if broken else "",
        "" if gradients is None else "NaN/Inf" if gradients.nan + gradients.inf else figure(gradients.norm),
        "" if row.parameter_gradient is None else figure(row.parameter_gradient),
    ]


def figure(number: float) -> str:
    """Return a number with three digits; a dash for NaN.

    >>> figure(0.000123456), figure(12345.6), figure(0.0), figure(float("nan"))
    ('0.000123', '1.23e+04', '0', '-')
    """
    return _NONE if number != number else f"{number:.3g}"  # noqa: PLR0124 - only NaN is not itself


def share(part: float) -> str:
    """Return a share in percent; only exactly none is 0% and only exactly all is 100%; a dash for NaN.

    >>> share(0.5), share(0.0001), share(0.9999), share(1.0)
    ('50%', '<1%', '>99%', '100%')
    """
    if part != part:  # noqa: PLR0124 - only NaN is not itself
        return _NONE
    if 0 < part < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= part < 1 else f"{part:.0%}"


def magnitude_span(result: Diagnosis) -> tuple[int, int]:
    """Return the range of bins that the layers' gradient magnitudes use, the end exclusive; (0, 0) without gradients.

    Bins with less than a thousandth of a layer's numbers don't count.
    """
    used: set[int] = set()
    for row in result.rows:
        sizes = None if row.gradients is None else row.gradients.magnitudes
        if sizes is not None:
            least = sum(sizes.counts) / _RARE
            used |= {number for number, count in enumerate(sizes.counts) if count > least}
    return (min(used), max(used) + 1) if used else (0, 0)


def _magnitudes(gradients: TensorStatistics | None, span: tuple[int, int]) -> str:
    sizes: Histogram | None = None if gradients is None else gradients.magnitudes
    return "" if sizes is None or span[0] == span[1] else _spark(sizes.counts[span[0] : span[1]])


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
    mode = "as in training" if result.training else "in evaluation mode"
    text = Text.assemble(
        (printable(result.model), "bold"),
        f" with {counted(result.pictures, 'picture')} {mode}: {counted(len(result.rows), 'layer')}, "
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
