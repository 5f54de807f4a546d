"""Put a model into evaluation mode for a pass, and restore it exactly afterwards."""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from camkit.engine.attach import remove_hooks_since
from camkit.engine.interrupts import undisturbed
from camkit.engine.own_state import OwnState, restore_contents
from camkit.engine.record import PYTORCHS, ModelRecord, same_values, with_values

_lock = threading.Lock()


class _Saved:
    """The state of a model's modules before a pass: training flags, buffers, and the attributes their authors set.

    ``own`` holds what only the user's own code may change.
    """

    def __init__(self, record: ModelRecord, modules: list[nn.Module], authored: list[nn.Module]) -> None:
        self._modules = modules
        self._flags = list(map(_TRAINING, modules))
        # The user's own code may also change PyTorch's modules, such as the momentum of a normalisation.
        self._changeable = modules if record.runs_own_code else authored
        self._attributes = [vars(module).copy() for module in self._changeable]
        self._own = OwnState(modules, authored) if record.runs_own_code else None
        self._containers = [] if self._own else [(value, value.copy()) for value in record.containers(authored)]
        self._buffers = _Buffers(record, record.buffer_holders(modules))
        self._first_new_hook = RemovableHandle.next_id

    def switch_off_training(self) -> None:
        if any(self._flags):
            for module in self._modules:
                module.training = False

    def restore(self) -> list[Tensor]:
        """Restore everything, and return the parameters that were written to and cannot be restored."""
        if list(map(_TRAINING, self._modules)) != self._flags:
            for module, flag in zip(self._modules, self._flags, strict=True):
                module.training = flag
        self._buffers.restore()
        now = list(map(vars, self._changeable))
        if not _are_identical(_all_items(now), _all_items(self._attributes)):
            for module, attributes in zip(self._changeable, self._attributes, strict=True):
                _restore_attributes(module, attributes)
            # A model that sets hooks in its first pass also notes that, and without the note it would set them again.
            for module in self._changeable:
                remove_hooks_since(module, self._first_new_hook)
        for value, contents in self._containers:
            restore_contents(value, contents)
        return self._own.restore() if self._own else []


_TRAINING = operator.attrgetter("training")
_SHAPE, _REQUIRES_GRAD = operator.attrgetter("shape"), operator.attrgetter("requires_grad")


class _Buffers:
    """The buffers of a model before a pass: the tensors themselves, and copies of their values."""

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
        if not replaced and _are_identical(_all_items(self._holders), self._before):
            return
        items = iter(zip(self._before[::2], self._before[1::2], strict=True))
        for holder, count in zip(self._holders, self._counts, strict=True):
            buffers = dict(itertools.islice(items, count))
            holder.clear()
            holder.update({name: replaced.get(id(buffer), buffer) for name, buffer in buffers.items()})

    def _restored(self) -> dict[int, Tensor]:
        """Return, by the identity of each changed buffer, a tensor with its former values."""
        restored: dict[int, Tensor] = {}
        for number, copy in self._copies.values().items():
            tensor, required = self._copier.tensors[number], self._required[number]
            values = copy.view(self._shapes[number]) if copy.layout is torch.strided else copy
            if tensor.requires_grad != required or not same_values(tensor, values):
                restored[id(tensor)] = with_values(tensor, values, required=required)
        return restored


def _all_items(holders: list[dict[str, Any]]) -> list[Any]:
    """Return the names and values of several dictionaries in one flat list."""
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(map(dict.items, holders))))


def _are_identical(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(map(operator.is_, items, others))


def _restore_attributes(module: nn.Module, saved: dict[str, Any]) -> None:
    """Restore the attributes that a forward pass changed, such as a cache and the flag that it is filled."""
    attributes = vars(module)
    for name in [name for name in attributes if name not in PYTORCHS and name not in saved]:
        del attributes[name]
    for name, value in saved.items():
        # PyTorch manages its own attributes. A pass may also have turned an attribute into a parameter or a module.
        if name in PYTORCHS or name in module._parameters or name in module._modules:
            continue
        if attributes.get(name, attributes) is not value:
            attributes[name] = value


class _Use:
    """Models that share modules and are running: the number of passes, and the modules' state before the first one."""

    def __init__(self) -> None:
        self.users = 0
        self.keys: frozenset[int] = frozenset()
        self.saved: list[_Saved] = []
        self.joined: _Use | None = None

    def add(self, record: ModelRecord) -> None:
        """Count one more user, and save the state of the modules that are not saved yet."""
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
        """Merge another use into this one, after a model that shares modules with both has connected them."""
        self.users += other.users
        self.saved += other.saved
        self.keys |= other.keys
        other.joined = self


_in_use: list[_Use] = []
"""The models that some thread is running now."""


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


def _leave(use: _Use) -> list[Tensor]:
    """Restore the models if this was the last user, and return the parameters that cannot be restored."""
    while use.joined is not None:
        use = use.joined
    use.users -= 1
    if use.users:
        return []
    _in_use.remove(use)
    return [tensor for saved in use.saved for tensor in saved.restore()]


@contextmanager
def evaluating(model: nn.Module, record: ModelRecord | None = None) -> Iterator[None]:
    """Put every submodule into evaluation mode, and restore its flag, buffers and attributes at the end.

    Several threads may use the same model at once, or models that share modules: the first one to enter saves the state
    and the last one to leave restores it. ``train()`` and ``eval()`` are not called, since models may override them.

    Args:
        model: any module.
        record: the model's record, if it is already prepared.
    """
    record = record or ModelRecord.of_model(model)
    with _lock, torch.no_grad():
        use = _enter(record)
    try:
        yield
    finally:
        with _lock, torch.no_grad():
            written = _leave(use)
        if written:
            _warn_of(model, written)


def _warn_of(model: nn.Module, written: list[Tensor]) -> None:
    identities = set(map(id, written))
    names = [name for name, parameter in model.named_parameters() if id(parameter) in identities]
    shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    warnings.warn(
        f"the model's forward pass writes into its own parameters ({shown}), which camkit cannot undo; "
        "explain a copy of the model (copy.deepcopy)",
        stacklevel=2,
    )


def is_in_use(record: ModelRecord) -> bool:
    """Tell whether a pass is running on the model, or on a model that shares modules with it."""
    return any(not use.keys.isdisjoint(record.keys) for use in list(_in_use))


def switch_off_training(model: nn.Module) -> None:
    """Put every submodule into evaluation mode again; use it inside ``evaluating``, which restores the flags."""
    for module in model.modules():
        module.training = False


@contextmanager
def same_requirements(model: nn.Module) -> Iterator[None]:
    """Restore at the end which parameters require gradients, since models may freeze parameters in ``train()``."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, required in flags:
            if parameter.requires_grad != required:
                parameter.requires_grad_(required)


@dataclass
class _Eager:
    """The number of threads that need compiled modules to run eagerly, and the context that ends this."""

    users: int
    stance: AbstractContextManager[None]


_eager: list[_Eager] = []


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled modules eagerly, since compiled code ignores hooks that are set later.

    PyTorch has one switch for all threads; the last thread to leave restores it.
    """
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and importing it takes seconds
        yield
        return
    counted: list[bool] = []
    try:
        try:
            with undisturbed(), _lock:
                if not _eager:
                    stance = cast("AbstractContextManager[None]", torch.compiler.set_stance("force_eager"))
                    stance.__enter__()
                    _eager.append(_Eager(0, stance))
                _eager[0].users += 1
                counted.append(True)
            yield
        finally:
            _end_eagerness(counted)
    except KeyboardInterrupt:  # it may have come before the line above did anything
        _end_eagerness(counted)
        raise


def _end_eagerness(counted: list[bool]) -> None:
    """Count one user less, once; ``counted`` is empty if the block was not counted or has ended."""
    with undisturbed(), _lock:
        if counted:
            counted.clear()
            _eager[0].users -= 1
            if not _eager[0].users:
                _eager.pop().stance.__exit__(None, None, None)
