"""A judgement as Markdown."""

from __future__ import annotations

from camkit.comparison.judge import JudgedRow, MethodJudgement
from camkit.comparison.ranking import Standing
from camkit.comparison.report import words
from camkit.errors import as_markdown, printable


def render(found: MethodJudgement) -> str:
    """Return the judgement as a page in Markdown."""
    parts = [f"# Which method to trust on {as_markdown(found.model)}", as_markdown(found.recommendation.sentence)]
    notes = [*words.notes(found), *words.pictures_left_out(found), *words.HOW_TO_READ]
    listed = "\n".join(f"- {as_markdown(note)}" for note in notes)
    made_by = f"Made by camkit {words.VERSION}."
    return "\n\n".join([*parts, as_markdown(words.measured(found)), table(found), listed, made_by]) + "\n"


def table(found: MethodJudgement) -> str:
    """Return the table, and below it a sentence that explains its marks."""
    headings = ["method", *map(words.title, found.metrics), "shuffled weights ↓", "plain passes"]
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    return "\n".join([*lines, *(_line(row, found) for row in found.rows), "", words.legend("Bold")])


def _line(row: JudgedRow, found: MethodJudgement) -> str:
    name = f"({row.name})" if row.is_reference else _code(row.name)
    cells = [_cell(row, row.standings[metric]) for metric in found.metrics]
    return "| " + " | ".join([name, *cells, words.shuffled(row), words.cost(row)]) + " |"


def _cell(row: JudgedRow, standing: Standing) -> str:
    mean = words.number(standing) + words.doubt(row, standing)
    if words.is_best(row, standing):
        mean = f"**{mean}**"
    return f"{mean} {words.span(standing)}".strip()


def _code(name: str) -> str:
    """Return a name as code in a cell of a table."""
    return "`" + printable(name).replace("`", "'").replace("|", r"\|") + "`"
