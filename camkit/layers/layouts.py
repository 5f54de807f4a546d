"""The second stage: how each output could be a grid.

That is read from its shape, the input's size and what it was computed from. Whatever a layer returns becomes
(N, C, *grid).
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
"""More tokens than this before the grid are not taken for class, distillation or register tokens."""

_MOST_PREFIX_OF_SIGNALS = 4
"""Tokens before those of a signal, whose number says nothing of how many these are."""

_USUAL_PREFIX = 2
"""Tokens before the grid up to which the first of two possible readings is taken: class and distillation."""

_MOST_CELLS_LOST = 2.5
"""Cells that unpadded convolutions may cost a grid, against the input's size divided by the stride."""


_MOST_DISTORTION = 2.0
"""How much longer a cell may be than wide; beyond that what is left of a grid is an edge of it."""


NO_GRID: tuple[int, ...] = ()
"""Stands among the grids an output was computed from, for what has no certain place in the picture: latent vectors, or
tokens picked or weighed together."""

STRIDES = (1, 2, 4, 8, 16, 32)
"""Pixels, along each axis, that a cell of a grid may stand for."""

EXACT = 0.02
"""Share of a grid's size below which edges do not count."""

_MOST_MERGED = 4
"""Cells of a grid, along each axis, that one step joins to a cell of the next, or makes of it."""


def is_distorted(grid: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Tell whether cells of a grid over this size would be much longer than wide, as those of an edge left over are."""
    strides = [s / g for g, s in zip(grid, size, strict=True)]
    return max(strides) > _MOST_DISTORTION * min(strides)


def _fits(grid: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Tell whether a grid can be the input seen at one whole-numbered stride, short of a few cells at the edges."""
    if len(grid) != len(size) or math.prod(grid) < 2 or min(grid) < 1 or is_distorted(grid, size):
        return False
    longest = max(range(len(size)), key=lambda axis: size[axis])
    guess = size[longest] / grid[longest]
    return any(
        all(s / stride - _MOST_CELLS_LOST <= g <= math.ceil(s / stride) for g, s in zip(grid, size, strict=True))
        for stride in range(max(1, int(guess / 2)), math.ceil(guess) + 1)
    )


def _is_step(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Tell whether merging, or splitting, as many cells along each axis makes the one grid of the other."""

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
    """List patch grids among ``length`` tokens: first patches that divide the input, then few tokens before them."""
    found = [
        _TokenGrid(grid, prefix, exact=all(s % patch == 0 for s in size))
        for patch in range(1, min(size) + 1)
        for grid in {tuple(s // patch for s in size), tuple(-(-s // patch) for s in size)}
        if 0 <= (prefix := length - math.prod(grid)) <= MOST_PREFIX_TOKENS and math.prod(grid) > 1
    ]
    return sorted(found, key=lambda option: (not option.exact, option.prefix))


def infer_layout(
    shape: tuple[int, ...], batch: int, size: tuple[int, ...], seen: Sequence[tuple[int, ...]] = ()
) -> Layout | None:
    """Decide which axes of a layer's output are its grid.

    Args:
        shape: of the layer's output.
        batch: images in the input; a layer with another first dimension cannot be mapped onto pictures.
            Tokens may come as (L, batch, C), as PyTorch's own attention has them.
        size: the input's H x W (or its L, or D x H x W).
        seen: grids of the outputs this one was computed from, the nearest first. A shape alone does not tell tokens
            from channels; it is read as one of these grids, or as what a step of merging makes of one. Any other
            number of tokens, that of latent vectors for example, only looks like a grid.

    Returns:
        The layout, or None when the output has no axes in proportion to the input's.

    >>> str(infer_layout((1, 2048, 7, 7), 1, (224, 224)))
    'channels_first 7x7'
    >>> str(infer_layout((1, 7, 11, 768), 1, (224, 336)))
    'channels_last 7x11'
    >>> str(infer_layout((1, 197, 192), 1, (224, 224)))
    'tokens 14x14 after 1'
    >>> str(infer_layout((1, 64, 256), 1, (128, 128))), str(infer_layout((1, 64, 256), 1, (128, 128), seen=[(16, 16)]))
    ('tokens 8x8', 'tokens_last 16x16')

    """
    if not shape or shape[0] != batch:
        return _sequence_first(shape, batch, size, seen)
    if len(shape) == len(size) + 2:
        first, last = shape[2:], shape[1:-1]
        kinds: list[tuple[Literal["channels_first", "channels_last"], tuple[int, ...]]]
        kinds = [("channels_first", first), ("channels_last", last)]
        fitting = [Layout(kind, grid) for kind, grid in kinds if _fits(grid, size)]
        known = [layout for layout in fitting if layout.grid in seen] or _signal_as_seen(shape, size, seen)
        return next(iter(known or fitting), None)
    if not are_tokens(shape, size):
        return None
    as_seen = _tokens_as_seen(shape, seen)
    if as_seen is not None or not seen:
        return as_seen or _tokens_by_size(shape, size)
    by_size = None if NO_GRID in seen else _tokens_by_size(shape, size)
    return by_size if by_size is not None and any(_is_step(grid, by_size.grid) for grid in seen) else None


def follow(shape: tuple[int, ...], batch: int, size: tuple[int, ...], seen: Sequence[tuple[int, ...]]) -> Layout | None:
    """Guess the layout of an output of other proportions than the input from those it was computed from.

    As in a model that resizes its input, or adds more than a few tokens. To be confirmed by a measurement.
    """
    if NO_GRID in seen or not shape or shape[0] != batch:
        return None
    if are_tokens(shape, size):
        fewer = [grid for grid in seen if 1 < math.prod(grid) <= shape[1]]
        return Layout("tokens", fewer[0], shape[1] - math.prod(fewer[0])) if fewer else None
    for kind, grid in (("channels_first", shape[2:]), ("channels_last", shape[1:-1])):
        seen_so = any(_is_step(one, grid) for one in seen if one != NO_GRID)
        if seen_so and math.prod(grid) > 1 and not is_distorted(grid, size):
            return Layout(cast("Literal['channels_first', 'channels_last']", kind), grid)
    return None


def _sequence_first(
    shape: tuple[int, ...], batch: int, size: tuple[int, ...], seen: Sequence[tuple[int, ...]]
) -> Layout | None:
    if len(shape) != 3 or shape[1] != batch:
        return None
    turned = infer_layout((batch, shape[0], shape[2]), batch, size, seen)
    by_cell = turned is not None and turned.kind in ("tokens", "channels_last")
    return replace(turned, kind="sequence_first", assumed=False) if turned is not None and by_cell else None


def readings(shape: tuple[int, ...], size: tuple[int, ...], layout: Layout) -> list[Layout]:
    """List other ways to read an output than a layout: its axes exchanged, its grid elsewhere among the tokens."""
    if layout.kind == "sequence_first":
        turned = readings((shape[1], shape[0], shape[2]), size, replace(layout, kind="tokens"))
        return [
            replace(option, kind="sequence_first") for option in turned if option.kind in ("tokens", "channels_last")
        ]
    options: list[Layout] = []
    if are_tokens(shape, size):
        options = [
            *(Layout("tokens", found.grid, found.prefix) for found in _token_grids(shape[1], size)),
            *(Layout("tokens_last", found.grid) for found in _token_grids(shape[2], size) if not found.prefix),
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
    """Tell whether an output has its grid, if any, in one axis."""
    return len(shape) == 3 and len(size) > 1


def _signal_as_seen(shape: tuple[int, ...], size: tuple[int, ...], seen: Sequence[tuple[int, ...]]) -> list[Layout]:
    """Read a signal's tokens as those of a grid seen before, after a few others."""
    if len(size) != 1:
        return []
    spare = [(grid, shape[1] - math.prod(grid)) for grid in seen if grid != NO_GRID]
    return [Layout("tokens", grid, prefix) for grid, prefix in spare if 0 < prefix <= _MOST_PREFIX_OF_SIGNALS]


def _tokens_as_seen(shape: tuple[int, ...], seen: Sequence[tuple[int, ...]]) -> Layout | None:
    kinds: list[tuple[Literal["tokens", "tokens_last"], int]] = [("tokens", shape[1])]
    if shape[1] > 1:  # one token, such as the class token by itself, is no map of one channel
        kinds.append(("tokens_last", shape[2]))
    readings = [
        Layout(kind, grid, prefix)
        for grid in seen
        if grid != NO_GRID
        for kind, length in kinds
        if 0 <= (prefix := length - math.prod(grid)) <= (MOST_PREFIX_TOKENS if kind == "tokens" else 0)
    ]
    usual = [reading for reading in readings if reading.prefix <= _USUAL_PREFIX] or readings
    return replace(usual[0], assumed=len(usual) > 1) if usual else None


def _tokens_by_size(shape: tuple[int, ...], size: tuple[int, ...]) -> Layout | None:
    rows = _token_grids(shape[1], size)
    columns = [found for found in _token_grids(shape[2], size) if not found.prefix and shape[1] > 1]
    # Channels after tokens is by far the usual order; the other is taken where it alone divides the input.
    assumed = bool(rows and columns)
    if rows and (_clear(rows) or not _exact(columns)):
        return Layout("tokens", rows[0].grid, rows[0].prefix, assumed)
    return Layout("tokens_last", columns[0].grid, columns[0].prefix, assumed) if columns else None


def _exact(grids: list[_TokenGrid]) -> bool:
    return bool(grids) and grids[0].exact


def _clear(grids: list[_TokenGrid]) -> bool:
    return _exact(grids) and grids[0].prefix <= _USUAL_PREFIX


@dataclass(frozen=True)
class Reading:
    """How one call's output is read.

    Attributes:
        layout: None if the output has no grid.
        certain: a convolution, pooling or resizing gave the output its grid.
        tentative: the layout counts only if the cells are seen to lie so.
        elsewhere: the cells were seen to lie elsewhere than the shape says.
        unsure: where the cells lie could not be measured.
    """

    layout: Layout | None = None
    certain: bool = False
    tentative: bool = False
    elsewhere: bool = False
    unsure: bool = False


Readings: TypeAlias = tuple[Reading, ...]
"""One for each call of a trace."""


def read_layouts(trace: Trace) -> Readings:
    """Read each output's layout, that of tokens by the grids of the outputs they were computed from."""
    graph, size = trace.graph, trace.size
    rank = len(size)
    resizing_to = _first_convolved(trace) or size  # as the model resized its input
    fitting: set[int | None] = set()

    def computed(number: int) -> tuple[tuple[int, ...] | None, Sequence[int | None]]:
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
        # A grid out of proportion may be one (a model that resizes its input) or not (attention between tokens).
        return shape[2:], operation.inputs if infer_layout(shape, 1, size) is None else ()

    def resized(number: int) -> tuple[tuple[int, ...] | None, Sequence[int | None]]:
        operation = graph[number]
        shape = operation.shape if operation.is_spatial and operation.moves_over_cells else None
        if shape is not None and len(shape) == rank + 3 and shape[2] == 1:  # a signal's pooling is a picture's
            shape = shape[:2] + shape[3:]
        grid = shape[2:] if shape is not None and len(shape) == rank + 2 else None
        return grid, () if grid is not None or number in fitting else operation.inputs

    grids: Lineage[tuple[int, ...]] = Lineage(computed)
    stretched: Lineage[tuple[int, ...]] = Lineage(resized)
    by_output: dict[int, Reading] = {}
    readings: list[Reading] = []
    for call in trace.calls:
        size = call.padded or size
        if call.output is None or graph.is_attention(call.operation, len(call.shape)):
            readings.append(Reading())
            continue
        if call.output not in by_output:  # otherwise it was returned by a module inside this one
            nearest = grids.nearest(call.operation)
            learned = graph.is_learned(call.operation)  # what is behind a detach() looks as if it had been learned
            reading = _read(call.shape, size, resizing_to, nearest, stretched.nearest(call.operation), learned=learned)
            by_output[call.output] = reading
            # What is computed from learned vectors as well, such as a Perceiver's sums, has no grid from these.
            if reading.layout is not None and not reading.layout.assumed and not learned:
                grids.add(call.operation, reading.layout.grid)
                if not reading.certain:
                    fitting.add(call.operation)
        readings.append(by_output[call.output])
    return tuple(readings)


def _read(
    shape: tuple[int, ...],
    size: tuple[int, ...],
    resizing_to: tuple[int, ...],
    nearest: Sequence[tuple[int, ...]],
    stretched: Sequence[tuple[int, ...]],
    *,
    learned: bool,
) -> Reading:
    layout = infer_layout(shape, 1, size, nearest)
    tentative, certain = layout is not None and learned, False
    maps = not are_tokens(shape, size) and shape[0] == 1 and max(shape[2:], default=1) > 1
    if maps and shape[2:] in stretched and not is_distorted(shape[2:], resizing_to):
        layout = Layout("channels_first", shape[2:])
        certain = shape[2:] != shape[1:-1]  # with as many channels as columns it may be either
    if layout is None:
        layout = follow(shape, 1, resizing_to, nearest)
        tentative = layout is not None
    return Reading(layout, certain, tentative)


def _first_convolved(trace: Trace) -> tuple[int, ...]:
    """Return the size of the input of the first convolution; empty if there is none."""
    convolutions = (call.convolution for call in trace.calls if call.convolution is not None)
    return next((convolution.size for convolution in convolutions if convolution.size), ())


def is_whole(layout: Layout, size: tuple[int, ...]) -> bool:
    """Tell whether a grid has as many cells as the input, padded as it may be, at a usual stride: no edge is lost."""
    extent = layout.extent or ((0.0, 1.0),) * len(size)
    shares = [side / (end - start) / cells for side, (start, end), cells in zip(size, extent, layout.grid, strict=True)]
    return any(all(abs(share / stride - 1) <= EXACT for share in shares) for stride in STRIDES)


def channels_of(shape: tuple[int, ...], layout: Layout | None) -> int:
    """Return how many channels an output has; 0 without a grid."""
    if layout is None:
        return 0
    return shape[1 if layout.kind in ("channels_first", "tokens_last") else -1]


def plain_layout(shape: tuple[int, ...], batch: int, size: tuple[int, ...]) -> Layout | None:
    """Return the layout of an output (N, C, *grid) whose grid is the input at a usual stride; None for any other.

    That the channels come first is certain only if all operations before it leave cells in their places.
    """
    if len(shape) != len(size) + 2 or shape[0] != batch:
        return None
    layout = Layout("channels_first", shape[2:])
    return layout if _fits(shape[2:], size) and is_whole(layout, size) else None
