"""Networks that end in several branches: the other branches besides the explained one.

Each function takes the named calls with more than one channel whose cells influence the score, in execution order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from camkit.layers.graph import Graph, contains
from camkit.layers.trace import Call, Trace
from camkit.types import Layout


def twins(graph: Graph, best: Call, fit: Sequence[Call], layouts: Mapping[Call, Layout | None]) -> list[Call]:
    """Return the best layer and the branches with the same grid, none computed from another.

    Empty if there is no other branch, as in most networks.
    """
    beside: dict[int | None, Call] = {}
    grid = layouts[best]
    for call in reversed(ends_beside(graph, best, fit)):
        layout = layouts[call]
        if layout is not None and grid is not None and layout.grid == grid.grid:
            beside.setdefault(call.output, call)
    return [*reversed(beside.values()), best] if beside else []


def shared(trace: Trace, branches: Sequence[Call], fit: Sequence[Call]) -> Call | None:
    """Return the layer that all branches were computed from, if each branch is a single layer.

    The keys and values of an attention pool are an example. None if a branch is longer: no layer can stand for all.
    """
    if not branches:
        return None
    paths = [trace.graph.ancestors(call.operation) for call in branches]
    common = -1
    for path in paths:
        common &= path
    sources = [call for call in fit if call.is_among(common)]
    if not sources:
        return None
    weighted = [call for call in trace.calls if call.weighted]
    longest = max(len({call.module for call in weighted if call.is_among(path & ~common)}) for path in paths)
    return max(sources, key=lambda call: call.finished) if longest <= 1 else None


def ends_beside(graph: Graph, best: Call, fit: Sequence[Call]) -> list[Call]:
    """Return the last layers that the score also depends on, which lie on no path to or from the best layer."""
    if best.operation is None:
        return []
    before = graph.ancestors(best.operation)
    others = [call for call in fit if call.output != best.output]
    others = [call for call in others if call.operation is not None and not call.is_among(before)]
    on_paths = graph.ancestors(
        *(number for call in others if call.operation is not None for number in graph[call.operation].inputs)
    )
    return [
        call
        for call in others
        if not call.is_among(on_paths) and not contains(graph.ancestors(call.operation), best.operation)
    ]
