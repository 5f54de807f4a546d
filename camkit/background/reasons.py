"""What is known about an effect, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from camkit.background.edits import RING
from camkit.background.effects import OVERALL, Effect, EffectName, Level
from camkit.kit.statistics import MIN_GROUPS
from camkit.kit.wording import counted


class Reason(NamedTuple):
    """A reason for a verdict.

    Attributes:
        kind: a short text that many classes can share.
        text: the full text for one class.
        fails: whether it alone makes the verdict FAIL.
        step: what to do next, if the reason is that something could not be decided.
    """

    kind: str
    text: str
    fails: bool = False
    step: str = ""


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


_SAYS: Mapping[Level, str] = {
    "fail": "significantly above the limit",
    "warn": "that may be above the limit",
    "excluded": "above the limit is excluded at 95%",
    "open": "above the limit cannot be excluded",
}
"""What is known about an effect, by its level."""

DOUBT = "measured above the limit, but uncertain"
"""Why an effect does not warn although its estimate lies above the limit."""

KNOWLEDGE = "above the limit, which does not count because the gap of all classes is excluded"
"""Why a sufficiency does not count: a model may know the background without relying on it."""


def reason_of(effect: Effect, says: str = "") -> Reason:
    """Say what is known about an effect: by its level, or as ``says`` says."""
    name = WITH_ARTICLE[effect.name]
    if effect.mean is None:
        text = f"the {noun(effect)} could not be measured"
        return Reason(text, text, step="add pictures of other groups and classes, with regions")
    kind = f"{name} {says or _SAYS[effect.level]}"
    text = f"{kind}: {in_words(effect)}; {_measured(effect)}"
    if effect.level != "open" or says:
        return Reason(kind, text, fails=effect.level == "fail")
    return Reason(kind, f"{text}; to settle it, {_step(effect)}", step=_step(effect))


def reason_of_few_groups(effect: Effect) -> Reason:
    """Say that an effect has too few groups to be significant, and how many it needs."""
    kind = f"the pictures come from too few groups for {WITH_ARTICLE[effect.name]} to be significant"
    text = f"{kind}: {effect.groups} (uneven groups count as fewer); the check needs {effect.least_groups}"
    return Reason(kind, text, step=_step(effect))


def _step(effect: Effect) -> str:
    """Say what would settle an effect that is open, or has too few groups."""
    of = "" if effect.label == OVERALL else f" of {effect.label}"
    if (missing := effect.least_groups - effect.groups) > 0:
        return f"add pictures{of} from at least {counted(missing, 'more group')}, such as patients or videos"
    if (more := effect.more_pictures) is not None:
        return f"add about {more[0]} to {more[1]} pictures{of} with regions, of new groups if the data has groups"
    name = effect.name if effect.name in ("attraction", "sufficiency") else "gap"
    return f"choose a limit further from {effect.value:.2f} (--{name}), or add far more pictures{of}"


def _measured(effect: Effect) -> str:
    """Return the estimate, that of each fill, the interval, the limit, and the p-value of a finding.

    The figures show on which side of the limit they lie.
    """
    value, low, high = (_figure(number, effect.limit) for number in (effect.value, effect.low, effect.high))
    fills = [f"{fill} {of_fill.effect.value:.2f}" for fill, of_fill in effect.by_fill.items()]
    parts = fills if len(fills) > 1 else []
    bounded = not math.isnan(effect.low)
    parts.append(f"95% interval {low} to {high}" if bounded else f"no interval for fewer than {MIN_GROUPS} groups")
    parts.append(f"limit {effect.limit:.2f}")
    if effect.level == "fail":
        parts.append(f"p {effect.p:.2g}")
    return f"measured {value} ({', '.join(parts)})"


def noun(effect: Effect) -> str:
    """Return an effect's name without its article."""
    return WITH_ARTICLE[effect.name].partition(" ")[2]


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
