"""The decision table: how certain each effect is, and which verdict follows from that.

``LEVELS`` and ``VERDICTS`` are the whole rule. In both, the first row that applies decides. docs/check.md and the HTML
report print their words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, get_args

from camkit.background.values import Verdict
from camkit.kit.statistics import MIN_GROUPS, Estimate

CueName: TypeAlias = Literal["sharpness", "noise", "colour", "compression"]
CUE_NAMES: tuple[CueName, ...] = get_args(CueName)
EffectName: TypeAlias = Literal["gap", "sufficiency", "attraction"] | CueName
"""The effects: of the background, and of statistics of the whole picture."""

WHOLE_PICTURE = "whole picture"
"""Stands in place of a fill's name for statistics of the whole picture, which fill nothing."""

Level: TypeAlias = Literal["fail", "warn", "excluded", "open"]

_MOST_TIMES = 10
"""If an effect needs more than this many times the pictures at hand, no number is predicted. At ten times, the estimate
lies 0.62 standard errors below its limit, so the true effect exceeds the limit in more than a quarter of such cases."""


@dataclass(frozen=True)
class MeasuredEffect:
    """An effect measured with one fill: a difference of two shares.

    Attributes:
        effect: the difference and its interval.
        p: the p-value of "the effect is not above its limit".
        accuracies: the two shares.
        pictures: the pictures behind it.
    """

    effect: Estimate
    p: float
    accuracies: tuple[float, float]
    pictures: int


@dataclass(frozen=True)
class Effect:
    """What is known about one effect of a class, or of all classes together, from its measurement to the reports.

    Attributes:
        name: gap, sufficiency or attraction; or a statistic of the whole picture, such as sharpness.
        by_fill: the effect measured with each way of filling the holes; empty if it could not be measured.
        limit: the largest effect that may ship.
        p: the p-value of "with at least one fill, the effect is not above the limit", after the correction for the
            number of tests; None if the effect was not tested.
        significant: whether the effect is significantly above the limit with every fill.
        overruled: whether the effect only warns, although it is significant: it is a sufficiency, and no other effect
            of all classes together is estimated above its limit with every fill. Such a model knows backgrounds, but
            uses them little while it sees the object.
        least_groups: how many groups of pictures the effect needs to be significant, if it has too few for that
            whatever the answers; otherwise the fewest groups that give an interval.
    """

    name: EffectName
    by_fill: Mapping[str, MeasuredEffect]
    limit: float
    p: float | None = None
    significant: bool = False
    overruled: bool = False
    least_groups: int = MIN_GROUPS

    @property
    def level(self) -> Level:
        """The level of the first row of ``LEVELS`` that applies."""
        return next(rule.level for rule in LEVELS if rule.applies(self))

    @property
    def above_with_every_fill(self) -> bool:
        """Whether it was measured, and its estimate is above the limit with every fill."""
        return bool(self.by_fill) and all(_value(measured) > self.limit for measured in self.by_fill.values())

    @property
    def groups(self) -> int:
        """The number of groups of pictures, for the fill that has the fewest."""
        return min((measured.effect.groups for measured in self.by_fill.values()), default=0)

    @property
    def lacks_groups(self) -> bool:
        """Whether the effect has too few groups to be tested.

        A gap has too few if they give no interval. With a few more, an effect can be excluded but never significant, so
        it counts as untested if it warns. The warning of a sufficiency counts in any case.
        """
        if not self.by_fill or self.groups >= self.least_groups:
            return False
        if self.groups < MIN_GROUPS:
            return self.name == "gap"
        return self.level == "warn" and self.name != "sufficiency"

    def level_with(self, fill: str) -> Level:
        """Return the level if this fill were the only one, and the effect had not been tested for significance."""
        return replace(self, by_fill={fill: self.by_fill[fill]}, significant=False).level

    @property
    def weakest(self) -> MeasuredEffect | None:
        """The fill with the smallest effect; None if nothing was measured."""
        return min(self.by_fill.values(), key=_value, default=None)

    @property
    def decisive(self) -> MeasuredEffect | None:
        """The fill that decides: the weakest one for "fail", otherwise the strongest; None if nothing was measured."""
        if self.level == "fail":
            return self.weakest
        deciding = [measured for fill, measured in self.by_fill.items() if self.level_with(fill) == self.level]
        return max(deciding, key=_value if self.level == "warn" else _upper_end, default=None)

    @property
    def excluded_above(self) -> float | None:
        """The upper end of the interval, with every fill: a larger effect is excluded. None if there is no interval."""
        highest = max(map(_upper_end, self.by_fill.values()), default=math.inf)
        return max(0.0, highest) if math.isfinite(highest) else None

    @property
    def more_pictures(self) -> int | None:
        """About how many more pictures would exclude an effect above the limit; None if no number would.

        This assumes that the interval narrows with the square root of the number of pictures, and that the estimate
        stays.
        """
        if self.level == "excluded":
            return 0
        if self.level == "fail":
            return None
        more = [
            _more_pictures(measured, self.limit)
            for fill, measured in self.by_fill.items()
            if self.level_with(fill) != "excluded"
        ]
        known = [number for number in more if number is not None]
        return max(known) if known and len(known) == len(more) else None


def _value(measured: MeasuredEffect) -> float:
    return measured.effect.value


def _upper_end(measured: MeasuredEffect) -> float:
    """Return the interval's upper end; infinity if there are too few groups for an interval."""
    high = measured.effect.high
    return math.inf if math.isnan(high) else high


def _more_pictures(measured: MeasuredEffect, limit: float) -> int | None:
    estimate, pictures = measured.effect, measured.pictures
    distance = limit - estimate.value
    reach = estimate.high - estimate.value
    if not distance > 0 or not math.isfinite(reach):
        return None
    times = (reach / distance) ** 2
    return None if times > _MOST_TIMES else _rounded_up(pictures * times - pictures)


def _rounded_up(number: float) -> int:
    """Return the next whole number of two significant digits, and at least 1.

    >>> _rounded_up(0.0), _rounded_up(7.2), _rounded_up(121.0)
    (1, 8, 130)
    """
    step: int = 10 ** max(0, math.floor(math.log10(max(1.0, number))) - 1)
    return max(1, math.ceil(number / step) * step)


class LevelRule(NamedTuple):
    """A row of the table of levels."""

    level: Level
    when: str
    applies: Callable[[Effect], bool]


LEVELS = (
    LevelRule(
        "fail",
        "it is significantly above the limit with every fill. A sufficiency also needs another effect of all classes "
        "together whose estimate is above its limit with every fill, unless no other effect could be measured",
        lambda effect: effect.significant and not effect.overruled,
    ),
    LevelRule(
        "warn",
        "its estimate is above the limit with any fill; or the interval is above 0 and ends above the limit",
        lambda effect: any(
            measured.effect.value > effect.limit or (measured.effect.low > 0 and measured.effect.high > effect.limit)
            for measured in effect.by_fill.values()
        ),
    ),
    LevelRule(
        "excluded",
        "its interval ends below the limit with every fill",
        lambda effect: (
            bool(effect.by_fill) and all(measured.effect.high < effect.limit for measured in effect.by_fill.values())
        ),
    ),
    LevelRule("open", "otherwise", lambda _: True),
)


@dataclass(frozen=True)
class Findings:
    """What the verdict on a class, or on the model, follows from.

    Attributes:
        required: the levels of the effects that must be excluded for a PASS.
        others: the levels of the other effects.
        untested: whether something kept a class, or all classes together, from being tested.
        warned: whether the heat or an optional analysis warns: over all classes together, a smaller share of the heat
            lies on the objects than in maps that ignore the picture; without regions, the heat gives a hint; or a class
            is significantly less accurate on one of the places that the data names.
    """

    required: Sequence[Level] = ()
    others: Sequence[Level] = ()
    untested: bool = False
    warned: bool = False

    @property
    def verdict(self) -> Verdict:
        """The verdict of the first row of ``VERDICTS`` that applies."""
        return next(rule.verdict for rule in VERDICTS if rule.applies(self))

    def has(self, level: Level) -> bool:
        """Return whether any effect is at a level."""
        return level in (*self.required, *self.others)

    @classmethod
    def joined(cls, several: Sequence[Findings]) -> Findings:
        """Return the findings for the model from those of its classes and of all classes together."""
        return cls(
            required=[level for findings in several for level in findings.required],
            others=[level for findings in several for level in findings.others],
            untested=any(findings.untested for findings in several),
            warned=any(findings.warned for findings in several),
        )


class VerdictRule(NamedTuple):
    """A row of the table of verdicts."""

    verdict: Verdict
    when: str
    applies: Callable[[Findings], bool]


VERDICTS = (
    VerdictRule(
        "FAIL",
        "an effect is at level fail",
        lambda findings: findings.has("fail"),
    ),
    VerdictRule(
        "INCONCLUSIVE",
        "a class, or all classes together, could not be tested, for example because an effect that would warn has too "
        "few groups to ever be significant",
        lambda findings: findings.untested,
    ),
    VerdictRule(
        "WARN",
        "an effect is at level warn; or a class is significantly less accurate on one of the places that the data "
        "names, by more than the limit of the gap; or, over all classes together, a smaller share of the heat lies on "
        "the objects than in maps that ignore the picture; or, without regions, the heat gives a hint",
        lambda findings: findings.has("warn") or findings.warned,
    ),
    VerdictRule(
        "PASS",
        "all effects of all classes together are excluded (with --strict: those of each class too)",
        lambda findings: all(level == "excluded" for level in findings.required),
    ),
    VerdictRule("INCONCLUSIVE", "otherwise", lambda _: True),
)
