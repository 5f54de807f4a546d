"""What modules take and return: tensors, and tuples, lists, dictionaries and dataclasses of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def _tensors(output: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from _tensors(value, (*path, key))
    elif isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            yield from _tensors(value, (*path, index))
    elif is_dataclass(output):
        for field in fields(output):
            yield from _tensors(getattr(output, field.name, None), (*path, field.name))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Walk through the tensors of a module's output: a tensor, or tuples, lists, dictionaries and dataclasses."""
    return (tensor for _, tensor in _tensors(output))


def feature_tensor(output: Any) -> tuple[tuple[Any, ...], Tensor] | None:
    """Find the tensor that holds a layer's feature maps, and the keys that lead to it.

    The first floating-point tensor of at least three dimensions; None when the output holds no such tensor.

    >>> import torch
    >>> path, found = feature_tensor((torch.zeros(1, 5), [torch.zeros(1, 8, 7, 7)]))
    >>> path, tuple(found.shape)
    ((1, 0), (1, 8, 7, 7))
    """
    return next(
        ((path, tensor) for path, tensor in _tensors(output) if tensor.dim() >= 3 and tensor.is_floating_point()), None
    )


def with_tensor(output: Any, path: tuple[Any, ...], tensor: Tensor) -> Any:
    """Return the output with the tensor at ``path`` exchanged; the containers on the way are copied, not changed."""
    if not path:
        return tensor
    key, rest = path[0], path[1:]
    if isinstance(output, (dict, list)):
        copied = copy(output)
        copied[key] = with_tensor(output[key], rest, tensor)
        return copied
    if is_dataclass(output):
        made = copy(output)
        object.__setattr__(made, key, with_tensor(getattr(output, key), rest, tensor))
        return made
    items = list(output)
    items[key] = with_tensor(items[key], rest, tensor)
    return tuple.__new__(type(output), items)
