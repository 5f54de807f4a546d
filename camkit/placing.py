"""Measures where the cells of a layer lie in the input.

A shape tells how many cells there are, not where they lie: tokens may be in another order, behind the grid instead of
before it, or no places at all. So the input is exchanged for noise in half of its parts, and then in the other half. Of
an output that is read rightly, the cells over the exchanged parts change more than they do the other time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from camkit.layouts import readings
from camkit.probing import Call
from camkit.values import Extent, Layout

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

_ALIKE = 0.02
"""Of correlations that differ by less, that of the simplest reading is taken."""

_UNCHANGED = 1e-3
"""Share of the largest change that a cell which doesn't see the input may seem to have, by rounding."""

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
    passes = [run(torch.where(part, noise, image)) for part in (exchanged, ~exchanged)]
    halves = [{(call.name, call.number): call for call in again} for again in passes]
    extent = _input_extent(calls, halves, exchanged)
    known = {id(call.output): call for call in reversed(calls) if call.layout is not None}
    for call in calls:
        if call.layout is not None:
            call.layout = replace(call.layout, extent=extent)
            first, second = (
                dict(_profiles(source, half.get((source.name, source.number)), len(size)))
                for half, source in ((half, known[id(call.output)]) for half in halves)
            )
            _judge(call, first, second, exchanged)


def _input_extent(calls: list[Call], halves: list[dict[tuple[str, int], Call]], exchanged: Tensor) -> Extent:
    """Return which part of the grids the input is, where the model pads it: as its first convolution shows it.

    What a convolution adds to its own edges, for its kernel's sake, is not counted.
    """
    call = next((call for call in calls if isinstance(call.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    if call is None or call.output is None or call.output.dim() != exchanged.dim() + 2 or not call.arguments:
        return ()
    assert isinstance(call.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    profiles = [dict(_profiles(call, half.get((call.name, call.number)), exchanged.dim())) for half in halves]
    if not all(profiles):
        return ()
    first, second = (profile["channels_first"] for profile in profiles)
    sides = zip(exchanged.shape, call.arguments[0].shape[2:], call.module.kernel_size, strict=True)
    shares = [side / whole if whole - side >= kernel else 1.0 for side, whole, kernel in sides]
    seen = _changed_part(first + second)
    options = list(itertools.product(*map(_parts, shares, seen)))
    if len(options) == 1:
        return ()
    whole = Layout("channels_first", tuple(first.shape))
    along = [_place(replace(whole, extent=one), first, second, exchanged).along for one in options]
    best = next(number for number, found in enumerate(along) if found >= max(along) - _ALIKE)
    return options[best] if best and along[best] > _CONFIRMED else ()


def _parts(share: float, seen: tuple[float, float]) -> list[tuple[float, float]]:
    """List which parts of an axis the input may be: all, the start, the middle, the end, or where cells changed.

    Cells beside the input change as well, as far as a kernel reaches; so its width is taken where it is known.
    """
    middle = sum(seen) / 2
    changed = seen if share == 1 else (middle - share / 2, middle + share / 2)
    return list(
        dict.fromkeys([(0.0, 1.0), (0.0, share), (0.5 - share / 2, 0.5 + share / 2), (1.0 - share, 1.0), changed])
    )


def _changed_part(changes: Tensor) -> Extent:
    """Return from where to where a grid's cells changed at all."""
    changed = torch.nonzero(changes > _UNCHANGED * changes.amax())
    first, last = changed.amin(0).tolist(), changed.amax(0).tolist()
    return tuple((one / side, (other + 1) / side) for one, other, side in zip(first, last, changes.shape, strict=True))


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


def _profiles(before: Call, again: Call | None, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield, for each way to read the output, how much its cells changed."""
    if again is None or before.output is None or again.output is None or before.output.shape != again.output.shape:
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
    others = readings(tuple(call.output.shape), tuple(exchanged.shape), call.layout)
    if call.layout.extent:  # the padding may have been cropped off again
        others = [*others, *(replace(layout, extent=()) for layout in (call.layout, *others))]
    found = {
        layout: _place(layout, first[layout.kind], second[layout.kind], exchanged) for layout in (call.layout, *others)
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
    drawn, covered = _drawn(layout, exchanged)
    inside = covered.flatten() > 0.5
    pair = torch.stack([follows.flatten(), drawn.flatten().to(follows)])[:, inside.to(follows.device)]
    if not bool((pair.std(1) > 0).all()):
        return _Place(0.0, 0.0)
    return _Place(float(torch.corrcoef(pair)[0, 1]), float(pair[0].std()))


def _drawn(layout: Layout, exchanged: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much of what each cell of a grid lies on was exchanged first, and how much of it is the input."""
    maps = torch.stack([exchanged.float(), torch.ones_like(exchanged, dtype=torch.float32)])
    if layout.extent:
        before = [
            round(side / (end - start) * start)
            for side, (start, end) in zip(maps.shape[1:], layout.extent, strict=True)
        ]
        whole = [round(side / (end - start)) for side, (start, end) in zip(maps.shape[1:], layout.extent, strict=True)]
        sides = [(at, all_ - at - side) for at, all_, side in zip(before, whole, maps.shape[1:], strict=True)]
        maps = functional.pad(maps, [amount for pair in reversed(sides) for amount in pair])
    exchanged_share, covered = functional.interpolate(maps[None], layout.grid, mode="area")[0]
    return exchanged_share, covered
