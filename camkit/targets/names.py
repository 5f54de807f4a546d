"""Classes by index or by label."""

from __future__ import annotations

import operator
from typing import Any

from camkit.errors import TargetError, did_you_mean


def whole_number(value: Any, what: str) -> int:
    """Return a number that counts something, also one of numpy's or a tensor's.

    Raises:
        TargetError: it is none.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TargetError(f"{what} is a whole number, not {value!r}")


def class_of(value: Any, labels: tuple[str, ...] | None) -> int:
    """Return the index of a class given by index or by label.

    Raises:
        TargetError: an unknown or ambiguous label, or something that is neither.
    """
    return index_of(value, labels) if isinstance(value, str) else whole_number(value, "a class, if not given by label,")


def check_index(index: int, classes: int) -> None:
    """Refuse a class the model does not have.

    Raises:
        TargetError: the index is out of range.
    """
    if not 0 <= index < classes:
        raise TargetError(f"target {index} is out of range: the model has classes 0 to {classes - 1}")


def index_of(label: str, labels: tuple[str, ...] | None) -> int:
    """Return the index of a class given by its label or by its index as text.

    Raises:
        TargetError: an unknown or ambiguous label.
    """
    if label.isdecimal() and (labels is None or label not in labels):
        return int(label)
    if labels is None:
        raise TargetError(
            f"target {label!r} is a label, but this model's labels are not known; pass labels=[...] or a class index"
        )
    folded = label.strip().casefold()
    found = [i for i, name in enumerate(labels) if name == label]
    found = found or [i for i, name in enumerate(labels) if name.strip().casefold() == folded]
    if len(found) == 1:
        return found[0]
    if found:
        raise TargetError(f"label {label!r} names classes {' and '.join(map(str, found))}; pass one of these indices")
    raise TargetError(f"the model has no label {label!r}{did_you_mean(label, labels)}")
