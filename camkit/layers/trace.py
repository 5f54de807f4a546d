"""The first stage: run the model once and record what each module returned and what that was computed from.

A ``Trace`` is a frozen record of numbers and shapes. The later stages read nothing else, so they also run on a recorded
trace without a network. The other stages get their measurements of the model from a ``LivePass``,
which keeps the tensors of the pass.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.export.unflatten import InterpreterModule
from torch.nn import functional

from camkit.engine.attach import forward_hooks, hooked
from camkit.engine.guard import guarded, switch_off_training
from camkit.engine.interrupts import interruptible, undisturbed
from camkit.engine.nested import feature_tensor, tensors_in
from camkit.engine.record import ModelRecord
from camkit.errors import ModelError
from camkit.layers.graph import Graph, GraphRecorder, set_of
from camkit.layers.names import first_name_by_module, modules_by_name
from camkit.layers.operations import MethodWatch, OperationWatch
from camkit.layers.positions import Follower, address
from camkit.targets.outputs import detections_of, main_tensor, rivals
from camkit.targets.probabilities import final_activation, passing_through
from camkit.types import LayerRef, LayoutKind

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

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


@dataclass(frozen=True)
class Convolution:
    """A convolution's geometry.

    Attributes:
        kernel: the kernel's size along each axis, in cells.
        stride: the stride along each axis, in cells.
        padded: True if it pads its input.
        size: the size of its input, (H, W), (L,) or (D, H, W); empty if it has other axes than the model's input, or
            if it is a batch of parts of a picture.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padded: bool
    size: tuple[int, ...]


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
        operation_after: the output's operation at the end of the pass: another one if it is a view whose memory was
            changed in place.
        alone: True if the module returned no other computed tensor.
        scales: the operations of its outputs, if they have several sizes.
        passes: True if it computes no features: it returns a summary, the picture, or what an earlier call returned.
            A sum that no module returned counts as the output of the first module that it passes through.
        weighted: True if it has parameters of its own.
        classes: how many classes it scores, for a linear layer or a 1 x 1 convolution; otherwise None.
        convolution: its geometry, if it is a convolution.
        kept: True if all operations up to its end leave every cell in its place.
        moved: True if the values of the picture decided from which places its cells come.
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
    operation_after: int | None = None
    alone: bool = True
    scales: tuple[int, ...] = ()
    passes: bool = False
    weighted: bool = False
    classes: int | None = None
    convolution: Convolution | None = None
    kept: bool = False
    moved: bool = False

    @property
    def key(self) -> Key:
        """The module's name and the number of the call."""
        return self.name, self.number

    @functools.cached_property
    def operations(self) -> int:
        """The set of the operations that computed the output.

        A view whose memory is changed in place gets a new operation, and no path leads to the old one.
        """
        return set_of((self.operation, self.operation_after))

    def is_among(self, members: int) -> bool:
        """Tell whether a set of operations contains one of the output's."""
        return bool(members & self.operations)


@dataclass(frozen=True, eq=False)
class Trace:
    """The record of one pass.

    Attributes:
        size: the size of the input, (H, W), (L,) or (D, H, W).
        calls: the calls of all modules, in the order in which they finished.
        graph: the operations, and what each was computed from.
        detects: True if the model returned boxes.
        scored: True if the model returned a score that can be differentiated.
        maps: the number of classes, if the model returns maps of scores; otherwise 0.
        reads: what the way through the model depends on, "picture" or "weights" or both; see ``OperationWatch``.
        end: the operation that computed the score; None if it is not known.
        hides: True if the graph may not show how the score depends on the input: values were detached, or a function of
            the user's computes a gradient.
    """

    size: tuple[int, ...]
    calls: tuple[TracedCall, ...]
    graph: Graph
    detects: bool = False
    scored: bool = True
    maps: int = 0
    reads: frozenset[str] = frozenset()
    end: int | None = None
    hides: bool = False

    @functools.cached_property
    def classes(self) -> int | None:
        """The number of classes that the last layer with weights scores; None if it returns features.

        Scores come from a linear layer or a 1 x 1 convolution. A network without a head ends in a larger convolution or
        a normalisation.
        """
        return next((call.classes for call in reversed(self.calls) if call.weighted), None)

    def before_the_score(self, *without: TracedCall) -> int:
        """Return the set of operations from which a path leads to the score that passes none of these outputs."""
        return 0 if self.end is None else self.before(self.end, *without)

    def before(self, end: int, *without: TracedCall) -> int:
        """Return the set of operations from which a path leads to the operation ``end`` that passes none of these."""
        return self.graph.before(end, functools.reduce(operator.or_, (call.operations for call in without), 0))

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


ScoreFrom: TypeAlias = Literal["best", "mixture", "head"]
"""The score to differentiate: the best class's, a mixture of all outputs, or a mixture of the last layer's inputs."""

Gradients: TypeAlias = Callable[[ScoreFrom, Sequence[int]], Mapping[int, Bool[Tensor, "*shape"] | None]]
"""``gradients(score, tensors)`` returns masks of where each tensor's gradient is not zero. It leaves out tensors that
have no gradient, and all if there is no such score."""


class FramesFirstError(ModelError):
    """The model reads clips as (N, T, C, H, W)."""


class Followed(NamedTuple):
    """Where in the input the cells of an output come from.

    Attributes:
        places: for each way to read the output, (1 + axes, *cells): the mean weight of each cell's elements, 0 if their
            places are not known, and the mean of the weighted places along each axis, from -1 to 1. Empty if the output
            was computed from the input in a way that does not show them.
        certain: False if the places are those of the queries of attention.
        received: the same for the first convolution's input (N, C, *size).
    """

    places: Mapping[LayoutKind, Tensor]
    certain: bool
    received: Tensor | None = None


Places: TypeAlias = Callable[[Sequence[Key], Key | None], Mapping[Key, Followed]]
"""``places(calls, first)`` tells where the cells of outputs come from, and those that the first convolution received.
It leaves out outputs that were not computed from the input. If the model does not run once more, no place is known."""


@dataclass(frozen=True)
class Returned:
    """What one call of a module returned; ``versions`` shows whether it was changed in place afterwards."""

    value: Any
    versions: tuple[int, ...]

    @property
    def unchanged(self) -> bool:
        """True if no operation changed it in place since."""
        return self.versions == _versions(self.value)


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors_in(value))


@dataclass(eq=False)
class LivePass:
    """A pass whose tensors are kept: the model's output, and the arguments and output of each call.

    ``end`` is the tensor of the score: all class scores, or those of all boxes. If the decision is made for one target,
    ``target`` returns its score, which is ``end`` then. ``edges`` are the places in the graph at which to differentiate
    with respect to ``tensors``: later in-place operations do not move them.
    """

    model: nn.Module
    leaf: Tensor
    output: Any
    end: Tensor | None
    trace: Trace
    tensors: dict[int, Tensor]
    edges: dict[int, GradientEdge]
    returned: dict[Key, Returned]
    target: Callable[[Any], Tensor] | None

    def gradients(self, score: ScoreFrom, tensors: Sequence[int]) -> dict[int, Tensor | None]:
        """Differentiate a score, as described at ``Gradients``."""
        found = self._gradients(score, tensors)
        return {number: None if gradient is None else gradient.bool() for number, gradient in found.items()}

    def of_best_box(self, tensor: int) -> Tensor | None:
        """Return the gradient of the best box's score at a tensor; None without boxes, or if it is not computed."""
        scores = self.end if self.trace.detects else None
        return None if scores is None or not scores.numel() else self.differentiate(scores.max(), [tensor]).get(tensor)

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

    def products(self, tensor: int) -> Tensor | None:
        """Return a tensor times the gradient of the best score at it; None if the score does not depend on it."""
        gradient = self._gradients("best", [tensor]).get(tensor)
        return None if gradient is None else self.tensors[tensor].detach() * gradient

    def _gradients(self, score: ScoreFrom, tensors: Sequence[int]) -> dict[int, Tensor | None]:
        scored = None if self.target is not None else self.end
        with passing_through(None if scored is None else final_activation(scored)):
            return self.differentiate(self._score(score), tensors)

    def _score(self, score: ScoreFrom) -> Tensor | None:
        if self.target is not None:
            graded = [mixture(tensor) for tensor in tensors_in(self.output) if tensor.requires_grad]
            mixed = torch.stack(graded).sum() if graded and score == "mixture" else None
            return self.end if score == "best" else mixed
        if score == "head":
            return _head_input(self.trace, self.tensors)
        if self.end is None or score == "mixture":
            return None if self.end is None else mixture(self.end)
        return score_of(self.output, self.end, self.trace.classes)

    def places(self, calls: Sequence[Key], first: Key | None) -> dict[Key, Followed]:
        """Run the model once more, and return where the cells of outputs come from; see ``Places``."""
        switch_off_training(self.model)  # the previous pass may have switched parts of the model to training
        wanted = set(calls) if first is None else {*calls, first}
        try:
            return _followed(self.model, self.leaf.detach().clone(), wanted, first)
        except Exception:  # noqa: BLE001 - a model may raise anything if it counts its passes
            return dict.fromkeys(wanted, Followed({}, certain=False))


def _by_cell(values: Tensor, rank: int) -> Iterator[tuple[LayoutKind, Tensor]]:
    """Yield the means over the channels of several values per element, for each way to read an output."""
    dimensions = values.dim() - 1
    if values.shape[1] != 1:
        if dimensions == 3 and values.shape[2] == 1:
            yield "sequence_first", _mean(values[:, :, 0], -1)
    elif dimensions == rank + 2:
        yield "channels_first", _mean(values[:, 0], 1)
        yield "channels_last", _mean(values[:, 0], -1)
    if values.shape[1] == 1 and dimensions == 3:
        yield "tokens", _mean(values[:, 0], -1)
        yield "tokens_last", _mean(values[:, 0], 1)


def _mean(values: Tensor, axis: int) -> Tensor:
    """Return the mean along an axis, at no cost if values are expanded along it."""
    return values.select(axis, 0) if values.stride(axis) == 0 else values.mean(axis)


@contextmanager
def traced(
    model: nn.Module,
    image: Tensor,
    record: ModelRecord | None = None,
    target: Callable[[Any], Tensor] | None = None,
) -> Iterator[LivePass]:
    """Run a model once on one image, record the graph, and keep the tensors while the block runs.

    Args:
        model: the model; it is restored exactly.
        image: one input (1, C, *size) on the model's device.
        record: the model's record, if it is already prepared.
        target: returns the score that counts, from the model's output; None for the model's main output.
    """
    kept = guarded(model, record or ModelRecord.of_model(model))
    with kept, torch.inference_mode(mode=False), torch.enable_grad():
        recording = _Recording(model, image.detach().clone().requires_grad_())
        watch, begin, end = recording.watch, recording.begin, recording.end
        hooks = hooked([(module, begin) for module in recording.names], [(module, end) for module in recording.names])
        with hooks, watch, MethodWatch(watch), interruptible():
            output = model(recording.image)
        recording.check()
        yield recording.live(output, target)


class _Recording:
    """Records every call of every module while a model runs: its start and end, its arguments and its output.

    Attributes:
        image: the input for the model, a copy of the leaf.
        names: the first name of each module.
        watch: what the operations of the pass do to the places of cells.
    """

    def __init__(self, model: nn.Module, leaf: Tensor) -> None:
        self.image = leaf.clone()
        self.names = first_name_by_module(modules_by_name(model))
        self.watch = OperationWatch(self.image)
        self._leaf, self._model = leaf, model
        self._graph = GraphRecorder(leaf)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._tensors: dict[int, Tensor] = {}
        self._edges: dict[int, GradientEdge] = {}
        self._known = {self._number(self.image)}
        self._clock = itertools.count()
        self._runs: Counter[nn.Module] = Counter()
        self._running: list[tuple[nn.Module, int, int, tuple[int, ...]]] = []
        self._calls: list[TracedCall] = []
        self._returned: dict[Key, Returned] = {}
        self._convolved: Tensor | None = None
        self._hidden: Tensor | None = None

    def begin(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Note that a call starts, and its arguments, which it may then change in place."""
        self._runs[module] += 1
        given = tuple(map(self._number, tensors_in((arguments, keywords) if keywords else arguments)))
        self._running.append((module, self._runs[module], next(self._clock), given))

    def end(self, module: nn.Module, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> None:
        """Record a call that ends."""
        while self._running[-1][0] is not module:  # an exception ended these calls
            self._running.pop()
        number, started, given = self._running.pop()[1:]
        arguments = [self._tensors[each] for each in given]
        convolution = _geometry(module, arguments, self._leaf)
        if convolution is not None and self._convolved is None:
            self._convolved = arguments[0]
        maps = feature_tensor(output)
        tensor = None if maps is None else maps[1]
        if tensor is not None and address(tensor) is None:  # inside of torch.func, such as vmap
            self._hidden, tensor = tensor, None
        computed = [] if tensor is None else [each for each in tensors_in(output) if each.grad_fn is not None]
        sizes = {each.shape[2:] for each in computed if each.dim() == self._leaf.dim()}
        scales = [self._graph.number(each.grad_fn) for each in computed] if len(sizes) > 1 else []
        number_of_output = None if tensor is None else self._number(tensor)
        call = TracedCall(
            name=self.names[module],
            number=number,
            kind=type(module).__name__,
            started=started,
            finished=next(self._clock),
            arguments=given,
            output=number_of_output,
            shape=() if tensor is None else tuple(tensor.shape),
            operation=None if tensor is None else self._graph.number(tensor.grad_fn),
            alone=tensor is None or len(computed) == 1,
            scales=tuple(scale for scale in scales if scale is not None),
            passes=isinstance(module, _SUMMARIES) or number_of_output in self._known.intersection(given),
            weighted=any(parameter is not None for parameter in module._parameters.values()),
            classes=_classes(module),
            convolution=convolution,
            kept=self.watch.kept,
            moved=tensor is not None and self.watch.is_moved(tensor),
        )
        self._calls.append(call)
        self._known.update(self._number(each) for each in tensors_in(output))
        self._returned[call.key] = Returned(output, _versions(output))

    def _number(self, tensor: Tensor) -> int:
        state = id(tensor), *_versions(tensor)
        number = self._numbers.setdefault(state, len(self._numbers))
        if number not in self._tensors:
            self._tensors[number] = tensor  # while it is kept, no other tensor has its id
            if tensor.requires_grad:
                self._edges[number] = get_gradient_edge(tensor)
        return number

    def check(self) -> None:
        """Refuse a pass whose tensors cannot be read, or whose clip has another order of axes.

        Raises:
            FramesFirstError: the model reads clips as (N, T, C, H, W).
            Exception: PyTorch's own error.
        """
        if self._hidden is not None and all(call.output is None for call in self._calls):
            self._hidden.untyped_storage()
        if self._convolved is not None:
            _check_frames(self._convolved, self.image)

    def live(self, output: Any, target: Callable[[Any], Tensor] | None) -> LivePass:
        """Return the finished pass with its trace."""
        scored, images = scored_tensor(output), detections_of(output, 1) if target is None else None
        maps = 0 if scored is None or scored.dim() <= 3 or scored.shape[2:].numel() <= 1 else scored.shape[1]
        end = target(output) if target is not None else scored
        if images:
            end = images[0].get("logits", images[0]["scores"])
        calls = [
            replace(call, operation_after=self._graph.number(self._tensors[call.output].grad_fn))
            if call.output is not None and self._tensors[call.output]._is_view()
            else call
            for call in self._calls
        ]
        number_of_end = None if end is None else self._graph.number(end.grad_fn)
        graph = self._graph.graph()
        trace = Trace(
            size=tuple(self._leaf.shape[2:]),
            calls=tuple(calls),
            graph=graph,
            detects=images is not None,
            scored=scored is not None,
            maps=maps,
            reads=frozenset(self.watch.reads),
            end=number_of_end,
            hides=self.watch.detached or graph.has_own_gradients,
        )
        return LivePass(self._model, self._leaf, output, end, trace, self._tensors, self._edges, self._returned, target)


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
    if read.shape[:2] != other.shape[:2] or _likeness(convolution, read) > _likeness(convolution, other):
        raise FramesFirstError(
            "this model reads clips as (N, T, C, H, W), and camkit needs (N, C, T, H, W) to tell time from colours: "
            "wrap the model in a module whose forward calls model(clip.transpose(1, 2)), and pass the clip as "
            "(C, T, H, W)"
        )


def _likeness(first: Tensor, second: Tensor) -> float:
    """Return the mean correlation of the pictures of two clips; 0 if they differ in size."""
    if first.shape != second.shape:
        return 0.0
    parts = [functional.layer_norm(clip.detach().float(), clip.shape[-2:]) for clip in (first, second)]
    return float((parts[0] * parts[1]).mean())


_LINEAR = (nn.Linear, *CONVOLUTIONS, InterpreterModule)
"""The types of modules that may score classes; an exported program has its own type for all modules."""


def _classes(module: nn.Module) -> int | None:
    """Return how many classes a linear layer or a 1 x 1 convolution scores; None for any other module."""
    weight = getattr(module, "weight", None) if isinstance(module, _LINEAR) else None
    if not isinstance(weight, Tensor) or weight.dim() < 2 or weight.shape[2:].numel() > 1:
        return None
    return weight.shape[0]


def _geometry(module: nn.Module, arguments: list[Tensor], picture: Tensor) -> Convolution | None:
    """Return the geometry of a convolution; None for any other module."""
    if not isinstance(module, CONVOLUTIONS) or not arguments:
        return None
    own = arguments[0]
    size = tuple(own.shape[2:]) if own.dim() == picture.dim() and len(own) == len(picture) else ()
    padded = isinstance(module.padding, str) or any(module.padding)
    return Convolution(module.kernel_size, module.stride, padded, size)


def _followed(model: nn.Module, image: Tensor, wanted: set[Key], first: Key | None = None) -> dict[Key, Followed]:
    """Run the model, and return where the cells of some calls' outputs come from."""
    rank = image.dim() - 2
    modules = modules_by_name(model)
    names = {modules[name]: name for name, _ in wanted}
    counts: dict[nn.Module, int] = {}
    found: dict[Key, Followed] = {}

    def end(module: nn.Module, arguments: list[Tensor], output: Any) -> None:
        counts[module] = counts.get(module, 0) + 1
        key = (names[module], counts[module])
        maps = feature_tensor(output) if key in wanted else None
        if maps is None or not follower.is_computed(maps[1]):
            return
        positions = follower.positions(maps[1])
        received = follower.positions(arguments[0]) if key == first and arguments else None
        found[key] = Followed(
            {} if positions is None else dict(_by_cell(positions, rank)),
            follower.is_certain(maps[1]),
            None if received is None else dict(_by_cell(received, rank)).get("channels_first"),
        )

    ends = dict.fromkeys(names, end)
    with torch.no_grad(), undisturbed(), Follower(image) as follower, forward_hooks(ends), interruptible():
        model(image)
    return found


def _head_input(trace: Trace, tensors: Mapping[int, Tensor]) -> Tensor | None:
    """Return a mixture of the input of the last layer with weights; None if that input has no gradient."""
    names = {call.name for call in trace.calls}
    for call in reversed(trace.calls):
        argument = next((tensors[number] for number in call.arguments if tensors[number].is_floating_point()), None)
        has_children = any(name.startswith(f"{call.name}.") for name in names) or not call.name
        if argument is not None and call.weighted and not has_children:
            return mixture(argument) if argument.requires_grad else None
    return None


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

    For features, if there are no ``classes``, it is a mixture of all values. The caller's own target is not used, since
    it may work for one batch only.
    """
    if classes is None or len(rivals(output)) > 1:
        return mixture(scored)
    return scored.max(1).values.sum() if scored.dim() > 1 else scored.max()


def mixture(features: Tensor) -> Tensor:
    """Return a fixed random projection of features."""
    directions = torch.arange(1, features.numel() + 1, device=features.device, dtype=torch.float32).mul(12.9898)
    return (features.float().flatten() * directions.sin()).sum()
