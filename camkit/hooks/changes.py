"""Common changes of gradients or outputs: each function here returns the function that makes the change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Inexact
from torch import Tensor

from camkit.errors import InputError

Change: TypeAlias = Callable[[Tensor], Tensor]
"""A function from a tensor to another of the same shape."""


def scale(factor: float) -> Change:
    """Return a function that multiplies a tensor of any shape.

    >>> scale(0.5)(torch.ones(2))
    tensor([0.5000, 0.5000])
    """

    def scaled(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        return tensor * factor

    return scaled


def clip_value(limit: float) -> Change:
    """Return a function that clips the values of a tensor of any shape to between ``-limit`` and ``limit``.

    Raises:
        InputError: the limit is not a positive number.

    >>> clip_value(1.0)(torch.tensor([-3.0, 0.5]))
    tensor([-1.0000,  0.5000])

    """
    _positive("limit", limit)

    def clipped(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        return tensor.clamp(-limit, limit)

    return clipped


def clip_norm(limit: float) -> Change:
    """Return a function that scales a tensor of any shape down to the Euclidean norm ``limit`` if its norm is larger.

    The norm is that of the whole tensor, all images of a batch together.

    Raises:
        InputError: the limit is not a positive number.

    >>> clip_norm(1.0)(torch.tensor([3.0, 4.0])), clip_norm(10.0)(torch.tensor([3.0, 4.0]))
    (tensor([0.6000, 0.8000]), tensor([3., 4.]))

    """
    _positive("limit", limit)

    def clipped(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        # The norm is not read on the CPU, which would have to wait for the GPU. Squares overflow fp16, hence float32.
        wide = torch.promote_types(tensor.dtype, torch.float32)
        norm = torch.linalg.vector_norm(tensor, dtype=wide)
        shortened: Tensor = tensor * (limit / norm).clamp(max=1)
        return shortened.to(tensor.dtype)  # the product of two tensors without axes has the wider type

    return clipped


def noise(std: float, generator: torch.Generator | None = None) -> Change:
    """Return a function that adds normal noise with this standard deviation to a tensor of any shape.

    Args:
        std: the standard deviation, in the tensor's unit.
        generator: a generator on the tensor's device, for repeatable noise that leaves the default generator alone.

    Raises:
        InputError: the standard deviation is not a positive number.

    >>> noise(0.1, torch.Generator().manual_seed(0))(torch.zeros(2))
    tensor([ 0.1541, -0.0293])

    """
    _positive("std", std)

    def noisy(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)
        return tensor + std * drawn

    return noisy


def _positive(name: str, number: float) -> None:
    if not (number > 0 and math.isfinite(number)):
        raise InputError(f"{name} must be a positive number, not {number!r}")
