"""Numbers and lists as people read them, and what every report says of itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import version

VERSION = version("camkit")

NONE = "-"
"""Printed if there is no number."""


def counted(number: int, what: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "picture"), counted(8000, "picture")
    ('1 picture', '8,000 pictures')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], last: str = "and") -> str:
    """Return names as a sentence lists them.

    >>> listed(["a"]), listed(["a", "b", "c"], "or")
    ('a', 'a, b or c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


def first_of(names: Sequence[object], most: int) -> str:
    """Return the first names, and how many more there are.

    >>> first_of([3, 5, 8], most=2), first_of("ab", most=2)
    ('3, 5 and 1 more', 'a, b')
    """
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def number(value: float | None) -> str:
    """Return a number with two decimals; a dash for None and NaN.

    >>> number(0.1234), number(-0.001), number(None), number(float("nan"))
    ('0.12', '0.00', '-', '-')
    """
    return NONE if value is None or math.isnan(value) else f"{round(value, 2) + 0.0:.2f}"


def share(value: float | None) -> str:
    """Return a share in percent; a dash for None and NaN."""
    return NONE if value is None or math.isnan(value) else f"{value:.0%}"


def figure(number: float) -> str:
    """Return a number with three digits; a dash for NaN.

    >>> figure(0.000123456), figure(12345.6), figure(0.0), figure(float("nan"))
    ('0.000123', '1.23e+04', '0', '-')
    """
    return NONE if math.isnan(number) else f"{number:.3g}"


def bounded_share(part: float) -> str:
    """Return a share in percent; only exactly none is 0% and only exactly all is 100%; a dash for NaN.

    >>> bounded_share(0.5), bounded_share(0.0001), bounded_share(0.9999), bounded_share(1.0)
    ('50%', '<1%', '>99%', '100%')
    """
    if math.isnan(part):
        return NONE
    if 0 < part < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= part < 1 else f"{part:.0%}"
