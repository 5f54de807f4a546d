"""Measures where the cells of a layer lie in the input.

A shape tells how many cells there are, not where they lie: tokens may be in another order, behind the grid instead of
before it, or no places at all. So the input is exchanged for noise in half of its parts, and then in the other half. Of
an output that is read rightly, the cells over the exchanged parts change more than they do the other time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from camkit.layouts import readings
from camkit.probing import Call
from camkit.values import Layout

_PARTS = {
    1: torch.tensor([1, 1, 1, 0, 0, 1, 0, 0]),
    2: torch.tensor([[0, 1, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]),
}
"""Which parts are exchanged first: half of them, little alike when mirrored, turned, shifted or reordered."""

_CONFIRMED = 0.5
"""Correlation between what cells show and where they are drawn, from which their places count as confirmed. Tokens in
their places have 0.9 and more, convolutions with wide fields 0.6 and more, those in other places 0 on average."""

_ELSEWHERE = 0.3
"""Below this correlation the cells lie elsewhere, if they show places at all."""

_SHOWN = 0.2
"""Spread of what cells show, from none to 1, from which they show places at all. Wide fields of random weights leave
less than half of it, tokens have 0.5 and more."""

_ROUNDING = 64
"""Times the type's precision: smaller changes of an output, relative to its size, may be rounding alone."""

_FEW_CELLS = 9
"""Of fewer cells, a correlation says little: they are only given up where it is negative."""


class _Place(NamedTuple):
    """How well cells lie where they are drawn, and how much they differ in which half of the input they follow."""

    along: float
    spread: float


def place(calls: list[Call], image: Tensor, run: Callable[[Tensor], list[Call]]) -> None:
    """Measure where the cells of all outputs lie; correct or drop the layouts of those that lie elsewhere.

    Not of a model that resizes and pads its input by itself, as detectors do.

    Args:
        calls: of a pass over the image, with layouts.
        image: the input (1, C, *size).
        run: makes another pass over an input of that shape.
    """
    if any(call.padded for call in calls):  # the grids show the model's own padding as well
        return
    size = tuple(image.shape[2:])
    exchanged = _exchanged(size).to(image.device)
    noise = _noise(image)
    known = {(call.name, call.number): call for call in calls if call.layout is not None}
    halves = []
    for part in (exchanged, ~exchanged):
        changes = {}
        for again in run(torch.where(part, noise, image)):
            before = known.get((again.name, again.number))
            if before is not None:
                changes[id(before.output)] = dict(_profiles(before, again, len(size)))
        halves.append(changes)
    for call in known.values():
        first, second = (half.get(id(call.output), {}) for half in halves)
        _judge(call, first, second, exchanged)


def _exchanged(size: tuple[int, ...]) -> Tensor:
    """Return which pixels are exchanged first."""
    parts = _PARTS.get(len(size))
    if parts is None:
        parts = _PARTS[2][..., None] ^ torch.tensor([1, 1, 0, 0])
    return functional.interpolate(parts[None, None].float(), size, mode="nearest-exact")[0, 0] > 0


def _noise(image: Tensor) -> Tensor:
    """Return noise with the image's mean and deviation."""
    drawn = torch.randn(image.shape, generator=torch.Generator().manual_seed(0)).to(image)
    deviation = image.float().std() if image.numel() > 1 else torch.ones(())
    return drawn * (deviation if deviation > 0 else 1) + image.float().mean().to(image)


def _profiles(before: Call, again: Call, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield, for each way to read the output, how much its cells changed."""
    if before.output is None or again.output is None or before.output.shape != again.output.shape:
        return
    change = (again.output.detach() - before.output.detach()).abs().float()
    if change.mean() < _ROUNDING * torch.finfo(before.output.dtype).eps * before.output.detach().float().abs().mean():
        return
    if before.layout is not None and before.layout.kind == "sequence_first":
        yield "sequence_first", change.mean((1, 2))
    elif change.dim() == rank + 2:
        yield "channels_first", change[0].mean(0)
        yield "channels_last", change[0].mean(-1)
    else:
        yield "tokens", change[0].mean(-1)
        yield "tokens_last", change[0].mean(0)


def _judge(call: Call, first: dict[str, Tensor], second: dict[str, Tensor], exchanged: Tensor) -> None:
    if call.output is None or call.layout is None:
        return
    if not first or not second:
        call.unsure = True
        return
    found = {
        layout: _place(layout, first[layout.kind], second[layout.kind], exchanged)
        for layout in (call.layout, *readings(tuple(call.output.shape), tuple(exchanged.shape), call.layout))
    }
    drawn, best = found[call.layout], max(found, key=lambda layout: found[layout].along - _chance(layout))
    along, gain = found[best].along, found[best].along - drawn.along
    if along > _chance(best) and (gain > 0.15 or (along > 0.95 and gain > 0.05)):
        call.layout = best
    elif drawn.spread > _SHOWN and drawn.along < (_ELSEWHERE if first[call.layout.kind].numel() >= _FEW_CELLS else 0):
        call.layout, call.elsewhere = None, True
    elif not drawn.along > _CONFIRMED:  # nor where there is no correlation
        call.unsure = True


def _chance(layout: Layout) -> float:
    """Return the correlation that a wrong reading has in less than one of 10,000 outputs."""
    cells = math.prod(layout.grid)
    return next(needed for least, needed in ((36, 0.7), (16, 0.9), (_FEW_CELLS, 0.97), (0, 1.0)) if cells >= least)


def _place(layout: Layout, first: Tensor, second: Tensor, exchanged: Tensor) -> _Place:
    follows = (first - second) / (first + second).clamp(min=torch.finfo(torch.float32).tiny)
    if layout.kind not in ("channels_first", "channels_last"):
        follows = follows[layout.prefix :][: math.prod(layout.grid)]
    drawn = functional.interpolate(exchanged[None, None].float(), layout.grid, mode="area")[0, 0]
    pair = torch.stack([follows.flatten(), drawn.flatten().to(follows)])
    if not bool((pair.std(1) > 0).all()):
        return _Place(0.0, 0.0)
    return _Place(float(torch.corrcoef(pair)[0, 1]), float(follows.std()))
