"""Finds the outputs, and the cells of each, that the score depends on, and the branches they are in.

The functions for networks that end in several branches take the named calls with more than one channel whose cells
influence the score, in execution order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
NOT_MEASURED = "not measured, because deeper layers influence the score"
ELSEWHERE = "its cells lie elsewhere in the input"

_LEAST_CELLS = 2
"""Fewer active cells than this are no map: a single cell is a token or a pooled feature, not a grid."""


@dataclass(eq=False)
class Influence:
    """Which calls the score depends on: where the gradients that were measured are not zero.

    Attributes:
        trace: the trace of the pass.
        readings: the layout of each call's output.
        score: the score whose gradients were measured.
        masks: the mask of each measured output; None if the score is not computed from it.
    """

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
    def measured(self) -> bool:
        """True if the influence could be measured."""
        return any(mask is not None for mask in self.masks.values())

    @property
    def hidden(self) -> bool:
        """True if some output has a gradient of zero everywhere, as behind a gate of zero."""
        return any(mask is not None and not mask.any() for mask in self.masks.values())

    def of(self, score: ScoreFrom, outputs: Sequence[int]) -> dict[int, Tensor | None]:
        """Return where the gradients of a score are not zero; None for an output that it is not computed from."""
        found = self.trace.gradients(score, outputs)
        return {number: None if (own := found.get(number)) is None else own.bool() for number in outputs}

    def measure_some(self) -> None:
        """Measure the last outputs or, if the score depends on no cells of these, the others too.

        If the gradients of a score are zero, the next one is tried.
        """
        numbers = list(self.layouts)
        scores: tuple[ScoreFrom, ...] = ("best", "mixture", "head")
        for score in scores if self.trace.end is not None else ():
            self.score, self.masks = score, {}
            for outputs in (numbers[-_TAIL:], numbers[:-_TAIL]):
                self.masks |= self.of(score, outputs)
                if any(_active_cells(self.masks[number], self.layouts[number]) >= _LEAST_CELLS for number in outputs):
                    return
        self.masks = {}

    @functools.cached_property
    def verdicts(self) -> dict[TracedCall, str]:
        """For each call, the reason it cannot be explained; empty if it can."""
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

    @property
    def usable(self) -> list[TracedCall]:
        """The calls that nothing speaks against, those before the deepest ones included."""
        return [call for call, verdict in self.verdicts.items() if verdict in ("", NOT_MEASURED)]

    def _verdict(self, call: TracedCall, output: int, layout: Layout) -> str:
        """Return why a call with a grid cannot be explained; empty if it can."""
        if self.measured and output not in self.masks:
            return NOT_MEASURED if call.is_among(self.reaching) else _OTHER_BRANCH
        mask, channels = self.masks.get(output), channels_of(call.shape, layout)
        if mask is None:
            if self.measured:
                return _OTHER_BRANCH
            return "class scores" if channels == self.trace.classes else ""
        active = _active_cells(mask, layout)
        if 0 < active < _LEAST_CELLS:  # the best score may come from one cell, and other scores from more
            active = _active_cells(self.of("mixture", [output])[output], layout)
        if active < _LEAST_CELLS:
            return "its cells do not influence the score"
        one_channel = int(to_grid(mask, layout)[0].sum(0).amax()) == 1
        if channels == self.trace.maps or (channels == self.trace.classes and (one_channel or self.trace.maps)):
            return "class scores, not features"
        return ""


def measure_influence(trace: Trace, readings: LayoutReadings, *, every: bool = False) -> Influence:
    """Find the outputs that the score depends on, cell by cell.

    Args:
        trace: the trace of the pass.
        readings: the layout of each call's output.
        every: measure every output with a grid, for a list of all layers. The choice of a layer does not need it.
    """
    influence = Influence(trace, readings)
    influence.measure_some()
    if every and influence.measured:
        rest = [number for number in influence.layouts if number not in influence.masks]
        influence.masks |= influence.of(influence.score, rest)
    return influence


def _active_cells(mask: Bool[Tensor, "*shape"] | None, layout: Layout) -> int:
    """Count the cells that the score depends on, in any channel."""
    if mask is None:
        return 0
    return int(to_grid(mask, layout)[0].view(torch.uint8).amax(0).sum())  # several times as fast as any()


def structural_verdict(call: TracedCall, reading: LayoutReading) -> str:
    """Return why a call cannot be explained, whatever the score is; empty if there is no such reason."""
    if call.output is None or reading.layout is None:
        return ELSEWHERE if reading.verdict == "elsewhere" else "no spatial grid"
    return "computes no features" if call.passes else ""


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
