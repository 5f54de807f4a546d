"""Nested structures that modules take and return: tensors in tuples, lists, dictionaries and dataclasses.

One function takes a structure apart and one puts it together again; all others are built on these two.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Make: TypeAlias = Callable[[Tensor], Any]
"""Computes a value from a tensor, such as a copy or a statistic."""

Keys: TypeAlias = tuple[Any, ...]
"""The keys that lead from a structure to an item in it."""


_PLAIN = (bool, int, float, complex, str, type(None))
"""Types of values that hold no tensors."""


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and items of a structure; None for any other value, such as a tensor."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    return None


def _with_items(value: Any, items: list[tuple[Any, Any]]) -> Any:
    """Return a copy of a structure with other items."""
    if isinstance(value, tuple):
        return _tuple_like(value, [item for _, item in items])
    if type(value) is list:
        return [item for _, item in items]
    made = copy(value)
    _set_items(made, items)
    return made


def _set_items(value: Any, items: list[tuple[Any, Any]]) -> None:
    for key, item in items:
        if isinstance(value, (dict, list)):
            value[key] = item
        else:
            object.__setattr__(value, key, item)


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(value)
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make(items)
    if kind.__module__ == "torch.return_types":  # such as the result of torch.max
        return kind(items)
    return tuple(items) if kind in (tuple, torch.Size) else tuple.__new__(kind, items)


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a copy of a structure with each item replaced by ``leaf(item)``.

    >>> mapped((1, [2, {"a": 3}]), lambda number: 10 * number)
    (10, [20, {'a': 30}])
    """
    items = _items(value)
    return leaf(value) if items is None else _with_items(value, [(key, mapped(item, leaf)) for key, item in items])


def replaced(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a structure with each item replaced by ``leaf(item)``.

    Lists, dictionaries and objects are changed in place, because other code may hold them too.

    >>> rows = [1, 2]
    >>> replaced((rows, 3), lambda number: 10 * number), rows
    (([10, 20], 30), [10, 20])
    """
    items = _items(value)
    if items is None:
        return leaf(value)
    new = [(key, replaced(item, leaf)) for key, item in items]
    if all(item is old for (_, item), (_, old) in zip(new, items, strict=True)):
        return value
    if isinstance(value, tuple):
        return _with_items(value, new)
    _set_items(value, new)
    return value


def _tensors(value: Any, path: Keys = ()) -> list[tuple[Keys, Tensor]]:
    """Return the tensors in a structure, with the keys that lead to each."""
    if isinstance(value, Tensor):
        return [(path, value)]
    found: list[tuple[Keys, Tensor]] = []
    for key, item in _items(value) or ():
        if isinstance(item, Tensor):
            found.append(((*path, key), item))
        elif not isinstance(item, _PLAIN):  # most of the arguments of PyTorch's operations are
            found += _tensors(item, (*path, key))
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a module's arguments or output."""
    return [tensor for _, tensor in _tensors(value)]


def feature_tensor(output: Any) -> tuple[Keys, Tensor] | None:
    """Return the keys that lead to the tensor with a layer's feature maps, and that tensor.

    It is the first floating-point tensor with at least three dimensions; None if the output contains none.

    >>> import torch
    >>> path, maps = feature_tensor((torch.zeros(1, 5), [torch.zeros(1, 8, 7, 7)]))
    >>> path, tuple(maps.shape)
    ((1, 0), (1, 8, 7, 7))
    """
    return next(
        ((path, tensor) for path, tensor in _tensors(output) if tensor.dim() >= 3 and tensor.is_floating_point()), None
    )


def with_tensor(value: Any, path: Keys, tensor: Tensor) -> Any:
    """Return a copy of a structure with another tensor at ``path``."""
    if not path:
        return tensor
    key, rest = path[0], path[1:]
    return _with_items(
        value, [(name, with_tensor(item, rest, tensor) if name == key else item) for name, item in _items(value) or ()]
    )


def plain(value: Any) -> Any:
    """Return a number, a string or a boolean unchanged; None for any other object, since it may hold tensors."""
    return value if isinstance(value, _PLAIN) else None


def precise(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it is so already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether writing into one tensor may change the other."""
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, for example, have no single storage
        return one is other
