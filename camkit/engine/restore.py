"""Leaves the user's model and process exactly as they were found."""

from __future__ import annotations

import operator
import random
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

_lock = threading.Lock()
_held: dict[int, _Held] = {}


@dataclass
class _Buffer:
    """A buffer as it was: the tensor itself, and a copy of what it held."""

    tensor: Tensor
    copy: Tensor
    version: int
    required_grad: bool


@dataclass
class _Held:
    """A module some thread is using: how many do, and what the module was before the first came."""

    module: nn.Module
    users: int
    training: bool
    buffers: dict[str, _Buffer | None]
    attributes: dict[str, tuple[Any, Any]]
    """What the model's author keeps on the module: each value, and what it held where it is a container."""


_PYTORCHS = frozenset(vars(nn.Module()))
"""Attributes that are PyTorch's own, such as the hooks, which others may set meanwhile."""


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _noted(buffer: Tensor | None) -> _Buffer | None:
    return None if buffer is None else _Buffer(buffer, buffer.detach().clone(), _version(buffer), buffer.requires_grad)


def _hold(module: nn.Module) -> None:
    """Take note of one more user of the module; the first one saves its state and puts it into evaluation mode."""
    held = _held.get(id(module))
    if held is not None:
        held.users += 1
        return
    buffers = {name: _noted(buffer) for name, buffer in module._buffers.items()}
    attributes = {name: (value, _held_by(value)) for name, value in vars(module).items() if name not in _PYTORCHS}
    _held[id(module)] = _Held(module, 1, module.training, buffers, attributes)
    if module.training:
        module.training = False


def _release(module: nn.Module) -> None:
    held = _held[id(module)]
    held.users -= 1
    if held.users:
        return
    del _held[id(module)]
    if module.training != held.training:
        module.training = held.training
    for name in [name for name in module._buffers if name not in held.buffers]:
        del module._buffers[name]
    for name, noted in held.buffers.items():
        module._buffers[name] = None if noted is None else _restored(noted)
    _restore_attributes(module, held.attributes)


def _held_by(value: Any) -> Any:
    """Return a copy of an ordinary container that shares what is in it; None for anything else."""
    return value.copy() if type(value) in (dict, OrderedDict, defaultdict, list, set) else None


def _same_contents(value: Any, contents: Any) -> bool:
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(key in contents and contents[key] is item for key, item in value.items())
    return value == contents if isinstance(value, set) else all(map(operator.is_, value, contents))


def _restore_attributes(module: nn.Module, saved: dict[str, tuple[Any, Any]]) -> None:
    """Undo what a forward pass set, changed or filled, such as a cache and the flag that says it is there."""
    attributes = vars(module)
    for name in [name for name in attributes if name not in _PYTORCHS and name not in saved]:
        del attributes[name]
    for name, (value, contents) in saved.items():
        if name in module._parameters or name in module._modules:  # made in this pass, and known by that name since
            continue
        if attributes.get(name, attributes) is not value:
            attributes[name] = value
        if contents is not None and not _same_contents(value, contents):
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(contents)


def _restored(noted: _Buffer) -> Tensor:
    """Return a buffer with what it held; the same tensor wherever it can still hold that."""
    tensor = noted.tensor
    try:
        if _unchanged(noted):
            return tensor
        if tensor.shape != noted.copy.shape:
            tensor.resize_(noted.copy.shape)
        tensor.copy_(noted.copy)
        if tensor.requires_grad and not noted.required_grad:
            tensor.detach_()
    except Exception:  # the model made it into something that cannot be written to
        return noted.copy.requires_grad_(noted.required_grad)
    return tensor


def _unchanged(noted: _Buffer) -> bool:
    tensor = noted.tensor
    if tensor.shape != noted.copy.shape or tensor.requires_grad != noted.required_grad:
        return False
    if _version(tensor) not in (-1, noted.version):
        return False
    # ``.data`` and NumPy write without raising the version. Elsewhere than on a CPU, to compare would be to wait.
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return True
    if torch.equal(tensor, noted.copy):
        return True
    both_nan = tensor.isnan() & noted.copy.isnan()
    return torch.equal(tensor.masked_fill(both_nan, 0), noted.copy.masked_fill(both_nan, 0))


@dataclass
class _Eager:
    """How many threads have compiled modules run as they are written, and what ends that."""

    users: int
    stance: AbstractContextManager[None]


_eager: list[_Eager] = []


@contextmanager
def eagerly() -> Iterator[None]:
    """Have compiled modules run as they are written: hooks set later do not exist in what was compiled.

    PyTorch has one such switch for all threads; the last one out restores it.
    """
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and its import takes seconds
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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every submodule into evaluation mode, and restore each one's flag, buffers and attributes at the end.

    Several threads may be inside for the same model, or for models that share modules: the first one in saves, the last
    one out restores. ``train()`` and ``eval()`` are not called, since models may override them.
    """
    modules = list(model.modules())
    taken: list[nn.Module] = []
    try:
        with _lock, torch.no_grad():
            for module in modules:
                _hold(module)
                taken.append(module)
        yield
    finally:
        with _lock, torch.no_grad():
            for module in taken:
                _release(module)


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


def _generator_arguments(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # MPS has one generator


@dataclass
class _Generators:
    """The random generators as they were before the first of the present users came."""

    users: int
    cpu: Tensor
    devices: dict[torch.device, Tensor]
    numpy: Any
    python: Any


_generators: list[_Generators] = []


def _save_generators(devices: set[torch.device]) -> None:
    if not _generators:
        _generators.append(_Generators(0, torch.get_rng_state(), {}, np.random.get_state(), random.getstate()))
    saved = _generators[0]
    saved.users += 1
    for device in devices - saved.devices.keys():
        module = torch.get_device_module(device.type)
        saved.devices[device] = module.get_rng_state(*_generator_arguments(device))


def _restore_generators() -> None:
    saved = _generators[0]
    saved.users -= 1
    if saved.users:
        return
    _generators.clear()
    if not torch.equal(torch.get_rng_state(), saved.cpu):
        torch.set_rng_state(saved.cpu)
    for device, state in saved.devices.items():
        torch.get_device_module(device.type).set_rng_state(state, *_generator_arguments(device))
    np.random.set_state(saved.numpy)
    random.setstate(saved.python)


def generators() -> tuple[Any, ...]:
    """Return the state of the CPU's generators (torch, NumPy, Python) in a form that can be compared."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), (numpy[1].tobytes(), *numpy[2:]), random.getstate()


@contextmanager
def same_randomness(model: nn.Module | None = None) -> Iterator[None]:
    """Restore the random generators of torch (CPU and the model's devices), NumPy and Python at the end.

    They belong to the process: what other threads draw meanwhile, they draw again afterwards.
    """
    devices = {
        parameter.device
        for parameter in (() if model is None else model.parameters())
        if parameter.device.type in ("cuda", "mps", "xpu")
    }
    with _lock:
        _save_generators(devices)
    try:
        yield
    finally:
        with _lock:
            _restore_generators()
