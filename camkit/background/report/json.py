"""A check as JSON, with a versioned schema: the same input and seed give the same file, byte for byte.

Numbers are rounded to six digits after the point, since sums differ in the last bits with the number of threads and the
size of batches. No time, path or host is in it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from camkit.background.check import CheckResult
from camkit.background.measures import ImageRow, Measures
from camkit.background.plan import content_hash
from camkit.background.report import words
from camkit.background.verdict import Judged

SCHEMA = 1
DIGITS = 6


def render(result: CheckResult) -> str:
    """Return the report."""
    return json.dumps(_rounded(as_dict(result)), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def as_dict(result: CheckResult) -> dict[str, Any]:
    """Return the report as plain values, not rounded."""
    plan = result.plan
    hashes = {item.name: content_hash(item.path) for item in plan.data.items}
    return {
        "schema": SCHEMA,
        "camkit": words.VERSION,
        "verdict": result.verdict,
        "sentence": words.sentence(result),
        "reasons": list(result.reasons),
        "worst": result.worst,
        "model": plan.model.name,
        "layer": result.layer,
        "grids": result.grids,
        "hashes": result.hashes,
        "settings": {
            "check": plan.settings.check.model_dump(mode="json", exclude={"batch_size"}),
            "limits": plan.settings.limits.model_dump(mode="json"),
        },
        "data": {
            "facts": list(plan.data.facts),
            "classes_matched": plan.matched.how,
            "left_out": {what: list(names) for what, names in plan.data.left_out.items()},
            "failures": result.failures,
        },
        "warnings": [*result.warnings, *result.sanity.remarks],
        "sanity": {"agreement_with_hirescam": result.sanity.agreement, "like_random_weights": result.sanity.randomised},
        "overall": _measures(result.overall, result.judged[""]),
        "classes": {name: _measures(one, result.judged[name]) for name, one in result.classes.items()},
        "change": None if result.change is None else asdict(result.change),
        "images": [_image(row, hashes[row.name]) for row in result.images],
        "caveat": words.CAVEAT,
    }


def _measures(one: Measures, judged: Judged) -> dict[str, Any]:
    reasons = [reason.text for reason in judged.reasons]
    return {
        **asdict(judged),
        "reasons": reasons,
        **{name: value for name, value in asdict(one).items() if name != "name"},
    }


def _image(row: ImageRow, content: str) -> dict[str, Any]:
    return {**asdict(row), "sha256": content}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS) + 0.0 if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _rounded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return value
