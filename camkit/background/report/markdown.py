"""A check as Markdown for a pull request, and as annotations for a workflow on GitHub."""

from __future__ import annotations

from markupsafe import Markup

from camkit.background.report import words
from camkit.background.result import CheckResult
from camkit.background.showcase import Showcase
from camkit.errors import as_markdown, printable
from camkit.kit.pages import templates
from camkit.kit.wording import number

_SIGNS = {"FAIL": "❌", "WARN": "⚠️", "PASS": "✅", "INCONCLUSIVE": "❔"}


def render(result: CheckResult, showcase: Showcase | None = None) -> str:
    """Return the summary: the verdict, the reasons, the picture and its answers in words, and a row per class.

    Args:
        result: the check.
        showcase: its pictures; None draws them.
    """
    environment = templates("camkit.background.report")
    environment.filters["markdown"] = lambda text: Markup(as_markdown(text))  # is not escaped again
    summary: str = environment.get_template("summary.md").render(
        result=result,
        sign=_SIGNS[result.verdict],
        triptychs=(showcase or Showcase(result)).triptychs,
        words=words,
        number=number,
    )
    return summary


def workflow_commands(result: CheckResult) -> list[str]:
    """Return GitHub's workflow commands: an error for each FAIL, a warning for each other verdict but PASS."""

    def escaped(text: str, signs: str = "%") -> str:
        for sign in signs:
            text = text.replace(sign, f"%{ord(sign):02X}")
        return text

    texts = map(printable, result.regressed)
    commands = [f"::error title=camkit: worse than the baseline::{escaped(text)}" for text in texts]
    for name, judgement in result.judged.items():
        if judgement.verdict == "PASS":
            continue
        level = "error" if judgement.verdict == "FAIL" and not judgement.waived else "warning"
        title = f"camkit: {judgement.verdict} {name}".rstrip()
        why = "; ".join(reason.text for reason in judgement.reasons)
        commands.append(f"::{level} title={escaped(printable(title), '%:,')}::{escaped(printable(why))}")
    return commands
