"""Run and differentiate a model once, keeping only statistics of every layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.attach import backward_pass, contiguous_gradients
from camkit.engine.guard import same_requirements
from camkit.engine.interrupts import interruptible, undisturbed
from camkit.engine.passes import quiet_pass
from camkit.inspect.layer_statistics import LayerCall, LayerPass, LayerStatistics
from camkit.inspect.tensor_statistics import TensorStatistics, norm, plain, statistics
from camkit.layers.names import modules_by_name
from camkit.types import Precision

NamedLoss: TypeAlias = Callable[[Any], "tuple[Tensor | None, str]"]
"""A function from a model's output to the number to differentiate, or None if the output has no gradient, and the
number's name."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What one pass measured.

    Attributes:
        rows: a row for each call of each layer, in the order in which they ended.
        loss: the number that was differentiated; None if it could not be.
        loss_name: what that number is.
        given: for "nan" and "infinity", the names of the layers whose input holds them; "" is the model itself.
        zero_weights: the layers whose weights are all zero, so that no gradient passes them.
        backwards: the layers whose gradients hold NaN or infinity, in the order of the backward pass.
        unnormalised: whether a batch normalisation has seen so few batches that it changes its input very little.
    """

    rows: Sequence[LayerStatistics]
    loss: float | None
    loss_name: str
    given: Mapping[str, frozenset[str]]
    zero_weights: tuple[str, ...]
    backwards: tuple[str, ...]
    unnormalised: bool


def measure(
    model: nn.Module,
    inputs: Float[Tensor, "n c *size"],
    score: NamedLoss,
    *,
    training: bool = False,
    precision: Precision = "fp32",
) -> Measured:
    """Run the model on a batch, differentiate its score, and measure every layer's output and gradient.

    Args:
        model: left exactly as it was found: flags, buffers, gradients and random generators.
        inputs: a batch on the model's device.
        score: the function from the model's output to the number to differentiate.
        training: whether the model runs in training mode.
        precision: the precision of the pass.
    """
    layers = LayerPass(model, _every_module, _of_tensor, closely=True)
    with (
        undisturbed(),
        same_requirements(model),
        quiet_pass(model, inputs.device, precision),
        _training(model) if training else nullcontext(),
        torch.enable_grad(),
        layers.hooked(),
        interruptible(),
    ):
        leaf = inputs.detach().clone().requires_grad_()
        loss, loss_name = score(model(leaf.clone()))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norms = _differentiate(loss, leaf, trained)
    calls = layers.calls
    return Measured(
        tuple(_rows(calls, set(trained), norms)),
        None if loss is None or not loss.requires_grad else float(loss.detach()),
        loss_name,
        {flaw: frozenset(name for name, call in calls.items() if flaw in call.flaws) for flaw in ("nan", "infinity")},
        tuple(name for name, module in modules_by_name(model).items() if _is_zero(module)),
        tuple(dict.fromkeys(layers.broken)),
        not training and any(map(_is_unsettled, model.modules())),
    )


def _every_module(name: str, module: nn.Module) -> bool:  # noqa: ARG001 - "*" would leave out the model itself
    return True


def _of_tensor(tensor: Tensor) -> TensorStatistics:
    return statistics(tensor, magnitudes=backward_pass() >= 0)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Set the model to training; give it copies of its buffers to write into, and put its own back."""
    own = [(module._buffers, module._buffers.copy()) for module in model.modules()]
    copies: dict[int, Tensor] = {}
    try:
        for buffers, before in own:
            for name, buffer in before.items():
                if buffer is not None:
                    buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        model.train()
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


def _rows(
    calls: Mapping[str, LayerCall], trained: set[nn.Parameter], norms: Mapping[nn.Parameter, float]
) -> Iterator[LayerStatistics]:
    """Yield the rows; a layer that returns its input, or what its last inner layer returned, has none."""
    last = None
    for name, call in calls.items():
        numbers = call.outputs.get(0)
        if numbers is None or numbers is last or isinstance(call.module, (nn.Identity, nn.Flatten, nn.Unflatten)):
            continue
        last, own = numbers, list(call.module.parameters(recurse=False))
        of_own = [norms[parameter] for parameter in own if parameter in norms]
        yield LayerStatistics(
            name,
            type(call.module).__name__,
            call.shape,
            sum(parameter.numel() for parameter in own),
            sum(parameter.numel() for parameter in own if parameter in trained),
            numbers,
            call.gradients.get(0),
            math.hypot(*of_own) if of_own else None,
            call.channels,
            call.dead,
            call.off,
            call.saturated,
            all(bool(parameter.detach().isfinite().all()) for parameter in own),
        )


def _is_zero(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.numel() > 0 and not bool(weight.detach().any())


def _is_unsettled(module: nn.Module) -> bool:
    """Return whether a batch normalisation still holds much of its initial statistics.

    Each batch leaves 1 - momentum of them, so no variance can fall below what is left of the initial 1. If one does,
    the statistics come from elsewhere: some checkpoints restart the count of batches, or the momentum was changed.
    """
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    mean, variance, count = module.running_mean, module.running_var, module.num_batches_tracked
    if mean is None or variance is None:
        return False
    if not bool(mean.any()) and bool(variance.eq(1).all()):
        return True
    batches = 0 if count is None else int(count)
    left = 0.0 if module.momentum is None else (1 - module.momentum) ** batches
    return 0 < batches < _MANY_BATCHES and left > _MUCH and float(variance.min()) > 0.99 * left


_MANY_BATCHES = 1000
"""If much is left after this many batches, the momentum is too small to be that of the training; it was set later."""

_MUCH = 0.05
"""The share of the initial statistics from which they distort the result: 28 batches with a momentum of 0.1."""
