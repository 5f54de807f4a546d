"""The fourth stage: find the outputs, and the cells of each, that the score depends on, and the branches they are in.

The functions for networks that end in several branches take the named calls with more than one channel whose cells
influence the score, in execution order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from camkit.engine.features import to_grid
from camkit.layers.graph import Graph, contains
from camkit.layers.layouts import LayoutReadings, channels_of
from camkit.layers.trace import Gradients, ScoreFrom, Trace, TracedCall
from camkit.types import Layout

_TAIL = 32
"""How many of the last outputs with a grid are measured first: enough to include the layer that most networks end in,
and cheaper than a gradient of every output."""

_OTHER_BRANCH = "does not influence the score"
_NO_CELLS = "its cells do not influence the score"
_SCORES = "class scores, not features"
NO_GRID = "no spatial grid"
NOT_MEASURED = "not measured, because deeper layers influence the score"
ELSEWHERE = "its cells lie elsewhere in the input"
NO_FEATURES = "computes no features"

_HEAD_OF_ZEROS = "; the head's weights are zero, so the influence on the head's input was measured instead"

_LEAST_CELLS = 2
"""Fewer active cells than this are no map: a single cell is a token or a pooled feature, not a grid."""


@dataclass(frozen=True)
class Influence:
    """Which calls the score depends on.

    Attributes:
        verdicts: for each call of the trace, the reason it cannot be explained; empty if it can.
        measured: True if the influence could be measured.
        note: a remark on the measurement, to be appended to the reason for a layer.
        hidden: True if some output has a gradient of zero everywhere, as behind a gate of zero.
    """

    verdicts: tuple[str, ...]
    measured: bool
    note: str = ""
    hidden: bool = False


@dataclass
class _Measurement:
    """The gradients measured so far, as masks of the cells and channels where they are not zero."""

    score: ScoreFrom = "best"
    masks: dict[int, Tensor | None] = field(default_factory=dict)
    note: str = ""

    @property
    def succeeded(self) -> bool:
        return any(mask is not None for mask in self.masks.values())

    def measure(self, outputs: Sequence[int], gradients: Gradients) -> None:
        """Measure outputs; the mask of an output that the score is not computed from is None."""
        masks = gradients(self.score, outputs) or {}
        self.masks.update({number: masks.get(number) for number in outputs})


def measure_influence(
    trace: Trace, readings: LayoutReadings, gradients: Gradients, *, every: bool = False
) -> Influence:
    """Find the outputs that the score depends on, cell by cell.

    Args:
        trace: the trace of the pass.
        readings: one for each call.
        gradients: differentiates a score; called for the last outputs first, and for others only if necessary.
        every: measure every output with a grid, for a list of all layers. The choice of a layer does not need it.
    """
    layouts = {
        call.output: reading.layout
        for call, reading in zip(trace.calls, readings, strict=True)
        if call.output is not None and reading.layout is not None
    }
    measurement = _measured(trace, layouts, gradients)
    if every and measurement.succeeded:
        measurement.measure([number for number in layouts if number not in measurement.masks], gradients)
    verdicts = _verdicts(trace, readings, layouts, measurement, gradients)
    # The input of a module around the last usable one may be better, and other branches may end earlier; both may be
    # too early to have been measured.
    usable = [call for call, verdict in zip(trace.calls, verdicts, strict=True) if not verdict]
    inputs = _inputs_around(trace.calls, verdicts, usable[-1]) if usable else set()
    others = _ends_of_other_branches(trace, usable[-1], layouts) if usable else set()
    missing = [number for number in layouts if number in inputs | others and number not in measurement.masks]
    if missing and measurement.succeeded:
        measurement.measure(missing, gradients)
        verdicts = _verdicts(trace, readings, layouts, measurement, gradients)
    hidden = any(mask is not None and not mask.any() for mask in measurement.masks.values())
    return Influence(verdicts, measurement.succeeded, measurement.note, hidden)


def _measured(trace: Trace, layouts: Mapping[int, Layout], gradients: Gradients) -> _Measurement:
    """Differentiate the best class's score; if its gradients are zero, try the other scores."""
    numbers = list(layouts)
    for score in ("best", "mixture", "head") if trace.scored else ():
        measurement = _Measurement(score, note=_HEAD_OF_ZEROS if score == "head" else "")
        for outputs in (numbers[-_TAIL:], numbers[:-_TAIL]):
            measurement.measure(outputs, gradients)
            if any(_active_cells(measurement.masks.get(number), layouts[number]) >= _LEAST_CELLS for number in outputs):
                return measurement
    return _Measurement()


def _active_cells(mask: Bool[Tensor, "*shape"] | None, layout: Layout) -> int:
    """Count the cells that the score depends on, in any channel."""
    if mask is None:
        return 0
    return int(to_grid(mask, layout)[0].view(torch.uint8).amax(0).sum())  # several times as fast as any()


def _verdicts(
    trace: Trace,
    readings: LayoutReadings,
    layouts: Mapping[int, Layout],
    measurement: _Measurement,
    gradients: Gradients,
) -> tuple[str, ...]:
    """Return the reason against each call; empty for the calls that can be explained."""
    by_output: dict[int, str] = {}
    verdicts: list[str] = []
    for call, reading in zip(trace.calls, readings, strict=True):
        verdict = structural_verdict(call, reading.layout, elsewhere=reading.elsewhere)
        if not verdict and call.output is not None:
            if call.output not in by_output:
                by_output[call.output] = _verdict(trace, call, layouts[call.output], readings, measurement, gradients)
            verdict = by_output[call.output]
        verdicts.append(verdict)
    return tuple(verdicts)


def structural_verdict(call: TracedCall, layout: Layout | None, *, elsewhere: bool) -> str:
    """Return why a call cannot be explained, whatever the score is; empty if there is no such reason."""
    if call.output is None or layout is None:
        return ELSEWHERE if elsewhere else NO_GRID
    return NO_FEATURES if call.passes or call.output in call.arguments else ""


def _verdict(
    trace: Trace,
    call: TracedCall,
    layout: Layout,
    readings: LayoutReadings,
    measurement: _Measurement,
    gradients: Gradients,
) -> str:
    """Return why a call with a grid cannot be explained; empty if it can."""
    assert call.output is not None
    if measurement.succeeded and call.output not in measurement.masks:
        return NOT_MEASURED
    mask = measurement.masks.get(call.output)
    channels = channels_of(call.shape, layout)
    if mask is None:
        if measurement.succeeded:
            return _OTHER_BRANCH
        return "class scores" if channels == trace.classes else ""
    active = _active_cells(mask, layout)
    if active < _LEAST_CELLS and not (active and _spreads(call.output, layout, gradients)):
        return _NO_CELLS
    one_channel = int(to_grid(mask, layout)[0].sum(0).amax()) == 1
    returns_maps = bool(trace.calls) and not trace.calls[-1].name and readings[-1].layout is not None
    if channels == trace.maps or (channels == trace.classes and (one_channel or returns_maps)):
        return _SCORES
    return ""


def _spreads(number: int, layout: Layout, gradients: Gradients) -> bool:
    """Tell whether other scores depend on more cells than the one that the best score comes from."""
    mask = (gradients("mixture", [number]) or {}).get(number)
    return mask is not None and int(to_grid(mask, layout).any(1).sum()) >= _LEAST_CELLS


def _inputs_around(calls: Sequence[TracedCall], verdicts: Sequence[str], last: TracedCall) -> set[int]:
    """Return the inputs of the modules around the last usable call that are not usable themselves."""
    return {
        argument
        for call, verdict in zip(calls, verdicts, strict=True)
        if verdict and call.name and call.started < last.started < last.finished < call.finished
        for argument in call.arguments
    }


def _ends_of_other_branches(trace: Trace, last: TracedCall, layouts: Mapping[int, Layout]) -> set[int]:
    """Return the last outputs with a grid on the paths to the score that do not lead through the last usable one."""
    beside = trace.before_the_score(last)
    others = [call for call in trace.calls if call.output in layouts and call.is_among(beside)]
    earlier = trace.graph.ancestors(
        *(number for call in others if call.operation is not None for number in trace.graph[call.operation].inputs)
    )
    return {call.output for call in others if call.output is not None and not call.is_among(earlier)}


def twins(
    graph: Graph, best: TracedCall, fit: Sequence[TracedCall], layouts: Mapping[TracedCall, Layout | None]
) -> list[TracedCall]:
    """Return the best layer and the branches with the same grid, none computed from another.

    Empty if there is no other branch, as in most networks.
    """
    beside: dict[int | None, TracedCall] = {}
    grid = layouts[best]
    for call in reversed(ends_beside(graph, best, fit)):
        layout = layouts[call]
        if layout is not None and grid is not None and layout.grid == grid.grid:
            beside.setdefault(call.output, call)
    return [*reversed(beside.values()), best] if beside else []


def shared(trace: Trace, branches: Sequence[TracedCall], fit: Sequence[TracedCall]) -> TracedCall | None:
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


def ends_beside(graph: Graph, best: TracedCall, fit: Sequence[TracedCall]) -> list[TracedCall]:
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
