"""Finds the outputs, and the cells of each, that the score depends on, and the branches they are in.

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

from camkit.engine.passes import to_grid
from camkit.layers.layouts import LayoutReadings, channels_of
from camkit.layers.order import LayoutReading
from camkit.layers.trace import ScoreFrom, Trace, TracedCall
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
        """The calls that nothing speaks against, those before the deepest ones included."""
        return [call for call, verdict in self.verdicts.items() if verdict in ("", NOT_MEASURED)]


@dataclass
class _Measurement:
    """The gradients of a score measured so far, as masks of the cells and channels where they are not zero."""

    trace: Trace
    readings: LayoutReadings
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

    @functools.cached_property
    def reaching(self) -> int:
        """The operations that the score is computed from."""
        return self.trace.before_the_score()

    @property
    def succeeded(self) -> bool:
        return any(mask is not None for mask in self.masks.values())

    def measure(self, outputs: Sequence[int]) -> None:
        """Measure outputs; the mask of an output that the score is not computed from is None."""
        self.masks.update(self.of(self.score, outputs))

    def of(self, score: ScoreFrom, outputs: Sequence[int]) -> dict[int, Tensor | None]:
        """Return where the gradients of a score are not zero; None for an output that it is not computed from."""
        found = self.trace.gradients(score, outputs)
        return {number: None if (own := found.get(number)) is None else own.bool() for number in outputs}

    def measure_some(self) -> None:
        """Measure the last outputs or, if the score depends on no cells of these, the others too.

        If the gradients of a score are zero, the next one is tried.
        """
        numbers = list(self.layouts)
        for score in _SCORES_TO_TRY if self.trace.end is not None else ():
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
            return NOT_MEASURED if call.is_among(self.reaching) else _OTHER_BRANCH
        mask, channels = self.masks.get(output), channels_of(call.shape, layout)
        if mask is None:
            if self.succeeded:
                return _OTHER_BRANCH
            return "class scores" if channels == self.trace.classes else ""
        active = _active_cells(mask, layout)
        if 0 < active < _LEAST_CELLS:  # the best score may come from one cell, and other scores from more
            active = _active_cells(self.of("mixture", [output])[output], layout)
        if active < _LEAST_CELLS:
            return _NO_CELLS
        one_channel = int(to_grid(mask, layout)[0].sum(0).amax()) == 1
        if channels == self.trace.maps or (channels == self.trace.classes and (one_channel or self.trace.maps)):
            return _SCORES
        return ""


def measure_influence(trace: Trace, readings: LayoutReadings, *, every: bool = False) -> Influence:
    """Find the outputs that the score depends on, cell by cell.

    Args:
        trace: the trace of the pass.
        readings: the results of the stage before.
        every: measure every output with a grid, for a list of all layers. The choice of a layer does not need it.
    """
    measurement = _Measurement(trace, readings)
    measurement.measure_some()
    if every and measurement.succeeded:
        measurement.measure([number for number in measurement.layouts if number not in measurement.masks])
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
        return ELSEWHERE if reading.verdict == "elsewhere" else NO_GRID
    return NO_FEATURES if call.passes else ""


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
    others = [call for call in fit if call.output != best.output and not call.is_among(before)]
    operations = {call: call.operation for call in others if call.operation is not None}
    earlier = graph.ancestors(*graph.inputs(*operations.values()))
    last = [call for call in operations if not call.is_among(earlier)]
    return [call for call in last if not graph.ancestors(operations[call]) >> best.operation & 1]
