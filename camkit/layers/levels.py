"""A detector's layers: the inputs of its neck, from which the boxes of all sizes are computed.

A backbone makes coarser and coarser grids. A neck mixes them: its cells come from a coarser grid as well. Heat is made
where the neck begins. At its end, a box's score depends on a few cells around the middle of the box; in the backbone,
it depends on the object. Zhao & Chan 2023 (ODAM, arXiv:2304.06354) differentiate the score of one box in this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from camkit.layers.trace import Trace, TracedCall
from camkit.types import Layout

_LEAST_SIDE = 2
"""A grid with fewer cells along an axis is a summary of the picture, such as the gate of squeeze-and-excitation."""


def levels_of(trace: Trace, layouts: Mapping[TracedCall, Layout | None]) -> list[TracedCall]:
    """Return the inputs of a detector's neck, from the finest grid to the coarsest; empty if it has no neck.

    Each is the last layer of its grid before the neck that a path leads from to the scores, past the coarser ones.

    Args:
        trace: the trace of a pass, whose ``end`` are the scores of the boxes.
        layouts: the layout of each call's output that can be explained.
    """
    grids = {
        call: math.prod(layout.grid) for call, layout in layouts.items() if layout is not None and _is_grid(layout)
    }
    backbone, necks = _split(trace, grids)
    if not necks or trace.end is None:
        return []
    before_necks = trace.graph.ancestors(*(call.operation for call in necks))
    usable = [call for call in backbone if call.is_among(before_necks) and call.alone]
    levels: list[TracedCall] = []
    for cells in sorted({grids[call] for call in usable}):
        reaching = trace.before_the_score(*levels)
        last = next((call for call in reversed(usable) if grids[call] == cells and call.is_among(reaching)), None)
        if last is not None:
            levels.insert(0, last)
    beside = trace.before_the_score(*levels) & trace.graph.inputs
    return levels if len(levels) > 1 and not beside else []


def last_before_all_boxes(
    trace: Trace, layouts: Mapping[TracedCall, Layout | None], takes_one: Callable[[TracedCall, Layout], bool]
) -> TracedCall | None:
    """Return the last layer with a grid that all boxes are computed from, and from nothing else of the picture.

    If each box is computed from one cell of a layer (``takes_one``), as at the end of OWL-ViT, this cell would have all
    the heat: the layer lies before.
    """
    for call in reversed(trace.calls):
        layout = layouts.get(call)
        if layout is None or trace.end is None or not call.alone or not call.name:
            continue
        beside = trace.before_the_score(call) & trace.graph.inputs
        if not beside and not takes_one(call, layout):
            return call
    return None


def _is_grid(layout: Layout) -> bool:
    return min(layout.grid) >= _LEAST_SIDE


def _split(trace: Trace, grids: Mapping[TracedCall, int]) -> tuple[list[TracedCall], list[TracedCall]]:
    """Return the calls of the backbone, and the calls that mix grids.

    A call mixes grids if its cells come from a coarser grid, and so does the first layer with weights whose output has
    no grid, but which is computed from several grids, none of them by way of another. All that is computed from these
    is behind the backbone.
    """
    backbone: list[TracedCall] = []
    necks: list[TracedCall] = []
    mixing = 0
    of_grid: dict[int, int] = {}
    """The operations whose outputs have a grid of so many cells."""
    for call in trace.calls:
        if call.operation is None:
            continue
        ancestors = trace.graph.ancestors(call.operation)
        is_behind, cells = bool(ancestors & mixing), grids.get(call)
        if cells is not None:
            mixes = any(other < cells and ancestors & members for other, members in of_grid.items())
            of_grid[cells] = of_grid.get(cells, 0) | 1 << call.operation
        else:
            before = [] if is_behind else [other for other in backbone if other.is_among(ancestors)]
            mixes = call.weighted and call.output is not None and _joins(trace, call, before, grids)
        if mixes:
            necks.append(call)
            mixing |= 1 << call.operation
        elif not is_behind and cells is not None:
            backbone.append(call)
    return backbone, necks


def _joins(trace: Trace, call: TracedCall, before: list[TracedCall], grids: Mapping[TracedCall, int]) -> bool:
    """Tell whether a call without a grid is computed from a finer grid by a path past all coarser ones."""
    if not before or call.operation is None:
        return False
    coarsest = min(grids[other] for other in before)
    past = trace.before(call.operation, *(other for other in before if grids[other] == coarsest))
    return any(grids[other] > coarsest and other.is_among(past) for other in before)
