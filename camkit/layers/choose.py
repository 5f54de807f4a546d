"""Chooses the deepest layer with a spatial grid whose cells still influence the score.

``decide`` runs a model on one image, reads the layouts of its outputs, and measures which of their cells the score
depends on. Names of modules decide only between layers that are otherwise alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.attach import tensors_in
from camkit.engine.guard import ModelRecord, interruptible
from camkit.engine.passes import differentiated, to_grid
from camkit.layers.decision import UNSURE, Decision, layer_at, next_best, rows_of
from camkit.layers.influence import Influence, ends_beside, measure_influence, shared, twins
from camkit.layers.layouts import channels_of, read_layouts
from camkit.layers.levels import choose_for_boxes
from camkit.layers.trace import TracedCall, traced
from camkit.methods.registry import FINE
from camkit.models import refuse_black_box
from camkit.targets.scores import Target
from camkit.types import TargetLayer


def decide(
    model: nn.Module,
    image: Float[Tensor, "1 c *size"],
    record: ModelRecord | None = None,
    *,
    every: bool = False,
    target: Target | None = None,
) -> Decision:
    """Choose a model's layer: one pass over an image, a backward pass over its end, and a few more passes if needed.

    Args:
        model: the model; it is restored exactly.
        image: one input on the model's device.
        record: the model's record, if it is already prepared.
        every: measure the influence of every layer, for a list of all. It costs one more backward pass and changes no
            choice.
        target: the target whose score counts; None for the model's main output.

    Raises:
        LayerError: the model is a black box.
        FramesFirstError: the model reads clips as (N, T, C, H, W).
        Exception: whatever the target raises.
    """
    refuse_black_box(model)
    score = None if target is None else lambda output: target(output, 1).values.sum()

    def run() -> Decision:
        with traced(model, image, record, score) as trace, interruptible():
            readings = read_layouts(trace)
            if trace.detects:
                return choose_for_boxes(trace, readings)  # detectors select boxes by their scores
            decision = _choose(measure_influence(trace, readings, every=every))
            return replace(decision, of_picture=trace.reads.picture)

    return differentiated(run)


def _carries_all(influence: Influence, call: TracedCall) -> bool:
    """Tell whether the score is computed from the cells of an output alone, as the layer returned them."""
    trace, layout = influence.trace, influence.readings[call].layout
    call = trace.outermost(call)
    if layout is None or call.output is None or not call.alone:
        return False
    if math.prod(layout.grid) * channels_of(call.shape, layout) < math.prod(call.shape):
        return False  # other tokens may carry some of it
    return trace.last is not None and not trace.before_the_score(call) & trace.graph.leaves


def _is_balanced(influence: Influence, call: TracedCall) -> bool:
    """Tell whether activations times gradients add up to 0 in each cell, so that single products say little.

    They do if only a normalisation of each cell follows, as at the end of ConvNeXt's stages.
    """
    trace, layout = influence.trace, influence.readings[call].layout
    assert call.output is not None
    assert layout is not None
    gradient = trace.gradients("best", [call.output]).get(call.output)
    if gradient is None:
        return False
    cells = to_grid(trace.tensors[call.output].detach() * gradient, layout)
    # In ConvNeXt, what the normalisation adds to the variance leaves less than 0.001 of a sum that should be 0.
    return bool(cells.sum(1).abs().amax() <= 0.01 * cells.abs().sum(1).amax())


def _candidates(influence: Influence) -> list[TracedCall]:
    """Return the named calls that can be explained, without gates, which have a single channel."""
    readings = influence.readings
    fit = [call for call in influence.usable if call.name]
    fit = [call for call in fit if readings[call].verdict != "nowhere"] or fit
    return [call for call in fit if channels_of(call.shape, readings[call].layout) > 1] or fit


def _choose(influence: Influence) -> Decision:
    trace, readings = influence.trace, influence.readings
    lasting = influence.measured and influence.score != "head"
    of_weights = influence.hidden or any(reading.unsure for reading in readings.values())
    decision = Decision(
        trace.size, rows_of(trace, readings, influence.verdicts), lasting=lasting, of_weights=of_weights
    )
    fit = _candidates(influence)
    best = _deepest(influence, fit)
    if best is None:
        return decision
    # Other branches may end in the same grid. If no layer before them stands for all, the caller must say which counts.
    branches = twins(trace, readings, best, fit)
    common = shared(trace, branches, fit)
    if len(branches) > 1 and common is None:
        refs = {trace.ref_of(call) for call in branches}
        return replace(decision, equals=tuple(row for row in decision.rows if row.ref in refs))
    chosen = common or best
    any_target = _carries_all(influence, chosen) and len(tensors_in(trace.output)) == 1
    layer = _described(influence, chosen, fit)
    return replace(decision, layer=layer, any_target=any_target, finer=_finer(influence, chosen))


def _deepest(influence: Influence, fit: Sequence[TracedCall]) -> TracedCall | None:
    """Return the last call whose output has usable cells that no later step still refines.

    For most networks this is the last usable output. But a module may end the grid, such as an attention pool or an
    attention from which only the class token goes on. The keys and values inside it are usable too, and its input is
    chosen instead.
    """
    trace, readings = influence.trace, influence.readings
    if not fit:
        return None
    # The first of a module's several outputs may be an earlier layer's: features beside the scores.
    last = next((call for call in reversed(fit) if call.alone or trace.by_output[call.output][0] is call), fit[-1])
    by_output = {call.output: call for call in fit}
    before = trace.graph.ancestors(last.operation)
    if last.operation is not None:
        before &= ~(1 << last.operation)
    # A module that starts after the last output but uses an earlier one, such as a late gate, is a side branch. And a
    # module that ends another grid, such as the classifier of a coarser branch, says nothing about this one.
    beside = {
        output: call
        for output, call in by_output.items()
        if readings[call].grid == readings[last].grid and not call.is_among(before)
    }
    fitting = set(influence.usable)
    ends = [
        call
        for call in trace.calls
        if call.name
        and call not in fitting
        and call.finished > last.finished
        and _grid_inputs(call, by_output if call.started < last.started else beside)
    ]
    if not ends:
        return last
    computed = {call.output: call.finished for call in reversed(fit)}  # outer modules return it later
    inputs = _grid_inputs(max(ends, key=lambda call: call.started), by_output)
    return max(inputs, key=lambda call: computed[call.output])


def _grid_inputs(call: TracedCall, by_output: Mapping[int | None, TracedCall]) -> list[TracedCall]:
    return [by_output[argument] for argument in call.arguments if argument in by_output]


def _described(influence: Influence, best: TracedCall, fit: Sequence[TracedCall]) -> TargetLayer:
    """Return the chosen layer with its layout, its reason and the next best ones."""
    trace, readings = influence.trace, influence.readings
    reading = readings[best]
    grid = "x".join(map(str, reading.grid))
    evidence = "whose cells influence the score" if influence.measured else "(its influence could not be measured)"
    if influence.measured and influence.score == "head":
        evidence += "; the head's weights are zero, so the influence on the head's input was measured instead"
    deeper = [call for call in trace.calls if call.started > best.started and call.finished > best.finished]
    verdicts = {readings[call].verdict for call in deeper}
    if "nowhere" in verdicts:  # learned vectors, or tokens that random weights have mixed
        evidence += "; the cells of deeper layers show no place in the input"
    doubt = UNSURE if reading.unsure else ""
    if "elsewhere" in verdicts:
        doubt += "; the cells of deeper layers lie elsewhere in the input"
    names = list(dict.fromkeys(str(trace.ref_of(call)) for call in ends_beside(trace, best, fit)))
    beside = f"; the score also depends on {' and '.join(names)}" if names else ""
    reason = f"the deepest {grid} grid {evidence}{doubt}{beside}"
    earlier = [trace.ref_of(call) for call in reversed(fit) if call.started <= best.finished]
    others = next_best(earlier, trace.ref_of(best))
    return layer_at(trace, readings, best, reason, runners_up=others, sure=not (reading.unsure or beside))


def _finer(influence: Influence, chosen: TracedCall) -> TargetLayer | None:
    """Return the layer of ``Decision.finer``.

    Of the grids that are fine enough the coarsest counts, and of its layers those with the shortest names, which are
    the model's own blocks; of these, the last one that carries the whole score. If activations times gradients add up
    to 0 in each of its cells, there is none: the positive products alone say no more of one class than of another.
    """
    trace, readings, grid = influence.trace, influence.readings, influence.readings[chosen].grid
    if not grid or min(grid[-2:]) >= FINE:
        return None
    before = trace.graph.ancestors(chosen.operation)
    fine = [
        call
        for call in influence.usable
        if call.name and not readings[call].unsure and call.is_among(before) and min(readings[call].grid[-2:]) >= FINE
    ]
    coarsest = min((math.prod(readings[call].grid) for call in fine), default=0)
    latest = list(dict.fromkeys(trace.outermost(call) for call in fine if math.prod(readings[call].grid) == coarsest))
    latest.reverse()
    latest.sort(key=lambda call: call.name.count("."))
    # The last block of a stage is among the first four.
    last = next((call for call in latest[:4] if _carries_all(influence, call)), None)
    if last is None or _is_balanced(influence, last):
        return None
    named = "x".join(map(str, readings[last].grid))
    return layer_at(trace, readings, last, f"the deepest {named} grid, which carries the whole score")
