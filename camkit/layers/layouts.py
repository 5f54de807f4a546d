"""The second stage: read each layer's output as a grid of cells, (N, C, *grid).

Most networks are convolutions, normalisations and poolings, which leave every cell in its place: the shape of an output
then shows its grid. For any other output, the elements are followed from the input through the operations of a pass,
and the axes along which their places change are the grid.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.layers.trace import Convolution, Followed, Places, Trace, TracedCall
from camkit.types import Extent, Layout, LayoutKind

_STRIDES = (1, 2, 4, 8, 16, 32)
"""The usual strides of vision networks: pixels per cell along each axis, in powers of two."""

_EXACT = 0.02
"""Share of a grid's size below which edges do not count: less than a cell of any grid up to 50 cells wide."""

MOST_CELLS_LOST = 2.5
"""Cells that a grid may have fewer than the input's size divided by the stride: an unpadded 3 x 3
convolution loses two, and the half absorbs rounding."""

_MOST_DISTORTION = 2.0
"""The largest ratio between the sides of a cell: at more than twice, the output is only an edge of a grid."""

_MOST_PREFIX_TOKENS = 16
"""The most class, distillation and register tokens expected before a grid: DINOv2 with registers has 5, and a much
larger number would let almost any sequence length pass as a grid."""

KNOWN = 0.5
"""The share of a cell's channels that must come from a known place, of those that do in the cell with most."""

_LEAST_KNOWN = 5e-3
"""The least share of a cell's channels that must come from a known place. A Perceiver joins a picture's three channels
with 258 constants, the position of each pixel: 0.0115."""

_ROUNDED = 1e-3
"""Differences between places that are smaller than this share of a cell are rounding."""

_LEAST_APART = 0.05
"""The least mean distance of neighbouring cells, in cells: closer ones are all averages of nearly the whole input."""

_ASIDE, _ASIDE_AT_PADDING = 0.5, 2.0
"""How far a cell may lie from its place in an even grid, in cells: usually, and if some of its channels come from
padding, which draws the mean place of the others aside. Where NASNet shifts half of the channels by a pixel, they reach
0.23 and 1.9."""

TOKENS = ("tokens", "tokens_last", "sequence_first")
"""The kinds of outputs that have all their cells along one axis."""

Cells: TypeAlias = Float[Tensor, "coordinates ..."]
"""How many of each cell's channels have a known place, as a share of the most in any cell, and the mean of these places
along each axis of the input, from -1 to 1."""


@dataclass(frozen=True)
class LayoutReading:
    """How one call's output is laid out, and how certain that is.

    Attributes:
        layout: the layout; None if the output has no grid.
        elsewhere: True if its cells come from the input in another order than that of a grid.
        unsure: True if the position of the cells is not certain.
    """

    layout: Layout | None = None
    elsewhere: bool = False
    unsure: bool = False

    @property
    def grid(self) -> tuple[int, ...]:
        """The sides of the grid; empty if there is none."""
        return () if self.layout is None else self.layout.grid


LayoutReadings: TypeAlias = Mapping[TracedCall, LayoutReading]
"""The reading of each call of a trace, in the trace's order."""


def read_layouts(trace: Trace, places: Places) -> LayoutReadings:
    """Read the layout of each output of a pass.

    Args:
        trace: the trace of the pass.
        places: follows cells from the input; called at most once.
    """
    plain = {call: _plain(call, trace.size) for call in trace.calls}
    unknown = [call for call in trace.calls if call.output is not None and plain[call] is None]
    first = next((call for call in trace.calls if call.convolution is not None), None)
    keys = {call.output: call.key for call in reversed(unknown)}  # several modules may return the same tensor
    followed = places(list(keys.values()), None if first is None else first.key) if unknown else {}
    received = None if first is None or first.key not in followed else followed[first.key].received
    extent: Extent = ()
    scattered = False  # the pixels that the first convolution gets
    if first is not None and first.convolution is not None and first.convolution.size and received is not None:
        scattered = not _are_in_order(received)
        extent = () if scattered else _input_in(received, first.convolution, first.shape[2:])
    by_output: dict[int | None, LayoutReading] = {None: LayoutReading()}
    grids: set[tuple[int, ...]] = {trace.size}
    readings: dict[TracedCall, LayoutReading] = {}
    for call in trace.calls:
        shown = plain[call]
        if call.output not in by_output:
            if shown is not None:
                reading = shown
            elif trace.graph.is_attention(call.operation, len(call.shape)):
                reading = LayoutReading()
            else:
                reading = _read(call, followed.get(keys[call.output]), trace.size, extent, grids)
            by_output[call.output] = reading
            grids.add(reading.grid)
        reading = by_output[call.output]
        unsure = reading.unsure or call.moved or (scattered and shown is None)
        readings[call] = replace(reading, unsure=unsure and reading.layout is not None)
    return readings


def _plain(call: TracedCall, size: tuple[int, ...]) -> LayoutReading | None:
    """Read an output whose shape shows its grid, because every operation before left cells in place; None if not."""
    if not call.kept:
        return None
    if math.prod(call.shape[2:]) == 1:
        return LayoutReading()
    layout = plain_layout(call.shape, 1, size)
    return None if layout is None else LayoutReading(layout)


def _read(
    call: TracedCall,
    followed: Followed | None,
    size: tuple[int, ...],
    extent: Extent,
    grids: Collection[tuple[int, ...]],
) -> LayoutReading:
    """Read an output whose elements were followed.

    Args:
        call: the call that returned it.
        followed: where its elements come from; None if not from the input.
        size: the size of the input.
        extent: the part of the first grid that is the input.
        grids: the grids of earlier outputs.
    """
    if followed is None:
        return LayoutReading()
    if not followed.places:
        return LayoutReading(infer_layout(call.shape, 1, size), unsure=True)
    vary = False
    for kind, places in followed.places.items():
        cells = cells_of(places)
        found = grid_in(kind, cells)
        if found is not None and not _is_pooled(found[0].grid, grids):
            layout, on_grid = found
            own = _own_extent(on_grid, extent)
            unsure = own != extent and not _are_evenly_apart(on_grid)
            return LayoutReading(replace(layout, extent=own), unsure=unsure)
        vary |= _vary(cells)
    return LayoutReading(elsewhere=vary and followed.certain)


def cells_of(places: Tensor) -> Cells:
    """Return the places of cells from the means of their elements' weights and weighted places.

    Channels that are the same everywhere, such as constants, have no place, so the most of any cell count as all.
    """
    places = places.cpu()
    known = places[:1]
    return torch.cat([known / known.amax().clamp(min=_LEAST_KNOWN), places[1:] / known.where(known > 0, 1)])


def grid_in(kind: LayoutKind, cells: Cells) -> tuple[Layout, Cells] | None:
    """Return the layout of one kind in which cells are in the order of a grid, and the grid's cells; None if none."""
    if kind in TOKENS:
        orders = _ORDERS if len(cells) == 4 else _ORDERS[:1]
        return next(filter(None, (_grid_of_tokens(kind, cells, order) for order in orders)), None)
    if kind == "channels_last" and cells.dim() == 2 and not bool((cells[0] > KNOWN).all()):
        return None  # a signal with a class token
    return (Layout(kind, tuple(cells.shape[1:])), cells) if _are_in_order(cells) else None


_ORDERS: tuple[tuple[int, ...], ...] = ((), (1, 2, 0))
"""The orders in which tokens may run through the axes of a clip's grid: as usual, and frame by frame within each patch
(TimeSformer). See ``Layout.order``."""


def _grid_of_tokens(kind: LayoutKind, cells: Cells, order: tuple[int, ...]) -> tuple[Layout, Cells] | None:
    """Return the grid through whose axes tokens run in this order; None if they do not."""
    axes = order or tuple(range(len(cells) - 1))
    tokens = cells[[0, *(1 + axis for axis in axes)]]
    prefix, end = _longest_run(tokens)
    tokens = tokens[:, prefix:end]
    sides = _sides(tokens[1:])
    if sides is None or (prefix and kind == "tokens_last"):
        return None
    back = [1 + axes.index(axis) for axis in range(len(axes))]
    grid = tokens[[0, *back]].reshape(-1, *sides).permute(0, *back)
    return (Layout(kind, tuple(grid.shape[1:]), prefix, order=order), grid) if _are_in_order(grid) else None


def _longest_run(cells: Cells) -> tuple[int, int]:
    """Return where the tokens of the picture begin and end: most known tokens, between others such as a class token.

    A run ends at a token whose place is not known, and where the place along the first axis falls back, as before a
    token that stands for the whole picture.
    """
    known = cells[0] > KNOWN
    begins = known.clone()
    begins[1:] &= ~known[:-1] | (cells[1].diff() < -_ROUNDED)
    runs = torch.where(known, begins.cumsum(0), 0)
    lengths = torch.bincount(runs)[1:]
    if not lengths.numel():
        return 0, 0
    longest = runs == 1 + lengths.argmax()
    own, every = cells[1:, longest], cells[1:, known]
    if 2 * int(lengths.amax()) <= int(known.sum()) or not torch.equal(
        torch.stack(own.aminmax(dim=1)), torch.stack(every.aminmax(dim=1))
    ):
        return 0, 0  # some of the others come from beyond the run, as if the tokens were rolled
    places = torch.nonzero(longest)
    return int(places[0]), int(places[-1]) + 1


def _sides(places: Float[Tensor, "axes cells"]) -> tuple[int, ...] | None:
    """Return the sides of the grid that cells in a row come from, the last axis running fastest; None if there is none.

    A line ends where the place along its axis falls back, or where the place along an earlier axis changes.
    """
    if not places.shape[1]:
        return None
    sides: list[int] = []
    lines = places
    for axis in range(len(places) - 1, 0, -1):
        ends = (lines[:axis].diff(dim=1).abs() > _ROUNDED).any(0) | (lines[axis].diff() < -_ROUNDED)
        first = torch.nonzero(ends)[:1, 0].tolist()
        sides.insert(0, first[0] + 1 if first else lines.shape[1])
        lines = lines[:, :: sides[0]]
    count = math.prod(sides)
    return (places.shape[1] // count, *sides) if places.shape[1] % count == 0 else None


def _are_in_order(cells: Cells) -> bool:
    """Tell whether the cells of a grid come from the input in the grid's order.

    Along an axis of the grid, the places along the same axis of the input must grow, and those along the others must
    stay the same; or all cells must lie near their places in an even grid.
    """
    known, places = cells[0] > KNOWN, cells[1:]
    if known.dim() != len(places) or known.numel() < 2:
        return False
    smallest = 2 / max(known.shape)
    for axis, side in enumerate(known.shape):
        if side == 1:
            own = places[axis][known]
            if bool(own.numel()) and float(own.amax() - own.amin()) > _ASIDE * smallest:
                return False
            continue
        both = known.narrow(axis, 1, side - 1) & known.narrow(axis, 0, side - 1)
        steps = places.diff(dim=axis + 1)[:, both] * side / 2
        if not steps.numel() or not float(steps[axis].mean()) > _LEAST_APART:
            return False
        others = steps[[other for other in range(len(places)) if other != axis]]
        grows = not bool((steps[axis] < -_ROUNDED).any() or (others.abs() > _ROUNDED).any())
        if not grows and not _are_even(places[axis] * side / 2, cells[0], axis):
            return False
    return True


def _are_even(places: Float[Tensor, "*grid"], shares: Float[Tensor, "*grid"], axis: int) -> bool:
    """Tell whether the places along an axis, in cells, are those of an even grid, except for a part of a cell."""
    grid, known = places.shape, shares > KNOWN
    numbers = torch.arange(grid[axis]).reshape([-1 if other == axis else 1 for other in range(places.dim())])
    number, place = numbers.expand(grid)[known].float(), places[known]
    number, place = number - number.mean(), place - place.mean()
    apart = (number * place).sum() / (number * number).sum()
    most = torch.where(shares[known] < 1 - _ROUNDED, _ASIDE_AT_PADDING, _ASIDE)
    return bool(apart > 0) and not bool(((place - apart * number).abs() > most).any())


def _vary(cells: Cells) -> bool:
    """Tell whether cells come from different places along each axis of the input."""
    places = cells[1:, cells[0] > KNOWN]
    return bool(places.numel()) and bool((places.amax(1) - places.amin(1) > _LEAST_APART).all())


def _is_pooled(grid: tuple[int, ...], grids: Collection[tuple[int, ...]]) -> bool:
    """Tell whether an axis of one cell was averaged away: strides lead to one cell from two at most."""
    return any(
        side == 1 and not any(len(before) == len(grid) and before[axis] <= 2 for before in grids)
        for axis, side in enumerate(grid)
    )


def _edges(cells: Cells) -> tuple[tuple[float, float], ...]:
    """Return where the input begins and ends along each axis of a grid whose cells are in order, in cells."""
    edges: list[tuple[float, float]] = []
    for axis, side in enumerate(cells.shape[1:]):
        lines = cells.movedim(1 + axis, 1).flatten(2) if cells.dim() > 2 else cells[..., None]
        known = lines[0] > KNOWN
        counts = known.sum(1)
        certain = torch.nonzero(counts)[:, 0]
        if side == 1 or len(certain) < 2:
            edges.append((0.0, float(side)))
            continue
        means = torch.where(known, lines[1 + axis], 0).sum(1)[certain] / counts[certain]
        step = float(means[-1] - means[0]) / float(certain[-1] - certain[0])
        zero = float(certain[0]) + 0.5 - float(means[0]) / step
        edges.append((round(zero - 1 / step, 3), round(zero + 1 / step, 3)))
    return tuple(edges)


def _input_in(cells: Cells, geometry: Convolution, grid: tuple[int, ...]) -> Extent:
    """Return the part of the grids that is the input, from where the pixels lie that the first convolution gets.

    The part is smaller than the grid if the model pads the picture, and larger if it crops it. It includes pixels that
    whole patches leave over, but not the edges that are added to fit the kernel.
    """
    extent: list[tuple[float, float]] = []
    axes = zip(_edges(cells), cells.shape[1:], geometry.kernel, geometry.stride, grid, strict=True)
    for (start, end), whole, kernel, stride, count in axes:
        fits = 0 <= whole - (end - start) < kernel
        reach = count * stride if kernel == stride and not geometry.padded else whole
        extent.append((0.0, whole / reach) if fits else (start / reach, end / reach))
    return () if all(part == (0.0, 1.0) for part in extent) else tuple(extent)


def _own_extent(cells: Cells, expected: Extent) -> Extent:
    """Return the part of a grid that is the input: what is expected, unless the grid's own cells clearly differ.

    The centre of a cell's kernels may lie half a cell beside its place, and unpadded convolutions lose a few cells.
    """
    edges = _edges(cells)
    sides = cells.shape[1:]
    extent = expected or ((0.0, 1.0),) * len(sides)
    most = 1 if expected else MOST_CELLS_LOST
    if all(
        abs((own[1] - own[0]) - (part[1] - part[0]) * side) <= most
        for own, part, side in zip(edges, extent, sides, strict=True)
    ):
        return expected
    own = tuple((start / side, end / side) for (start, end), side in zip(edges, sides, strict=True))
    return () if all(part == (0.0, 1.0) for part in own) else own


def _are_evenly_apart(cells: Cells) -> bool:
    """Tell whether neighbouring cells of a grid are about as far apart everywhere, and along all axes."""
    steps = [cells[axis].diff(dim=axis - 1).flatten() * cells.shape[axis] / 2 for axis in range(1, len(cells))]
    joined = torch.cat(steps)
    return not joined.numel() or float(joined.amax() - joined.amin()) <= _ASIDE * float(joined.mean())


def infer_layout(shape: tuple[int, ...], batch: int, size: tuple[int, ...]) -> Layout | None:
    """Guess which axes of a layer's output are its grid from shapes alone.

    Args:
        shape: the shape of the layer's output.
        batch: the number of images in the input. An output whose first dimension differs has no layout, except tokens
            of shape (L, batch, C), the order of PyTorch's own attention.
        size: the input's H x W (or its L, or D x H x W).

    Returns:
        The layout, or None if no axes of the output are in proportion to the input's.

    >>> str(infer_layout((1, 2048, 7, 7), 1, (224, 224)))
    'channels_first 7x7'
    >>> str(infer_layout((1, 7, 11, 768), 1, (224, 336)))
    'channels_last 7x11'
    >>> str(infer_layout((1, 197, 192), 1, (224, 224)))
    'tokens 14x14 after 1'

    """
    if not shape or shape[0] != batch:
        if len(shape) != 3 or shape[1] != batch or len(size) < 2:
            return None
        tokens = _tokens(shape[0], size)
        return None if tokens is None else replace(tokens, kind="sequence_first")
    if len(shape) == len(size) + 2:
        if _fits(shape[2:], size):
            return Layout("channels_first", shape[2:])
        return Layout("channels_last", shape[1:-1]) if _fits(shape[1:-1], size) else None
    return _tokens(shape[1], size) if len(shape) == 3 and len(size) > 1 else None


def _tokens(length: int, size: tuple[int, ...]) -> Layout | None:
    """Return the patch grid that a number of tokens can hold; patches that divide the input and short prefixes first.

    Examples:
        >>> str(_tokens(64, (128, 128)))
        'tokens 8x8'
    """
    options = [
        (any(side % patch for side in size), prefix, grid)
        for patch in range(1, min(size) + 1)
        for grid in sorted({tuple(side // patch for side in size), tuple(-(-side // patch) for side in size)})
        if 0 <= (prefix := length - math.prod(grid)) <= _MOST_PREFIX_TOKENS and math.prod(grid) > 1
    ]
    if not options:
        return None
    _, prefix, grid = min(options)
    return Layout("tokens", grid, prefix)


def _fits(grid: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Tell whether a grid can cover the input at one integer stride, except for a few cells lost at the edges."""
    if len(grid) != len(size) or math.prod(grid) < 2 or min(grid) < 1:
        return False
    strides = [side / cells for cells, side in zip(grid, size, strict=True)]
    if max(strides) > _MOST_DISTORTION * min(strides):
        return False
    longest = max(range(len(size)), key=lambda axis: size[axis])
    guess = strides[longest]
    return any(
        all(s / stride - MOST_CELLS_LOST <= g <= math.ceil(s / stride) for g, s in zip(grid, size, strict=True))
        for stride in range(max(1, int(guess / 2)), math.ceil(guess) + 1)
    )


def channels_of(shape: tuple[int, ...], layout: Layout | None) -> int:
    """Return how many channels an output has; 0 if it has no grid."""
    if layout is None:
        return 0
    return shape[1 if layout.kind in ("channels_first", "tokens_last") else -1]


def plain_layout(shape: tuple[int, ...], batch: int, size: tuple[int, ...]) -> Layout | None:
    """Return the layout of an output (N, C, *grid) whose grid is the input at a usual stride; None for any other shape.

    The channels certainly come first only if all operations before the output leave cells in their places.
    """
    if len(shape) != len(size) + 2 or shape[0] != batch or not _fits(shape[2:], size):
        return None
    strides = [side / cells for side, cells in zip(size, shape[2:], strict=True)]
    usual = all(any(abs(own / stride - 1) <= _EXACT for stride in _STRIDES) for own in strides)
    return Layout("channels_first", shape[2:]) if usual else None
