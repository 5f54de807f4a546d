"""The fourth stage: find the outputs, and the cells of each, that the score depends on, and the branches they are in.

The functions for networks that end in several branches take the named calls with more than one channel whose cells
influence the score, in execution order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from camkit.engine.capture import to_grid
from camkit.layers.graph import contains
from camkit.layers.layouts import LayoutReading, LayoutReadings, channels_of
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

_SCORES_TO_TRY: tuple[ScoreFrom, ...] = ("best", "mixture", "head")
"""The scores to differentiate: the next one if the gradients of the ones before are zero."""

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

    verdicts: Mapping[TracedCall, str]
    measured: bool
    note: str = ""
    hidden: bool = False

    @property
    def usable(self) -> list[TracedCall]:
        """The calls that nothing speaks against."""
        return [call for call, verdict in self.verdicts.items() if not verdict]


@dataclass
class _Measurement:
    """The gradients of a score measured so far, as masks of the cells and channels where they are not zero."""

    trace: Trace
    readings: LayoutReadings
    gradients: Gradients
    score: ScoreFrom = "best"
    masks: dict[int, Tensor | None] = field(default_factory=dict)

    @functools.cached_property
    def layouts(self) -> dict[int, Layout]:
        """The layout of each output with a grid."""
        return {
            call.output: reading.layout
            for call, reading in self.readings.items()
            if call.output is not None and reading.layout is not None
        }

    @property
    def succeeded(self) -> bool:
        return any(mask is not None for mask in self.masks.values())

    def measure(self, outputs: Sequence[int]) -> None:
        """Measure outputs; the mask of an output that the score is not computed from is None."""
        masks = self.gradients(self.score, outputs)
        self.masks.update({number: masks.get(number) for number in outputs})

    def measure_some(self) -> None:
        """Measure the last outputs or, if the score depends on no cells of these, the others too.

        If the gradients of a score are zero, the next one is tried.
        """
        numbers = list(self.layouts)
        for score in _SCORES_TO_TRY if self.trace.scored else ():
            self.score, self.masks = score, {}
            for outputs in (numbers[-_TAIL:], numbers[:-_TAIL]):
                self.measure(outputs)
                if any(_active_cells(self.masks[number], self.layouts[number]) >= _LEAST_CELLS for number in outputs):
                    return
        self.masks = {}

    def verdicts(self) -> dict[TracedCall, str]:
        """Return the reason against each call; empty for the calls that can be explained."""
        by_output: dict[int, str] = {}
        verdicts: dict[TracedCall, str] = {}
        for call, reading in self.readings.items():
            verdict = structural_verdict(call, reading)
            if not verdict and call.output is not None and reading.layout is not None:
                if call.output not in by_output:
                    by_output[call.output] = self._verdict(call, call.output, reading.layout)
                verdict = by_output[call.output]
            verdicts[call] = verdict
        return verdicts

    def _verdict(self, call: TracedCall, output: int, layout: Layout) -> str:
        """Return why a call with a grid cannot be explained; empty if it can."""
        if self.succeeded and output not in self.masks:
            return NOT_MEASURED
        mask, channels = self.masks.get(output), channels_of(call.shape, layout)
        if mask is None:
            if self.succeeded:
                return _OTHER_BRANCH
            return "class scores" if channels == self.trace.classes else ""
        active = _active_cells(mask, layout)
        if active < _LEAST_CELLS and not (active and self._spreads(output, layout)):
            return _NO_CELLS
        one_channel = int(to_grid(mask, layout)[0].sum(0).amax()) == 1
        last, of_last = list(self.readings.items())[-1]
        returns_maps = not last.name and of_last.layout is not None
        if channels == self.trace.maps or (channels == self.trace.classes and (one_channel or returns_maps)):
            return _SCORES
        return ""

    def _spreads(self, number: int, layout: Layout) -> bool:
        """Tell whether other scores depend on more cells than the one that the best score comes from."""
        return _active_cells(self.gradients("mixture", [number]).get(number), layout) >= _LEAST_CELLS


def measure_influence(
    trace: Trace, readings: LayoutReadings, gradients: Gradients, *, every: bool = False
) -> Influence:
    """Find the outputs that the score depends on, cell by cell.

    Args:
        trace: the trace of the pass.
        readings: the results of the stage before.
        gradients: differentiates a score; called for the last outputs first, and for others only if necessary.
        every: measure every output with a grid, for a list of all layers. The choice of a layer does not need it.
    """
    measurement = _Measurement(trace, readings, gradients)
    measurement.measure_some()
    if every and measurement.succeeded:
        measurement.measure([number for number in measurement.layouts if number not in measurement.masks])
    verdicts = measurement.verdicts()
    # The input of a module around the last usable one may be better, and other branches may end earlier; both may be
    # too early to have been measured.
    last = next((call for call in reversed(trace.calls) if not verdicts[call]), None)
    needed = set() if last is None else _inputs_around(verdicts, last) | _ends_of_other_branches(trace, last, readings)
    missing = [number for number in measurement.layouts if number in needed and number not in measurement.masks]
    if missing and measurement.succeeded:
        measurement.measure(missing)
        verdicts = measurement.verdicts()
    hidden = any(mask is not None and not mask.any() for mask in measurement.masks.values())
    note = _HEAD_OF_ZEROS if measurement.succeeded and measurement.score == "head" else ""
    return Influence(verdicts, measurement.succeeded, note, hidden)


def _active_cells(mask: Bool[Tensor, "*shape"] | None, layout: Layout) -> int:
    """Count the cells that the score depends on, in any channel."""
    if mask is None:
        return 0
    return int(to_grid(mask, layout)[0].view(torch.uint8).amax(0).sum())  # several times as fast as any()


def structural_verdict(call: TracedCall, reading: LayoutReading) -> str:
    """Return why a call cannot be explained, whatever the score is; empty if there is no such reason."""
    if call.output is None or reading.layout is None:
        return ELSEWHERE if reading.elsewhere else NO_GRID
    return NO_FEATURES if call.passes else ""


def _inputs_around(verdicts: Mapping[TracedCall, str], last: TracedCall) -> set[int]:
    """Return the inputs of the modules around the last usable call that are not usable themselves."""
    return {
        argument
        for call, verdict in verdicts.items()
        if verdict and call.name and call.started < last.started < last.finished < call.finished
        for argument in call.arguments
    }


def _ends_of_other_branches(trace: Trace, last: TracedCall, readings: LayoutReadings) -> set[int]:
    """Return the last outputs with a grid on the paths to the score that do not lead through the last usable one."""
    beside = trace.before_the_score(last)
    others = [call for call in trace.calls if readings[call].layout is not None and call.is_among(beside)]
    return {call.output for call in _last_of(trace, others) if call.output is not None}


def _last_of(trace: Trace, calls: Sequence[TracedCall]) -> list[TracedCall]:
    """Return the calls that no output of the others was computed from."""
    operations = [call.operation for call in calls if call.operation is not None]
    earlier = trace.graph.ancestors(*(number for operation in operations for number in trace.graph[operation].inputs))
    return [call for call in calls if not call.is_among(earlier)]


def twins(trace: Trace, readings: LayoutReadings, best: TracedCall, fit: Sequence[TracedCall]) -> list[TracedCall]:
    """Return the best layer and the branches with the same grid, none computed from another.

    Empty if there is no other branch, as in most networks.
    """
    beside: dict[int | None, TracedCall] = {}
    for call in reversed(ends_beside(trace, best, fit)):
        if readings[call].grid == readings[best].grid:
            beside.setdefault(call.output, call)
    return [*reversed(beside.values()), best] if beside else []


def shared(trace: Trace, branches: Sequence[TracedCall], fit: Sequence[TracedCall]) -> TracedCall | None:
    """Return the layer that several branches were computed from, if each branch is a single layer.

    The keys and values of an attention pool are an example. None if a branch is longer: no layer can stand for all.
    """
    if len(branches) < 2:
        return None
    paths = [trace.graph.ancestors(call.operation) for call in branches]
    common = -1
    for path in paths:
        common &= path
    sources = [call for call in fit if call.is_among(common)]
    if not sources:
        return None
    weighted = [call for call in trace.calls if call.weighted]
    longest = max(len({call.name for call in weighted if call.is_among(path & ~common)}) for path in paths)
    return max(sources, key=lambda call: call.finished) if longest <= 1 else None


def ends_beside(trace: Trace, best: TracedCall, fit: Sequence[TracedCall]) -> list[TracedCall]:
    """Return the last layers that the score also depends on, which lie on no path to or from the best layer."""
    graph = trace.graph
    if best.operation is None:
        return []
    before = graph.ancestors(best.operation)
    others = [call for call in fit if call.output != best.output]
    others = [call for call in others if call.operation is not None and not call.is_among(before)]
    return [call for call in _last_of(trace, others) if not contains(graph.ancestors(call.operation), best.operation)]
