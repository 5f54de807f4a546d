"""Writes the table of metrics in docs/metrics.md from the registry.

    .venv/bin/python -m scripts.docs.docs_metrics

A test fails if the page and the registry differ.
"""

from __future__ import annotations

import re
from pathlib import Path

from camkit.metrics import METRICS, Metric
from scripts.docs.docs_methods import cited

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

_TABLE = re.compile(r"(?<=<!-- metrics -->\n).*?(?=<!-- end -->)", re.DOTALL)


def _row(metric: Metric) -> str:
    cells = (
        f"`{metric.name}`",
        metric.summary,
        metric.better,
        metric.space + (", faithful" if metric.faithful else ""),
        metric.fill or "-",
        metric.cost,
        cited(metric.paper),
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the table as Markdown."""
    head = ["| name | what it says | better | space | fill | cost | paper |", "|---|---|---|---|---|---|---|"]
    return "\n".join([*head, *map(_row, METRICS.values()), ""])


def page() -> str:
    """Return the page with the table as it should be."""
    return _TABLE.sub(lambda _: table(), PAGE.read_text("utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
