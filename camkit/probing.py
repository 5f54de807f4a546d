"""What one pass shows: every call of every module, its output's layout, and what the score depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from camkit.hooks import forward_hooks, resized_input, starts
from camkit.layouts import NO_GRID, are_tokens, feature_tensor, infer_layout, main_tensor, tensors_in, to_grid
from camkit.lineage import (
    Lineage,
    Origin,
    behind,
    is_attention,
    is_choice,
    moves_over_cells,
    queries_of,
    spatial_shape,
)
from camkit.values import Layout

_TAIL = 32
"""Spatial outputs, counted from the end of the pass, whose influence is measured first."""


@dataclass(eq=False)
class Call:
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
    alone: bool = True  # nothing else that was computed came out with it
    scales: list[Node] = field(default_factory=list)  # the places of its outputs, where they have several grids
    elsewhere: bool = False  # its cells were seen to lie elsewhere than where its shape would have them
    unsure: bool = False  # where its cells lie could not be measured
    padded: tuple[int, ...] = ()  # the size of the images it returned, where it resized and padded the input

    @property
    def channels(self) -> int:
        """How many channels the output has; 0 without a grid."""
        if self.output is None or self.layout is None:
            return 0
        return self.output.shape[1 if self.layout.kind in ("channels_first", "tokens_last") else -1]

    def is_among(self, nodes: set[Node]) -> bool:
        """Tell whether the output is among places in the graph, as it was or as an in-place operation left it.

        What is added in place to a part of a tensor moves the part: its former place is on no way any more.
        """
        return self.node in nodes or (self.output is not None and self.output.grad_fn in nodes)


def lay_out(calls: list[Call], leaf: Tensor) -> None:
    """Read each output's layout, that of tokens by the grids of the outputs they were computed from."""
    size = tuple(leaf.shape[2:])
    origin = Origin(leaf)

    def computed(node: Node) -> tuple[tuple[int, ...] | None, Sequence[Node | None]]:
        queries = queries_of(node)
        if queries:
            asked = [query for query in queries if origin.is_inputs(query)]
            return (None if asked else NO_GRID), asked
        if queries is not None or (is_choice(node) and origin.is_inputs(node)):
            return NO_GRID, behind(node)
        shape = spatial_shape(node)
        if shape is None or len(shape) != len(size) + 2 or max(shape[2:]) < 2:
            return None, behind(node)
        # A grid out of proportion may be one (a model that resizes its input) or not (attention between tokens).
        return shape[2:], behind(node) if infer_layout(shape, 1, size) is None else ()

    def resized(node: Node) -> tuple[tuple[int, ...] | None, Sequence[Node | None]]:
        shape = spatial_shape(node) if moves_over_cells(node) else None
        grid = shape[2:] if shape is not None and len(shape) == len(size) + 2 else None
        return grid, () if node in fitting else behind(node)

    grids: Lineage[tuple[int, ...]] = Lineage(computed)
    stretched: Lineage[tuple[int, ...]] = Lineage(resized)
    fitting: set[Node | None] = set()
    read: dict[int, Layout | None] = {}
    for call in calls:
        size = call.padded or size
        if call.output is None or is_attention(call.node, call.output.dim()) or origin.is_learned(call.node):
            continue
        if id(call.output) in read:  # returned by a module and by the one around it
            call.layout = read[id(call.output)]
            continue
        shape = tuple(call.output.shape)
        call.layout = infer_layout(shape, 1, size, grids.nearest(call.node) if are_tokens(shape, size) else ())
        if call.layout is None and shape[0] == 1 and max(shape[2:], default=1) > 1 and not are_tokens(shape, size):
            known = shape[2:] in stretched.nearest(call.node)
            call.layout = Layout("channels_first", shape[2:]) if known else None
        read[id(call.output)] = call.layout
        if call.layout is not None and not call.layout.assumed:
            fitting.add(call.node)
            grids.add(call.node, call.layout.grid)


def detections_in(output: Any) -> bool:
    """Tell whether a model returned boxes: a list with a dictionary for each image."""
    found = output[0] if isinstance(output, tuple) and output else output
    return isinstance(found, list) and bool(found) and all(isinstance(item, dict) and "boxes" in item for item in found)


def score_of(output: Any, classes: int | None) -> Tensor | None:
    """Return the largest value of the output, a classifier's best logit; of a map, the sum of its cells' largest.

    Of features, where there are no ``classes``, a mixture of all. Not the caller's own target, which may have been
    written for one batch.
    """
    values = (main_tensor(output), *tensors_in(output))  # of several, what holds the scores
    found = next((one for one in values if isinstance(one, Tensor) and one.requires_grad and one.numel()), None)
    if found is None:
        return None
    if classes is None:
        return _mixture(found)
    return found.max(1).values.sum() if found.dim() > 1 else found.max()


def _mixture(features: Tensor) -> Tensor:
    """Return a fixed random projection of features."""
    directions = torch.arange(1, features.numel() + 1, device=features.device, dtype=torch.float32).mul(12.9898)
    return (features.float().flatten() * directions.sin()).sum()


def watch(model: nn.Module, leaf: Tensor) -> tuple[list[Call], Any]:
    """Run the model and note every call of every module: when it began and ended, with what, and what it returned."""
    names = {module: name for name, module in model.named_modules()}
    running: list[Call] = []
    finished: list[Call] = []
    numbers = dict.fromkeys(names, 0)
    clock = iter(range(1 << 62))

    def begin(module: nn.Module) -> None:
        numbers[module] += 1
        running.append(Call(module, names[module], numbers[module], next(clock)))

    def end(module: nn.Module, arguments: list[Tensor], output: Any) -> None:
        while running and running[-1].module is not module:
            running.pop()
        call = running.pop()
        found = feature_tensor(output)
        call.finished, call.arguments = next(clock), arguments
        if found is not None:
            call.output, call.node = found[1], found[1].grad_fn
            computed = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
            call.alone = len(computed) == 1
            if len({tensor.shape[2:] for tensor in computed if tensor.dim() == leaf.dim()}) > 1:
                call.scales = [tensor.grad_fn for tensor in computed if tensor.grad_fn is not None]
        resized = resized_input(output)
        call.padded = resized[0] if resized is not None else ()
        finished.append(call)

    with starts(names, begin), forward_hooks(dict.fromkeys(names, end)):
        output = model(leaf.clone())
    return finished, output


class Influence:
    """Tells, for a spatial output, on which share of its cells and channels the score depends."""

    def __init__(self, calls: list[Call], score: Tensor | None) -> None:
        known = {id(call.output): call.output for call in calls if call.layout is not None}
        self._tensors = [tensor for tensor in known.values() if tensor is not None]
        self._score: Tensor | None = None
        self._layouts = {id(call.output): call.layout for call in calls}
        self._gradients: dict[int, Tensor | None] = {}
        self._returns_maps = bool(calls) and not calls[-1].name and calls[-1].layout is not None
        self.note = ""
        if score is not None and not self._measure(score):
            stand_in = _head_input(calls)
            if stand_in is not None and self._measure(stand_in):
                self.note = "; the head's weights are zero, so the influence on its input was measured"
        self.measured = any(gradient is not None for gradient in self._gradients.values())

    def _measure(self, score: Tensor) -> bool:
        """Differentiate the score to the last spatial outputs, or, where those have no part in it, to all."""
        for tensors in (self._tensors[-_TAIL:], self._tensors[:-_TAIL]):
            self._score = score
            self._differentiate(tensors)
            if any(self._active_cells(id(tensor)) > 1 for tensor in tensors):
                return True
        self._gradients.clear()
        return False

    def _differentiate(self, tensors: list[Tensor]) -> None:
        usable = [tensor for tensor in tensors if tensor.requires_grad and id(tensor) not in self._gradients]
        if usable and self._score is not None and self._score.requires_grad:
            found = torch.autograd.grad(self._score, usable, retain_graph=True, allow_unused=True)
            self._gradients.update((id(tensor), grad) for tensor, grad in zip(usable, found, strict=True))

    def measure_inputs(self, calls: list[Call]) -> bool:
        """Measure the inputs of calls as well, where they are outputs that were too far from the end so far."""
        inputs = {id(argument) for call in calls for argument in call.arguments}
        missing = [tensor for tensor in self._tensors if id(tensor) in inputs and id(tensor) not in self._gradients]
        if self.measured:
            self._differentiate(missing)
        return bool(missing) and self.measured

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
        alone = int((gradient != 0).sum(0).amax()) == 1
        if channels == classes and (alone or self._returns_maps):
            return "class scores, not features"
        return ""


def _head_input(calls: list[Call]) -> Tensor | None:
    """Return a fixed random projection of the input of the last layer with weights."""
    for call in reversed(calls):
        argument = next((value for value in call.arguments if value.is_floating_point()), None)
        if argument is not None and not list(call.module.children()) and list(call.module.parameters()):
            return _mixture(argument) if argument.requires_grad else None
    return None


def class_count(calls: list[Call]) -> int | None:
    """Return for how many classes the last layer with weights gives scores; None where it gives features.

    Scores come from a linear layer or a convolution of single cells. A network without a head ends in another
    convolution, or in a normalisation.
    """
    for call in reversed(calls):
        if list(call.module.parameters(recurse=False)):
            weight = getattr(call.module, "weight", None)
            scores = isinstance(call.module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
            if scores and isinstance(weight, Tensor) and weight.shape[2:].numel() == 1:
                return weight.shape[0]
            return None
    return None
