"""The words that all reports of a check share: the verdict in a sentence, the caveat, reference values, numbers."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

from camkit.background.effects import CUE_NAMES, OVERALL, EffectName, MeasuredEffect, Measures
from camkit.background.plan import Plan
from camkit.background.reasons import WITH_ARTICLE
from camkit.background.result import CheckResult
from camkit.background.rule import Judgement, worst_first
from camkit.kit.statistics import Estimate
from camkit.kit.wording import NONE, VERSION, first_of, listed, number, share

PAGE = "report.html"
"""The file name of the report that people open."""

MOST_REASONS = 10
"""Reasons at the top of a report; the page lists the others below."""

_MAX_CLASSES = 5
"""Failing classes that the headline lists."""

CAVEAT = (
    "A pass does not prove the absence of shortcuts. It says that, on these pictures, the answers did not depend on "
    "the background by more than the limits, as far as pasting, removing and heatmaps can show. The check cannot see a "
    "shortcut that lies on the object itself, or one that is absent from these pictures."
)

EXCLUSIONS = (
    "Excluded above: every effect that counts for this row is at most this large, at 95% for each effect. More "
    "pictures: about how many more pictures the experiment needs to exclude all these effects above their limits, if "
    "the estimates stay as they are; 0 if they are excluded already, and a dash if no number of pictures would do."
)

REFERENCES = (
    "Background gap: ResNet-50 has 0.07 on ImageNet-9, and 0.002 after training on mixed backgrounds (Xiao et al. "
    "2020, arXiv:2006.09994).",
    "Skill: 0 means that the heat lies on the object no more than the heat of other pictures does; 1 means as much as "
    "the grid of the heatmap allows.",
)


def sentence(result: CheckResult) -> str:
    """Return the verdict as a sentence, without the word itself."""
    model, worst = result.plan.model.name, result.worst
    failing = [
        name
        for name, judgement in worst_first(result.judged).items()
        if judgement.verdict == "FAIL" and name != OVERALL and not judgement.waived
    ]
    if result.verdict == "FAIL" and failing:
        return f"{model} reads the background for {first_of(failing, _MAX_CLASSES)}"
    if result.verdict == "FAIL":
        read = [name for name, effect in result.judged[OVERALL].effects.items() if effect.level == "fail"]
        cues = [name for name in read if name in CUE_NAMES]
        if cues and len(cues) == len(read):
            return f"{model} reads the {' and the '.join(cues)} of the whole picture"
        return f"{model} reads the background"
    if result.verdict == "WARN":
        return f"{model} may ship, but look at {'the reasons' if worst == OVERALL else f'class {worst}'} first"
    if result.verdict == "PASS":
        return _pass_sentence(model, result.judged[OVERALL])
    return f"the check could not tell whether {model} reads the background"


def _pass_sentence(model: str, judgement: Judgement) -> str:
    """Say how large the effects of all classes together can be."""
    upper_ends = [
        f"{WITH_ARTICLE[name]} above {effect.excluded_above:.2f}"
        for name, effect in judgement.effects.items()
        if effect.excluded_above is not None
    ]
    if not upper_ends:
        return f"{model} was not tested, because every class is waived or exempt"
    are = "is" if len(upper_ends) == 1 else "are"
    return f"{model} depends on the background less than the limits allow: {listed(upper_ends)} {are} excluded at 95%"


def excluded_above(name: EffectName, judgement: Judgement) -> str:
    """Return the size above which an effect is excluded; a dash if there is none, or if the effect does not count."""
    return number(judgement.effects[name].excluded_above) if name in judgement.effects else NONE


def all_excluded_above(judgement: Judgement) -> str:
    """Return the size above which every effect that counts is excluded; a dash if there is none."""
    sizes = [effect.excluded_above for effect in judgement.effects.values()]
    known = [size for size in sizes if size is not None]
    return number(max(known)) if known and len(known) == len(sizes) else NONE


def more_pictures(judgement: Judgement) -> str:
    """Return how many more pictures would exclude all effects above their limits, such as "0" or "about 43".

    A dash stands for effects that no number of pictures would exclude.
    """
    more = [effect.more_pictures for effect in judgement.effects.values()]
    known = [count for count in more if count is not None]
    if not more or len(known) < len(more):
        return NONE
    return f"about {max(known)}" if max(known) else "0"


def shown(name: EffectName, measures: Measures, judgement: Judgement) -> MeasuredEffect | None:
    """Return an effect as tables show it: with the fill that decides, or with the weakest if none decides."""
    if name in judgement.effects:
        return judgement.effects[name].decisive
    return measures.effects[name].weakest if name in measures.effects else None


def figures(measures: Measures, judgement: Judgement) -> dict[str, str]:
    """Return the figures of a class, or of all classes together, as the tables in text show them."""
    effects: tuple[EffectName, ...] = ("gap", "attraction", "sufficiency")
    effect_of = {name: shown(name, measures, judgement) for name in effects}
    return {
        "class": measures.name or "all classes",
        "verdict": judgement.verdict + (" (waived)" if judgement.waived else ""),
        "accuracy": share(measures.accuracy.value),
        **{name: NONE if effect is None else number(effect.effect.value) for name, effect in effect_of.items()},
        "skill": NONE if measures.skill is None else number(measures.skill.value),
        "excluded above": all_excluded_above(judgement),
        "more pictures": more_pictures(judgement),
    }


def change_since_baseline(result: CheckResult) -> str:
    """Return what changed since the baseline; "" without a baseline."""
    change = result.change
    if change is None:
        return ""
    named = (("gap", change.gap), ("skill", change.skill))
    parts = [f"{name} {_change(estimate)}" for name, estimate in named if estimate is not None]
    return f"change since the baseline, on {change.pictures} pictures: {', '.join(parts) or 'nothing to compare'}"


def _change(estimate: Estimate) -> str:
    """Return a change with its interval. An interval of 0 to 0 would look like an error, so it is put into words."""
    if all(round(value, 2) == 0 for value in (estimate.value, estimate.low, estimate.high)):
        return "unchanged (by less than 0.005)"
    return f"{estimate.value:+.2f} (95% interval {number(estimate.low)} to {number(estimate.high)})"


def provenance(result: CheckResult) -> list[tuple[str, str]]:
    """Return what a reader needs to repeat the check: the date, the command, the weights and the versions."""
    run, hashes = result.run, result.hashes
    weights = result.plan.model.weights
    note = result.plan.model.note
    named = [] if note is None else [("how the model was loaded", note)]
    named += [] if weights is None else [("weights", _weights(weights, result.plan))]
    return [
        ("date", "unknown" if run is None else f"{run.started:%Y-%m-%d %H:%M} UTC, {run.seconds:.0f} s"),
        ("command", (run.command if run else "") or "camkit.check(...), called from Python"),
        *named,
        ("hash of the weights in the model", hashes.get("weights", "")),
        ("hash of the pictures and regions", hashes.get("data", "")),
        ("hash of the settings", hashes.get("settings", "")),
        ("versions", f"camkit {VERSION}, torch {version('torch')}, Python {platform.python_version()}"),
    ]


def _weights(weights: str, plan: Plan) -> str:
    """Return the name of a file of weights with its hash, or the name of published weights."""
    file = Path(weights)
    return f"{file.name} (SHA-256 {plan.files.of(file)})" if file.is_file() else weights
