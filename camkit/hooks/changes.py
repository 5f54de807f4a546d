"""Changes of gradients, or of outputs, that are often wanted: each made by a function of its figures.

Of a sparse gradient, as of an embedding with ``sparse=True``, the numbers that it holds are changed; it stays sparse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Inexact
from torch import Tensor

from camkit.errors import InputError

Change: TypeAlias = Callable[[Tensor], Tensor]
"""Makes another tensor of the same shape."""


def scale(factor: float) -> Change:
    """Return a function that multiplies a tensor of any shape.

    >>> scale(0.5)(torch.ones(2))
    tensor([0.5000, 0.5000])
    """

    def scaled(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        return tensor * factor

    return scaled


def clip_value(limit: float) -> Change:
    """Return a function that moves numbers beyond plus or minus ``limit`` to it, in a tensor of any shape.

    Raises:
        InputError: the limit isn't a positive number; then: numbers are complex.

    >>> clip_value(1.0)(torch.tensor([-3.0, 0.5]))
    tensor([-1.0000,  0.5000])

    """
    _positive("limit", limit)

    def clipped(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        if tensor.is_complex():
            raise InputError("clip_value compares numbers, and complex ones have no order; clip_norm shortens them")
        return tensor.clamp(-limit, limit)

    return _where_held(clipped)


def clip_norm(limit: float) -> Change:
    """Return a function that shortens a tensor of any shape to the Euclidean norm ``limit`` where it is longer.

    The norm is of the whole tensor, of all images of a batch.

    Raises:
        InputError: the limit isn't a positive number.

    >>> clip_norm(1.0)(torch.tensor([3.0, 4.0])), clip_norm(10.0)(torch.tensor([3.0, 4.0]))
    (tensor([0.6000, 0.8000]), tensor([3., 4.]))

    """
    _positive("limit", limit)

    def clipped(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        # Without a look at the number, for which a GPU would have to be waited for; squares overflow fp16.
        wide = torch.promote_types(tensor.dtype, torch.float32)
        norm = torch.linalg.vector_norm(tensor, dtype=wide)
        shortened: Tensor = tensor * (limit / norm).clamp(max=1)
        return shortened

    return _where_held(clipped)


def noise(std: float, generator: torch.Generator | None = None) -> Change:
    """Return a function that adds normal noise of this standard deviation to a tensor of any shape.

    Args:
        std: of the noise, in the tensor's unit.
        generator: on the tensor's device, for noise that can be repeated and doesn't disturb the default generator.

    Raises:
        InputError: the standard deviation isn't a positive number.

    >>> noise(0.1, torch.Generator().manual_seed(0))(torch.zeros(2))
    tensor([ 0.1541, -0.0293])

    """
    _positive("std", std)

    def noisy(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)
        return tensor + std * drawn

    return _where_held(noisy)


def _where_held(change: Change) -> Change:
    """Return the change as one that sparse tensors can be given too."""

    def changed(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        if tensor.layout is not torch.sparse_coo:
            return change(tensor)
        held = tensor.coalesce()
        indices, values = held.indices(), change(held.values())
        return torch.sparse_coo_tensor(indices, values, held.shape, check_invariants=False, is_coalesced=True)

    return changed


def _positive(name: str, number: float) -> None:
    if not (number > 0 and math.isfinite(number)):
        raise InputError(f"{name} must be a positive number, not {number!r}")
