"""A judgement as one HTML file that loads nothing else."""

from __future__ import annotations

import datetime
import math
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from camkit.comparison.judge import DECIDING, JudgedRow, MethodJudgement
from camkit.comparison.ranking import Standing
from camkit.comparison.report import words
from camkit.errors import printable
from camkit.metrics import METRICS

_PLOT = 320
"""Width of a plot's axis in pixels."""

_MARGIN = 20
"""Space at both ends of the axis, for the half of a number that extends beyond it."""

_MOST_TICKS = 6
"""The most numbers on an axis; more would touch each other."""


def render(found: MethodJudgement) -> str:
    """Return the page."""
    page: str = (
        _environment()
        .get_template("judge.html")
        .render(
            **_shared(found),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            plots=[_plot(found, metric) for metric in DECIDING],
            version=words.VERSION,
            measured=words.measured(found),
            seconds=round(found.seconds),
            how_to_read=words.HOW_TO_READ,
            summaries=[(METRICS[name].title, METRICS[name].summary, METRICS[name].paper) for name in found.metrics],
        )
    )
    return page


def fragment(found: MethodJudgement) -> str:
    """Return the recommendation and the table alone, for a notebook."""
    part: str = _environment().get_template("judge_table.html").render(**_shared(found))
    return part


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("camkit.comparison.report"),
        autoescape=True,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shared(found: MethodJudgement) -> dict[str, Any]:
    return {
        "model": found.model,
        "sentence": found.recommendation.sentence,
        "columns": [{"title": words.title(name), "space": words.space(name)} for name in found.metrics],
        "rows": [_row(row, found) for row in found.rows],
        "legend": words.legend("Bold"),
        "notes": [*words.notes(found), *words.pictures_left_out(found)],
    }


def _row(row: JudgedRow, found: MethodJudgement) -> dict[str, Any]:
    return {
        "name": row.name,
        "layer": "" if row.name.endswith(f" at {row.layer}") else row.layer,
        "reference": row.is_reference,
        "chosen": row.name == found.recommendation.row,
        "cells": [_cell(row, row.standings[name]) for name in found.metrics],
        "shuffled": words.shuffled(row),
        "hardly_changes": row.hardly_changes,
        "cost": words.cost(row),
    }


def _cell(row: JudgedRow, standing: Standing) -> dict[str, Any]:
    return {
        "mean": words.number(standing),
        "span": words.span(standing),
        "best": words.is_best(row, standing),
        "doubt": words.doubt(row, standing),
    }


def _plot(found: MethodJudgement, metric: str) -> dict[str, Any]:
    """Return the positions of the means and intervals of one metric on an axis, and of the axis's numbers."""
    shown = [(row, row.standings[metric]) for row in found.rows if row.standings[metric].estimate.groups]
    ends = [
        end
        for _, standing in shown
        for end in (standing.estimate.value, standing.estimate.low, standing.estimate.high)
        if math.isfinite(end)
    ]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    scale = _PLOT / (high - low or 1.0)

    def place(value: float) -> float:
        return round(_MARGIN + (value - low) * scale, 1)

    marks = [
        {
            "name": row.name,
            "reference": row.is_reference,
            "mean": place(standing.estimate.value),
            "low": place(standing.estimate.low if math.isfinite(standing.estimate.low) else standing.estimate.value),
            "high": place(standing.estimate.high if math.isfinite(standing.estimate.high) else standing.estimate.value),
            "words": f"{words.number(standing)} {words.span(standing)}".strip(),
        }
        for row, standing in shown
    ]
    ticks = [{"at": place(value), "words": written, "zero": not value} for value, written in axis(low, high)]
    return {"title": words.title(metric), "marks": marks, "ticks": ticks, "width": _PLOT + 2 * _MARGIN}


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
