"""The rows of a check's ``report.json`` as the page shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from camkit.errors import InputError, brief
from camkit.kit.report_rows import shares_right
from camkit.tables import Rows

_ORDER = ("FAIL", "WARN", "INCONCLUSIVE", "PASS")


def read_report(folder: Path) -> dict[str, Any]:
    """Read ``report.json``.

    Raises:
        InputError: it is not a report.
    """
    file = folder / "report.json"
    try:
        report: dict[str, Any] = json.loads(file.read_bytes())
        class_rows(report), picture_rows(report), report["verdict"], report["sentence"], report["reasons"]
    except Exception as error:  # whatever a damaged report lacks
        raise InputError(f"{file} is not the report of a check: {brief(error)}") from error
    return report


def class_rows(report: Mapping[str, Any]) -> Rows:
    """Return a row for each class, the worst first."""
    rows = [
        {
            "class": name,
            "verdict": found["verdict"],
            "pictures": found["pictures"],
            "accuracy": found["accuracy"]["value"],
            **{effect: _effect(found, effect) for effect in ("gap", "attraction", "sufficiency")},
            "reasons": found["reasons"],
        }
        for name, found in report["classes"].items()
    ]
    return sorted(rows, key=lambda row: (_ORDER.index(row["verdict"]), -(row["gap"] or 0)))


def picture_rows(report: Mapping[str, Any]) -> Rows:
    """Return a row for each picture, those whose answer changed most with the background first."""
    rows = []
    for image in report["images"]:
        own, other = shares_right(image)
        rows.append(
            {
                "picture": image["name"],
                "class": image["label"],
                "change": None if own is None or other is None else round(own - other, 3),
                "own background": own,
                "other background": other,
                "answer": image["answer"],
                "the model names": _named(image.get("pasted")),
            }
        )
    return sorted(rows, key=lambda row: (row["change"] is None, -(row["change"] or 0), row["picture"]))


def _effect(found: Mapping[str, Any], name: str) -> float | None:
    measured = found["mean"].get(name)
    return None if measured is None else round(measured["effect"]["value"], 3)


def _named(pasted: Mapping[str, Sequence[Sequence[str]]] | None) -> str:
    """Return what the model names the object on each background, with the first fill."""
    backgrounds = next(iter((pasted or {}).values()), [])
    return "; ".join(f"on {background}: {named}" for background, _, named in backgrounds)
