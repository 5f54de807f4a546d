"""A row for each call of each layer, made from the measurement of a pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from camkit.diagnosis.measurement import Measurement
from camkit.diagnosis.reductions import RELUS, Flaws, Mark, TensorSummary
from camkit.diagnosis.tensor_statistics import TensorStatistics, off_channels
from camkit.errors import LayerError
from camkit.explanation import finite_or_none
from camkit.hooks import Call
from camkit.layers.names import THE_MODEL, modules_by_name

_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding)
_CHANNELS_SECOND = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
_PASSING = (nn.Identity, nn.Flatten, nn.Unflatten)

OFF = 8.0
"""A channel is switched off if it stays below zero by this many times the usual size of the other channels. If values
were normally distributed, that would happen to one channel in 30 million."""

_RARE = 1000
"""Bins that hold less than one in this many of a layer's numbers do not widen the shared axis."""

_T = TypeVar("_T")


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
            "layer": self.layer,
            "kind": self.kind,
            "shape": list(self.shape),
            "parameters": self.parameters,
            "trained": self.trained,
            "activations": self.activations.to_dict(),
            "gradients": None if self.gradients is None else self.gradients.to_dict(),
            "parameter_gradient": finite_or_none(self.parameter_gradient),
            "channels": self.channels,
            "dead": None if self.dead is None else list(self.dead),
            "off": list(self.off),
            "saturated": self.saturated,
            "sound": self.sound,
        }

    def to_row(self) -> dict[str, Any]:
        """Return the row of a table: ``to_dict`` without histograms, and with numbers of channels."""
        row = self.to_dict()
        gradients = dict.fromkeys(_OF_TENSORS) if row["gradients"] is None else row["gradients"]
        return {
            **row,
            "activations": {name: row["activations"][name] for name in _OF_TENSORS},
            "gradients": {name: gradients[name] for name in _OF_TENSORS},
            "dead": None if self.dead is None else len(self.dead),
            "off": len(self.off),
        }


_OF_TENSORS = ("nan", "inf", "mean", "std", "low", "high", "zeros", "norm")


@dataclass(frozen=True)
class Setting:
    """What the rules for findings need to know apart from the rows.

    Attributes:
        pictures: the number of pictures.
        to_train: whether the model runs as in a training step, with the caller's own choice of frozen parameters.
        nan_given, inf_given: the names of the layers whose input holds NaN, or infinity; "" is the model itself.
        zero_weights: the layers whose weights are all zero, so that no gradient passes them.
        backwards: the layers whose gradients hold NaN or infinity, in the order of the backward pass.
        unnormalised: whether a batch normalisation has seen so few batches that it changes its input very little.
    """

    pictures: int = 1
    to_train: bool = False
    nan_given: frozenset[str] = frozenset()
    inf_given: frozenset[str] = frozenset()
    zero_weights: tuple[str, ...] = ()
    backwards: tuple[str, ...] = ()
    unnormalised: bool = False


def magnitude_span(rows: Sequence[LayerStatistics]) -> tuple[int, int]:
    """Return the range of bins that the layers' gradient magnitudes use, the end exclusive; (0, 0) without gradients.

    Bins with less than a thousandth of a layer's numbers don't count.
    """
    used: set[int] = set()
    for row in rows:
        sizes = None if row.gradients is None else row.gradients.magnitudes
        if sizes is not None:
            least = sum(sizes.counts) / _RARE
            used |= {number for number, count in enumerate(sizes.counts) if count > least}
    return (min(used), max(used) + 1) if used else (0, 0)


def rows_of(model: nn.Module, measurement: Measurement) -> tuple[LayerStatistics, ...]:
    """Return a row for each call of each layer that computed something, in the order in which they ended.

    A layer that returns its input, or what its last inner layer returned, has no row.
    """
    modules = modules_by_name(model)
    call_counts = Counter(call.name for call in measurement.outputs.calls)
    last_mark, axis = None, 1
    rows = []
    for call in measurement.outputs.calls:
        module = modules[call.name]
        axis = channel_axis(module, axis)
        mark = next(parts_of(call.output, Mark), None)
        if mark is None or mark == last_mark or isinstance(module, _PASSING):
            continue
        last_mark = mark
        name = call.name if call_counts[call.name] == 1 else str(call)
        rows.append(_row(name, call, module, mark, axis, measurement))
    return tuple(rows)


def channel_axis(module: nn.Module, before: int) -> int:
    """Return the axis of the channels in a layer's output, given that of the layer before it."""
    return -1 if isinstance(module, _CHANNELS_LAST) else 1 if isinstance(module, _CHANNELS_SECOND) else before


def setting_of(model: nn.Module, measurement: Measurement, pictures: int, *, to_train: bool) -> Setting:
    """Return what the rules for findings need to know apart from the rows."""
    call_counts = Counter(call.name for call in measurement.inputs.calls)
    input_flaws = {
        call.name if call_counts[call.name] == 1 else str(call): list(parts_of((call.inputs, call.keywords), Flaws))
        for call in measurement.inputs.calls
    }
    broken_gradients: dict[str, int] = {}
    for call in measurement.outputs.calls:
        mark = _gradient(call)
        if mark is not None:
            gradient = measurement.summaries[mark].statistics
            if gradient.nan or gradient.inf:
                broken_gradients.setdefault(call.name, mark.number)
    return Setting(
        pictures,
        to_train,
        frozenset(name for name, flaws in input_flaws.items() if any(part.nan for part in flaws)),
        frozenset(name for name, flaws in input_flaws.items() if any(part.inf for part in flaws)),
        tuple(name for name, module in modules_by_name(model).items() if _is_zero(module)),
        tuple(sorted(broken_gradients, key=lambda name: broken_gradients[name])),
        not measurement.training and any(_is_unsettled(module) for module in model.modules()),
    )


def _row(name: str, call: Call, module: nn.Module, mark: Mark, axis: int, measurement: Measurement) -> LayerStatistics:
    summary = measurement.summaries[mark]
    gradient = _gradient(call)
    own = list(module.parameters(recurse=False))
    norms = [measurement.gradient_norms[parameter] for parameter in own if parameter in measurement.gradient_norms]
    ends_in_relu = isinstance(module, RELUS) or (
        call.number in measurement.relu_calls.get(call.name, ()) and len(summary.shape) > 1
    )
    dead = summary.silent[_axis_index(axis)] if ends_in_relu else None
    return LayerStatistics(
        name,
        type(module).__name__,
        summary.shape,
        sum(parameter.numel() for parameter in own),
        sum(parameter.numel() for parameter in own if parameter in measurement.trainable),
        summary.statistics,
        None if gradient is None else measurement.summaries[gradient].statistics,
        math.hypot(*norms) if norms else None,
        summary.shape[axis] if len(summary.shape) > 1 else 0,
        dead,
        _off(call, dead, axis, measurement) if dead else (),
        _saturated(call, measurement),
        all(bool(parameter.detach().isfinite().all()) for parameter in own),
    )


def _axis_index(axis: int) -> int:
    """Return where a pair of values, for the second and for the last axis, holds the one for this axis."""
    return 0 if axis == 1 else 1


def _off(call: Call, dead: tuple[int, ...], axis: int, measurement: Measurement) -> tuple[int, ...]:
    """Return the dead channels that a ReLU received far below zero."""
    relu = None if measurement.before_relus is None else measurement.before_relus.get(str(call))
    pairs = [] if relu is None else [*relu.inputs, *relu.keywords.values()]
    if not pairs or pairs[0] is None:
        return ()
    peaks: Tensor = pairs[0][_axis_index(axis)]
    return off_channels(dead, peaks, OFF) if bool(torch.isfinite(peaks).all()) else ()


def _saturated(call: Call, measurement: Measurement) -> float | None:
    curves = (recording.get(str(call)) for recording in measurement.after_curves)
    return next((float(curve.output) for curve in curves if curve is not None), None)


def last_gradient(call: Call) -> Any:
    """Return the gradient from the last backward pass that reached a call; None if none did."""
    try:
        return next(reversed(call.gradients), None)
    except LayerError:  # the output has no gradient
        return None


def _gradient(call: Call) -> Mark | None:
    """Return the mark of the gradient of the tensor that the row describes, the first one in the output."""
    gradients = zip(leaves(call.output), leaves(last_gradient(call)), strict=False)
    found = next((gradient for part, gradient in gradients if isinstance(part, Mark)), None)
    return found if isinstance(found, Mark) else None


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


def parts_of(value: Any, kind: type[_T]) -> Iterator[_T]:
    """Return the parts of a structure that are of one type, in order."""
    return (part for part in leaves(value) if isinstance(part, kind))


def leaves(value: Any) -> list[Any]:
    """Return the parts of a structure in order; marks, flaws and summaries are parts, although they have fields."""
    if isinstance(value, (Mark, Flaws, TensorSummary)):
        return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [leaf for field in fields(value) for leaf in leaves(getattr(value, field.name, None))]
    return [value]
