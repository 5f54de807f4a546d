"""A check as Markdown, for a pull request; and as annotations, where GitHub runs it."""

from __future__ import annotations

import re

from camkit.background.check import CheckResult
from camkit.background.measures import Measures, weakest
from camkit.background.report import words
from camkit.background.verdict import Judged

_SIGNS = {"FAIL": "❌", "WARN": "⚠️", "PASS": "✅", "INCONCLUSIVE": "❔"}
_MOST_REASONS = 6


def render(result: CheckResult) -> str:
    """Return the summary: the verdict, why, and a line per class."""
    lines = [f"## {_SIGNS[result.verdict]} {result.verdict}: {_plain(words.sentence(result))}", ""]
    lines += [f"- {_plain(reason)}" for reason in result.reasons[:_MOST_REASONS]]
    if len(result.reasons) > _MOST_REASONS:
        lines.append(f"- and {len(result.reasons) - _MOST_REASONS} more, in report.html")
    lines += [_plain(since)] if (since := words.since(result)) else []
    lines += [
        "",
        "| class | verdict | pictures | accuracy | background gap | attraction "
        f"| {words.without_object(result.plan)} | skill |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(_line(one, result.judged[name]) for name, one in result.classes.items()),
        _line(result.overall, result.judged[""]),
        "",
        *(f"- {_plain(warning)}" for warning in (*result.warnings, *result.sanity.remarks)),
        "",
        words.CAVEAT,
        "",
        *(f"- {_plain(line)}" for line in words.REFERENCES),
        "",
    ]
    return "\n".join(lines)


def _line(one: Measures, judged: Judged) -> str:
    gap, drawn, removed = weakest(one.gap), weakest(one.attraction), weakest(one.sufficiency)
    cells = [
        _plain(words.shown_name(one)),
        judged.verdict + (" (waived)" if judged.waived else ""),
        f"{one.pictures} ({one.tested} tested)",
        words.share(one.accuracy.value),
        words.NONE
        if gap is None
        else f"{words.number(gap.effect.value)} [{words.number(gap.effect.low)}, {words.number(gap.effect.high)}]",
        words.NONE if drawn is None else words.number(drawn.effect.value),
        words.NONE if removed is None else words.number(removed.effect.value),
        words.NONE if one.skill is None else words.number(one.skill.value),
    ]
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))


def workflow_commands(result: CheckResult) -> list[str]:
    """Return the workflow commands that GitHub turns into annotations: an error per failing class, else a warning."""
    found = []
    for name, judged in result.judged.items():
        if judged.verdict == "PASS":
            continue
        kind = "error" if judged.verdict == "FAIL" and not judged.waived else "warning"
        why = "; ".join(reason.text for reason in judged.reasons)
        found.append(f"::{kind} title={_property(f'camkit: {judged.verdict} {name}'.rstrip())}::{_data(why)}")
    return found


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
