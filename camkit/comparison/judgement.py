"""What ``judge`` returns: the rows and the recommendation, and their reports."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from camkit.comparison import page
from camkit.comparison.recommendation import UNMOVED, Recommendation
from camkit.comparison.standings import PRACTICALLY_LEVEL, Standing
from camkit.errors import OutputError, as_markdown, printable
from camkit.explanation import finite_or_none
from camkit.images.files import write_file
from camkit.kit.wording import NONE, VERSION, counted
from camkit.metrics import METRICS
from camkit.tables import Rows, Tabular, flat

DECIDING = ("srg", "adcc", "feature-srg")
"""The metrics that decide: pixels in order of their heat, the picture times its map, and cells of the layer."""

SHOWN = ("insertion", "deletion", "average-drop", "complexity")
"""The metrics that are shown beside them: the parts of the metrics that decide."""

RANDOMISED = "mprt"
"""The metric that tells whether a map changes with the weights."""

FILL = "blur"
"""The fill for removed pixels in all metrics. With one fill, SRG is exactly insertion minus deletion, and the three
share their passes."""

STEPS = 10
"""Steps of a curve: half of the default, because the mean over the pictures matters and not the single value."""

REPORTS = ("judge.html", "judge.json", "judge.md")
"""The files that a judgement writes."""

HOW_TO_READ = (
    "Three metrics decide together, because they contradict each other: SRG removes pixels in the order of the heat, "
    "ADCC multiplies the picture by its map, and SRG of feature cells removes cells of the layer, not pixels. The "
    "other columns show the parts of these metrics.",
    f'The column "shuffled weights" is the rank correlation of a map with the maps of the same network with shuffled '
    f"weights. Above {UNMOVED:g}, the map shows the picture, and not what the network has learned.",
    "The last rows know nothing about the network: random cells, a blob in the middle, and the nearness to the best "
    "single colour. A method that is no better than these rows shows nothing about the network.",
)

_NOT_BETTER, _WORSE = "?", "!"
"""The marks after a mean that is not significantly better than the random map's, and after one that is worse."""

LEGEND = (
    "Each number is the mean over the pictures with its 95% interval. Bold: no method is clearly better in this "
    f"column, that is, significantly and by more than {PRACTICALLY_LEVEL:.0%} of its advantage over the random map. "
    f"{_NOT_BETTER}: not significantly better than the random map on the same pictures. {_WORSE}: significantly worse "
    "than the random map."
)
"""What the numbers and marks of a table mean."""

_FIRST_PICTURES = 5
"""A report names at most this many of the pictures that were left out; judge.json names all."""


class Cell(NamedTuple):
    """What a table shows of one metric for one row.

    Attributes:
        mean: the mean with two digits; a dash if there is none.
        span: its interval; empty if there is none.
        best: whether it is as good as the best, and beats the random map.
        doubt: the mark of a mean that does not beat the random map; empty for others and for reference maps.
    """

    mean: str
    span: str
    best: bool
    doubt: str


@dataclass(frozen=True)
class JudgedRow:
    """One method at one layer, or a reference map, over all pictures.

    Attributes:
        name: the method, and the layer if several are judged; or the name of the reference map.
        method: the method's name; empty for a reference map.
        layer: the layer that was used; empty for a reference map.
        standings: what each metric says, by the metric's name.
        cost: the time of one map in plain passes of the model, the median over the pictures.
        unmoved: the mean rank correlation with the maps of shuffled weights; None if it was not measured.
        empty: how many of the maps are empty or not finite.
        failed: how many pictures could not be explained with it, and the first reason.
        missing: for each metric, on how many pictures it has no value although the random map has one. On these
            pictures it counts like the random map: a map that says nothing is as good as chance.
        values: each metric's value on each picture, in the order of the judgement's pictures; NaN where it has none.
    """

    name: str
    method: str
    layer: str
    standings: dict[str, Standing]
    cost: float
    unmoved: float | None
    empty: int
    failed: tuple[int, str]
    missing: dict[str, int] = field(default_factory=dict)
    values: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def is_reference(self) -> bool:
        """True for a map that knows nothing of the model."""
        return not self.method

    @property
    def hardly_changes(self) -> bool:
        """True if the map hardly changes when the weights are shuffled."""
        return self.unmoved is not None and self.unmoved > UNMOVED

    def cell(self, metric: str) -> Cell:
        """Return what tables show of a metric."""
        standing = self.standings[metric]
        estimate = standing.estimate
        in_doubt = not (self.is_reference or standing.beats_random) and estimate.groups
        return Cell(
            f"{estimate.value:z.2f}" if estimate.groups else NONE,
            f"[{estimate.low:z.2f}, {estimate.high:z.2f}]" if math.isfinite(estimate.low) else "",
            not self.is_reference and standing.level_with_best and standing.beats_random,
            (_WORSE if standing.loses_to_random else _NOT_BETTER) if in_doubt else "",
        )

    @property
    def shuffled_text(self) -> str:
        """The correlation with the maps of shuffled weights, as tables show it."""
        return "" if self.unmoved is None else f"{self.unmoved:.2f}"

    @property
    def cost_text(self) -> str:
        """The time of one map in plain passes, as tables show it."""
        return f"{self.cost:.1f}" if math.isfinite(self.cost) and not self.is_reference else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return {
            "name": self.name,
            "method": self.method,
            "layer": self.layer,
            "reference": self.is_reference,
            "plain_passes": finite_or_none(self.cost),
            "correlation_with_shuffled_weights": self.unmoved,
            "hardly_changes": self.hardly_changes,
            "empty_maps": self.empty,
            "failed": self.failed[0],
            "reason": self.failed[1],
            "metrics": {
                name: {
                    "mean": finite_or_none(standing.estimate.value),
                    "low": finite_or_none(standing.estimate.low),
                    "high": finite_or_none(standing.estimate.high),
                    "pictures": standing.estimate.groups,
                    "beats_random": standing.beats_random,
                    "loses_to_random": standing.loses_to_random,
                    "level_with_best": standing.level_with_best,
                    "counted_like_random": self.missing.get(name, 0),
                    "values": [finite_or_none(value) for value in self.values.get(name, ())],
                }
                for name, standing in self.standings.items()
            },
        }


def _without_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of ``to_dict`` with its metrics by name, without their values on each picture."""
    metrics = {
        name: {part: value for part, value in of_metric.items() if part != "values"}
        for name, of_metric in row["metrics"].items()
    }
    return {**{name: value for name, value in row.items() if name != "metrics"}, **metrics}


@dataclass(frozen=True)
class MethodJudgement(Tabular):
    """Which methods are faithful on a model, over a sample of pictures.

    Attributes:
        model: the model's name.
        rows: the methods, and the reference maps last.
        recommendation: which one to use, and why.
        pictures: the pictures of the sample.
        unreadable: pictures that could not be used, with the reason.
        metrics: the metrics in the order of the columns.
        layer: the layer whose cells "feature-srg" removes, for all rows alike; empty if it never had a value.
        seed: the seed of the sample and of all draws.
        seconds: how long it took.
    """

    model: str
    rows: tuple[JudgedRow, ...]
    recommendation: Recommendation
    pictures: tuple[str, ...]
    unreadable: dict[str, str]
    metrics: tuple[str, ...]
    layer: str
    seed: int
    seconds: float = field(compare=False)

    def table(self) -> Rows:
        """Return a row for each method and each reference map, with the mean and interval of each metric."""
        return [flat(_without_values(row.to_dict())) for row in self.rows]

    def to_markdown(self) -> str:
        """Return the table in Markdown."""
        headings = ["method", *map(column_title, self.metrics), "shuffled weights ↓", "plain passes"]
        lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
        for row in self.rows:
            name = f"({row.name})" if row.is_reference else _as_code(row.name)
            cells = [_as_markdown(row.cell(metric)) for metric in self.metrics]
            lines.append("| " + " | ".join([name, *cells, row.shuffled_text, row.cost_text]) + " |")
        return "\n".join([*lines, "", LEGEND])

    def to_dict(self) -> dict[str, Any]:
        """Return the judgement as plain JSON values; None where there is no number."""
        return {
            "camkit": VERSION,
            "model": self.model,
            "recommendation": {
                "row": self.recommendation.row,
                "sentence": self.recommendation.sentence,
                "metrics_agree": self.recommendation.agreed,
            },
            "deciding_metrics": list(DECIDING),
            "metrics": {
                name: {"title": METRICS[name].title, "better": METRICS[name].better, "changes": METRICS[name].space}
                for name in self.metrics
            },
            "fill": FILL,
            "steps": STEPS,
            "layer_of_feature_cells": self.layer,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "pictures": list(self.pictures),
            "unreadable": self.unreadable,
            "rows": [row.to_dict() for row in self.rows],
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``judge.html``, ``judge.json`` and ``judge.md`` into a folder, and return the page.

        Raises:
            OutputError: a file cannot be written.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"{folder} is a file; the reports need a folder")
        write_file(folder / "judge.json", json.dumps(self.to_dict(), indent=1, allow_nan=False).encode())
        write_file(folder / "judge.md", self._markdown().encode())
        write_file(folder / "judge.html", self._page().encode())
        return folder / "judge.html"

    def __repr__(self) -> str:
        """Return a line with the recommendation."""
        chosen = self.recommendation.row or "none"
        methods = sum(not row.is_reference for row in self.rows)
        return f"<MethodJudgement of {methods} methods on {len(self.pictures)} pictures: {chosen}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return page.table(**self._table_of_page())

    @property
    def measured(self) -> str:
        """How the metrics were computed: the fill, the steps, and the layer of the feature cells."""
        removes = f"{METRICS['feature-srg'].title} removes cells of layer {self.layer!r}, for all rows alike"
        return (
            f"{len(self.pictures)} pictures, seed {self.seed}. The fill of removed pixels is {FILL}, and a curve has "
            f"{STEPS} steps.{f' {removes}.' if self.layer else ''}"
        )

    @property
    def left_out(self) -> list[str]:
        """A sentence for each picture that could not be used: its name and the reason."""
        return [reason if name in reason else f"{name}: {reason}" for name, reason in self.unreadable.items()]

    @property
    def notes(self) -> list[str]:
        """What else the reader should know about the rows."""
        pictures = len(self.pictures)
        said = []
        unmoved = [row.name for row in self.rows if row.hardly_changes]
        if unmoved:
            said.append(
                f"The maps of {', '.join(unmoved)} hardly change when the weights are shuffled "
                f"({METRICS[RANDOMISED].title}): they show the picture, and not what the network has learned."
            )
        most = {name: max(row.standings[name].estimate.groups for row in self.rows) for name in self.metrics}
        said += [
            f"No map has a value on {count} of {pictures} pictures in {titles}."
            for count, titles in _by_count({name: pictures - known for name, known in most.items()})
        ]
        return said + [note for row in self.rows for note in _notes_of(row, pictures, most)]

    def _all_notes(self) -> list[str]:
        """Return the notes, and one about the pictures that could not be used, if there are any."""
        sentences = self.left_out
        if not sentences:
            return self.notes
        more = len(sentences) - _FIRST_PICTURES
        named = "; ".join(sentences[:_FIRST_PICTURES])
        named += f"; and {more} more, which judge.json names" if more > 0 else ""
        return [*self.notes, f"{counted(len(sentences), 'picture')} could not be used: {named}."]

    def _markdown(self) -> str:
        parts = [
            f"# Which method to trust on {as_markdown(self.model)}",
            as_markdown(self.recommendation.sentence),
            as_markdown(self.measured),
            self.to_markdown(),
            "\n".join(f"- {as_markdown(note)}" for note in (*self._all_notes(), *HOW_TO_READ)),
            f"Made by camkit {VERSION}.",
        ]
        return "\n\n".join(parts) + "\n"

    def _page(self) -> str:
        return page.render(
            **self._table_of_page(),
            plots=[self._plot(metric) for metric in DECIDING],
            version=VERSION,
            measured=self.measured,
            seconds=round(self.seconds),
            how_to_read=HOW_TO_READ,
            summaries=[(METRICS[name].title, METRICS[name].summary, METRICS[name].paper) for name in self.metrics],
        )

    def _plot(self, metric: str) -> dict[str, Any]:
        rows = [
            (row.name, row.is_reference, row.standings[metric].estimate, " ".join(row.cell(metric)[:2]).strip())
            for row in self.rows
        ]
        return page.plot(column_title(metric), rows)

    def _table_of_page(self) -> dict[str, Any]:
        """Return what the page and a notebook show: the recommendation, the table and the notes."""
        return {
            "model": self.model,
            "sentence": self.recommendation.sentence,
            "columns": [{"title": column_title(name), "space": _changed(name)} for name in self.metrics],
            "rows": [
                {
                    "name": row.name,
                    "layer": "" if row.name.endswith(f" at {row.layer}") else row.layer,
                    "reference": row.is_reference,
                    "chosen": row.name == self.recommendation.row,
                    "cells": [row.cell(metric) for metric in self.metrics],
                    "shuffled": row.shuffled_text,
                    "hardly_changes": row.hardly_changes,
                    "cost": row.cost_text,
                }
                for row in self.rows
            ],
            "legend": LEGEND,
            "notes": self._all_notes(),
        }


def column_title(metric: str) -> str:
    """Return the heading of a metric's column: its title and which direction is better."""
    return f"{METRICS[metric].title} {'↑' if METRICS[metric].better == 'higher' else '↓'}"


def _changed(metric: str) -> str:
    """Return what the metric changes, for the second line of the heading."""
    changed = {"input": "pixels", "features": "feature cells", "map": "nothing", "model": "weights"}
    decides = ", decides" if metric in DECIDING else ""
    return f"changes {changed[METRICS[metric].space]}{decides}"


def _as_markdown(cell: Cell) -> str:
    mean = cell.mean + cell.doubt
    return f"{f'**{mean}**' if cell.best else mean} {cell.span}".strip()


def _as_code(name: str) -> str:
    """Return a name as code in a cell of a table."""
    return "`" + printable(name).replace("`", "'").replace("|", r"\|") + "`"


def _notes_of(row: JudgedRow, pictures: int, most: Mapping[str, int]) -> list[str]:
    """Return what the reader should know about a row.

    Args:
        row: the row.
        pictures: the number of pictures.
        most: for each metric, the most pictures on which any row has a value.
    """
    failed, reason = row.failed
    if failed == pictures:
        return [f"{row.name} works on none of the {pictures} pictures: {reason}."]
    said = []
    if failed:
        said.append(f"{row.name} fails on {failed} of {pictures} pictures: {reason}.")
    if row.empty:
        are = "is" if row.empty == 1 else "are"
        said.append(f"{row.name}: {row.empty} of {pictures} maps {are} empty or not finite.")
    if row.is_reference:
        missing = {name: known - row.standings[name].estimate.groups for name, known in most.items()}
        instead = "its mean leaves them out"
    else:
        missing = {name: row.missing.get(name, 0) for name in most}
        instead = "it is scored there like the random map"
    return said + [
        f"{row.name} has no value on {count} of {pictures} pictures in {titles}; {instead}."
        for count, titles in _by_count(missing)
    ]


def _by_count(counts: Mapping[str, int]) -> list[tuple[int, str]]:
    """Return each count above 0 with the titles of the metrics that have it."""
    metrics_of: dict[int, list[str]] = {}
    for name, count in counts.items():
        if count:
            metrics_of.setdefault(count, []).append(METRICS[name].title)
    return [
        (count, "all metrics" if len(titles) == len(counts) else ", ".join(titles))
        for count, titles in sorted(metrics_of.items())
    ]
