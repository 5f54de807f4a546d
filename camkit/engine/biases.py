"""What each operation of a pass adds to a network that is otherwise linear around one input: its bias.

Around an input x, an operation is y = J x + b. Convolutions, linear layers and additions of constants have the bias b
that they add; a batch norm in evaluation mode has the bias that its mean, variance, weight and bias give together. An
activation function has the implicit bias f(x) - f'(x) x (Srinivas and Fleuret 2019, section 3.1), which is zero for
ReLU; the product of two feature maps has -x y. The gradients times all biases, and the gradient times the input, add up
to the score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Note: TypeAlias = Callable[[Tensor, Tensor], None]
"""``note(output, bias)``: the bias broadcasts against the output."""

Bias: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], "Tensor | None"]
"""``bias(function, arguments, named arguments)`` returns what an operation adds; None if that is nothing."""


class NotedBiases(TorchFunctionMode):
    """Calls ``note`` with the output and the bias of each operation in the block that has a bias.

    It acts in the current thread only, and changes nothing in the model.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note its bias."""
        named = kwargs or {}
        find = _BIASES.get(func)
        bias = None if find is None or not torch.is_grad_enabled() else find(func, args, named)
        output = func(*args, **named)
        if bias is not None and isinstance(output, Tensor) and output.requires_grad:
            self._note(output, bias)
        return output


def _of_channels(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """Return the bias of a convolution: (C,), for the second axis of the output."""
    bias = args[2] if len(args) > 2 else named.get("bias")
    weight = args[1] if len(args) > 1 else named["weight"]
    result: Tensor | None = None if bias is None else bias.detach().reshape(-1, *[1] * (weight.dim() - 2))
    return result


def _of_features(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """Return the bias of a linear layer, for the last axis of the output."""
    bias = args[2] if len(args) > 2 else named.get("bias")
    result: Tensor | None = None if bias is None else bias.detach()
    return result


def _at_zero(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Return what a batch norm gives for zeros."""
    maps = args[0] if args else named["input"]
    zeros = maps.new_zeros(1, maps.shape[1], *[1] * (maps.dim() - 2))
    with torch.no_grad():
        result: Tensor = function(zeros, *args[1:], **{name: value for name, value in named.items() if name != "input"})
    return result


def _of_sum(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """Return the constant that is added to a feature map, or from which it is subtracted."""
    moving = [isinstance(value, Tensor) and _moves(value) for value in args[:2]]
    if len(moving) < 2 or all(moving) or not any(moving):
        return None
    with torch.no_grad():
        still = [torch.zeros_like(value) if moves else value for value, moves in zip(args[:2], moving, strict=True)]
        result: Tensor = function(*still, *args[2:], **{name: value for name, value in named.items() if name != "out"})
    return result


def _of_product(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> Tensor | None:
    """Return -x y for the product of two feature maps; the product with a constant has no bias."""
    if len(args) < 2 or not all(isinstance(value, Tensor) and _moves(value) for value in args[:2]):
        return None
    product: Tensor = args[0].detach() * args[1].detach()
    return -product


def _moves(value: Tensor) -> bool:
    """Tell whether a tensor depends on the input: it has a gradient and is no parameter."""
    return value.requires_grad and not isinstance(value, nn.Parameter)


def _of_activation(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Return f(x) - f'(x) x."""
    maps = args[0] if args else named["input"]
    rest = {name: value for name, value in named.items() if name != "input"}
    with torch.enable_grad():
        leaf = maps.detach().clone().requires_grad_()
        values = function(leaf.clone(), *args[1:], **rest)
        (slope,) = torch.autograd.grad(values.sum(), leaf)
    result: Tensor = values.detach() - slope * leaf.detach()
    return result


_CONVOLUTIONS = (
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
)
_ACTIVATIONS = (
    *(functional.hardtanh, functional.relu6, functional.hardswish, functional.hardsigmoid, functional.silu),
    *(functional.gelu, functional.mish, functional.elu, functional.celu, functional.selu, functional.softplus),
    *(functional.logsigmoid, functional.softsign, functional.tanhshrink),
    *(functional.sigmoid, torch.sigmoid, Tensor.sigmoid, Tensor.sigmoid_),
    *(functional.tanh, torch.tanh, Tensor.tanh, Tensor.tanh_),
    *(torch.clamp, Tensor.clamp, Tensor.clamp_, torch.exp, Tensor.exp, torch.square, Tensor.square),
)
_SUMS = (
    *(torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__),
    *(torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__rsub__, Tensor.__isub__),
)
_PRODUCTS = (torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__)

_BIASES: Mapping[Any, Bias] = {
    **dict.fromkeys(_CONVOLUTIONS, _of_channels),
    functional.linear: _of_features,
    functional.batch_norm: _at_zero,
    **dict.fromkeys(_ACTIVATIONS, _of_activation),
    **dict.fromkeys(_SUMS, _of_sum),
    **dict.fromkeys(_PRODUCTS, _of_product),
}
"""The bias of each operation. ReLU, leaky ReLU, pooling and resizing have none: around an input, they are linear."""
