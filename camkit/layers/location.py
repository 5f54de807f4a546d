"""Measures where the cells of a layer lie in the input.

A shape tells how many cells there are, not where they lie: tokens may be in another order, behind the grid instead of
before it, or no places at all. So the input is exchanged for noise in half of its parts, and then in the other half. Of
an output that is read rightly, the cells over the exchanged parts change more than they do the other time.

The first convolution, whose cells see few pixels each, shows what a model does to its input before it: padding and
crops are reckoned with, and where the input is moved in another way, that is said. Of a grid that convolutions made,
the cells lie where those of the first one do, however wide their fields are; of tokens, what is measured is all that is
known.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from camkit.engine.grid import margins
from camkit.layers.layouts import readings
from camkit.layers.trace import Call
from camkit.types import Extent, Layout

_PARTS = {
    1: torch.tensor([1, 1, 1, 0, 0, 1, 0, 0]),
    2: torch.tensor([[0, 1, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]),
}
"""Which parts are exchanged first: half of them, little alike when mirrored, turned, shifted or reordered."""

_CONFIRMED = 0.5
"""Correlation between what cells show and where they are drawn, from which their places count as confirmed. Tokens in
their places have 0.9 and more, those in other places 0 on average. Convolutions with wide fields go down to 0.1, but
there the grid itself is certain."""

_SHARP = 0.85
"""Correlation from which another place is believed for cells whose grid is certain."""

_FINE, _SOME_CELLS, _MANY_CELLS = 0.6, 16, 64
"""Spread, and numbers of cells, from which small differences tell places apart."""

_ELSEWHERE = 0.3
"""Below this correlation the cells lie elsewhere, if they show places at all."""

_SHOWN = 0.35
"""Spread of what cells show, from none to 1, from which they show places at all. Wide fields of random weights leave
a quarter of it, tokens have 0.5 and more."""

_ROUNDING = 64
"""Times the type's precision: smaller changes of an output, relative to its size, may be rounding alone."""

_ALIKE = 0.02
"""Of correlations that differ by less, that of the simplest reading is taken."""

_UNCHANGED = 1e-3
"""Share of the largest change that a cell which doesn't see the input may seem to have, by rounding."""

_KEPT = 0.8
"""Correlation of the first convolution's cells below which a model moves its input in a way that isn't known."""

_LEAST_CHANGE = 0.03
"""Change of an output, relative to its size, that no type's rounding reaches."""

_STRIDES = (1, 2, 4, 8, 16, 32)
"""Pixels, along each axis, that a cell of a grid with lost edges may stand for."""

_EXACT = 0.02
"""Share of a grid's size below which edges do not count."""

_MOST_LOST = 4
"""How many times larger or smaller than the input a grid may be by edges that were added or lost."""

_SEED = 5821934
"""Of the noise, so that the same model and picture are always judged alike."""

_FEW_CELLS = 9
"""Of fewer cells, a correlation says little: they are only given up where it is negative."""


class _Place(NamedTuple):
    """How well cells lie where they are drawn, how much they differ in what they follow, and how many changed."""

    along: float
    spread: float
    cells: int


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
    try:
        passes = [run(torch.where(part, noise, image)) for part in (exchanged, ~exchanged)]
    except Exception:  # noqa: BLE001 - whatever a model raises that takes no noise
        passes = []
    halves = [{(call.name, call.number): call for call in again} for again in passes]
    extent, kept = _input_extent(calls, halves, size) if passes else ((), 1.0)
    changes = {id(call.output): _profiles_of(call, halves, len(size)) for call in reversed(calls) if call.layout}
    for call in calls:
        if call.layout is not None and kept < _ELSEWHERE:
            call.layout, call.elsewhere = None, True
        elif call.layout is not None:
            call.layout = replace(call.layout, extent=extent)
            first, second = changes[id(call.output)] or ({}, {})
            _judge(call, first, second, size)
            call.unsure |= kept < _KEPT


def _input_extent(
    calls: list[Call], halves: list[dict[tuple[str, int], Call]], size: tuple[int, ...]
) -> tuple[Extent, float]:
    """Return which part of the grids the input is, where the model pads or crops it, as its first convolution shows it.

    What a convolution adds to its own edges, for its kernel's sake, is not counted; pixels that whole patches leave
    over are. And how well the convolution's cells lie so: low where the model moves its input in another way.
    """
    call = next((call for call in calls if isinstance(call.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    if call is None or call.output is None or call.output.dim() != len(size) + 2 or not call.arguments:
        return (), 1.0
    assert isinstance(call.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    profiles = _profiles_of(call, halves, len(size))
    if profiles is None:
        return (), 1.0
    first, second = (profile["channels_first"] for profile in profiles)
    grid, sides, wholes = tuple(first.shape), size, tuple(call.arguments[0].shape[2:])
    patches = call.module.kernel_size == call.module.stride and not any(_edges(call.module))
    covered = [cells * stride for cells, stride in zip(grid, call.module.stride, strict=True)]
    plain = tuple(
        (0.0, side / reach if patches and side == whole else 1.0)
        for side, whole, reach in zip(sides, wholes, covered, strict=True)
    )
    shares = [
        side / whole if whole < side or whole - side >= kernel else 1.0
        for side, whole, kernel in zip(sides, wholes, call.module.kernel_size, strict=True)
    ]
    parts = list(map(_parts, shares, _changed_part(first + second)))
    alike = itertools.islice(zip(*parts, strict=False), 1, None)  # the same along all axes
    options = [plain, *alike, *itertools.product(*parts)]
    whole_grid = Layout("channels_first", grid)
    readings_of = [replace(whole_grid, extent=one) for one in options]
    measured = _places(readings_of, *profiles, size)
    places = [measured[reading] for reading in readings_of]
    along = [one.along if one.cells >= min(_SOME_CELLS, math.prod(grid) / 2) else -1.0 for one in places]
    best = next(number for number, found in enumerate(along) if found >= max(along) - _ALIKE)
    found = options[best] if along[best] > _CONFIRMED else plain
    kept = along[best] if math.prod(grid) >= _SOME_CELLS else 1.0
    return (found if any(part != (0.0, 1.0) for part in found) else ()), kept


def _edges(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...]:
    """Return how much a convolution adds to its input's edges."""
    return (1,) if isinstance(module.padding, str) else module.padding


def _parts(share: float, seen: tuple[float, float]) -> list[tuple[float, float]]:
    """List which parts of an axis the input may be: all, the start, the middle, the end, or where cells changed.

    Cells beside the input change as well, as far as a kernel reaches; so its width is taken where it is known. Of an
    input that is cropped, the grid is a part.
    """
    middle = sum(seen) / 2
    changed = (middle - share / 2, middle + share / 2)
    if share == 1:
        return list(dict.fromkeys([(0.0, 1.0), seen]))
    return [(0.0, 1.0), (0.0, share), (0.5 - share / 2, 0.5 + share / 2), (1.0 - share, 1.0), changed]


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
    """Return noise within the image's range: about its mean, as far as two deviations."""
    values = image.float()
    mean, deviation = values.mean(), values.std(correction=0)
    low, high = torch.maximum(values.min(), mean - 2 * deviation), torch.minimum(values.max(), mean + 2 * deviation)
    if not high > low:  # of one value
        low, high = (low.clamp(max=0), high.clamp(min=0)) if low != 0 else (low, low + 1)
    drawn = torch.rand(image.shape, generator=torch.Generator().manual_seed(_SEED)).to(image.device)
    return (low + drawn * (high - low)).to(image)


def _profiles_of(
    call: Call, halves: list[dict[tuple[str, int], Call]], rank: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
    """Return, for either half and each way to read the output, how much its cells changed; None if not measurably."""
    found = [dict(_profiles(call, half.get((call.name, call.number)), rank)) for half in halves]
    return (found[0], found[1]) if len(found) == 2 and all(found) else None


def _profiles(before: Call, again: Call | None, rank: int) -> Iterator[tuple[str, Tensor]]:
    if again is None or before.output is None or again.output is None or before.output.shape != again.output.shape:
        return
    change = (again.output.detach() - before.output.detach()).abs().float()
    rounding = min(_ROUNDING * torch.finfo(before.output.dtype).eps, _LEAST_CHANGE)
    if not change.mean() > rounding * before.output.detach().float().abs().mean():  # nor where it is not finite
        return
    if len(change) != 1:
        yield "sequence_first", change.flatten(1).mean(1)
    elif change.dim() == rank + 2:
        yield "channels_first", change[0].mean(0)
        yield "channels_last", change[0].mean(-1)
    if len(change) == 1 and change.dim() == 3:
        yield "tokens", change[0].mean(-1)
        yield "tokens_last", change[0].mean(0)


def _judge(call: Call, first: dict[str, Tensor], second: dict[str, Tensor], size: tuple[int, ...]) -> None:
    if call.output is None or call.layout is None:
        return
    if call.layout.kind not in first:
        call.unsure = True
        if call.tentative:
            call.layout = None
        return
    drawn = _places([call.layout], first, second, size)[call.layout]
    # Wide fields leave places alike, and those of random weights are like some other by chance.
    fine = drawn.spread > _FINE and drawn.cells >= _MANY_CELLS
    found = {call.layout: drawn}
    if not call.certain or (fine and not _is_whole(call.layout, size)):
        found |= _places(_others(call, call.layout, size), first, second, size)
    best = max(found, key=lambda layout: found[layout].along - _chance(found[layout].cells))
    along, gain = found[best].along, found[best].along - drawn.along
    if call.certain:
        better = along > _SHARP and gain > 0.05
    else:
        better = along > _chance(found[best].cells) and (gain > 0.15 or (along > 0.95 and gain > 0.05))
    if better:
        call.layout = best
    elif call.tentative and not (drawn.along > _CONFIRMED or call.certain):
        call.layout = None
    elif (
        drawn.spread > (_FINE if call.certain else _SHOWN)
        and drawn.cells
        and drawn.along < (_ELSEWHERE if drawn.cells >= _FEW_CELLS else 0)
    ):
        call.layout, call.elsewhere = None, True
    elif call.certain:
        call.unsure = drawn.along < 0
    else:  # nor is it sure where there is no correlation
        few = drawn.cells < _FEW_CELLS
        call.unsure = not drawn.along > (_chance(drawn.cells) if call.tentative or few else _CONFIRMED)


def _others(call: Call, layout: Layout, size: tuple[int, ...]) -> list[Layout]:
    """List other ways to read an output than the one that is supposed."""
    assert call.output is not None
    others = readings(tuple(call.output.shape), size, layout)
    if layout.extent:  # the padding may have been cropped off again
        others = [*others, *(replace(other, extent=()) for other in (layout, *others))]
    if call.certain:
        others += [replace(layout, extent=one) for one in _extents(layout.grid, size)]
    return others


def _is_whole(layout: Layout, size: tuple[int, ...]) -> bool:
    """Tell whether a grid has as many cells as the input, padded as it may be, at a usual stride: no edge is lost."""
    extent = layout.extent or ((0.0, 1.0),) * len(size)
    shares = [side / (end - start) / cells for side, (start, end), cells in zip(size, extent, layout.grid, strict=True)]
    return any(all(abs(share / stride - 1) <= _EXACT for share in shares) for stride in _STRIDES)


def _extents(grid: tuple[int, ...], size: tuple[int, ...]) -> list[Extent]:
    """List which parts of a grid the input may be where edges were added or lost on the way to it.

    One that begins where the input does, or has its middle, and has cells of a whole number of pixels as usual.
    """
    options: list[Extent] = []
    for stride in _STRIDES:
        shares = [side / (cells * stride) for side, cells in zip(size, grid, strict=True)]
        if (
            max(shares) < _MOST_LOST
            and min(shares) > 1 / _MOST_LOST
            and any(abs(share - 1) > _EXACT for share in shares)
        ):
            options.append(tuple((0.0, share) for share in shares))
            options.append(tuple((0.5 - share / 2, 0.5 + share / 2) for share in shares))
    return options


def _chance(cells: int) -> float:
    """Return the correlation that a wrong reading has in less than one of 10,000 outputs of so many cells."""
    return next(needed for least, needed in ((36, 0.7), (16, 0.9), (_FEW_CELLS, 0.97), (0, 1.0)) if cells >= least)


def _places(
    layouts: Sequence[Layout], first: dict[str, Tensor], second: dict[str, Tensor], size: tuple[int, ...]
) -> dict[Layout, _Place]:
    """Return how well an output's cells lie in their places by each of several layouts."""
    alike: dict[Layout, list[Layout]] = {}
    for layout in layouts:
        alike.setdefault(replace(layout, prefix=0), []).append(layout)
    found: dict[Layout, _Place] = {}
    for layout, group in alike.items():
        total = first[layout.kind] + second[layout.kind]
        follows = (first[layout.kind] - second[layout.kind]) / total.clamp(min=torch.finfo(torch.float32).tiny)
        cells = math.prod(layout.grid)
        starts = torch.tensor([one.prefix for one in group], device=total.device)
        at = starts[:, None] + torch.arange(cells, device=total.device)
        drawn, covered = (maps.flatten().to(total) for maps in _drawn(layout.grid, layout.extent, size))
        measured = _correlated(follows.flatten()[at], total.flatten()[at], drawn, covered > 0.5)
        found.update(zip(group, measured, strict=True))
    return {layout: found[layout] for layout in layouts}


def _correlated(
    follows: Float[Tensor, "ways cells"],
    total: Float[Tensor, "ways cells"],
    drawn: Float[Tensor, " cells"],
    covered: Bool[Tensor, " cells"],
) -> list[_Place]:
    # Cells that never change, such as those of features that are nowhere in the picture, tell nothing.
    counted = covered & (total > _UNCHANGED * total.amax(1, keepdim=True))
    number = counted.sum(1, keepdim=True)
    parts = [
        torch.where(counted, values - (values * counted).sum(1, keepdim=True) / number.clamp(min=1), 0).double()
        for values in (follows, drawn.expand_as(follows))
    ]
    squares = [part.square().sum(1) for part in parts]
    scale = (squares[0] * squares[1]).sqrt()
    along = torch.where(scale > 0, (parts[0] * parts[1]).sum(1) / scale.clamp(min=1e-30), 0)
    spread = (squares[0] / (number[:, 0] - 1).clamp(min=1)).sqrt()
    columns = along.tolist(), spread.tolist(), number[:, 0].tolist()
    return [_Place(*row) for row in zip(*columns, strict=True)]


@functools.lru_cache(maxsize=64)
def _drawn(grid: tuple[int, ...], extent: Extent, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return how much of what each cell of a grid lies on was exchanged first, and how much of it is the input."""
    exchanged = _exchanged(size)
    maps = torch.stack([exchanged.float(), torch.ones_like(exchanged, dtype=torch.float32)])
    if extent:
        maps = functional.pad(maps, margins(size, extent))
    exchanged_share, covered = functional.interpolate(maps[None], grid, mode="area")[0]
    return exchanged_share, covered
