"""A check as one HTML file that loads nothing else: no network, no fonts, no foreign scripts."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from camkit.background.answers import found_if
from camkit.background.effects import LEVELS, OVERALL, EffectName, Level, Measures
from camkit.background.kinds import KindPair, Kinds
from camkit.background.reasons import in_words, noun
from camkit.background.report import words
from camkit.background.result import CheckResult
from camkit.background.rule import SHARES, VERDICTS, Judgement, worst_first
from camkit.background.showcase import Showcase
from camkit.drawing.encode import as_address
from camkit.kit import wording
from camkit.kit.pages import templates
from camkit.kit.statistics import Estimate

_MOST_LISTED = 100
"""Classes whose reasons are listed, and unusable pictures, to keep the page readable."""

_VERDICT_ORDER = {"FAIL": 0, "INCONCLUSIVE": 1, "WARN": 2, "not decided": 3, "PASS": 4}

_SORTS_FIRST = -9.0
"""The sort key of a missing number: below every share and difference of shares."""

_COLUMNS = (
    (
        "class",
        "The class of the pictures. The last row stands for all classes together, and for the verdict on the model.",
    ),
    (
        "verdict",
        "FAIL, INCONCLUSIVE, WARN or PASS; the tables below say when each applies. A class is not decided if nothing "
        "was found, but its own pictures cannot exclude an effect above the limit; only --strict requires that.",
    ),
    ("pictures", "Pictures that the model answered. Below: how many of them took part in the experiment."),
    ("accuracy", "Share of right answers to the unedited pictures. Below: its 95% interval."),
    (
        "background gap",
        "Accuracy on backgrounds of the object's own class minus accuracy on backgrounds of other classes. Below, as "
        "for all effects: the estimate with each way of filling holes, whose mean counts, the 95% interval and, if the "
        "effect counts, the level.",
    ),
    ("own / other", "The two accuracies behind the gap: on backgrounds of the own class, and of other classes."),
    (
        "attraction",
        "How often objects of other classes get this class's name on its backgrounds, minus how often they get it on "
        "other backgrounds. All classes together have no attraction, because their gap measures the same.",
    ),
    (
        "",
        "Sufficiency: how far the accuracy without the object is above that of the same answers shuffled. For a single "
        "class it has no level and does not count, because a model that sees no object may always name the same class.",
    ),
    (
        "skill",
        "0: the heat lies on the object no more than the heat of other pictures does. 1: as much as a perfect map on "
        "the grid of the heatmap. The skill is above 1 if the heat concentrates on the middle of the object, because a "
        "perfect map also covers the edge, where cells of the grid reach beyond the object. Below: the 95% interval.",
    ),
    (
        "energy",
        "Share of the heat on the object. Below: the same for a map that ignores the picture, and for a perfect map.",
    ),
)
"""Title and explanation of each column; the empty title depends on what the experiment removes."""

_INTERVALS = (
    "The interval of an effect is never narrower than its number of pictures allows: if no answer changes in 40 "
    "pictures, changes in 9% of all pictures are still possible. A dash means that something was not measured."
)


@dataclass(frozen=True)
class _Cell:
    """A cell of the table: its text, its sort key, the lines of small print below, and the CSS class of a verdict."""

    text: str
    sort: float | int | str | None = None
    small_print: tuple[str, ...] = ()
    verdict: str = ""


def render(result: CheckResult, showcase: Showcase | None = None) -> str:
    """Return the page. The model runs once more on the pictures that the page shows with their edits.

    Args:
        result: the check.
        showcase: its pictures; None draws them.
    """
    environment = templates("camkit.background.report")
    environment.filters["address"] = functools.partial(as_address, kind="jpeg")
    script = environment.get_template("check.js").render()
    plan, showcase = result.plan, showcase or Showcase(result)
    removed, flips = plan.removed, showcase.flips()
    page: str = environment.get_template("check.html").render(
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        verdict=result.verdict,
        model=plan.model.name,
        data=plan.data.root.name,
        sentence=words.sentence(result),
        why=words.why_undecided(result),
        steps=words.next_steps(result),
        reliability=words.reliability(result.verdict),
        labs=words.LABS,
        labs_note=words.LABS_NOTE,
        triptychs=showcase.triptychs,
        chart=_chart(result),
        chance="" if (known := result.overall.sufficiency.mean) is None else wording.share(known.accuracies[1]),
        found_if=found_if(plan.settings.check.threshold) if plan.detects else "",
        untested=words.untested(result),
        reasons=result.reasons,
        change=words.change_since_baseline(result),
        flips=flips,
        flips_left=0 if result.change is None else len(result.change.flips) - len(flips),
        outlined=plan.with_regions,
        reasons_by_class=[
            (name, [reason.text for reason in judgement.reasons])
            for name, judgement in result.judged.items()
            if name != OVERALL and judgement.shown != "PASS"
        ][:_MOST_LISTED],
        thumbnails=showcase.thumbnails(),
        facts=[*plan.data.facts, f"classes were matched {plan.matched.how}", *plan.data.left_out_in_words],
        warnings=[*result.warnings, *result.sanity.remarks],
        columns=[{"title": title or removed, "help": explanation} for title, explanation in _COLUMNS],
        rows=[_row(measures, result.judged[name]) for name, measures in result.classes.items()],
        total=_row(result.overall, result.judged[OVERALL]),
        intervals=_INTERVALS,
        levels=_levels(),
        verdicts=VERDICTS,
        limits=_limits(result),
        kinds=_kinds(result),
        strips=showcase.strips,
        references=words.REFERENCES,
        caveat=words.caveat(result),
        details=_details(result),
        failures=list(result.failures.items())[:_MOST_LISTED],
        failures_left=max(0, len(result.failures) - _MOST_LISTED),
    )
    return page


def _levels() -> list[tuple[Level, list[str]]]:
    """Return the rows of the table of levels: when each applies, by scope."""
    when = [{rule.level: rule.when for rule in rules} for rules in LEVELS.values()]
    return [(level, [of_scope.get(level, "never") for of_scope in when]) for level in when[0]]


_LEAST_AXIS = (-0.2, 0.4)
"""The chart's axis spans at least this, so that small effects look small."""


def _chart(result: CheckResult) -> dict[str, Any]:
    """Return the effects of all classes and of each class with their places on an axis, in percent of its length."""
    names = [OVERALL, *worst_first({name: result.judged[name] for name in result.classes})][: _MOST_LISTED + 1]
    effects = [
        (name, effect, effect.mean)
        for name in names
        for effect in result.judged[name].effects.values()
        if effect.mean is not None and (name != OVERALL or effect.name != "attraction")
    ]
    ends = [end for _, effect, _ in effects for end in (effect.value, effect.low, effect.high) if math.isfinite(end)]
    left, right = min([*ends, _LEAST_AXIS[0]]), max([*ends, _LEAST_AXIS[1]])

    def place(value: float) -> float:
        return round(100 * (value - left) / (right - left), 2)

    rows: dict[str, list[dict[str, Any]]] = {}
    for name, effect, mean in effects:
        low, high = (place(end) if math.isfinite(end) else place(effect.value) for end in (effect.low, effect.high))
        title = noun(effect) if name == OVERALL else f"{name}: {result.judged[name].shown}"
        mark = {
            "name": noun(effect),
            "level": effect.level,
            "value": place(effect.value),
            "low": low,
            "width": round(high - low, 2),
            "limit": place(effect.limit),
            "words": in_words(effect),
            "figures": wording.number(effect.value) + "".join(f" ({text})" for text in _interval(mean.effect)),
        }
        rows.setdefault(f"all classes: {title}" if name == OVERALL else title, []).append(mark)
    return {"rows": list(rows.items()), "zero": place(0.0)}


def _row(measures: Measures, judgement: Judgement) -> list[_Cell]:
    gap = measures.gap.mean
    verdict = judgement.shown
    accuracies = wording.NONE if gap is None else " / ".join(wording.share(share) for share in gap.accuracies)
    skill, energy = measures.skill, measures.energy
    waived = (f"waived: {judgement.waived}",) if judgement.waived else ()
    return [
        _Cell(measures.name or "all classes"),
        _Cell(verdict, _VERDICT_ORDER[verdict], waived, verdict),
        _Cell(str(measures.pictures), measures.pictures, (f"{measures.tested} tested",)),
        _Cell(
            wording.share(measures.accuracy.value),
            _sort_key(measures.accuracy.value),
            _interval(measures.accuracy, percent=True),
        ),
        _effect("gap", measures, judgement),
        _Cell(accuracies, _SORTS_FIRST if gap is None else gap.accuracies[1]),
        _effect("attraction", measures, judgement),
        _effect("sufficiency", measures, judgement),
        _Cell(wording.NONE, _SORTS_FIRST)
        if skill is None
        else _Cell(wording.number(skill.value), _sort_key(skill.value), _interval(skill)),
        _Cell(wording.NONE, _SORTS_FIRST)
        if energy is None
        else _Cell(
            wording.number(energy),
            energy,
            (f"{wording.number(measures.shuffled)} to {wording.number(measures.ceiling)}",),
        ),
    ]


def _kinds(result: CheckResult) -> dict[str, Any]:
    """Return the accuracy of each class on each kind of background."""
    found = result.kinds or Kinds()
    return {
        "sentences": [] if result.kinds is None else found.sentences,
        "on_top": bool(found.bad) and result.verdict != "PASS",
        "table": _pairs(found),
        "titles": [f"{kind.name}: {kind.pictures} pictures, {kind.origin}" for kind in found.kinds],
    }


def _pairs(found: Kinds) -> list[list[_Cell]]:
    """Return a row for each class: its accuracy on each kind."""
    return [
        [_Cell(label), *(_pair(found.pair(label, kind.name), found) for kind in found.kinds)]
        for label in sorted({pair.label for pair in found.pairs})
    ]


def _pair(pair: KindPair | None, found: Kinds) -> _Cell:
    """Return the accuracy of a class on a kind, with the counts, the interval and a mark for the worst pair."""
    if pair is None:
        return _Cell(wording.NONE)
    is_worst = pair == found.worst
    lines = (f"{pair.right} of {pair.shown}", *_interval(pair.accuracy), *(("worst pair",) if is_worst else ()))
    return _Cell(wording.number(pair.accuracy.value), None, lines, "WARN" if pair in found.bad else "")


def _effect(name: EffectName, measures: Measures, judgement: Judgement) -> _Cell:
    """Return an effect with its interval and, if it counts for the verdict, its level."""
    effect = measures.effects.get(name)
    if effect is None or effect.mean is None:
        return _Cell(wording.NONE, _SORTS_FIRST)
    level = (judgement.effects[name].level,) if name in judgement.effects else ()
    fills = " / ".join(wording.number(of_fill.effect.value) for of_fill in effect.by_fill.values())
    several = (fills,) if len(effect.by_fill) > 1 else ()
    lines = (*several, *_interval(effect.mean.effect), *level)
    return _Cell(wording.number(effect.value), _sort_key(effect.value), lines)


def _sort_key(value: float) -> float:
    """Return a value to sort by; NaN and infinity come first."""
    return value if math.isfinite(value) else _SORTS_FIRST


def _interval(estimate: Estimate, *, percent: bool = False) -> tuple[str, ...]:
    """Return the interval as a line of small print; nothing if there is none."""
    show = wording.share if percent else wording.number
    low, high = show(estimate.low), show(estimate.high)
    return () if wording.NONE in (low, high) else (f"{low} to {high}",)


def _limits(result: CheckResult) -> str:
    """Return the limits and the significance level as a paragraph."""
    settings, with_regions = result.plan.settings, result.plan.with_regions
    limits = settings.limits
    strict = "this check was strict" if limits.strict else "this check was not strict"
    text = (
        f"The limits: gap {limits.gap:g}, attraction {limits.attraction:g}, sufficiency {limits.sufficiency:g}. "
        f"The significance level is {limits.alpha:.0%}: {SHARES['gap']:.0%} of it for the gap of all classes, "
        f"{SHARES['cues']:.0%} for the cues and {SHARES['classes']:.0%} for the effects of the classes, the last two "
        f"with Holm's correction. The heat alone never fails a model; {strict}."
    )
    if with_regions or settings.check.ring_is_background:
        return text
    return f"{text} Because this data has no regions, an effect only warns, unless ring_is_background is set."


def _details(result: CheckResult) -> list[tuple[str, str]]:
    check, sanity = result.plan.settings.check, result.sanity
    heat, edits = result.plan.forwards
    return [
        *words.provenance(result),
        ("layer of the heat", f"{result.layer} ({result.layer_reason})"),
        ("method", result.method),
        ("pictures shown to the model", f"{heat} as they are, up to {edits} for the experiment"),
        ("correlation with HiResCAM's maps", wording.number(sanity.agreement)),
        ("correlation with random weights' maps", wording.number(sanity.randomised)),
        ("seed", str(check.seed)),
    ]
