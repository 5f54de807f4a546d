"""What happens in each layer while a model runs: each call is measured when it ends, and no tensor is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from camkit.engine.nested import tensors_in
from camkit.explaining.explanation import finite_or_none
from camkit.hooks.recording import NumberedCalls
from camkit.inspect.tensor_statistics import TensorStatistics, flat_share, off_channels, peaks, plain, silent_channels
from camkit.layers.names import THE_MODEL, Layers, modules_by_name

_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding)
_CHANNELS_SECOND = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)

RELUS = (nn.ReLU, nn.ReLU6, nn.Hardswish)
"""Functions that are zero, with slope zero, for every small enough value."""

_CURVES: dict[type[nn.Module], tuple[float, float]] = {nn.Sigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0)}
"""Functions that are flat at both ends, with their values there."""

_RELU_LIKE = ("Relu", "Threshold", "Hardtanh", "Hardswish", "Clamp", "Maximum", "Where")
"""How PyTorch names the gradients of functions that return zero for every small enough value (prefixes)."""

_KEEP_CHANNELS = (
    "NativeDropout", "Mul", "Div", "MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "Mean", "View", "Unsafe",
    "Reshape", "Permute", "Transpose", "Squeeze", "Unsqueeze", "AsStrided", "Clone", "ToCopy", "Alias",
)  # fmt: skip
"""Likewise for functions that leave a channel of zeros as it is. Only those with one input tensor count: with two, a
parameter may have scaled it."""

_OF_TENSORS = ("nan", "inf", "mean", "std", "low", "high", "zeros", "norm")

Measure: TypeAlias = Callable[[Tensor], TensorStatistics | None]
"""Returns the statistics of a tensor, or None to leave it out."""


@dataclass(frozen=True)
class LayerStatistics:
    """One call of one layer.

    Attributes:
        layer: its name, with the number of the call if it ran several times (``"relu#2"``); "" is the model itself.
        kind: the name of its type.
        shape: the shape of its output, including the axis of pictures.
        parameters, trained: how many numbers its own parameters hold, and how many of these require gradients. The
            parameters of inner layers are counted in their own rows.
        activations: statistics of its output.
        gradients: statistics of the loss's gradient with respect to its output; None if there is no gradient.
        parameter_gradient: the norm of the loss's gradient with respect to its own parameters; None if there is none.
        channels: the number of channels of the output; 0 if it has no channel axis.
        dead: after a ReLU or a similar function, the channels that are zero in every cell of every picture; None for
            other layers.
        off: the dead channels that are so far below zero that they are unlikely ever to become active.
        saturated: after a sigmoid or tanh, the share of values at which its slope is below 1 % of its largest; None
            for other layers.
        sound: whether its own parameters hold neither NaN nor infinity.
    """

    layer: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    trained: int
    activations: TensorStatistics
    gradients: TensorStatistics | None = None
    parameter_gradient: float | None = None
    channels: int = 0
    dead: tuple[int, ...] | None = None
    off: tuple[int, ...] = ()
    saturated: float | None = None
    sound: bool = True

    @property
    def name(self) -> str:
        """The layer's name as printed."""
        return self.layer or THE_MODEL

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            **vars(self),
            "shape": list(self.shape),
            "activations": self.activations.to_dict(),
            "gradients": None if self.gradients is None else self.gradients.to_dict(),
            "parameter_gradient": finite_or_none(self.parameter_gradient),
            "dead": None if self.dead is None else list(self.dead),
            "off": list(self.off),
        }

    def to_row(self) -> dict[str, Any]:
        """Return the row of a table: ``to_dict`` without histograms, and with numbers of channels."""
        row = self.to_dict()
        gradients = row["gradients"] or {}
        return {
            **row,
            "activations": {name: row["activations"][name] for name in _OF_TENSORS},
            "gradients": {name: gradients.get(name) for name in _OF_TENSORS},
            "dead": None if self.dead is None else len(self.dead),
            "off": len(self.off),
        }


class LayerCall:
    """One call of one layer while it is measured.

    ``outputs`` and ``gradients`` are the statistics of the floating-point tensors that it returned, by their numbers,
    and of their gradients in the last backward pass. ``flaws`` names what its input held: "nan", "infinity". All else
    is said of the first of these tensors, as in ``LayerStatistics``.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module, self.number = name, module, 0
        self.flaws: set[str] = set()
        self.peaks: Tensor | None = None
        self.outputs: dict[int, TensorStatistics] = {}
        self.gradients: dict[int, TensorStatistics] = {}
        self.shape: tuple[int, ...] = ()
        self.channels = 0
        self.dead: tuple[int, ...] | None = None
        self.off: tuple[int, ...] = ()
        self.saturated: float | None = None

    def note_inputs(self, tensors: list[Tensor], axis: int) -> None:
        """Note whether what the layer takes is finite, and how far below zero a ReLU's channels lie."""
        for tensor in tensors:
            if not bool(tensor.isfinite().all()):
                self.flaws |= {"nan"} if bool(tensor.isnan().any()) else set()
                self.flaws |= {"infinity"} if bool(tensor.isinf().any()) else set()
        if isinstance(self.module, RELUS) and tensors and tensors[0].dim() > 1 and tensors[0].numel():
            self.peaks = peaks(tensors[0], axis)

    def note_output(self, tensor: Tensor, axis: int) -> None:
        """Note what the first tensor shows beside its statistics."""
        self.shape = tuple(tensor.shape)
        self.channels = self.shape[axis] if len(self.shape) > 1 else 0
        own_code = bool(self.name) and not type(self.module).__module__.startswith("torch.nn.")
        if isinstance(self.module, RELUS) or (own_code and self.channels and _comes_from_relu(tensor)):
            self.dead = silent_channels(plain(tensor), axis) if self.channels and tensor.numel() else ()
            if self.dead and self.peaks is not None and bool(torch.isfinite(self.peaks).all()):
                self.off = off_channels(self.dead, self.peaks)


class LayerPass(NumberedCalls):
    """Measures each call of layers while a model runs, and the gradients of what they return.

    ``broken`` names the layers whose gradient held NaN or infinity, in the order of the backward passes.

    Args:
        model: the model.
        layers: the layers.
        measure: makes the statistics of a tensor.
        acts: tells whether calls are measured at present; None means always.
        closely: whether to look at what the layers take too, and at the flat ends of sigmoids and tanhs.
        follows: whether the channel axis of a layer is that of the layer that ran before it. If only some layers are
            measured, it is that of the layer before it in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        measure: Measure,
        acts: Callable[[], bool] | None = None,
        *,
        closely: bool = False,
        follows: bool = True,
    ) -> None:
        super().__init__(model, layers, gradients=True, acts=acts)
        self._measure, self._closely, self._follows = measure, closely, follows
        self._calls: list[LayerCall] = []
        self.broken: list[str] = []
        self._last: tuple[Tensor, int, TensorStatistics | None] | None = None
        self._axis, axis = 0, 1
        self._axes: dict[str, int] = {}
        for name, module in modules_by_name(model).items():
            self._axes[name] = axis = channel_axis(module, axis)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Measure in the block."""
        try:
            with self._hooked():
                yield
        finally:
            self._last = None

    @property
    def calls(self) -> dict[str, LayerCall]:
        """The calls in the order in which they ended, by the names of their layers; 'relu#2' is one of several."""
        return {self._key(call.name, call.number): call for call in self._calls}

    def clear(self) -> None:
        """Forget all calls, and number new ones from 1 again."""
        super().clear()
        self._calls.clear()

    def _begun(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> LayerCall:
        call = LayerCall(name, module)
        if self._closely:
            call.note_inputs([*filter(_has_fractions, tensors_in((arguments, keywords)))], self._axis_at(name))
        return call

    def _ended(self, name: str, module: nn.Module, begun: LayerCall | None, output: Any) -> None:
        call = begun or LayerCall(name, module)
        call.number = self._counts[name]
        self._calls.append(call)
        self._axis = channel_axis(module, self._axis) if self._follows else 0
        for tensor in filter(_has_fractions, tensors_in(output)):
            numbers = self._measured(tensor)
            if numbers is None:
                continue
            if not call.outputs:
                call.note_output(tensor, self._axis_at(name))
                if self._closely:
                    ends = next((ends for kind, ends in _CURVES.items() if isinstance(module, kind)), None)
                    call.saturated = None if ends is None else flat_share(tensor, *ends)
            number = len(call.outputs)
            call.outputs[number] = numbers
            if torch.is_grad_enabled() and tensor.requires_grad:
                self._tensor_hooks.add(tensor, partial(self._take_gradient, call, number))

    def _axis_at(self, name: str) -> int:
        return self._axis or self._axes[name]

    def _take_gradient(self, call: LayerCall, number: int, gradient: Tensor | None) -> None:
        # A custom function may return None for one of its inputs.
        numbers = None if gradient is None else self._measured(gradient)
        if numbers is not None:
            call.gradients[number] = numbers
            self.broken += [call.name] if number == 0 and (numbers.nan or numbers.inf) else []

    def _measured(self, tensor: Tensor) -> TensorStatistics | None:
        """Return a tensor's statistics, the same object if it comes twice in a row.

        That happens if a block returns what its last layer returned.
        """
        version = 0 if tensor.is_inference() else tensor._version  # an in-place change raises it
        if self._last is None or self._last[1] != version or not _is_same(self._last[0], tensor):
            self._last = tensor.detach(), version, self._measure(tensor.detach())
        return self._last[2]


def channel_axis(module: nn.Module, before: int) -> int:
    """Return the axis of the channels in a layer's output, given that of the layer before it."""
    return -1 if isinstance(module, _CHANNELS_LAST) else 1 if isinstance(module, _CHANNELS_SECOND) else before


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory, in whatever shape."""
    return (
        tensor.layout is other.layout is torch.strided
        and tensor.numel() == other.numel() > 0
        and tensor.dtype == other.dtype
        and tensor.device == other.device
        and tensor.data_ptr() == other.data_ptr() != 0
    )


def _comes_from_relu(tensor: Tensor) -> bool:
    """Return whether a function like ReLU made the tensor, possibly followed by steps that keep its channels apart."""
    function = tensor.grad_fn
    while function is not None and not function.name().startswith(_RELU_LIKE):
        inputs = [node for node, _ in function.next_functions if node is not None]
        function = inputs[0] if len(inputs) == 1 and function.name().startswith(_KEEP_CHANNELS) else None
    return function is not None
