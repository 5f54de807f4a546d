"""One pass over an image that shows what each module returned, from what it was computed, and its gradient."""

from __future__ import annotations

import functools
import itertools
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.export.unflatten import InterpreterModule
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from camkit.engine.attach import feature_tensor, hooked, tensors_in
from camkit.engine.guard import ModelRecord, guarded, interruptible
from camkit.errors import ModelError
from camkit.layers.graph import Graph, set_of
from camkit.layers.names import first_name_by_module, modules_by_name
from camkit.targets.scores import detections_of, final_activation, main_tensor, passing_through, rivals
from camkit.types import LayerRef

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_LINEAR = (nn.Linear, *CONVOLUTIONS, InterpreterModule)
"""The types of modules that may score classes; an exported program has its own type for all modules."""

_SUMMARIES = (
    nn.Flatten,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
"""Modules that return a summary of their input instead of features."""

Key: TypeAlias = tuple[str, int]
"""A module's name and the number of its call, starting at 1."""

ScoreFrom: TypeAlias = Literal["best", "mixture", "head"]
"""The score to differentiate: the best class's, a mixture of all outputs, or a mixture of the last layer's inputs."""


class FramesFirstError(ModelError):
    """The model reads clips as (N, T, C, H, W)."""


@dataclass(frozen=True, eq=False)
class TracedCall:
    """One call of one module. Each tensor of the pass has a number, and calls refer to tensors by these numbers.

    A tensor that an operation changes in place gets another number.

    Attributes:
        name: the module's dotted name, the first one if it has several; "" for the model itself.
        number: which of the module's calls this is, starting at 1.
        kind: the name of the module's class.
        started, finished: when the call started and finished, as counts of events.
        arguments: the tensors that the module received.
        output: the first floating-point tensor with at least three axes that it returned; None if there is none.
        shape: the shape of that tensor.
        operation: the operation that computed the output when the module returned it.
        operations: the set of that operation and the output's at the end of the pass: another one if it is a view whose
            memory was changed in place, and no path leads to the old one.
        alone: True if the module returned no other computed tensor.
        scales: the operations of its outputs, if they have several sizes.
        passes: True if it computes no features: it returns a summary, the picture, or what an earlier call returned.
            A sum that no module returned counts as the output of the first module that it passes through.
        weighted: True if it has parameters of its own.
        classes: how many classes it scores, for a linear layer or a 1 x 1 convolution; otherwise None.
    """

    name: str
    number: int
    kind: str
    started: int
    finished: int
    arguments: tuple[int, ...] = ()
    output: int | None = None
    shape: tuple[int, ...] = ()
    operation: int | None = None
    operations: int = 0
    alone: bool = True
    scales: tuple[int, ...] = ()
    passes: bool = False
    weighted: bool = False
    classes: int | None = None

    @property
    def key(self) -> Key:
        """The module's name and the number of the call."""
        return self.name, self.number

    def is_among(self, members: int) -> bool:
        """Tell whether a set of operations contains one of the output's."""
        return bool(members & self.operations)


_TO_PYTHON = frozenset(
    [
        *(Tensor.__array__, Tensor.__bool__, Tensor.__float__, Tensor.__index__, Tensor.__int__),
        *(Tensor.item, Tensor.numpy, Tensor.tolist, Tensor.equal, torch.equal),
    ]
)
"""Methods that give a tensor's values to Python."""


class _Reads(TorchFunctionMode):
    """Notes whether Python reads values that were computed from the picture, as networks with early exits do.

    Attributes:
        picture: True if it does: another picture may take another way through the model.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.picture = False
        self._graph = graph
        self._kept: dict[int, Tensor] = {}
        """What was computed from the picture and has no graph, such as truth values and what was detached."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function."""
        result = func(*args, **(kwargs or {}))
        if func in _TO_PYTHON:
            self.picture |= self._derives(args[0])
        elif isinstance(result, Tensor) and result.grad_fn is None and any(map(self._derives, tensors_in(args))):
            self._kept[id(result)] = result
        return result

    def _derives(self, tensor: Tensor) -> bool:
        number = self._graph.number(tensor.grad_fn)
        return bool(self._graph.ancestors(number) & self._graph.leaves) or id(tensor) in self._kept

    def __exit__(self, *failure: Any) -> None:
        """Leave the block.

        Ctrl-C may come while PyTorch has switched the mode off for one call. Clearing the frames of this call switches
        it on again, so that it can be left.
        """
        if not self._is_on():
            traceback.clear_frames(failure[2])
        if self._is_on():
            super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def _is_on(self) -> bool:
        return any(mode is self for mode in _get_current_function_mode_stack())


class Trace:
    """A pass whose tensors are kept. ``traced`` runs the model; hooks call ``enter`` and ``leave``; ``finish`` is last.

    Attributes:
        model: the model.
        leaf: the input (1, C, *size), which requires a gradient.
        image: the copy of the leaf that the model gets.
        target: returns the score that counts, from the model's output; None for the model's main output.
        names: the first name of each module.
        graph: the operations, and what each was computed from.
        reads: what Python reads of the picture.
        calls: the calls of all modules, in the order in which they finished.
        tensors: the tensors by number.
        edges: the places in the graph at which to differentiate with respect to tensors: later in-place operations do
            not move them.
        stem: the first module with weights and what it received, if it is a convolution.
        output: what the model returned.
        end: the tensor of the score: all class scores, or those of all boxes, or what ``target`` returned.
        detects: True if the model returned boxes.
    """

    def __init__(self, model: nn.Module, leaf: Tensor, target: Callable[[Any], Tensor] | None) -> None:
        self.model, self.leaf, self.target = model, leaf, target
        self.image = leaf.clone()
        self.names = first_name_by_module(modules_by_name(model))
        self.graph = Graph(leaf)
        self.reads = _Reads(self.graph)
        self.calls: list[TracedCall] = []
        self.tensors: dict[int, Tensor] = {}
        self.edges: dict[int, GradientEdge] = {}
        self.stem: tuple[nn.Module, Tensor] | None = None
        self.output: Any = None
        self.end: Tensor | None = None
        self.detects = False
        self._numbers: dict[tuple[int, ...], int] = {}
        self._known = {self._number(self.image)}
        self._clock = itertools.count()
        self._runs: Counter[nn.Module] = Counter()
        self._running: list[tuple[nn.Module, int, int, tuple[int, ...]]] = []

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Note that a call starts, and its arguments, which it may then change in place."""
        self._runs[module] += 1
        tensors = tensors_in((arguments, keywords) if keywords else arguments)
        given = tuple(map(self._number, tensors))
        self._running.append((module, self._runs[module], next(self._clock), given))
        is_first = self.stem is None and not any(call.weighted for call in self.calls)
        if is_first and isinstance(module, CONVOLUTIONS) and tensors:
            self.stem = module, tensors[0]
            if tensors[0].dim() == self.leaf.dim() and len(tensors[0]) == 1:
                self.graph.begin_at(tensors[0].grad_fn)

    def leave(self, module: nn.Module, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> None:
        """Record a call that ends."""
        while self._running[-1][0] is not module:  # an exception ended these calls
            self._running.pop()
        number, started, given = self._running.pop()[1:]
        maps = feature_tensor(output)
        tensor = None if maps is None else maps[1]
        computed = [] if tensor is None else [each for each in tensors_in(output) if each.grad_fn is not None]
        sizes = {each.shape[2:] for each in computed if each.dim() == self.leaf.dim()}
        scales = [self.graph.number(each.grad_fn) for each in computed] if len(sizes) > 1 else []
        output_number = None if tensor is None else self._number(tensor)
        operation = None if tensor is None else self.graph.number(tensor.grad_fn)
        call = TracedCall(
            name=self.names[module],
            number=number,
            kind=type(module).__name__,
            started=started,
            finished=next(self._clock),
            arguments=given,
            output=output_number,
            shape=() if tensor is None else tuple(tensor.shape),
            operation=operation,
            operations=set_of(operation),
            alone=tensor is None or len(computed) == 1,
            scales=tuple(scale for scale in scales if scale is not None),
            passes=isinstance(module, _SUMMARIES) or output_number in self._known.intersection(given),
            weighted=any(parameter is not None for parameter in module._parameters.values()),
            classes=_classes(module),
        )
        self.calls.append(call)
        self._known.update(self._number(each) for each in tensors_in(output))

    def _number(self, tensor: Tensor) -> int:
        state = id(tensor), 0 if tensor.is_inference() else tensor._version
        number = self._numbers.setdefault(state, len(self._numbers))
        if number not in self.tensors:
            self.tensors[number] = tensor  # while it is kept, no other tensor has its id
            if tensor.requires_grad:
                self.edges[number] = get_gradient_edge(tensor)
        return number

    def finish(self, output: Any) -> None:
        """Take what the model returned.

        Raises:
            FramesFirstError: the model reads clips as (N, T, C, H, W).
        """
        if self.stem is not None:
            _check_frames(self.stem[1], self.image)
        images = detections_of(output, 1) if self.target is None else None
        self.output, self.detects = output, images is not None
        self.end = self.target(output) if self.target is not None else scored_tensor(output)
        if images:
            self.end = images[0].get("logits", images[0]["scores"])
        self.calls = [
            replace(call, operations=set_of(call.operation, self.graph.number(self.tensors[call.output].grad_fn)))
            if call.output is not None and self.tensors[call.output]._is_view()
            else call
            for call in self.calls
        ]

    @property
    def size(self) -> tuple[int, ...]:
        """The size of the input, (H, W), (L,) or (D, H, W)."""
        return tuple(self.leaf.shape[2:])

    @functools.cached_property
    def last(self) -> int | None:
        """The operation that computed the score; None if it is not known."""
        return None if self.end is None else self.graph.number(self.end.grad_fn)

    @functools.cached_property
    def maps(self) -> int:
        """The number of classes, if the model returns maps of scores; otherwise 0."""
        scored = scored_tensor(self.output)
        return 0 if scored is None or scored.dim() <= 3 or scored.shape[2:].numel() <= 1 else scored.shape[1]

    @functools.cached_property
    def classes(self) -> int | None:
        """The number of classes that the last layer with weights scores; None if it returns features.

        Scores come from a linear layer or a 1 x 1 convolution. A network without a head ends in a larger convolution or
        a normalisation.
        """
        return self._last_weighted[0].classes if self._last_weighted else None

    @functools.cached_property
    def _last_weighted(self) -> Sequence[TracedCall]:
        """The last module with weights and without parts; empty if there is none."""
        paths = (call.name.split(".") for call in self.calls)
        outer = {".".join(path[:depth]) for path in paths for depth in range(1, len(path))}
        return [call for call in self.calls if call.weighted and call.name and call.name not in outer][-1:]

    def before_the_score(self, *without: TracedCall) -> int:
        """Return the set of operations from which a path leads to the score that passes none of these outputs."""
        return self.before(self.last, *without)

    def before(self, end: int | None, *without: TracedCall) -> int:
        """Return the set of operations from which a path leads to the operation ``end`` that passes none of these."""
        excluded = 0
        for call in without:
            excluded |= call.operations
        return self.graph.before(end, excluded)

    @functools.cached_property
    def refs(self) -> Mapping[TracedCall, LayerRef]:
        """How each call is typed: with its number only if its module runs several times."""
        runs = Counter(call.name for call in self.calls)
        return {call: LayerRef(call.name, call.number if runs[call.name] > 1 else None) for call in self.calls}

    @functools.cached_property
    def by_output(self) -> Mapping[int | None, Sequence[TracedCall]]:
        """The calls that returned each tensor, in the order in which they ended."""
        calls: defaultdict[int | None, list[TracedCall]] = defaultdict(list)
        for call in self.calls:
            calls[call.output].append(call)
        return calls

    def outermost(self, call: TracedCall) -> TracedCall:
        """Return the call that returned the same output and has the shortest name, preferably one that runs once.

        Modules that return only this output come first: another tensor beside it may already be computed from it.
        """
        returning = [other for other in self.by_output[call.output] if other.name]
        returning = [other for other in returning if other.alone] or returning
        refs = self.refs
        return min(returning, key=lambda other: (refs[other].call is not None, other.name.count("."), len(other.name)))

    def ref_of(self, call: TracedCall) -> LayerRef:
        """Return the name under which a call's output is listed: that of the outermost call."""
        return self.refs[self.outermost(call)]

    def gradients(self, score: ScoreFrom, tensors: Sequence[int]) -> dict[int, Tensor | None]:
        """Differentiate a score; the gradient of a tensor is None if the score is not computed from it.

        Tensors without a graph are left out, and all if there is no such score.
        """
        scored = None if self.target is not None else self.end
        with passing_through(None if scored is None else final_activation(scored)):
            return self.differentiate(self._score(score), tensors)

    def differentiate(self, value: Tensor | None, tensors: Sequence[int]) -> dict[int, Tensor | None]:
        """Differentiate a value with respect to tensors as they were returned; leave out those without a graph."""
        usable = [number for number in tensors if self.tensors[number].requires_grad]
        if value is None or not value.requires_grad or not usable:
            return {}
        # No path leads to the old edge of a view whose memory was changed in place.
        ends: list[Any] = [
            tensor
            if (tensor := self.tensors[number]).grad_fn is None or tensor._is_view()
            else self.edges.get(number, tensor)
            for number in usable
        ]
        gradients = torch.autograd.grad(value, ends, retain_graph=True, allow_unused=True)
        return dict(zip(usable, gradients, strict=True))

    def _score(self, score: ScoreFrom) -> Tensor | None:
        if self.target is not None:
            graded = [mixture(tensor) for tensor in tensors_in(self.output) if tensor.requires_grad]
            mixed = torch.stack(graded).sum() if graded and score == "mixture" else None
            return self.end if score == "best" else mixed
        if score == "head":
            given = [self.tensors[number] for call in self._last_weighted for number in call.arguments]
            argument = next((tensor for tensor in given if tensor.is_floating_point()), None)
            return None if argument is None or not argument.requires_grad else mixture(argument)
        if self.end is None or score == "mixture":
            return None if self.end is None else mixture(self.end)
        return score_of(self.output, self.end, self.classes)


@contextmanager
def traced(
    model: nn.Module,
    image: Tensor,
    record: ModelRecord | None = None,
    target: Callable[[Any], Tensor] | None = None,
) -> Iterator[Trace]:
    """Run a model once on one image, and keep the tensors and the graph while the block runs.

    Args:
        model: the model; it is restored exactly.
        image: one input (1, C, *size) on the model's device.
        record: the model's record, if it is already prepared.
        target: returns the score that counts, from the model's output; None for the model's main output.

    Raises:
        FramesFirstError: the model reads clips as (N, T, C, H, W).
    """
    kept = guarded(model, record or ModelRecord.of_model(model))
    with kept, torch.inference_mode(mode=False), torch.enable_grad():
        trace = Trace(model, image.detach().clone().requires_grad_(), target)
        enter, leave = _unseen(trace.enter), _unseen(trace.leave)
        hooks = hooked([(module, enter) for module in trace.names], [(module, leave) for module in trace.names])
        with hooks, trace.reads, interruptible():
            output = model(trace.image)
        trace.finish(output)
        yield trace


def _unseen(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook during which PyTorch's function modes are off; otherwise they take a tenth of a pass."""

    def run(*given: Any) -> None:
        with torch._C.DisableTorchFunction():
            hook(*given)

    return run


def _classes(module: nn.Module) -> int | None:
    """Return how many classes a linear layer or a 1 x 1 convolution scores; None for any other module."""
    weight = getattr(module, "weight", None) if isinstance(module, _LINEAR) else None
    if not isinstance(weight, Tensor) or weight.dim() < 2 or weight.shape[2:].numel() > 1:
        return None
    return weight.shape[0]


def _check_frames(convolution: Tensor, clip: Tensor) -> None:
    """Refuse a clip (N, T, C, H, W); the input of the model's first convolution shows the order of the axes.

    Raises:
        FramesFirstError: the convolution gets the clip's second axis as time and its third as channels.
    """
    if clip.dim() != 5 or convolution.dim() not in (4, 5):
        return
    exchanged = clip.transpose(1, 2)
    read, other = (exchanged, clip) if convolution.dim() == 5 else (clip.flatten(0, 1), exchanged.flatten(0, 1))
    if convolution.shape[:2] != read.shape[:2]:
        return
    if read.shape[:2] != other.shape[:2] or likeness(convolution, read) > likeness(convolution, other):
        raise FramesFirstError(
            "this model reads clips as (N, T, C, H, W), and camkit needs (N, C, T, H, W) to tell time from colours: "
            "wrap the model in a module whose forward calls model(clip.transpose(1, 2)), and pass the clip as "
            "(C, T, H, W)"
        )


def likeness(first: Tensor, second: Tensor) -> float:
    """Return the mean correlation of the pictures of two clips; 0 if they differ in size."""
    if first.shape != second.shape:
        return 0.0
    parts = [functional.layer_norm(clip.detach().float(), clip.shape[-2:]) for clip in (first, second)]
    return float((parts[0] * parts[1]).mean())


def scored_tensor(output: Any) -> Tensor | None:
    """Return the tensor that holds an output's scores, else its first tensor; None if none has a gradient.

    If several tensors could hold the scores, they are concatenated. In a pass without gradients, tensors need none.
    """

    def counts(value: Any) -> bool:
        has_graph = isinstance(value, Tensor) and (value.requires_grad or not torch.is_grad_enabled())
        return has_graph and value.is_floating_point() and value.numel() > 0

    several = list(filter(counts, rivals(output)))
    if len(several) > 1:
        return torch.cat([tensor.float().flatten(1) for tensor in several], dim=1)
    return next(filter(counts, (main_tensor(output), *tensors_in(output))), None)


def score_of(output: Any, scored: Tensor, classes: int | None) -> Tensor:
    """Return a classifier's largest logit; for maps of scores, the sum of each cell's largest score.

    For features, if there are no ``classes``, it is a mixture of all values.
    """
    if classes is None or len(rivals(output)) > 1:
        return mixture(scored)
    return scored.max(1).values.sum() if scored.dim() > 1 else scored.max()


def mixture(features: Tensor) -> Tensor:
    """Return a fixed random projection of features."""
    directions = torch.arange(1, features.numel() + 1, device=features.device, dtype=torch.float32).mul(12.9898)
    return (features.float().flatten() * directions.sin()).sum()
