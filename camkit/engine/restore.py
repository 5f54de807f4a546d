"""Puts a model into evaluation mode for a while, and leaves it exactly as it was found."""

from __future__ import annotations

import itertools
import operator
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from camkit.engine.record import PYTORCHS, ModelRecord, same_values

_lock = threading.Lock()


class _Saved:
    """What a model's modules were before a pass: training flags, buffers, and the attributes their author set."""

    def __init__(self, record: ModelRecord, modules: list[nn.Module], authored: list[nn.Module]) -> None:
        self._modules = modules
        self._flags = list(map(_TRAINING, modules))
        self._authored = authored
        self._attributes = [vars(module).copy() for module in authored]
        self._containers = [(value, value.copy()) for value in record.containers(authored)]
        self._buffers = _Buffers(record, record.buffer_holders(modules))

    def switch_off_training(self) -> None:
        if any(self._flags):
            for module in self._modules:
                module.training = False

    def restore(self) -> None:
        if list(map(_TRAINING, self._modules)) != self._flags:
            for module, flag in zip(self._modules, self._flags, strict=True):
                module.training = flag
        self._buffers.restore()
        for module, attributes in zip(self._authored, self._attributes, strict=True):
            if not _same_items(vars(module), attributes):
                _restore_attributes(module, attributes)
        for value, contents in self._containers:
            if not _same_contents(value, contents):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(contents)


_TRAINING = operator.attrgetter("training")
_SHAPE, _REQUIRES_GRAD = operator.attrgetter("shape"), operator.attrgetter("requires_grad")


class _Buffers:
    """The buffers of a model: which tensors they are, and copies of their values."""

    def __init__(self, record: ModelRecord, modules: list[nn.Module]) -> None:
        self._copier = record.buffers
        self._copies = record.buffers.copy()
        self._marks = record.buffers.marks()
        self._holders = [module._buffers for module in modules]
        self._before = _all_items(self._holders)
        self._counts = list(map(len, self._holders))
        self._shapes = list(map(_SHAPE, record.buffers.tensors))
        self._required = list(map(_REQUIRES_GRAD, record.buffers.tensors))

    def restore(self) -> None:
        replaced: dict[int, Tensor] = {}
        if self._copier.marks() != self._marks or not self._copier.are_equal(self._copies):
            replaced = self._restored()
        now = _all_items(self._holders)
        if not replaced and len(now) == len(self._before) and all(map(operator.is_, now, self._before)):
            return
        items = iter(zip(self._before[::2], self._before[1::2], strict=True))
        for holder, count in zip(self._holders, self._counts, strict=True):
            buffers = dict(itertools.islice(items, count))
            holder.clear()
            holder.update({name: replaced.get(id(buffer), buffer) for name, buffer in buffers.items()})

    def _restored(self) -> dict[int, Tensor]:
        """Return, for the identity of each buffer that was changed, a tensor with the values it had."""
        restored: dict[int, Tensor] = {}
        for number, copy in self._copies.values().items():
            tensor, required = self._copier.tensors[number], self._required[number]
            values = copy.view(self._shapes[number]) if copy.layout is torch.strided else copy
            if tensor.requires_grad != required or not same_values(tensor, values):
                restored[id(tensor)] = _with_values(tensor, values, required=required)
        return restored


def _all_items(holders: list[dict[str, Tensor | None]]) -> list[Any]:
    """Return the names and tensors of all buffers, one after the other."""
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(map(dict.items, holders))))


def _with_values(tensor: Tensor, values: Tensor, *, required: bool) -> Tensor:
    """Return a buffer with the values it had; the same tensor wherever it can still hold them."""
    try:
        if tensor.shape != values.shape:
            tensor.resize_(values.shape)
        tensor.copy_(values)
        if tensor.requires_grad and not required:
            tensor.detach_()
    except Exception:  # the model made it into something that cannot be written to
        return values.clone().requires_grad_(required)
    return tensor


def _same_items(these: dict[str, Any], those: dict[str, Any]) -> bool:
    return list(these) == list(those) and all(map(operator.is_, these.values(), those.values()))


def _same_contents(value: Any, contents: Any) -> bool:
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(key in contents and contents[key] is item for key, item in value.items())
    return value == contents if isinstance(value, set) else all(map(operator.is_, value, contents))


def _restore_attributes(module: nn.Module, saved: dict[str, Any]) -> None:
    """Undo what a forward pass set, such as a cache and the flag that says it is there."""
    attributes = vars(module)
    for name in [name for name in attributes if name not in PYTORCHS and name not in saved]:
        del attributes[name]
    for name, value in saved.items():
        # PyTorch's own attributes are not touched, and a pass may have made an attribute a parameter or a module.
        if name in PYTORCHS or name in module._parameters or name in module._modules:
            continue
        if attributes.get(name, attributes) is not value:
            attributes[name] = value


class _Use:
    """Models in use that share modules: how many passes are running, and what the modules were before the first."""

    def __init__(self) -> None:
        self.users = 0
        self.keys: frozenset[int] = frozenset()
        self.saved: list[_Saved] = []
        self.joined: _Use | None = None

    def add(self, record: ModelRecord) -> None:
        """Save what is not saved yet, and count one more user."""
        self.users += 1
        if record.keys <= self.keys:
            return
        modules = record.modules()
        new = [module for module in modules if id(module) not in self.keys]
        authored = [module for module in record.authored(modules) if id(module) not in self.keys]
        saved = _Saved(record if len(new) == len(modules) else ModelRecord(new), new, authored)
        self.keys |= record.keys
        self.saved.append(saved)
        saved.switch_off_training()

    def take_over(self, other: _Use) -> None:
        """Become one with another use, which a model that shares modules with both has connected."""
        self.users += other.users
        self.saved += other.saved
        self.keys |= other.keys
        other.joined = self


_in_use: list[_Use] = []
"""The models that some thread is running at this moment."""


def _enter(record: ModelRecord) -> _Use:
    overlapping = [use for use in _in_use if not use.keys.isdisjoint(record.keys)]
    use = overlapping[0] if overlapping else _Use()
    for other in overlapping[1:]:
        use.take_over(other)
        _in_use.remove(other)
    if not overlapping:
        _in_use.append(use)
    use.add(record)
    return use


def _leave(use: _Use) -> None:
    while use.joined is not None:
        use = use.joined
    use.users -= 1
    if not use.users:
        _in_use.remove(use)
        for saved in use.saved:
            saved.restore()


@contextmanager
def evaluating(model: nn.Module, record: ModelRecord | None = None) -> Iterator[None]:
    """Put every submodule into evaluation mode, and restore each one's flag, buffers and attributes at the end.

    Several threads may be inside for the same model, or for models that share modules: the first one in saves, the last
    one out restores. ``train()`` and ``eval()`` are not called, since models may override them.

    Args:
        model: any module.
        record: of the model, if one was prepared.
    """
    record = record or ModelRecord.of_model(model)
    with _lock, torch.no_grad():
        use = _enter(record)
    try:
        yield
    finally:
        with _lock, torch.no_grad():
            _leave(use)


def is_in_use(record: ModelRecord) -> bool:
    """Tell whether some pass is running on the model, or on a model that shares modules with it."""
    return any(not use.keys.isdisjoint(record.keys) for use in list(_in_use))


def switch_off_training(model: nn.Module) -> None:
    """Put every submodule into evaluation mode again, inside ``evaluating``, which restores the flags."""
    for module in model.modules():
        module.training = False


@contextmanager
def same_requirements(model: nn.Module) -> Iterator[None]:
    """Restore which parameters require gradients at the end: models may freeze parts of themselves in ``train()``."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, required in flags:
            if parameter.requires_grad != required:
                parameter.requires_grad_(required)


@dataclass
class _Eager:
    """How many threads need compiled modules to run as they are written, and what ends that."""

    users: int
    stance: AbstractContextManager[None]


_eager: list[_Eager] = []


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled modules as they are written: hooks that are set later do not exist in compiled code.

    PyTorch has one such switch for all threads; the last one out restores it.
    """
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and importing it takes seconds
        yield
        return
    with _lock:
        if not _eager:
            stance = cast("AbstractContextManager[None]", torch.compiler.set_stance("force_eager"))
            stance.__enter__()
            _eager.append(_Eager(0, stance))
        _eager[0].users += 1
    try:
        yield
    finally:
        with _lock:
            _eager[0].users -= 1
            if not _eager[0].users:
                _eager.pop().stance.__exit__(None, None, None)
