"""Finds the layer to explain: the deepest one with a spatial grid whose cells still influence the score.

One probe pass over a single image lists every module's output in execution order, and one backward pass over its last
layers tells which grid cells the score depends on. Nothing is decided by a module's name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import Node

from camkit.errors import LayerError, did_you_mean
from camkit.hooks import forward_hooks, starts
from camkit.layouts import are_tokens, feature_tensor, infer_layout, tensors_in, to_grid
from camkit.lineage import Lineage, is_attention, spatial_shape
from camkit.state import evaluating, same_randomness
from camkit.values import LayerChoice, LayerRef, LayerRow, Layout

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

_TAIL = 32
"""Spatial outputs, counted from the end of the pass, whose influence is measured first."""

_RUNNERS_UP = 3


@dataclass(frozen=True)
class Probe:
    """What one pass showed: a row per call of a module in the order they finished, and the layer to explain."""

    rows: tuple[LayerRow, ...]
    choice: LayerChoice | None

    def candidates(self) -> str:
        """List the last spatial layers with their shapes, for an error message."""
        spatial = [row for row in self.rows if row.layout is not None and row.ref.name]
        return ", ".join(f"{row.ref} {row.shape}" for row in spatial[-6:])


@dataclass(eq=False)
class _Call:
    """One call of one module during the probe."""

    module: nn.Module
    name: str
    number: int
    started: int
    finished: int = 0
    arguments: list[Tensor] = field(default_factory=list)
    output: Tensor | None = None
    node: Node | None = None  # the output's place in the graph; an in-place operation gives the tensor another one
    layout: Layout | None = None


_probes: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Probe]] = weakref.WeakKeyDictionary()


def probe(model: nn.Module, image: Float[Tensor, "1 c *size"]) -> Probe:
    """Look at the model with one pass and one backward pass.

    What was measured is remembered for inputs of this size while the module lives and keeps its parts.

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
    names = tuple((name, id(module)) for name, module in model.named_modules())
    return tuple(image.shape), image.dtype, hash(names)


def resolve(model: nn.Module, image: Float[Tensor, "1 c *size"]) -> LayerChoice:
    """Choose the layer to explain.

    Raises:
        LayerError: no layer has a spatial grid that influences the score; the message lists what there is.
    """
    found = probe(model, image)
    if found.choice is None:
        raise LayerError(
            "no layer with a spatial grid influences the score, so none can be chosen; name one with target_layer "
            "(--layer)" + (f": {found.candidates()}" if found.candidates() else "")
        )
    return found.choice


def layouts_of(
    model: nn.Module, image: Float[Tensor, "1 c *size"], choice: LayerChoice, *, probing: bool
) -> Mapping[LayerRef, Layout] | None:
    """Return how a probe saw the layers' outputs laid out; without ``probing``, None where none has been made."""
    if choice.layouts:
        return choice.layouts
    found = probe(model, image) if probing else _probes.get(model, {}).get(_key(model, image))
    return None if found is None else _layouts(found, choice.layers)


def _layouts(found: Probe, layers: Sequence[LayerRef]) -> dict[LayerRef, Layout]:
    rows = {(row.ref.name, row.ref.call or 1): row.layout for row in found.rows}
    seen = {ref: rows.get((ref.name, ref.call or 1)) for ref in layers}
    return {ref: layout for ref, layout in seen.items() if layout is not None}


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
    with same_randomness(model), evaluating(model), torch.inference_mode(mode=False), torch.enable_grad():
        leaf = image.detach().clone().requires_grad_()
        calls, output = _watch(model, leaf)
        _lay_out(calls, tuple(image.shape[2:]))
        influence = _Influence(calls, _score(output))
    return _choose(calls, influence), influence.measured


def _lay_out(calls: list[_Call], size: tuple[int, ...]) -> None:
    """Read each output's layout, that of tokens by the grids of the outputs they were computed from."""

    def computed(node: Node) -> tuple[int, ...] | None:
        shape = spatial_shape(node)
        found = infer_layout(shape, 1, size) if shape is not None and not are_tokens(shape, size) else None
        return None if found is None else found.grid

    grids: Lineage[tuple[int, ...]] = Lineage(computed)
    for call in calls:
        if call.output is None or is_attention(call.node, call.output.dim()):
            continue
        shape = tuple(call.output.shape)
        call.layout = infer_layout(shape, 1, size, grids.nearest(call.node) if are_tokens(shape, size) else ())
        if call.layout is not None and not call.layout.assumed:
            grids.add(call.node, call.layout.grid)


def _score(output: Any) -> Tensor | None:
    """Return the largest value of the output, a classifier's best logit; of a map, the sum of its cells' largest.

    Not the caller's own target, which may have been written for one batch.
    """
    found = next((value for value in tensors_in(output) if value.requires_grad and value.numel()), None)
    if found is None:
        return None
    return found.max(1).values.sum() if found.dim() > 1 else found.max()


def _watch(model: nn.Module, leaf: Tensor) -> tuple[list[_Call], Any]:
    """Run the model and note every call of every module: when it began and ended, with what, and what it returned."""
    names = {module: name for name, module in model.named_modules()}
    running: list[_Call] = []
    finished: list[_Call] = []
    numbers = dict.fromkeys(names, 0)
    clock = iter(range(1 << 62))

    def begin(module: nn.Module) -> None:
        numbers[module] += 1
        running.append(_Call(module, names[module], numbers[module], next(clock)))

    def end(module: nn.Module, arguments: list[Tensor], output: Any) -> None:
        while running and running[-1].module is not module:
            running.pop()
        call = running.pop()
        found = feature_tensor(output)
        call.finished, call.arguments = next(clock), arguments
        if found is not None:
            call.output, call.node = found[1], found[1].grad_fn
        finished.append(call)

    with starts(names, begin), forward_hooks(dict.fromkeys(names, end)):
        output = model(leaf.clone())
    return finished, output


class _Influence:
    """Tells, for a spatial output, on which share of its cells and channels the score depends."""

    def __init__(self, calls: list[_Call], score: Tensor | None) -> None:
        self._tensors = list({id(call.output): call.output for call in calls if call.layout is not None}.values())
        self._layouts = {id(call.output): call.layout for call in calls}
        self._gradients: dict[int, Tensor | None] = {}
        self.note = ""
        if score is not None and not self._measure(score):
            stand_in = _head_input(calls)
            if stand_in is not None and self._measure(stand_in):
                self.note = "; the head's weights are zero, so the influence on its input was measured"
        self.measured = any(gradient is not None for gradient in self._gradients.values())

    def _measure(self, score: Tensor) -> bool:
        """Differentiate the score to the last spatial outputs, or, where those have no part in it, to all."""
        for tensors in (self._tensors[-_TAIL:], self._tensors[:-_TAIL]):
            usable = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
            if usable and score.requires_grad:
                found = torch.autograd.grad(score, usable, retain_graph=True, allow_unused=True)
                self._gradients.update((id(tensor), grad) for tensor, grad in zip(usable, found, strict=True))
            if any(self._active_cells(id(tensor)) > 1 for tensor in usable):
                return True
        self._gradients.clear()
        return False

    def _grid_gradient(self, key: int) -> Tensor | None:
        gradient, layout = self._gradients.get(key), self._layouts.get(key)
        return None if gradient is None or layout is None else to_grid(gradient, layout)[0]

    def _active_cells(self, key: int) -> int:
        gradient = self._grid_gradient(key)
        return 0 if gradient is None else int((gradient != 0).any(0).sum())

    def of(self, tensor: Tensor, classes: int | None) -> str:
        """Return why the tensor cannot be explained, or an empty string where it can."""
        gradient = self._grid_gradient(id(tensor))
        layout = self._layouts[id(tensor)]
        channels = 0 if layout is None else to_grid(tensor.detach(), layout).shape[1]
        if gradient is None:
            if self.measured:
                return "no influence on the score"
            return "class scores" if channels == classes else ""
        if int((gradient != 0).any(0).sum()) < 2:
            return "its cells do not influence the score"
        if channels == classes and channels > 1 and int((gradient != 0).sum(0).amax()) == 1:
            return "class scores, not features"
        return ""


def _head_input(calls: list[_Call]) -> Tensor | None:
    """Return a fixed random projection of the input of the last layer with weights."""
    for call in reversed(calls):
        argument = next((value for value in call.arguments if value.is_floating_point()), None)
        if argument is not None and not list(call.module.children()) and list(call.module.parameters()):
            directions = torch.arange(1, argument.numel() + 1, device=argument.device, dtype=torch.float32).mul(12.9898)
            return (argument.float().flatten() * directions.sin()).sum() if argument.requires_grad else None
    return None


def _class_count(calls: list[_Call]) -> int | None:
    for call in reversed(calls):
        weight = getattr(call.module, "weight", None)
        if isinstance(call.module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and isinstance(weight, Tensor):
            return weight.shape[0]
    return None


def _choose(calls: list[_Call], influence: _Influence) -> Probe:
    classes = _class_count(calls)
    verdicts: dict[int, str] = {}
    for call in calls:
        verdicts[id(call)] = _verdict(call, influence, classes)
    fit = [call for call in calls if not verdicts[id(call)]]
    best = _deepest(calls, fit)
    rows = tuple(
        LayerRow(
            _ref(call, calls),
            type(call.module).__name__,
            None if call.output is None else tuple(call.output.shape),
            call.layout,
            verdicts[id(call)],
        )
        for call in calls
    )
    found = Probe(rows, None if best is None else _as_choice(best, calls, fit, influence))
    if found.choice is None:
        return found
    return replace(found, choice=replace(found.choice, layouts=_layouts(found, found.choice.layers)))


def _verdict(call: _Call, influence: _Influence, classes: int | None) -> str:
    if call.output is None or call.layout is None:
        return "no spatial grid"
    if isinstance(call.module, _PASSING):
        return "computes no features"
    return influence.of(call.output, classes)


def _deepest(calls: list[_Call], fit: list[_Call]) -> _Call | None:
    """Return the call whose output is the last that a later step turns into something without usable cells.

    The last fitting output is right for most networks. But inside a module that ends the grid, such as the attention
    that only the class token leaves, or an attention pool, the keys and values fit too; then it is that module's input.
    """
    fit = [call for call in fit if call.name]
    if not fit:
        return None
    last = fit[-1]
    by_output = {id(call.output): call for call in reversed(fit)}
    fitting = {id(call) for call in fit}
    ends = [
        call
        for call in calls
        if call.name and id(call) not in fitting and call.finished > last.finished and _grid_inputs(call, by_output)
    ]
    if not ends:
        return last
    return _grid_inputs(max(ends, key=lambda call: call.started), by_output)[0]


def _grid_inputs(call: _Call, by_output: dict[int, _Call]) -> list[_Call]:
    return [by_output[id(argument)] for argument in call.arguments if id(argument) in by_output]


def _ref(call: _Call, calls: list[_Call]) -> LayerRef:
    several = sum(other.module is call.module for other in calls) > 1
    return LayerRef(call.name, call.number if several else None)


def _outermost(call: _Call, calls: list[_Call]) -> LayerRef:
    """Return the shortest name under which the call's output leaves a module, one that runs once if there is any."""
    same = [_ref(other, calls) for other in calls if other.output is call.output and other.name]
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


def _as_choice(best: _Call, calls: list[_Call], fit: list[_Call], influence: _Influence) -> LayerChoice:
    assert best.layout is not None
    grid = "x".join(map(str, best.layout.grid))
    named = [_outermost(call, calls) for call in reversed(fit) if call.name and call.started <= best.finished]
    chosen = _outermost(best, calls)
    others = _apart(named, chosen)
    seen = "whose cells influence the score" if influence.measured else "(its influence could not be measured)"
    doubt = "; its shape could also be read with channels and tokens exchanged" if best.layout.assumed else ""
    return LayerChoice((chosen,), f"the deepest {grid} grid {seen}{influence.note}{doubt}", tuple(others))
