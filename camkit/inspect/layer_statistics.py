"""What happens in each layer while a model runs: each call is measured when it ends, and no tensor is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import pstdev
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from camkit.engine.attach import backward_pass, contiguous_gradients, precise, tensors_in
from camkit.engine.guard import interruptible, same_requirements, undisturbed
from camkit.engine.passes import quiet_pass
from camkit.explaining.explanation import finite_or_none
from camkit.hooks import NumberedCalls
from camkit.layers.names import THE_MODEL, Layers, modules_by_name
from camkit.types import Precision

Flaw: TypeAlias = Literal["nan", "infinity"]

BINS = 40
"""Bins of a histogram of values."""

DECADES = (-40, 20)
"""The range of a histogram of gradient magnitudes, as decimal logarithms."""

PER_DECADE = 4
"""Bins of that histogram for each factor of ten."""


@dataclass(frozen=True)
class Histogram:
    """The number of values in each of several equally wide bins from ``low`` to ``high``; both ends are included.

    If ``low`` and ``high`` are equal, the bins are centred on that number. Both are NaN if there are no values.
    """

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def ends(self) -> tuple[float, float]:
        """Where the first bin begins and the last one ends; both are 0 if there are no values."""
        if math.isnan(self.low):
            return 0.0, 0.0
        half = max(abs(self.low), 1.0) / 2
        return (self.low, self.high) if self.low != self.high else (self.low - half, self.high + half)

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the bins, one more than there are bins."""
        low, high = self.ends
        step = (high - low) / len(self.counts)
        return (*(low + number * step for number in range(len(self.counts))), high)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        low, high = self.ends
        return {"low": low, "high": high, "counts": list(self.counts)}


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a tensor's numbers; all but the counts are of the finite numbers, and NaN if there are none.

    Attributes:
        count: how many numbers there are.
        nan, inf: how many are NaN, and how many infinite.
        mean, std: the mean and the standard deviation (divided by the count, not the count minus one).
        zeros: the share that is exactly zero, 0..1.
        norm: the square root of the sum of squares.
        histogram: the distribution from the smallest to the largest number, ``low`` and ``high``.
        magnitudes: the distribution of the decimal logarithms of the absolute values that are not zero; only for
            gradients. The first and the last bin also hold what lies beyond them.
    """

    count: int
    nan: int
    inf: int
    mean: float
    std: float
    zeros: float
    norm: float
    histogram: Histogram
    magnitudes: Histogram | None = None

    @property
    def low(self) -> float:
        """The smallest number."""
        return self.histogram.low

    @property
    def high(self) -> float:
        """The largest number."""
        return self.histogram.high

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; null if there is no finite number."""
        numbers = {
            name: finite_or_none(getattr(self, name)) for name in ("mean", "std", "low", "high", "zeros", "norm")
        }
        drawn = {"histogram": self.histogram, "magnitudes": self.magnitudes}
        histograms = {name: each.to_dict() for name, each in drawn.items() if each is not None}
        return {"count": self.count, "nan": self.nan, "inf": self.inf, **numbers, **histograms}


def plain(values: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return numbers in a form to compute with: dense, real, 32 or 64 bits, on a device that can sum 64 bits."""
    values = values.detach()
    values = values.to_dense() if values.layout != torch.strided else values
    values = values.abs() if values.is_complex() else values
    return precise(values.cpu() if values.device.type == "mps" else values)


def statistics(values: Shaped[Tensor, "*shape"], *, magnitudes: bool = False) -> TensorStatistics:
    """Return the statistics of a tensor's numbers, summed in 64 bits.

    Args:
        values: floating-point or complex numbers; for complex ones, the absolute values are used.
        magnitudes: whether to add a histogram of the logarithms of their sizes.

    >>> values = statistics(torch.tensor([0.0, 0.0, 3.0, 5.0]))
    >>> values.mean, values.low, values.high, values.zeros, values.histogram.counts[0]
    (2.0, 0.0, 5.0, 0.5, 2)
    """
    flat = plain(values).reshape(-1)
    count, nan, inf = flat.numel(), 0, 0
    total = _added(flat, torch.sum)
    if not math.isfinite(total):
        nan, inf = int(flat.isnan().sum()), int(flat.isinf().sum())
        flat = flat[flat.isfinite()]
        total = _added(flat, torch.sum)
    log_histogram = None
    if magnitudes:
        least, most = DECADES
        sizes = flat[flat != 0].abs().double().log10()
        log_histogram = histogram(sizes, float(least), float(most), (most - least) * PER_DECADE)
    finite = flat.numel() or math.nan  # no finite number has no mean either
    low, high = map(float, flat.aminmax()) if flat.numel() else (math.nan, math.nan)
    return TensorStatistics(
        count,
        nan,
        inf,
        mean=total / finite,
        std=norm(flat, total / finite) / math.sqrt(finite),
        zeros=(finite - _added(flat, lambda part: _squared(part.sign_()))) / finite,
        norm=norm(flat) if flat.numel() else math.nan,
        histogram=histogram(flat, low, high),
        magnitudes=log_histogram,
    )


def norm(values: Float[Tensor, "*shape"], centre: float = 0.0) -> float:
    """Return the Euclidean norm of the differences from a number.

    >>> norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    return math.sqrt(_added(values, lambda part: _squared(part.sub_(centre))))


def _added(values: Float[Tensor, "*shape"], of: Callable[[Tensor], Tensor]) -> float:
    """Apply a function to the values part by part and add up the results, in 64 bits."""
    return float(torch.stack([of(part) for part in _parts(values)]).sum())


def _parts(values: Float[Tensor, "*shape"]) -> Iterator[Float[Tensor, " n"]]:
    """Return the values part by part in 64 bits, each part in the same memory: use one before taking the next."""
    size = 1 << (17 if values.device.type == "cpu" else 22)  # on a CPU it fits into the cache: several times as fast
    space = torch.empty(min(size, values.numel()), dtype=torch.float64, device=values.device)
    return (space[: part.numel()].copy_(part) for part in values.reshape(-1).split(size))


def _squared(values: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    return torch.dot(values, values)


def histogram(values: Float[Tensor, " n"], low: float, high: float, bins: int = BINS) -> Histogram:
    """Sort numbers into equally wide bins; those beyond the ends go into the first and the last bin.

    >>> histogram(torch.tensor([0.0, 1.0, 1.0, 4.0]), 0.0, 4.0, bins=4).counts
    (1, 2, 0, 1)
    """
    begin, end = Histogram(low, high, ()).ends
    counts = torch.zeros(bins, dtype=torch.int64, device=values.device)
    for part in _parts(values):
        part.sub_(begin).mul_(bins).div_(end - begin).clamp_(0, bins - 1)  # this order is exact for whole numbers
        counts += torch.bincount(part.int(), minlength=bins)
    return Histogram(low, high, tuple(counts.tolist()))


def silent_channels(values: Shaped[Tensor, "n *rest"], axis: int) -> tuple[int, ...]:
    """Return the channels that are zero in every cell of every picture.

    >>> silent_channels(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]), axis=1)
    (0,)
    """
    return tuple((values == 0).movedim(axis, 0).flatten(1).all(1).nonzero().flatten().tolist())


def off_channels(dead: tuple[int, ...], before: Float[Tensor, "2 c"]) -> tuple[int, ...]:
    """Return the dead channels that are so far below zero that they are unlikely ever to become active.

    Args:
        dead: channels that are zero after the activation function, one or more.
        before: the largest value of each channel of the activation function's input, and its root mean square.
    """
    highest, size = before.tolist()
    alive = sorted(size[channel] for channel in range(len(size)) if channel not in set(dead))
    # From this many channels on, the median of their sizes is taken as the usual size
    if len(alive) >= max(8, len(dead)):
        usual = alive[len(alive) // 2]
    else:  # too few to say what is usual: take the largest of them, or the spread of the dead ones
        usual = max([*alive, pstdev(highest[channel] for channel in dead)])
    # A channel is switched off if it stays below zero by this many times the usual size of the other channels. If
    # values were normally distributed, that would happen to one channel in 30 million.
    return tuple(channel for channel in dead if len(size) > 1 and highest[channel] < -8.0 * usual)


def flat_share(values: Shaped[Tensor, "*shape"], low: float, high: float) -> float:
    """Return the share of values at which a sigmoid or tanh has less than 1 % of its largest slope.

    The slope of a function from ``low`` to ``high`` is proportional to (y - low) * (high - y).

    >>> round(flat_share(torch.tensor([-6.0, -1.0, 0.0, 9.0]).sigmoid(), 0.0, 1.0), 2)
    0.5
    """
    values = plain(values)
    slope = (values - low) * (high - values) * (4 / (high - low) ** 2)  # 1 where it is steepest
    return int((slope < 0.01).sum()) / max(values.numel(), 1)


RELUS = (nn.ReLU, nn.ReLU6, nn.Hardswish)
"""Functions that are zero, with slope zero, for every small enough value."""

FLAWS: dict[Flaw, str] = {"nan": "nan", "infinity": "inf"}
"""Each kind of number that is not finite, and its name in PyTorch and in ``TensorStatistics``."""


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
        row, names = self.to_dict(), ("nan", "inf", "mean", "std", "low", "high", "zeros", "norm")
        numbers = {kind: row[kind] or {} for kind in ("activations", "gradients")}
        return {
            **row,
            **{kind: {name: given.get(name) for name in names} for kind, given in numbers.items()},
            "dead": None if self.dead is None else len(self.dead),
            "off": len(self.off),
        }


class LayerCall:
    """One call of one layer while it is measured.

    Attributes:
        row: what the first floating-point tensor that it returned shows; None if it returned none.
        outputs: the statistics of all floating-point tensors that it returned, by their numbers among all tensors.
        gradients: those of their gradients in the last backward pass.
        flaws: what its input held: "nan", "infinity".
        peaks: the largest value of each channel of a ReLU's input, and its root mean square (2, C).
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module, self.number = name, module, 0
        self.row: LayerStatistics | None = None
        self.outputs: dict[int, TensorStatistics] = {}
        self.gradients: dict[int, TensorStatistics] = {}
        self.flaws: set[Flaw] = set()
        self.peaks: Tensor | None = None


class LayerPass(NumberedCalls):
    """Measures each call of layers while a model runs, and the gradients of what they return.

    ``broken`` names the layers whose gradient held NaN or infinity, in the order of the backward passes.

    Args:
        model: the model.
        layers: the layers.
        measure: makes the statistics of a tensor, or None to leave it out.
        acts: tells whether calls are measured at present; None means always.
        closely: whether to look at what the layers take too, and at the flat ends of sigmoids and tanhs.
        follows: whether the channel axis of a layer is that of the layer that ran before it. If only some layers are
            measured, it is that of the layer before it in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        measure: Callable[[Tensor], TensorStatistics | None],
        acts: Callable[[], bool] | None = None,
        *,
        closely: bool = False,
        follows: bool = True,
    ) -> None:
        super().__init__(model, layers, gradients=True, acts=acts)
        self._measure, self._closely, self._follows = measure, closely, follows
        self.broken: list[str] = []
        self._last: tuple[Tensor, int, TensorStatistics | None] = torch.empty(0), 0, None
        self._axis, axis = 0, 1
        self._axes: dict[str, int] = {}
        for name, module in modules_by_name(model).items():
            self._axes[name] = axis = channel_axis(module, axis)

    def _begun(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> LayerCall:
        call = LayerCall(name, module)
        tensors = [*filter(_has_fractions, tensors_in((arguments, keywords)))] if self._closely else []
        for tensor in tensors:
            if not bool(tensor.isfinite().all()):
                call.flaws |= {flaw for flaw, name in FLAWS.items() if bool(getattr(tensor, f"is{name}")().any())}
        if isinstance(module, RELUS) and tensors and tensors[0].dim() > 1 and tensors[0].numel():
            channels = plain(tensors[0]).movedim(self._axis or self._axes[name], 0).flatten(1)
            call.peaks = torch.stack([channels.amax(1), channels.square().mean(1).sqrt()])
        return call

    def _ended(self, name: str, module: nn.Module, begun: LayerCall | None, output: Any) -> LayerCall:
        call = begun or LayerCall(name, module)
        call.number = self._counts[name]
        self._axis = channel_axis(module, self._axis) if self._follows else 0
        for number, tensor in enumerate(tensors_in(output)):
            numbers = self._measured(tensor)
            if numbers is not None:
                call.row = call.row or self._row(call, tensor, numbers)
                call.outputs[number] = numbers
        return call

    def _row(self, call: LayerCall, tensor: Tensor, numbers: TensorStatistics) -> LayerStatistics:
        module, axis = call.module, self._axis or self._axes[call.name]
        channels = tensor.shape[axis] if tensor.dim() > 1 else 0
        own_code = bool(call.name) and not type(module).__module__.startswith("torch.nn.")
        dead: tuple[int, ...] | None = None
        off: tuple[int, ...] = ()
        if isinstance(module, RELUS) or (own_code and channels and _comes_from_relu(tensor)):
            dead = silent_channels(plain(tensor), axis) if channels and tensor.numel() else ()
            if dead and call.peaks is not None and bool(call.peaks.isfinite().all()):
                off = off_channels(dead, call.peaks)
        curves = ((nn.Sigmoid, (0.0, 1.0)), (nn.Tanh, (-1.0, 1.0)))  # functions that are flat at both ends
        ends = [ends for kind, ends in curves if self._closely and isinstance(module, kind)]
        own = list(module.parameters(recurse=False))
        return LayerStatistics(
            call.name,
            type(module).__name__,
            tuple(tensor.shape),
            sum(parameter.numel() for parameter in own),
            sum(parameter.numel() for parameter in own if parameter.requires_grad),
            numbers,
            channels=channels,
            dead=dead,
            off=off,
            saturated=flat_share(tensor, *ends[0]) if ends else None,
        )

    def _take_gradient(self, call: LayerCall, number: int, gradient: Tensor | None) -> None:
        numbers = None if gradient is None or number not in call.outputs else self._measured(gradient)
        if numbers is not None:
            call.gradients[number] = numbers
            self.broken += [call.name] if number == min(call.outputs) and (numbers.nan or numbers.inf) else []

    def _measured(self, tensor: Tensor) -> TensorStatistics | None:
        """Return a tensor's statistics, the same object if it comes twice in a row; None for whole numbers.

        It comes twice, perhaps in another shape, if a block returns what its last layer returned.
        """
        if not _has_fractions(tensor):
            return None
        last, last_version, _ = self._last
        version = 0 if tensor.is_inference() else tensor._version  # an in-place change raises it
        is_same = (
            version == last_version
            and tensor.layout is last.layout is torch.strided
            and tensor.numel() == last.numel() > 0
            and tensor.dtype == last.dtype
            and tensor.device == last.device
            and tensor.data_ptr() == last.data_ptr() != 0
        )
        if not is_same:
            self._last = tensor.detach(), version, self._measure(tensor.detach())
        return self._last[2]


def channel_axis(module: nn.Module, before: int) -> int:
    """Return the axis of the channels in a layer's output, given that of the layer before it."""
    last = (nn.Linear, nn.LayerNorm, nn.Embedding)
    second = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
    return -1 if isinstance(module, last) else 1 if isinstance(module, second) else before


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _comes_from_relu(tensor: Tensor) -> bool:
    """Return whether a function like ReLU made the tensor, possibly followed by steps that keep its channels apart."""
    # How PyTorch names the gradients of functions that return zero for every small enough value (prefixes)
    like_relu = ("Relu", "Threshold", "Hardtanh", "Hardswish", "Clamp", "Maximum", "Where")
    # Likewise for functions that leave a channel of zeros as it is. Only those with one input tensor count: with two, a
    # parameter may have scaled it.
    keeping = (
        "NativeDropout", "Mul", "Div", "MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "Mean", "View",
        "Unsafe", "Reshape", "Permute", "Transpose", "Squeeze", "Unsqueeze", "AsStrided", "Clone", "ToCopy", "Alias",
    )  # fmt: skip
    function = tensor.grad_fn
    while function is not None and not function.name().startswith(like_relu):
        inputs = [node for node, _ in function.next_functions if node is not None]
        function = inputs[0] if len(inputs) == 1 and function.name().startswith(keeping) else None
    return function is not None


NamedLoss: TypeAlias = Callable[[Any], "tuple[Tensor | None, str]"]
"""A function from a model's output to the number to differentiate, or None if the output has no gradient, and the
number's name."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What one pass measured.

    Attributes:
        rows: a row for each call of each layer, in the order in which they ended.
        loss: the number that was differentiated; None if it could not be.
        loss_name: what ``loss`` is: "cross entropy", "binary cross entropy", "own loss" or "mean score of the best
            class".
        given: for "nan" and "infinity", the names of the layers whose input holds them; "" is the model itself.
        zero_weights: the layers whose weights are all zero, so that no gradient passes them.
        backwards: the layers whose gradients hold NaN or infinity, in the order of the backward pass.
        unnormalised: whether a batch normalisation has seen so few batches that it changes its input very little.
    """

    rows: tuple[LayerStatistics, ...]
    loss: float | None
    loss_name: str
    given: Mapping[Flaw, frozenset[str]] = field(hash=False)
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
    layers = LayerPass(
        model,
        lambda *_: True,  # "*" would leave out the model itself
        lambda tensor: statistics(tensor, magnitudes=backward_pass() >= 0),
        closely=True,
    )
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
    calls: dict[str, LayerCall] = layers.by_name()
    return Measured(
        tuple(_rows(calls, norms)),
        None if loss is None or not loss.requires_grad else float(loss.detach()),
        loss_name,
        {flaw: frozenset(name for name, call in calls.items() if flaw in call.flaws) for flaw in FLAWS},
        tuple(
            name
            for name, module in modules_by_name(model).items()
            if isinstance(weight := getattr(module, "weight", None), nn.Parameter)
            if weight.numel() and not bool(weight.detach().any())
        ),
        tuple(dict.fromkeys(layers.broken)),
        not training and any(map(_is_unsettled, model.modules())),
    )


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Set the model to training; give it copies of its buffers to write into, and put its own back."""
    own = [(module._buffers, module._buffers.copy()) for module in model.modules()]
    copies = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    try:
        for buffers, before in own:
            buffers.update({name: copies.get(id(buffer)) for name, buffer in before.items()})
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


def _rows(calls: Mapping[str, LayerCall], norms: Mapping[nn.Parameter, float]) -> Iterator[LayerStatistics]:
    """Yield the rows; a layer that returns its input, or what its last inner layer returned, has none."""
    last = None
    for name, call in calls.items():
        is_shape = isinstance(call.module, (nn.Identity, nn.Flatten, nn.Unflatten))
        if call.row is None or call.row.activations is last or is_shape:
            continue
        last, own = call.row.activations, list(call.module.parameters(recurse=False))
        of_own = [norms[parameter] for parameter in own if parameter in norms]
        yield replace(
            call.row,
            layer=name,
            gradients=call.gradients.get(min(call.outputs)),
            parameter_gradient=math.hypot(*of_own) if of_own else None,
            sound=all(bool(parameter.detach().isfinite().all()) for parameter in own),
        )


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
    # If much is left after this many batches, the momentum is too small to be that of the training; it was set later
    # The share of the initial statistics from which they distort the result: 28 batches with a momentum of 0.1
    return 0 < batches < 1000 and left > 0.05 and float(variance.min()) > 0.99 * left
