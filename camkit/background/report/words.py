"""What every form of a check's report says: the verdict in a sentence, the caveat, what to compare with."""

from __future__ import annotations

from importlib.metadata import version

from camkit.background.check import CheckResult
from camkit.background.measures import Measures
from camkit.background.plan import Plan

NONE = "-"
"""What stands where there is no number."""

VERSION = version("camkit")

_NAMES = 3

CAVEAT = (
    "A pass does not prove the absence of shortcuts. It says that, on these pictures, answers did not depend on the "
    "background by more than the limits, as far as pasting, removing and heat can show. A shortcut that lies on the "
    "object itself, or that these pictures do not have, is not seen."
)

REFERENCES = (
    "ResNet-50 on ImageNet-9 has a background gap of 0.07, trained on mixed backgrounds 0.002 (Xiao et al. 2020, "
    "arXiv:2006.09994)",
    "skill 0: heat lies on the object no more than any other picture's heat does; 1: as well as the map's grid allows",
)


def sentence(result: CheckResult) -> str:
    """Return the verdict in words, without the word itself."""
    model, worst = result.plan.model.name, result.worst
    failing = [name for name, one in result.judged.items() if one.verdict == "FAIL" and name and not one.waived]
    if result.verdict == "FAIL" and failing:
        listed = ", ".join(failing[:5]) + (f" and {len(failing) - 5} more" if len(failing) > 5 else "")
        return f"{model} reads the background for {listed}"
    if result.verdict == "FAIL":
        return f"{model} reads the background"
    if result.verdict == "WARN":
        return f"{model} may ship, but look at {worst or 'the reasons'}"
    if result.verdict == "PASS":
        return f"no sign that {model} needs the background"
    return f"it cannot be said whether {model} reads the background"


def since(result: CheckResult) -> str:
    """Return what changed since the baseline; nothing without one."""
    change = result.change
    if change is None:
        return ""
    parts = [
        f"{what} {one.value:+.2f} ({number(one.low)} to {number(one.high)})"
        for what, one in (("gap", change.gap), ("skill", change.skill))
        if one is not None
    ]
    return f"since the baseline, on {change.pictures} pictures: {', '.join(parts) or 'nothing to compare'}"


def without_object(plan: Plan) -> str:
    """Return what is taken from a picture to see whether the rest is enough."""
    return "object removed" if plan.with_regions else "middle removed"


def left_out(plan: Plan) -> list[str]:
    """Return what was not used, each kind with a few of its names."""
    return [
        f"{len(names)} {what}: {', '.join(names[:_NAMES])}{', ...' if len(names) > _NAMES else ''}"
        for what, names in plan.data.left_out.items()
    ]


def number(value: float | None, digits: int = 2) -> str:
    """Return a number as it is printed; a dash where there is none.

    >>> number(0.1234), number(None), number(float("nan"))
    ('0.12', '-', '-')
    """
    return NONE if value is None or value != value else f"{value:.{digits}f}"  # noqa: PLR0124 - only NaN is not itself


def share(value: float | None) -> str:
    """Return a share in percent; a dash where there is none."""
    return NONE if value is None or value != value else f"{value:.0%}"  # noqa: PLR0124 - only NaN is not itself


def shown_name(one: Measures) -> str:
    """Return a class's name, or what all of them are called."""
    return one.name or "all classes"
