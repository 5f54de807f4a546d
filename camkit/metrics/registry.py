"""The table of metrics, and the decorator that adds to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from camkit.errors import InputError, did_you_mean

Better: TypeAlias = Literal["higher", "lower"]
Space: TypeAlias = Literal["input", "features", "map", "model"]
Measure: TypeAlias = Callable[..., float]
"""``measure(evaluator, heat)`` returns a metric's value for a map, or raises ``UndefinedError``."""

_NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Metric:
    """One way to judge a map.

    Attributes:
        name: what ``metrics=`` takes.
        title: the name as people write it.
        summary: one line of what it says.
        paper: where the formula comes from.
        better: whether a "higher" or a "lower" value is better.
        space: what is changed: the "input" of the model, the "features" of a layer (the head alone is run), the
            "model" and its weights, or nothing at all: a value of the "map" alone. Values of different spaces do not
            belong into one column.
        cost: the time it takes, in plain passes of the model for one picture.
        faithful: whether it tests that the map shows what the model used. The others test the map's form, its
            stability, or where it lies.
        fill: what replaces removed pixels unless the call says otherwise; empty if none are removed, or if
            the metric's definition fixes it.
        needs_region: whether it compares the map with the region of an object, so that the Evaluator needs one.
        measure: ``measure(evaluator, heat)`` returns the value, or raises ``UndefinedError``.
    """

    name: str
    title: str
    summary: str
    paper: str
    better: Better
    space: Space
    cost: str
    faithful: bool
    fill: str
    needs_region: bool
    measure: Measure

    @property
    def users(self) -> bool:
        """True if the function is not camkit's own."""
        return not str(getattr(self.measure, "__module__", "")).startswith("camkit.")


METRICS: dict[str, Metric] = {}
"""Every metric by its name, the user's own included."""


def register_metric(
    name: str,
    *,
    title: str | None = None,
    summary: str = "",
    paper: str = "",
    better: Better = "higher",
    space: Space = "input",
    cost: str = "",
    faithful: bool = False,
    fill: str = "",
    needs_region: bool = False,
    replace: bool = False,
) -> Callable[[Measure], Measure]:
    """Add a metric to ``camkit.metrics.METRICS`` under a name, as a decorator.

    The function gets the ``Evaluator``, which runs the model on changed pictures, and the ``Heat``, and returns a
    number. It raises ``camkit.metrics.UndefinedError`` if there is none.

    Args:
        name: what ``metrics=`` takes: letters, digits, ``-`` and ``_``.
        title, summary, paper, better, space, cost, faithful, fill, needs_region: as in ``Metric``.
        replace: allow a name that is taken, for example when a notebook cell runs again.

    Raises:
        InputError: the name is taken or has other characters, or ``better`` or ``space`` is unknown.

    Examples:
        >>> from camkit import metrics
        >>> @metrics.register_metric("peak-share", better="higher", space="map", cost="0")
        ... def peak_share(evaluator, heat):
        ...     return float(heat.values.max() / heat.values.sum())
        >>> del metrics.METRICS["peak-share"]  # forgets it again
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"the name of a metric consists of letters, digits, '-' and '_', not {name!r}")
    for argument, value, kind in (("better", better, Better), ("space", space, Space)):
        if value not in get_args(kind):
            raise InputError(f"metric {name!r}: {argument} must be one of {', '.join(get_args(kind))}, not {value!r}")
    if name in METRICS and not replace:
        raise InputError(f"there is already a metric {name!r}; choose another name, or pass replace=True")

    def add(function: Measure) -> Measure:
        METRICS[name] = Metric(
            name, title or name, summary, paper, better, space, cost, faithful, fill, needs_region, function
        )
        return function

    return add


def find_metric(name: str) -> Metric:
    """Return the metric with a name.

    Raises:
        InputError: there is none; the message suggests the nearest.
    """
    if isinstance(name, str) and name in METRICS:
        return METRICS[name]
    hint = did_you_mean(name, METRICS) if isinstance(name, str) else ""
    raise InputError(f"unknown metric {name!r}{hint or '; choose from ' + ', '.join(METRICS)}")
