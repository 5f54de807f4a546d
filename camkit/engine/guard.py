"""Runs a pass and leaves everything as it was: the model, the random generators, and what all threads share.

A pass may change training flags, buffers and attributes of modules. All of this is restored, also after an exception.
Several threads may use the same model at once, or models that share modules: the first one to enter saves the state,
and the last one to leave restores it.
"""

from __future__ import annotations

import itertools
import operator
import random
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from camkit.engine.attach import remove_hooks_since
from camkit.engine.interrupts import undisturbed
from camkit.engine.record import PYTORCHS, ModelRecord, versions_of

_lock = threading.Lock()

_LARGEST_COPY = 1_000_000
"""Tensors that a module keeps as attributes are copied if they have at most this many values."""

_TRAINING, _REQUIRES_GRAD = operator.attrgetter("training"), operator.attrgetter("requires_grad")
_PARAMETERS, _BUFFERS = operator.attrgetter("_parameters"), operator.attrgetter("_buffers")


@contextmanager
def guarded(model: nn.Module, record: ModelRecord | None = None, *, users_code: bool = True) -> Iterator[None]:
    """Put every submodule into evaluation mode, and restore the model and the random generators at the end.

    Ctrl-C waits in the block; run the model inside ``interruptible``. Compiled modules run eagerly. ``train()`` and
    ``eval()`` are not called, since models may override them.

    Args:
        model: any module.
        record: the model's record, if it is already prepared; a new one walks through all modules.
        users_code: True if functions of the user run inside, besides the model.
    """
    record = record or ModelRecord.of_model(model)
    eager: list[bool] = []
    with undisturbed(), same_randomness(record.devices, others=users_code or record.runs_own_code):
        try:
            _begin_eagerness(eager)
            with _lock, torch.no_grad():
                _enter(record)
            try:
                yield
            finally:
                with _lock, torch.no_grad():
                    written = _leave(record)
        finally:
            _end_eagerness(eager)
        if written:
            _warn_of(model, written)


class _Saved:
    """The state of some modules before a pass.

    Code of PyTorch, torchvision and timm is not expected to change PyTorch's modules (such as the momentum of a
    normalisation), nor to write to parameters or to tensors that are attributes.
    """

    def __init__(self, record: ModelRecord) -> None:
        own, modules = record.runs_own_code, record.modules()
        authored, others = record.written(modules)
        self._modules = modules
        self._flags = list(map(_TRAINING, modules))
        self._changeable = modules if own else authored
        self._tables = [
            table for module in self._changeable for table in (vars(module), module._parameters, module._buffers)
        ]
        self._contents = [table.copy() for table in self._tables]
        self._parameters = _tensors_of(map(_PARAMETERS, modules)) if own else []
        self._required = list(map(_REQUIRES_GRAD, self._parameters))
        self._versions = versions_of(self._parameters)
        tensors = [value for value in others if isinstance(value, Tensor) and value.numel() <= _LARGEST_COPY]
        copied = _tensors_of(map(_BUFFERS, self._changeable)) + (tensors if own else [])
        self._copied = [each for each in copied if each.layout is torch.strided and not each.is_inference()]
        self._copies = [(tensor.clone(), tensor._version) for tensor in self._copied]
        self._first_new_hook = RemovableHandle.next_id
        if any(self._flags):
            for module in modules:
                module.training = False
        self._items = self._all_items()

    def _all_items(self) -> list[Any]:
        """Return the names and values of all attributes, parameters and buffers, in one flat list."""
        values = itertools.chain.from_iterable(map(dict.values, self._tables))
        return [*itertools.chain.from_iterable(self._tables), *values]

    def restore(self) -> list[Tensor]:
        """Restore everything, and return the parameters that were written to."""
        if not _are_identical(self._all_items(), self._items):
            # Parameters and buffers go first, since a pass may have turned an attribute into one of these.
            for table, contents in zip(reversed(self._tables), reversed(self._contents), strict=True):
                _restore_table(table, contents)
            for module in self._changeable:
                # A model that sets hooks in its first pass also notes that, and would set them again without the note.
                remove_hooks_since(module, self._first_new_hook)
        if list(map(_TRAINING, self._modules)) != self._flags:
            for module, flag in zip(self._modules, self._flags, strict=True):
                module.training = flag
        if list(map(_REQUIRES_GRAD, self._parameters)) != self._required:
            for parameter, required in zip(self._parameters, self._required, strict=True):
                parameter.requires_grad_(required)
        for tensor, (copy, version) in zip(self._copied, self._copies, strict=True):
            # Batch normalisation, ``.data`` and NumPy do not raise the version. Comparing values would wait for a GPU.
            if tensor._version != version or (tensor.is_cpu and not torch.equal(tensor, copy)):
                _restore_values(tensor, copy)
        versions = zip(self._parameters, self._versions, versions_of(self._parameters), strict=True)
        return [parameter for parameter, before, after in versions if before != after]


def _tensors_of(tables: Iterable[dict[str, Tensor | None]]) -> list[Tensor]:
    held = itertools.chain.from_iterable(map(dict.values, tables))
    return [tensor for tensor in held if tensor is not None]


def _are_identical(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(map(operator.is_, items, others))


def _restore_table(table: dict[str, Any], contents: dict[str, Any]) -> None:
    """Restore a module's attributes, parameters or buffers, except what PyTorch manages."""
    if "_modules" not in table:  # parameters or buffers, whose order counts
        if not _are_identical([*table, *table.values()], [*contents, *contents.values()]):
            table.clear()
            table.update(contents)
        return
    for name in table.keys() - PYTORCHS - contents.keys():
        del table[name]
    # A pass may also have turned an attribute into a module.
    kept = contents.keys() - PYTORCHS - table["_modules"].keys()
    table.update({name: contents[name] for name in contents if name in kept})


def _restore_values(tensor: Tensor, copy: Tensor) -> None:
    if tensor.shape != copy.shape:
        tensor.resize_(copy.shape)
    tensor.data.copy_(copy)  # a tensor with NaN always gets here; ``.data`` does not raise its version
    if not tensor.is_leaf:
        tensor.detach_()


@dataclass
class _Use:
    """Models that share modules and are running: the number of passes, and the modules' state before the first one."""

    users: int = 0
    keys: frozenset[int] = frozenset()
    saved: list[_Saved] = field(default_factory=list)


_in_use: list[_Use] = []
"""The models that some thread is running now."""


def _enter(record: ModelRecord) -> None:
    """Count one more user of a model, and save the state of the modules that are not in use yet."""
    use = _Use()
    overlapping = [other for other in _in_use if not other.keys.isdisjoint(record.keys)]
    for other in overlapping:  # the model connects them, if they are several
        use.users += other.users
        use.keys |= other.keys
        use.saved += other.saved
    if not record.keys <= use.keys:
        new = [module for module in record.modules() if id(module) not in use.keys] if use.keys else None
        use.saved.append(_Saved(record if new is None else ModelRecord(new)))
    use.users += 1
    use.keys |= record.keys
    _in_use[:] = [other for other in _in_use if other not in overlapping] + [use]


def _leave(record: ModelRecord) -> list[Tensor]:
    """Restore the models if this was the last user, and return the parameters that cannot be restored."""
    use = next(use for use in _in_use if record.keys <= use.keys)
    use.users -= 1
    if use.users:
        return []
    _in_use.remove(use)
    return [tensor for saved in use.saved for tensor in saved.restore()]


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
    """Put every submodule into evaluation mode again; use it inside ``guarded``, which restores the flags."""
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


def _generator_arguments(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # MPS has one generator


@dataclass
class _Generators:
    """The states of the random generators before the first of the current users."""

    users: int
    cpu: Tensor
    devices: dict[torch.device, Tensor] = field(default_factory=dict)
    others: tuple[Any, Any] | None = None
    """The states of NumPy's and Python's generators."""


_generators: list[_Generators] = []


def generators() -> tuple[Any, ...]:
    """Return the states of the CPU's generators (PyTorch, NumPy, Python) in a form that can be compared."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), (numpy[1].tobytes(), *numpy[2:]), random.getstate()


@contextmanager
def same_randomness(devices: frozenset[torch.device] = frozenset(), *, others: bool = True) -> Iterator[None]:
    """Restore the random generators at the end: PyTorch's on the CPU and on other devices, NumPy's and Python's.

    All threads share the generators: numbers that other threads draw in the meantime are drawn again afterwards.

    Args:
        devices: the devices besides the CPU.
        others: True to restore NumPy's and Python's too, which takes as long as a small network's first layer.
    """
    with _lock:
        if not _generators:
            _generators.append(_Generators(0, torch.get_rng_state()))
        saved = _generators[0]
        saved.users += 1
        for device in devices - saved.devices.keys():
            module = torch.get_device_module(device.type)
            saved.devices[device] = module.get_rng_state(*_generator_arguments(device))
        if others and saved.others is None:
            saved.others = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        with _lock:
            saved.users -= 1
            if not saved.users:
                _generators.clear()
                _restore_generators(saved)


def _restore_generators(saved: _Generators) -> None:
    if not torch.equal(torch.get_rng_state(), saved.cpu):
        torch.set_rng_state(saved.cpu)
    for device, state in saved.devices.items():
        torch.get_device_module(device.type).set_rng_state(state, *_generator_arguments(device))
    if saved.others is not None:
        np.random.set_state(saved.others[0])
        random.setstate(saved.others[1])


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
    counted: list[bool] = []
    try:
        try:
            with undisturbed():
                _begin_eagerness(counted)
            yield
        finally:
            with undisturbed():
                _end_eagerness(counted)
    except KeyboardInterrupt:  # it may have come before the line above did anything
        with undisturbed():
            _end_eagerness(counted)
        raise


def _begin_eagerness(counted: list[bool]) -> None:
    """Count one more user, and note that in ``counted``."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and importing it takes seconds
        return
    with _lock:
        if not _eager:
            stance = cast("AbstractContextManager[None]", torch.compiler.set_stance("force_eager"))
            stance.__enter__()
            _eager.append(_Eager(0, stance))
        _eager[0].users += 1
        counted.append(True)


def _end_eagerness(counted: list[bool]) -> None:
    """Count one user less, once; ``counted`` is empty if the block was not counted or has ended."""
    with _lock:
        if counted:
            counted.clear()
            _eager[0].users -= 1
            if not _eager[0].users:
                _eager.pop().stance.__exit__(None, None, None)
