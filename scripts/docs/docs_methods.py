"""Writes the table of methods in docs/methods.md from the registry.

    .venv/bin/python -m scripts.docs.docs_methods

A test fails if the page and the registry differ.
"""

from __future__ import annotations

import re
from pathlib import Path

import camkit

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"

_TABLE = re.compile(r"(?<=<!-- methods -->\n).*?(?=<!-- end -->)", re.DOTALL)

_PAPER = re.compile(r"([A-Z]\w+(?: (?:and|&) [A-Z]\w+| et al\.)? \d{4})(?:, [^;]*?)?, arXiv:([\d.]*\d)")
"""Authors and year, perhaps a title, and the number at arXiv."""


def cited(paper: str) -> str:
    """Return a paper as the pages write it: a link with authors and year instead of title and number."""
    return _PAPER.sub(r"[\1](https://arxiv.org/abs/\2)", paper)


def table() -> str:
    """Return the table as Markdown."""
    rows = [
        f"| `{method.name}` | {method.summary} | {method.cost} | {cited(method.paper)} |"
        for method in camkit.METHODS.values()
    ]
    heading = "| name | weights feature maps by | time in plain passes | paper |"
    return "\n".join([heading, "|---|---|---|---|", *rows, ""])


def page() -> str:
    """Return the page with the table as it should be."""
    return _TABLE.sub(lambda _: table(), PAGE.read_text("utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
