"""The words that all reports of a check share: the verdict in a sentence, the caveat, reference values, numbers."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from camkit.background.effects import CUE_NAMES, OVERALL, Effect, EffectName, Level, Measures
from camkit.background.plan import Plan
from camkit.background.reasons import in_words
from camkit.background.result import CheckResult
from camkit.background.rule import Judgement, worst_first
from camkit.kit.statistics import Estimate
from camkit.kit.wording import NONE, VERSION, counted, first_of, number, share

PAGE = "report.html"
"""The file name of the report that people open."""

PICTURE = "evidence.png"
"""The file name of the picture for a pull request's comment."""

MOST_REASONS = 10
"""Reasons at the top of a report; the page lists the others below."""

_MAX_CLASSES = 5
"""Classes that the headline lists."""

LABS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "lose more than 15 points without their shortcut": {"FAIL": 107, "WARN": 0, "INCONCLUSIVE": 0, "PASS": 0},
        "lose 3 to 15 points": {"FAIL": 12, "WARN": 37, "INCONCLUSIVE": 5, "PASS": 1},
        "lose less than 3 points": {"FAIL": 1, "WARN": 19, "INCONCLUSIVE": 15, "PASS": 77},
        "lose less than 3 points without their mark, but 8 to 15 on natural backgrounds of other classes": {
            "FAIL": 2, "WARN": 10, "INCONCLUSIVE": 0, "PASS": 6,
        },
    }
)  # fmt: skip
"""The verdicts on networks whose truth is known, by what they lose; docs/results.md explains them."""

LABS_NOTE = (
    "172 networks saw drawn pictures, and 120 saw photographs. One network failed although it loses less than 3 "
    "points; it loses 38 points on one class."
)
"""What a reader of the table must know."""

BACKGROUND = "the background"
"""What a model relies on, if it is not a cue of the whole picture."""

MOST_STEPS = 3
"""Next steps that a report gives."""

EXCLUSIONS = (
    "Excluded above: every effect that counts for this row is at most this large, at 95% for each effect. More "
    "pictures: about how many more pictures the experiment needs to exclude all these effects above their limits, if "
    "the true effects are as estimated; the first number does so in about half of the checks, and the second in four "
    "of five; 0 if they are excluded already, and a dash if no number of pictures would do."
)

REFERENCES = (
    "Background gap: ResNet-50 has 0.07 on ImageNet-9, and 0.002 after training on mixed backgrounds (Xiao et al. "
    "2020, arXiv:2006.09994).",
    "Skill: 0 means that the heat lies on the object no more than the heat of other pictures does; 1 means as much as "
    "the grid of the heatmap allows.",
)


def sentence(result: CheckResult) -> str:
    """Return the verdict as a sentence for somebody who has never heard of the check, without the word itself."""
    model, judged = result.plan.model.name, result.judged
    if result.verdict == "FAIL":
        return f"{model} relies on {_what(result, 'fail')}: {_evidence(result, 'fail')}"
    if result.verdict == "WARN":
        untested = [name for name, own in judged.items() if own.findings.untested and not own.waived]
        named = first_of([name for name in untested if name != OVERALL], _MAX_CLASSES)
        beside = "" if not untested else f"; {named or 'a part of it'} could not be tested"
        evidence = _evidence(result, "warn") or judged[OVERALL].reasons[0].text
        return f"{model} may rely on {_what(result, 'warn')}: {evidence}{beside}"
    if result.verdict == "PASS":
        return _pass_sentence(model, judged)
    return f"these pictures do not show whether {model} relies on the background"


def _what(result: CheckResult, level: Level) -> str:
    """Return what the model relies on, by the effects at a level."""
    effects = _effects_at(result, level)
    cues = [effect.name for effect in effects if effect.name in CUE_NAMES]
    if cues and len(cues) == len(effects):
        return f"the {' and the '.join(cues)} of the whole picture"
    return BACKGROUND


def _effects_at(result: CheckResult, level: Level) -> list[Effect]:
    """List the effects at a level, of all classes together and of classes that are not waived."""
    counted = [own for own in result.judged.values() if not own.waived]
    return [effect for own in counted for effect in own.effects.values() if effect.level == level]


def _evidence(result: CheckResult, level: Level) -> str:
    """Return the finding at a level that says most, in words: the gap of all classes, or the largest of a class."""
    of_all = [effect for effect in result.judged[OVERALL].effects.values() if effect.level == level]
    largest = max(of_all or _effects_at(result, level), key=lambda effect: effect.value, default=None)
    return "" if largest is None else in_words(of_all[0] if of_all else largest)


def _pass_sentence(model: str, judged: Mapping[str, Judgement]) -> str:
    """Say how little the answers depend on the background, and which estimates lie above their limits nevertheless."""
    gap = judged[OVERALL].effects.get("gap")
    if gap is None or gap.mean is None:
        return f"{model} was not tested, because every class is waived or exempt"
    above = [
        name
        for name, own in worst_first(judged).items()
        if not own.waived and any(effect.value > effect.limit for effect in own.effects.values())
    ]
    if above:
        named = first_of(["all classes together" if name == OVERALL else name for name in above], _MAX_CLASSES)
        return f"{model} as a whole does not rely on the background; what was measured for {named} is uncertain"
    return f"no sign that {model} relies on the background: {in_words(gap)}"


def caveat(result: CheckResult) -> str:
    """Say what the check cannot show."""
    of_a_pass = (
        "A pass does not prove the absence of shortcuts. It says that, on these pictures, the answers did not depend "
        "on the background by more than the limits, as far as pasting, removing and heatmaps can show. "
    )
    return (
        f"{of_a_pass if result.verdict == 'PASS' else ''}The check cannot see a shortcut that lies on the object "
        "itself, or one that is absent from these pictures."
    )


def why_undecided(result: CheckResult) -> str:
    """Say in one sentence, with numbers, why the check is undecided; "" if it is not."""
    if result.exit_code("fail") != 3:
        return ""
    counting = {name: own for name in result.classes if (own := result.judged[name]).effects and not own.waived}
    untested = {name: own.reasons[-1].text for name, own in counting.items() if own.findings.untested}
    if not untested:
        return f"{result.reasons[0]}; do not ship on this evidence"
    alike = [
        f"{first_of([name for name, text in untested.items() if text == why], _MAX_CLASSES)} ({why})"
        for why in dict.fromkeys(untested.values())
    ]
    above = result.excluded_for_rest
    rest = "" if above is None else f"; over the other classes, effects above {number(above)} are excluded"
    which = f"{len(untested)} of {len(counting)} classes could not be tested: {first_of(alike, MOST_STEPS)}"
    return f"{which}{rest}; do not ship on this evidence"


def reliability(verdict: str) -> str:
    """Say how many networks whose truth is known got a verdict, and how many of these lose little."""
    total = sum(sum(counts.values()) for counts in LABS.values())
    given, clean = sum(counts[verdict] for counts in LABS.values()), LABS["lose less than 3 points"][verdict]
    return (
        f"Of {total} networks whose truth is known, {given} got {verdict}: {clean} with a loss of less than 3 points "
        f"of accuracy on other backgrounds, and {given - clean} with a larger one"
    )


def next_steps(result: CheckResult) -> list[str]:
    """Return what to do now; nothing if the model may ship."""
    if steps := _steps_to_decide(result):
        return steps
    if result.verdict == "FAIL":
        return [f"do not ship this model; {_remedy(result)}"]
    if result.verdict == "WARN":
        return [f"look at the pictures; more pictures of {_named(result)} would show how large the effect is"]
    return []


def _remedy(result: CheckResult) -> str:
    """Say how the owner of a model that failed can mend it."""
    if _what(result, "fail") != BACKGROUND:
        return f"train it on pictures that show each class with different {_what(result, 'fail').partition(' ')[2]}"
    if not result.plan.with_regions:
        return f"train it on pictures of {_named(result)} on the backgrounds of other classes"
    return (
        "try camkit mend, which trains its last layer anew; if that does not help, train it on the pictures that "
        "camkit mend --export writes"
    )


def _named(result: CheckResult) -> str:
    """Name the classes with the verdict on the whole model, the worst first; all classes if none has it.

    For a warning, these are all classes with an estimate above its limit: which of them is significant depends on the
    backgrounds that were drawn.
    """
    own = {name: judgement for name, judgement in result.judged.items() if name != OVERALL and not judgement.waived}

    def is_named(judgement: Judgement) -> bool:
        above = any(effect.value > effect.limit for effect in judgement.effects.values())
        return judgement.verdict == result.verdict or (result.verdict == "WARN" and above)

    named = [name for name, judgement in worst_first(own).items() if is_named(judgement)]
    return first_of(named or [*own], _MAX_CLASSES)


def _steps_to_decide(result: CheckResult) -> list[str]:
    """Return what to do if something could not be decided; nothing if everything was."""
    if result.exit_code("fail") != 3:
        return []
    gather = _to_gather(result)
    reasons = [reason for reason in result.judged[OVERALL].reasons if reason.step and not (gather and reason.lacks)]
    most = dict(sorted(reason.more for reason in reasons if reason.more))  # settles what fewer pictures would settle
    kept = [reason.step for reason in reasons if not reason.more or reason.more in most.items()]
    steps = [*gather, *dict.fromkeys(kept)]
    plan = result.plan
    left = sum(bool(item.objects) for item in plan.data.items) - len(plan.sample)
    others = [step for step in steps if not step.startswith("add ")]
    size = max(Counter(item.label for item in plan.data.items).values())
    if others != steps and plan.settings.run.quick and size >= plan.settings.check.per_class:
        steps = ["leave out --quick, and --per-class if you pass it, which take a sample of the pictures", *others]
    elif others != steps and left > 0:
        steps.insert(0, f"use {left} more pictures of this data: --per-class {size} (--most limits all classes)")
    return steps[:MOST_STEPS] or [f"read the reasons in {PAGE}"]


def _to_gather(result: CheckResult) -> list[str]:
    """Return one step for all classes that have too few pictures, nothing if none has."""
    lacking = {
        name: reason.lacks
        for name, own in worst_first(result.judged).items()
        if name != OVERALL and not own.waived
        for reason in own.reasons
        if reason.lacks
    }
    if not lacking:
        return []
    if len(set(lacking.values())) > 1:
        named = first_of([f"{lacks} of {name}" for name, lacks in lacking.items()], _MAX_CLASSES)
        return [f"add pictures with regions, at least {named}"]
    each = " each" if len(lacking) > 1 else ""
    lacks = next(iter(lacking.values()))
    return [f"add at least {lacks} pictures{each} of {first_of([*lacking], _MAX_CLASSES)}, with regions"]


def untested(result: CheckResult) -> list[str]:
    """Return for each cause how many pictures it kept from being tested, the most frequent first, with an example."""
    named: dict[str, list[str]] = defaultdict(list)
    for name, why in result.untested.items():
        named[why].append(name)
    causes = sorted(named.items(), key=lambda cause: -len(cause[1]))
    return [f"{counted(len(names), 'picture')} could not be tested, such as {names[0]}: {why}" for why, names in causes]


def all_excluded_above(judgement: Judgement) -> str:
    """Return the size above which every effect that counts is excluded; a dash if there is none."""
    sizes = [effect.excluded_above for effect in judgement.effects.values()]
    known = [size for size in sizes if size is not None]
    return number(max(known)) if known and len(known) == len(sizes) else NONE


def more_pictures(judgement: Judgement) -> str:
    """Return how many more pictures would exclude all effects above their limits, such as "0" or "43 to 240".

    A dash stands for effects that no number of pictures would exclude, and for a class that could not be tested.
    """
    more = [effect.more_pictures for effect in judgement.effects.values() if effect.name != "sufficiency"]
    known = [numbers for numbers in more if numbers is not None]
    if not more or len(known) < len(more) or judgement.findings.untested:
        return NONE
    fewest, most = map(max, zip(*known, strict=True))
    return f"{fewest} to {most}" if most else "0"


def figures(measures: Measures, judgement: Judgement) -> dict[str, str]:
    """Return the figures of a class, or of all classes together, as the tables in text show them."""
    effects: tuple[EffectName, ...] = ("gap", "attraction", "sufficiency")
    effect_of = {name: measures.effects[name].mean if name in measures.effects else None for name in effects}
    return {
        "class": measures.name or "all classes",
        "verdict": judgement.shown + (" (waived)" if judgement.waived else ""),
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
    named = {"accuracy": change.accuracy, "gap": change.gap, "skill": change.skill}
    if change.pair is not None:
        named[f"{change.pair.label} on backgrounds of {change.pair.background}"] = change.pair.change
    parts = [f"{name} {_change(estimate)}" for name, estimate in named.items() if estimate is not None]
    if change.flips:
        lost = counted(len(change.flips), "picture")
        parts.append(f"no longer recognised: {lost} (newly recognised: {change.gained})")
    fails = "; this fails the model" if result.regressed else ""
    return (
        f"change since the baseline, on {counted(change.pictures, 'picture')}: "
        f"{', '.join(parts) or 'nothing to compare'}{fails}"
    )


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
