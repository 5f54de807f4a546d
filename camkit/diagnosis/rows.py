"""From what a pass showed to a row for each layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from camkit.diagnosis.findings import OFF
from camkit.diagnosis.measuring import RELUS, Flaws, Mark, Measured
from camkit.diagnosis.statistics import off_channels
from camkit.diagnosis.values import LayerStatistics, Setting
from camkit.diagnosis.watching import Watched
from camkit.errors import LayerError
from camkit.hooks import Call
from camkit.layers.names import modules_by_name

_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding)
_CHANNELS_SECOND = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
_PASSING = (nn.Identity, nn.Flatten, nn.Unflatten)

_T = TypeVar("_T")


def rows_of(model: nn.Module, watched: Watched) -> tuple[LayerStatistics, ...]:
    """Return a row for each run of each layer that computed something, in the order in which they ended.

    What hands on what it was given, or what the last layer within it returned, as a block does, has none.
    """
    layers = modules_by_name(model)
    runs = Counter(call.name for call in watched.outputs.calls)
    before, axis = -1, 1
    rows = []
    for call in watched.outputs.calls:
        module = layers[call.name]
        axis = channel_axis(module, axis)
        mark = next(parts_of(call.output, Mark), None)
        if mark is None or mark.number == before or isinstance(module, _PASSING):
            continue
        before = mark.number
        name = call.name if runs[call.name] == 1 else str(call)
        rows.append(_row(name, call, module, mark, axis, watched))
    return tuple(rows)


def channel_axis(module: nn.Module, before: int) -> int:
    """Return which axis of a layer's output are its channels, where that of the layer before it is known."""
    return -1 if isinstance(module, _CHANNELS_LAST) else 1 if isinstance(module, _CHANNELS_SECOND) else before


def setting_of(model: nn.Module, watched: Watched, pictures: int, *, to_train: bool) -> Setting:
    """Return what findings need to know besides the rows."""
    runs = Counter(call.name for call in watched.given.calls)
    given = {
        call.name if runs[call.name] == 1 else str(call): list(parts_of((call.inputs, call.keywords), Flaws))
        for call in watched.given.calls
    }
    wrong: dict[str, int] = {}
    for call in watched.outputs.calls:
        mark = _gradient(call)
        numbers = None if mark is None else watched.measures.found[mark.number].numbers
        if mark is not None and numbers is not None and (numbers.nan or numbers.inf):
            wrong.setdefault(call.name, mark.number)
    return Setting(
        pictures,
        to_train,
        frozenset(name for name, found in given.items() if any(one.nan for one in found)),
        frozenset(name for name, found in given.items() if any(one.inf for one in found)),
        tuple(name for name, module in modules_by_name(model).items() if _is_zero(module)),
        tuple(sorted(wrong, key=lambda name: wrong[name])),
        not watched.training and any(_is_unsettled(module) for module in model.modules()),
    )


def _row(name: str, call: Call, module: nn.Module, mark: Mark, axis: int, watched: Watched) -> LayerStatistics:
    measured = watched.measures.found[mark.number]
    gradient = _gradient(call)
    own = list(module.parameters(recurse=False))
    norms = [watched.parameters[parameter] for parameter in own if parameter in watched.parameters]
    dead = _dead(module, measured, axis, cut=call.number in watched.cut_off.get(call.name, ()))
    return LayerStatistics(
        name,
        type(module).__name__,
        measured.shape,
        sum(parameter.numel() for parameter in own),
        sum(parameter.numel() for parameter in own if parameter in watched.trained),
        measured.numbers,
        None if gradient is None else watched.measures.found[gradient.number].numbers,
        math.hypot(*norms) if norms else None,
        measured.shape[axis] if len(measured.shape) > 1 else 0,
        dead,
        _off(call, dead, axis, watched) if dead else (),
        _saturated(call, watched),
        all(bool(parameter.detach().isfinite().all()) for parameter in own),
    )


def _dead(module: nn.Module, measured: Measured, axis: int, *, cut: bool) -> tuple[int, ...] | None:
    """Return the silent channels after a ReLU, and after code of the model's own that returns what one returned."""
    if isinstance(module, RELUS) or (cut and len(measured.shape) > 1):
        return measured.silent[0 if axis == 1 else 1]
    return None


def _off(call: Call, dead: tuple[int, ...], axis: int, watched: Watched) -> tuple[int, ...]:
    recording = watched.before_relus
    found = None if recording is None else recording.get(str(call))
    given = None if found is None else next(iter([*found.inputs, *found.keywords.values()]), None)
    if given is None:
        return ()
    before: Tensor = given[0 if axis == 1 else 1]
    return off_channels(dead, before, OFF) if bool(torch.isfinite(before).all()) else ()


def _saturated(call: Call, watched: Watched) -> float | None:
    found = (recording.get(str(call)) for recording in watched.after_curves)
    return next((float(one.output) for one in found if one is not None), None)


def _gradient(call: Call) -> Mark | None:
    """Return the measurement of the gradient of that tensor of the output which the row is about."""
    try:
        passes = call.gradients
    except LayerError:  # the output has none
        return None
    if not passes:
        return None
    place = next((number for number, part in enumerate(leaves(call.output)) if isinstance(part, Mark)), None)
    found = None if place is None else leaves(passes[-1])[place]
    return found if isinstance(found, Mark) else None


def _is_zero(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.numel() > 0 and not bool(weight.detach().any())


def _is_unsettled(module: nn.Module) -> bool:
    """Tell whether a batch normalisation still has much of the statistics it was made with.

    Each batch leaves 1 - momentum of them, so that no variance can be less than what is left of the 1 it began with;
    where one is, as in checkpoints that count batches anew, or the momentum was changed, they come from elsewhere.
    """
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    mean, variance, count = module.running_mean, module.running_var, module.num_batches_tracked
    if mean is None or variance is None:
        return False
    if not bool(mean.any()) and bool(variance.eq(1).all()):
        return True
    seen = 0 if count is None else int(count)
    left = 0.0 if module.momentum is None else (1 - module.momentum) ** seen
    return 0 < seen < _MANY and left > _MUCH and float(variance.min()) > 0.99 * left


_MANY = 1000
"""Batches after which a momentum so small that much would be left isn't that of the training, but was set later."""

_MUCH = 0.05
"""Of the statistics that a batch normalisation was made with: reached after 28 batches with a momentum of 0.1."""


def parts_of(value: Any, kind: type[_T]) -> Iterator[_T]:
    """Return what of a kind a structure holds, in its order."""
    return (part for part in leaves(value) if isinstance(part, kind))


def leaves(value: Any) -> list[Any]:
    """Return what a structure holds, in its order; marks are whole, although they have fields."""
    if isinstance(value, (Mark, Flaws, Measured)):
        return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [leaf for field in fields(value) for leaf in leaves(getattr(value, field.name, None))]
    return [value]
