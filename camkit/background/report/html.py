"""A check as one HTML file that loads nothing else: no network, no fonts, no foreign scripts."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from typing import Any

from markupsafe import Markup

from camkit.background.answers import found_if
from camkit.background.effects import LEVELS, OVERALL
from camkit.background.reasons import in_words, noun
from camkit.background.report import words
from camkit.background.result import CheckResult
from camkit.background.rule import SHARES, VERDICTS, worst_first
from camkit.background.showcase import Showcase
from camkit.drawing.encode import as_address
from camkit.kit import wording
from camkit.kit.pages import templates

_MOST_LISTED = 100
"""Classes whose reasons are listed, and unusable pictures, to keep the page readable."""

_VERDICT_ORDER = {"FAIL": 0, "INCONCLUSIVE": 1, "WARN": 2, "not decided": 3, "PASS": 4}

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


def render(result: CheckResult, showcase: Showcase | None = None) -> str:
    """Return the page. The model runs once more on the pictures that the page shows with their edits.

    Args:
        result: the check.
        showcase: its pictures; None draws them.
    """
    environment = templates("camkit.background.report")
    environment.filters |= {"address": functools.partial(as_address, kind="jpeg"), "share": wording.share}
    script = environment.get_template("check.js").render()
    plan, showcase = result.plan, showcase or Showcase(result)
    flips, (heat, edits) = showcase.flips(), plan.forwards
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
        columns=[{"title": title or plan.removed, "help": explanation} for title, explanation in _COLUMNS],
        classes=result.classes,
        overall=result.overall,
        judged=result.judged,
        verdict_order=_VERDICT_ORDER,
        number=wording.number,
        share=wording.share,
        intervals=_INTERVALS,
        levels=LEVELS,
        verdicts=VERDICTS,
        settings=plan.settings,
        shares=SHARES,
        kinds=result.kinds,
        strips=showcase.strips,
        references=words.REFERENCES,
        caveat=words.caveat(result),
        details=[
            *words.provenance(result),
            ("layer of the heat", f"{result.layer} ({result.layer_reason})"),
            ("method", result.method),
            ("pictures shown to the model", f"{heat} as they are, up to {edits} for the experiment"),
            ("correlation with HiResCAM's maps", wording.number(result.sanity.agreement)),
            ("correlation with random weights' maps", wording.number(result.sanity.randomised)),
            ("seed", str(plan.settings.check.seed)),
        ],
        failures=list(result.failures.items())[:_MOST_LISTED],
        failures_left=max(0, len(result.failures) - _MOST_LISTED),
    )
    return page


_LEAST_AXIS = (-0.2, 0.4)
"""The chart's axis spans at least this, so that small effects look small."""


def _chart(result: CheckResult) -> dict[str, Any]:
    """Return the effects of all classes and of each class with their places on an axis, in percent of its length."""
    names = [OVERALL, *worst_first({name: result.judged[name] for name in result.classes})][: _MOST_LISTED + 1]
    effects = [
        (name, effect)
        for name in names
        for effect in result.judged[name].effects.values()
        if effect.mean is not None and (name != OVERALL or effect.name != "attraction")
    ]
    ends = [end for _, effect in effects for end in (effect.value, effect.low, effect.high) if math.isfinite(end)]
    left, right = min([*ends, _LEAST_AXIS[0]]), max([*ends, _LEAST_AXIS[1]])

    def place(value: float) -> float:
        return round(100 * (value - left) / (right - left), 2)

    rows: dict[str, list[dict[str, Any]]] = {}
    for name, effect in effects:
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
            "figures": wording.number(effect.value),
            "interval": (effect.low, effect.high),
        }
        rows.setdefault(f"all classes: {title}" if name == OVERALL else title, []).append(mark)
    return {"rows": list(rows.items()), "zero": place(0.0)}
