"""Statistics of a tensor: pure functions, each small enough to be compared with its plain definition."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from statistics import pstdev

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from camkit.diagnosis.values import Histogram, TensorStatistics

BINS = 40
"""Of a histogram of values."""

DECADES = (-40, 20)
"""The decimal logarithms between which magnitudes of gradients are sorted."""

PER_DECADE = 4

_IN_CACHE, _ON_DEVICE = 1 << 17, 1 << 22
"""Numbers that are reckoned with at once: on a CPU few enough for its cache, which makes it several times as fast."""

_SMALL = 1e-280
"""What is smaller may have lost digits, as it is near the least that 64 bits hold; its inverse is near the most."""


def plain(values: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return numbers in a form that can be reckoned with: real, of 32 or 64 bits, where 64 bits can be summed."""
    values = values.detach()
    values = values.to_dense() if values.layout != torch.strided else values
    values = values.abs() if values.is_complex() else values
    values = values.cpu() if values.device.type == "mps" else values
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def statistics(values: Shaped[Tensor, "*shape"], *, magnitudes: bool = False) -> TensorStatistics:
    """Return the statistics of a tensor's numbers, summed in 64 bits.

    Args:
        values: floating-point or complex numbers; of complex ones the absolute values are meant.
        magnitudes: whether to sort their logarithms too.

    >>> found = statistics(torch.tensor([0.0, 0.0, 3.0, 5.0]))
    >>> found.mean, found.low, found.high, found.zeros, found.histogram.counts[0]
    (2.0, 0.0, 5.0, 0.5, 2)
    """
    flat = plain(values).reshape(-1)
    count, nan, inf = flat.numel(), 0, 0
    total = _added(flat, torch.sum)
    if not math.isfinite(total):
        nan, inf = int(flat.isnan().sum()), int(flat.isinf().sum())
        flat = flat[flat.isfinite()]
        total = _added(flat, torch.sum)
    sorted_logs = magnitude_histogram(flat) if magnitudes else None
    held = flat.numel()
    if not held:
        nothing = Histogram(0.0, 0.0, (0,) * BINS)
        six = (math.nan, math.nan, math.nan, math.nan, math.nan, math.nan)
        return TensorStatistics(count, nan, inf, *six, nothing, sorted_logs)
    low, high = (float(end) for end in flat.aminmax())
    return TensorStatistics(
        count,
        nan,
        inf,
        mean=total / held,
        std=norm(flat, total / held) / math.sqrt(held),
        low=low,
        high=high,
        zeros=(held - _added(flat, lambda part: _squared(part.sign_()))) / held,
        norm=norm(flat),
        histogram=histogram(flat, low, high),
        magnitudes=sorted_logs,
    )


def norm(values: Float[Tensor, "*shape"], centre: float = 0.0) -> float:
    """Return the Euclidean norm of the differences from a number.

    Also where their squares are beyond 64 bits, or vanish in them.

    >>> norm(torch.tensor([1e200, 0.0], dtype=torch.float64))
    1e+200
    """
    square = _added(values, lambda part: _squared(part.sub_(centre)))
    if not _SMALL < square < math.inf and values.numel():
        unit = float((values.double() - centre).abs().amax())
        if 0 < unit < math.inf:
            return unit * math.sqrt(_added(values, lambda part: _squared(part.sub_(centre).div_(unit))))
    return math.sqrt(square)


def _added(values: Float[Tensor, "*shape"], of: Callable[[Tensor], Tensor]) -> float:
    """Add up what a function makes of parts of the values, in 64 bits."""
    return float(torch.stack([of(part) for part in _parts(values)]).sum())


def _parts(values: Float[Tensor, "*shape"]) -> Iterator[Float[Tensor, " n"]]:
    """Return the values part by part, each as numbers of 64 bits in the same memory: to be used up one by one."""
    size = _IN_CACHE if values.device.type == "cpu" else _ON_DEVICE
    space = torch.empty(min(size, values.numel()), dtype=torch.float64, device=values.device)
    return (space[: part.numel()].copy_(part) for part in values.reshape(-1).split(size))


def _squared(values: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    return torch.dot(values, values)


def histogram(values: Float[Tensor, " n"], low: float, high: float, bins: int = BINS) -> Histogram:
    """Sort numbers into equally wide bins; those beyond the ends go into the first and the last.

    Where both ends are one number, the bins are laid around it.

    >>> histogram(torch.tensor([0.0, 1.0, 1.0, 4.0]), 0.0, 4.0, bins=4).counts
    (1, 2, 0, 1)
    """
    if low == high:
        half = max(abs(low), 1.0) / 2
        low, high = max(low - half, -sys.float_info.max), min(high + half, sys.float_info.max)
    counts = torch.zeros(bins, dtype=torch.int64, device=values.device)
    unit = 1.0 if _SMALL < high - low < 1 / _SMALL else max(abs(low), abs(high))
    start, width = low / unit, high / unit - low / unit
    for part in _parts(values):
        places = part if unit == 1 else part.div_(unit)
        places.sub_(start).mul_(bins).div_(width).clamp_(0, bins - 1)  # in this order exact for whole numbers
        counts += torch.bincount(places.int(), minlength=bins)
    return Histogram(low, high, tuple(counts.tolist()))


def magnitude_histogram(values: Float[Tensor, " n"]) -> Histogram:
    """Sort the decimal logarithms of the absolute values of numbers that aren't zero."""
    low, high = DECADES
    bins = (high - low) * PER_DECADE
    return histogram(values[values != 0].abs().double().log10(), float(low), float(high), bins)


def silent_channels(values: Shaped[Tensor, "n *rest"], axis: int) -> tuple[int, ...]:
    """Return which channels are zero in every place of every picture.

    >>> silent_channels(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]), axis=1)
    (0,)
    """
    return tuple((~_anywhere(values != 0, axis)).nonzero().flatten().tolist())


def _anywhere(flags: Bool[Tensor, "*shape"], axis: int) -> Bool[Tensor, " c"]:
    return flags.movedim(axis, 0).flatten(1).any(1)


def peaks(values: Shaped[Tensor, "n *rest"], axis: int) -> Float[Tensor, "2 c"]:
    """Return each channel's largest value, and the root of its mean square."""
    by_channel = plain(values).movedim(axis, 0).flatten(1)
    return torch.stack([by_channel.amax(1), by_channel.square().mean(1).sqrt()])


def off_channels(dead: tuple[int, ...], before: Float[Tensor, "2 c"], margin: float) -> tuple[int, ...]:
    """Return which of the dead channels are far from ever being anything else.

    Args:
        dead: channels that are zero after the activation function.
        before: the ``peaks`` of what the function was given.
        margin: how many times as far below zero as the other channels' values are large a channel must stay.
    """
    highest, size = before.tolist()
    alive = sorted(size[channel] for channel in range(len(size)) if channel not in set(dead))
    if len(alive) >= max(_MANY, len(dead)):
        usual = alive[len(alive) // 2]
    else:  # too few to tell what is usual: the largest of them, or how much the dead ones differ, tells what may be
        usual = max([*alive, pstdev(highest[channel] for channel in dead)] if dead else [0.0])
    return tuple(channel for channel in dead if len(size) > 1 and highest[channel] < -margin * usual)


_MANY = 8
"""Channels of whose sizes the middle one is taken for the usual."""


def flat_share(values: Shaped[Tensor, "*shape"], low: float, high: float) -> float:
    """Return the share of values that lie nearer than 1 % of the slope to an end of a sigmoid or tanh.

    The slope of a function from ``low`` to ``high`` is proportional to (y - low) * (high - y).

    >>> round(flat_share(torch.tensor([-6.0, -1.0, 0.0, 9.0]).sigmoid(), 0.0, 1.0), 2)
    0.5
    """
    values = plain(values)
    slope = (values - low) * (high - values) * (4 / (high - low) ** 2)  # 1 where it is steepest
    return int((slope < _FLAT).sum()) / max(values.numel(), 1)


_FLAT = 0.01
"""Of the largest slope: where a function is flatter, less than 1 % of the gradient comes through."""
