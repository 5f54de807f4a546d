"""What is known about an effect, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from camkit.background.edits import RING
from camkit.background.effects import CUE_NAMES, OVERALL, Effect, EffectName, MeasuredEffect
from camkit.kit.statistics import MIN_GROUPS
from camkit.kit.wording import counted


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
    """Say what is known about an effect."""
    if effect.mean is None:
        text = f"the {noun(effect)} could not be measured"
        return Reason(text, text, step="add pictures of other groups and classes, with regions")
    match effect.level:
        case "fail":
            kind = f"reads {_reads(effect)}: {WITH_ARTICLE[effect.name]} above the limit"
            return Reason(kind, _significant(effect, effect.mean), fails=True)
        case "warn":
            kind = f"possibly reads {_reads(effect)}: {WITH_ARTICLE[effect.name]} that may be above the limit"
            return Reason(kind, _probable(effect, effect.mean))
        case "excluded":
            return Reason(f"{WITH_ARTICLE[effect.name]} above the limit is excluded", _excluded(effect, effect.mean))
        case "open":
            kind = f"{WITH_ARTICLE[effect.name]} above the limit cannot be excluded"
            counts = effect.more_pictures if effect.groups >= effect.least_groups else None
            more = (effect.label, counts[1]) if counts else None
            return Reason(kind, _open(effect, effect.mean), step=_step(effect), more=more)


def reason_of_few_groups(effect: Effect) -> Reason:
    """Say that an effect has too few groups to be significant, and how many it needs."""
    kind = f"the pictures come from too few groups for {WITH_ARTICLE[effect.name]} to be significant"
    text = f"{_from_groups(effect)}, too few for {WITH_ARTICLE[effect.name]} to be significant"
    return Reason(kind, f"{text}; the check needs {effect.least_groups}", step=_more_groups(effect))


def reason_of_doubt(effect: Effect) -> Reason:
    """Say why an effect does not warn although its estimate lies above the limit."""
    kind = f"{WITH_ARTICLE[effect.name]} measured above the limit, but uncertain"
    why = "which may be chance" if effect.above_with_every_fill else "but not with each way of filling holes"
    return Reason(kind, f"{_answers(effect)} of {effect.value:.2f}{_fills(effect)}, {why}")


def reason_of_knowledge(effect: Effect) -> Reason:
    """Say that a sufficiency is above its limit but does not count."""
    kind = "knows the background, but does not rely on it"
    text = f"{_answers(effect)} of {effect.value:.2f}{_fills(effect)}"
    return Reason(kind, f"{text}; it does not count, because the gap of all classes is excluded")


def _from_groups(effect: Effect) -> str:
    return f"the pictures come from {effect.groups} groups (uneven groups count as fewer)"


def _more_groups(effect: Effect) -> str:
    missing = effect.least_groups - effect.groups
    of = "" if effect.label == OVERALL else f" of {effect.label}"
    return f"add pictures{of} from at least {counted(missing, 'more group')}, such as patients or videos"


def _step(effect: Effect) -> str:
    """Say what would settle an effect that is open."""
    if effect.groups < effect.least_groups:
        return _more_groups(effect)
    of = "" if effect.label == OVERALL else f" of {effect.label}"
    if (more := effect.more_pictures) is not None:
        return f"add about {more[0]} to {more[1]} pictures{of} with regions, of new groups if the data has groups"
    name = effect.name if effect.name in ("attraction", "sufficiency") else "gap"
    return f"choose a limit further from {effect.value:.2f} (--{name}), or add far more pictures{of}"


def _significant(effect: Effect, measured: MeasuredEffect) -> str:
    value, low, high = _figures(measured, effect.limit)
    interval = "" if low is None else f"95% interval {low} to {high}, "
    figures = f"{interval}limit {effect.limit:.2f}, p {effect.p:.2g}"
    return f"{_answers(effect)} of {value}{_fills(effect)} ({figures})"


def _probable(effect: Effect, measured: MeasuredEffect) -> str:
    value, low, high = _figures(measured, effect.limit)
    text = f"{_answers(effect)} of {value}{_fills(effect)}; "
    if low is None:
        text += f"there is no interval for fewer than {MIN_GROUPS} groups"
    else:
        text += f"the {noun(effect)} is probably between {low} and {high}"
    return f"{text}; the limit is {effect.limit:.2f}"


def _excluded(effect: Effect, measured: MeasuredEffect) -> str:
    value, _, high = _figures(measured, effect.limit)
    above = high if measured.effect.high > 0 else "0.00"
    name = WITH_ARTICLE[effect.name]
    return f"{name} above {above} is excluded at 95% (measured: {value}{_fills(effect)}, limit {effect.limit:.2f})"


def _open(effect: Effect, measured: MeasuredEffect) -> str:
    value, low, high = _figures(measured, effect.limit)
    name = WITH_ARTICLE[effect.name]
    if low is None:
        return (
            f"{name} above the limit of {effect.limit:.2f} cannot be excluded (measured: {value}): there is no "
            f"interval for fewer than {MIN_GROUPS} groups"
        )
    if effect.groups < effect.least_groups:
        outlook = f"{_from_groups(effect)}; the check needs {effect.least_groups}"
    elif (more := effect.more_pictures) is None:
        outlook = "the estimate is too near the limit for any number of pictures to settle it"
    else:
        outlook = f"about {more[0]} to {more[1]} more pictures in the experiment would settle it"
    measured_as = f"measured: {value}{_fills(effect)}, limit {effect.limit:.2f}"
    return f"{name} up to {high} cannot be excluded ({measured_as}); {outlook}"


def noun(effect: Effect) -> str:
    """Return an effect's name without its article."""
    return WITH_ARTICLE[effect.name].partition(" ")[2]


def _reads(effect: Effect) -> str:
    """Return what a model with this effect reads."""
    return f"the {effect.name} of the whole picture" if effect.name in CUE_NAMES else "the background"


def _fills(effect: Effect) -> str:
    """Return the estimate with each fill, if there are several.

    >>> _fills(Effect("gap", {}, 0.1))
    ''
    """
    if len(effect.by_fill) < 2:
        return ""
    return f" ({', '.join(f'{fill} {of_fill.effect.value:.2f}' for fill, of_fill in effect.by_fill.items())})"


def _answers(effect: Effect) -> str:
    return f"{in_words(effect)}: {WITH_ARTICLE[effect.name]}"


def in_words(effect: Effect) -> str:
    """Say how the two shares of answers of a measured effect differ, for somebody who does not know the effect."""
    assert effect.mean is not None
    first, second = (f"{share:.0%}" for share in effect.mean.accuracies)
    rings = set(effect.by_fill) == {RING}  # the data has no regions
    on, backgrounds, objects = ("with", "outer rings", "pictures") if rings else ("on", "backgrounds", "objects")
    model, recognises = ("the detector", "finds") if effect.of_detector else ("the model", "recognises")
    name = effect.label
    match effect.name:
        case "gap" if name == OVERALL:
            own = f"{first} of the {objects} {on} {backgrounds} of their own class"
            return f"{model} {recognises} {own} and {second} {on} {backgrounds} of other classes"
        case "gap":
            own = f"{first} of the {name} {objects} {on} {name} {backgrounds}"
            return f"{model} {recognises} {own} and {second} {on} others"
        case "attraction":
            answers = f'calls {first} of the other {objects} "{name}" (elsewhere {second})'
            return f"{on} {name} {backgrounds}, {model} {answers}"
        case "sufficiency":
            removed = "the middle made grey" if rings else "the object removed"
            still = "still finds it in" if effect.of_detector else "still names the right class for"
            return f"with {removed}, {model} {still} {first} of the pictures (chance {second})"
        case cue:
            whose = "the objects in " * effect.of_detector
            own = f"{whose}{first} of the pictures with the {cue} of their own class"
            return f"{model} {recognises} {own} and {second} with that of other classes"


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
