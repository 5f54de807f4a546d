"""What each operation of a pass adds to a network that is otherwise linear around one input: its bias.

Around an input x, an operation is y = J x + b. Convolutions, linear layers and additions of constants have the bias b
that they add; a batch norm in evaluation mode has the bias that its mean, variance, weight and bias give together. An
activation function has the implicit bias f(x) - f'(x) x (Srinivas and Fleuret 2019, section 3.1), which is zero for
ReLU; the product of two feature maps has -x y. The gradients times all biases, and the gradient times the input, add up
to the score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Note: TypeAlias = Callable[[Tensor, Tensor], None]
"""``note(output, bias)``: the bias broadcasts against the output."""


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of one of PyTorch's functions.

    ``moves(value)`` tells whether an argument depends on the network's input, and is neither a weight nor computed from
    weights alone.
    """

    function: Any
    args: tuple[Any, ...]
    named: dict[str, Any]
    moves: Callable[[Any], bool]

    def with_zeros(self, count: int) -> Tensor:
        """Return the result with zeros for those of the first arguments that depend on the input."""
        first = [torch.zeros_like(value) if self.moves(value) else _copied(value) for value in self.args[:count]]
        named = {name: value for name, value in self.named.items() if name != "out"}
        with torch.no_grad():
            result: Tensor = self.function(*first, *self.args[count:], **named)
        return result


def is_spectral(tensor: Tensor, others: set[Node | None]) -> bool:
    """Tell whether a tensor is computed from a Fourier transform without the inverse transform.

    ``others`` holds operations that are known not to be; this call adds those that it visits.
    """
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in others:
            continue
        others.add(node)
        name = node.name()
        if name.startswith("FftR2C") or (name.startswith("FftC2C") and node._saved_forward):
            return True
        if not name.startswith("Fft"):
            waiting += (before for before, _ in node.next_functions)
    return False


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, since the function may work in place."""
    return value.detach().clone() if isinstance(value, Tensor) else value


Bias: TypeAlias = Callable[[_Call], "Tensor | None"]
"""``bias(call)`` returns what an operation adds; None if that is nothing."""


class NotedBiases(TorchFunctionMode):
    """Calls ``note`` with the output and the bias of each operation in the block that has a bias.

    It acts in the current thread only, and changes nothing in the model.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note
        self._moving: set[Node] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note its bias."""
        named = kwargs or {}
        find = _BIASES.get(func)
        bias = None if find is None or not torch.is_grad_enabled() else find(_Call(func, args, named, self._moves))
        output = func(*args, **named)
        if bias is not None and self._moves(output):
            self._note(output, bias)
        return output

    def _moves(self, value: Any) -> bool:
        """Tell whether a value is a tensor that depends on the input."""
        if not isinstance(value, Tensor) or not value.requires_grad or isinstance(value, nn.Parameter):
            return False
        if value.grad_fn is None:  # the input itself
            return True
        waiting, seen = [value.grad_fn], {value.grad_fn}
        while waiting:
            node: Any = waiting.pop()
            if node in self._moving or (hasattr(node, "variable") and not isinstance(node.variable, nn.Parameter)):
                self._moving.add(value.grad_fn)
                return True
            new = {before for before, _ in node.next_functions if before is not None} - seen
            seen |= new
            waiting += new
        return False


def _of_channels(call: _Call) -> Tensor | None:
    """Return the bias of a convolution: (C,), for the second axis of the output."""
    args, named = call.args, call.named
    bias = args[2] if len(args) > 2 else named.get("bias")
    weight = args[1] if len(args) > 1 else named["weight"]
    result: Tensor | None = None if bias is None else bias.detach().reshape(-1, *[1] * (weight.dim() - 2))
    return result


def _of_features(call: _Call) -> Tensor | None:
    """Return the bias of a linear layer, for the last axis of the output."""
    bias = call.args[2] if len(call.args) > 2 else call.named.get("bias")
    result: Tensor | None = None if bias is None else bias.detach()
    return result


def _at_zero(call: _Call) -> Tensor:
    """Return what a batch norm gives for zeros."""
    maps = call.args[0] if call.args else call.named["input"]
    zeros = maps.new_zeros(1, maps.shape[1], *[1] * (maps.dim() - 2))
    rest = {name: value for name, value in call.named.items() if name != "input"}
    with torch.no_grad():
        result: Tensor = call.function(zeros, *call.args[1:], **rest)
    return result


def _of_sum(call: _Call) -> Tensor | None:
    """Return the constant that is added to a feature map, or from which it is subtracted."""
    moving = list(map(call.moves, call.args[:2]))
    return call.with_zeros(2) if len(moving) == 2 and any(moving) and not all(moving) else None


def _of_sum_with_product(call: _Call) -> Tensor | None:
    """Return the constant b in b + x W or b + W x; the product of two feature maps is not linear."""
    moving = list(map(call.moves, call.args[:3]))
    return call.with_zeros(3) if len(moving) == 3 and any(moving) and not all(moving[1:]) else None


def _of_product(call: _Call) -> Tensor | None:
    """Return -x y for the product of two feature maps; the product with a constant has no bias."""
    factors = call.args[:2]
    if len(factors) < 2 or not all(map(call.moves, factors)):
        return None
    product: Tensor = factors[0].detach() * factors[1].detach()
    return -product


def _of_activation(call: _Call) -> Tensor | None:
    """Return f(x) - f'(x) x; None for complex maps, which have no such derivative."""
    maps = call.args[0] if call.args else call.named["input"]
    if maps.is_complex():
        return None
    rest = {name: value for name, value in call.named.items() if name != "input"}
    with torch.enable_grad():
        leaf = maps.detach().clone().requires_grad_()
        values = call.function(leaf.clone(), *call.args[1:], **rest)
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
_SUMS_WITH_PRODUCTS = (
    *(torch.addmm, Tensor.addmm, Tensor.addmm_),
    *(torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_),
)
_PRODUCTS = (torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__)

_BIASES: Mapping[Any, Bias] = {
    **dict.fromkeys(_CONVOLUTIONS, _of_channels),
    functional.linear: _of_features,
    functional.batch_norm: _at_zero,
    **dict.fromkeys(_ACTIVATIONS, _of_activation),
    **dict.fromkeys(_SUMS, _of_sum),
    **dict.fromkeys(_SUMS_WITH_PRODUCTS, _of_sum_with_product),
    **dict.fromkeys(_PRODUCTS, _of_product),
}
"""The bias of each operation. ReLU, leaky ReLU, pooling and resizing have none: around an input, they are linear."""
