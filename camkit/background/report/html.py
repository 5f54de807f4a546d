"""A check as one HTML file that needs nothing else: no network, no fonts, no scripts of others."""

from __future__ import annotations

import base64
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from camkit.background.check import CheckResult
from camkit.background.measures import Measures, Tested, weakest
from camkit.background.report import words
from camkit.background.showcase import Panel, Strip
from camkit.background.statistics import Estimate
from camkit.background.verdict import Judged
from camkit.drawing.encode import encode
from camkit.types import Pixels

_MOST_REASONS = 8
_MOST_FAILURES = 50
_MOST_WHY = 100

_COLUMNS = (
    ("class", "the class of the pictures"),
    ("verdict", "FAIL, INCONCLUSIVE, WARN or PASS"),
    ("pictures", "pictures with a map; below, how many took part in the experiment"),
    ("accuracy", "share of right answers, with its 95 % interval"),
    ("background gap", "accuracy on backgrounds of its own class minus that on others'; of the fill that shows less"),
    ("own / others'", "the two accuracies"),
    (
        "attraction",
        "how often other classes' objects are named so on its backgrounds, minus how often elsewhere; of the fill that "
        "shows less",
    ),
    ("", "how far right answers without the object are above chance; of the fill that shows less"),
    ("skill", "0: heat lies on the object no more than by chance; 1: as good as the grid allows"),
    ("energy", "share of the heat on the object; below, that of a blind map and of a perfect one"),
)


@dataclass(frozen=True)
class _Cell:
    text: str
    sort: float | int | str | None = None
    range: str = ""
    mark: str = ""


def render(result: CheckResult, thumbnails: list[Panel], strips: list[Strip]) -> str:
    """Return the page."""
    environment = Environment(
        loader=PackageLoader("camkit.background.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    script = environment.get_template("check.js").render()
    page: str = environment.get_template("check.html").render(
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        verdict=result.verdict,
        model=result.plan.model.name,
        data=result.plan.data.root.name,
        sentence=words.sentence(result),
        reasons=result.reasons[:_MOST_REASONS],
        reasons_left=max(0, len(result.reasons) - _MOST_REASONS),
        since=words.since(result),
        outlined=result.plan.with_regions,
        why=[
            (name, [reason.text for reason in one.reasons])
            for name, one in result.judged.items()
            if name and one.verdict != "PASS"
        ][:_MOST_WHY],
        thumbnails=[{"title": panel.title, "image": _embedded(panel.pixels)} for panel in thumbnails],
        facts=[
            *result.plan.data.facts,
            f"classes were matched {result.plan.matched.how}",
            *words.left_out(result.plan),
        ],
        warnings=[*result.warnings, *result.sanity.remarks],
        columns=[{"title": title or words.without_object(result.plan), "help": text} for title, text in _COLUMNS],
        rows=[_row(one, result.judged[name]) for name, one in result.classes.items()],
        total=_row(result.overall, result.judged[""]),
        explained=_explained(result),
        strips=[_strip(strip) for strip in strips],
        references=words.REFERENCES,
        caveat=words.CAVEAT,
        details=_details(result),
        failures=list(result.failures.items())[:_MOST_FAILURES],
    )
    return page


def _embedded(pixels: Pixels) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(encode(pixels, '.jpg')).decode()}"


def _strip(strip: Strip) -> dict[str, Any]:
    panels = []
    for panel in strip.panels:
        says = "" if panel.probability is None else f"{panel.answer}; {strip.row.label} {panel.probability:.0%}"
        alt = f"{panel.title} of {strip.row.name}" + (f": the model says {says}" if says else "")
        share = 0 if panel.probability is None else round(100 * panel.probability)
        panels.append(
            {"title": panel.title, "image": _embedded(panel.pixels), "says": says, "alt": alt, "share": share}
        )
    return {"title": strip.sentence.split(";")[0], "panels": panels}


def _row(one: Measures, judged: Judged) -> list[_Cell]:
    gap, removed = weakest(one.gap), weakest(one.sufficiency)
    order = {"FAIL": 0, "INCONCLUSIVE": 1, "WARN": 2, "PASS": 3}[judged.verdict]
    accuracies = words.NONE if gap is None else " / ".join(words.share(part) for part in gap.accuracies)
    return [
        _Cell(words.shown_name(one)),
        _Cell(judged.verdict, order, f"waived: {judged.waived}" if judged.waived else "", judged.verdict),
        _Cell(str(one.pictures), one.pictures, f"{one.tested} tested"),
        _Cell(words.share(one.accuracy.value), _sortable(one.accuracy.value), _range(one.accuracy, percent=True)),
        _effect(gap),
        _Cell(accuracies, -9.0 if gap is None else gap.accuracies[1]),
        _effect(weakest(one.attraction)),
        _effect(removed),
        _Cell(
            words.number(None if one.skill is None else one.skill.value),
            -9.0 if one.skill is None else one.skill.value,
            "" if one.skill is None else _range(one.skill),
        ),
        _Cell(
            words.number(one.energy),
            -9.0 if one.energy is None else one.energy,
            "" if one.energy is None else f"{words.number(one.shuffled)} … {words.number(one.ceiling)}",
        ),
    ]


def _effect(tested: Tested | None) -> _Cell:
    if tested is None:
        return _Cell(words.NONE, -9.0)
    return _Cell(words.number(tested.effect.value), tested.effect.value, _range(tested.effect))


def _sortable(value: float) -> float:
    """Return a value that can be sorted by: those without a number come first."""
    return value if math.isfinite(value) else -9.0


def _range(estimate: Estimate, *, percent: bool = False) -> str:
    show = words.share if percent else words.number
    low, high = show(estimate.low), show(estimate.high)
    return "" if words.NONE in (low, high) else f"{low} … {high}"


def _explained(result: CheckResult) -> str:
    limits = result.plan.settings.limits
    return (
        f"Small figures are 95 % intervals. A model fails where a gap is above {limits.gap:g}, an attraction above "
        f"{limits.attraction:g}, or where, over all classes, answers without the object are right by more than "
        f"{limits.sufficiency:g} above chance: each by more than chance explains ({limits.alpha:.0%}, all classes "
        "considered at once) and with every way of filling the hole. Heat alone never fails a model."
    )


def _details(result: CheckResult) -> list[tuple[str, str]]:
    check, sanity = result.plan.settings.check, result.sanity
    heat, edits = result.plan.forwards
    return [
        ("layer", f"{result.layer} ({result.layer_reason})"),
        ("method", check.method),
        ("pictures through the model", f"{heat} for the heat, up to {edits} for the experiment"),
        ("agreement with hirescam", words.number(sanity.agreement)),
        ("correlation with random weights' maps", words.number(sanity.randomised)),
        ("seed", str(check.seed)),
        ("weights", result.hashes.get("weights", "")[:16]),
        ("pictures", result.hashes.get("data", "")[:16]),
        ("camkit", words.VERSION),
    ]
