"""A judgement as one HTML file: a table, and the means with their intervals on axes."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

from camkit.kit.pages import templates
from camkit.kit.statistics import Estimate

_PLOT = 320
"""Width of a plot's axis in pixels."""

_MARGIN = 20
"""Space at both ends of the axis, for the half of a number that extends beyond it."""

_MOST_TICKS = 6
"""The most numbers on an axis; more would touch each other."""


def render(**values: Any) -> str:
    """Return the page, from the values that its template names."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return templates("camkit.comparison").get_template("judge.html").render(date=date, **values)


def table(**values: Any) -> str:
    """Return the recommendation and the table alone, for a notebook."""
    return templates("camkit.comparison").get_template("judge_table.html").render(**values)


def plot(title: str, rows: Sequence[tuple[str, bool, Estimate, str]]) -> dict[str, Any]:
    """Return the positions of means and intervals on an axis, and of the axis's numbers.

    Args:
        title: the plot's title.
        rows: each row's name, whether it is a reference map, its estimate, and the estimate in words; rows without a
            value are left out.
    """
    shown = [row for row in rows if row[2].groups]
    ends = [end for _, _, mean, _ in shown for end in (mean.value, mean.low, mean.high) if math.isfinite(end)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    scale = _PLOT / (high - low or 1.0)

    def place(value: float) -> float:
        return round(_MARGIN + (value - low) * scale, 1)

    marks = [
        {
            "name": name,
            "reference": is_reference,
            "mean": place(mean.value),
            "low": place(mean.low if math.isfinite(mean.low) else mean.value),
            "high": place(mean.high if math.isfinite(mean.high) else mean.value),
            "words": words,
        }
        for name, is_reference, mean, words in shown
    ]
    ticks = [{"at": place(value), "words": written, "zero": not value} for value, written in axis(low, high)]
    return {"title": title, "marks": marks, "ticks": ticks, "width": _PLOT + 2 * _MARGIN}


def axis(low: float, high: float) -> list[tuple[float, str]]:
    """Return round numbers between two ends, with their labels.

    >>> [words for _, words in axis(-0.04, 0.34)]
    ['0.0', '0.1', '0.2', '0.3']
    >>> [words for _, words in axis(0.0, 0.012)]
    ['0.000', '0.002', '0.004', '0.006', '0.008', '0.010', '0.012']
    """
    least = (high - low or 1.0) / _MOST_TICKS
    size = 10.0 ** math.floor(math.log10(least))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= least * (1 - 1e-9))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(number * step, f"{number * step:.{digits}f}") for number in numbers]
