"""From pictures to effects: for each class and for all classes together, with intervals, p-values and levels.

In the order of the file: ``image_rows`` joins what was measured on each picture; ``Effect`` and ``LEVELS`` hold what is
known about an effect; ``measure_all`` computes the effects from the rows.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
from jaxtyping import Float
from pydantic import TypeAdapter

from camkit.background.data import grouped
from camkit.background.edits import Arm, Edit
from camkit.background.experiment import NO_HEAT, Answers, HeatRow, compare_maps
from camkit.background.plan import Plan
from camkit.kit.statistics import (
    MIN_GROUPS,
    RESAMPLES,
    Estimate,
    added_variance,
    bootstrap_sums,
    effective_groups,
    group_numbers,
    interval,
    p_above,
    seed_of,
    strata_of_groups,
    widened,
    wilson,
)
from camkit.options import Limits

CueName: TypeAlias = Literal["sharpness", "noise", "colour", "compression"]
CUE_NAMES: tuple[CueName, ...] = get_args(CueName)
EffectName: TypeAlias = Literal["gap", "sufficiency", "attraction"] | CueName
"""The effects: of the background, and of statistics of the whole picture."""


OVERALL = ""
"""The key of the measures of all classes together."""

Scope: TypeAlias = Literal["all classes", "one class", "sufficiency"]
"""What decides an effect's level: the gap and the cues of all classes together, the gap and the attraction of one
class, and the sufficiency each have rules of their own."""

Level: TypeAlias = Literal["fail", "excluded", "warn", "open"]


class Pasted(NamedTuple):
    """An answer to the object on another background: the background's class and group, and the class that is named."""

    background: str
    group: str
    named: str


@dataclass(frozen=True)
class ImageRow:
    """What was measured on one picture. docs/check.md explains the measures.

    Attributes:
        name, label, group: the picture's name, class and group.
        right, answer, probability: whether the answer to the unedited picture is right, the class it names, and the
            probability of the picture's own class, if the model has probabilities.
        status: whether the map has evidence.
        energy, shuffled, ceiling: E, S and C of the map.
        room: the headroom: how much more energy perfect maps have in their own region than in other pictures' regions.
        hit, rank, area: as ``experiment.measure`` returns them.
        grid: rows and columns of the map.
        same, other: by fill, the share of right answers on backgrounds of its own class, and of other classes.
        pasted: by fill, the answers to the object on each background that it was shown on.
        removed, named: by fill, whether the answer was right with the object removed, and the class named then.
        same_cue, other_cue: by statistic of the whole picture, whether the answer was right with the value of a picture
            of its own class, and of another class.
    """

    name: str
    label: str
    group: str
    right: bool
    answer: str
    probability: float | None
    status: str
    energy: float | None = None
    shuffled: float | None = None
    ceiling: float | None = None
    room: float | None = None
    hit: float | None = None
    rank: float | None = None
    area: float | None = None
    grid: tuple[int, ...] | None = None
    same: Mapping[str, float] = field(default_factory=dict)
    other: Mapping[str, float] = field(default_factory=dict)
    pasted: Mapping[str, Sequence[Pasted]] = field(default_factory=dict)
    removed: Mapping[str, bool] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    same_cue: Mapping[str, bool] = field(default_factory=dict)
    other_cue: Mapping[str, bool] = field(default_factory=dict)

    @functools.cached_property
    def by_background(self) -> dict[str, list[bool]]:
        """Whether the answers on the backgrounds of each class are right, with all fills."""
        right: dict[str, list[bool]] = defaultdict(list)
        for pasted in (answer for of_fill in self.pasted.values() for answer in of_fill):
            right[pasted.background].append(pasted.named == self.label)
        return right

    @property
    def skill(self) -> tuple[float, float] | None:
        """How far the map and a perfect map beat the maps of other pictures; None if they could not be compared."""
        if self.energy is None or self.shuffled is None or self.ceiling is None:
            return None
        return self.energy - self.shuffled, self.ceiling - self.shuffled


@dataclass(frozen=True)
class Pair:
    """Objects of one class on backgrounds of another, how many, and the share of them that the model recognises."""

    label: str
    background: str
    accuracy: float
    pictures: int


def named_without_object(rows: Sequence[ImageRow], label: str, *, own: bool = True) -> tuple[int, int]:
    """Count the pictures on which the model names a class with the object removed, and the pictures that were tried.

    ``own`` counts pictures of the class; otherwise those of other classes count. Any way of filling the hole counts.
    """
    named = [label in row.named.values() for row in rows if row.named and (row.label == label) is own]
    return sum(named), len(named)


IMAGES = TypeAdapter(ImageRow)
"""How the row of a picture becomes JSON, and is read from it."""


def image_rows(plan: Plan, heat: Mapping[str, HeatRow], answers: Mapping[str, Answers]) -> list[ImageRow]:
    """Join what was measured on each picture.

    Args:
        plan: the check.
        heat: the journal's heat row of each usable picture, by name.
        answers: the answers to each picture's edits, by name.
    """
    energies = compare_maps(plan.data.items, heat)
    rows = []
    for name, item in ((name, item) for name, item in plan.by_name.items() if name in heat):
        shown, of_map = heat[name].answer, heat[name].in_region
        outputs, of_edits = plan.outputs[item.label], answers.get(name, {})
        right = {edit: answer.output in outputs for edit, answer in of_edits.items()}
        named = {edit: plan.name_of(answer.output) for edit, answer in of_edits.items()}
        lent = {edit: plan.by_name[edit.lender] for edit in of_edits if edit.arm in ("same", "other")}
        counted = {edit: behind for edit, behind in lent.items() if not plan.excuses(named[edit], behind)}
        share = {
            of: float(np.mean([right[edit] for edit in edits]))
            for of, edits in grouped(counted, lambda edit: (edit.arm, edit.fill)).items()
        }
        fills = sorted(fill for arm, fill in share if arm == "same" and ("other", fill) in share)
        answered = {edit: Pasted(behind.label, behind.group, named[edit]) for edit, behind in counted.items()}
        rows.append(
            ImageRow(
                name=name,
                label=item.label,
                group=item.group,
                right=shown.output in outputs,
                answer=plan.name_of(shown.output),
                probability=shown.share,
                status=heat[name].status,
                grid=None if of_map is None else of_map.grid,
                **energies.get(name, {}),
                **({} if of_map is None else of_map.measures),
                same={fill: share["same", fill] for fill in fills},
                other={fill: share["other", fill] for fill in fills},
                pasted={fill: tuple(one for edit, one in answered.items() if edit.fill == fill) for fill in fills},
                removed=_by_fill(right, "removed"),
                named=_by_fill(named, "removed"),
                same_cue=_by_fill(right, "same-cue"),
                other_cue=_by_fill(right, "other-cue"),
            )
        )
    return rows


_T = TypeVar("_T")


def _by_fill(values: Mapping[Edit, _T], arm: Arm) -> dict[str, _T]:
    """Return the values of the edits of one arm, by fill."""
    return {edit.fill: value for edit, value in values.items() if edit.arm == arm}


_Z, _ROUNDING = 1.96, 1e-9
"""The normal quantile of a 95% interval, and how far two equal interval ends may differ by rounding."""


@dataclass(frozen=True)
class MeasuredEffect:
    """An effect measured with one fill, or the mean of the fills: a difference of two shares.

    Attributes:
        effect: the difference and its interval.
        p: the p-value of "the effect is not above its limit".
        p_zero: the p-value of "the effect is not above 0".
        accuracies: the two shares.
        pictures: the pictures behind it.
    """

    effect: Estimate
    p: float
    p_zero: float
    accuracies: tuple[float, float]
    pictures: int


@dataclass(frozen=True)
class Effect:
    """What is known about one effect of a class, or of all classes together, from its measurement to the reports.

    Attributes:
        name: gap, sufficiency or attraction; or a statistic of the whole picture, such as sharpness.
        by_fill: the effect measured with each way of filling the holes; empty if it could not be measured.
        limit: the largest effect that may ship.
        mean: the mean of the fills, picture by picture, which is what is tested; None if nothing was measured.
        label: the class; OVERALL for all classes together.
        p: the p-value of "the effect is not above the limit", after the correction for the number of tests; None if the
            effect was not tested.
        significant: whether the effect is significantly above the limit.
        present: whether the effect is significantly above 0.
        enough: whether there are enough pictures to test it; with fewer, an effect never fails and never warns.
        counts: whether the effect counts. A sufficiency counts only while a gap of all classes is not excluded, since a
            model may recognise a place without relying on it, and only if there are enough groups to test that gap.
        least_groups: how many groups of pictures the effect needs to be significant, if it has too few for that
            whatever the answers; otherwise the fewest groups that give an interval.
        of_detector: whether the model is a detector, which finds objects.
    """

    name: EffectName
    by_fill: Mapping[str, MeasuredEffect]
    limit: float
    mean: MeasuredEffect | None = None
    label: str = OVERALL
    p: float | None = None
    significant: bool = False
    present: bool = False
    enough: bool = True
    counts: bool = True
    least_groups: int = MIN_GROUPS
    of_detector: bool = False

    @property
    def scope(self) -> Scope:
        """Which rules decide the level."""
        if self.name == "sufficiency":
            return "sufficiency"
        return "all classes" if self.label == OVERALL else "one class"

    @property
    def level(self) -> Level:
        """The level of the first row of ``LEVELS`` that applies."""
        return next(rule.then for rule in LEVELS[self.scope] if rule.applies(self))

    @property
    def value(self) -> float:
        """The estimate: the mean of the fills; NaN if nothing was measured."""
        return math.nan if self.mean is None else self.mean.effect.value

    @property
    def low(self) -> float:
        """The lower end of the interval; NaN if there is none."""
        return math.nan if self.mean is None else self.mean.effect.low

    @property
    def high(self) -> float:
        """The upper end of the interval; NaN if there is none."""
        return math.nan if self.mean is None else self.mean.effect.high

    @property
    def above_with_every_fill(self) -> bool:
        """Whether it was measured, and its estimate is above the limit with every fill."""
        return bool(self.by_fill) and all(of_fill.effect.value > self.limit for of_fill in self.by_fill.values())

    @property
    def groups(self) -> int:
        """The effective number of groups of pictures."""
        return 0 if self.mean is None else self.mean.effect.groups

    @property
    def pictures(self) -> int:
        """The pictures behind it."""
        return 0 if self.mean is None else self.mean.pictures

    @property
    def lacks_groups(self) -> bool:
        """Whether the effect has too few groups to be tested.

        A gap has too few if they give no interval. With a few more, an effect can be excluded but never significant, so
        it counts as untested if it would warn otherwise.
        """
        if self.mean is None or self.name == "sufficiency" or self.groups >= self.least_groups:
            return False
        if self.groups < MIN_GROUPS:
            return self.name == "gap"
        return self.above_with_every_fill if self.scope == "one class" else self.value > self.limit or self.low > 0

    @property
    def excluded_above(self) -> float | None:
        """The upper end of the interval, and at least 0: a larger effect is excluded. None if there is no interval."""
        return max(0.0, self.high) if math.isfinite(self.high) else None

    @property
    def more_pictures(self) -> tuple[int, int] | None:
        """About how many more pictures would exclude an effect above the limit; None if no number would.

        The first number does so in about half of the checks, and the second in four of five, if the true effect is the
        estimate. The interval narrows with the square root of the number of pictures, or as Wilson's does if it reaches
        no further than that. (0, 0) if the effect is excluded already.
        """
        if self.level == "excluded":
            return 0, 0
        distance, reach = self.limit - self.value, self.high - self.value
        if self.mean is None or self.level == "fail" or not distance > 0 or not math.isfinite(reach):
            return None
        if reach > wilson(0, self.groups)[1] + _ROUNDING:
            times = (reach / distance) ** 2
        else:
            times = _Z**2 * (1 - distance) / distance / self.groups
        # If an effect needs more than this many times the pictures at hand, no number is predicted. At ten times, the
        # estimate lies 0.62 standard errors below its limit, so the true effect exceeds the limit in more than a
        # quarter of such cases.
        if times > 10:
            return None
        # How many times as many pictures exclude an effect in 80% of checks as exclude it in half of them: the
        # interval's end must then lie below the limit by another 0.84 standard errors, and ((1.96 + 0.84) / 1.96)^2 =
        # 2.0
        fewest, most = (self.mean.pictures * (factor * times - 1) for factor in (1, 2.0))
        return _rounded_up(fewest), _rounded_up(most)


def _rounded_up(number: float) -> int:
    """Return the next whole number of two significant digits, and at least 1.

    >>> _rounded_up(0.0), _rounded_up(7.2), _rounded_up(121.0)
    (1, 8, 130)
    """
    step: int = 10 ** max(0, math.floor(math.log10(max(1.0, number))) - 1)
    return max(1, math.ceil(number / step) * step)


Then = TypeVar("Then")
Of = TypeVar("Of")


class Rule(NamedTuple, Generic[Then, Of]):
    """A row of ``LEVELS`` or ``VERDICTS``: the level or verdict, and its condition in words and as a function."""

    then: Then
    when: str
    applies: Callable[[Of], bool]


_FAIL = Rule[Level, Effect](
    "fail",
    "it is significantly above the limit, and its estimate with each fill is above the limit",
    lambda effect: effect.significant and effect.above_with_every_fill,
)
_EXCLUDED = Rule[Level, Effect](
    "excluded", "its interval ends below the limit", lambda effect: effect.high < effect.limit
)
_OPEN = Rule[Level, Effect]("open", "otherwise", lambda _: True)

LEVELS: Mapping[Scope, tuple[Rule[Level, Effect], ...]] = {
    "all classes": (
        _FAIL,
        _EXCLUDED,
        Rule(
            "warn",
            "its interval lies above 0, or its estimate is above the limit",
            lambda effect: (
                (effect.low > 0 or effect.value > effect.limit) and effect.enough and not effect.lacks_groups
            ),
        ),
        _OPEN,
    ),
    "one class": (
        _FAIL,
        _EXCLUDED,
        Rule(
            "warn",
            "it is significantly above 0, and its estimate with each fill is above the limit",
            lambda effect: effect.present and effect.above_with_every_fill and not effect.lacks_groups,
        ),
        _OPEN,
    ),
    "sufficiency": (
        _EXCLUDED,
        Rule(
            "warn",
            "its interval lies above the limit, and the gap of all classes is not excluded and has enough groups",
            lambda effect: effect.counts and effect.enough and effect.low > effect.limit,
        ),
        _OPEN,
    ),
}
"""The levels of an effect by its scope; the first row that applies decides."""


@dataclass(frozen=True)
class Measures:
    """The measures of one class, or of all classes together.

    Attributes:
        name: the class; OVERALL for all classes together.
        pictures: pictures that the model answered, whether or not their map has evidence.
        tested: pictures in the experiment.
        accuracy: on the unedited pictures, with Wilson's interval.
        empty: share of the maps without any evidence.
        energy, shuffled, ceiling: means of E, S and C; None without regions.
        room: mean headroom: how much more energy perfect maps have in their own region than in other pictures' regions.
        skill: mean(E - S) / mean(C - S).
        hits, rank, area: means.
        effects: the effects by name; in the result of a check, those that count have their levels. The gap is the
            accuracy on backgrounds of the object's own class minus that on backgrounds of other classes. The
            sufficiency says how far the accuracy without the object is above chance. The attraction says how often
            objects of other classes get this class's name on its backgrounds, minus how often they get it on other
            backgrounds; it is not measured for all classes together, where the gap measures the same. The effect of a
            statistic of the whole picture is the accuracy with the values of the object's own class minus the accuracy
            with the values of other classes.
    """

    name: str
    pictures: int
    tested: int
    accuracy: Estimate
    empty: float
    energy: float | None = None
    shuffled: float | None = None
    ceiling: float | None = None
    room: float | None = None
    skill: Estimate | None = None
    hits: float | None = None
    rank: float | None = None
    area: float | None = None
    effects: Mapping[EffectName, Effect] = field(default_factory=dict)

    @property
    def gap(self) -> Effect:
        """The background gap."""
        return self.effects["gap"]

    @property
    def sufficiency(self) -> Effect:
        """The sufficiency of the background."""
        return self.effects["sufficiency"]

    @property
    def attraction(self) -> Effect:
        """The attraction of the class's backgrounds."""
        return self.effects["attraction"]

    @property
    def counting(self) -> list[Effect]:
        """The effects that count for the verdict.

        The sufficiency counts for all classes together only: for one class it also rises if a model that sees no object
        names the class that the bare background resembles.
        """
        of_all: tuple[EffectName, ...] = ("gap", "sufficiency", *CUE_NAMES)
        names = of_all if self.name == OVERALL else ("gap", "attraction")
        return [self.effects[name] for name in names if name in self.effects]


def all_excluded_above(effects: Iterable[Effect]) -> float | None:
    """Return the size above which each of some effects is excluded; None if there are none, or one is not."""
    ends = [effect.excluded_above for effect in effects]
    known = [end for end in ends if end is not None]
    return max(known) if known and len(known) == len(ends) else None


def limit_of(name: EffectName, limits: Limits) -> float:
    """Return the limit of an effect. The limit of the gap also holds for the statistics of the whole picture."""
    return limits.attraction if name == "attraction" else limits.sufficiency if name == "sufficiency" else limits.gap


def measure_all(
    rows: Sequence[ImageRow],
    limits: Limits,
    seed: int,
    excluded: Collection[str] = (),
    classes: Collection[str] = (),
    resamples: int = RESAMPLES,
) -> dict[str, Measures]:
    """Measure each class and, under OVERALL, all classes together.

    Args:
        rows: one per usable picture.
        limits: what the p-values test against.
        seed: the seed of the bootstrap.
        excluded: classes left out of the measures of all classes together, and of the attraction of others.
        classes: classes that must have measures even if none of their pictures could be used.
        resamples: resamples of each bootstrap.
    """
    by_class = {**{name: [] for name in classes}, **grouped(rows, lambda row: row.label)}
    counted = [row for row in rows if row.label not in excluded]
    chances: dict[str, dict[str, Sequence[float]]] = defaultdict(dict)
    for fill in sorted({fill for row in rows for fill in row.removed}):
        # The chance level of one class is how often pictures of other classes get its name with their object removed: a
        # model that always names the same class if it sees nothing is not above it. Its sampling error is neglected,
        # because it rests on many more pictures than the class has.
        tested = [row for row in rows if fill in row.removed]
        labels, named = Counter(row.label for row in tested), Counter(row.named[fill] for row in tested)
        right = Counter(row.label for row in tested if row.named[fill] == row.label)
        for name, count in labels.items():
            if count < len(tested):
                share = (named[name] - right[name]) / (len(tested) - count)
                chances[name][fill] = [share] * len(by_class[name])
        # If the answers were shuffled among the pictures, an answer would be right as often as the class that it names
        # occurs among them. The sampling error of this chance level is neglected too.
        labels = Counter(row.label for row in counted if fill in row.removed)
        chances[OVERALL][fill] = [labels[row.named.get(fill, "")] / max(1, labels.total()) for row in counted]
    attractions = _attractions(counted, limits.attraction, seed, resamples)
    return {
        name: _measure(name, own, limits, seed, chances[name], resamples, attractions[name])
        for name, own in [*sorted(by_class.items()), (OVERALL, counted)]
    }


ALL_FILLS = "all fills"
"""Stands in place of a fill's name for the mean of the fills, if there are several."""


def _with_all(fills: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the sets of fills to measure with, by name: each alone and, if there are several, all of them."""
    sets: dict[str, Sequence[str]] = {fill: [fill] for fill in fills}
    return {**sets, ALL_FILLS: fills} if len(fills) > 1 else sets


def _attractions(
    rows: Sequence[ImageRow], limit: float, seed: int, resamples: int
) -> dict[str, dict[str, MeasuredEffect]]:
    """Return, by class and fill, how much a class's backgrounds attract the answers to objects of other classes.

    The rate on other backgrounds is taken as exact, because it rests on many more pictures.
    """
    attractions: dict[str, dict[str, MeasuredEffect]] = defaultdict(dict)
    for key, fills in _with_all(sorted({fill for row in rows for fill in row.pasted})).items():
        pairs_on: dict[str, list[tuple[ImageRow, Pasted]]] = defaultdict(list)  # objects of other classes
        involving, named_elsewhere = Counter[str](), Counter[str]()  # pairs whose object or background is of the class
        shown = [(row, pasted) for row in rows for fill in fills for pasted in row.pasted.get(fill, ())]
        for row, pasted in shown:
            classes = {pasted.background, row.label}
            if len(classes) > 1:
                pairs_on[pasted.background].append((row, pasted))
            involving.update(classes)
            named_elsewhere.update({pasted.named} - classes)
        for name, pairs in pairs_on.items():
            elsewhere = len(shown) - involving[name]
            if not elsewhere:
                continue
            rate = named_elsewhere[name] / elsewhere
            terms = np.array([(float(pasted.named == name), rate, 1.0) for _, pasted in pairs])
            objects, backgrounds = [row.group for row, _ in pairs], [pasted.group for _, pasted in pairs]
            sums = bootstrap_sums(terms, group_numbers(objects), [seed, seed_of(name)], resamples)
            residuals = terms[:, 0] - terms[:, 0].mean()
            variance = added_variance(residuals, group_numbers(objects), group_numbers(backgrounds))
            # The class's own pictures lend the backgrounds
            lenders = effective_groups([row.group for row in rows if row.label == name]) or len(pairs)
            least = min(len(set(backgrounds)), lenders)
            measured = _measured_effect(sums, terms, objects, limit, variance, least)
            attractions[name][key] = replace(measured, pictures=len({row.name for row, _ in pairs}))
    return attractions


def _backgrounds_of_gap(rows: Sequence[ImageRow], fills: Sequence[str]) -> tuple[float, int]:
    """Return what the backgrounds do to a gap, the mean of some fills, as ``_measured_effect`` takes it.

    An object is shown on both kinds of backgrounds, so its answers form a pair: what they have in common, such as an
    object that is hard to recognise, cancels in the difference. The same holds for a background that serves objects of
    its own class and of others. The expectation of an answer is the mean of its class and kind.
    """
    answers: dict[tuple[str, bool], list[tuple[float, float, str, str]]] = defaultdict(list)
    for row in rows:
        shown = [row.pasted[fill] for fill in fills if fill in row.pasted]
        for of_fill in shown:
            own = sum(pasted.background == row.label for pasted in of_fill)
            for pasted in of_fill:
                same = pasted.background == row.label
                weight = (1 / own if same else -1 / (len(of_fill) - own)) / len(shown)
                answers[row.label, same].append((float(pasted.named == row.label), weight, row.group, pasted.group))
    if not answers:  # the backgrounds are not known
        return 0.0, sys.maxsize
    groups: dict[bool, set[str]] = {same: set() for _, same in answers}
    terms: list[tuple[float, str, str]] = []
    for (_, same), kind in answers.items():
        expected = sum(right for right, *_ in kind) / len(kind)
        terms += [((right - expected) * weight, own, lent) for right, weight, own, lent in kind]
        groups[same] |= {lent for *_, lent in kind}
    residuals, objects, backgrounds = zip(*terms, strict=True)
    variance = added_variance(np.array(residuals), group_numbers(objects), group_numbers(backgrounds))
    return variance, min(map(len, groups.values()))


def _mean(values: Sequence[float | bool | None]) -> float | None:
    """Return the mean of the values that are not None; None if all are."""
    numbers = [float(value) for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


def _measure(
    name: str,
    rows: Sequence[ImageRow],
    limits: Limits,
    seed: int,
    chances: Mapping[str, Sequence[float]],
    resamples: int,
    attraction: Mapping[str, MeasuredEffect],
) -> Measures:
    """Return the measures of a class, whose attraction was measured before, or of all classes together.

    By fill, ``chances`` says how often the answer to each picture without its object would be right by chance. The
    skill, and the gap, the sufficiency and the exchanged statistics by fill, are measured on the same resamples: each
    is a ratio of sums over the pictures that have it, so each adds three columns of terms to one resampling.
    """
    skill: Estimate | None = None
    measured: dict[EffectName, dict[str, MeasuredEffect]] = {"gap": {}, "sufficiency": {}}
    sets = _with_all(sorted({fill for row in rows for fill in row.same.keys() & row.other.keys()}))
    shares: dict[tuple[EffectName | Literal["skill"], str], list[list[tuple[float | None, float | None]]]] = {
        **{
            ("gap", key): [[(row.same.get(fill), row.other.get(fill)) for fill in fills] for row in rows]
            for key, fills in sets.items()
        },
        **{
            ("sufficiency", key): [
                [(row.removed.get(fill), chances[fill][number]) for fill in fills] for number, row in enumerate(rows)
            ]
            for key, fills in _with_all(sorted(chances)).items()
        },
        **{  # statistics of the whole picture fill nothing
            (cue, "whole picture"): [[(row.same_cue.get(cue), row.other_cue.get(cue))] for row in rows]
            for cue in sorted(CUE_NAMES)
        },
        ("skill", ""): [[row.skill or (None, None)] for row in rows],
    }
    terms = {of: columns for of, pairs in shares.items() if rows and (columns := _paired(pairs)).any()}
    numbers = group_numbers([row.group for row in rows])
    strata = strata_of_groups(numbers, [row.label for row in rows])
    stacked = np.hstack([*terms.values(), np.zeros((len(rows), 0))])
    all_sums = bootstrap_sums(stacked, numbers, [seed, seed_of(name)], resamples, strata) if terms else stacked
    for number, ((effect, fill), columns) in enumerate(terms.items()):
        sums = all_sums[:, 3 * number : 3 * number + 3]
        groups = [row.group for row, (_, second, count) in zip(rows, columns, strict=True) if count or second]
        if effect == "skill":  # sum(E - S) / sum(C - S); NaN if the denominator is not positive
            (gained, possible, _), (own, most, _) = sums.T, columns.sum(0)
            draws = gained / np.where(possible > 0, possible, np.nan)
            skill = interval(draws, float(own / most) if most > 0 else math.nan, len(set(groups)))
        else:
            shown = _backgrounds_of_gap(rows, sets[fill]) if effect == "gap" else (0.0, sys.maxsize)
            of_fill = _measured_effect(sums, columns, groups, limit_of(effect, limits), *shown)
            measured.setdefault(effect, {})[fill] = of_fill
    effects: dict[EffectName, Effect] = {}
    for effect_name, with_all in {**measured, "attraction": attraction}.items():
        by_fill = {fill: of_fill for fill, of_fill in with_all.items() if fill != ALL_FILLS}
        mean = with_all.get(ALL_FILLS) or next(iter(by_fill.values()), None)
        effects[effect_name] = Effect(effect_name, by_fill, limit_of(effect_name, limits), mean, name)
    if not rows:
        return Measures(name, 0, 0, Estimate(math.nan, math.nan, math.nan, 0), 0.0, effects=effects)
    right = sum(row.right for row in rows)
    low, high = wilson(right, len(rows))
    skilled = [row for row in rows if row.skill is not None]
    return Measures(
        name=name,
        pictures=len(rows),
        tested=sum(bool(row.same) for row in rows),
        accuracy=Estimate(right / len(rows), low, high, len({row.group for row in rows})),
        empty=float(np.mean([row.status not in ("ok", NO_HEAT) for row in rows])),
        energy=_mean([row.energy for row in skilled]),
        shuffled=_mean([row.shuffled for row in skilled]),
        ceiling=_mean([row.ceiling for row in skilled]),
        room=_mean([row.room for row in skilled]),
        skill=skill,
        hits=_mean([row.hit for row in rows]),
        rank=_mean([row.rank for row in rows]),
        area=_mean([row.area for row in rows]),
        effects=effects,
    )


def _paired(shares: Sequence[Sequence[tuple[float | None, float | None]]]) -> Float[np.ndarray, "n 3"]:
    """Return what each picture adds to the sums of an effect, from its two shares with each fill.

    These are the means of both shares over the fills that have both, and 1 if there is such a fill.
    """
    found = np.array(shares, float)  # None becomes NaN
    known = np.isfinite(found).all(2)
    means = np.where(known[:, :, None], found, 0.0).sum(1) / np.maximum(known.sum(1), 1)[:, None]
    return np.column_stack([means, known.any(1)])


def _measured_effect(
    sums: Float[np.ndarray, "b 3"],
    terms: Float[np.ndarray, "n 3"],
    groups: Sequence[str],
    limit: float,
    variance: float,
    background_groups: int,
) -> MeasuredEffect:
    """Test a difference of two shares.

    The resamples draw objects with all their answers, so the two shares of an object stay a pair. Because backgrounds
    serve several objects, each resample gets a normally distributed number added.

    Args:
        sums: over each resample, the sum of the first share, of the second share, and the count.
        terms: the same three for each picture.
        groups: the group of each picture that counts.
        limit: what the difference is tested against.
        variance: the variance that the sum gains because a background is shown behind several objects.
        background_groups: the number of groups of backgrounds, for the kind that has fewer.
    """
    first, second, count = sums.T
    total = terms.sum(0)
    draws = (first - second) / np.where(count > 0, count, np.nan)
    shares = (float(total[0] / total[2]), float(total[1] / total[2]))
    value, group_count = shares[0] - shares[1], min(effective_groups(groups), background_groups)
    # Normal numbers stand for the backgrounds. Every effect may use the same ones.
    numbers = np.random.default_rng(1).standard_normal(len(draws))
    draws = draws + variance**0.5 / float(total[2]) * numbers
    pictures = int(np.count_nonzero(terms[:, 2]))
    p, p_zero = (p_above(draws, threshold, group_count) for threshold in (limit, 0.0))
    return MeasuredEffect(widened(interval(draws, value, group_count)), p, p_zero, shares, pictures)
