"""What is known about an effect, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from camkit.background.edits import RING
from camkit.background.effects import Effect, EffectName, MeasuredEffect
from camkit.kit.statistics import MIN_GROUPS


class Reason(NamedTuple):
    """A reason for a verdict.

    Attributes:
        kind: a short text that many classes can share.
        text: the full text for one class.
        fails: whether it alone makes the verdict FAIL.
    """

    kind: str
    text: str
    fails: bool = False


WITH_ARTICLE: Mapping[EffectName, str] = {
    "gap": "a gap",
    "attraction": "an attraction",
    "sufficiency": "a sufficiency",
    "sharpness": "a sharpness gap",
    "noise": "a noise gap",
    "colour": "a colour gap",
    "compression": "a compression gap",
}
"""The effects' names within a sentence."""


def reason_of(effect: Effect) -> Reason:
    """Say what is known about an effect, by the fill that decides."""
    measured = effect.decisive
    if measured is None:
        text = f"the {_noun(effect)} could not be measured"
        return Reason(text, text)
    match effect.level:
        case "fail":
            kind = f"reads {_reads(effect)}: {WITH_ARTICLE[effect.name]} above the limit"
            return Reason(kind, _significant(effect, measured), fails=True)
        case "warn":
            kind = f"possibly reads {_reads(effect)}: {WITH_ARTICLE[effect.name]} that may be above the limit"
            return Reason(kind, _probable(effect, measured))
        case "excluded":
            return Reason(f"{WITH_ARTICLE[effect.name]} above the limit is excluded", _excluded(effect, measured))
        case "open":
            return Reason(f"{WITH_ARTICLE[effect.name]} above the limit cannot be excluded", _open(effect, measured))


def reason_of_few_groups(effect: Effect) -> Reason:
    """Say that an effect has too few groups to be significant, and how many it needs."""
    kind = f"the pictures come from too few groups for {WITH_ARTICLE[effect.name]} to be significant"
    groups = f"the pictures come from {effect.groups} groups, too few for {WITH_ARTICLE[effect.name]} to be significant"
    return Reason(kind, f"{groups}; the check needs {effect.least_groups}")


def _significant(effect: Effect, measured: MeasuredEffect) -> str:
    value, low, high = _figures(measured, effect.limit)
    interval = "" if low is None else f"95% interval {low} to {high}, "
    return f"{_answers(effect, measured)} of {value} ({interval}limit {effect.limit:.2f}, p {effect.p:.2g})"


def _probable(effect: Effect, measured: MeasuredEffect) -> str:
    value, low, high = _figures(measured, effect.limit)
    text = f"{_answers(effect, measured)} of {value}; "
    if low is None:
        text += f"there is no interval for fewer than {MIN_GROUPS} groups"
    else:
        text += f"the {_noun(effect)} is probably between {low} and {high}"
    text += f"; the limit is {effect.limit:.2f}"
    if effect.overruled:
        text += "; no other effect of all classes together is above its limit with every fill, so this only warns"
    if {effect.level_with(fill) for fill in effect.by_fill} == {effect.level}:
        return text
    by_fill = ", ".join(f"{fill} {other.effect.value:.2f}" for fill, other in effect.by_fill.items())
    return f"{text}; measured with each fill: {by_fill}"


def _excluded(effect: Effect, measured: MeasuredEffect) -> str:
    value, _, high = _figures(measured, effect.limit)
    above = high if measured.effect.high > 0 else "0.00"
    return f"{WITH_ARTICLE[effect.name]} above {above} is excluded at 95% (measured: {value}, limit {effect.limit:.2f})"


def _open(effect: Effect, measured: MeasuredEffect) -> str:
    value, low, high = _figures(measured, effect.limit)
    name = WITH_ARTICLE[effect.name]
    if low is None:
        return (
            f"{name} above the limit of {effect.limit:.2f} cannot be excluded (measured: {value}): there is no "
            f"interval for fewer than {MIN_GROUPS} groups"
        )
    more = effect.more_pictures
    outlook = f"the pictures come from {effect.groups} groups; the check needs {effect.least_groups}"
    if effect.groups >= effect.least_groups:
        outlook = (
            "the estimate is too near the limit for any number of pictures to settle it"
            if more is None
            else f"about {more} more picture{'' if more == 1 else 's'} in the experiment would settle it"
        )
    return f"{name} up to {high} cannot be excluded (measured: {value}, limit {effect.limit:.2f}); {outlook}"


def _noun(effect: Effect) -> str:
    return WITH_ARTICLE[effect.name].partition(" ")[2]


def _reads(effect: Effect) -> str:
    """Return what a model with this effect reads."""
    is_cue = effect.name not in ("gap", "attraction", "sufficiency")
    return f"the {effect.name} of the whole picture" if is_cue else "the background"


def _answers(effect: Effect, measured: MeasuredEffect) -> str:
    """Say how the two shares of right answers, or of answers that name the class, differ."""
    first, second = measured.accuracies
    rings = set(effect.by_fill) == {RING}  # the data has no regions
    on = "with outer rings of" if rings else "on backgrounds of"
    match effect.name:
        case "gap":
            return f"accuracy {first:.0%} {on} the object's own class and {second:.0%} {on} other classes, a gap"
        case "attraction":
            return (
                f"{first:.0%} of the objects of other classes get this class's name {on} this class and {second:.0%} "
                "elsewhere, an attraction"
            )
        case "sufficiency":
            removed = "the middle made grey" if rings else "the object removed"
            return f"accuracy {first:.0%} with {removed} and {second:.0%} by chance, a sufficiency"
        case cue:
            return (
                f"accuracy {first:.0%} with the {cue} of pictures of the object's own class and {second:.0%} with the "
                f"{cue} of other classes, {WITH_ARTICLE[cue]}"
            )


def _figures(measured: MeasuredEffect, limit: float) -> tuple[str, str | None, str | None]:
    """Return the estimate and its interval in figures that show on which side of the limit they lie.

    The interval is None if there are too few groups for one.
    """
    estimate = measured.effect
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return _figure(estimate.value, limit), None, None
    return _figure(estimate.value, limit), _figure(estimate.low, limit), _figure(estimate.high, limit)


def _figure(value: float, limit: float) -> str:
    """Return a number with two digits after the point, or with the digits that tell it from the limit.

    >>> _figure(0.123, 0.1), _figure(0.1, 0.1), _figure(0.0996, 0.1), _figure(-0.001, 0.1)
    ('0.12', '0.10', '0.0996', '0.00')
    """
    digits = next(
        (digits for digits in (2, 3, 4) if (round(value, digits) - round(limit, digits)) * (value - limit) > 0), 2
    )
    return f"{round(value, digits) + 0.0:.{digits}f}"  # adding 0.0 turns -0.0 into 0.0
