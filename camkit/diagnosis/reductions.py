"""What is kept of each tensor while the model runs, instead of the tensor itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from camkit.diagnosis.tensor_statistics import (
    TensorStatistics,
    flat_share,
    peaks,
    plain,
    silent_channels,
    statistics,
)
from camkit.engine.attach import backward_pass

RELUS = (nn.ReLU, nn.ReLU6, nn.Hardswish)
"""Functions that are zero, with slope zero, for every small enough value."""

CURVES: dict[type[nn.Module], tuple[float, float]] = {nn.Sigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0)}
"""Functions that are flat at both ends, with their values there."""


@dataclass(frozen=True)
class TensorSummary:
    """What is kept of a tensor; ``silent`` has its silent channels along the second and along the last axis."""

    shape: tuple[int, ...]
    statistics: TensorStatistics
    silent: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


@dataclass(frozen=True)
class Mark:
    """Stands for a tensor in what a layer returned: the number of its summary."""

    number: int


@dataclass(frozen=True)
class Flaws:
    """Stands for a tensor in what a layer took: whether it holds NaN, or infinity."""

    nan: bool
    inf: bool


@dataclass(eq=False)
class Summaries:
    """Summarizes one tensor after the other.

    A tensor that comes twice in a row, as when a block returns what its last layer returned, is summarized once. So
    equal numbers mean the same tensor.
    """

    summaries: list[TensorSummary] = field(default_factory=list)
    last: Tensor | None = None
    _version: int = -1  # of the last tensor; an in-place change raises it for every tensor with the same memory

    def __call__(self, tensor: Tensor) -> Mark:
        """Return the number of the tensor's summary."""
        if self.last is None or self._version != tensor._version or not _is_same(self.last, tensor):
            with torch.no_grad():
                self.summaries.append(summarize(tensor, magnitudes=backward_pass() >= 0))
            self.last, self._version = tensor, tensor._version
        return Mark(len(self.summaries) - 1)

    def __getitem__(self, mark: Mark) -> TensorSummary:
        """Return the summary that a mark stands for."""
        return self.summaries[mark.number]


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory, in whatever shape."""
    return (
        tensor.numel() == other.numel() > 0
        and tensor.dtype == other.dtype
        and tensor.device == other.device
        and tensor.data_ptr() == other.data_ptr() != 0
    )


def summarize(tensor: Tensor, *, magnitudes: bool = False) -> TensorSummary:
    """Summarize a tensor, on request with the sizes of its values; gradients without their silent channels."""
    values = plain(tensor)
    shape, numbers = tuple(values.shape), statistics(values, magnitudes=magnitudes)
    if backward_pass() >= 0 or len(shape) < 2:
        return TensorSummary(shape, numbers)
    return TensorSummary(shape, numbers, (_silent(values, 1, numbers.zeros), _silent(values, -1, numbers.zeros)))


def _silent(tensor: Tensor, axis: int, zeros: float) -> tuple[int, ...]:
    """Return the silent channels, without a search if the share of zeros is too small for a single one."""
    return silent_channels(tensor, axis) if zeros * tensor.shape[axis] > _ALMOST_ONE_CHANNEL else ()


_ALMOST_ONE_CHANNEL = 0.99
"""One channel's share of the values, with a margin for rounding."""


def flaws(tensor: Tensor) -> Flaws:
    """Return whether a tensor holds NaN, or infinity."""
    if bool(tensor.isfinite().all()):
        return Flaws(nan=False, inf=False)
    return Flaws(bool(tensor.isnan().any()), bool(tensor.isinf().any()))


def both_peaks(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the channels' peaks along the second and along the last axis."""
    return (peaks(tensor, 1), peaks(tensor, -1)) if tensor.dim() > 1 and tensor.numel() else None


def share_for(kind: type[nn.Module]) -> partial[float]:
    """Return the function that measures the share of flat values after a sigmoid or tanh."""
    low, high = CURVES[kind]
    return partial(flat_share, low=low, high=high)
