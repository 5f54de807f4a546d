"""What the page shows of a check: the rows of its ``report.json``, and the edits of pictures in its ``report.html``."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from camkit.errors import InputError, as_error, brief
from camkit.kit.report_rows import shares_right
from camkit.tables import Rows

_ORDER = ("FAIL", "WARN", "INCONCLUSIVE", "not decided", "PASS")


def read_report(folder: Path) -> dict[str, Any]:
    """Read ``report.json``.

    Raises:
        InputError: it is not a report.
    """
    file = folder / "report.json"
    with as_error(InputError, lambda error: f"{file} is not the report of a check: {brief(error)}"):
        report: dict[str, Any] = json.loads(file.read_bytes())
        class_rows(report), picture_rows(report), report["verdict"], report["sentence"], report["reasons"]
    return report


class Edits(HTMLParser):
    """The edits of each picture whose answer changed most, from the page of a check: drawings with what they show."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.of_picture: dict[str, list[tuple[Image.Image, str]]] = {}
        self._name: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notice where a picture's edits begin, and keep each."""
        values = dict(attrs)
        if tag == "section":
            self._name = values.get("data-picture")
        elif tag == "img" and self._name is not None:
            drawing = base64.b64decode((values.get("src") or "").partition("base64,")[2])
            about = (values.get("alt") or "").replace(f" of {self._name}", "", 1)
            self.of_picture.setdefault(self._name, []).append((Image.open(BytesIO(drawing)), about))

    def handle_endtag(self, tag: str) -> None:
        """Notice where a picture's edits end."""
        if tag == "section":
            self._name = None


def read_edits(folder: Path) -> dict[str, list[tuple[Image.Image, str]]]:
    """Read the edits that ``report.html`` shows, by picture; none if there is no such page, or if it was changed."""
    try:
        return Edits((folder / "report.html").read_text("utf-8")).of_picture
    except (OSError, ValueError):  # of a damaged file too
        return {}


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
