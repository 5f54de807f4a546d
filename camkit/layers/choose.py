"""The last stage: choose the deepest layer with a spatial grid whose cells still influence the score.

``decide`` runs all stages on a model and one image: it traces a pass, reads the layouts of its outputs, locates their
cells, and measures which of them the score depends on, and how much of it they carry. No stage decides by a name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.interrupts import interruptible
from camkit.engine.passes import differentiated
from camkit.engine.record import ModelRecord
from camkit.layers.decision import UNSURE, Decision, HoldsFor, layer_at, next_best, rows_of
from camkit.layers.influence import NOT_MEASURED, Influence, ends_beside, measure_influence, shared, twins
from camkit.layers.layouts import LayoutReadings, channels_of, read_layouts
from camkit.layers.levels import choose_for_boxes
from camkit.layers.share import WHOLE, Carried, carried, is_balanced
from camkit.layers.trace import LivePass, Trace, TracedCall, traced
from camkit.methods.registry import FINE
from camkit.models import refuse_black_box
from camkit.targets.scores import Target
from camkit.types import TargetLayer

_MOST_TRIED = 4
"""How many layers with a finer grid are tried: the last block of a stage is among the first ones."""

_MOST_WEAK = 4
"""How many layers that carry next to nothing are passed over before camkit gives up and says so."""


@dataclass(frozen=True, eq=False)
class Stages:
    """What the stages found out about a pass, and what can still be measured in it.

    Attributes:
        trace: what each call returned, and from which values.
        readings: where the cells of each output lie.
        influence: on which of them the score depends.
        live: the pass itself; None for a recorded trace, in which nothing more can be measured.
    """

    trace: Trace
    readings: LayoutReadings
    influence: Influence
    live: LivePass | None = None
    _carried: dict[TracedCall, Carried] = field(default_factory=dict)

    @functools.cached_property
    def everywhere(self) -> Influence:
        """The influence of every layer; ``influence`` may leave out those before the deepest."""
        if self.live is None:
            return self.influence
        return measure_influence(self.trace, self.readings, self.live.gradients, every=True)

    def carries(self, call: TracedCall) -> Carried:
        """Measure what the cells of a layer carry, once for each output."""
        call, layout = self.trace.outermost(call), self.readings[call].layout
        if self.live is None or layout is None or not self.influence.measured:
            return Carried()
        if call not in self._carried:
            self._carried[call] = carried(self.live, call, layout, constant=bool(self.influence.note))
        return self._carried[call]

    def is_balanced(self, call: TracedCall) -> bool:
        """Tell whether activations times gradients add up to 0 in each cell."""
        layout = self.readings[call].layout
        return self.live is not None and layout is not None and is_balanced(self.live, call, layout)

    def wide(self, calls: Sequence[TracedCall]) -> list[TracedCall]:
        """Return the calls whose outputs have several channels: a single one is a gate."""
        return [call for call in calls if channels_of(call.shape, self.readings[call].layout) > 1]


def decide(
    model: nn.Module,
    image: Float[Tensor, "1 c *size"],
    record: ModelRecord | None = None,
    *,
    every: bool = False,
    target: Target | None = None,
) -> Decision:
    """Run all stages on a model: one pass over an image, a backward pass over its end, and three more passes if needed.

    Args:
        model: the model; it is restored exactly.
        image: one input on the model's device.
        record: the model's record, if it is already prepared.
        every: measure the influence of every layer, for a list of all. It costs one more backward pass and changes no
            choice.
        target: the target whose score counts; None for the model's main output.

    Raises:
        LayerError: the model is a black box.
        Exception: whatever the target raises.
    """
    refuse_black_box(model)
    score = None if target is None else lambda output: target(output, 1).values.sum()

    def run() -> Decision:
        with traced(model, image, record, score) as live, interruptible():
            return _decided(live, every=every)

    return differentiated(run)


def _decided(live: LivePass, *, every: bool) -> Decision:
    """Run the stages after the trace on a pass whose tensors are kept."""
    trace = live.trace
    readings = read_layouts(trace, live.places)
    if trace.detects:
        return choose_for_boxes(live, readings)
    stages = Stages(trace, readings, measure_influence(trace, readings, live.gradients), live)
    decision = choose(stages)
    return replace(decision, rows=rows_of(trace, readings, stages.everywhere.verdicts)) if every else decision


def choose(stages: Stages) -> Decision:
    """Choose the deepest layer whose cells lie where its layout says, influence the score, and carry enough of it."""
    trace, readings, influence, carries = stages.trace, stages.readings, stages.influence, stages.carries
    lasting = influence.measured and not influence.note
    decision = Decision(trace.size, rows_of(trace, readings, influence.verdicts), lasting=lasting)
    fit = influence.usable
    deepest = best = _deepest(stages, stages.wide(fit) or fit)
    if deepest is None or best is None:
        return replace(decision, holds_for=_holds_for(stages, weak=False))
    weak: list[TracedCall] = []  # layers that carry too little beside others
    if carries(deepest).is_small:
        fit = stages.everywhere.usable if carries(deepest).is_weak else fit
        best, weak = _deepest_carrying(stages, fit, deepest)
    wide = [call for call in stages.wide(fit) if call.name]
    # Other branches may end in the same grid. Without those that carry too little, a layer before all may stand for
    # them; if there is none, the caller must say which branch counts.
    ends = twins(trace, readings, best, wide)
    branches = [call for call in ends if call is best or not carries(call).is_negligible_beside(carries(best))]
    weak += [call for call in ends if call not in branches]
    decision = replace(decision, holds_for=_holds_for(stages, weak=bool(weak) or carries(best).is_weak))
    if weak:
        beside = trace.before_the_score(*weak)
        wide = [call for call in wide if call.is_among(beside)]
    common = shared(trace, branches, wide)
    if len(branches) > 1 and common is None:
        refs = {trace.ref_of(call) for call in branches}
        return replace(decision, equals=tuple(row for row in decision.rows if row.ref in refs))
    chosen = common or best
    layer = _described(stages, chosen, fit, wide)
    return replace(decision, layer=layer, any_target=carries(chosen).everything, finer=_finer(stages, chosen))


def _holds_for(stages: Stages, *, weak: bool) -> HoldsFor:
    """Tell what a decision holds for; see ``Decision``."""
    if "picture" in stages.trace.reads:
        return "picture"
    return "weights" if stages.trace.reads or stages.influence.hidden or weak else "model"


def _deepest(stages: Stages, fit: Sequence[TracedCall]) -> TracedCall | None:
    """Return the last call whose output has usable cells that no later step still refines.

    For most networks this is the last usable output. But a module may end the grid, such as an attention pool or an
    attention from which only the class token goes on. The keys and values inside it are usable too, and its input is
    chosen instead.
    """
    trace, readings = stages.trace, stages.readings
    fit = [call for call in fit if call.name]
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
    fitting = set(fit)
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


def _deepest_carrying(
    stages: Stages, fit: Sequence[TracedCall], deepest: TracedCall
) -> tuple[TracedCall, list[TracedCall]]:
    """Return the deepest layer that carries the score, and the deeper ones that carry too little beside it.

    Each layer that is tried has a path to the score that avoids all layers tried before. If no layer carries the score,
    the deepest one is returned.
    """
    usable = stages.wide(fit) or fit
    passed = [deepest]
    for _ in range(_MOST_WEAK if stages.carries(deepest).is_weak else 1):
        beside = stages.trace.before_the_score(*passed)
        best = _deepest(stages, [call for call in usable if call.is_among(beside)])
        if best is None:
            break
        candidate = stages.carries(best)
        if not candidate.is_weak and all(stages.carries(call).is_negligible_beside(candidate) for call in passed):
            return best, passed
        passed.append(best)
    return deepest, []


def _described(stages: Stages, best: TracedCall, fit: Sequence[TracedCall], wide: Sequence[TracedCall]) -> TargetLayer:
    """Return the chosen layer with its layout, its reason and the next best ones."""
    trace, reading, influence, of_best = stages.trace, stages.readings[best], stages.influence, stages.carries(best)
    grid = "x".join(map(str, reading.grid))
    evidence = "whose cells influence the score" if influence.measured else "(its influence could not be measured)"
    doubt = UNSURE if reading.unsure else ""
    deeper = [call for call in trace.calls if call.started > best.started and call.finished > best.finished]
    if any(stages.readings[call].elsewhere for call in deeper):
        doubt += "; the cells of deeper layers lie elsewhere in the input"
    names = list(dict.fromkeys(str(trace.ref_of(call)) for call in ends_beside(trace, best, wide)))
    beside = f"; the score also depends on {' and '.join(names)}" if names else ""
    reason = f"the deepest {grid} grid {evidence}{influence.note}{of_best.remark}{doubt}{beside}"
    earlier = [trace.ref_of(call) for call in reversed(fit) if call.name and call.started <= best.finished]
    others = next_best(earlier, trace.ref_of(best))
    sure = not reading.unsure and of_best.is_sound
    return layer_at(trace, stages.readings, best, reason, runners_up=others, sure=sure, share=of_best.share)


def _finer(stages: Stages, chosen: TracedCall) -> TargetLayer | None:
    """Return the layer of ``Decision.finer``.

    Of the grids that are fine enough the coarsest counts, and of its layers those with the shortest names, which are
    the model's own blocks; of these, the last one that carries the whole score. If activations times gradients add up
    to 0 in each of its cells, there is none: the positive products alone say no more of one class than of another.
    """
    trace, readings, grid = stages.trace, stages.readings, stages.readings[chosen].grid
    if not grid or min(grid[-2:]) >= FINE:
        return None
    before = trace.graph.ancestors(chosen.operation)
    fine = [
        call
        for call, verdict in stages.influence.verdicts.items()
        if call.name
        and verdict in ("", NOT_MEASURED)
        and not readings[call].unsure
        and call.is_among(before)
        and len(readings[call].grid) == len(grid)
        and min(readings[call].grid[-2:]) >= FINE
    ]
    coarsest = min((math.prod(readings[call].grid) for call in fine), default=0)
    latest = list(dict.fromkeys(trace.outermost(call) for call in fine if math.prod(readings[call].grid) == coarsest))
    latest.reverse()
    latest.sort(key=lambda call: call.name.count("."))
    last = next((call for call in latest[:_MOST_TRIED] if (stages.carries(call).share or 0) > WHOLE), None)
    if last is None or stages.is_balanced(last):
        return None
    named = "x".join(map(str, readings[last].grid))
    return layer_at(trace, readings, last, f"the deepest {named} grid, which carries the whole score", share=1.0)
