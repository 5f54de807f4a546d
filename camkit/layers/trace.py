"""The first stage: one pass that notes which module returned what, computed from what.

A ``Trace`` is a frozen record of numbers and shapes. The stages that follow read only it, and so they can be run on a
recorded trace without a network. What the influence and location stages must measure on the model itself comes from a
``LivePass``, which keeps the tensors of the pass.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from camkit.engine.attach import forward_hooks, starts
from camkit.engine.nested import feature_tensor, tensors_in
from camkit.engine.randomness import same_randomness
from camkit.engine.record import ModelRecord
from camkit.engine.resizing import resized_input
from camkit.engine.restore import eagerly, evaluating, switch_off_training
from camkit.layers.graph import Graph, GraphRecorder, contains
from camkit.layers.names import first_name_by_module, modules_by_name
from camkit.targets.outputs import main_tensor, rivals
from camkit.types import LayerRef

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

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
"""Modules that compute no features: what they return is their input, or a summary of it."""

KEEPING = frozenset(
    [
        "convolution",
        "mkldnn_convolution",
        "native_batch_norm",
        "cudnn_batch_norm",
        "_native_batch_norm_legit_no_training",
        "native_layer_norm",
        "native_group_norm",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "mean",
        "relu",
        "relu_",
        "hardtanh",
        "hardtanh_",
        "hardswish",
        "hardswish_",
        "hardsigmoid",
        "hardsigmoid_",
        "leaky_relu",
        "leaky_relu_",
        "sigmoid",
        "sigmoid_",
        "silu",
        "silu_",
        "gelu",
        "elu",
        "elu_",
        "tanh",
        "tanh_",
        "prelu",
        "_prelu_kernel",
        "softplus",
        "mish",
        "clamp",
        "clamp_",
        "clamp_min",
        "clamp_min_",
        "add",
        "add_",
        "sub",
        "sub_",
        "mul",
        "mul_",
        "div",
        "div_",
        "cat",
        "clone",
        "copy_",
        "detach",
        "alias",
        "empty",
        "empty_like",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "_to_copy",
        "native_dropout",
        "_adaptive_avg_pool2d",
        "exp",
        "rsqrt",
        "sqrt",
        "pow",
    ]
)
"""PyTorch's operations that leave every cell of a feature map in its place. After any other, places are measured."""

Key: TypeAlias = tuple[str, int]
"""A module's name and the number of its call, from 1."""


@dataclass(frozen=True)
class Convolution:
    """A convolution's geometry.

    Attributes:
        kernel: cells along each axis.
        stride: cells along each axis.
        padded: whether it adds edges to its input.
        size: of its input, (H, W), (L,) or (D, H, W); empty if the input had other axes than the pass's.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padded: bool
    size: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of one module. Tensors are numbers, the same number for the same tensor.

    Attributes:
        module: the number of the module.
        name: its dotted name, "" for the model itself.
        number: which of the module's calls this is, from 1.
        kind: the name of its class.
        started, finished: moments, in the order of execution.
        arguments: the tensors it was called with.
        output: the tensor of at least three axes that it returned; None if there is none.
        shape: of that tensor.
        operation: the operation that computed the output; an in-place operation after the module gives the tensor
            another one, ``operation_after``.
        alone: whether nothing else that was computed came out with it.
        scales: the operations of its outputs, if they have several sizes.
        padded: the size of the images it returned, if it resized and padded the input.
        passes: whether it computes no features.
        weighted: whether it has parameters of its own.
        classes: how many classes it scores, for a linear layer or a convolution of single cells; otherwise None.
        convolution: its geometry, if it is a convolution.
        kept: whether all operations before its end leave every cell in its place.
    """

    module: int
    name: str
    number: int
    kind: str
    started: int
    finished: int = 0
    arguments: tuple[int, ...] = ()
    output: int | None = None
    shape: tuple[int, ...] = ()
    operation: int | None = None
    operation_after: int | None = None
    alone: bool = True
    scales: tuple[int, ...] = ()
    padded: tuple[int, ...] = ()
    passes: bool = False
    weighted: bool = False
    classes: int | None = None
    convolution: Convolution | None = None
    kept: bool = False

    @property
    def key(self) -> Key:
        """The name and the number."""
        return self.name, self.number

    def is_among(self, members: int) -> bool:
        """Tell whether the output is in a set of operations, as it was or as an in-place operation left it.

        What is added in place to a part of a tensor moves the part: its former place is on no way any more.
        """
        return contains(members, self.operation) or contains(members, self.operation_after)


@dataclass(frozen=True, eq=False)
class Trace:
    """What one pass showed.

    Attributes:
        size: of the input, (H, W), (L,) or (D, H, W).
        calls: of all modules, in the order in which they ended.
        graph: what was computed from what.
        detects: whether the model returned boxes.
        scored: whether a score can be differentiated.
        maps: how many classes the model has, if it returns maps of scores; otherwise 0.
    """

    size: tuple[int, ...]
    calls: tuple[Call, ...]
    graph: Graph
    detects: bool = False
    scored: bool = True
    maps: int = 0

    @functools.cached_property
    def classes(self) -> int | None:
        """For how many classes the last layer with weights gives scores; None if it gives features.

        Scores come from a linear layer or a convolution of single cells. A network without a head ends in another
        convolution, or in a normalisation.
        """
        return next((call.classes for call in reversed(self.calls) if call.weighted), None)

    @functools.cached_property
    def refs(self) -> Mapping[Call, LayerRef]:
        """How each call is typed: with its number only if its module runs several times."""
        runs = Counter(call.module for call in self.calls)
        return {call: LayerRef(call.name, call.number if runs[call.module] > 1 else None) for call in self.calls}

    @functools.cached_property
    def by_output(self) -> Mapping[int | None, Sequence[Call]]:
        """The calls that returned each tensor, in the order in which they ended."""
        calls: defaultdict[int | None, list[Call]] = defaultdict(list)
        for call in self.calls:
            calls[call.output].append(call)
        return calls


Score: TypeAlias = Literal["best", "mixture", "head"]
"""What is differentiated: the best class's score, a mixture of all outputs, or one of the last layer's inputs."""

Gradients: TypeAlias = Callable[[Score, Sequence[int]], "Mapping[int, Bool[Tensor, '*shape'] | None] | None"]
"""``gradients(score, tensors)`` tells where the gradient of each tensor is not zero. None if there is no such score."""

Profiles: TypeAlias = Mapping[str, Tensor]
"""For each way to read an output, how much each of its cells changed."""

Changes: TypeAlias = Callable[[Sequence[Key]], "Mapping[Key, tuple[Profiles, Profiles]] | None"]
"""``changes(calls)`` tells how outputs changed when one half of the input was exchanged, and when the other was. A call
is missing if its changes could not be measured; None if the model takes no changed input."""


class OperationNames(TorchDispatchMode):
    """Notes the names of all operations that run, as PyTorch's dispatcher calls them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch imports its compiler at the first operation, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        name = func._overloadpacket.__name__
        if name not in KEEPING or (name == "convolution" and _widens(*args[1:7])):
            self.others.add(name)
        return func(*args, **(kwargs or {}))


def _widens(weight: Tensor, _: Any, __: Any, padding: Sequence[int], dilation: Sequence[int], transposed: bool) -> bool:
    """Tell whether a convolution may move cells: it adds more edge than its kernel uses up, or is transposed."""
    reach = (step * (side - 1) for step, side in zip(dilation, weight.shape[2:], strict=False))
    return transposed or any(2 * edge > far for edge, far in zip(padding, reach, strict=False))


@dataclass(eq=False)
class LivePass:
    """A pass whose tensors are still there: what the model returned, and each call's arguments and output."""

    model: nn.Module
    leaf: Tensor
    output: Any
    trace: Trace
    tensors: dict[int, Tensor] = field(default_factory=dict)
    _scores: dict[Score, Tensor | None] = field(default_factory=dict)

    def gradients(self, score: Score, tensors: Sequence[int]) -> dict[int, Tensor | None] | None:
        """Differentiate a score; see ``Gradients``."""
        if score not in self._scores:
            self._scores[score] = self._score(score)
        value = self._scores[score]
        if value is None or not value.requires_grad:
            return None
        usable = [number for number in tensors if self.tensors[number].requires_grad]
        if not usable:
            return {}
        ends = [self.tensors[number] for number in usable]
        gradients = torch.autograd.grad(value, ends, retain_graph=True, allow_unused=True)
        return {
            number: None if gradient is None else gradient != 0
            for number, gradient in zip(usable, gradients, strict=True)
        }

    def _score(self, score: Score) -> Tensor | None:
        if score == "head":
            return _head_input(self.trace, self.tensors)
        scored = scored_tensor(self.output)
        if scored is None or score == "mixture":
            return None if scored is None else mixture(scored)
        return score_of(self.output, scored, self.trace.classes)

    def changes(self, parts: tuple[Tensor, Tensor], noise: Tensor, calls: Sequence[Key]) -> Any:
        """Run the model twice more, with noise in some parts of the input and then in the others; see ``Changes``."""
        image = self.leaf.detach()
        halves: list[dict[Key, Profiles]] = []
        wanted = set(calls)
        for part in parts:
            switch_off_training(self.model)  # the pass before may have switched parts of the model to training
            changed = torch.where(part, noise, image)
            try:
                with torch.no_grad():
                    outputs = _outputs(self.model, changed, wanted)
            except Exception:  # noqa: BLE001 - a model may raise anything for an input it was not made for
                return None
            halves.append(
                {
                    call.key: dict(_profiles(self.tensors[call.output], outputs[call.key], len(self.trace.size)))
                    for call in self.trace.calls
                    if call.output is not None and call.key in outputs
                }
            )
        first, second = halves
        return {key: (first[key], second[key]) for key in calls if first.get(key) and second.get(key)}


_ROUNDING = 64
"""Times the type's precision: smaller changes of an output, relative to its size, may be rounding alone."""

_LEAST_CHANGE = 0.03
"""Change of an output, relative to its size, that no type's rounding reaches."""


def _profiles(before: Tensor, after: Tensor, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Return, for each way to read an output, how much its cells changed; nothing if that is not measurable."""
    if before.shape != after.shape:
        return
    change = (after.detach() - before.detach()).abs().float()
    rounding = min(_ROUNDING * torch.finfo(before.dtype).eps, _LEAST_CHANGE)
    if not change.mean() > rounding * before.detach().float().abs().mean():  # also if it is not finite
        return
    if len(change) != 1:
        yield "sequence_first", change.flatten(1).mean(1)
    elif change.dim() == rank + 2:
        yield "channels_first", change[0].mean(0)
        yield "channels_last", change[0].mean(-1)
    if len(change) == 1 and change.dim() == 3:
        yield "tokens", change[0].mean(-1)
        yield "tokens_last", change[0].mean(0)


@contextmanager
def traced(model: nn.Module, image: Tensor, record: ModelRecord | None = None) -> Iterator[LivePass]:
    """Run a model once on one image with a graph of all it computes, and keep the tensors while the block runs.

    Args:
        model: left exactly as it was found.
        image: one input (1, C, *size) on the model's device.
        record: of the model, if one is prepared.
    """
    record = record or ModelRecord.of_model(model)
    with (
        eagerly(),
        same_randomness(record.devices),
        evaluating(model, record),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
    ):
        live = _trace(model, image.detach().clone().requires_grad_())
        yield live


@dataclass(eq=False)
class _Begun:
    """A call that has begun, and what is known of it so far."""

    call: Call
    arguments: list[Tensor] = field(default_factory=list)
    output: Tensor | None = None
    node: Node | None = None
    scales: list[Node] = field(default_factory=list)


def _trace(model: nn.Module, leaf: Tensor) -> LivePass:
    """Run the model and note every call of every module: when it began and ended, with what, and what it returned."""
    first_names = first_name_by_module(modules_by_name(model))
    names = {module: (number, name) for number, (module, name) in enumerate(first_names.items())}
    running: list[_Begun] = []
    finished: list[_Begun] = []
    counts = dict.fromkeys(names, 0)
    clock = itertools.count()
    operations = OperationNames()

    def begin(module: nn.Module) -> None:
        counts[module] += 1
        number, name = names[module]
        running.append(_Begun(_call(number, name, counts[module], module, next(clock))))

    def end(module: nn.Module, arguments: list[Tensor], output: Any) -> None:
        while running[-1].call.module != names[module][0]:  # a call that an exception ended
            running.pop()
        begun = running.pop()
        maps = feature_tensor(output)
        computed = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        begun.arguments = arguments
        if maps is not None:
            begun.output, begun.node = maps[1], maps[1].grad_fn
            if len({tensor.shape[2:] for tensor in computed if tensor.dim() == leaf.dim()}) > 1:
                begun.scales = [tensor.grad_fn for tensor in computed if tensor.grad_fn is not None]
        resized = resized_input(output)
        begun.call = replace(
            begun.call,
            finished=next(clock),
            alone=maps is None or len(computed) == 1,
            padded=() if resized is None else resized[0],
            convolution=_geometry(module, arguments, leaf.dim()),
            kept=not operations.others,
        )
        finished.append(begun)

    with starts(names, begin), forward_hooks(dict.fromkeys(names, end)):
        image = leaf.clone()
        with operations:
            output = model(image)
    return _live(model, leaf, finished, output)


def _live(model: nn.Module, leaf: Tensor, finished: list[_Begun], output: Any) -> LivePass:
    """Number the tensors and operations of a pass that has ended."""
    recorder = GraphRecorder(leaf)
    numbers: dict[int, int] = {}
    tensors: dict[int, Tensor] = {}

    def number(tensor: Tensor) -> int:
        given = numbers.setdefault(id(tensor), len(numbers))
        tensors[given] = tensor
        return given

    calls = [
        replace(
            begun.call,
            arguments=tuple(map(number, begun.arguments)),
            output=None if begun.output is None else number(begun.output),
            shape=() if begun.output is None else tuple(begun.output.shape),
            operation=recorder.number(begun.node),
            operation_after=None if begun.output is None else recorder.number(begun.output.grad_fn),
            scales=tuple(known for node in begun.scales if (known := recorder.number(node)) is not None),
        )
        for begun in finished
    ]
    scored = scored_tensor(output)
    maps = 0 if scored is None or scored.dim() <= 3 or scored.shape[2:].numel() <= 1 else scored.shape[1]
    trace = Trace(
        tuple(leaf.shape[2:]), tuple(calls), recorder.graph(), detections_in(output), scored is not None, maps
    )
    return LivePass(model, leaf, output, trace, tensors)


def _call(number: int, name: str, count: int, module: nn.Module, started: int) -> Call:
    weight = getattr(module, "weight", None)
    scores = isinstance(module, (nn.Linear, *CONVOLUTIONS)) and isinstance(weight, Tensor)
    scores = scores and isinstance(weight, Tensor) and weight.shape[2:].numel() == 1
    return Call(
        number,
        name,
        count,
        type(module).__name__,
        started,
        passes=isinstance(module, _PASSING),
        weighted=any(parameter is not None for parameter in module._parameters.values()),
        classes=weight.shape[0] if scores and isinstance(weight, Tensor) else None,
    )


def _geometry(module: nn.Module, arguments: list[Tensor], dimensions: int) -> Convolution | None:
    if not isinstance(module, CONVOLUTIONS) or not arguments:
        return None
    size = tuple(arguments[0].shape[2:]) if arguments[0].dim() == dimensions else ()
    padded = isinstance(module.padding, str) or any(module.padding)
    return Convolution(module.kernel_size, module.stride, padded, size)


def _outputs(model: nn.Module, image: Tensor, wanted: set[Key]) -> dict[Key, Tensor]:
    """Run the model and return what some calls returned."""
    modules = modules_by_name(model)
    counts: dict[nn.Module, int] = {}
    names = {modules[name]: name for name, _ in wanted}
    outputs: dict[Key, Tensor] = {}

    def end(module: nn.Module, _: list[Tensor], output: Any) -> None:
        counts[module] = counts.get(module, 0) + 1
        key = (names[module], counts[module])
        maps = feature_tensor(output) if key in wanted else None
        if maps is not None:
            outputs[key] = maps[1]

    with forward_hooks(dict.fromkeys(names, end)):
        model(image.clone())
    return outputs


def detections_in(output: Any) -> bool:
    """Tell whether a model returned boxes: a list with a dictionary for each image."""
    boxes = output[0] if isinstance(output, tuple) and output else output
    return isinstance(boxes, list) and bool(boxes) and all(isinstance(item, dict) and "boxes" in item for item in boxes)


def scored_tensor(output: Any) -> Tensor | None:
    """Return what holds the scores of an output, or the first of several tensors; None if there is no gradient.

    Of several that could hold them, all beside each other.
    """
    several = [tensor for tensor in rivals(output) if tensor.requires_grad]
    if len(several) > 1:
        return torch.cat([tensor.float() for tensor in several], dim=1)
    values = (main_tensor(output), *tensors_in(output))
    return next(
        (value for value in values if isinstance(value, Tensor) and value.requires_grad and value.numel()), None
    )


def score_of(output: Any, scored: Tensor, classes: int | None) -> Tensor:
    """Return the largest value of the output, a classifier's best logit; for a map, the sum of its cells' largest.

    For features, when there are no ``classes``, a mixture of all. The caller's own target is not used: it may have been
    written for one batch.
    """
    if classes is None or len(rivals(output)) > 1:
        return mixture(scored)
    return scored.max(1).values.sum() if scored.dim() > 1 else scored.max()


def mixture(features: Tensor) -> Tensor:
    """Return a fixed random projection of features."""
    directions = torch.arange(1, features.numel() + 1, device=features.device, dtype=torch.float32).mul(12.9898)
    return (features.float().flatten() * directions.sin()).sum()


def _head_input(trace: Trace, tensors: Mapping[int, Tensor]) -> Tensor | None:
    """Return a fixed random projection of the input of the last layer with weights."""
    names = {call.name for call in trace.calls}
    for call in reversed(trace.calls):
        argument = next((tensors[number] for number in call.arguments if tensors[number].is_floating_point()), None)
        has_parts = any(name.startswith(f"{call.name}.") for name in names) or not call.name
        if argument is not None and call.weighted and not has_parts:
            return mixture(argument) if argument.requires_grad else None
    return None
