"""The table of metrics with the decorator that adds to it, and what metrics return: a number, or why there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from camkit.errors import InputError, OutputError, did_you_mean
from camkit.images.files import write_file
from camkit.tables import Rows, Tabular, markdown_table

Better: TypeAlias = Literal["higher", "lower"]
Space: TypeAlias = Literal["input", "features", "map", "model"]
Measure: TypeAlias = Callable[..., float]
"""``measure(evaluator, heat)`` returns a metric's value for a map, or raises ``UndefinedError``."""

_NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Metric:
    """One way to judge a map.

    Attributes:
        name: what ``metrics=`` takes.
        title: the name as people write it.
        summary: one line of what it says.
        paper: where the formula comes from.
        better: whether a "higher" or a "lower" value is better.
        space: what is changed: the "input" of the model, the "features" of a layer (the head alone is run), the
            "model" and its weights, or nothing at all: a value of the "map" alone. Values of different spaces do not
            belong into one column.
        cost: the time it takes, in plain passes of the model for one picture.
        faithful: whether it tests that the map shows what the model used. The others test the map's form, its
            stability, or where it lies.
        fill: what replaces removed pixels unless the call says otherwise; empty if none are removed, or if
            the metric's definition fixes it.
        needs_region: whether it compares the map with the region of an object, so that the Evaluator needs one.
        measure: ``measure(evaluator, heat)`` returns the value, or raises ``UndefinedError``.
    """

    name: str
    title: str
    summary: str
    paper: str
    better: Better
    space: Space
    cost: str
    faithful: bool
    fill: str
    needs_region: bool
    measure: Measure


METRICS: dict[str, Metric] = {}
"""Every metric by its name, the user's own included."""


def register_metric(
    name: str,
    *,
    title: str | None = None,
    summary: str = "",
    paper: str = "",
    better: Better = "higher",
    space: Space = "input",
    cost: str = "",
    faithful: bool = False,
    fill: str = "",
    needs_region: bool = False,
    replace: bool = False,
) -> Callable[[Measure], Measure]:
    """Add a metric to ``camkit.metrics.METRICS`` under a name, as a decorator.

    The function gets the ``Evaluator``, which runs the model on changed pictures, and the ``Heat``, and returns a
    number. It raises ``camkit.metrics.UndefinedError`` if there is none.

    Args:
        name: what ``metrics=`` takes: letters, digits, ``-`` and ``_``.
        title, summary, paper, better, space, cost, faithful, fill, needs_region: as in ``Metric``.
        replace: allow a name that is taken, for example when a notebook cell runs again.

    Raises:
        InputError: the name is taken or has other characters, or ``better`` or ``space`` is unknown.

    Examples:
        >>> from camkit import metrics
        >>> @metrics.register_metric("peak-share", better="higher", space="map", cost="0")
        ... def peak_share(evaluator, heat):
        ...     return float(heat.values.max() / heat.values.sum())
        >>> del metrics.METRICS["peak-share"]  # forgets it again
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"the name of a metric consists of letters, digits, '-' and '_', not {name!r}")
    for argument, value, kind in (("better", better, Better), ("space", space, Space)):
        if value not in get_args(kind):
            raise InputError(f"metric {name!r}: {argument} must be one of {', '.join(get_args(kind))}, not {value!r}")
    if name in METRICS and not replace:
        raise InputError(f"there is already a metric {name!r}; choose another name, or pass replace=True")

    def add(function: Measure) -> Measure:
        METRICS[name] = Metric(
            name, title or name, summary, paper, better, space, cost, faithful, fill, needs_region, function
        )
        return function

    return add


def find_metric(name: str) -> Metric:
    """Return the metric with a name.

    Raises:
        InputError: there is none; the message suggests the nearest.
    """
    if isinstance(name, str) and name in METRICS:
        return METRICS[name]
    hint = did_you_mean(name, METRICS) if isinstance(name, str) else ""
    raise InputError(f"unknown metric {name!r}{hint or '; choose from ' + ', '.join(METRICS)}")


# --- what metrics return

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
        return {"value" if name == "number" else name: value for name, value in asdict(self).items()}


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
        rows = []
        for title, row in self.rows.items():
            shown = f"({title})" if title in self.references else title
            rows.append([shown, *(str(row[name]) if name in row else "" for name in names)])
        return markdown_table(["map", *arrows], rows)

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
