"""What besides weights, submodules and hooks decides what a model computes: attributes, closures and global variables.

Only plain values and identities are kept, since a reference to a user's object could keep the model alive.
"""

from __future__ import annotations

import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = frozenset(
    [bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range, slice]
)
"""Types of values that refer to no other object."""

_SEQUENCES = (list, tuple, set, frozenset, deque)
_TABLES = (dict, OrderedDict, defaultdict, Counter, types.MappingProxyType)

_MOST_ITEMS = 64
"""Longer containers are tables of labels or results, not switches; only their lengths are compared."""

DEEPEST = 4
"""How many objects lie at most between a module and a switch: ``self.settings.stem["turns"]`` has two."""

_LIBRARIES = ("torch", "torchvision", "timm", "transformers", "numpy", "PIL", "builtins", "functools", "math")
"""Packages whose functions and classes are taken as they are."""


_EMPTY = types.CellType()
"""The cell of a variable that has no value yet."""


def state_of(owners: Sequence[nn.Module], skipped: frozenset[str], deepest: int = DEEPEST) -> list[Any]:
    """Return the values of everything that can switch what modules compute, in a fixed order.

    Args:
        owners: the modules; what their submodules hold is not included.
        skipped: attributes of the modules that are left out.
        deepest: how many objects may lie between a module and a switch.
    """
    walk = _Walk(deepest)
    for owner in owners:
        for name, value in vars(owner).items():
            if name not in skipped:
                if type(value) in _PLAIN:
                    walk.values.append(value)
                else:
                    walk.add(value, 1)
    for kind in dict.fromkeys(map(type, owners)):
        walk.add_class(kind)
    return walk.values


def same_state(before: Sequence[Any], now: Sequence[Any], ignored: frozenset[int] = frozenset()) -> bool:
    """Tell whether two states are equal, except for some places in the list; NaN equals NaN."""
    if len(before) != len(now):
        return False
    return before == now or not (different_places(before, now) - ignored)


def different_places(before: Sequence[Any], now: Sequence[Any]) -> set[int]:
    """Return the places in the list where two states of equal length differ."""
    pairs = enumerate(zip(before, now, strict=True))
    return {place for place, (old, new) in pairs if not (old is new or old == new or repr(old) == repr(new))}


class _Walk:
    """Collects the values that can be reached from a module's attributes."""

    def __init__(self, deepest: int) -> None:
        self._deepest = deepest
        self.values: list[Any] = []
        self._visited: set[int] = set()

    def add(self, value: Any, depth: int) -> None:
        """Add a value, and what it refers to."""
        kind = type(value)
        if kind in _PLAIN:
            self.values.append(value)
            return
        self.values.append(kind if kind in _SEQUENCES or kind in _TABLES else id(value))
        if isinstance(value, (Tensor, np.ndarray)):
            self.values.append(_contents_of(value))
            return
        if depth > self._deepest or id(value) in self._visited or isinstance(value, (nn.Module, Enum)):
            return
        self._visited.add(id(value))
        for part in _parts(value, kind):
            self.add(part, depth + 1)

    def add_class(self, kind: type) -> None:
        """Add the attributes and functions of a class."""
        for base in kind.__mro__:
            if not _is_a_librarys(base) and id(base) not in self._visited:
                self._visited.add(id(base))
                for name, value in vars(base).items():
                    if not name.startswith("__"):
                        self.add(value, 1)


def _contents_of(array: Tensor | np.ndarray) -> Any:
    """Return the values of a short tensor or array, which may be a switch; of others None."""
    if isinstance(array, np.ndarray):
        return array.tolist() if array.size <= _MOST_ITEMS else None
    is_plain = type(array) is Tensor and array.layout is torch.strided and array.device.type == "cpu"
    return array.detach().tolist() if is_plain and array.numel() <= _MOST_ITEMS else None


def _parts(value: Any, kind: type) -> Iterator[Any]:
    """Yield what a value refers to, as far as it can be a switch."""
    if kind in _TABLES or kind in _SEQUENCES:
        yield len(value)
        if len(value) <= _MOST_ITEMS:
            yield from value.values() if kind in _TABLES else value
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, types.FunctionType):
        yield id(value.__code__)
        if not _is_a_librarys(value):
            yield from (value.__defaults__, value.__kwdefaults__)
            yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY)
            yield from _globals_of(value)
    elif isinstance(value, type):
        if not _is_a_librarys(value):
            yield from (part for name, part in vars(value).items() if not name.startswith("__"))
    elif not isinstance(value, types.ModuleType):
        yield from getattr(value, "__dict__", {}).values()
        yield from (getattr(value, name, None) for name in _slots_of(kind))


def _slots_of(kind: type) -> list[str]:
    """Return the attributes that objects of a class of the user's keep outside ``__dict__``."""
    declared = [vars(base)["__slots__"] for base in kind.__mro__ if "__slots__" in vars(base)]
    if not declared or _is_a_librarys(kind):
        return []
    return [name for names in declared for name in ([names] if isinstance(names, str) else names)]


def _globals_of(function: types.FunctionType) -> Iterator[Any]:
    """Yield the global variables that a function uses, and those of other modules of Python that it may name."""
    names = _names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if not isinstance(value, types.ModuleType):
            yield value
        elif not _is_a_librarys(value):
            yield from (vars(value).get(attribute) for attribute in names)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of variables and attributes that code uses, with the functions inside it."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


def _is_a_librarys(value: Any) -> bool:
    """Tell whether a class, function or module belongs to a package that is taken as it is."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
    return str(name).partition(".")[0] in _LIBRARIES
