"""The pass: a model is run and differentiated once, and of every layer only statistics are kept."""

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

from camkit.diagnosis.measuring import CURVES, RELUS, Measures, both_peaks, flaws, share_for
from camkit.diagnosis.statistics import norm, plain
from camkit.engine.attach import ordinary_gradients
from camkit.engine.nested import tensors_in
from camkit.engine.passes import quiet_pass
from camkit.engine.restore import same_requirements
from camkit.hooks import Recording, edit, record
from camkit.layers.names import modules_by_name
from camkit.types import Precision

Score: TypeAlias = Callable[[Any], "Tensor | None"]
"""From a model's output to the one number that is differentiated; None where the output has no gradient."""


@dataclass(frozen=True, eq=False)
class Watched:
    """What one pass showed, layer by layer, as recordings of what was measured.

    ``trained`` are the parameters that required gradients, ``parameters`` the norms of those; ``loss`` what was
    differentiated, None where nothing could be; ``training`` the mode. ``cut_off`` has the numbers of those runs of
    layers of the model's own code that returned what a function like ReLU had made.
    """

    measures: Measures
    outputs: Recording
    given: Recording
    before_relus: Recording | None
    after_curves: tuple[Recording, ...]
    loss: float | None
    training: bool
    trained: frozenset[nn.Parameter]
    parameters: dict[nn.Parameter, float]
    cut_off: dict[str, list[int]]


def watch(
    model: nn.Module,
    inputs: Float[Tensor, "n c *size"],
    score: Score,
    *,
    training: bool = False,
    precision: Precision = "fp32",
) -> Watched:
    """Run the model on a batch and differentiate its score, measuring what every layer returns and its gradient.

    Args:
        model: left exactly as it was found: flags, buffers, gradients and random generators.
        inputs: on the model's device.
        score: of the model's output.
        training: whether to put the model into training mode for the pass.
        precision: of the pass.
    """
    measures = Measures()
    with _stage(model, inputs, precision, training=training), ExitStack() as stack:
        given = stack.enter_context(record(model, _every, inputs=True, outputs=False, reduce=flaws))
        relus = _kinds(model, RELUS)
        before = [record(model, relus, inputs=True, outputs=False, reduce=both_peaks)] if relus else []
        after = [record(model, kind, reduce=share_for(kind)) for kind in CURVES if _kinds(model, (kind,))]
        before_relus = [stack.enter_context(one) for one in before]
        after_curves = [stack.enter_context(one) for one in after]
        outputs = stack.enter_context(record(model, _every, gradients=True, reduce=measures))
        cut_off = stack.enter_context(_cut_off(model))
        leaf = inputs.detach().clone().requires_grad_()
        loss = score(model(leaf.clone()))
        trained = [one for one in model.parameters() if one.requires_grad]
        parameters = _differentiate(loss, leaf, trained)
        measures.last = None
    value = None if loss is None or not loss.requires_grad else float(loss.detach())
    befores, afters = next(iter(before_relus), None), tuple(after_curves)
    return Watched(measures, outputs, given, befores, afters, value, training, frozenset(trained), parameters, cut_off)


def _every(name: str, module: nn.Module) -> bool:  # noqa: ARG001 - "*" is every layer but the model itself
    return True


@contextmanager
def _cut_off(model: nn.Module) -> Iterator[dict[str, list[int]]]:
    """Note which runs of the model's own code end with a function like ReLU that isn't a module."""
    own = [
        name
        for name, module in modules_by_name(model).items()
        if name and not type(module).__module__.startswith("torch.nn.")
    ]
    runs: Counter[str] = Counter()
    found: defaultdict[str, list[int]] = defaultdict(list)

    def note(name: str, output: Any) -> Any:
        runs[name] += 1
        if any(_is_cut_off(tensor) for tensor in tensors_in(output)):
            found[name].append(runs[name])
        return output

    with edit(model, {name: partial(note, name) for name in own}):
        yield found


def _is_cut_off(tensor: Tensor) -> bool:
    """Tell whether a tensor is what a function like ReLU made, as it was or after what keeps its channels apart."""
    function = tensor.grad_fn
    while function is not None and not function.name().startswith(_CUTTING):
        given = [one for one, _ in function.next_functions if one is not None]
        function = given[0] if len(given) == 1 and function.name().startswith(_PASSING) else None
    return function is not None


_CUTTING = ("Relu", "Threshold", "Hardtanh", "Hardswish", "Clamp", "Maximum", "Where")
"""How PyTorch's names of functions begin that return zero for all that is small enough."""

_PASSING = (
    "NativeDropout", "Mul", "Div", "MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "Mean", "View", "Unsafe",
    "Reshape", "Permute", "Transpose", "Squeeze", "Unsqueeze", "AsStrided", "Clone", "ToCopy",
)  # fmt: skip
"""Likewise of those that leave a channel of zeros one; of one tensor alone, so that no parameter can have scaled it."""


def _kinds(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kinds)]


@contextmanager
def _stage(model: nn.Module, inputs: Tensor, precision: Precision, *, training: bool) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(same_requirements(model))
        stack.enter_context(quiet_pass(model, inputs.device, precision))
        if training:
            _lend_buffers(model)
            model.train()
        stack.enter_context(torch.enable_grad())
        if len(inputs) == 1 and inputs.device.type == "cpu":
            stack.enter_context(ordinary_gradients(model))
        yield


def _lend_buffers(model: nn.Module) -> None:
    """Give the model copies of its buffers to write into; those it has are put back with everything else."""
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())


def _differentiate(loss: Tensor | None, leaf: Tensor, parameters: list[nn.Parameter]) -> dict[nn.Parameter, float]:
    """Run the backward pass without any ``.grad``, and return the norm of each parameter's gradient."""
    if loss is None or not loss.requires_grad:
        return {}
    _, *found = torch.autograd.grad(loss, [leaf, *parameters], allow_unused=True)
    return {
        parameter: norm(plain(gradient))
        for parameter, gradient in zip(parameters, found, strict=True)
        if gradient is not None
    }
