"""Finds the layer to explain: the deepest one with a spatial grid whose cells still influence the score.

One probe pass over a single image lists every module's output in execution order. Two more, with parts of the image
exchanged, show where the cells of each output lie, and a backward pass over the last layers tells on which of them the
score depends. Nothing is decided by a module's name, and it is done once per model and size of input.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.restore import eagerly, evaluating, same_randomness, switch_off_training
from camkit.errors import LayerError, did_you_mean
from camkit.layers.branches import ends_beside, shared, twins
from camkit.layers.lineage import ancestors, is_regional
from camkit.layers.location import place
from camkit.layers.trace import Call, Influence, class_count, detections_in, lay_out, score_of, scored_tensor, watch
from camkit.types import LayerChoice, LayerRef, LayerRow, Layout

_PASSING = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.Flatten,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
"""Modules that compute no features: what they return is their input, or its summary."""

_RUNNERS_UP = 3

_ELSEWHERE = "its cells lie elsewhere in the input"
_UNSURE = "; where its cells lie could not be measured"


@dataclass(frozen=True)
class Probe:
    """What one pass showed: a row per call of a module in the order they finished, and the layer to explain."""

    rows: tuple[LayerRow, ...]
    choice: LayerChoice | None
    equals: tuple[LayerRow, ...] = ()
    """Layers of which none is computed from another, all as deep as the choice would be: so there is none."""

    def candidates(self) -> str:
        """List the last spatial layers with their shapes, for an error message."""
        spatial = [row for row in self.rows if row.layout is not None and row.ref.name]
        return ", ".join(f"{row.ref} {row.shape}" for row in spatial[-6:])


_probes: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Probe]] = weakref.WeakKeyDictionary()


def probe(model: nn.Module, image: Float[Tensor, "1 c *size"]) -> Probe:
    """Look at the model with three passes over one image and a backward pass from its score.

    What was measured is remembered for inputs of this size while the module lives and keeps its parts and switches.

    Args:
        model: left exactly as it was found.
        image: one input on the model's device.
    """
    remembered = _probes.setdefault(model, {})
    key = _key(model, image)
    if key not in remembered:
        found, measured = _probe(model, image)
        if not measured:
            return found
        remembered[key] = found
    return remembered[key]


def _key(model: nn.Module, image: Tensor) -> tuple[Any, ...]:
    parts = tuple((name, id(module), _switches(module)) for name, module in model.named_modules())
    return tuple(image.shape), image.dtype, hash(parts)


def _switches(module: nn.Module) -> tuple[tuple[str, bool | str], ...]:
    """Return the attributes that choose what a module does, such as ``early_exit=True``; not its mode."""
    known = ((name, value) for name, value in vars(module).items() if isinstance(value, (bool, str)))
    return tuple((name, value) for name, value in known if name != "training")


def resolve(model: nn.Module, image: Float[Tensor, "1 c *size"]) -> LayerChoice:
    """Choose the layer to explain.

    Raises:
        LayerError: no layer has a spatial grid that influences the score; the message lists what there is.
    """
    found = probe(model, image)
    if found.equals:
        listed = ", ".join(f"{row.ref} {row.shape}" for row in found.equals)
        both = ", ".join(repr(str(row.ref)) for row in found.equals)
        options = " ".join(f"--layer {row.ref}" for row in found.equals)
        raise LayerError(
            f"the model ends in {len(found.equals)} branches that are equally deep: {listed}; name one, or all to have "
            f"them fused: target_layer=[{both}] ({options})"
        )
    if found.choice is None and any(row.verdict == _ELSEWHERE for row in found.rows):
        raise LayerError(
            "in no layer do the cells lie in the places of the input, as where a model crops, mirrors or reorders it; "
            "explain the network inside it, with pictures that are prepared so already"
        )
    if found.choice is None:
        raise LayerError(
            "no layer with a spatial grid influences the score, so none can be chosen; name one with target_layer "
            "(--layer)" + (f": {found.candidates()}" if found.candidates() else "")
        )
    return found.choice


def looked_at(
    model: nn.Module, image: Float[Tensor, "1 c *size"], choice: LayerChoice
) -> tuple[LayerChoice, Mapping[LayerRef, Layout | None] | None]:
    """Return layers with how a probe saw their outputs laid out; None for one that has no grid.

    None instead of all where the model takes no single image, so that it could not be looked at. The reason of layers
    that the caller named says where their cells' places could not be measured.

    Raises:
        LayerError: a layer's cells were seen to lie elsewhere in the input than its shape says.
    """
    if choice.layouts:
        return choice, {ref: choice.layouts.get(ref) for ref in choice.layers}
    try:
        found = probe(model, image)
    except Exception:  # noqa: BLE001 - whatever a model raises that was made for batches of another number
        return choice, None
    seen = _seen(found, choice.layers)
    elsewhere = next((row for row in seen.values() if row.verdict == _ELSEWHERE), None)
    if elsewhere is not None:
        raise LayerError(
            f"the cells of layer {str(elsewhere.ref)!r}, which returned shape {elsewhere.shape}, lie elsewhere in the "
            "input than its shape says, so no map can be drawn; choose another (camkit layers --model NAME lists them)"
        )
    if any(row.unsure for row in seen.values()):
        choice = replace(choice, reason=choice.reason + _UNSURE)
    return choice, {ref: seen[ref].layout if ref in seen else None for ref in choice.layers}


def _seen(found: Probe, layers: Sequence[LayerRef]) -> dict[LayerRef, LayerRow]:
    """Return the rows of some layers; nothing of one that did not run."""
    rows = {(row.ref.name, row.ref.call or 1): row for row in found.rows}
    return {ref: rows[ref.name, ref.call or 1] for ref in layers if (ref.name, ref.call or 1) in rows}


def named_layers(model: nn.Module, layers: str | nn.Module | Sequence[str | nn.Module]) -> LayerChoice:
    """Turn the caller's layers into a choice: modules, or dotted names such as ``"layer4"`` (``"relu#3"``: 3rd call).

    Raises:
        LayerError: there is no such layer in the model; the message names the nearest.
    """
    if not isinstance(layers, (str, nn.Module, Iterable)):
        raise LayerError(f"a target layer is a dotted name or a module of the model, not {layers!r}")
    asked = [layers] if isinstance(layers, (str, nn.Module)) else list(layers)
    if not asked:
        raise LayerError("the list of target layers is empty; pass None to have the layer chosen")
    refs = tuple(dict.fromkeys(_find(model, layer) for layer in asked))
    return LayerChoice(refs, "as asked for")


def _find(model: nn.Module, layer: str | nn.Module) -> LayerRef:
    names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    if isinstance(layer, nn.Module):
        found = [name for name, module in names.items() if module is layer]
        if found:
            return LayerRef(min(found, key=lambda name: name.count(".")))
        raise LayerError(f"the {type(layer).__name__} passed as target layer is not a part of the model")
    if not isinstance(layer, str):
        raise LayerError(f"a target layer is a dotted name or a module of the model, not a {type(layer).__name__}")
    name, sign, call = layer.partition("#")
    if name not in names:
        hint = did_you_mean(name, names) or f"; its parts are {', '.join(dict(model.named_children()))}"
        raise LayerError(f"the model has no layer {name!r}{hint}")
    if sign and not (call.isdecimal() and int(call) > 0):
        raise LayerError(f"layer {layer!r}: after '#' stands the number of the call, from 1")
    first_name = next(known for known, module in names.items() if module is names[name])
    return LayerRef(first_name, int(call) if call else None)


def modules_of(model: nn.Module, choice: LayerChoice) -> dict[LayerRef, nn.Module]:
    """Return the module of each chosen layer."""
    return {ref: model.get_submodule(ref.name) for ref in choice.layers}


def _probe(model: nn.Module, image: Tensor) -> tuple[Probe, bool]:
    with eagerly(), same_randomness(model), evaluating(model), torch.inference_mode(mode=False), torch.enable_grad():
        leaf = image.detach().clone().requires_grad_()
        calls, output = watch(model, leaf)
        lay_out(calls, leaf)
        if detections_in(output):
            return _choose_for_boxes(calls), True

        def again(changed: Tensor) -> list[Call]:
            switch_off_training(model)  # once more: the pass before may have switched parts to it
            with torch.no_grad():
                return watch(model, changed)[0]

        place(calls, leaf.detach(), again)
        classes = class_count(calls)
        influence = Influence(calls, score_of(output, classes), scored_tensor(output))
    # What a head initialised to zero hides will be seen once it has weights.
    return _choose(calls, influence, classes), influence.measured and not influence.note


def _choose_for_boxes(calls: list[Call]) -> Probe:
    """Choose the layer of a detector: the deepest that each of its boxes was computed from, whichever they are.

    A box's score depends on one scale and a few cells of it, and in a picture where nothing is found there is no score.
    So the structure decides: the last grid before what the scales begin with, or before regions are taken out of it.
    """
    pyramid = next((call for call in reversed(calls) if call.scales), None)
    common = set.intersection(*map(ancestors, pyramid.scales)) if pyramid is not None else None
    verdicts = {}
    for call in calls:
        verdict = _verdict(call, None, None)
        if not verdict and (not call.is_among(common) if common is not None else is_regional(call.node)):
            verdict = "not every box is computed from it"
        verdicts[id(call)] = verdict
    first: dict[int, Call] = {}
    for call in calls:  # a module around others may return what one of them returned long before
        first.setdefault(id(call.output), call)
    fit = [call for call in first.values() if call.name and not verdicts[id(call)]]
    if not fit:
        return Probe(_rows(calls, verdicts), None)
    grid = "x".join(map(str, fit[-1].layout.grid)) if fit[-1].layout is not None else ""
    chosen = _outermost(fit[-1], calls)
    others = _apart([_outermost(call, calls) for call in reversed(fit)], chosen)
    choice = LayerChoice((chosen,), f"the deepest grid, {grid}, that every box is computed from", tuple(others))
    return _with_layouts(Probe(_rows(calls, verdicts), choice))


def _with_layouts(found: Probe) -> Probe:
    """Add to the choice how the pass saw its layers' outputs laid out."""
    if found.choice is None:
        return found
    seen = _seen(found, found.choice.layers)
    layouts = {ref: row.layout for ref, row in seen.items() if row.layout is not None}
    return replace(found, choice=replace(found.choice, layouts=layouts))


def _rows(calls: list[Call], verdicts: dict[int, str]) -> tuple[LayerRow, ...]:
    return tuple(
        LayerRow(
            _ref(call, calls),
            type(call.module).__name__,
            None if call.output is None else tuple(call.output.shape),
            call.layout,
            verdicts[id(call)],
            call.unsure and call.layout is not None,
        )
        for call in calls
    )


def _choose(calls: list[Call], influence: Influence, classes: int | None) -> Probe:
    verdicts = {id(call): _verdict(call, influence, classes) for call in calls}
    fit = [call for call in calls if not verdicts[id(call)]]
    around = [
        call
        for call in calls
        if fit and call.name and call.started < fit[-1].started < fit[-1].finished < call.finished
    ]
    if influence.measure_inputs([call for call in around if verdicts[id(call)]]):
        verdicts = {id(call): _verdict(call, influence, classes) for call in calls}
        fit = [call for call in calls if not verdicts[id(call)]]
    best = _deepest(calls, [call for call in fit if call.channels > 1] or fit)  # of one channel are gates
    rows = _rows(calls, verdicts)
    if best is None:
        return Probe(rows, None)
    branches = twins(best, fit)
    common = shared(branches, calls, fit)
    if branches and common is None:
        names = {_outermost(call, calls) for call in branches}
        return Probe(rows, None, tuple(row for row in rows if row.ref in names))
    return _with_layouts(Probe(rows, _as_choice(common or best, calls, fit, influence)))


def _verdict(call: Call, influence: Influence | None, classes: int | None) -> str:
    if call.output is None or call.layout is None:
        return _ELSEWHERE if call.elsewhere else "no spatial grid"
    if isinstance(call.module, _PASSING) or any(argument is call.output for argument in call.arguments):
        return "computes no features"
    return "" if influence is None else influence.of(call.output, classes)


def _deepest(calls: list[Call], fit: list[Call]) -> Call | None:
    """Return the call whose output is the last that a later step turns into something without usable cells.

    The last fitting output is right for most networks. But inside a module that ends the grid, such as the attention
    that only the class token leaves, or an attention pool, the keys and values fit too; then it is that module's input.
    """
    fit = [call for call in fit if call.name]
    if not fit:
        return None
    last = fit[-1]
    # What ends another grid, such as the classifier of a coarser branch, says nothing about this one.
    grid = None if last.layout is None else last.layout.grid
    by_output = {id(call.output): call for call in fit}
    before = ancestors(last.node) - {last.node}
    # ... and what begins after the last output but hangs on an earlier one, such as a late gate, is beside the way.
    beside = {
        key: call
        for key, call in by_output.items()
        if call.layout is not None and call.layout.grid == grid and not call.is_among(before)
    }
    fitting = {id(call) for call in fit}
    ends = [
        call
        for call in calls
        if call.name
        and id(call) not in fitting
        and call.finished > last.finished
        and _grid_inputs(call, by_output if call.started < last.started else beside)
    ]
    if not ends:
        return last
    computed = {id(call.output): call.finished for call in reversed(fit)}  # modules around it return it later
    inputs = _grid_inputs(max(ends, key=lambda call: call.started), by_output)
    return max(inputs, key=lambda call: computed[id(call.output)])


def _grid_inputs(call: Call, by_output: dict[int, Call]) -> list[Call]:
    return [by_output[id(argument)] for argument in call.arguments if id(argument) in by_output]


def _ref(call: Call, calls: list[Call]) -> LayerRef:
    several = sum(other.module is call.module for other in calls) > 1
    return LayerRef(call.name, call.number if several else None)


def _outermost(call: Call, calls: list[Call]) -> LayerRef:
    """Return the shortest name under which the call's output leaves a module, one that runs once if there is any.

    Preferably alone: what comes out beside it may have been computed from it already.
    """
    leaves = [other for other in calls if other.output is call.output and other.name]
    same = [_ref(other, calls) for other in leaves if other.alone] or [_ref(other, calls) for other in leaves]
    return min(same, key=lambda ref: (ref.call is not None, ref.name.count("."), len(ref.name)))


def _apart(named: list[LayerRef], chosen: LayerRef) -> list[LayerRef]:
    """Return the next best layers, none inside another; parts of the chosen layer only where there is nothing else."""
    inside = chosen.name + "."
    outside = [ref for ref in named if ref != chosen and not ref.name.startswith(inside)]
    listed: list[LayerRef] = []
    for ref in outside or [ref for ref in named if ref != chosen]:
        if len(listed) < _RUNNERS_UP and not any(f"{ref.name}.".startswith(f"{known.name}.") for known in listed):
            listed.append(ref)
    return listed


def _as_choice(best: Call, calls: list[Call], fit: list[Call], influence: Influence) -> LayerChoice:
    assert best.layout is not None
    grid = "x".join(map(str, best.layout.grid))
    named = [_outermost(call, calls) for call in reversed(fit) if call.name and call.started <= best.finished]
    chosen = _outermost(best, calls)
    others = _apart(named, chosen)
    seen = "whose cells influence the score" if influence.measured else "(its influence could not be measured)"
    doubt = _UNSURE if best.unsure else ""
    if any(call.elsewhere and call.started > best.started and call.finished > best.finished for call in calls):
        doubt += "; the cells of deeper layers lie elsewhere in the input"
    names = list(dict.fromkeys(str(_outermost(call, calls)) for call in ends_beside(best, fit)))
    beside = f"; beside it, the score depends on {' and '.join(names)}" if names else ""
    return LayerChoice((chosen,), f"the deepest {grid} grid {seen}{influence.note}{doubt}{beside}", tuple(others))
