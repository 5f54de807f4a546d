"""Random generators: their state is saved before a pass and restored after it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

_lock = threading.Lock()


def _generator_arguments(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # MPS has one generator


@dataclass
class _Generators:
    """The random generators as they were before the first of the present users came."""

    users: int
    cpu: Tensor
    devices: dict[torch.device, Tensor] = field(default_factory=dict)
    others: tuple[Any, Any] | None = None
    """The states of NumPy's and Python's."""


_generators: list[_Generators] = []


def _save_generators(devices: frozenset[torch.device], *, others: bool) -> None:
    if not _generators:
        _generators.append(_Generators(0, torch.get_rng_state()))
    saved = _generators[0]
    saved.users += 1
    for device in devices - saved.devices.keys():
        module = torch.get_device_module(device.type)
        saved.devices[device] = module.get_rng_state(*_generator_arguments(device))
    if others and saved.others is None:
        saved.others = np.random.get_state(), random.getstate()


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
    if saved.others is not None:
        np.random.set_state(saved.others[0])
        random.setstate(saved.others[1])


def generators() -> tuple[Any, ...]:
    """Return the state of the CPU's generators (torch, NumPy, Python) in a form that can be compared."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), (numpy[1].tobytes(), *numpy[2:]), random.getstate()


@contextmanager
def same_randomness(devices: frozenset[torch.device] = frozenset(), *, others: bool = True) -> Iterator[None]:
    """Restore random generators at the end: PyTorch's on the CPU and on some other devices, NumPy's and Python's.

    They belong to the process: what other threads draw in the meantime, they draw again afterwards.

    Args:
        devices: besides the CPU.
        others: whether NumPy's and Python's are restored too, which costs as much as a small network's first layer.
    """
    with _lock:
        _save_generators(devices, others=others)
    try:
        yield
    finally:
        with _lock:
            _restore_generators()
