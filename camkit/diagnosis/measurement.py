"""Run and differentiate a model once, keeping only statistics of every layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.diagnosis.reductions import CURVES, RELUS, Summaries, both_peaks, flaws, share_for
from camkit.diagnosis.tensor_statistics import norm, plain
from camkit.engine.attach import Scope, contiguous_gradients, hooked
from camkit.engine.guard import same_requirements
from camkit.engine.interrupts import interruptible, undisturbed
from camkit.engine.nested import tensors_in
from camkit.engine.passes import quiet_pass
from camkit.hooks import Recording, record
from camkit.layers.names import first_name_by_module, modules_by_name
from camkit.types import Precision

NamedLoss: TypeAlias = Callable[[Any], "tuple[Tensor | None, str]"]
"""A function from a model's output to the number to differentiate, or None if the output has no gradient, and the
number's name."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """What one pass measured, layer by layer.

    Attributes:
        summaries: what is kept of each tensor.
        outputs: the layers' outputs and gradients, with a mark in place of each tensor.
        inputs: whether each layer's inputs hold NaN or infinity.
        before_relus: the peaks of what ReLUs took; None if the model has none.
        after_curves: the share of flat values after sigmoids and tanhs.
        loss: the number that was differentiated; None if it could not be.
        loss_name: what that number is.
        training: whether the model was in training mode.
        trainable: the parameters that required gradients.
        gradient_norms: the norm of the gradient of each of them.
        relu_calls: of layers whose own code ends with a function like ReLU, the numbers of the calls that did.
    """

    summaries: Summaries
    outputs: Recording
    inputs: Recording
    before_relus: Recording | None
    after_curves: tuple[Recording, ...]
    loss: float | None
    loss_name: str
    training: bool
    trainable: frozenset[nn.Parameter]
    gradient_norms: dict[nn.Parameter, float]
    relu_calls: dict[str, list[int]]


def measure(
    model: nn.Module,
    inputs: Float[Tensor, "n c *size"],
    score: NamedLoss,
    *,
    training: bool = False,
    precision: Precision = "fp32",
) -> Measurement:
    """Run the model on a batch, differentiate its score, and measure every layer's output and gradient.

    Args:
        model: left exactly as it was found: flags, buffers, gradients and random generators.
        inputs: a batch on the model's device.
        score: the function from the model's output to the number to differentiate.
        training: whether the model runs in training mode.
        precision: the precision of the pass.
    """
    summaries = Summaries()
    with _prepared(model, inputs, precision, training=training), ExitStack() as stack:
        layer_inputs = stack.enter_context(record(model, _every_module, inputs=True, outputs=False, reduce=flaws))
        relus = _modules_of(model, RELUS)
        before_relus = None
        if relus:
            before_relus = stack.enter_context(record(model, relus, inputs=True, outputs=False, reduce=both_peaks))
        after_curves = tuple(
            stack.enter_context(record(model, kind, reduce=share_for(kind)))
            for kind in CURVES
            if _modules_of(model, (kind,))
        )
        outputs = stack.enter_context(record(model, _every_module, gradients=True, reduce=summaries))
        relu_calls = stack.enter_context(_functional_relus(model))
        with interruptible():
            leaf = inputs.detach().clone().requires_grad_()
            loss, loss_name = score(model(leaf.clone()))
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
            gradient_norms = _differentiate(loss, leaf, trainable)
        summaries.last = None
    value = None if loss is None or not loss.requires_grad else float(loss.detach())
    return Measurement(
        summaries,
        outputs,
        layer_inputs,
        before_relus,
        after_curves,
        value,
        loss_name,
        training,
        frozenset(trainable),
        gradient_norms,
        relu_calls,
    )


def _every_module(name: str, module: nn.Module) -> bool:  # noqa: ARG001 - "*" would leave out the model itself
    return True


@contextmanager
def _functional_relus(model: nn.Module) -> Iterator[dict[str, list[int]]]:
    """Note which calls of the model's own code end with a function like ReLU that is not a module."""
    calls = _ReluCalls()
    names = first_name_by_module(modules_by_name(model))
    hooks = [
        (module, partial(calls.note, name))
        for module, name in names.items()
        if name and not type(module).__module__.startswith("torch.nn.")
    ]
    with hooked(after=hooks, acts=Scope().first_run):
        yield calls.ending_in_relu


class _ReluCalls:
    """Counts the calls of layers, and keeps the numbers of those that end with a function like ReLU."""

    def __init__(self) -> None:
        self.ending_in_relu: defaultdict[str, list[int]] = defaultdict(list)
        self._counts: Counter[str] = Counter()

    def note(self, name: str, _: nn.Module, __: tuple[Any, ...], ___: dict[str, Any], output: Any) -> None:
        """Count a call of a layer."""
        self._counts[name] += 1
        if any(_comes_from_relu(tensor) for tensor in tensors_in(output)):
            self.ending_in_relu[name].append(self._counts[name])


def _comes_from_relu(tensor: Tensor) -> bool:
    """Return whether a function like ReLU made the tensor, possibly followed by steps that keep its channels apart."""
    function = tensor.grad_fn
    while function is not None and not function.name().startswith(_RELU_LIKE):
        inputs = [node for node, _ in function.next_functions if node is not None]
        function = inputs[0] if len(inputs) == 1 and function.name().startswith(_KEEP_CHANNELS) else None
    return function is not None


_RELU_LIKE = ("Relu", "Threshold", "Hardtanh", "Hardswish", "Clamp", "Maximum", "Where")
"""How PyTorch names the gradients of functions that return zero for every small enough value (prefixes)."""

_KEEP_CHANNELS = (
    "NativeDropout", "Mul", "Div", "MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "Mean", "View", "Unsafe",
    "Reshape", "Permute", "Transpose", "Squeeze", "Unsqueeze", "AsStrided", "Clone", "ToCopy", "Alias",
)  # fmt: skip
"""Likewise for functions that leave a channel of zeros as it is. Only those with one input tensor count: with two, a
parameter may have scaled it."""


def _modules_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kinds)]


@contextmanager
def _prepared(model: nn.Module, inputs: Tensor, precision: Precision, *, training: bool) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(undisturbed())
        stack.enter_context(same_requirements(model))
        stack.enter_context(quiet_pass(model, inputs.device, precision))
        if training:
            stack.enter_context(_copied_buffers(model))
            model.train()
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def _copied_buffers(model: nn.Module) -> Iterator[None]:
    """Give the model copies of its buffers to write into, and put its own back."""
    own = [(module._buffers, module._buffers.copy()) for module in model.modules()]
    copies: dict[int, Tensor] = {}
    try:
        for buffers, before in own:
            for name, buffer in before.items():
                if buffer is not None:
                    buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        for buffers, before in own:
            buffers.update(before)


def _differentiate(loss: Tensor | None, leaf: Tensor, parameters: list[nn.Parameter]) -> dict[nn.Parameter, float]:
    """Run the backward pass without touching any ``.grad``, and return the norm of each parameter's gradient."""
    if loss is None or not loss.requires_grad:
        return {}
    if len(leaf) == 1 and leaf.device.type == "cpu":
        contiguous_gradients(loss)
    _, *gradients = torch.autograd.grad(loss, [leaf, *parameters], allow_unused=True)
    return {
        parameter: norm(plain(gradient))
        for parameter, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None
    }
