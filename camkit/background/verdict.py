"""The rule: from measures to FAIL, WARN, PASS or INCONCLUSIVE, with the reasons in words.

Heat alone never fails a model: an experiment on the pictures does, and only where every way of filling agrees, beyond
the limit by more than chance, all classes considered at once. Sufficiency counts for all classes together: of one
class it also rises where a model that sees no object names the class whose looks the bare background has. A class's
attraction counts beside its gap: a mark on one class of many moves every other class's answers a little. The heat
warns, of all classes together: one class is often what a clean network says when it sees nothing else, and its map lies
anywhere. Where objects lie at the same place in every picture heat says nothing, and the experiment decides alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from camkit.background.config import LimitsSection
from camkit.background.measures import OVERALL, Effect, Measures, Tested, weakest
from camkit.background.statistics import LEAST_GROUPS, benjamini_hochberg, holm, wilson
from camkit.background.values import Verdict

_MANY = 5
"""Classes with a reason of one kind that are counted rather than listed."""

_WORST: tuple[Verdict, ...] = ("FAIL", "INCONCLUSIVE", "WARN", "PASS")


class Reason(NamedTuple):
    """Why: its kind, with what is said where many classes have it, and in full."""

    kind: str
    text: str


@dataclass(frozen=True)
class Judged:
    """A class's verdict, or that of all together, why, and the p-values that decided it, adjusted for their number."""

    verdict: Verdict
    reasons: tuple[Reason, ...]
    gap_p: float | None = None
    sufficiency_p: float | None = None
    attraction_p: float | None = None
    waived: str | None = None


@dataclass(frozen=True)
class _Test:
    name: str
    what: Effect
    by_fill: Mapping[str, Tested]

    @property
    def p(self) -> float:
        """The p-value of "some fill shows no effect": all must agree."""
        return max(one.p for one in self.by_fill.values())

    @property
    def weakest(self) -> Tested:
        """The fill that shows the least."""
        found = weakest(self.by_fill)
        assert found is not None
        return found


def judge(
    measures: Mapping[str, Measures],
    limits: LimitsSection,
    *,
    exempt: Mapping[str, str],
    waived: Mapping[str, str],
    insane: Sequence[str] = (),
    may_fail: bool = True,
    heat: bool = True,
    hints: Sequence[str] = (),
) -> dict[str, Judged]:
    """Judge each class and, under OVERALL, the model.

    Args:
        measures: of each class and of all.
        limits: as configured.
        exempt: classes that may be recognised by anything, with the reason.
        waived: classes whose failure is accepted, with the reason.
        insane: why the heat cannot be trusted, if it cannot.
        may_fail: whether the experiment shows the background for sure; else it only warns.
        heat: whether there are regions to hold the heat against.
        hints: what the heat hints at where there are none; a warning of all classes together.
    """
    tests = [
        test
        for name, one in measures.items()
        if name not in exempt
        for test in _tests_of(name, one)
        if min(tested.pictures for tested in test.by_fill.values()) >= _fewest(test.what, limits)
    ]
    chance = 1 / max(2, len(measures) - 1)
    adjusted = holm([test.p for test in tests])
    listed = benjamini_hochberg([test.p for test in tests])
    each_fill = _each_fill(tests, limits.alpha)
    judged: dict[str, Judged] = {}
    for name, one in measures.items():
        if name in exempt:
            judged[name] = Judged("PASS", (Reason("exempt", f"may be recognised by anything: {exempt[name]}"),))
            continue
        own = [number for number, test in enumerate(tests) if test.name == name]
        ps = {f"{tests[number].what}_p": adjusted[number] for number in own}
        fails = [_shows(tests[number], limits, adjusted[number]) for number in own if adjusted[number] <= limits.alpha]
        warnings = [
            Reason("perhaps the background", f"perhaps {_shows(tests[number], limits, adjusted[number]).text}")
            for number in own
            if adjusted[number] > limits.alpha and listed[number] <= limits.alpha
        ]
        warnings += [
            Reason(
                "the fills disagree", f"the fills disagree about the {tests[number].what}: {_by_fill(tests[number])}"
            )
            for number in own
            if adjusted[number] > limits.alpha and each_fill[number]
        ]
        if name == OVERALL and heat:
            warnings += _cold(one, limits)
        warnings += [Reason(hint, hint) for hint in hints if name == OVERALL]
        verdict: Verdict
        untested = _untested(one, limits, insane, chance, heat=heat)
        if fails and not may_fail:
            warnings, fails = [*fails, *warnings], []
        if fails:
            verdict, reasons = "FAIL", [*fails, *warnings]
        elif untested:
            verdict, reasons = "INCONCLUSIVE", [*untested, *warnings]
        elif warnings:
            verdict, reasons = "WARN", warnings
        else:
            verdict, reasons = "PASS", [Reason("nothing", "tested, and nothing found")]
        judged[name] = Judged(verdict, tuple(reasons), **ps, waived=waived.get(name))
    judged[OVERALL] = _model(judged, {*exempt, *waived})
    return judged


def _fewest(what: Effect, limits: LimitsSection) -> int:
    """Return how many pictures a test needs.

    A class's backgrounds are shown behind about as many objects as the class has pictures, sometimes a few less.
    """
    return limits.least_pictures // 2 if what == "attraction" else limits.least_pictures


def _tests_of(name: str, one: Measures) -> list[_Test]:
    """List what is tested of a class, or of all together."""
    by_what: dict[Effect, Mapping[str, Tested]] = {"gap": one.gap}
    if name == OVERALL:
        by_what["sufficiency"] = one.sufficiency
    else:
        by_what["attraction"] = one.attraction
    return [_Test(name, what, by_fill) for what, by_fill in by_what.items() if by_fill]


def _model(judged: Mapping[str, Judged], passed_over: Collection[str]) -> Judged:
    """Return the model's verdict: the worst of its classes' and of all together, waived classes apart."""
    counted = {name: one for name, one in judged.items() if not one.waived}
    if judged.keys() - {OVERALL} <= set(passed_over):
        return Judged("PASS", (Reason("waived", "every class is waived, or may be recognised by anything"),))
    verdict: Verdict = next(one for one in _WORST if any(single.verdict == one for single in counted.values()))
    own = judged[OVERALL]
    deciding = {name: one for name, one in counted.items() if one.verdict == verdict}
    if verdict == "PASS":
        return replace(own, verdict=verdict)
    kinds = list(dict.fromkeys(reason.kind for one in deciding.values() for reason in one.reasons))
    reasons: list[Reason] = []
    for kind in kinds:
        named = [(name, reason) for name, one in deciding.items() for reason in one.reasons if reason.kind == kind]
        classes = [name for name, _ in named if name != OVERALL]
        if len(classes) > _MANY:
            reasons.append(Reason(kind, f"{len(classes)} of {len(judged) - 1} classes: {kind}"))
        reasons += [
            Reason(kind, f"{name or 'all classes together'}: {reason.text}")
            for name, reason in named
            if len(classes) <= _MANY or name == OVERALL
        ]
    if OVERALL not in deciding and own.verdict != "PASS":  # what was found of all together is said whatever decides
        reasons += [Reason(reason.kind, f"all classes together: {reason.text}") for reason in own.reasons]
    return replace(own, verdict=verdict, reasons=tuple(reasons))


def _each_fill(tests: Sequence[_Test], alpha: float) -> list[bool]:
    """Return for each test whether some fill, taken by itself, shows the effect."""
    fills = sorted({fill for test in tests for fill in test.by_fill})
    found = [False] * len(tests)
    for fill in fills:
        own = [number for number, test in enumerate(tests) if fill in test.by_fill]
        for number, p in zip(own, holm([tests[one].by_fill[fill].p for one in own]), strict=True):
            found[number] = found[number] or p <= alpha
    return found


def _shows(test: _Test, limits: LimitsSection, p: float) -> Reason:
    least = test.weakest
    first, second = least.accuracies
    limit = getattr(limits, test.what)
    beyond = (
        f"{least.effect.value:.2f} ({least.effect.low:.2f} to {least.effect.high:.2f}), limit {limit:.2f}, p {p:.2g}"
    )
    rings = set(test.by_fill) == {"ring"}  # without regions
    where, those = ("in rings of", "in") if rings else ("on backgrounds of", "on")
    match test.what:
        case "gap":
            kind = "reads the background: a gap above the limit"
            text = f"right for {first:.0%} {where} its own class and for {second:.0%} {those} those of others"
            text = f"{text}: a gap of {beyond}"
        case "attraction":
            kind = "reads the background: it draws the answers to other classes' objects"
            text = (
                f"named for {first:.0%} of the objects of other classes {where} its own and for {second:.0%} elsewhere"
            )
            text = f"{text}: an attraction of {beyond}"
        case "sufficiency":
            kind = "reads the background: right without the object"
            removed = "the middle made grey" if rings else "the object removed"
            text = f"right for {first:.0%} with {removed}, {second:.0%} by chance: more by {beyond}"
    return Reason(kind, text)


def _cold(one: Measures, limits: LimitsSection) -> list[Reason]:
    """Warn where the heat lies elsewhere, and the objects' places let that be seen."""
    if one.skill is None or one.skill.groups < limits.least_pictures:
        return []
    if one.room is None or one.room < limits.least_room or not one.skill.high < limits.skill:
        return []
    kind = "the heat lies on the objects less than that of other pictures"
    return [
        Reason(kind, f"{kind}: skill {one.skill.value:.2f} (at most {one.skill.high:.2f}, limit {limits.skill:.2f})")
    ]


def _by_fill(test: _Test) -> str:
    return ", ".join(f"{fill} {one.effect.value:.2f}" for fill, one in test.by_fill.items())


def _untested(
    one: Measures, limits: LimitsSection, insane: Sequence[str], chance: float, *, heat: bool
) -> list[Reason]:
    reasons = []
    if not one.pictures:
        return [Reason("no picture could be used", "no picture could be used")]
    groups = min((tested.effect.groups for tested in one.gap.values()), default=0)
    if one.gap and groups < LEAST_GROUPS:
        kind = f"pictures of fewer than {LEAST_GROUPS} groups"
        reasons.append(Reason(kind, f"{groups} groups of pictures, fewer than {LEAST_GROUPS}"))
    own = min((tested.accuracies[0] for tested in one.gap.values()), default=1.0)
    least = max(limits.gap, chance)
    if one.gap and wilson(round(own * one.tested), one.tested)[0] <= least:
        kind = "answers to pasted pictures are hardly better than chance, so no gap could show"
        reasons.append(
            Reason(
                kind, f"right for {own:.0%} of {one.tested} on backgrounds of its own class, too few for a gap to show"
            )
        )
    if not one.tested and one.sufficiency:
        kind = "there is nothing to show the objects on"
        reasons.append(
            Reason(kind, f"{kind}: other pictures of the class and of other classes are needed, with regions")
        )
    elif one.tested < limits.least_pictures:
        kind = f"fewer than {limits.least_pictures} pictures could be tested"
        reasons.append(Reason(kind, f"{one.tested} pictures could be tested, fewer than {limits.least_pictures}"))
    shown = min((tested.pictures for tested in one.attraction.values()), default=0)
    if one.attraction and one.tested >= limits.least_pictures and shown < _fewest("attraction", limits):
        kind = "too few objects of other classes were shown on its backgrounds"
        reasons.append(Reason(kind, f"{kind}: {shown}, fewer than {_fewest('attraction', limits)}"))
    if heat and one.empty > limits.most_empty:
        reasons.append(Reason("too many maps are empty", f"{one.empty:.0%} of the maps are empty"))
    return [*reasons, *(Reason("the heat cannot be trusted", why) for why in insane)]
