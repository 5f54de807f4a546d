"""The rule: from measures to FAIL, WARN, PASS or INCONCLUSIVE, with the reasons in words.

- Heat alone never fails a model. The experiment does, and only if every way of filling the holes shows an effect above
  its limit that is significant with all classes considered at once.
- Sufficiency counts for all classes together only. For one class it also rises if a model that sees no object names the
  class that the bare background resembles.
- A class's attraction counts beside its gap: a mark on one class of many moves each of the other classes' answers only
  a little.
- The heat warns only for all classes together. A clean network often names one class if it sees nothing else, and the
  maps of that class lie anywhere.
- If objects lie at the same place in every picture, the heat says nothing, and the experiment decides alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from camkit.background.edits import RING
from camkit.background.measures import OVERALL, EffectName, MeasuredEffect, Measures, weakest
from camkit.background.statistics import MIN_GROUPS, benjamini_hochberg, holm, wilson
from camkit.background.values import Verdict
from camkit.config.settings import LimitsSection

_MAX_LISTED = 5
"""Classes with the same kind of reason that are listed one by one; more are counted, to keep the summary short."""

_WORST_FIRST: tuple[Verdict, ...] = ("FAIL", "INCONCLUSIVE", "WARN", "PASS")


class Reason(NamedTuple):
    """A reason for a verdict: its kind, which stands for many classes at once, and its full text for one class."""

    kind: str
    text: str


@dataclass(frozen=True)
class Judgement:
    """The verdict on one class, or on the model.

    Attributes:
        verdict: FAIL, INCONCLUSIVE, WARN or PASS.
        reasons: why.
        gap_p, sufficiency_p, attraction_p: the p-values of the tests, after Holm's correction; None if not tested.
        waived: why a failure is accepted; None if it is not.
    """

    verdict: Verdict
    reasons: tuple[Reason, ...]
    gap_p: float | None = None
    sufficiency_p: float | None = None
    attraction_p: float | None = None
    waived: str | None = None


@dataclass(frozen=True)
class _Test:
    """One effect of one class, measured with each fill."""

    name: str
    effect: EffectName
    by_fill: Mapping[str, MeasuredEffect]

    @property
    def p(self) -> float:
        """The p-value of "at least one fill shows no effect": all fills must agree."""
        return max(measured.p for measured in self.by_fill.values())

    @property
    def pictures(self) -> int:
        """The pictures behind the fill with the fewest."""
        return min(measured.pictures for measured in self.by_fill.values())

    @property
    def weakest(self) -> MeasuredEffect:
        """The fill with the smallest effect."""
        measured = weakest(self.by_fill)
        assert measured is not None
        return measured


class _TestResult(NamedTuple):
    """A test with its p-value after both corrections for the number of tests.

    ``one_fill`` says whether one of the fills would show the effect if it were the only one.
    """

    test: _Test
    holm_p: float
    benjamini_hochberg_p: float
    one_fill: bool


def judge(
    measures: Mapping[str, Measures],
    limits: LimitsSection,
    *,
    exempt: Mapping[str, str],
    waived: Mapping[str, str],
    heat_problems: Sequence[str] = (),
    may_fail: bool = True,
    with_regions: bool = True,
    hints: Sequence[str] = (),
) -> dict[str, Judgement]:
    """Judge each class and, under OVERALL, the model.

    Args:
        measures: the measures of each class and of all classes together.
        limits: the configured limits.
        exempt: classes that may be recognised by anything, with the reason.
        waived: classes whose failure is accepted, with the reason.
        heat_problems: why the heat cannot be trusted, if it cannot.
        may_fail: whether the experiment edits what is surely background. If not, it only warns.
        with_regions: whether the heat was compared with regions.
        hints: what the heat hints at without regions; a warning for all classes together.
    """
    tests = [
        test
        for name, class_measures in measures.items()
        if name not in exempt
        for test in _tests_of(name, class_measures)
        if test.pictures >= _min_pictures(test.effect, limits)
    ]
    results = _corrected(tests, limits.alpha)
    chance = 1 / max(2, len(measures) - 1)
    judged: dict[str, Judgement] = {}
    for name, class_measures in measures.items():
        if name in exempt:
            reason = Reason("exempt", f"exempt: this class may be recognised by anything ({exempt[name]})")
            judged[name] = Judgement("PASS", (reason,))
            continue
        own_results = [result for result in results if result.test.name == name]
        obstacles = _obstacles(class_measures, limits, heat_problems, chance, with_regions=with_regions)
        further_warnings: list[Reason] = []
        if name == OVERALL:
            further_warnings += _heat_warnings(class_measures, limits) if with_regions else []
            further_warnings += [Reason(hint, hint) for hint in hints]
        judged[name] = _judge_class(
            own_results, obstacles, further_warnings, limits, may_fail=may_fail, waived=waived.get(name)
        )
    judged[OVERALL] = _judge_model(judged, {*exempt, *waived})
    return judged


def _judge_class(
    results: Sequence[_TestResult],
    obstacles: Sequence[Reason],
    further_warnings: Sequence[Reason],
    limits: LimitsSection,
    *,
    may_fail: bool,
    waived: str | None,
) -> Judgement:
    """Judge a class, or all classes together, by its tests, the obstacles to testing it, and further warnings."""
    failures = [_effect_reason(result, limits) for result in results if result.holm_p <= limits.alpha]
    warnings = [*_test_warnings(results, limits), *further_warnings]
    if not may_fail:
        failures, warnings = [], [*failures, *warnings]
    verdict, reasons = _decide(failures, obstacles, warnings)
    p_values = {f"{result.test.effect}_p": result.holm_p for result in results}
    return Judgement(verdict, tuple(reasons), **p_values, waived=waived)


def _decide(
    failures: Sequence[Reason], obstacles: Sequence[Reason], warnings: Sequence[Reason]
) -> tuple[Verdict, list[Reason]]:
    """Return a class's verdict and reasons. A significant effect fails even if other tests were not possible."""
    if failures:
        return "FAIL", [*failures, *warnings]
    if obstacles:
        return "INCONCLUSIVE", [*obstacles, *warnings]
    if warnings:
        return "WARN", list(warnings)
    return "PASS", [Reason("nothing", "no significant effect above the limits")]


def _min_pictures(effect: EffectName, limits: LimitsSection) -> int:
    """Return how many pictures a test needs.

    Attraction needs half as many: a class's backgrounds are shown behind about as many objects as the class has
    pictures, but sometimes behind a few less.
    """
    return limits.least_pictures // 2 if effect == "attraction" else limits.least_pictures


def _tests_of(name: str, measures: Measures) -> list[_Test]:
    """List the tests of a class, or of all classes together."""
    tests = [_Test(name, "gap", measures.gap)]
    if name == OVERALL:
        tests.append(_Test(name, "sufficiency", measures.sufficiency))
    else:
        tests.append(_Test(name, "attraction", measures.attraction))
    return [test for test in tests if test.by_fill]


def _corrected(tests: Sequence[_Test], alpha: float) -> list[_TestResult]:
    """Correct the p-values for the number of tests."""
    p_values = [test.p for test in tests]
    return [
        _TestResult(*columns)
        for columns in zip(
            tests, holm(p_values), benjamini_hochberg(p_values), _shown_by_one_fill(tests, alpha), strict=True
        )
    ]


def _shown_by_one_fill(tests: Sequence[_Test], alpha: float) -> list[bool]:
    """Return, for each test, whether at least one fill would show the effect if it were the only fill."""
    shown = [False] * len(tests)
    for fill in sorted({fill for test in tests for fill in test.by_fill}):
        numbers = [number for number, test in enumerate(tests) if fill in test.by_fill]
        p_values = holm([tests[number].by_fill[fill].p for number in numbers])
        for number, p in zip(numbers, p_values, strict=True):
            shown[number] = shown[number] or p <= alpha
    return shown


def _judge_model(judged: Mapping[str, Judgement], set_aside: Collection[str]) -> Judgement:
    """Return the verdict on the model: the worst of its classes and of all classes together, without waived classes."""
    if judged.keys() - {OVERALL} <= set(set_aside):
        return Judgement("PASS", (Reason("waived", "every class is waived or exempt"),))
    counted = {name: judgement for name, judgement in judged.items() if not judgement.waived}
    verdicts = {judgement.verdict for judgement in counted.values()}
    verdict = next(candidate for candidate in _WORST_FIRST if candidate in verdicts)
    overall = judged[OVERALL]
    if verdict == "PASS":
        return replace(overall, verdict=verdict)
    deciding = {name: judgement for name, judgement in counted.items() if judgement.verdict == verdict}
    reasons = _summarised(deciding, classes=len(judged) - 1)
    if OVERALL not in deciding and overall.verdict != "PASS":  # a finding for all classes is reported in any case
        reasons += [Reason(reason.kind, f"all classes together: {reason.text}") for reason in overall.reasons]
    return replace(overall, verdict=verdict, reasons=tuple(reasons))


def _summarised(deciding: Mapping[str, Judgement], classes: int) -> list[Reason]:
    """Return the reasons of the classes that decide, kind by kind; a kind of many classes becomes one count."""
    summary: list[Reason] = []
    for kind in dict.fromkeys(reason.kind for judgement in deciding.values() for reason in judgement.reasons):
        named = [
            (name, reason)
            for name, judgement in deciding.items()
            for reason in judgement.reasons
            if reason.kind == kind
        ]
        of_classes = sum(name != OVERALL for name, _ in named)
        if of_classes > _MAX_LISTED:
            summary.append(Reason(kind, f"{of_classes} of {classes} classes: {kind}"))
        summary += [
            Reason(kind, f"{name or 'all classes together'}: {reason.text}")
            for name, reason in named
            if of_classes <= _MAX_LISTED or name == OVERALL
        ]
    return summary


def _test_warnings(results: Sequence[_TestResult], limits: LimitsSection) -> list[Reason]:
    """Warn of effects that only the looser correction finds significant, then of effects that only one fill shows."""
    not_significant = [result for result in results if result.holm_p > limits.alpha]
    possible = [
        Reason("possibly reads the background", f"a possible effect: {_effect_reason(result, limits).text}")
        for result in not_significant
        if result.benjamini_hochberg_p <= limits.alpha
    ]
    disputed = [
        Reason("the fills disagree", f"the fills disagree about the {result.test.effect}: {_by_fill(result.test)}")
        for result in not_significant
        if result.one_fill
    ]
    return possible + disputed


def _effect_reason(result: _TestResult, limits: LimitsSection) -> Reason:
    """Describe an effect by the fill that shows it least."""
    test = result.test
    measured = test.weakest
    first, second = measured.accuracies
    figures = (
        f"{measured.effect.value:.2f} (95% interval {measured.effect.low:.2f} to {measured.effect.high:.2f}, "
        f"limit {getattr(limits, test.effect):.2f}, p {result.holm_p:.2g})"
    )
    rings = set(test.by_fill) == {RING}  # the data has no regions
    on = "with outer rings of" if rings else "on backgrounds of"
    match test.effect:
        case "gap":
            kind = "reads the background: a gap above the limit"
            text = (
                f"accuracy {first:.0%} {on} the object's own class and {second:.0%} {on} other classes, "
                f"a gap of {figures}"
            )
        case "attraction":
            kind = "reads the background: it attracts the answers to objects of other classes"
            text = (
                f"{first:.0%} of the objects of other classes get this class's name {on} this class and {second:.0%} "
                f"elsewhere, an attraction of {figures}"
            )
        case "sufficiency":
            kind = "reads the background: right without the object"
            removed = "the middle made grey" if rings else "the object removed"
            text = f"accuracy {first:.0%} with {removed} and {second:.0%} by chance, above chance by {figures}"
    return Reason(kind, text)


def _by_fill(test: _Test) -> str:
    return ", ".join(f"{fill} {measured.effect.value:.2f}" for fill, measured in test.by_fill.items())


def _heat_warnings(measures: Measures, limits: LimitsSection) -> list[Reason]:
    """Warn if the heat lies beside the objects, and the objects' places differ enough to show it."""
    if measures.skill is None or measures.skill.groups < limits.least_pictures:
        return []
    if measures.room is None or measures.room < limits.least_room or not measures.skill.high < limits.skill:
        return []
    kind = "the heat lies on the objects less than the heat of other pictures does"
    figures = f"skill {measures.skill.value:.2f}, upper bound {measures.skill.high:.2f}, limit {limits.skill:.2f}"
    return [Reason(kind, f"{kind} ({figures})")]


def _obstacles(
    measures: Measures, limits: LimitsSection, heat_problems: Sequence[str], chance: float, *, with_regions: bool
) -> list[Reason]:
    """Return what kept a class, or all classes together, from being tested."""
    if not measures.pictures:
        return [Reason("no picture could be used", "no picture could be used")]
    reasons = _gap_obstacles(measures, limits, chance)
    if not measures.tested and measures.sufficiency:
        kind = "there is no background to show the objects on"
        needed = "the check needs other pictures of the same class and of other classes, with regions"
        reasons.append(Reason(kind, f"{kind}: {needed}"))
    elif measures.tested < limits.least_pictures:
        kind = f"fewer than {limits.least_pictures} pictures could be tested"
        text = f"only {measures.tested} pictures could be tested; the check needs {limits.least_pictures}"
        reasons.append(Reason(kind, text))
    needed_objects = _min_pictures("attraction", limits)
    shown = min((measured.pictures for measured in measures.attraction.values()), default=0)
    if measures.attraction and measures.tested >= limits.least_pictures and shown < needed_objects:
        kind = "too few objects of other classes were shown on its backgrounds"
        reasons.append(Reason(kind, f"{kind}: {shown}; the check needs {needed_objects}"))
    if with_regions and measures.empty > limits.most_empty:
        text = f"{measures.empty:.0%} of the maps are empty; the limit is {limits.most_empty:.0%}"
        reasons.append(Reason("too many maps are empty", text))
    return reasons + [Reason("the heat cannot be trusted", problem) for problem in heat_problems]


def _gap_obstacles(measures: Measures, limits: LimitsSection, chance: float) -> list[Reason]:
    """Return what kept the gap from being measurable: too few groups, or too few right answers to begin with."""
    if not measures.gap:
        return []
    reasons = []
    groups = min(measured.effect.groups for measured in measures.gap.values())
    if groups < MIN_GROUPS:
        kind = f"the pictures come from fewer than {MIN_GROUPS} groups"
        reasons.append(Reason(kind, f"the pictures come from {groups} groups; the check needs {MIN_GROUPS}"))
    accuracy = min(measured.accuracies[0] for measured in measures.gap.values())
    if wilson(round(accuracy * measures.tested), measures.tested)[0] <= max(limits.gap, chance):
        kind = "accuracy on pasted objects is too close to chance for a gap to be measurable"
        text = (
            f"accuracy {accuracy:.0%} on backgrounds of the object's own class ({measures.tested} pictures), too close "
            "to chance for a gap to be measurable"
        )
        reasons.append(Reason(kind, text))
    return reasons
