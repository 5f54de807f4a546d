"""A judgement as Markdown."""

from __future__ import annotations

from camkit.comparison.judge import JudgedRow, MethodJudgement
from camkit.comparison.ranking import Standing
from camkit.comparison.report import words


def render(found: MethodJudgement) -> str:
    """Return the judgement as a page in Markdown."""
    about = f"{len(found.pictures)} pictures, seed {found.seed}"
    parts = [f"# Which method to trust on {found.model}", found.recommendation.sentence, f"{about}.", table(found)]
    notes = [f"- {note}" for note in (*words.notes(found), *words.HOW_TO_READ)]
    return "\n\n".join([*parts, "\n".join(notes)]) + "\n"


def table(found: MethodJudgement) -> str:
    """Return the table. A mean in bold is level with the best; one in parentheses does not beat the random map."""
    headings = ["method", *map(words.title, found.metrics), "shuffled weights ↓", "plain passes"]
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    return "\n".join([*lines, *(_line(row, found) for row in found.rows)])


def _line(row: JudgedRow, found: MethodJudgement) -> str:
    name = f"({row.name})" if row.is_reference else f"`{row.name}`"
    cells = [_cell(row, row.standings[metric]) for metric in found.metrics]
    return "| " + " | ".join([name, *cells, words.shuffled(row), words.cost(row)]) + " |"


def _cell(row: JudgedRow, standing: Standing) -> str:
    mean, span = words.number(standing), words.span(standing)
    if not mean:
        return ""
    if row.is_reference:
        return f"{mean} ({span})"
    if not standing.beats_random:
        mean = f"({mean})"
    return f"**{mean}** ({span})" if standing.level_with_best else f"{mean} ({span})"
