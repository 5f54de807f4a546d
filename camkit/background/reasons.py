"""What is known about an effect, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from camkit.background.edits import RING
from camkit.background.effects import CUE_NAMES, OVERALL, Effect, EffectName
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
    name, limit = WITH_ARTICLE[effect.name], f"{effect.limit:.2f}"
    if effect.mean is None:
        text = f"the {noun(effect)} could not be measured"
        return Reason(text, text, step="add pictures of other groups and classes, with regions")
    value, low, high = (_figure(number, effect.limit) for number in (effect.value, effect.low, effect.high))
    bounded, few = not math.isnan(effect.low + effect.high), f"there is no interval for fewer than {MIN_GROUPS} groups"
    is_cue = effect.name in CUE_NAMES
    reads = f"reads {f'the {effect.name} of the whole picture' if is_cue else 'the background'}: {name}"
    measured = f"measured: {value}{_fills(effect)}, limit {limit}"
    match effect.level:
        case "fail":
            interval = f"95% interval {low} to {high}, " if bounded else ""
            text = f"{_answers(effect)} of {value}{_fills(effect)} ({interval}limit {limit}, p {effect.p:.2g})"
            return Reason(f"{reads} above the limit", text, fails=True)
        case "warn":
            between = f"the {noun(effect)} is probably between {low} and {high}" if bounded else few
            text = f"{_answers(effect)} of {value}{_fills(effect)}; {between}; the limit is {limit}"
            return Reason(f"possibly {reads} that may be above the limit", text)
        case "excluded":
            above = high if effect.high > 0 else "0.00"
            text = f"{name} above {above} is excluded at 95% ({measured})"
            return Reason(f"{name} above the limit is excluded", text)
        case "open":
            enough, more = effect.groups >= effect.least_groups, effect.more_pictures
            text = f"{name} up to {high} cannot be excluded ({measured}); {_outlook(effect)}"
            if not bounded:
                text = f"{name} above the limit of {limit} cannot be excluded (measured: {value}): {few}"
            asked = (effect.label, more[1]) if enough and more else None
            return Reason(f"{name} above the limit cannot be excluded", text, step=_step(effect), more=asked)


def _outlook(effect: Effect) -> str:
    if effect.groups < effect.least_groups:
        return f"{_from_groups(effect)}; the check needs {effect.least_groups}"
    if (more := effect.more_pictures) is None:
        return "the estimate is too near the limit for any number of pictures to settle it"
    return f"about {more[0]} to {more[1]} more pictures in the experiment would settle it"


def reason_of_few_groups(effect: Effect) -> Reason:
    """Say that an effect has too few groups to be significant, and how many it needs."""
    kind = f"the pictures come from too few groups for {WITH_ARTICLE[effect.name]} to be significant"
    text = f"{_from_groups(effect)}, too few for {WITH_ARTICLE[effect.name]} to be significant"
    return Reason(kind, f"{text}; the check needs {effect.least_groups}", step=_step(effect))


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


def _step(effect: Effect) -> str:
    """Say what would settle an effect that is open, or has too few groups."""
    of = "" if effect.label == OVERALL else f" of {effect.label}"
    if (missing := effect.least_groups - effect.groups) > 0:
        return f"add pictures{of} from at least {counted(missing, 'more group')}, such as patients or videos"
    if (more := effect.more_pictures) is not None:
        return f"add about {more[0]} to {more[1]} pictures{of} with regions, of new groups if the data has groups"
    name = effect.name if effect.name in ("attraction", "sufficiency") else "gap"
    return f"choose a limit further from {effect.value:.2f} (--{name}), or add far more pictures{of}"


def noun(effect: Effect) -> str:
    """Return an effect's name without its article."""
    return WITH_ARTICLE[effect.name].partition(" ")[2]


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


def _figure(value: float, limit: float) -> str:
    """Return a number with two digits after the point, or with the digits that tell it from the limit.

    >>> _figure(0.123, 0.1), _figure(0.1, 0.1), _figure(0.0996, 0.1), _figure(-0.001, 0.1)
    ('0.12', '0.10', '0.0996', '0.00')
    """
    digits = next(
        (digits for digits in (2, 3, 4) if (round(value, digits) - round(limit, digits)) * (value - limit) > 0), 2
    )
    return f"{round(value, digits) + 0.0:.{digits}f}"  # adding 0.0 turns -0.0 into 0.0
