"""The third stage: where in the picture the cells of each output lie.

A shape tells how many cells there are, not where they lie: tokens may be in another order, extra tokens may follow the
grid instead of preceding it, and some tokens have no position at all. So this stage replaces one half of the input with
noise, and then the other half. If the layout is right, each cell changes more when the half under it is replaced.

Each cell of the first convolution sees few pixels, so that convolution shows what the model did to its input before:
the stage finds padding and crops, and reports an input that was moved in another way. The cells of later convolutions
lie where those of the first one do, however wide their receptive fields are. For tokens, only the measurement tells.

The stage measures nothing if every operation before an output leaves cells in their places, as in a network of
convolutions, normalisations and poolings.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from camkit.engine.grid import margins
from camkit.layers.layouts import EXACT, STRIDES, Reading, Readings, is_whole, plain_layout
from camkit.layers.layouts import readings as other_readings
from camkit.layers.trace import Call, Changes, Followed, Key, Places, Profiles, Trace
from camkit.types import CellPositions, Extent, Layout

_PARTS = {
    1: torch.tensor([1, 1, 1, 0, 0, 1, 0, 0]),
    2: torch.tensor([[0, 1, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]),
}
"""The parts of the input that are replaced first, on a coarse grid: half of the area, in a pattern that resembles
itself little when it is mirrored, rotated, shifted or reordered."""

_CONFIRMED = 0.5
"""The correlation between cells' changes and the replaced pixels that confirms a layout: tokens in their places reach
0.9 and more, others 0 on average. Convolutions with wide receptive fields go down to 0.1, but their grid is certain."""

_SHARP = 0.85
"""The correlation that another position needs if the grid is certain: high, since only a lost edge can have shifted
it."""

_FINE, _SOME_CELLS, _MANY_CELLS = 0.6, 16, 64
"""The spread and the numbers of cells at which small differences in correlation mean something: random weights spread
wide receptive fields by a quarter, tokens by 0.5 and more, and 16 and 64 cells are grids of 4 x 4 and 8 x 8."""

_LEAST_GAIN, _CLEAR_GAIN, _NEARLY_PERFECT = 0.05, 0.15, 0.95
"""How much better another position must correlate to replace the expected one: by a clear gain, or by a small one if
its correlation is nearly perfect. Repeated measurements of the same cells differ by less than 0.05, a third of a clear
gain."""

_ELSEWHERE = 0.3
"""Below this correlation the cells lie elsewhere, if their changes depend on position at all: cells in their places
reach 0.9, others 0 on average, and this lies well below ``_CONFIRMED``."""

_SHOWN = 0.35
"""The spread of the cells' changes, between 0 and 1, from which they depend on position at all: wide receptive fields
of random weights leave a quarter, tokens have 0.5 and more."""

_ALIKE = 0.02
"""Correlations that differ by less count as equal, and the simplest reading wins: less than half of the difference
between repeated measurements."""

_UNCHANGED = 1e-3
"""Changes below this share of the largest one count as rounding: well above float32's precision, and far below the
change of any cell that sees the input."""

_KEPT = 0.8
"""If the cells of the first convolution correlate less than this, the model moves its input in an unknown way: they see
few pixels each, so those in their places are near 1."""

_MOST_LOST = 4
"""How many times larger or smaller than the input a grid may become by added or lost edges: beyond that, less than a
quarter of an axis would be picture."""

_SEED = 5821934
"""The seed of the noise; any fixed number will do, so that the same model and picture always give the same result."""

_FEW_CELLS = 9
"""With fewer cells than a 3 x 3 grid a correlation says little, so the cells are dropped only if it is negative."""


_MOSTLY_INPUT = 0.5
"""Cells of which a smaller share is input are left out: they show the padding more than the picture."""


_MOSTLY_KNOWN = 0.5
"""The share of a cell's channels that must come from a known place."""

_ROUNDED = 1e-3
"""Differences between places that are smaller than this share of a cell are rounding."""

_DECIMALS = 3
"""The decimals of a position in pixels: finer than any drawing shows, and coarser than float32's rounding."""

_ASIDE, _ASIDE_AT_EDGES = 0.5, 2.0
"""How far a cell may lie from its place in an even grid, in cells: inside the grid, and at its edges, where paddings
draw the mean place of a cell aside. Where NASNet shifts half of the channels by a pixel, they reach 0.23 and 1.9."""

_ABOUT_A_CELL = 0.25
"""How far the mean distance of neighbouring cells may be from one cell: averages over many places draw cells together,
and then their order says little. At a quarter, the outermost of eight cells would be drawn a cell beside its place."""


class _Match(NamedTuple):
    """How well the changes of cells match the pixels that were replaced at their positions.

    Attributes:
        correlation: between each cell's relative change and the replaced share of its pixels.
        spread: the standard deviation of the cells' relative changes.
        cells: how many cells changed at all.
    """

    correlation: float
    spread: float
    cells: int


def locate(
    trace: Trace,
    readings: Readings,
    changes: Changes,
    places: Places = lambda calls: {},  # noqa: ARG005
) -> Readings:
    """Correct or drop the layouts of outputs whose cells lie elsewhere than their shape suggests.

    A model that resizes and pads its input itself, as detectors do, is not measured: its grids include its padding.

    Args:
        trace: the trace of the pass.
        readings: one for each call.
        changes: measures how outputs change; called at most once.
        places: follows cells from the input; called at most once.
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
    for call in unknown:  # several modules may return the same tensor
        by_output.setdefault(call.output, call)
    first = next((call for call in trace.calls if call.convolution is not None), None)
    measured = changes([call.key for call in (*by_output.values(), *([first] if first is not None else []))])
    extent, correlation = _input_extent(first, measured, trace.size) if measured is not None else ((), 1.0)
    followed = places([call.key for call in by_output.values()])
    located: list[Reading] = []
    for call, reading in zip(trace.calls, readings, strict=True):
        if reading.layout is None or _is_known(call, reading, trace):
            located.append(reading)
        elif correlation < _ELSEWHERE:
            located.append(replace(reading, layout=None, elsewhere=True))
        else:
            profiles = (measured or {}).get(by_output[call.output].key, ({}, {}))
            on_extent = replace(reading, layout=replace(reading.layout, extent=extent))
            origin = followed.get(by_output[call.output].key)
            on_extent = _as_followed(call.shape, on_extent, origin, trace.size)
            corrected = _corrected(call.shape, on_extent, profiles, trace.size)
            corrected = replace(corrected, unsure=corrected.unsure or correlation < _KEPT)
            compared = _compared(corrected, origin, profiles, trace.size)
            # The measurement is of one picture, and another one may have its cells elsewhere.
            located.append(replace(compared, unsure=compared.unsure or call.moved))
    return tuple(located)


def placed(layout: Layout, places: Profiles, size: tuple[int, ...]) -> Layout:
    """Return a layout with the places of its cells, if they are in order."""
    cells = _cells(places, layout) if layout.kind in places else None
    if cells is None or _are_in_order(cells, layout) is False:
        return layout
    return replace(layout, positions=_positions_of(cells, size))


def _positions_of(cells: Float[Tensor, "coordinates *grid"], size: tuple[int, ...]) -> CellPositions:
    """Return where the cells of a grid look along each axis, in pixels; empty if that cannot be told.

    Cells whose place is not known, such as those of padding, continue the row of the others.
    """
    weights, *coordinates = cells.double().cpu().numpy()
    known = weights > _MOSTLY_KNOWN
    positions: list[tuple[float, ...]] = []
    for axis, (side, places) in enumerate(zip(size, coordinates, strict=True)):
        others = tuple(other for other in range(len(size)) if other != axis)
        counts = known.sum(others)
        certain = np.flatnonzero(counts)
        if len(certain) < min(2, len(counts)):
            return ()
        means = np.where(known, places, 0).sum(others)[certain] / counts[certain]
        numbers = np.arange(len(counts))
        along = np.interp(numbers, certain, means)
        for end, inner in ((certain[0], certain[1]), (certain[-1], certain[-2])) if len(certain) > 1 else ():
            beyond = (numbers - end) * (end - inner) > 0
            step = (along[end] - along[inner]) / (end - inner)
            along[beyond] = along[end] + (numbers[beyond] - end) * step
        if (np.diff(along) < -_ROUNDED / side).any():
            return ()
        pixels = np.round((along + 1) / 2 * side - 0.5, _DECIMALS)
        positions.append(tuple(np.maximum.accumulate(pixels).tolist()))
    return tuple(positions)


def _as_followed(shape: tuple[int, ...], reading: Reading, followed: Followed | None, size: tuple[int, ...]) -> Reading:
    """Read an output in the one way in which its cells are in order, if it is not the one that its shape suggests."""
    layout = reading.layout
    if layout is None or reading.certain or followed is None or not followed.certain or _is_shown(layout, followed):
        return reading
    shown = [option for option in other_readings(shape, size, layout) if _is_shown(option, followed)]
    return replace(reading, layout=shown[0], tentative=False) if len(shown) == 1 else reading


def _compared(
    reading: Reading, followed: Followed | None, profiles: tuple[Profiles, Profiles], size: tuple[int, ...]
) -> Reading:
    """Compare a reading with where the output's cells come from.

    If that is not known, only a clear measurement confirms the reading.
    """
    layout = reading.layout
    if layout is None:
        return reading
    in_order = _is_shown(layout, followed)
    if in_order is False and followed is not None and followed.certain:
        return replace(reading, layout=None, elsewhere=True, unsure=False)
    is_plain = followed is not None and followed.certain and layout.kind in followed.places and not reading.certain
    if is_plain and followed is not None and _lie_aside(_cells(followed.places, layout), layout):
        return replace(reading, unsure=True)
    if in_order:
        return reading
    reading = replace(reading, measured=True)
    if not reading.unsure:
        match = _all_matches([layout], *profiles, size)[layout] if layout.kind in profiles[0] else _Match(0, 0, 0)
        reading = replace(reading, unsure=not match.correlation > _chance_level(match.cells))  # "not >" holds for NaN
    if not reading.unsure or reading.certain or followed is None or not followed.certain:
        return reading
    return replace(reading, layout=None, unsure=False) if _has_no_place(layout, followed) else reading


def _is_shown(layout: Layout, followed: Followed | None) -> bool | None:
    """Tell whether the followed cells of a layout are in its order; None if that does not show."""
    if followed is None or layout.kind not in followed.places:
        return None
    return _are_in_order(_cells(followed.places, layout), layout)


def _has_no_place(layout: Layout, followed: Followed) -> bool:
    """Tell whether none of a layout's cells comes from a place in the input.

    An example are the detection tokens of YOLOS: they are learned, and may be as many as some grid has cells.
    """
    return layout.kind in followed.places and not _cells(followed.places, layout)[0].any()


def _cells(places: Profiles, layout: Layout) -> Float[Tensor, "coordinates *grid"]:
    """Return the share of each cell's channels with a known place, and the mean of these places."""
    cells = places[layout.kind].flatten(1)[:, layout.prefix : layout.prefix + math.prod(layout.grid)].cpu()
    known = cells[:1]
    return torch.cat([known, cells[1:] / known.where(known > 0, 1)]).reshape(-1, *layout.grid)


def _are_in_order(cells: Float[Tensor, "coordinates *grid"], layout: Layout) -> bool | None:
    """Tell whether the cells of a grid come from the input in the grid's order; None if that does not show.

    Along an axis of the grid, the places along the same axis of the input must grow, by about a cell each, and those
    along the others must stay the same; or all cells must lie near their places in an even grid.
    """
    known, places = cells[0] > _MOSTLY_KNOWN, cells[1:]
    extent = layout.extent or ((0.0, 1.0),) * len(places)
    shows = bool(known.any())
    for axis, side in enumerate(layout.grid):
        if side == 1:
            continue
        start, end = extent[axis]
        cell = 2 / side / (end - start)
        both = known.narrow(axis, 1, side - 1) & known.narrow(axis, 0, side - 1)
        steps = places.diff(dim=axis + 1)[:, both] / cell
        if not steps.numel():
            return None
        own = steps[axis]
        others = steps[[other for other in range(len(places)) if other != axis]]
        grows = not bool((own < -_ROUNDED).any() or (others.abs() > _ROUNDED).any())
        if not grows and not _are_even(places[axis] / cell, known, axis):
            return False
        shows &= abs(float(own.mean()) - 1) < _ABOUT_A_CELL
    return True if shows else None


def _lie_aside(cells: Float[Tensor, "coordinates *grid"], layout: Layout) -> bool:
    """Tell whether a cell inside a grid lies more than ``_ASIDE`` cells from its place in an even grid.

    This happens if the model pads its picture or leaves out an edge, and then cuts it into patches without a
    convolution.
    """
    inside = tuple(slice(1, -1) if side > 2 else slice(None) for side in layout.grid)
    known = cells[0][inside] > _MOSTLY_KNOWN
    extent = layout.extent or ((0.0, 1.0),) * len(layout.grid)
    for axis, (side, (start, end)) in enumerate(zip(layout.grid, extent, strict=True)):
        places = (cells[1 + axis] + 1) / 2 * (end - start) + start
        numbers = (torch.arange(side) + 0.5).reshape([-1 if axis == other else 1 for other in range(len(layout.grid))])
        steps = places[inside].diff(dim=axis)[known.narrow(axis, 1, known.shape[axis] - 1)] * side
        together = bool(steps.numel()) and float(steps.mean()) < 1 - _ABOUT_A_CELL
        if not together and bool(((places * side - numbers)[inside].abs() > _ASIDE)[known].any()):
            return True
    return False


def _are_even(places: Float[Tensor, "*grid"], known: Bool[Tensor, "*grid"], axis: int) -> bool:
    """Tell whether the places along an axis, in cells, are those of an even grid, except for a part of a cell."""
    grid = places.shape
    numbers = torch.arange(grid[axis]).reshape([-1 if other == axis else 1 for other in range(places.dim())])
    number, place = numbers.expand(grid)[known].float(), places[known]
    number, place = number - number.mean(), place - place.mean()
    apart = (number * place).sum() / (number * number).sum()
    most = torch.full(grid, _ASIDE_AT_EDGES)
    most[tuple(slice(1, -1) if side > 2 else slice(None) for side in grid)] = _ASIDE
    return bool(apart > 0) and not bool(((place - apart * number).abs() > most[known]).any())


def _is_known(call: Call, reading: Reading, trace: Trace) -> bool:
    """Tell whether the operations before an output leave no doubt where its cells lie."""
    return call.kept and reading.layout is not None and reading.layout == plain_layout(call.shape, 1, trace.size)


def _input_extent(
    call: Call | None, changes: Mapping[Key, tuple[Profiles, Profiles]], size: tuple[int, ...]
) -> tuple[Extent, float]:
    """Return the part of the grids that is the input, and how well the first convolution's cells correlate with it.

    The part is smaller than the grid if the model pads its input. It includes pixels that whole patches leave over, but
    not the edges that a convolution adds to fit its kernel. The correlation is low if the model moves its input in any
    other way.
    """
    if call is None or call.convolution is None or call.key not in changes or not call.convolution.size:
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
    same_along_axes = itertools.islice(zip(*parts, strict=False), 1, None)
    extents = [plain, *same_along_axes, *itertools.product(*parts)]
    layouts = [Layout("channels_first", grid, extent=extent) for extent in extents]
    matches = _matches(layouts, first, second, size)
    fewest = min(_SOME_CELLS, math.prod(grid) / 2)
    correlations = [matches[layout].correlation if matches[layout].cells >= fewest else -1.0 for layout in layouts]
    best = next(number for number, value in enumerate(correlations) if value >= max(correlations) - _ALIKE)
    extent = extents[best] if correlations[best] > _CONFIRMED else plain
    correlation = correlations[best] if math.prod(grid) >= _SOME_CELLS else 1.0
    return (extent if any(part != (0.0, 1.0) for part in extent) else ()), correlation


def _parts(share: float, changed_part: tuple[float, float]) -> list[tuple[float, float]]:
    """List the parts of an axis that the input may cover: all, the start, middle or end, or the cells that changed.

    Cells beside the input change too, as far as a kernel reaches, so the input's width is used if it is known. If the
    model crops its input, the share exceeds 1.
    """
    middle = sum(changed_part) / 2
    changed = (middle - share / 2, middle + share / 2)
    if share == 1:
        return list(dict.fromkeys([(0.0, 1.0), changed_part]))
    return [(0.0, 1.0), (0.0, share), (0.5 - share / 2, 0.5 + share / 2), (1.0 - share, 1.0), changed]


def _changed_part(changes: Tensor) -> Extent:
    """Return the first and the last position along each axis at which cells changed, as shares of the axis."""
    changed = torch.nonzero(changes > _UNCHANGED * changes.amax())
    first, last = changed.amin(0).tolist(), changed.amax(0).tolist()
    return tuple((start / side, (end + 1) / side) for start, end, side in zip(first, last, changes.shape, strict=True))


def exchange(image: Float[Tensor, "1 c *size"]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the two halves of an image (masks) that are replaced one after the other, and the noise to put there."""
    part = _first_half(tuple(image.shape[2:])).to(image.device)
    return (part, ~part), _noise(image)


def _first_half(size: tuple[int, ...]) -> Tensor:
    """Return the mask of the pixels that are replaced first."""
    parts = _PARTS.get(len(size))
    if parts is None:
        parts = _PARTS[2][..., None] ^ torch.tensor([1, 1, 0, 0])
    return functional.interpolate(parts[None, None].float(), size, mode="nearest-exact")[0, 0] > 0


def _noise(image: Tensor) -> Tensor:
    """Return uniform noise within two standard deviations of the image's mean, and within its range."""
    values = image.float()
    mean, deviation = values.mean(), values.std(correction=0)
    low, high = torch.maximum(values.min(), mean - 2 * deviation), torch.minimum(values.max(), mean + 2 * deviation)
    if not high > low:  # all pixels are equal
        low, high = (low.clamp(max=0), high.clamp(min=0)) if low != 0 else (low, low + 1)
    drawn = torch.rand(image.shape, generator=torch.Generator().manual_seed(_SEED)).to(image.device)
    return (low + drawn * (high - low)).to(image)


def _corrected(
    shape: tuple[int, ...], reading: Reading, profiles: tuple[Profiles, Profiles], size: tuple[int, ...]
) -> Reading:
    """Correct a reading by the measured changes of the output's cells."""
    layout = reading.layout
    assert layout is not None
    first, second = profiles
    if layout.kind not in first:
        return replace(reading, layout=None if reading.tentative else layout, unsure=True)
    expected = _all_matches([layout], first, second, size)[layout]
    # Wide receptive fields show little, and with random weights they resemble some other position by chance.
    fine = expected.spread > _FINE and expected.cells >= _MANY_CELLS
    matches = {layout: expected}
    if not reading.certain or (fine and not is_whole(layout, size)):
        matches |= _all_matches(_alternatives(shape, reading, size), first, second, size)
    best = max(matches, key=lambda option: matches[option].correlation - _chance_level(matches[option].cells))
    if _is_better(reading, matches[best], expected):
        return replace(reading, layout=best)
    if reading.tentative and not (expected.correlation > _CONFIRMED or reading.certain):
        return replace(reading, layout=None)
    lies_elsewhere = expected.correlation < (_ELSEWHERE if expected.cells >= _FEW_CELLS else 0)
    if expected.spread > (_FINE if reading.certain else _SHOWN) and expected.cells and lies_elsewhere:
        return replace(reading, layout=None, elsewhere=True)
    if reading.certain:
        return replace(reading, unsure=expected.correlation < 0)
    few = expected.cells < _FEW_CELLS
    needed = _chance_level(expected.cells) if reading.tentative or few else _CONFIRMED
    return replace(reading, unsure=not expected.correlation > needed)  # "not >" holds for NaN too


def _is_better(reading: Reading, best: _Match, expected: _Match) -> bool:
    """Tell whether the best layout replaces the one that the shape suggests."""
    gain = best.correlation - expected.correlation
    if reading.certain:
        return best.correlation > _SHARP and gain > _LEAST_GAIN
    clear = gain > _CLEAR_GAIN or (best.correlation > _NEARLY_PERFECT and gain > _LEAST_GAIN)
    return best.correlation > _chance_level(best.cells) and clear


def _alternatives(shape: tuple[int, ...], reading: Reading, size: tuple[int, ...]) -> list[Layout]:
    """List the ways to read an output other than the one its shape suggests."""
    layout = reading.layout
    assert layout is not None
    others = other_readings(shape, size, layout)
    if layout.extent:  # the model may have cropped its padding off again
        others = [*others, *(replace(other, extent=()) for other in (layout, *others))]
    if reading.certain:
        others += [replace(layout, extent=extent) for extent in _extents(layout.grid, size)]
    return others


def _extents(grid: tuple[int, ...], size: tuple[int, ...]) -> list[Extent]:
    """List the parts of a grid that the input may cover if edges were added or lost on the way to it.

    Each part starts where the grid starts, or shares its centre, and its cells have one of the usual strides.
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


_CHANCE_LEVELS = ((36, 0.7), (16, 0.9), (_FEW_CELLS, 0.97), (0, 1.0))
"""For the least number of cells: the correlation that a wrong reading reaches in fewer than 1 of 10,000 outputs."""


def _chance_level(cells: int) -> float:
    """Return the correlation that chance alone does not reach for this number of cells."""
    return next(level for fewest, level in _CHANCE_LEVELS if cells >= fewest)


def _all_matches(
    layouts: Sequence[Layout], first: Profiles, second: Profiles, size: tuple[int, ...]
) -> dict[Layout, _Match]:
    """Return how well each of several layouts matches the measured changes of an output's cells."""
    kinds = dict.fromkeys(layout.kind for layout in layouts)
    matches: dict[Layout, _Match] = {}
    for kind in kinds:
        matches |= _matches([layout for layout in layouts if layout.kind == kind], first[kind], second[kind], size)
    return {layout: matches[layout] for layout in layouts}


def _matches(layouts: Sequence[Layout], first: Tensor, second: Tensor, size: tuple[int, ...]) -> dict[Layout, _Match]:
    """Return the same as ``_all_matches`` for layouts of one kind."""
    by_grid: dict[Layout, list[Layout]] = {}
    for layout in layouts:
        by_grid.setdefault(replace(layout, prefix=0), []).append(layout)
    total = first + second
    contrast = (first - second) / total.clamp(min=torch.finfo(torch.float32).tiny)
    matches: dict[Layout, _Match] = {}
    for layout, group in by_grid.items():
        starts = torch.tensor([option.prefix for option in group], device=total.device)
        indices = starts[:, None] + torch.arange(math.prod(layout.grid), device=total.device)
        replaced, covered = (maps.flatten().to(total) for maps in _replaced_shares(layout.grid, layout.extent, size))
        is_input = covered > _MOSTLY_INPUT
        measured = _correlated(contrast.flatten()[indices], total.flatten()[indices], replaced, is_input)
        matches.update(zip(group, measured, strict=True))
    return matches


def _correlated(
    contrast: Float[Tensor, "ways cells"],
    total: Float[Tensor, "ways cells"],
    replaced: Float[Tensor, " cells"],
    is_input: Bool[Tensor, " cells"],
) -> list[_Match]:
    """Correlate the cells' contrast between the two changes with the share of their pixels that was replaced first."""
    # Cells that never change say nothing, such as those of features that do not occur in the picture.
    counted = is_input & (total > _UNCHANGED * total.amax(1, keepdim=True))
    number = counted.sum(1, keepdim=True)
    parts = [
        torch.where(counted, values - (values * counted).sum(1, keepdim=True) / number.clamp(min=1), 0).double()
        for values in (contrast, replaced.expand_as(contrast))
    ]
    squares = [part.square().sum(1) for part in parts]
    scale = (squares[0] * squares[1]).sqrt()
    correlation = torch.where(scale > 0, (parts[0] * parts[1]).sum(1) / scale.clamp(min=1e-30), 0)
    spread = (squares[0] / (number[:, 0] - 1).clamp(min=1)).sqrt()
    columns = correlation.tolist(), spread.tolist(), number[:, 0].tolist()
    return [_Match(*row) for row in zip(*columns, strict=True)]


@functools.lru_cache(maxsize=64)
def _replaced_shares(grid: tuple[int, ...], extent: Extent, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the share of each cell's area that is replaced first, and the share that is input and not padding."""
    first_half = _first_half(size)
    maps = torch.stack([first_half.float(), torch.ones_like(first_half, dtype=torch.float32)])
    if extent:
        maps = functional.pad(maps, margins(size, extent))
    replaced, covered = functional.interpolate(maps[None], grid, mode="area")[0]
    return replaced, covered
