"""Looks up classes by index or by label, and checks the numbers in targets."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any, SupportsIndex, cast

from camkit.errors import TargetError, advice, did_you_mean


def whole_number(value: Any, what: str, least: int | None = None) -> int:
    """Return a whole number of any type, numpy's and tensors' included, as an int.

    Raises:
        TargetError: the value is not a whole number, or below ``least``.
    """
    try:
        number = operator.index(cast("SupportsIndex", None if isinstance(value, bool) else value))
    except TypeError as error:
        raise TargetError(f"{what} must be a whole number, not {value!r}") from error
    if least is not None and number < least:
        raise TargetError(f"{what} must be at least {least}, not {number}")
    return number


def number_from_0(value: Any, what: str, below: float) -> float:
    """Return a number from 0 to below a limit.

    Raises:
        TargetError: it is another value.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        raise TargetError(f"{what}, not {value!r}")
    return float(value)


def direction_of(sign: Any) -> int:
    """Return 1 for "+", and -1 for "-".

    Raises:
        TargetError: the sign is neither.
    """
    if sign not in ("+", "-"):
        raise TargetError(f"the direction must be '+' or '-', not {sign!r}")
    return 1 if sign == "+" else -1


def points(what: str, *numbers: Any) -> tuple[tuple[float, float], ...]:
    """Return numbers as points (x, y); ``what`` begins the error.

    Raises:
        TargetError: a number is not finite.
    """
    try:
        sides = [float(number) for number in numbers]
    except (TypeError, ValueError) as error:
        raise TargetError(f"{what}, numbers, not {numbers!r}") from error
    if not all(map(math.isfinite, sides)):
        raise TargetError(f"{what}, finite numbers, not {numbers!r}")
    return tuple(zip(sides[::2], sides[1::2], strict=True))


def box_corners(what: str, sides: Any) -> tuple[float, float, float, float]:
    """Return the sides of a box as numbers; ``what`` is its name in the error.

    Raises:
        TargetError: they are not left, top, right, bottom of a box with an area.
    """
    sides = tuple(sides) if isinstance(sides, Iterable) else (sides,)
    wanted = f"{what} takes left, top, right and bottom"
    if len(sides) == 4:
        (left, top), (right, bottom) = points(wanted, *sides)
        if left < right and top < bottom:
            return left, top, right, bottom
    raise TargetError(f"{wanted} with left < right and top < bottom, not {sides}")


def class_of(value: Any, labels: tuple[str, ...] | None) -> int:
    """Return the index of a class given by index or by label.

    Raises:
        TargetError: the label is unknown or ambiguous, or the value is neither an index nor a label.
    """
    return index_of(value, labels) if isinstance(value, str) else whole_number(value, "a class that is not a label")


def label_of(index: int, labels: tuple[str, ...] | None) -> str | None:
    """Return the label of a class; None if the model has none for it."""
    return labels[index] if labels is not None and 0 <= index < len(labels) else None


def check_index(index: int, classes: int) -> None:
    """Refuse a class that the model does not have.

    Raises:
        TargetError: the index is out of range.
    """
    if not 0 <= index < classes:
        raise TargetError(f"target {index} is out of range: the model has classes 0 to {classes - 1}")


def index_of(label: str, labels: tuple[str, ...] | None) -> int:
    """Return the index of a class given by its label or, if no class has this label, by its index as text.

    Labels may be numbers that are not the indices, such as the digits from 1 to 10.

    Raises:
        TargetError: the label is unknown or ambiguous.
    """
    folded = label.strip().casefold()
    indices = [index for index, name in enumerate(labels or ()) if name == label]
    indices = indices or [index for index, name in enumerate(labels or ()) if name.strip().casefold() == folded]
    if not indices and label.isdecimal():
        return int(label)
    if labels is None:
        raise TargetError(
            f"target {label!r} is a label, but this model comes without labels; pass "
            f"{advice('labels=[...]', '--labels FILE')} or a class index"
        )
    if len(indices) == 1:
        return indices[0]
    if indices:
        raise TargetError(
            f"classes {' and '.join(map(str, indices))} are all called {label!r}; pass one of these indices"
        )
    raise TargetError(f"the model has no label {label!r}{did_you_mean(label, labels)}")
