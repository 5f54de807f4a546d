"""The last stage: choose the deepest layer with a spatial grid whose cells still influence the score.

``decide`` runs all stages on a model and one image: it traces a pass, reads the layouts of its outputs, locates their
cells, and measures which of them the score depends on, and how much of it they carry. No stage decides by a name.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.interrupts import interruptible
from camkit.engine.passes import differentiated
from camkit.engine.record import ModelRecord
from camkit.errors import LayerError, advice, listing_layers
from camkit.layers.influence import (
    ELSEWHERE,
    NOT_MEASURED,
    Influence,
    ends_beside,
    measure_influence,
    shared,
    structural_verdict,
    twins,
)
from camkit.layers.layouts import TOKENS, LayoutReadings, channels_of, read_layouts
from camkit.layers.levels import last_before_all_boxes, levels_of
from camkit.layers.share import WHOLE, Carried, carried, is_balanced, takes_one_cell
from camkit.layers.trace import LivePass, Trace, TracedCall, traced
from camkit.methods.registry import FINE
from camkit.models import refuse_black_box
from camkit.targets.scores import Target
from camkit.types import LayerRef, Layout, TargetLayer

_RUNNERS_UP = 3
"""How many of the next best layers are listed: enough to try, few enough to read."""

_LISTED = 6
"""How many layers an error message lists: the last ones are the likely choices, and six fit on one line."""

_STAGES = 4
"""How many sizes of grid ``Decision.stages`` returns: as many as the usual networks have blocks."""

_MOST_TRIED = 4
"""How many layers with a finer grid are tried: the last block of a stage is among the first ones."""

_MOST_WEAK = 4
"""How many layers that carry next to nothing are passed over before camkit gives up and says so."""

HoldsFor: TypeAlias = Literal["model", "weights", "picture"]
"""What a decision holds for; see ``Decision``."""

UNSURE = "; the position of its cells is not certain"


@dataclass(frozen=True)
class LayerRow:
    """What the stages found out about one call of one module.

    Attributes:
        ref: the module's name, and the number of the call if the module runs several times.
        kind: the name of its class.
        shape: the shape of its output; None if it returned no maps.
        layout: how the output is laid out; None if it has no grid.
        verdict: why it cannot be explained; empty if it can.
        unsure: True if the position of its cells is not certain.
    """

    ref: LayerRef
    kind: str
    shape: tuple[int, ...] | None
    layout: Layout | None
    verdict: str = ""
    unsure: bool = False


class Levels(tuple[TargetLayer, ...]):
    """The grids of a detector's boxes, from the finest to the coarsest: the maps of all are added."""


@dataclass(frozen=True)
class Decision:
    """What the stages decided about a model's layers for one input size.

    Attributes:
        rows: one for each call of a module, in the order in which the calls finished.
        layer: the layer to explain; None if there is none, or if several are equally deep.
        equals: the layers that are equally deep, none of them computed from another.
        lasting: True if it may be remembered. It is false if the influence could not be measured, as with a head of
            zeros.
        holds_for: what it holds for: all pictures and weights of the "model"; these "weights", if a gate of zero may
            hide a layer, if only a measurement shows where cells lie, or if a deeper layer carries too little; or
            this "picture", if the model looks at the picture's values to choose its way.
        any_target: True if it holds for any target, because all outputs of the model are computed from the layer.
        finer: a layer before it that carries the whole score, and whose grid is finer; None if there is none, or if the
            layer's own grid is fine enough.
        levels: a layer of each grid, for a detector whose boxes come from several; None for other models.
    """

    rows: tuple[LayerRow, ...]
    layer: TargetLayer | None
    equals: tuple[LayerRow, ...] = ()
    lasting: bool = True
    holds_for: HoldsFor = "model"
    any_target: bool = False
    finer: TargetLayer | None = None
    levels: Levels | None = None

    @property
    def has_tokens(self) -> bool:
        """True if the layer's output has the tokens of a transformer."""
        return self.layer is not None and self.layer.layout is not None and self.layer.layout.kind in TOKENS

    def candidates(self) -> str:
        """Return the last spatial layers and their shapes, for an error message."""
        spatial = [row for row in self.rows if row.layout is not None and row.ref.name]
        return ", ".join(f"{row.ref} {row.shape}" for row in spatial[-_LISTED:])

    def row_of(self, ref: LayerRef) -> LayerRow | None:
        """Return the row of a layer; None if it did not run."""
        return next((row for row in self.rows if (row.ref.name, row.ref.call or 1) == (ref.name, ref.call or 1)), None)

    def chosen(self) -> TargetLayer:
        """Return the layer to explain.

        Raises:
            LayerError: there is none, or several are equally deep; the message lists the candidates.
        """
        if self.equals:
            listed = ", ".join(f"{row.ref} {row.shape}" for row in self.equals)
            names = ", ".join(repr(str(row.ref)) for row in self.equals)
            options = " ".join(f"--layer {row.ref}" for row in self.equals)
            raise LayerError(
                f"the model ends in {len(self.equals)} branches that are equally deep: {listed}; name one of them, or "
                f"fuse them all with {advice(f'target_layer=[{names}]', options)}"
            )
        if self.layer is None and any(row.verdict == ELSEWHERE for row in self.rows):
            raise LayerError(
                "in every layer the cells lie elsewhere in the input than their shape suggests, as if the model crops, "
                "mirrors or reorders its input; explain the network inside the model, with pictures that are already "
                "prepared"
            )
        if self.layer is None:
            candidates = self.candidates()
            name_one = f"name one with {advice('target_layer', '--layer')}: {candidates}"
            raise LayerError(
                "no layer with a spatial grid influences the score, so camkit cannot choose one; "
                + (name_one if candidates else "the methods 'occlusion' and 'rise' need none")
            )
        return self.layer

    def of_tokens(self, size: tuple[int, ...]) -> TargetLayer:
        """Return a layer whose output has the tokens of a transformer, in the layout that most layers share.

        Raises:
            LayerError: as for ``chosen``, if no layer has tokens.
        """
        rows = [row for row in self.rows if row.layout is not None and row.layout.kind in TOKENS]
        usable = [row for row in rows if row.ref.name and row.verdict != ELSEWHERE]
        sure = [row for row in usable if not row.unsure]
        if not sure and any(row.verdict == ELSEWHERE for row in self.rows):
            raise LayerError("the tokens are in another order than the cells of a grid")
        usable = sure or usable
        if not usable:
            return self.chosen()
        (layout, _), *_ = Counter(row.layout for row in usable).most_common(1)
        last = next(row for row in reversed(usable) if row.layout == layout)
        return self.named(last.ref, size, "its output has the tokens")

    def stages(self) -> tuple[TargetLayer, ...]:
        """Return the last layers of the four coarsest grids, the layer to explain among them, in execution order.

        Of the layers with one grid, those with the shortest names count, which are the model's own blocks.

        Raises:
            LayerError: as for ``chosen``.
        """
        chosen = self.chosen()
        last = self.row_of(chosen.ref)
        assert last is not None
        by_grid: dict[tuple[int, ...], LayerRef] = {}
        for row in self.rows[: self.rows.index(last)]:
            usable = row.verdict in ("", NOT_MEASURED) and row.ref.name and not row.unsure
            if not usable or row.layout is None or chosen.layout is None or row.layout.grid == chosen.layout.grid:
                continue
            kept = by_grid.get(row.layout.grid)
            if kept is None or row.ref.name.count(".") <= kept.name.count("."):
                by_grid[row.layout.grid] = row.ref
        reason = f"the last layer of its grid; {chosen.reason}"
        earlier = sorted(by_grid.items(), key=lambda item: -math.prod(item[0]))[-_STAGES + 1 :]
        return (*(self.named(ref, chosen.size, reason) for _, ref in earlier), chosen)

    def named(self, ref: LayerRef, size: tuple[int, ...], reason: str) -> TargetLayer:
        """Return the target layer for a layer that the caller named.

        Raises:
            LayerError: the layer's cells lie elsewhere in the input than its shape suggests.
        """
        row = self.row_of(ref)
        if row is not None and row.verdict == ELSEWHERE:
            raise LayerError(
                f"layer {str(row.ref)!r} returned shape {row.shape}, but its cells lie elsewhere in the input than "
                "this shape suggests, so camkit cannot draw a map; choose another layer "
                f"({listing_layers()})"
            )
        unsure = row is not None and row.unsure
        layout = None if row is None else row.layout
        return TargetLayer(ref.name, ref.call, layout, size, reason + UNSURE * unsure, sure=not unsure)


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
            return choose_in(live, every=every)

    return differentiated(run)


def choose_in(live: LivePass, *, every: bool = False) -> Decision:
    """Run the stages after the trace on a pass whose tensors are kept; ``every`` is that of ``decide``."""
    trace = live.trace
    readings = read_layouts(trace, live.places)
    if trace.detects:
        return choose_for_boxes(trace, readings, functools.partial(takes_one_cell, live))
    influence = measure_influence(trace, readings, live.gradients)
    everywhere = functools.cache(lambda: measure_influence(trace, readings, live.gradients, every=True))
    by_call = dict(zip(trace.calls, readings, strict=True))

    @functools.cache
    def carries(call: TracedCall) -> Carried:
        layout, ref = by_call[call].layout, _outermost(call, trace)
        named = next(other for other in trace.by_output[call.output] if trace.refs[other] == ref)
        if layout is None or not influence.measured:
            return Carried()
        return carried(live, named, layout, constant=bool(influence.note))

    def balanced(call: TracedCall) -> bool:
        layout = by_call[call].layout
        return layout is not None and is_balanced(live, call, layout)

    decision = choose(trace, readings, influence, carries, everywhere, balanced)
    decision = replace(decision, holds_for=_holds_for(trace, influence, decision.holds_for))
    return replace(decision, rows=_rows(trace, readings, everywhere().verdicts)) if every else decision


def _holds_for(trace: Trace, influence: Influence, chosen_for: HoldsFor) -> HoldsFor:
    """Tell what a decision holds for; see ``Decision``."""
    if "picture" in trace.reads:
        return "picture"
    return "weights" if trace.reads or influence.hidden else chosen_for


def choose_for_boxes(
    trace: Trace, readings: LayoutReadings, takes_one: Callable[[TracedCall, Layout], bool]
) -> Decision:
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
    usable: dict[TracedCall, Layout | None] = {}
    verdicts: list[str] = []
    for call, reading in zip(trace.calls, readings, strict=True):
        verdict = structural_verdict(call, reading.layout, elsewhere=reading.elsewhere)
        beside = graph.is_regional(call.operation) if pyramid is None else not call.is_among(common)
        verdicts.append(verdict or ("not every box is computed from it" if beside else ""))
        # The rows of all boxes may happen to form a grid, whose place is not certain then.
        if not verdict and call.name and not reading.unsure and not graph.is_regional(call.operation):
            usable[call] = reading.layout
    rows = _rows(trace, readings, verdicts)
    of_levels = levels_of(trace, usable)
    if of_levels:
        refs = [_outermost(call, trace) for call in of_levels]
        layouts = [_layout_of(ref, trace, readings) for ref in refs]
        reason = f"the inputs of the neck, {len(refs)} grids that all boxes are computed from"
        pairs = zip(refs, layouts, strict=True)
        levels = Levels(TargetLayer(ref.name, ref.call, layout, trace.size, reason) for ref, layout in pairs)
        return Decision(rows, levels[-1], any_target=True, levels=levels)
    last = last_before_all_boxes(trace, usable, takes_one)
    first: dict[int | None, int] = {}
    for number, call in enumerate(trace.calls):  # an outer module may return the earlier output of an inner one
        first.setdefault(call.output, number)
    fit = [trace.calls[number] for number in first.values() if trace.calls[number].name and not verdicts[number]]
    fit = [call for call in fit if call is not last] + ([] if last is None else [last])
    if not fit:
        return Decision(rows, None)
    chosen = _outermost(fit[-1], trace)
    others = _apart([_outermost(call, trace) for call in reversed(fit)], chosen)
    layout = _layout_of(chosen, trace, readings)
    grid = "x".join(map(str, layout.grid)) if layout is not None else ""
    reason = f"the deepest grid, {grid}, that every box is computed from"
    layer = TargetLayer(chosen.name, chosen.call, layout, trace.size, reason, tuple(others))
    return Decision(rows, layer, any_target=True)


def choose(
    trace: Trace,
    readings: LayoutReadings,
    influence: Influence,
    carries: Callable[[TracedCall], Carried] = lambda _: Carried(),
    every: Callable[[], Influence] | None = None,
    balanced: Callable[[TracedCall], bool] = lambda _: False,
) -> Decision:
    """Choose the deepest layer whose cells lie where its layout says, influence the score, and carry enough of it.

    Args:
        trace, readings, influence: the results of the stages before.
        carries: measures what the cells of a layer carry; by default, nothing is known.
        every: measures the influence of every layer; called if the deepest one carries next to nothing.
        balanced: tells whether activations times gradients add up to 0 in each cell; by default, they do not.
    """
    layouts = {call: reading.layout for call, reading in zip(trace.calls, readings, strict=True)}
    rows = _rows(trace, readings, influence.verdicts)
    lasting = influence.measured and not influence.note
    fit, wide = _usable(trace, layouts, influence)
    deepest = best = _deepest(trace, layouts, wide or fit)
    if deepest is None or best is None:
        return Decision(rows, None, lasting=lasting)
    weak: list[TracedCall] = []
    if carries(deepest).is_small:
        if carries(deepest).is_weak and every is not None:
            fit, wide = _usable(trace, layouts, every())
        best, weak = _deepest_carrying(trace, layouts, wide or fit, deepest, carries)
    ends = twins(trace.graph, best, [call for call in wide if call.name], layouts)
    branches = [call for call in ends if call is best or not carries(call).is_negligible_beside(carries(best))]
    weak += [call for call in ends if call not in branches]
    beside = trace.before_the_score(*weak) if weak else -1
    named = [call for call in wide if call.name and (not weak or call.is_among(beside))]
    common = shared(trace, branches, named) if len(branches) > 1 else None
    holds_for: HoldsFor = "weights" if weak or carries(best).is_weak else "model"
    if len(branches) > 1 and common is None:
        names = {_outermost(call, trace) for call in branches}
        equals = tuple(row for row in rows if row.ref in names)
        return Decision(rows, None, equals, lasting, holds_for)
    chosen = common or best
    of_chosen = carries(chosen)
    layer = _described(chosen, trace, readings, fit, named, influence, of_chosen)
    finer = _finer(trace, readings, influence, chosen, carries, balanced)
    return Decision(rows, layer, (), lasting, holds_for, of_chosen.everything, finer)


def _finer(
    trace: Trace,
    readings: LayoutReadings,
    influence: Influence,
    chosen: TracedCall,
    carries: Callable[[TracedCall], Carried],
    balanced: Callable[[TracedCall], bool],
) -> TargetLayer | None:
    """Return the layer of ``Decision.finer``.

    Of the grids that are fine enough the coarsest counts, and of its layers those with the shortest names, which are
    the model's own blocks; of these, the last one that carries the whole score. If activations times gradients add up
    to 0 in each of its cells, there is none: the positive products alone say no more of one class than of another.
    """
    by_call = dict(zip(trace.calls, readings, strict=True))
    grid = getattr(by_call[chosen].layout, "grid", ())
    if not grid or min(grid[-2:]) >= FINE:
        return None
    before = trace.graph.ancestors(chosen.operation)
    fine: list[tuple[TracedCall, Layout]] = []
    for call, verdict in zip(trace.calls, influence.verdicts, strict=True):
        reading = by_call[call]
        is_usable = call.name and verdict in ("", NOT_MEASURED) and not reading.unsure and call.is_among(before)
        layout = reading.layout
        if is_usable and layout is not None and len(layout.grid) == len(grid) and min(layout.grid[-2:]) >= FINE:
            fine.append((call, layout))
    if not fine:
        return None
    coarsest = min(math.prod(layout.grid) for _, layout in fine)
    refs = {_outermost(call, trace): call for call, layout in fine if math.prod(layout.grid) == coarsest}
    latest = list(refs)[::-1]
    latest.sort(key=lambda ref: ref.name.count("."))
    for ref in latest[:_MOST_TRIED]:
        if (carries(refs[ref]).share or 0) > WHOLE:
            if balanced(refs[ref]):
                return None
            layout = _layout_of(ref, trace, readings)
            named = "" if layout is None else "x".join(map(str, layout.grid))
            reason = f"the deepest {named} grid, which carries the whole score"
            return TargetLayer(ref.name, ref.call, layout, trace.size, reason, share=1.0)
    return None


def _usable(
    trace: Trace, layouts: Mapping[TracedCall, Layout | None], influence: Influence
) -> tuple[list[TracedCall], list[TracedCall]]:
    """Return the calls that nothing speaks against, and those of them with several channels: one channel is a gate."""
    fit = [call for call, verdict in zip(trace.calls, influence.verdicts, strict=True) if not verdict]
    return fit, [call for call in fit if channels_of(call.shape, layouts[call]) > 1]


def _deepest_carrying(
    trace: Trace,
    layouts: dict[TracedCall, Layout | None],
    usable: Sequence[TracedCall],
    deepest: TracedCall,
    carries: Callable[[TracedCall], Carried],
) -> tuple[TracedCall, list[TracedCall]]:
    """Return the deepest layer that carries the score, and the deeper ones that carry too little beside it.

    Each layer that is tried has a path to the score that avoids all layers tried before. If no layer carries the score,
    the deepest one is returned.
    """
    passed = [deepest]
    for _ in range(_MOST_WEAK if carries(deepest).is_weak else 1):
        beside = trace.before_the_score(*passed)
        best = _deepest(trace, layouts, [call for call in usable if call.is_among(beside)])
        if best is None:
            break
        candidate = carries(best)
        if not candidate.is_weak and all(carries(call).is_negligible_beside(candidate) for call in passed):
            return best, passed
        passed.append(best)
    return deepest, []


def _rows(trace: Trace, readings: LayoutReadings, verdicts: Sequence[str]) -> tuple[LayerRow, ...]:
    return tuple(
        LayerRow(
            trace.refs[call],
            call.kind,
            None if call.output is None else call.shape,
            reading.layout,
            verdict,
            reading.unsure and reading.layout is not None,
        )
        for call, reading, verdict in zip(trace.calls, readings, verdicts, strict=True)
    )


def _deepest(trace: Trace, layouts: dict[TracedCall, Layout | None], fit: Sequence[TracedCall]) -> TracedCall | None:
    """Return the last call whose output has usable cells that no later step still refines.

    For most networks this is the last usable output. But a module may end the grid, such as an attention pool or an
    attention from which only the class token goes on. The keys and values inside it are usable too, and its input is
    chosen instead.
    """
    fit = [call for call in fit if call.name]
    if not fit:
        return None
    # The first of a module's several outputs may be an earlier layer's: features beside the scores.
    last = next((call for call in reversed(fit) if call.alone or trace.by_output[call.output][0] is call), fit[-1])
    # A module that ends another grid, such as the classifier of a coarser branch, says nothing about this one.
    last_layout = layouts[last]
    grid = None if last_layout is None else last_layout.grid
    by_output = {call.output: call for call in fit}
    before = trace.graph.ancestors(last.operation)
    if last.operation is not None:
        before &= ~(1 << last.operation)
    # A module that starts after the last output but uses an earlier one, such as a late gate, is a side branch.
    beside = {
        output: call
        for output, call in by_output.items()
        if (layout := layouts[call]) is not None and layout.grid == grid and not call.is_among(before)
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


def _grid_inputs(call: TracedCall, by_output: dict[int | None, TracedCall]) -> list[TracedCall]:
    return [by_output[argument] for argument in call.arguments if argument in by_output]


def _outermost(call: TracedCall, trace: Trace) -> LayerRef:
    """Return the shortest name of a module that returns the call's output, preferably of one that runs once.

    Modules that return only this output come first: another tensor beside it may already be computed from it.
    """
    returning = [other for other in trace.by_output[call.output] if other.name]
    refs = [trace.refs[other] for other in returning if other.alone] or [trace.refs[other] for other in returning]
    return min(refs, key=lambda ref: (ref.call is not None, ref.name.count("."), len(ref.name)))


def _layout_of(ref: LayerRef, trace: Trace, readings: LayoutReadings) -> Layout | None:
    """Return how the output of a layer that ran is laid out."""
    return next(reading.layout for call, reading in zip(trace.calls, readings, strict=True) if trace.refs[call] == ref)


def _apart(named: Sequence[LayerRef], chosen: LayerRef) -> list[LayerRef]:
    """Return the next best layers, none inside another; parts of the chosen layer only if there is no other."""
    inside = chosen.name + "."
    outside = [ref for ref in named if ref != chosen and not ref.name.startswith(inside)]
    listed: list[LayerRef] = []
    for ref in outside or [ref for ref in named if ref != chosen]:
        if len(listed) < _RUNNERS_UP and not any(f"{ref.name}.".startswith(f"{other.name}.") for other in listed):
            listed.append(ref)
    return listed


def _described(
    best: TracedCall,
    trace: Trace,
    readings: LayoutReadings,
    fit: Sequence[TracedCall],
    wide: Sequence[TracedCall],
    influence: Influence,
    of_best: Carried,
) -> TargetLayer:
    """Return the chosen layer with its layout, its reason and the runners-up."""
    by_call = dict(zip(trace.calls, readings, strict=True))
    reading = by_call[best]
    assert reading.layout is not None
    grid = "x".join(map(str, reading.layout.grid))
    named = [_outermost(call, trace) for call in reversed(fit) if call.name and call.started <= best.finished]
    chosen = _outermost(best, trace)
    evidence = "whose cells influence the score" if influence.measured else "(its influence could not be measured)"
    doubt = UNSURE if reading.unsure else ""
    if any(
        by_call[call].elsewhere and call.started > best.started and call.finished > best.finished for call in by_call
    ):
        doubt += "; the cells of deeper layers lie elsewhere in the input"
    names = list(dict.fromkeys(str(_outermost(call, trace)) for call in ends_beside(trace.graph, best, wide)))
    beside = f"; the score also depends on {' and '.join(names)}" if names else ""
    return TargetLayer(
        chosen.name,
        chosen.call,
        _layout_of(chosen, trace, readings),
        trace.size,
        f"the deepest {grid} grid {evidence}{influence.note}{of_best.remark}{doubt}{beside}",
        tuple(_apart(named, chosen)),
        sure=not reading.unsure and of_best.is_sound,
        share=of_best.share,
    )
