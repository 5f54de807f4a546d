"""A check on a terminal: what was understood, what it will cost, the verdict."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from camkit.background.check import CheckResult
from camkit.background.cost import Cost
from camkit.background.measures import weakest
from camkit.background.plan import Plan
from camkit.background.report import words

_STYLES = {"FAIL": "bold red", "WARN": "yellow", "PASS": "bold green", "INCONCLUSIVE": "cyan"}
_MOST = 6


def understood(plan: Plan) -> Text:
    """Return what was found: pictures, regions, classes, and what is left out."""
    return Text("\n".join([*plan.data.facts, f"classes matched {plan.matched.how}", *words.left_out(plan)]))


def announced(plan: Plan, cost: Cost) -> Text:
    """Return how many pictures will be taken through the model, and about how long that takes."""
    heat, edits = plan.forwards
    return Text(f"{heat} pictures for the heat and up to {edits} edits through the model: {cost.words}")


def verdict(result: CheckResult) -> Text:
    """Return the verdict, why, and where the report is."""
    text = Text.assemble((result.verdict, _STYLES[result.verdict]), f": {words.sentence(result)}\n")
    for reason in result.reasons[:_MOST]:
        text.append(f"  {reason}\n")
    if len(result.reasons) > _MOST:
        text.append(f"  and {len(result.reasons) - _MOST} more\n")
    for warning in (*result.warnings, *result.sanity.remarks):
        text.append(f"  note: {warning}\n", "yellow")
    if result.failures:
        text.append(
            f"  {len(result.failures)} pictures could not be used, such as {next(iter(result.failures))}\n", "yellow"
        )
    if since := words.since(result):
        text.append(f"  {since}\n")
    if result.report is not None:
        text.append(f"  wrote {result.report}")
    return text


def table(result: CheckResult) -> Table:
    """Return a row per class."""
    drawn = Table(box=None, pad_edge=False)
    for heading in (
        "class",
        "verdict",
        "n",
        "acc.",
        "gap",
        "attr.",
        words.without_object(result.plan),
        "skill",
    ):
        whole = heading != words.without_object(result.plan)  # whose heading may take two lines
        drawn.add_column(heading, no_wrap=whole, justify="left" if heading in ("class", "verdict") else "right")
    for name, one in [*result.classes.items(), ("", result.overall)]:
        judged = result.judged[name]
        gap, attraction, removed = weakest(one.gap), weakest(one.attraction), weakest(one.sufficiency)
        drawn.add_row(
            Text(words.shown_name(one)),
            Text(judged.verdict + (" (waived)" if judged.waived else ""), _STYLES[judged.verdict]),
            str(one.pictures),
            words.share(one.accuracy.value),
            words.number(None if gap is None else gap.effect.value),
            words.number(None if attraction is None else attraction.effect.value),
            words.number(None if removed is None else removed.effect.value),
            words.number(None if one.skill is None else one.skill.value),
        )
    return drawn
