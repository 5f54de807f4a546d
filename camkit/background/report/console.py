"""A check on a terminal: what was found in the data, what the check will cost, and the verdict."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from camkit.background.effects import OVERALL
from camkit.background.forecast import notice
from camkit.background.plan import Plan
from camkit.background.report import words
from camkit.background.result import CheckResult
from camkit.errors import printable
from camkit.kit.wording import in_words

MOST_CAUSES = 3
"""Causes that the terminal names for pictures that could not be tested."""

_STYLES = {"FAIL": "bold red", "WARN": "yellow", "PASS": "bold green", "INCONCLUSIVE": "cyan", "not decided": "cyan"}


def data_summary(plan: Plan) -> Text:
    """Return what was found: pictures, regions, classes, and what is left out."""
    lines = [*plan.data.facts, f"classes matched {plan.matched.how}", *plan.data.left_out_in_words]
    return Text("\n".join(map(printable, lines)))


def power_notice(plan: Plan) -> Text:
    """Return how many pictures the experiment has, and how many it needs to exclude effects above the limits."""
    return Text(printable(notice(plan.sample, plan.settings.limits)))


def cost_notice(plan: Plan, seconds: float) -> Text:
    """Return how many pictures the model will see, and about how long that takes."""
    heat, edits = plan.forwards
    why = "for the heat" if plan.draws_heat else "as they are"
    return Text(f"the model will see {heat} pictures {why} and up to {edits} edits: {in_words(seconds)}")


def verdict(result: CheckResult) -> Text:
    """Return the verdict, the reasons, and the path of the report."""
    text = Text.assemble((result.verdict, _STYLES[result.verdict]), f": {printable(words.sentence(result))}\n")
    if why := words.why_undecided(result):
        text.append(f"  {printable(why)}\n")
    for step in words.next_steps(result):
        text.append(f"  next: {printable(step)}\n", "bold")
    for reason in result.reasons[: words.MOST_REASONS]:
        text.append(f"  {printable(reason)}\n")
    if len(result.reasons) > words.MOST_REASONS:
        text.append(f"  and {len(result.reasons) - words.MOST_REASONS} more\n")
    for warning in (*result.warnings, *result.sanity.remarks):
        text.append(f"  note: {printable(warning)}\n", "yellow")
    if result.failures:
        first = next(iter(result.failures))
        text.append(f"  {len(result.failures)} pictures could not be used, such as {printable(first)}\n", "yellow")
    for line in words.untested(result)[:MOST_CAUSES]:
        text.append(f"  {printable(line)}\n", "yellow")
    if change := words.change_since_baseline(result):
        text.append(f"  {printable(change)}\n")
    if result.report is not None:
        text.append(f"  wrote {printable(str(result.report))}")
    return text


def table(result: CheckResult) -> Table:
    """Return a table with one row per class, and one for all classes."""
    columns = Table(box=None, pad_edge=False)
    for heading in ("class", "verdict"):
        columns.add_column(heading, no_wrap=True)
    for heading in ("n", "acc.", "gap", "attr.", result.plan.removed, "skill", "excluded above", "more pictures"):
        columns.add_column(heading, no_wrap=" " not in heading, justify="right")
    for name, measures in [*result.classes.items(), (OVERALL, result.overall)]:
        figures = words.figures(measures, result.judged[name])
        title, verdict, *numbers, more = figures.values()
        columns.add_row(
            Text(printable(title)),
            Text(verdict, _STYLES[result.judged[name].shown]),
            str(measures.pictures),
            *numbers,
            more,
        )
    return columns
