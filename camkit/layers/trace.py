"""What one pass shows: every call of every module, its output's layout, and what the score depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from camkit.engine.attach import forward_hooks, starts
from camkit.engine.grid import to_grid
from camkit.engine.nested import feature_tensor, tensors_in
from camkit.engine.resizing import resized_input
from camkit.layers.layouts import NO_GRID, are_tokens, follow, infer_layout, is_distorted
from camkit.layers.lineage import (
    Lineage,
    Origin,
    behind,
    is_attention,
    is_choice,
    moves_over_cells,
    queries_of,
    spatial_shape,
)
from camkit.targets.outputs import main_tensor, rivals
from camkit.types import Layout

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
    certain: bool = False  # a convolution, pooling or resizing gave it its grid
    tentative: bool = False  # its layout counts only if its cells are seen to lie so
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
        if shape is not None and len(shape) == len(size) + 3 and shape[2] == 1:  # a signal's pooling is a picture's
            shape = shape[:2] + shape[3:]
        grid = shape[2:] if shape is not None and len(shape) == len(size) + 2 else None
        return grid, () if grid is not None or node in fitting else behind(node)

    grids: Lineage[tuple[int, ...]] = Lineage(computed)
    stretched: Lineage[tuple[int, ...]] = Lineage(resized)
    fitting: set[Node | None] = set()
    read: dict[int, tuple[Layout | None, bool, bool]] = {}
    inner = next(
        (one for call in calls if (one := _convolved(call, len(size)))), size
    )  # as the model resized its input
    for call in calls:
        size = call.padded or size
        if call.output is None or is_attention(call.node, call.output.dim()):
            continue
        if id(call.output) in read:  # returned by a module and by the one around it
            call.layout, call.tentative, call.certain = read[id(call.output)]
            continue
        shape = tuple(call.output.shape)
        tokens = are_tokens(shape, size)
        seen = grids.nearest(call.node)
        call.layout = infer_layout(shape, 1, size, seen)
        # What is behind a detach() looks as if it had been learned.
        learned = origin.is_learned(call.node)
        call.tentative = call.layout is not None and learned
        maps = not tokens and shape[0] == 1 and max(shape[2:], default=1) > 1
        if maps and shape[2:] in stretched.nearest(call.node) and not is_distorted(shape[2:], inner):
            call.layout = Layout("channels_first", shape[2:])
            call.certain = shape[2:] != shape[1:-1]  # as many channels as columns may be either
        if call.layout is None:
            call.layout = follow(shape, 1, inner, seen)
            call.tentative = call.layout is not None
        read[id(call.output)] = call.layout, call.tentative, call.certain
        # What is computed from learned vectors as well, such as a Perceiver's sums, has no grid from these.
        if call.layout is not None and not call.layout.assumed and not learned:
            grids.add(call.node, call.layout.grid)
            if not call.certain:
                fitting.add(call.node)


def _convolved(call: Call, rank: int) -> tuple[int, ...]:
    """Return the size of the input of a convolution; nothing of other modules."""
    convolves = isinstance(call.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    fits = convolves and bool(call.arguments) and call.arguments[0].dim() == rank + 2
    return tuple(call.arguments[0].shape[2:]) if fits else ()


def detections_in(output: Any) -> bool:
    """Tell whether a model returned boxes: a list with a dictionary for each image."""
    found = output[0] if isinstance(output, tuple) and output else output
    return isinstance(found, list) and bool(found) and all(isinstance(item, dict) and "boxes" in item for item in found)


def scored_tensor(output: Any) -> Tensor | None:
    """Return what holds the scores of an output, or the first of several tensors; None where there is no gradient.

    Of several that could hold them, all beside each other.
    """
    several = [one for one in rivals(output) if one.requires_grad]
    if len(several) > 1:
        return torch.cat([one.float() for one in several], dim=1)
    values = (main_tensor(output), *tensors_in(output))
    return next((one for one in values if isinstance(one, Tensor) and one.requires_grad and one.numel()), None)


def score_of(output: Any, classes: int | None) -> Tensor | None:
    """Return the largest value of the output, a classifier's best logit; of a map, the sum of its cells' largest.

    Of features, where there are no ``classes``, a mixture of all. Not the caller's own target, which may have been
    written for one batch.
    """
    found = scored_tensor(output)
    if found is None:
        return None
    if classes is None or len(rivals(output)) > 1:
        return mixture(found)
    return found.max(1).values.sum() if found.dim() > 1 else found.max()


def mixture(features: Tensor) -> Tensor:
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

    def __init__(self, calls: list[Call], score: Tensor | None, output: Tensor | None = None) -> None:
        known = {id(call.output): call.output for call in calls if call.layout is not None}
        self._tensors = [tensor for tensor in known.values() if tensor is not None]
        self._score: Tensor | None = None
        self._layouts = {id(call.output): call.layout for call in calls}
        self._gradients: dict[int, Tensor | None] = {}
        self._returns_maps = bool(calls) and not calls[-1].name and calls[-1].layout is not None
        self._output, self._maps = output, 0  # the classes of a network that returns maps of scores
        if output is not None and output.dim() > 3 and output.shape[2:].numel() > 1:
            self._maps = output.shape[1]
        self.note = ""
        measured = score is not None and (
            self._measure(score) or (output is not None and self._measure(mixture(output)))
        )
        if score is not None and not measured:
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
        active = int((gradient != 0).any(0).sum())
        if active < 2 and not (active and self._spreads(tensor)):
            return "its cells do not influence the score"
        alone = int((gradient != 0).sum(0).amax()) == 1
        if channels == self._maps or (channels == classes and (alone or self._returns_maps)):
            return "class scores, not features"
        return ""

    def _spreads(self, tensor: Tensor) -> bool:
        """Tell whether other scores depend on other cells than the one that the best score comes from."""
        if self._output is None or not self._output.requires_grad:
            return False
        (gradient,) = torch.autograd.grad(mixture(self._output), [tensor], retain_graph=True, allow_unused=True)
        layout = self._layouts[id(tensor)]
        if gradient is None or layout is None:
            return False
        return int((to_grid(gradient, layout) != 0).any(1).sum()) > 1


def _head_input(calls: list[Call]) -> Tensor | None:
    """Return a fixed random projection of the input of the last layer with weights."""
    for call in reversed(calls):
        argument = next((value for value in call.arguments if value.is_floating_point()), None)
        if argument is not None and not list(call.module.children()) and list(call.module.parameters()):
            return mixture(argument) if argument.requires_grad else None
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
