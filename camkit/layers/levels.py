"""A detector's layers: the inputs of its head or of its neck, from which the boxes of all sizes are computed.

A backbone makes coarser and coarser grids. A neck mixes them: its cells come from a coarser grid as well. The head
makes boxes of the neck's grids. If each cell has boxes, heat is made where the head begins: there, all boxes of an
object together depend on the whole object. Elsewhere, heat is made where the neck begins: at its end, a box's score
depends on a few cells around the middle of the box; in the backbone, it depends on the object. Zhao & Chan 2023 (ODAM,
arXiv:2304.06354) differentiate the score of one box in this way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from camkit.engine.passes import to_grid
from camkit.layers.decision import UNSURE, Decision, Levels, layer_at, next_best, rows_of
from camkit.layers.influence import structural_verdict
from camkit.layers.layouts import LayoutReadings
from camkit.layers.trace import Trace, TracedCall
from camkit.targets.scores import detections_of
from camkit.types import Layout

_LEAST_SIDE = 2
"""A grid with fewer cells along an axis is a summary of the picture, such as the gate of squeeze-and-excitation."""


def choose_for_boxes(trace: Trace, readings: LayoutReadings) -> Decision:
    """Choose the layers of a detector: the inputs of its neck, or else the deepest one that every box is computed from.

    A box's score depends on a few cells of one scale, and a picture without detections has no score. So the structure
    decides: the last grid of each size before the neck, or the last one before the scales branch off, or before regions
    are cropped from it.
    """
    graph = trace.graph
    pyramid = next((call for call in reversed(trace.calls) if call.scales), None)
    common = -1
    for scale in pyramid.scales if pyramid is not None else ():
        common &= graph.ancestors(scale)
    usable: dict[TracedCall, Layout] = {}
    verdicts: dict[TracedCall, str] = {}
    for call, reading in readings.items():
        verdict, is_regional = structural_verdict(call, reading), bool(graph.ancestors(call.operation) & graph.regional)
        beside = is_regional if pyramid is None else not call.is_among(common)
        verdicts[call] = verdict or ("not every box is computed from it" if beside else "")
        # Unsure tokens may be the rows of all boxes. Unsure maps stay: attention, as in YOLO11, hides where cells look.
        layout = None if verdict or is_regional or not call.name else reading.layout
        if layout is not None and not (reading.unsure and layout.has_tokens):
            usable[call] = layout
    rows = rows_of(trace, readings, verdicts)
    of_levels = _levels(trace, usable)
    if of_levels:
        count = len(of_levels)
        neck, head = (
            [
                layer_at(trace, readings, call, reason + UNSURE * readings[call].unsure, sure=not readings[call].unsure)
                for call in calls
            ]
            for calls, reason in (
                (of_levels, f"the inputs of the neck, {count} grids that all boxes are computed from"),
                (_ends(trace, usable, of_levels), f"the inputs of the head, {count} grids whose cells have boxes"),
            )
        )
        levels = Levels(head or neck)
        return Decision(trace.size, rows, neck[-1], any_target=True, levels=levels, at_head=bool(head))
    last = _last_before_all_boxes(trace, {call: usable[call] for call in usable if not readings[call].unsure})
    first = [calls[0] for calls in trace.by_output.values()]  # an outer module returns it later
    fit = [call for call in first if call.name and not verdicts[call] and call is not last]
    fit += [] if last is None else [last]
    if not fit:
        return Decision(trace.size, rows)
    grid = "x".join(map(str, readings[fit[-1]].grid))
    chosen, *others = [trace.ref_of(call) for call in reversed(fit)]
    reason = f"the deepest grid, {grid}, that every box is computed from"
    layer = layer_at(trace, readings, fit[-1], reason, runners_up=next_best(others, chosen))
    return Decision(trace.size, rows, layer, any_target=True)


def _levels(trace: Trace, layouts: Mapping[TracedCall, Layout]) -> list[TracedCall]:
    """Return the inputs of a detector's neck, from the finest grid to the coarsest; empty if it has no neck.

    Each is the last layer of its grid before the neck that a path leads from to the scores, past the coarser ones.

    Args:
        trace: the trace of a pass, whose ``end`` are the scores of the boxes.
        layouts: the layout of each call's output that can be explained.
    """
    grids = _cells(layouts)
    backbone, necks = _split(trace, grids)
    if not necks or trace.last is None:
        return []
    before_necks = trace.graph.ancestors(*(call.operation for call in necks))
    usable = [call for call in backbone if call.is_among(before_necks) and call.alone]
    levels: list[TracedCall] = []
    for cells in sorted({grids[call] for call in usable}):
        reaching = trace.before_the_score(*levels)
        last = next((call for call in reversed(usable) if grids[call] == cells and call.is_among(reaching)), None)
        if last is not None:
            levels.insert(0, last)
    beside = trace.before_the_score(*levels) & trace.graph.leaves
    return levels if len(levels) > 1 and not beside else []


def _cells(layouts: Mapping[TracedCall, Layout]) -> dict[TracedCall, int]:
    """Return how many cells each grid has; those with too few along an axis are left out."""
    return {call: math.prod(layout.grid) for call, layout in layouts.items() if min(layout.grid) >= _LEAST_SIDE}


def _ends(trace: Trace, layouts: Mapping[TracedCall, Layout], levels: list[TracedCall]) -> list[TracedCall]:
    """Return the inputs of a detector's head, from the finest grid to the coarsest; empty if its cells have no boxes.

    Each is the last layer of its grid that both the boxes and the scores of its cells are computed from. At least two
    layers with weights follow: the last one often sees a single cell.
    """
    graph, (found,) = trace.graph, detections_of(trace.output, 1) or [{}]
    if "dense" not in found:
        return []
    grids = {call: cells for call, cells in _cells(layouts).items() if call.alone}
    mixing = sum({1 << call.operation for call in _split(trace, grids)[1] if call.operation is not None})
    behind = [call for call in grids if graph.ancestors(call.operation) & mixing]
    weighted = [call for call in trace.calls if call.weighted and call.operation is not None]
    for _ in range(2):
        members = graph.ancestors(*graph.inputs(*(call.operation for call in weighted if call.operation is not None)))
        weighted = [call for call in weighted if call.is_among(members)]
    outputs = [graph.number(found[name].grad_fn) for name in ("boxes", "scores")]
    ends: list[TracedCall] = []
    for level in reversed(levels):
        others = [*ends, *(call for call in behind if grids[call] != grids[level])]
        for call in reversed(grids):
            if grids[call] == grids[level] and call.is_among(members):
                reaching = all(call.is_among(trace.before(output, *others)) for output in outputs)
                beside = any(trace.before(output, call, *others) & graph.leaves for output in outputs)
                if reaching and not beside:
                    ends.insert(0, call)
                    break
    return ends if len(ends) == len(levels) else []


def _last_before_all_boxes(trace: Trace, layouts: dict[TracedCall, Layout]) -> TracedCall | None:
    """Return the last layer with a grid that all boxes are computed from, and from nothing else of the picture.

    If each box is computed from one cell of a layer, as at the end of OWL-ViT, this cell would have all the heat: the
    layer lies before.
    """
    for call, layout in reversed(layouts.items()):
        if trace.last is None or not call.alone:
            continue
        beside = trace.before_the_score(call) & trace.graph.leaves
        if not beside and not _takes_one_cell(trace, call, layout):
            return call
    return None


def _takes_one_cell(trace: Trace, call: TracedCall, layout: Layout) -> bool:
    """Tell whether the best box's score is computed from one cell of a layer alone."""
    if trace.end is None or not trace.end.numel() or call.output is None:
        return False
    gradient = trace.differentiate(trace.end.max(), [call.output]).get(call.output)
    return gradient is not None and int(to_grid(gradient, layout).bool().any(1).sum()) == 1


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
