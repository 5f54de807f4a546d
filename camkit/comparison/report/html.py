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


def render(found: MethodJudgement) -> str:
    """Return the page."""
    page: str = (
        _environment()
        .get_template("judge.html")
        .render(
            **_shared(found),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            plots=[_plot(found, metric) for metric in DECIDING],
            pictures=len(found.pictures),
            seed=found.seed,
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
        "notes": words.notes(found),
    }


def _row(row: JudgedRow, found: MethodJudgement) -> dict[str, Any]:
    return {
        "name": row.name,
        "layer": "" if row.is_reference else row.layer,
        "reference": row.is_reference,
        "chosen": row.name == found.recommendation.row,
        "cells": [_cell(row, row.standings[name]) for name in found.metrics],
        "shuffled": words.shuffled(row),
        "hardly_changes": row.hardly_changes,
        "cost": words.cost(row),
    }


def _cell(row: JudgedRow, standing: Standing) -> dict[str, Any]:
    kind = "" if row.is_reference else "best" if standing.level_with_best and standing.beats_random else ""
    if not row.is_reference and not standing.beats_random:
        kind = "weak"
    return {"mean": words.number(standing), "span": words.span(standing), "kind": kind}


def _plot(found: MethodJudgement, metric: str) -> dict[str, Any]:
    """Return the positions of the means and intervals of one metric on an axis."""
    shown = [(row, row.standings[metric].estimate) for row in found.rows if row.standings[metric].estimate.groups]
    ends = [end for _, estimate in shown for end in (estimate.value, estimate.low, estimate.high) if math.isfinite(end)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    scale = _PLOT / (high - low or 1.0)

    def place(value: float) -> float:
        return round((value - low) * scale, 1)

    marks = [
        {
            "name": row.name,
            "reference": row.is_reference,
            "mean": place(estimate.value),
            "low": place(estimate.low if math.isfinite(estimate.low) else estimate.value),
            "high": place(estimate.high if math.isfinite(estimate.high) else estimate.value),
            "value": f"{estimate.value:.2f}",
        }
        for row, estimate in shown
    ]
    return {"title": words.title(metric), "marks": marks, "zero": place(0.0), "width": _PLOT}
