"""The third stage: where in the picture the cells of each output lie.

A shape tells how many cells there are, not where they lie: tokens may be in another order, behind the grid instead of
before it, or in no place at all. So one half of the input is exchanged for noise, and then the other half. If an output
is read rightly, the cells over the exchanged parts change more than they do the other time.

The first convolution, whose cells see few pixels each, shows what a model does to its input before it: padding and
crops are found, and if the input is moved in another way, that is reported. The cells of a grid that convolutions made
lie where those of the first convolution do, however wide their fields are. For tokens, the measurement is all there is.

Nothing is measured where every operation so far leaves cells in their places, as in a network of convolutions,
normalisations and poolings.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from camkit.engine.grid import margins
from camkit.layers.layouts import EXACT, STRIDES, Reading, Readings, is_whole, plain_layout
from camkit.layers.layouts import readings as other_readings
from camkit.layers.trace import Call, Changes, Key, Profiles, Trace
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

_LEAST_GAIN, _CLEAR_GAIN, _NEARLY_PERFECT = 0.05, 0.15, 0.95
"""How much better another place must correlate to be believed: a clear gain, or a small one if it is nearly perfect.
Measurements of the same cells differ by less than 0.05."""

_ELSEWHERE = 0.3
"""Below this correlation the cells lie elsewhere, if they show places at all."""

_SHOWN = 0.35
"""Spread of what cells show, from none to 1, from which they show places at all. Wide fields of random weights leave
a quarter of it, tokens have 0.5 and more."""

_ALIKE = 0.02
"""Of correlations that differ by less, that of the simplest reading is taken."""

_UNCHANGED = 1e-3
"""Share of the largest change that a cell which doesn't see the input may seem to have, by rounding."""

_KEPT = 0.8
"""Correlation of the first convolution's cells below which a model moves its input in a way that isn't known."""

_MOST_LOST = 4
"""How many times larger or smaller than the input a grid may be by edges that were added or lost."""

_SEED = 5821934
"""Of the noise, so that the same model and picture are always judged alike."""

_FEW_CELLS = 9
"""Of fewer cells, a correlation says little: they are only given up where it is negative."""


class _Match(NamedTuple):
    """How well cells follow what was exchanged where they are drawn.

    Attributes:
        along: correlation between what cells show and what was exchanged at their places.
        spread: how much cells differ in what they show.
        cells: how many cells changed at all.
    """

    along: float
    spread: float
    cells: int


def locate(trace: Trace, readings: Readings, changes: Changes) -> Readings:
    """Correct or drop the layouts of outputs whose cells lie elsewhere than their shape says.

    Nothing is measured for a model that resizes and pads its input itself, as detectors do: its grids show its own
    padding as well.

    Args:
        trace: of the pass.
        readings: one for each call.
        changes: measures how outputs change; called at most once.
    """
    if any(call.padded for call in trace.calls):
        return readings
    unknown = [
        call
        for call, reading in zip(trace.calls, readings, strict=True)
        if reading.layout and not _is_known(call, reading, trace)
    ]
    if not unknown:
        return readings
    by_output: dict[int | None, Call] = {}
    for call in unknown:  # the same tensor may leave several modules
        by_output.setdefault(call.output, call)
    first = next((call for call in trace.calls if call.convolution is not None), None)
    measured = changes([call.key for call in (*by_output.values(), *([first] if first is not None else []))])
    extent, kept = _input_extent(first, measured, trace.size) if measured is not None else ((), 1.0)
    located: list[Reading] = []
    for call, reading in zip(trace.calls, readings, strict=True):
        if reading.layout is None or _is_known(call, reading, trace):
            located.append(reading)
        elif kept < _ELSEWHERE:
            located.append(replace(reading, layout=None, elsewhere=True))
        else:
            profiles = (measured or {}).get(by_output[call.output].key, ({}, {}))
            on_extent = replace(reading, layout=replace(reading.layout, extent=extent))
            judged = _judged(call.shape, on_extent, profiles, trace.size)
            located.append(replace(judged, unsure=judged.unsure or kept < _KEPT))
    return tuple(located)


def _is_known(call: Call, reading: Reading, trace: Trace) -> bool:
    """Tell whether the operations before an output leave no doubt where its cells lie."""
    return call.kept and reading.layout is not None and reading.layout == plain_layout(call.shape, 1, trace.size)


def _input_extent(
    call: Call | None, changes: Mapping[Key, tuple[Profiles, Profiles]], size: tuple[int, ...]
) -> tuple[Extent, float]:
    """Return which part of the grids the input is if the model pads or crops it, as its first convolution shows it.

    The edges that a convolution adds to fit its kernel are not counted; pixels that whole patches leave over are. Also
    returns how well the convolution's cells lie so: low if the model moves its input in another way.
    """
    if call is None or call.convolution is None or call.key not in changes or len(call.shape) != len(size) + 2:
        return (), 1.0
    geometry = call.convolution
    first, second = (profile["channels_first"] for profile in changes[call.key])
    grid, wholes = tuple(first.shape), geometry.size
    patches = geometry.kernel == geometry.stride and not geometry.padded
    covered = [cells * stride for cells, stride in zip(grid, geometry.stride, strict=True)]
    plain = tuple(
        (0.0, side / reach if patches and side == whole else 1.0)
        for side, whole, reach in zip(size, wholes, covered, strict=True)
    )
    shares = [
        side / whole if whole < side or whole - side >= kernel else 1.0
        for side, whole, kernel in zip(size, wholes, geometry.kernel, strict=True)
    ]
    parts = list(map(_parts, shares, _changed_part(first + second)))
    alike = itertools.islice(zip(*parts, strict=False), 1, None)  # the same along all axes
    extents = [plain, *alike, *itertools.product(*parts)]
    layouts = [Layout("channels_first", grid, extent=extent) for extent in extents]
    matches = _matches(layouts, first, second, size)
    fewest = min(_SOME_CELLS, math.prod(grid) / 2)
    along = [matches[layout].along if matches[layout].cells >= fewest else -1.0 for layout in layouts]
    best = next(number for number, value in enumerate(along) if value >= max(along) - _ALIKE)
    extent = extents[best] if along[best] > _CONFIRMED else plain
    kept = along[best] if math.prod(grid) >= _SOME_CELLS else 1.0
    return (extent if any(part != (0.0, 1.0) for part in extent) else ()), kept


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


def exchange(image: Float[Tensor, "1 c *size"]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the two halves of an image to exchange one after the other, and the noise to exchange them for."""
    part = _exchanged(tuple(image.shape[2:])).to(image.device)
    return (part, ~part), _noise(image)


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


def _judged(
    shape: tuple[int, ...], reading: Reading, profiles: tuple[Profiles, Profiles], size: tuple[int, ...]
) -> Reading:
    """Return a reading corrected by how the output's cells changed."""
    layout = reading.layout
    assert layout is not None
    first, second = profiles
    if layout.kind not in first:
        return replace(reading, layout=None if reading.tentative else layout, unsure=True)
    drawn = _all_matches([layout], first, second, size)[layout]
    # Cells with wide fields show little, and those of random weights are like some other place by chance.
    fine = drawn.spread > _FINE and drawn.cells >= _MANY_CELLS
    matches = {layout: drawn}
    if not reading.certain or (fine and not is_whole(layout, size)):
        matches |= _all_matches(_others(shape, reading, size), first, second, size)
    best = max(matches, key=lambda option: matches[option].along - _chance(matches[option].cells))
    if _is_better(reading, matches[best], drawn):
        return replace(reading, layout=best)
    if reading.tentative and not (drawn.along > _CONFIRMED or reading.certain):
        return replace(reading, layout=None)
    lies_elsewhere = drawn.along < (_ELSEWHERE if drawn.cells >= _FEW_CELLS else 0)
    if drawn.spread > (_FINE if reading.certain else _SHOWN) and drawn.cells and lies_elsewhere:
        return replace(reading, layout=None, elsewhere=True)
    if reading.certain:
        return replace(reading, unsure=drawn.along < 0)
    few = drawn.cells < _FEW_CELLS
    needed = _chance(drawn.cells) if reading.tentative or few else _CONFIRMED
    return replace(reading, unsure=not drawn.along > needed)  # also if there is no correlation


def _is_better(reading: Reading, best: _Match, drawn: _Match) -> bool:
    """Tell whether another place is believed rather than the one the shape says."""
    gain = best.along - drawn.along
    if reading.certain:
        return best.along > _SHARP and gain > _LEAST_GAIN
    clear = gain > _CLEAR_GAIN or (best.along > _NEARLY_PERFECT and gain > _LEAST_GAIN)
    return best.along > _chance(best.cells) and clear


def _others(shape: tuple[int, ...], reading: Reading, size: tuple[int, ...]) -> list[Layout]:
    """List other ways to read an output than the one its shape suggests."""
    layout = reading.layout
    assert layout is not None
    others = other_readings(shape, size, layout)
    if layout.extent:  # the padding may have been cropped off again
        others = [*others, *(replace(other, extent=()) for other in (layout, *others))]
    if reading.certain:
        others += [replace(layout, extent=extent) for extent in _extents(layout.grid, size)]
    return others


def _extents(grid: tuple[int, ...], size: tuple[int, ...]) -> list[Extent]:
    """List which parts of a grid the input may be where edges were added or lost on the way to it.

    One that begins where the input does, or has its middle, and has cells of a whole number of pixels as usual.
    """
    options: list[Extent] = []
    for stride in STRIDES:
        shares = [side / (cells * stride) for side, cells in zip(size, grid, strict=True)]
        if (
            max(shares) < _MOST_LOST
            and min(shares) > 1 / _MOST_LOST
            and any(abs(share - 1) > EXACT for share in shares)
        ):
            options.append(tuple((0.0, share) for share in shares))
            options.append(tuple((0.5 - share / 2, 0.5 + share / 2) for share in shares))
    return options


def _chance(cells: int) -> float:
    """Return the correlation that a wrong reading has in less than one of 10,000 outputs of so many cells."""
    return next(needed for least, needed in ((36, 0.7), (16, 0.9), (_FEW_CELLS, 0.97), (0, 1.0)) if cells >= least)


def _all_matches(
    layouts: Sequence[Layout], first: Profiles, second: Profiles, size: tuple[int, ...]
) -> dict[Layout, _Match]:
    """Return how well an output's cells lie in their places by each of several layouts."""
    kinds = dict.fromkeys(layout.kind for layout in layouts)
    matches: dict[Layout, _Match] = {}
    for kind in kinds:
        matches |= _matches([layout for layout in layouts if layout.kind == kind], first[kind], second[kind], size)
    return {layout: matches[layout] for layout in layouts}


def _matches(layouts: Sequence[Layout], first: Tensor, second: Tensor, size: tuple[int, ...]) -> dict[Layout, _Match]:
    """Return the same for layouts of one kind."""
    alike: dict[Layout, list[Layout]] = {}
    for layout in layouts:
        alike.setdefault(replace(layout, prefix=0), []).append(layout)
    total = first + second
    follows = (first - second) / total.clamp(min=torch.finfo(torch.float32).tiny)
    matches: dict[Layout, _Match] = {}
    for layout, group in alike.items():
        starts = torch.tensor([option.prefix for option in group], device=total.device)
        at = starts[:, None] + torch.arange(math.prod(layout.grid), device=total.device)
        drawn, covered = (maps.flatten().to(total) for maps in _drawn(layout.grid, layout.extent, size))
        measured = _correlated(follows.flatten()[at], total.flatten()[at], drawn, covered > 0.5)
        matches.update(zip(group, measured, strict=True))
    return matches


def _correlated(
    follows: Float[Tensor, "ways cells"],
    total: Float[Tensor, "ways cells"],
    drawn: Float[Tensor, " cells"],
    covered: Bool[Tensor, " cells"],
) -> list[_Match]:
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
    return [_Match(*row) for row in zip(*columns, strict=True)]


@functools.lru_cache(maxsize=64)
def _drawn(grid: tuple[int, ...], extent: Extent, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return how much of what each cell of a grid lies on was exchanged first, and how much of it is the input."""
    exchanged = _exchanged(size)
    maps = torch.stack([exchanged.float(), torch.ones_like(exchanged, dtype=torch.float32)])
    if extent:
        maps = functional.pad(maps, margins(size, extent))
    exchanged_share, covered = functional.interpolate(maps[None], grid, mode="area")[0]
    return exchanged_share, covered
