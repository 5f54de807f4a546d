"""A judgement as JSON."""

from __future__ import annotations

import json
from typing import Any

from camkit.comparison.judge import DECIDING, FILL, STEPS, JudgedRow, MethodJudgement
from camkit.comparison.ranking import Standing
from camkit.comparison.report import words
from camkit.explanation import finite_or_none
from camkit.metrics import METRICS


def render(found: MethodJudgement) -> str:
    """Return the judgement as strict JSON."""
    return json.dumps(values(found), indent=1, allow_nan=False)


def values(found: MethodJudgement) -> dict[str, Any]:
    """Return the judgement as plain JSON values; None where there is no number."""
    return {
        "camkit": words.VERSION,
        "model": found.model,
        "recommendation": {
            "row": found.recommendation.row,
            "sentence": found.recommendation.sentence,
            "metrics_agree": found.recommendation.agreed,
        },
        "deciding_metrics": list(DECIDING),
        "metrics": {
            name: {"title": METRICS[name].title, "better": METRICS[name].better, "changes": METRICS[name].space}
            for name in found.metrics
        },
        "fill": FILL,
        "steps": STEPS,
        "layer_of_feature_cells": found.layer,
        "seed": found.seed,
        "seconds": round(found.seconds, 1),
        "pictures": list(found.pictures),
        "unreadable": found.unreadable,
        "rows": [_row(row) for row in found.rows],
    }


def _row(row: JudgedRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "method": row.method,
        "layer": row.layer,
        "reference": row.is_reference,
        "plain_passes": finite_or_none(row.cost),
        "correlation_with_shuffled_weights": row.unmoved,
        "hardly_changes": row.hardly_changes,
        "empty_maps": row.empty,
        "failed": row.failed[0],
        "reason": row.failed[1],
        "metrics": {
            name: {
                **_standing(standing),
                "counted_like_random": row.missing.get(name, 0),
                "values": [finite_or_none(value) for value in row.values.get(name, ())],
            }
            for name, standing in row.standings.items()
        },
    }


def _standing(standing: Standing) -> dict[str, Any]:
    return {
        "mean": finite_or_none(standing.estimate.value),
        "low": finite_or_none(standing.estimate.low),
        "high": finite_or_none(standing.estimate.high),
        "pictures": standing.estimate.groups,
        "beats_random": standing.beats_random,
        "loses_to_random": standing.loses_to_random,
        "level_with_best": standing.level_with_best,
    }
