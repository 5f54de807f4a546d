"""A check as JSON with a versioned schema. The same input and seed give the same file, byte for byte.

Numbers have six digits after the point, because the last bits of sums depend on the number of threads and the size of
batches. The file holds no time, path or host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from camkit.background.baseline import SCHEMA, checksum
from camkit.background.effects import OVERALL, EffectName, MeasuredEffect, Measures
from camkit.background.pictures import IMAGES
from camkit.background.report import words
from camkit.background.result import CheckResult
from camkit.background.rule import Judgement
from camkit.kit import wording

DIGITS = 6
"""Digits after the point; see above."""

_OF_BACKGROUND: tuple[EffectName, ...] = ("gap", "sufficiency", "attraction")
"""The effects that the report has for each fill."""


def render(result: CheckResult) -> str:
    """Return the report."""
    report = _rounded(as_dict(result))
    return json.dumps({**report, "checksum": checksum(report)}, indent=1, allow_nan=False) + "\n"


def as_dict(result: CheckResult) -> dict[str, Any]:
    """Return the report as plain values, without rounding."""
    plan = result.plan
    hashes = {item.name: plan.files.of(item.path) for item in plan.data.items}
    return {
        "schema": SCHEMA,
        "camkit": wording.VERSION,
        "verdict": result.verdict,
        "sentence": words.sentence(result),
        "why_undecided": words.why_undecided(result),
        "reasons": list(result.reasons),
        "next_steps": words.next_steps(result),
        "worst": result.worst,
        "model": plan.model.name,
        "loaded": plan.model.note,
        "method": result.method,
        "layer": result.layer,
        "grids": result.grids,
        "hashes": result.hashes,
        "settings": plan.reported_settings,
        "data": {
            "facts": list(plan.data.facts),
            "classes_matched": plan.matched.how,
            "left_out": {kind: list(names) for kind, names in plan.data.left_out.items()},
            "failures": result.failures,
            "untested": dict(result.untested),
        },
        "warnings": [*result.warnings, *result.sanity.remarks],
        "sanity": {"agreement_with_hirescam": result.sanity.agreement, "like_random_weights": result.sanity.randomised},
        "overall": _measures(result.overall, result.judged[OVERALL]),
        "classes": {name: _measures(measures, result.judged[name]) for name, measures in result.classes.items()},
        "kinds": None if result.kinds is None else result.kinds.as_json(),
        "change": None if result.change is None else asdict(result.change),
        "images": [{**IMAGES.dump_python(row), "sha256": hashes[row.name]} for row in result.images],
        "caveat": words.caveat(result),
    }


def _measures(measures: Measures, judgement: Judgement) -> dict[str, Any]:
    return {
        "verdict": judgement.shown,
        "reasons": [reason.text for reason in judgement.reasons],
        **{f"{name}_p": judgement.p(name) for name in _OF_BACKGROUND},
        "levels": {name: effect.level for name, effect in judgement.effects.items()},
        "excluded_above": {name: effect.excluded_above for name, effect in judgement.effects.items()},
        "more_pictures": {name: effect.more_pictures for name, effect in judgement.effects.items()},
        "waived": judgement.waived,
        **plain(measures),
    }


def plain(measures: Measures) -> dict[str, Any]:
    """Return the measures of a class, or of all classes together, as plain values."""
    figures = asdict(replace(measures, effects={}))
    of_background = {name: effect.by_fill for name, effect in measures.effects.items() if name in _OF_BACKGROUND}
    figures |= {name: _as_dicts(of_background.get(name, {})) for name in _OF_BACKGROUND}
    figures["mean"] = _as_dicts({name: measures.effects[name].mean for name in of_background})
    figures["cues"] = _as_dicts(measures.cues)
    return {name: value for name, value in figures.items() if name not in ("name", "effects")}


def _as_dicts(measured: Mapping[Any, MeasuredEffect | None]) -> dict[Any, dict[str, Any]]:
    return {name: asdict(effect) for name, effect in measured.items() if effect is not None}


def _rounded(value: Any) -> Any:
    """Round every number in a nested value. JSON has no NaN and no infinity, so they become null."""
    if isinstance(value, float):
        return round(value, DIGITS) + 0.0 if math.isfinite(value) else None  # adding 0.0 turns -0.0 into 0.0
    if isinstance(value, dict):
        return {str(name): _rounded(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return value
