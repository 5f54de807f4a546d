"""Statistics of a tensor: what they are, and pure functions, each short enough to compare with its definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import pstdev
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from camkit.explaining.explanation import finite_or_none

BINS = 40
"""Bins of a histogram of values."""

DECADES = (-40, 20)
"""The range of a histogram of gradient magnitudes, as decimal logarithms."""

PER_DECADE = 4
"""Bins of that histogram for each factor of ten."""

_IN_CACHE, _ON_DEVICE = 1 << 17, 1 << 22
"""How many numbers are processed at once. On a CPU they fit into its cache, which is several times as fast."""


@dataclass(frozen=True)
class Histogram:
    """The number of values in each of several equally wide bins from ``low`` to ``high``; both ends are included."""

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the bins, one more than there are bins."""
        step = (self.high - self.low) / len(self.counts)
        return (*(self.low + number * step for number in range(len(self.counts))), self.high)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"low": self.low, "high": self.high, "counts": list(self.counts)}


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a tensor's numbers; all but the counts are of the finite numbers, and NaN if there are none.

    Attributes:
        count: how many numbers there are.
        nan, inf: how many are NaN, and how many infinite.
        mean, std: the mean and the standard deviation (divided by the count, not the count minus one).
        low, high: the smallest and the largest number.
        zeros: the share that is exactly zero, 0..1.
        norm: the square root of the sum of squares.
        histogram: the distribution from ``low`` to ``high``.
        magnitudes: the distribution of the decimal logarithms of the absolute values that are not zero; only for
            gradients. The first and the last bin also hold what lies beyond them.
    """

    count: int
    nan: int
    inf: int
    mean: float
    std: float
    low: float
    high: float
    zeros: float
    norm: float
    histogram: Histogram
    magnitudes: Histogram | None = None

    @property
    def norm_of_all(self) -> float:
        """The norm of all numbers: NaN if one is NaN, infinity if one is infinite."""
        return math.nan if self.nan else math.inf if self.inf else self.norm

    def scaled(self, factor: float) -> TensorStatistics:
        """Return the statistics of the numbers times a positive factor, without ``magnitudes``."""
        if factor == 1:
            return self
        histogram = Histogram(self.histogram.low * factor, self.histogram.high * factor, self.histogram.counts)
        numbers = {name: factor * getattr(self, name) for name in ("mean", "std", "low", "high", "norm")}
        return replace(self, histogram=histogram, magnitudes=None, **numbers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; null if there is no finite number."""
        numbers = {
            name: finite_or_none(getattr(self, name)) for name in ("mean", "std", "low", "high", "zeros", "norm")
        }
        histograms = {"histogram": self.histogram.to_dict()}
        if self.magnitudes is not None:
            histograms["magnitudes"] = self.magnitudes.to_dict()
        return {"count": self.count, "nan": self.nan, "inf": self.inf, **numbers, **histograms}


def plain(values: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return numbers in a form to compute with: dense, real, 32 or 64 bits, on a device that can sum 64 bits."""
    values = values.detach()
    values = values.to_dense() if values.layout != torch.strided else values
    values = values.abs() if values.is_complex() else values
    values = values.cpu() if values.device.type == "mps" else values
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def statistics(values: Shaped[Tensor, "*shape"], *, magnitudes: bool = False) -> TensorStatistics:
    """Return the statistics of a tensor's numbers, summed in 64 bits.

    Args:
        values: floating-point or complex numbers; for complex ones, the absolute values are used.
        magnitudes: whether to add a histogram of the logarithms of their sizes.

    >>> values = statistics(torch.tensor([0.0, 0.0, 3.0, 5.0]))
    >>> values.mean, values.low, values.high, values.zeros, values.histogram.counts[0]
    (2.0, 0.0, 5.0, 0.5, 2)
    """
    flat = plain(values).reshape(-1)
    count, nan, inf = flat.numel(), 0, 0
    total = _added(flat, torch.sum)
    if not math.isfinite(total):
        nan, inf = int(flat.isnan().sum()), int(flat.isinf().sum())
        flat = flat[flat.isfinite()]
        total = _added(flat, torch.sum)
    finite, log_histogram = flat.numel(), None
    if magnitudes:
        least, most = DECADES
        sizes = flat[flat != 0].abs().double().log10()
        log_histogram = histogram(sizes, float(least), float(most), (most - least) * PER_DECADE)
    if not finite:
        nothing = Histogram(0.0, 0.0, (0,) * BINS)
        undefined = (math.nan,) * 6  # mean, std, low, high, zeros and norm
        return TensorStatistics(count, nan, inf, *undefined, nothing, log_histogram)
    low, high = (float(end) for end in flat.aminmax())
    return TensorStatistics(
        count,
        nan,
        inf,
        mean=total / finite,
        std=norm(flat, total / finite) / math.sqrt(finite),
        low=low,
        high=high,
        zeros=(finite - _added(flat, lambda part: _squared(part.sign_()))) / finite,
        norm=norm(flat),
        histogram=histogram(flat, low, high),
        magnitudes=log_histogram,
    )


def norm(values: Float[Tensor, "*shape"], centre: float = 0.0) -> float:
    """Return the Euclidean norm of the differences from a number.

    >>> norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    return math.sqrt(_added(values, lambda part: _squared(part.sub_(centre))))


def _added(values: Float[Tensor, "*shape"], of: Callable[[Tensor], Tensor]) -> float:
    """Apply a function to the values part by part and add up the results, in 64 bits."""
    return float(torch.stack([of(part) for part in _parts(values)]).sum())


def _parts(values: Float[Tensor, "*shape"]) -> Iterator[Float[Tensor, " n"]]:
    """Return the values part by part in 64 bits, each part in the same memory: use one before taking the next."""
    size = _IN_CACHE if values.device.type == "cpu" else _ON_DEVICE
    space = torch.empty(min(size, values.numel()), dtype=torch.float64, device=values.device)
    return (space[: part.numel()].copy_(part) for part in values.reshape(-1).split(size))


def _squared(values: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    return torch.dot(values, values)


def histogram(values: Float[Tensor, " n"], low: float, high: float, bins: int = BINS) -> Histogram:
    """Sort numbers into equally wide bins; those beyond the ends go into the first and the last bin.

    If both ends are equal, the bins are laid around that number.

    >>> histogram(torch.tensor([0.0, 1.0, 1.0, 4.0]), 0.0, 4.0, bins=4).counts
    (1, 2, 0, 1)
    """
    if low == high:
        half = max(abs(low), 1.0) / 2
        low, high = low - half, high + half
    counts = torch.zeros(bins, dtype=torch.int64, device=values.device)
    for part in _parts(values):
        part.sub_(low).mul_(bins).div_(high - low).clamp_(0, bins - 1)  # this order is exact for whole numbers
        counts += torch.bincount(part.int(), minlength=bins)
    return Histogram(low, high, tuple(counts.tolist()))


def silent_channels(values: Shaped[Tensor, "n *rest"], axis: int) -> tuple[int, ...]:
    """Return the channels that are zero in every cell of every picture.

    >>> silent_channels(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]), axis=1)
    (0,)
    """
    return tuple((values == 0).movedim(axis, 0).flatten(1).all(1).nonzero().flatten().tolist())


def peaks(values: Shaped[Tensor, "n *rest"], axis: int) -> Float[Tensor, "2 c"]:
    """Return each channel's largest value and its root mean square."""
    by_channel = plain(values).movedim(axis, 0).flatten(1)
    return torch.stack([by_channel.amax(1), by_channel.square().mean(1).sqrt()])


def off_channels(dead: tuple[int, ...], before: Float[Tensor, "2 c"]) -> tuple[int, ...]:
    """Return the dead channels that are so far below zero that they are unlikely ever to become active.

    Args:
        dead: channels that are zero after the activation function, one or more.
        before: the ``peaks`` of the activation function's input.
    """
    highest, size = before.tolist()
    alive = sorted(size[channel] for channel in range(len(size)) if channel not in set(dead))
    if len(alive) >= max(_ENOUGH_CHANNELS, len(dead)):
        usual = alive[len(alive) // 2]
    else:  # too few to say what is usual: take the largest of them, or the spread of the dead ones
        usual = max([*alive, pstdev(highest[channel] for channel in dead)])
    return tuple(channel for channel in dead if len(size) > 1 and highest[channel] < -_OFF * usual)


_OFF = 8.0
"""A channel is switched off if it stays below zero by this many times the usual size of the other channels. If values
were normally distributed, that would happen to one channel in 30 million."""

_ENOUGH_CHANNELS = 8
"""From this many channels on, the median of their sizes is taken as the usual size."""


def flat_share(values: Shaped[Tensor, "*shape"], low: float, high: float) -> float:
    """Return the share of values at which a sigmoid or tanh has less than 1 % of its largest slope.

    The slope of a function from ``low`` to ``high`` is proportional to (y - low) * (high - y).

    >>> round(flat_share(torch.tensor([-6.0, -1.0, 0.0, 9.0]).sigmoid(), 0.0, 1.0), 2)
    0.5
    """
    values = plain(values)
    slope = (values - low) * (high - values) * (4 / (high - low) ** 2)  # 1 where it is steepest
    return int((slope < 0.01).sum()) / max(values.numel(), 1)
