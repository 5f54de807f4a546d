"""The second stage: read each layer's output as a grid of cells, (N, C, *grid).

The layout follows from the output's shape, the size of the input, and the outputs it was computed from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, cast

from camkit.layers.graph import Lineage
from camkit.layers.trace import Trace
from camkit.types import Layout

MOST_PREFIX_TOKENS = 16
"""The most class, distillation and register tokens expected before a grid: DINOv2 with
registers has 5, and a much larger number would let almost any sequence length pass as a grid."""

_MOST_PREFIX_OF_SIGNALS = 4
"""The most extra tokens expected before a signal's: any length can be a signal's grid, so only the usual few (class,
distillation, two registers) are tried."""

_USUAL_PREFIX = 2
"""Prefix tokens up to which the first of two possible readings is taken: a class and a distillation token, as in
DeiT."""

_MOST_CELLS_LOST = 2.5
"""Cells that a grid may have fewer than the input's size divided by the stride: an unpadded 3 x 3
convolution loses two, and the half absorbs rounding."""

_MOST_DISTORTION = 2.0
"""The largest ratio between the sides of a cell: at more than twice, the output is only an edge of a grid."""

_UNEVEN = 1.5
"""Above this ratio between the sides of a cell, its axes have different strides: halfway from equal to double."""

NO_GRID: tuple[int, ...] = ()
"""Marks a source without a certain position in the picture, such as latent vectors or tokens that were selected or
averaged. It stands in the list of the grids that an output was computed from."""

STRIDES = (1, 2, 4, 8, 16, 32)
"""The usual strides of vision networks: pixels per cell along each axis, in powers of two."""

EXACT = 0.02
"""Share of a grid's size below which edges do not count: less than a cell of any grid up to 50 cells wide."""

_MOST_MERGED = 4
"""The most cells along each axis that one step merges into one, or splits one into: Swin's patch merging uses 2, and 4
allows for a step twice as large."""

_MOST_OF_PATCH = 16
"""The most pixels along an axis that the first convolution merges into a cell if its axes have different strides."""


def is_distorted(grid: tuple[int, ...], size: tuple[int, ...], most: float = _MOST_DISTORTION) -> bool:
    """Tell whether the cells of a grid over this size would be far from square, as if only its edge were left."""
    strides = [s / g for g, s in zip(grid, size, strict=True)]
    return max(strides) > most * min(strides)


def is_uneven(grid: tuple[int, ...], size: tuple[int, ...], most: float = _MOST_DISTORTION) -> bool:
    """Tell whether a grid's stride along some axis is more than ``most`` times that along another."""
    return len(grid) == len(size) and is_distorted(grid, size, most)


@functools.lru_cache(maxsize=4096)
def _fits(grid: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Tell whether a grid can cover the input at one integer stride, except for a few cells lost at the edges."""
    if len(grid) != len(size) or math.prod(grid) < 2 or min(grid) < 1 or is_distorted(grid, size):
        return False
    longest = max(range(len(size)), key=lambda axis: size[axis])
    guess = size[longest] / grid[longest]
    return any(
        all(s / stride - _MOST_CELLS_LOST <= g <= math.ceil(s / stride) for g, s in zip(grid, size, strict=True))
        for stride in range(max(1, int(guess / 2)), math.ceil(guess) + 1)
    )


@functools.lru_cache(maxsize=4096)
def _shrinks(before: tuple[int, ...], after: tuple[int, ...], most: int) -> bool:
    """Tell whether a grid follows from a finer one by a stride of its own, of at most ``most`` cells, along each axis.

    An axis may shrink to a single cell only from one or two: with more cells, it was pooled and has no stride.
    """
    return (
        len(before) == len(after)
        and math.prod(after) > 1
        and all(
            any(large / step - _MOST_CELLS_LOST <= small <= -(-large // step) for step in range(1, most + 1))
            and (small > 1 or large <= 2)
            for large, small in zip(before, after, strict=True)
        )
    )


@functools.lru_cache(maxsize=4096)
def _is_step(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Tell whether merging or splitting the same number of cells along each axis turns one grid into the other."""

    def merged(fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
        return len(fine) == len(coarse) and any(
            all(small in (large // step, -(-large // step)) for large, small in zip(fine, coarse, strict=True))
            for step in range(1, _MOST_MERGED + 1)
        )

    return merged(before, after) or merged(after, before)


class _TokenGrid(NamedTuple):
    grid: tuple[int, ...]
    prefix: int
    exact: bool


@functools.lru_cache(maxsize=1024)
def _token_grids(length: int, size: tuple[int, ...]) -> list[_TokenGrid]:
    """List the patch grids that ``length`` tokens can hold, patches that divide the input and short prefixes first."""
    options = [
        _TokenGrid(grid, prefix, exact=all(s % patch == 0 for s in size))
        for patch in range(1, min(size) + 1)
        for grid in {tuple(s // patch for s in size), tuple(-(-s // patch) for s in size)}
        if 0 <= (prefix := length - math.prod(grid)) <= MOST_PREFIX_TOKENS and math.prod(grid) > 1
    ]
    return sorted(options, key=lambda option: (not option.exact, option.prefix))


def infer_layout(
    shape: tuple[int, ...], batch: int, size: tuple[int, ...], sources: Sequence[tuple[int, ...]] = ()
) -> Layout | None:
    """Decide which axes of a layer's output are its grid.

    Args:
        shape: the shape of the layer's output.
        batch: the number of images in the input. An output whose first dimension differs has no layout, except tokens
            of shape (L, batch, C), the order of PyTorch's own attention.
        size: the input's H x W (or its L, or D x H x W).
        sources: the grids of the outputs that this one was computed from, the nearest first. A shape alone does not
            distinguish tokens from channels, so it is read as one of these grids, or as the result of merging or
            splitting the cells of one. Any other number of tokens, such as that of latent vectors, only looks like a
            grid.

    Returns:
        The layout, or None if no axes of the output are in proportion to the input's.

    >>> str(infer_layout((1, 2048, 7, 7), 1, (224, 224)))
    'channels_first 7x7'
    >>> str(infer_layout((1, 7, 11, 768), 1, (224, 336)))
    'channels_last 7x11'
    >>> str(infer_layout((1, 197, 192), 1, (224, 224)))
    'tokens 14x14 after 1'
    >>> str(infer_layout((1, 64, 256), 1, (128, 128)))
    'tokens 8x8'
    >>> str(infer_layout((1, 64, 256), 1, (128, 128), sources=[(16, 16)]))
    'tokens_last 16x16'

    """
    if not shape or shape[0] != batch:
        return _sequence_first(shape, batch, size, sources)
    if len(shape) == len(size) + 2:
        first, last = shape[2:], shape[1:-1]
        kinds: list[tuple[Literal["channels_first", "channels_last"], tuple[int, ...]]]
        kinds = [("channels_first", first), ("channels_last", last)]
        fitting = [
            Layout(kind, grid)
            for kind, grid in kinds
            if _fits(grid, size)
            or any(_shrinks(source, grid, 2) for source in sources if is_uneven(source, size, _UNEVEN))
        ]
        traced = [layout for layout in fitting if layout.grid in sources] or _signal_by_sources(shape, size, sources)
        return next(iter(traced or fitting), None)
    if not are_tokens(shape, size):
        return None
    by_sources = _tokens_by_sources(shape, sources)
    if by_sources is not None or not sources:
        return by_sources or _tokens_by_size(shape, size)
    by_size = None if NO_GRID in sources else _tokens_by_size(shape, size)
    if by_size is None or not any(_is_step(grid, by_size.grid) for grid in sources):
        return None
    # Where tokens outnumber a grid's cells, many extra tokens are more likely than a finer grid, unless that one fits.
    outnumbered = any(1 < math.prod(grid) < shape[1] for grid in sources)
    splits = by_size.kind == "tokens" and _is_clear(_token_grids(shape[1], size))
    return by_size if splits or not outnumbered else None


def follow(
    shape: tuple[int, ...], batch: int, size: tuple[int, ...], sources: Sequence[tuple[int, ...]]
) -> Layout | None:
    """Guess the layout of an output that is not in proportion to the input from the grids it was computed from.

    This happens if a model resizes its input, or adds more than a few tokens. A measurement must confirm the guess.
    """
    if NO_GRID in sources or not shape or shape[0] != batch:
        return None
    if are_tokens(shape, size):
        fewer = [grid for grid in sources if 1 < math.prod(grid) <= shape[1]]
        return Layout("tokens", fewer[0], shape[1] - math.prod(fewer[0])) if fewer else None
    for kind, grid in (("channels_first", shape[2:]), ("channels_last", shape[1:-1])):
        is_step = any(_is_step(source, grid) for source in sources if source != NO_GRID)
        if is_step and math.prod(grid) > 1 and not is_distorted(grid, size):
            return Layout(cast("Literal['channels_first', 'channels_last']", kind), grid)
    return None


def _sequence_first(
    shape: tuple[int, ...], batch: int, size: tuple[int, ...], sources: Sequence[tuple[int, ...]]
) -> Layout | None:
    """Read an output (L, N, C)."""
    if len(shape) != 3 or shape[1] != batch:
        return None
    layout = infer_layout((batch, shape[0], shape[2]), batch, size, sources)
    if layout is None or layout.kind not in ("tokens", "channels_last"):
        return None
    return replace(layout, kind="sequence_first", assumed=False)


def readings(shape: tuple[int, ...], size: tuple[int, ...], layout: Layout) -> list[Layout]:
    """List the other ways to read an output: with its axes exchanged, or its grid elsewhere among the tokens."""
    if layout.kind == "sequence_first":
        batch_first = readings((shape[1], shape[0], shape[2]), size, replace(layout, kind="tokens"))
        return [
            replace(option, kind="sequence_first")
            for option in batch_first
            if option.kind in ("tokens", "channels_last")
        ]
    options: list[Layout] = []
    if are_tokens(shape, size):
        options = [
            *(Layout("tokens", tokens.grid, tokens.prefix) for tokens in _token_grids(shape[1], size)),
            *(Layout("tokens_last", tokens.grid) for tokens in _token_grids(shape[2], size) if not tokens.prefix),
        ]
        options += [replace(option, prefix=0) for option in options if option.prefix]
    else:
        options = [Layout("channels_first", shape[2:]), Layout("channels_last", shape[1:-1])]
        options = [option for option in options if option.grid == layout.grid or _fits(option.grid, size)]
        if len(size) == 1 and layout.kind == "channels_last":
            lengths = range(max(shape[1] - _MOST_PREFIX_OF_SIGNALS, 2), shape[1])
            options += [Layout("tokens", (length,), shape[1] - length) for length in lengths]
    if layout.kind == "tokens":
        spare = shape[1] - math.prod(layout.grid)
        options += [Layout("tokens", layout.grid, prefix) for prefix in range(spare + 1)]
    options = [replace(option, extent=layout.extent) for option in options]
    plain = replace(layout, assumed=False)
    return [option for option in dict.fromkeys(options) if option != plain]


def are_tokens(shape: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Tell whether an output has all its cells along one axis, as tokens."""
    return len(shape) == 3 and len(size) > 1


def _signal_by_sources(
    shape: tuple[int, ...], size: tuple[int, ...], sources: Sequence[tuple[int, ...]]
) -> list[Layout]:
    """Read a signal's tokens as one of the grids it was computed from, after a few prefix tokens."""
    if len(size) != 1:
        return []
    spare = [(grid, shape[1] - math.prod(grid)) for grid in sources if grid != NO_GRID]
    return [Layout("tokens", grid, prefix) for grid, prefix in spare if 0 < prefix <= _MOST_PREFIX_OF_SIGNALS]


def _tokens_by_sources(shape: tuple[int, ...], sources: Sequence[tuple[int, ...]]) -> Layout | None:
    """Read tokens as one of the grids they were computed from."""
    kinds: list[tuple[Literal["tokens", "tokens_last"], int]] = [("tokens", shape[1])]
    if shape[1] > 1:  # a single token, such as the class token alone, is not a map with one channel
        kinds.append(("tokens_last", shape[2]))
    readings = [
        Layout(kind, grid, prefix)
        for grid in sources
        if grid != NO_GRID
        for kind, length in kinds
        if 0 <= (prefix := length - math.prod(grid)) <= (MOST_PREFIX_TOKENS if kind == "tokens" else 0)
    ]
    usual = [reading for reading in readings if reading.prefix <= _USUAL_PREFIX] or readings
    return replace(usual[0], assumed=len(usual) > 1) if usual else None


def _tokens_by_size(shape: tuple[int, ...], size: tuple[int, ...]) -> Layout | None:
    """Read tokens by the patch grids that the input's size allows."""
    rows = _token_grids(shape[1], size)
    columns = [tokens for tokens in _token_grids(shape[2], size) if not tokens.prefix and shape[1] > 1]
    # Tokens before channels is by far the usual order; use the other only if it alone divides the input.
    assumed = bool(rows and columns)
    if rows and (_is_clear(rows) or not _is_exact(columns)):
        return Layout("tokens", rows[0].grid, rows[0].prefix, assumed)
    return Layout("tokens_last", columns[0].grid, columns[0].prefix, assumed) if columns else None


def _is_exact(grids: list[_TokenGrid]) -> bool:
    """Tell whether the first grid's patches divide the input without a remainder."""
    return bool(grids) and grids[0].exact


def _is_clear(grids: list[_TokenGrid]) -> bool:
    """Tell whether the first grid is exact and follows at most the usual prefix tokens."""
    return _is_exact(grids) and grids[0].prefix <= _USUAL_PREFIX


@dataclass(frozen=True)
class Reading:
    """How one call's output is laid out, and how certain that is.

    Attributes:
        layout: the layout; None if the output has no grid.
        certain: True if a convolution, pooling or resizing produced the grid.
        tentative: True if the layout counts only after a measurement confirms it.
        elsewhere: True if a measurement showed that the cells lie elsewhere than the shape suggests.
        unsure: True if the position of the cells could not be measured.
        measured: True if only a measurement shows the position of the cells, which holds for these weights.
    """

    layout: Layout | None = None
    certain: bool = False
    tentative: bool = False
    elsewhere: bool = False
    unsure: bool = False
    measured: bool = False


Readings: TypeAlias = tuple[Reading, ...]
"""One reading for each call of a trace."""


def read_layouts(trace: Trace) -> Readings:
    """Read the layout of each output; the layout of tokens follows from the grids that they were computed from."""
    graph, size = trace.graph, trace.size
    rank = len(size)
    resized_size = _first_convolution_input(trace) or size  # the model may have resized its input
    fitting: set[int | None] = set()

    # Both functions return the grid that an operation itself shows, if any, and which operations to search before it.
    def grid_source(number: int) -> tuple[tuple[int, ...] | None, Sequence[int | None]]:
        operation = graph[number]
        queries = graph.queries_of(number)
        if queries:
            from_input = [query for query in queries if graph.is_from_input(query)]
            return (None if from_input else NO_GRID), from_input
        if queries is not None or (operation.is_choice and graph.is_from_input(number)):
            return NO_GRID, operation.inputs
        shape = operation.shape if operation.is_spatial else None
        if shape is None or len(shape) != rank + 2 or max(shape[2:]) < 2:
            return None, operation.inputs
        # A grid out of proportion may be real (the model resizes its input) or not (attention between tokens).
        return shape[2:], operation.inputs if infer_layout(shape, 1, size) is None else ()

    def resampled_source(number: int) -> tuple[tuple[int, ...] | None, Sequence[int | None]]:
        operation = graph[number]
        shape = operation.shape if operation.is_spatial and operation.moves_over_cells else None
        if (
            shape is not None and len(shape) == rank + 3 and shape[2] == 1
        ):  # PyTorch pools a signal as an image of height 1
            shape = shape[:2] + shape[3:]
        grid = shape[2:] if shape is not None and len(shape) == rank + 2 else None
        return grid, () if grid is not None or number in fitting else operation.inputs

    grids: Lineage[tuple[int, ...]] = Lineage(grid_source)
    resampled: Lineage[tuple[int, ...]] = Lineage(resampled_source)
    by_output: dict[int, Reading] = {}
    readings: list[Reading] = []
    strided: set[tuple[int, ...]] = set()  # the grids that follow from the input by usual strides along each axis
    for call in trace.calls:
        size = call.padded or size
        if call.output is None or graph.is_attention(call.operation, len(call.shape)):
            readings.append(Reading())
            continue
        if call.output not in by_output:  # otherwise a module inside this one has already returned it
            nearest = grids.nearest(call.operation)
            learned = graph.is_learned(call.operation)  # a detached tensor looks as if it were learned, too
            resampled_grids = resampled.nearest(call.operation)
            before, most = (strided, _MOST_MERGED) if strided else ({resized_size}, _MOST_OF_PATCH)
            strided |= {grid for grid in resampled_grids if any(_shrinks(fine, grid, most) for fine in before)}
            resampled_grids = [grid for grid in resampled_grids if grid in strided or not is_uneven(grid, resized_size)]
            reading = _read(call.shape, size, resized_size, nearest, resampled_grids, learned=learned)
            by_output[call.output] = reading
            # An output that is also computed from learned vectors, as in a Perceiver, does not get its grid from them.
            if reading.layout is not None and not reading.layout.assumed and not learned:
                grids.add(call.operation, reading.layout.grid)
                if not reading.certain:
                    fitting.add(call.operation)
        readings.append(by_output[call.output])
    return tuple(readings)


def _read(
    shape: tuple[int, ...],
    size: tuple[int, ...],
    resized_size: tuple[int, ...],
    sources: Sequence[tuple[int, ...]],
    resampled_grids: Sequence[tuple[int, ...]],
    *,
    learned: bool,
) -> Reading:
    """Read one output; ``resampled_grids`` are those of the convolutions, poolings and resizings before it."""
    layout = infer_layout(shape, 1, size, sources)
    tentative, certain = layout is not None and learned, False
    are_maps = not are_tokens(shape, size) and shape[0] == 1 and max(shape[2:], default=1) > 1
    if are_maps and shape[2:] in resampled_grids:
        layout = Layout("channels_first", shape[2:])
        certain = shape[2:] != shape[1:-1]  # otherwise the channels could come first or last
    if layout is None:
        layout = follow(shape, 1, resized_size, sources)
        tentative = layout is not None
    return Reading(layout, certain, tentative)


def _first_convolution_input(trace: Trace) -> tuple[int, ...]:
    """Return the input size of the first convolution; empty if there is none."""
    convolutions = (call.convolution for call in trace.calls if call.convolution is not None)
    return next((convolution.size for convolution in convolutions if convolution.size), ())


def is_whole(layout: Layout, size: tuple[int, ...]) -> bool:
    """Tell whether a grid covers the (possibly padded) input at usual strides, without losing an edge."""
    extent = layout.extent or ((0.0, 1.0),) * len(size)
    shares = [side / (end - start) / cells for side, (start, end), cells in zip(size, extent, layout.grid, strict=True)]
    return all(any(abs(share / stride - 1) <= EXACT for stride in STRIDES) for share in shares)


def channels_of(shape: tuple[int, ...], layout: Layout | None) -> int:
    """Return how many channels an output has; 0 if it has no grid."""
    if layout is None:
        return 0
    return shape[1 if layout.kind in ("channels_first", "tokens_last") else -1]


def plain_layout(shape: tuple[int, ...], batch: int, size: tuple[int, ...]) -> Layout | None:
    """Return the layout of an output (N, C, *grid) whose grid is the input at a usual stride; None for any other shape.

    The channels certainly come first only if all operations before the output leave cells in their places.
    """
    if len(shape) != len(size) + 2 or shape[0] != batch:
        return None
    layout = Layout("channels_first", shape[2:])
    return layout if _fits(shape[2:], size) and is_whole(layout, size) else None
