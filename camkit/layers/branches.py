"""The branches that a network ends in, beside the one that is explained.

Every function takes named calls with more than one channel whose cells influence the score, in execution order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from camkit.layers.graph import Graph, contains
from camkit.layers.trace import Call, Trace
from camkit.types import Layout


def twins(graph: Graph, best: Call, fit: Sequence[Call], layouts: Mapping[Call, Layout | None]) -> list[Call]:
    """Return the branches beside the best layer that have its grid and do not depend on one another, and that layer.

    Empty if nothing is beside it: most networks end in one place.
    """
    beside: dict[int | None, Call] = {}
    grid = layouts[best]
    for call in reversed(ends_beside(graph, best, fit)):
        layout = layouts[call]
        if layout is not None and grid is not None and layout.grid == grid.grid:
            beside.setdefault(call.output, call)
    return [*reversed(beside.values()), best] if beside else []


def shared(trace: Trace, branches: Sequence[Call], fit: Sequence[Call]) -> Call | None:
    """Return what the branches were computed from, if each is a single layer, such as an attention pool's keys.

    None if they are longer: then none of them can stand for the others.
    """
    if not branches:
        return None
    ways = [trace.graph.ancestors(call.operation) for call in branches]
    common = -1
    for way in ways:
        common &= way
    known = [call for call in fit if call.is_among(common)]
    if not known:
        return None
    weighted = [call for call in trace.calls if call.weighted]
    longest = max(len({call.module for call in weighted if call.is_among(way & ~common)}) for way in ways)
    return max(known, key=lambda call: call.finished) if longest <= 1 else None


def ends_beside(graph: Graph, best: Call, fit: Sequence[Call]) -> list[Call]:
    """Return the last layers that the score depends on as well, on none of the ways to or from the best one."""
    if best.operation is None:
        return []
    before = graph.ancestors(best.operation)
    others = [call for call in fit if call.output != best.output]
    others = [call for call in others if call.operation is not None and not call.is_among(before)]
    on_the_way = graph.ancestors(
        *(number for call in others if call.operation is not None for number in graph[call.operation].inputs)
    )
    return [
        call
        for call in others
        if not call.is_among(on_the_way) and not contains(graph.ancestors(call.operation), best.operation)
    ]
