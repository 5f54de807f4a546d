"""What is measured of each tensor while the model runs; nothing else of it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from camkit.diagnosis.statistics import flat_share, peaks, plain, silent_channels, statistics
from camkit.diagnosis.values import TensorStatistics
from camkit.engine.attach import backward_pass

RELUS = (nn.ReLU, nn.ReLU6, nn.Hardswish)
"""Functions that are zero for all that is small enough, without a slope there."""

CURVES: dict[type[nn.Module], tuple[float, float]] = {nn.Sigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0)}
"""Functions that are flat at both ends, with the values there."""


@dataclass(frozen=True)
class Measured:
    """What is kept of a tensor; ``silent`` are the channels that are, along its second and along its last axis."""

    shape: tuple[int, ...]
    numbers: TensorStatistics
    silent: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


@dataclass(frozen=True)
class Mark:
    """Stands for a tensor in what a layer returned, as the number of its measurement."""

    number: int


@dataclass(frozen=True)
class Flaws:
    """Stands for a tensor in what a layer was given: whether it holds NaN, or infinity."""

    nan: bool
    inf: bool


@dataclass(eq=False)
class Measures:
    """Measures one tensor after the other; one that comes twice in a row once, as what a block's last layer returns.

    So the same number means the same tensor.
    """

    found: list[Measured] = field(default_factory=list)
    last: Tensor | None = None
    _version: int = -1  # when it was measured: what is done in place raises it, for all that share the memory

    def __call__(self, tensor: Tensor) -> Mark:
        """Return the number of the tensor's measurement."""
        if self.last is None or self._version != tensor._version or not _same(self.last, tensor):
            with torch.no_grad():
                self.found.append(measured(tensor, magnitudes=backward_pass() >= 0))
            self.last, self._version = tensor, tensor._version
        return Mark(len(self.found) - 1)


def _same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are the same memory, in whatever shape."""
    return (
        one.numel() == other.numel() > 0
        and one.dtype == other.dtype
        and one.device == other.device
        and one.data_ptr() == other.data_ptr() != 0
    )


def measured(tensor: Tensor, *, magnitudes: bool = False) -> Measured:
    """Measure a tensor, with the magnitudes of its numbers if wanted; of gradients no silent channels."""
    values = plain(tensor)
    shape, numbers = tuple(values.shape), statistics(values, magnitudes=magnitudes)
    if backward_pass() >= 0 or len(shape) < 2:
        return Measured(shape, numbers)
    return Measured(shape, numbers, (_silent(values, 1, numbers.zeros), _silent(values, -1, numbers.zeros)))


def _silent(tensor: Tensor, axis: int, zeros: float) -> tuple[int, ...]:
    """Return the silent channels, which aren't looked for where the share of zeros is too small for one."""
    return silent_channels(tensor, axis) if zeros * tensor.shape[axis] > _ALMOST else ()


_ALMOST = 0.99
"""Of a channel's share, however shares were rounded."""


def flaws(tensor: Tensor) -> Flaws:
    """Return whether a tensor holds NaN, or infinity."""
    if bool(tensor.isfinite().all()):
        return Flaws(nan=False, inf=False)
    return Flaws(bool(tensor.isnan().any()), bool(tensor.isinf().any()))


def both_peaks(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the channels' peaks along the second and along the last axis."""
    return (peaks(tensor, 1), peaks(tensor, -1)) if tensor.dim() > 1 and tensor.numel() else None


def share_for(kind: type[nn.Module]) -> partial[float]:
    """Return what measures the share of flat values after such a function."""
    low, high = CURVES[kind]
    return partial(flat_share, low=low, high=high)
