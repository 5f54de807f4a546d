"""Random generators: their state is saved before a pass and restored after it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    devices: dict[torch.device, Tensor]
    numpy: Any
    python: Any


_generators: list[_Generators] = []


def _save_generators(devices: frozenset[torch.device]) -> None:
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
    drawn: Any = np.random.get_state()
    if drawn[2:] != saved.numpy[2:] or not np.array_equal(drawn[1], saved.numpy[1]):
        np.random.set_state(saved.numpy)
    if random.getstate() != saved.python:
        random.setstate(saved.python)


def generators() -> tuple[Any, ...]:
    """Return the state of the CPU's generators (torch, NumPy, Python) in a form that can be compared."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), (numpy[1].tobytes(), *numpy[2:]), random.getstate()


@contextmanager
def same_randomness(devices: frozenset[torch.device] = frozenset()) -> Iterator[None]:
    """Restore the random generators of torch (CPU and some other devices), NumPy and Python at the end.

    They belong to the process: what other threads draw in the meantime, they draw again afterwards.
    """
    with _lock:
        _save_generators(devices)
    try:
        yield
    finally:
        with _lock:
            _restore_generators()
