"""Reads each layer's output as a grid of cells, by its shape and, where a shape leaves a doubt, by a measurement.

Most networks are convolutions, normalisations and poolings, which leave every cell in its place. For the output of any
other operation, ``order`` changes the picture at random places and looks whether the cells change there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from camkit.layers.order import LayoutReading, Verdict, find_orders
from camkit.layers.trace import CONVOLUTIONS, Trace, TracedCall, likeness
from camkit.types import Extent, Layout, LayoutKind

MOST_CELLS_LOST = 2.5
"""Cells that a grid may have fewer than the input's size divided by the stride: an unpadded 3 x 3
convolution loses two, and the half absorbs rounding."""

_MOST_PREFIX_TOKENS = 16
"""The most class, distillation and register tokens expected before a grid: DINOv2 with registers has 5, and a much
larger number would let almost any sequence length pass as a grid."""

_MOST_TOKENS_BESIDE = 128
"""The most tokens beside those of a grid that an earlier layer has: YOLOS has 100 detection tokens."""


LayoutReadings: TypeAlias = Mapping[TracedCall, LayoutReading]
"""The reading of each call of a trace, in the trace's order."""


def read_layouts(trace: Trace) -> LayoutReadings:
    """Read the layout of each output of a pass; the model runs a few more times if a shape leaves a doubt."""
    size, extent, received = _received(trace)
    options: dict[TracedCall, list[Layout]] = {}
    readings: dict[TracedCall, LayoutReading] = {}
    grids: set[tuple[int, ...]] = set()
    cells = 0  # of the last grid that convolutions returned
    for call in trace.calls:
        is_first = call.output is not None and trace.by_output[call.output][0] is call
        if not is_first or not call.name or call.is_among(trace.graph.attention):
            continue
        if call.is_among(trace.graph.kept):
            grid, fits = call.shape[2:], _fits(call.shape[2:], size)
            # A kernel as large as the grid ends it, as in timm's VGG; if the picture is not square, few cells remain.
            is_grid = math.prod(grid) > 1 and (fits or min(grid) > 1 or 4 * math.prod(grid) >= cells)
            if is_grid and len(call.shape) == len(size) + 2 and call.shape[0] == 1:
                readings[call] = LayoutReading(
                    Layout("channels_first", grid, extent=extent), "sure" if fits else "unsure"
                )
                grids.add(grid)
                cells = math.prod(grid)
        else:
            layouts = _layouts(call.shape, size, grids)
            # Some models crop what they padded.
            if layouts:
                parts = dict.fromkeys((extent, ()))
                options[call] = [replace(layout, extent=part) for part in parts for layout in layouts]
    readings |= find_orders(trace, options)
    none = LayoutReading()
    read = {call: readings.get(trace.by_output[call.output][0], none) for call in trace.calls}
    if received == "elsewhere":
        return {
            call: reading if reading.layout is None else LayoutReading(None, received) for call, reading in read.items()
        }
    if received == "unsure":
        return {
            call: replace(reading, verdict=received) if reading.layout and reading.verdict == "sure" else reading
            for call, reading in read.items()
        }
    return read


def _received(trace: Trace) -> tuple[tuple[int, ...], Extent, Verdict]:
    """Return the size of the picture that the first convolution gets, and the part of its grid that is the input.

    A model may resize, pad or crop its picture first. The part is smaller than the grid if the model pads the picture,
    and larger if it crops it. It includes pixels that whole patches leave over, but not the edges that are added to fit
    the kernel.

    Returns:
        The size, the part, and whether cells lie where the part says: "elsewhere" if the model mirrors or turns the
        picture, "unsure" if that cannot be seen or depends on the picture.
    """
    if trace.stem is None:
        return trace.size, (), "sure"
    convolution, received = trace.stem
    assert isinstance(convolution, CONVOLUTIONS)
    if received.dim() != trace.leaf.dim() or len(received) != 1:
        return trace.size, (), "sure"
    size = tuple(received.shape[2:])
    # Where a model subtracts the picture's own mean, gradients do not show where pixels go.
    is_same = received.shape == trace.leaf.shape and likeness(received, trace.leaf) > 0.99
    mapping = (torch.eye(len(size)), torch.zeros(len(size))) if is_same else _mapping(received, trace.leaf)
    if mapping is None:
        return trace.size, (), "unsure" if received.requires_grad or size != trace.size else "sure"
    steps, offsets = mapping
    along = steps.diagonal()
    # A step down the picture leads down, and at most a tenth as far to the side.
    if float(along.amin()) < 1e-3 or float((steps - along.diag()).abs().amax()) > 0.1 * float(along.amin()):
        return trace.size, (), "elsewhere"
    padding = (0,) * len(size) if isinstance(convolution.padding, str) else convolution.padding
    more = [max(0, added - kernel // 2) for added, kernel in zip(padding, convolution.kernel_size, strict=True)]
    size = tuple(side + 2 * added for side, added in zip(size, more, strict=True))  # FCN pads by 100 (Long et al. 2015)
    extent = []
    geometry = zip(size, trace.size, convolution.kernel_size, convolution.stride, more, strict=True)
    for axis, (whole, side, kernel, stride, added) in enumerate(geometry):
        start = round(added + float(offsets[axis]) + 0.5 - float(along[axis]) / 2, 1)
        end = round(start + float(along[axis]) * side, 1)
        count = math.floor((whole - kernel) / stride) + 1
        reach = count * stride if kernel == stride and not any(padding) else whole
        fits = 0 <= whole - (end - start) < kernel
        extent.append((0.0, whole / reach) if fits else (start / reach, end / reach))
    before = trace.graph.ancestors(trace.graph.number(received.grad_fn))
    verdict: Verdict = "unsure" if before & trace.graph.sampling else "sure"
    return size, () if all(part == (0.0, 1.0) for part in extent) else tuple(extent), verdict


def _mapping(received: Tensor, picture: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return where the pixels of a picture lie in what a convolution gets, as a matrix and an offset; None if unknown.

    If each value of what it gets is multiplied by its place, the gradient of their sum at a pixel, divided by that of
    the plain sum, is the place that the pixel reached.
    """
    if not received.requires_grad:
        return None
    values = received.sum((0, 1))
    places = [
        torch.arange(side).reshape(-1, *[1] * (values.dim() - 1 - axis)) for axis, side in enumerate(values.shape)
    ]
    sums = [values.sum(), *((values * place.to(values)).sum() for place in places)]
    gradients = [torch.autograd.grad(each, picture, retain_graph=True, allow_unused=True)[0] for each in sums]
    if any(gradient is None for gradient in gradients):
        return None
    plain, *weighted = [gradient[0].sum(0).double().cpu() for gradient in gradients if gradient is not None]
    gains = plain.abs()
    if not gains.any():
        return None
    once = 1.5 * gains[gains > 0].quantile(0.1)  # a reflected pixel reaches several places, with a larger gradient
    pixels = torch.nonzero((gains > 0) & (gains < once))
    reached = torch.stack([places[tuple(pixels.T)] for places in weighted], 1) / plain[tuple(pixels.T)][:, None]
    known = torch.cat([pixels, torch.ones(len(pixels), 1)], 1).double()
    fitted = torch.linalg.lstsq(known, reached).solution
    is_linear = float((known @ fitted - reached).abs().amax()) < 1  # unlike a picture that was rolled
    return (fitted[:-1].T, fitted[-1]) if is_linear else None


def _layouts(shape: tuple[int, ...], size: tuple[int, ...], grids: Collection[tuple[int, ...]]) -> list[Layout]:
    """Return every way to read an output of this shape as a grid, the likely ones first.

    Args:
        shape: the shape of the output, for one picture.
        size: the size of the picture.
        grids: the grids of earlier layers.
    """
    found: list[Layout] = []
    if len(shape) == len(size) + 2 and shape[0] == 1:
        if _fits(shape[2:], size):
            found.append(Layout("channels_first", shape[2:]))
        if _fits(shape[1:-1], size):
            found.append(Layout("channels_last", shape[1:-1]))
    counts: dict[LayoutKind, int] = {}
    if len(shape) == 3 and shape[0] == 1:
        counts = {"tokens": shape[1], "tokens_last": shape[2]}
    elif len(shape) == 3 and shape[1] == 1:
        counts = {"sequence_first": shape[0]}
    for kind, count in counts.items():
        for grid, beside in _token_grids(count, size, grids):
            if kind != "tokens_last" or (not beside and shape[1] > 1):
                between = range(1, beside) if grid in grids else ()
                found += [Layout(kind, grid, prefix) for prefix in dict.fromkeys((beside, 0, *between))]
    frames_last = (1, 2, 0)
    return found + [replace(layout, order=frames_last) for layout in found if layout.has_tokens and len(size) == 3]


def _token_grids(
    count: int, size: tuple[int, ...], grids: Collection[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the grids that a number of tokens can hold, and how many tokens are beside them; the likely ones first."""
    beside = {grid: count - math.prod(grid) for grid in grids}
    yield from sorted(
        ((grid, more) for grid, more in beside.items() if 0 <= more <= _MOST_TOKENS_BESIDE), key=lambda item: item[1]
    )
    if len(size) > 1:
        yield from ((grid, more) for grid, more in _cut_grids(count, size) if grid not in grids)


@functools.lru_cache
def _cut_grids(count: int, size: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
    """Return the grids of patches that a number of tokens can hold, and the tokens before them.

    Patches that divide the input and short prefixes come first.
    """
    frames, pixels = size[:-2], size[-2:]
    options = {
        (any(side % patch for side in pixels), prefix, grid)
        for patch in range(1, min(pixels) + 1)
        for at_once in ((1, 2, 4) if frames else (1,))  # a token is one frame in TimeSformer, two in VideoMAE
        for cells in (tuple(side // patch for side in pixels), tuple(-(-side // patch) for side in pixels))
        for grid in ((*(side // at_once for side in frames), *cells),)
        if 0 <= (prefix := count - math.prod(grid)) <= _MOST_PREFIX_TOKENS and math.prod(grid) > 1
    }
    return [(grid, prefix) for _, prefix, grid in sorted(options)]


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
    if len(shape) == 3 and shape[0] != batch and shape[1] == batch:
        shape = (shape[0], 1, shape[2])
    elif shape[:1] == (batch,):
        shape = (1, *shape[1:])
    return next((layout for layout in _layouts(shape, size, ()) if layout.kind != "tokens_last"), None)


def _fits(grid: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Tell whether a grid can cover the input at one integer stride, except for a few cells lost at the edges."""
    if len(grid) != len(size) or math.prod(grid) < 2:
        return False
    if len(size) == 3:  # a clip's time has its own stride
        return grid[0] <= size[0] and _fits(grid[1:], size[1:])
    strides = [side / cells for cells, side in zip(grid, size, strict=True)]
    if max(strides) > 2 * min(strides):  # only an edge of a grid
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
