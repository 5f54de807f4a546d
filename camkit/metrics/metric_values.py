"""What metrics return: a number, or the reason why there is none; and tables of these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from camkit.errors import OutputError
from camkit.images.files import write_file
from camkit.metrics.registry import METRICS
from camkit.tables import Rows, Tabular

ValueStatus: TypeAlias = Literal[
    "ok", "empty_map", "constant_map", "non_finite", "needs_method", "needs_region", "undefined"
]

_WORDS = {
    "empty_map": "empty map",
    "constant_map": "constant map",
    "non_finite": "not finite",
    "needs_method": "needs the method",
    "needs_region": "needs a region",
    "undefined": "undefined",
}


class UndefinedError(Exception):
    """A metric has no value for a map; it becomes the status of a ``Value``, and no error.

    Args:
        status: one of the statuses of ``Value``.
        reason: a sentence without a full stop.
    """

    def __init__(self, status: ValueStatus, reason: str) -> None:
        super().__init__(reason)
        self.status: ValueStatus = status


@dataclass(frozen=True)
class Value:
    """The value of one metric for one map.

    Attributes:
        metric: the metric's name.
        number: the value; None unless ``status`` is "ok".
        status: "ok", or why there is no number: "empty_map", the map shows no evidence; "constant_map", all its cells
            are equal, so they have no order; "non_finite", the map or a score of the model is NaN or infinite;
            "needs_method", the map was passed as an array, and the metric makes it anew; "needs_region", the metric
            compares the map with a region and there is none; "undefined" for everything else, as ``reason`` says.
        reason: a sentence about the status; empty for "ok".
        fill: what replaced removed pixels; empty if nothing was removed.
    """

    metric: str
    number: float | None
    status: ValueStatus = "ok"
    reason: str = ""
    fill: str = ""

    def __str__(self) -> str:
        """Return the number with three digits, or the status in words."""
        return _WORDS[self.status] if self.number is None else f"{self.number:.3f}"

    def to_dict(self) -> dict[str, Any]:
        """Return the value as plain JSON values."""
        return {
            "metric": self.metric,
            "value": self.number,
            "status": self.status,
            "reason": self.reason,
            "fill": self.fill,
        }


class Values(dict[str, Value]):
    """The values of one map, by the metric's name."""

    def numbers(self) -> dict[str, float | None]:
        """Return the plain numbers; None where there is none."""
        return {name: value.number for name, value in self.items()}

    def __repr__(self) -> str:
        """Return, for example, ``<srg 0.412, insertion 0.721>``."""
        return f"<{', '.join(f'{name} {value}' for name, value in self.items())}>"


@dataclass(frozen=True, repr=False)
class ValueTable(Tabular):
    """The values of several maps of one picture: a row for each map, and one for each reference map.

    Attributes:
        rows: the values by the map's name; the reference maps come last.
        references: the names of the rows that are reference maps.
    """

    rows: Mapping[str, Values]
    references: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the table in Markdown; the arrow behind a metric shows which direction is better."""
        names = list(dict.fromkeys(name for row in self.rows.values() for name in row))
        arrows = [f"{name} {'↑' if METRICS[name].better == 'higher' else '↓'}" for name in names]
        lines = ["| map | " + " | ".join(arrows) + " |", "|---|" + "---|" * len(names)]
        for title, row in self.rows.items():
            shown = f"({title})" if title in self.references else title
            lines.append(f"| {shown} | " + " | ".join(str(row[name]) if name in row else "" for name in names) + " |")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return a line with the names of the maps."""
        return f"<ValueTable of {', '.join(self.rows)}>"

    def table(self) -> Rows:
        """Return a row for each map, with the number of each metric; None where there is none."""
        return [
            {"map": name, "reference": name in self.references, **values.numbers()}
            for name, values in self.rows.items()
        ]

    def save(self, path: str | Path) -> Path:
        """Write the table as JSON (.json) or Markdown (.md).

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        path = Path(path)
        if path.suffix not in (".json", ".md"):
            raise OutputError(f"camkit cannot write a table as {path.name}; use .json or .md")
        text = json.dumps(self.to_dict(), indent=1) if path.suffix == ".json" else str(self)
        write_file(path, text.encode())
        return path

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain JSON values."""
        rows = {title: {name: value.to_dict() for name, value in values.items()} for title, values in self.rows.items()}
        return {"rows": rows, "references": list(self.references)}
