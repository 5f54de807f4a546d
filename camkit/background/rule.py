"""From measures to FAIL, WARN, PASS or INCONCLUSIVE, with the reasons in words.

``LEVELS`` in ``effects.py`` and ``VERDICTS`` here are the whole rule: in both, the first row that applies decides.

- Heat alone never fails a model. The experiment does, and only if the mean of the fills is significantly above its
  limit and the estimate with each fill is above it too.
- The significance level is divided among the gap of all classes, the statistics of the whole picture, and the effects
  of the classes; the last two have Holm's correction. So a clear effect on the whole model is not diluted by the number
  of classes.
- Sufficiency counts for all classes together only, and only while their gap is not excluded. A model that sees no
  object often names the class whose objects usually stand there, but hardly uses the background while the object is in
  the picture. If there are too few groups to test the gap, the verdict is INCONCLUSIVE whatever the sufficiency.
- A class's attraction counts beside its gap: a mark on one class of many changes the answers to each other class only a
  little.
- The heat warns only for all classes together. A clean network often names one class if it sees nothing else, and the
  maps of that class lie anywhere.
- A class that is significantly less accurate on one of the places that the data names only warns. Kinds of backgrounds
  that are found in the model's features are only reported: even clean networks have bad kinds.
- If objects lie at the same place in every picture, the heat says nothing, and the experiment decides alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined

from camkit.background.effects import OVERALL, Effect, EffectName, Level, Measures, Rule, all_excluded_above
from camkit.errors import printable
from camkit.kit.statistics import MIN_GROUPS, holm, smallest_p, wilson
from camkit.kit.wording import counted, first_of, number, share
from camkit.options import Limits

Verdict: TypeAlias = Literal["FAIL", "WARN", "PASS", "INCONCLUSIVE"]


@dataclass(frozen=True)
class Judgement:
    """The verdict on a class, or on the model, and what it follows from.

    Attributes:
        required: the levels of the effects that must be excluded for a PASS.
        others: the levels of the other effects.
        untested: whether something kept a class, or all classes together, from being tested.
        warned: whether the heat or an optional analysis warns: over all classes together, a smaller share of the heat
            lies on the objects than in maps that ignore the picture; or a class
            is significantly less accurate on one of the places that the data names.
        reasons: why.
        effects: what is known about each effect, by name.
        waived: why a failure is accepted; None if it is not.
    """

    required: Sequence[Level] = ()
    others: Sequence[Level] = ()
    untested: bool = False
    warned: bool = False
    reasons: tuple[Reason, ...] = ()
    effects: Mapping[EffectName, Effect] = field(default_factory=dict)
    waived: str | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict of the first row of ``VERDICTS`` that applies."""
        return next(rule.then for rule in VERDICTS if rule.applies(self))

    @property
    def shown(self) -> str:
        """The verdict in the row of a class: "not decided" if it passes, but an effect of its own is open."""
        is_open = any(effect.scope == "one class" and effect.level == "open" for effect in self.effects.values())
        return "not decided" if self.verdict == "PASS" and is_open else self.verdict

    @property
    def why(self) -> str:
        """The reasons, as one text."""
        return "; ".join(reason.text for reason in self.reasons)

    @property
    def any_above_limit(self) -> bool:
        """Whether the estimate of any effect lies above its limit."""
        return any(effect.value > effect.limit for effect in self.effects.values())

    def has(self, level: Level) -> bool:
        """Return whether any effect is at a level."""
        return level in (*self.required, *self.others)


VERDICTS: tuple[Rule[Verdict, Judgement], ...] = (
    Rule(
        "FAIL",
        "an effect is at level fail",
        lambda judgement: judgement.has("fail"),
    ),
    Rule(
        "WARN",
        "an effect is at level warn; or a class is significantly less accurate on one of the places that the data "
        "names, by more than the limit of the gap; or, over all classes together, a smaller share of the heat lies on "
        "the objects than in maps that ignore the picture",
        lambda judgement: judgement.has("warn") or judgement.warned,
    ),
    Rule(
        "PASS",
        "the gap and the cues of all classes are excluded (with --strict: the effects of each class too), and every "
        "class could be tested",
        lambda judgement: not judgement.untested and all(level == "excluded" for level in judgement.required),
    ),
    Rule("INCONCLUSIVE", "otherwise", lambda _: True),
)


SHARES: Mapping[str, float] = {"gap": 0.6, "cues": 0.1, "classes": 0.3}
"""The parts of the significance level: for the gap of all classes, for the cues, and for the effects of the classes.
Most models that read the background do so for many classes, and then the gap of all classes finds it first."""


def judge(
    measures: Mapping[str, Measures],
    limits: Limits,
    *,
    exempt: Mapping[str, str],
    waived: Mapping[str, str],
    may_fail: bool = True,
    with_regions: bool = True,
    of_detector: bool = False,
    warnings: Mapping[str, Sequence[Reason]] | None = None,
) -> dict[str, Judgement]:
    """Judge each class and, under OVERALL, the model.

    Args:
        measures: the measures of each class and of all classes together.
        limits: the configured limits.
        exempt: classes that may be recognised by anything, with the reason.
        waived: classes whose failure is accepted, with the reason.
        may_fail: whether the experiment edits what is surely background. If not, it only warns.
        with_regions: whether the heat was compared with regions.
        of_detector: whether the model finds objects, which the words then say.
        warnings: by class, what optional analyses warn of; by OVERALL, of all classes together.
    """
    chance = 1 / max(2, len(measures) - 1)
    tested = _tested_effects(
        [
            replace(effect, of_detector=of_detector)
            for name, class_measures in measures.items()
            if name not in exempt
            for effect in class_measures.counting
        ],
        limits,
        may_fail=may_fail,
    )
    judged: dict[str, Judgement] = {}
    for name, class_measures in measures.items():
        if name in exempt:
            why = f"exempt: this class may be recognised by anything ({exempt[name]})"
            judged[name] = Judgement(reasons=(Reason("exempt", why),))
            continue
        effects = [effect for effect in tested if effect.label == name]
        obstacles = _obstacles(class_measures, effects, limits, chance, with_regions=with_regions)
        of_heat = _heat_warnings(class_measures, limits) if name == OVERALL and with_regions else []
        of_others = [*of_heat, *(warnings or {}).get(name, ())]
        required = name == OVERALL or limits.strict  # whether a PASS needs the effects to be excluded
        judgement = Judgement(
            required=[effect.level for effect in effects if required and effect.name != "sufficiency"],
            others=[effect.level for effect in effects if not required or effect.name == "sufficiency"],
            untested=bool(obstacles),
            warned=bool(of_others),
            effects={effect.name: effect for effect in effects},
            waived=waived.get(name),
        )
        # A sufficiency that does not warn decides nothing
        decisive = [effect for effect in effects if effect.name != "sufficiency" or effect.level != "open"]
        of_level = {
            level: [reason_of(effect) for effect in decisive if effect.level == level]
            for level in ("fail", "excluded", "warn", "open")
        }
        known = [
            reason_of(effect, "knowledge") for effect in effects if not effect.counts and effect.low > effect.limit
        ]
        # A FAIL also gives all warnings as reasons, and a WARN what could not be tested
        reasons: Mapping[Verdict, Sequence[Reason]] = {
            "FAIL": [*of_level["fail"], *of_level["warn"], *of_others],
            "INCONCLUSIVE": obstacles or of_level["open"],
            "WARN": [*of_level["warn"], *of_others, *obstacles],
            "PASS": [*of_level["excluded"], *of_level["open"], *known],
        }
        judged[name] = replace(judgement, reasons=tuple(reasons[judgement.verdict]))
    judged[OVERALL] = _judge_model(judged, {*exempt, *waived})
    return judged


def _tested_effects(effects: Sequence[Effect], limits: Limits, *, may_fail: bool) -> list[Effect]:
    """Return the effects with their corrected p-values. An effect that rests on too few pictures is not tested."""
    tested = [replace(effect, enough=effect.pictures >= _min_pictures(effect.name, limits)) for effect in effects]
    for family in SHARES:
        places = [place for place, effect in enumerate(tested) if effect.enough and _family(effect) == family]
        means = [mean for place in places if (mean := tested[place].mean) is not None]
        corrected = _corrected([mean.p for mean in means], family)
        floors = _corrected([smallest_p(mean.effect.groups) for mean in means], family)
        present = holm([mean.p_zero for mean in means])
        least = MIN_GROUPS  # the fewest groups with which every effect of the family could be significant
        while means and may_fail and _corrected([smallest_p(least)] * len(means), family)[0] > limits.alpha:
            least += 1
        for place, p, floor, p_zero in zip(places, corrected, floors, present, strict=True):
            # An effect of a class counts as above 0 at this many times the significance level, 10% by default: it only
            # warns
            tested[place] = replace(
                tested[place],
                p=p,
                significant=may_fail and p <= limits.alpha,
                present=p_zero <= 2.0 * limits.alpha,
                least_groups=least if floor > limits.alpha else MIN_GROUPS,
            )
    settled = any(each.level == "excluded" or each.lacks_groups for each in tested if _family(each) == "gap")
    return [replace(effect, counts=not settled) if effect.name == "sufficiency" else effect for effect in tested]


def _family(effect: Effect) -> str:
    """Return which part of the significance level an effect shares; none for the sufficiency, which never fails."""
    of_all = "gap" if effect.name == "gap" else "cues"
    return {"all classes": of_all, "one class": "classes", "sufficiency": ""}[effect.scope]


def _corrected(p_values: Sequence[float], family: str) -> list[float]:
    """Return the p-values of a family, corrected for its number of tests and for its part of the level."""
    return [min(1.0, p / SHARES[family]) for p in holm(p_values)]


def _min_pictures(effect: EffectName, limits: Limits) -> int:
    """Return how many pictures a test needs.

    Attraction needs half as many: a class's backgrounds are shown behind about as many objects as the class has
    pictures, but sometimes behind a few less.
    """
    return limits.least_pictures // 2 if effect == "attraction" else limits.least_pictures


def _judge_model(judged: Mapping[str, Judgement], set_aside: Collection[str]) -> Judgement:
    """Return the verdict on the model, from all classes together and the classes that are neither waived nor exempt."""
    overall = judged[OVERALL]
    if judged.keys() - {OVERALL} <= set(set_aside):
        return Judgement(reasons=(Reason("waived", "every class is waived or exempt, so nothing was tested"),))
    counted = {name: judgement for name, judgement in judged.items() if not judgement.waived}
    model = replace(
        overall,
        required=[level for own in counted.values() for level in own.required],
        others=[level for own in counted.values() for level in own.others],
        untested=any(own.untested for own in counted.values()),
        warned=any(own.warned for own in counted.values()),
    )
    verdict = model.verdict
    if verdict == "PASS":
        return replace(model, reasons=(*overall.reasons, *_excluded_for_classes(counted)))
    of_all = [reason._replace(text=f"all classes together: {reason.text}") for reason in overall.reasons]
    named = {name for name, own in counted.items() if own.verdict == verdict or (verdict == "WARN" and own.untested)}
    deciding = {name: own for name, own in counted.items() if name in named - {OVERALL}}
    pairs = [(name, reason) for name, own in worst_first(deciding).items() for reason in own.reasons]
    of_classes = _listed(pairs, classes=len(judged) - 1)
    # What decides comes first, because reports show only the first reasons at the top. A finding for all classes
    # together is reported in any case.
    beside = of_all if overall.verdict != "PASS" else []
    reasons = [*of_all, *of_classes] if OVERALL in named else [*of_classes, *beside]
    return replace(model, reasons=tuple(sorted(reasons, key=lambda reason: not reason.fails)))


def _excluded_for_classes(judged: Mapping[str, Judgement]) -> list[Reason]:
    """Say which effects are excluded for each class alone, and in how many classes a strict check asks for more."""
    of_classes = [own for name, own in judged.items() if name != OVERALL and own.effects]
    names: Sequence[EffectName] = ("gap", "attraction")
    reasons = []
    for name in names:
        effects = [own.effects[name] for own in of_classes]
        if all_excluded_above(effects) is not None:
            worst = max(effects, key=lambda effect: effect.excluded_above or 0.0)
            reasons.append(reason_of({"worst": worst, "classes": len(effects)}, "excluded alone"))
    not_excluded = sum(own.has("open") for own in of_classes)
    if not_excluded:
        reasons.append(reason_of({"open": not_excluded, "classes": len(of_classes)}, "open alone"))
    above = [effect for own in of_classes for effect in own.effects.values() if effect.value > effect.limit]
    return [*reasons, *_listed([(effect.label, reason_of(effect, "doubt")) for effect in above], len(of_classes))]


def worst_first(judged: Mapping[str, Judgement]) -> dict[str, Judgement]:
    """Return the classes in the order of their largest effects; those whose effects were not measured come last."""
    largest = {
        name: max((effect.value for effect in own.effects.values() if effect.mean is not None), default=-1.0)
        for name, own in judged.items()
    }
    return {name: judged[name] for name in sorted(judged, key=lambda name: -largest[name])}


def _listed(reasons: Sequence[tuple[str, Reason]], classes: int) -> list[Reason]:
    """Return reasons of classes with the class's name, kind by kind; a kind of many classes becomes one count."""
    summary: list[Reason] = []
    for kind in dict.fromkeys(reason.kind for _, reason in reasons):
        named = [(name, reason) for name, reason in reasons if reason.kind == kind]
        # At most this many classes with the same kind of reason are listed one by one; more are counted, to keep it
        # short
        if len(named) > 5:
            summary.append(named[0][1]._replace(text=f"{len(named)} of {classes} classes: {kind}"))
        else:
            summary += [reason._replace(text=f"{name}: {reason.text}") for name, reason in named]
    return summary


def _heat_warnings(measures: Measures, limits: Limits) -> list[Reason]:
    """Warn if the heat lies beside the objects, and the objects' places differ enough to show it."""
    skill, room = measures.skill, measures.room
    if skill is None or room is None or room < limits.least_room or skill.groups < limits.least_pictures:
        return []
    return [reason_of({"skill": skill, "limit": limits.skill}, "heat")] if skill.high < limits.skill else []


def _obstacles(
    measures: Measures,
    effects: Sequence[Effect],
    limits: Limits,
    chance: float,
    *,
    with_regions: bool,
) -> list[Reason]:
    """Return why a class, or all classes together, could not be tested."""
    about = {"label": measures.name, "measures": measures, "limits": limits}
    if not measures.pictures:
        return [reason_of(about, "no pictures")]
    reasons = [reason_of(effect, "few groups") for effect in effects if effect.lacks_groups]
    gap, tested, attraction = measures.gap.mean, measures.tested, measures.attraction
    if gap is not None:  # too few right answers leave no room for a gap
        right = round(gap.accuracies[0] * tested)
        too_few = max(n for n in range(tested + 1) if wilson(n, tested)[0] <= max(limits.gap, chance))
        if right <= too_few:
            shares = {"right": right / tested, "too_few": too_few / tested, "chance": chance}
            reasons.append(reason_of({**about, **shares}, "near chance"))
    if not tested and measures.sufficiency.by_fill:
        reasons.append(reason_of(about, "no background"))
    elif tested < limits.least_pictures:
        reasons.append(reason_of(about, "few pictures")._replace(lacks=limits.least_pictures - tested))
    elif attraction.by_fill and attraction.pictures < _min_pictures("attraction", limits):
        reasons.append(reason_of({**about, "needed": _min_pictures("attraction", limits)}, "few objects"))
    if with_regions and measures.empty > limits.most_empty:
        reasons.append(reason_of(about, "empty maps"))
    return reasons


class Reason(NamedTuple):
    """A reason for a verdict.

    Attributes:
        kind: a short text that many classes can share.
        text: the full text for one class.
        fails: whether it alone makes the verdict FAIL.
        step: what to do next, if the reason is that something could not be decided.
        lacks: how many pictures are missing, if that is the reason.
        more: of which class ``step`` asks for pictures, and for how many at most.
    """

    kind: str
    text: str
    fails: bool = False
    step: str = ""
    lacks: int = 0
    more: tuple[str, int] | None = None


@functools.cache
def _sentences() -> Any:
    environment = Environment(
        loader=PackageLoader("camkit.background.report"), undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {each.__name__: each for each in (counted, first_of, share)}
    environment.filters |= {"figure": _figure, "number": number, "quoted": repr, "printable": printable}
    environment.globals["least_groups"] = MIN_GROUPS
    return environment.get_template("reasons.txt").module


def said(macro: str, *values: Any, **named: Any) -> str:
    """Return what a macro of ``reasons.txt`` says, as plain text."""
    return str(getattr(_sentences(), macro)(*values, **named))


def reason_of(about: Effect | Mapping[str, Any], what: str = "") -> Reason:
    """Say what is known about an effect: at its level or, if ``what`` says that, why it does not count.

    ``about`` may also be the values of another reason, which ``what`` names.
    """
    if isinstance(about, Effect):
        what = what or ("unmeasured" if about.mean is None else about.level)
    kind, text, step = (said(macro, about, what) for macro in ("kind", "text", "step"))
    reason = Reason(kind, text, fails=what == "fail", step=step)
    if what == "open" and isinstance(about, Effect) and about.groups >= about.least_groups and about.more_pictures:
        return reason._replace(more=(about.label, about.more_pictures[1]))
    return reason


def _figure(value: float, limit: float) -> str:
    """Return a number with two digits after the point, or with the digits that tell it from the limit.

    >>> _figure(0.123, 0.1), _figure(0.1, 0.1), _figure(0.0996, 0.1), _figure(-0.001, 0.1)
    ('0.12', '0.10', '0.0996', '0.00')
    """
    digits = next(
        (digits for digits in (2, 3, 4) if (round(value, digits) - round(limit, digits)) * (value - limit) > 0), 2
    )
    return f"{round(value, digits) + 0.0:.{digits}f}"  # adding 0.0 turns -0.0 into 0.0
