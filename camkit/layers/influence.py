"""The fourth stage: on which of an output's cells the score depends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxtyping import Bool
from torch import Tensor

from camkit.engine.grid import to_grid
from camkit.layers.layouts import Readings, channels_of
from camkit.layers.trace import Call, Gradients, Score, Trace
from camkit.types import Layout

_TAIL = 32
"""Outputs with a grid, counted from the end of the pass, that are measured first. Most networks end within them."""

_OTHER_BRANCH = "no influence on the score"
_NO_CELLS = "its cells do not influence the score"
_SCORES = "class scores, not features"
NO_GRID = "no spatial grid"
ELSEWHERE = "its cells lie elsewhere in the input"
NO_FEATURES = "computes no features"

_HEAD_OF_ZEROS = "; the head's weights are zero, so the influence on its input was measured"


@dataclass(frozen=True)
class Influence:
    """Which calls the score depends on.

    Attributes:
        verdicts: for each call of the trace, why it cannot be explained; empty if it can.
        measured: whether the influence could be measured at all.
        note: what should be known of the measurement, to be added to a reason.
    """

    verdicts: tuple[str, ...]
    measured: bool
    note: str = ""


@dataclass
class _Measurement:
    """The gradients known so far, as masks of the cells and channels where they are not zero."""

    score: Score = "best"
    masks: dict[int, Tensor | None] = field(default_factory=dict)
    note: str = ""

    @property
    def succeeded(self) -> bool:
        return any(mask is not None for mask in self.masks.values())


def measure_influence(trace: Trace, readings: Readings, gradients: Gradients) -> Influence:
    """Tell on which outputs the score depends, cell by cell.

    Args:
        trace: of the pass.
        readings: one for each call.
        gradients: differentiates a score; called for the last outputs first, and for others only if they are needed.
    """
    layouts = {
        call.output: reading.layout
        for call, reading in zip(trace.calls, readings, strict=True)
        if call.output is not None and reading.layout is not None
    }
    measurement = _measured(trace, layouts, gradients)
    verdicts = _verdicts(trace, readings, layouts, measurement, gradients)
    # A module around the last fitting one may be better, and its input may be too far from the end to be known.
    fit = [call for call, verdict in zip(trace.calls, verdicts, strict=True) if not verdict]
    inputs = _inputs_around(trace.calls, verdicts, fit[-1]) if fit else set()
    missing = [number for number in layouts if number in inputs and number not in measurement.masks]
    if missing and measurement.succeeded:
        measurement.masks.update(gradients(measurement.score, missing) or {})
        verdicts = _verdicts(trace, readings, layouts, measurement, gradients)
    return Influence(verdicts, measurement.succeeded, measurement.note)


def _measured(trace: Trace, layouts: Mapping[int, Layout], gradients: Gradients) -> _Measurement:
    """Differentiate the best class's score; if that says nothing, other scores."""
    numbers = list(layouts)
    for score in ("best", "mixture", "head") if trace.scored else ():
        measurement = _Measurement(score, note=_HEAD_OF_ZEROS if score == "head" else "")
        for some in (numbers[-_TAIL:], numbers[:-_TAIL]):
            measurement.masks.update(gradients(score, some) or {})
            if any(_active_cells(measurement.masks.get(number), layouts[number]) > 1 for number in some):
                return measurement
    return _Measurement()


def _active_cells(mask: Bool[Tensor, "*shape"] | None, layout: Layout) -> int:
    return 0 if mask is None else int(to_grid(mask, layout)[0].any(0).sum())


def _verdicts(
    trace: Trace,
    readings: Readings,
    layouts: Mapping[int, Layout],
    measurement: _Measurement,
    gradients: Gradients,
) -> tuple[str, ...]:
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


def structural_verdict(call: Call, layout: Layout | None, *, elsewhere: bool) -> str:
    """Return why a call cannot be explained whatever the score is; empty if nothing is known against it."""
    if call.output is None or layout is None:
        return ELSEWHERE if elsewhere else NO_GRID
    return NO_FEATURES if call.passes or call.output in call.arguments else ""


def _verdict(
    trace: Trace, call: Call, layout: Layout, readings: Readings, measurement: _Measurement, gradients: Gradients
) -> str:
    assert call.output is not None
    mask = measurement.masks.get(call.output)
    channels = channels_of(call.shape, layout)
    if mask is None:
        if measurement.succeeded:
            return _OTHER_BRANCH
        return "class scores" if channels == trace.classes else ""
    active = _active_cells(mask, layout)
    if active < 2 and not (active and _spreads(call.output, layout, gradients)):
        return _NO_CELLS
    one_channel = int(to_grid(mask, layout)[0].sum(0).amax()) == 1
    returns_maps = bool(trace.calls) and not trace.calls[-1].name and readings[-1].layout is not None
    if channels == trace.maps or (channels == trace.classes and (one_channel or returns_maps)):
        return _SCORES
    return ""


def _spreads(number: int, layout: Layout, gradients: Gradients) -> bool:
    """Tell whether other scores depend on other cells than the one that the best score comes from."""
    mask = (gradients("mixture", [number]) or {}).get(number)
    return mask is not None and int(to_grid(mask, layout).any(1).sum()) > 1


def _inputs_around(calls: Sequence[Call], verdicts: Sequence[str], last: Call) -> set[int]:
    """Return the inputs of the modules around the last fitting call that do not fit themselves."""
    return {
        argument
        for call, verdict in zip(calls, verdicts, strict=True)
        if verdict and call.name and call.started < last.started < last.finished < call.finished
        for argument in call.arguments
    }
