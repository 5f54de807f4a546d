"""What modules take and return: tensors, and tuples, lists, dictionaries and dataclasses of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, cast

from torch import Tensor

Make: TypeAlias = Callable[[Tensor], Any]
"""Makes something of a tensor: a copy, or a statistic."""


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return the same structure with ``leaf(item)`` in the place of each item; the structure itself is not changed.

    >>> mapped((1, [2, {"a": 3}]), lambda number: 10 * number)
    (10, [20, {'a': 30}])
    """
    if isinstance(value, Tensor):
        return leaf(value)
    if isinstance(value, dict):
        made = copy(value)
        for key, item in value.items():
            made[key] = mapped(item, leaf)
        return made
    if isinstance(value, tuple):
        return _tuple_like(value, [mapped(item, leaf) for item in value])
    if isinstance(value, list):
        return [mapped(item, leaf) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        changed = copy(value)
        for field in fields(value):
            object.__setattr__(changed, field.name, mapped(getattr(value, field.name, None), leaf))
        return changed
    return leaf(value)


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    kind = type(value)
    if hasattr(kind, "_make"):
        return cast("tuple[Any, ...]", kind._make(items))
    return (
        kind(items) if kind.__module__ == "torch.return_types" else tuple(items)
    )  # what torch.max returns, and others


def plain(value: Any) -> Any:
    """Return a number, a word or a truth value; of other objects, which may hold tensors, None."""
    return value if isinstance(value, (bool, int, float, complex, str)) else None


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether writing into one tensor may change the other."""
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, among others, have no one storage
        return one is other
