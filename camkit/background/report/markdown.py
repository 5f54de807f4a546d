"""A check as Markdown for a pull request, and as annotations for a workflow on GitHub."""

from __future__ import annotations

from camkit.background.effects import OVERALL, Measures
from camkit.background.report import words
from camkit.background.result import CheckResult
from camkit.background.rule import Judgement
from camkit.background.showcase import Showcase
from camkit.errors import as_markdown, printable
from camkit.kit.wording import number

_SIGNS = {"FAIL": "❌", "WARN": "⚠️", "PASS": "✅", "INCONCLUSIVE": "❔"}


def render(result: CheckResult, showcase: Showcase | None = None) -> str:
    """Return the summary: the verdict, the reasons, the picture and its answers in words, and a row per class.

    Args:
        result: the check.
        showcase: its pictures; None draws them.
    """
    lines = [f"## {_SIGNS[result.verdict]} {result.verdict}: {as_markdown(words.sentence(result))}", ""]
    lines += [f"{as_markdown(why)}.", ""] if (why := words.why_undecided(result)) else []
    lines += [f"- **Next:** {as_markdown(step)}" for step in words.next_steps(result)]
    lines += [f"- {as_markdown(reason)}" for reason in result.reasons[: words.MOST_REASONS]]
    if len(result.reasons) > words.MOST_REASONS:
        lines.append(f"- and {len(result.reasons) - words.MOST_REASONS} more, in {words.PAGE}")
    lines += [f"- {as_markdown(text)}" for text in (result.kinds.sentences if result.kinds else ())]
    lines += [f"- {as_markdown(change)}"] if (change := words.change_since_baseline(result)) else []
    lines += [
        "",
        f"![The objects on their own and on other backgrounds, and without them: {words.PICTURE}]({words.PICTURE})",
        "",
        *(f"- {as_markdown(strip.sentence)}" for strip in (showcase or Showcase(result)).triptychs),
        "",
        "| class | verdict | pictures | accuracy | background gap | attraction "
        f"| {result.plan.removed} | skill | excluded above | more pictures |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(_row(measures, result.judged[name]) for name, measures in result.classes.items()),
        _row(result.overall, result.judged[OVERALL]),
        "",
        words.EXCLUSIONS,
        "",
        *(f"- {as_markdown(warning)}" for warning in (*result.warnings, *result.sanity.remarks)),
        "",
        words.caveat(result),
        "",
        *(f"- {as_markdown(line)}" for line in words.REFERENCES),
        "",
    ]
    return "\n".join(lines)


def _row(measures: Measures, judgement: Judgement) -> str:
    title, verdict, accuracy, gap, *others = words.figures(measures, judgement).values()
    if measures.gap.mean is not None:
        gap += f" [{number(measures.gap.low)}, {number(measures.gap.high)}]"
    pictures = f"{measures.pictures} ({measures.tested} tested)"
    return f"| {' | '.join((as_markdown(title), verdict, pictures, accuracy, gap, *others))} |"


def workflow_commands(result: CheckResult) -> list[str]:
    """Return GitHub's workflow commands: an error for each FAIL, a warning for each other verdict but PASS."""
    commands = [f"::error title=camkit: worse than the baseline::{_as_message(text)}" for text in result.regressed]
    for name, judgement in result.judged.items():
        if judgement.verdict == "PASS":
            continue
        level = "error" if judgement.verdict == "FAIL" and not judgement.waived else "warning"
        title = f"camkit: {judgement.verdict} {name}".rstrip()
        why = "; ".join(reason.text for reason in judgement.reasons)
        commands.append(f"::{level} title={_as_property(title)}::{_as_message(why)}")
    return commands


def _as_message(text: str) -> str:
    return printable(text).replace("%", "%25")


def _as_property(text: str) -> str:
    return _as_message(text).replace(":", "%3A").replace(",", "%2C")
