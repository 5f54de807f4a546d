"""Restores what the user's own forward pass may change besides flags, buffers and attributes.

The networks of PyTorch, torchvision and timm change none of this, so their passes skip it.
"""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from camkit.engine.record import CONTAINERS, PYTORCHS, same_values, with_values

_SMALL_PARAMETER = 1024
"""Parameters with at most this many values are copied before each pass: gates, scales and tokens. Copying all weights
would cost the memory of the model once more."""

_LARGEST_COPY = 1_000_000
"""Tensors and arrays that a module keeps as attributes are copied if they have at most this many values."""

_MOST_SEARCHED = 1000
"""Containers with more items than this, such as vocabularies, are copied, but not searched for others."""


class OwnState:
    """The parameters, plain tensors, arrays, nested containers and random generators of a model before a pass."""

    def __init__(self, modules: Sequence[nn.Module], authored: Sequence[nn.Module]) -> None:
        self._parameters = [(module._parameters, module._parameters.copy()) for module in modules]
        parameters = {
            id(tensor): tensor
            for _, saved in self._parameters
            for tensor in saved.values()
            if tensor is not None and not is_lazy(tensor)
        }
        self._required = [(tensor, tensor.requires_grad) for tensor in parameters.values()]
        self._containers: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray, bool]] = []
        self._generators: list[tuple[Any, Any]] = []
        tensors: dict[int, Tensor] = {}
        for value in _values_of(authored):
            if isinstance(value, Tensor):
                if id(value) not in parameters and value.numel() <= _LARGEST_COPY and value.layout is torch.strided:
                    tensors[id(value)] = value
            elif isinstance(value, np.ndarray):
                if value.size <= _LARGEST_COPY:
                    self._arrays.append((value, value.copy(), value.flags.writeable))
            elif type(value) in CONTAINERS:
                self._containers.append((value, value.copy()))
            else:
                self._generators.append((value, _state_of(value)))
        small = [tensor for tensor in parameters.values() if tensor.numel() <= _SMALL_PARAMETER]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in (*small, *tensors.values())]
        self._large = [(tensor, *_mark(tensor)) for tensor in parameters.values() if tensor.numel() > _SMALL_PARAMETER]

    def restore(self) -> list[Tensor]:
        """Restore everything, and return the parameters that a pass wrote to and that were not copied."""
        for holder, saved in self._parameters:
            restore_contents(holder, saved)
        required = {id(tensor): flag for tensor, flag in self._required}
        for tensor, values in self._tensors:
            _restore_tensor(tensor, values, required=required.get(id(tensor), tensor.requires_grad))
        for tensor, flag in self._required:
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)
        for array, copied, writeable in self._arrays:
            _restore_array(array, copied, writeable=writeable)
        for container, contents in self._containers:
            restore_contents(container, contents)
        for generator, state in self._generators:
            _set_state(generator, state)
        return [tensor for tensor, *before in self._large if tuple(before) != _mark(tensor)]


def _restore_tensor(tensor: Tensor, values: Tensor, *, required: bool) -> None:
    if (tensor.shape, tensor.dtype) != (values.shape, values.dtype):  # ``.data`` was set
        tensor.data = values
    elif not same_values(tensor, values):
        with_values(tensor, values, required=required)


def _restore_array(array: np.ndarray, copied: np.ndarray, *, writeable: bool) -> None:
    if not array.flags.writeable:
        with suppress(ValueError):  # it is a view of memory that never was writeable, and thus unchanged
            array.setflags(write=True)
    if array.shape != copied.shape:
        array.resize(copied.shape, refcheck=False)
    same = not array.dtype.hasobject and np.array_equal(array, copied, equal_nan=array.dtype.kind in "fc")
    if not same and array.flags.writeable:
        array[...] = copied
    if array.flags.writeable != writeable:
        array.setflags(write=writeable)


def restore_contents(value: Any, contents: Any) -> None:
    """Give a list, dictionary or set the contents that it had when it was copied."""
    if not same_contents(value, contents):
        value.clear()
        (value.extend if isinstance(value, (list, deque, bytearray)) else value.update)(contents)


def same_contents(value: Any, contents: Any) -> bool:
    """Tell whether a container still holds the same objects as when it was copied."""
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        same_order = list(value) == list(contents)  # of a cache, the order may decide what is dropped next
        return same_order and all(map(operator.is_, value.values(), contents.values()))
    if isinstance(value, set):
        return bool(value == contents)
    return all(map(operator.is_, value, contents))


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's values and the version counter; -1 if the tensor has none."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def _values_of(authored: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield the tensors, arrays, containers and generators that modules keep as attributes, also inside containers."""
    visited: set[int] = set()
    for module in authored:
        waiting = [value for name, value in vars(module).items() if name not in PYTORCHS]
        while waiting:
            value = waiting.pop()
            if id(value) in visited:
                continue
            if type(value) in CONTAINERS or type(value) is tuple:
                visited.add(id(value))
                if len(value) <= _MOST_SEARCHED:
                    waiting += value.values() if isinstance(value, dict) else value
                if type(value) is not tuple:
                    yield value
            elif isinstance(value, (Tensor, np.ndarray)) or _is_generator(value):
                visited.add(id(value))
                yield value


def _is_generator(value: Any) -> bool:
    return isinstance(value, (torch.Generator, random.Random, np.random.RandomState, np.random.Generator))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
