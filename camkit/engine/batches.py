"""Whether a model treats each picture of a batch as if it were alone.

Some models do not: a loop over the pictures calls a layer once for each, a normalisation without running statistics
mixes the pictures, and a sorted batch has its feature maps in another order than its pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from camkit.engine.cut import cut
from camkit.engine.interrupts import interruptible
from camkit.engine.nested import tensors_in
from camkit.engine.passes import are_alike, is_out_of_memory, quiet_pass
from camkit.engine.record import ModelRecord
from camkit.targets.outputs import main_tensor
from camkit.types import LayerRef

_SAME, _SAME_16_BITS = 1e-3, 5e-2
"""How far a picture's values may differ in a batch and alone, as a share of the largest: a little more than rounding,
which differs between sizes of batches."""

_PACKAGES = ("torch.nn.", "torchvision.", "timm.")
"""Packages whose modules keep pictures apart, except those that ``_mixes`` finds."""

_AXES = (1, 2, 3, -1)
"""The axes over which a softmax or flattening leaves pictures apart, whatever its input."""


_STEPS = (1, 3, 0, 2)
"""How many steps of a ramp each version of a picture gets: neither in rising nor in falling order, since a model may
sort its pictures by brightness."""


def unlike(values: Float[Tensor, "*shape"], steps: int = 1) -> Float[Tensor, "*shape"]:
    """Return the values plus a ramp over all elements, from 0 to ``steps`` times the largest absolute value."""
    largest = values.detach().abs().amax()
    ramp = torch.linspace(0, steps, values.numel(), device=values.device).view(values.shape).to(values)
    return values + ramp * torch.where(largest > 0, largest, 1)


def versions(values: Float[Tensor, "1 *shape"]) -> list[Float[Tensor, "1 *shape"]]:
    """Return four different versions of a picture or of its feature maps; one of them is unchanged."""
    return [unlike(values, steps) for steps in _STEPS]


def keeps_pictures_apart(
    model: nn.Module,
    image: Float[Tensor, "1 c *size"],
    layers: Mapping[LayerRef, nn.Module],
    record: ModelRecord,
    at_once: int = len(_STEPS),
) -> bool | None:
    """Tell whether a picture has the same feature maps and output alone as in a batch, wherever it is in the batch.

    None also means no: the model gives one answer for a whole batch, for example for the pictures of one patient.

    This runs at most four passes over seven pictures, and none if all modules are of packages that are known to keep
    pictures apart.

    Args:
        model: the model; it is restored exactly.
        image: one picture.
        layers: the layers whose feature maps are compared.
        record: the model's record.
        at_once: how many pictures the model will get at once. If it is two, the trial batch has two as well, in both
            orders, because more may not fit into memory.
    """
    if not record.runs_own_code and not any(map(_mixes, record.modules())):
        return True
    pictures = versions(image)[: 2 if at_once == 2 else None]
    count = len(pictures)
    # A model that sorts may leave two in their places, but not three of four.
    orders = [range(2), range(2)[::-1]] if count == 2 else [range(count)]

    def run(batch: Tensor) -> tuple[list[Tensor], list[Tensor], Any]:
        with quiet_pass(model, image.device, "fp32", record), cut(layers, gradients=False) as tape, interruptible():
            output = model(batch.clone())
        shape = getattr(main_tensor(output), "shape", ())
        return [tape.layers[ref].output for ref in layers], list(tensors_in(output)), shape

    try:
        alone = [run(picture) for picture in pictures[:-1]]
    except Exception:  # a model made for batches of another size may raise anything
        return True
    try:
        together = [run(torch.cat([pictures[number] for number in order])) for order in orders]
    except Exception as error:  # so may one made for single pictures
        return is_out_of_memory(error)
    tolerance = _SAME_16_BITS if record.placement[1] in (torch.float16, torch.bfloat16) else _SAME
    for order, (all_maps, all_outputs, all_shape) in zip(orders, together, strict=True):
        for number, (maps, outputs, shape) in enumerate(alone):
            if shape and shape == all_shape and len(outputs) == len(all_outputs):
                return None
            place = order.index(number)
            # Some of what a model returns need not have one row for each picture, such as a loss.
            pairs = [*zip(outputs, all_outputs, strict=False)] if len(outputs) == len(all_outputs) else []
            rows = [pair for pair in pairs if _axis(count, *pair) is not None]
            compared = [*zip(maps, all_maps, strict=True), *rows]
            if (pairs and not rows) or not all(_is_at(place, count, *pair, tolerance) for pair in compared):
                return False
    return True


def _mixes(module: nn.Module) -> bool:
    """Tell whether a module may mix the pictures of a batch."""
    kind = type(module).__module__
    if isinstance(module, _BatchNorm):
        return module.running_mean is None
    if kind.startswith("torch.nn.modules."):
        axes = [getattr(module, name, 1) for name in ("dim", "start_dim")]
        return not getattr(module, "batch_first", True) or any(axis not in _AXES for axis in axes)
    return not kind.startswith(_PACKAGES)


def _axis(count: int, alone: Tensor, together: Tensor) -> int | None:
    """Return the axis along which the values of ``count`` pictures are longer than those of one, or None."""
    for axis, length in enumerate(alone.shape):
        if together.shape == (*alone.shape[:axis], count * length, *alone.shape[axis + 1 :]) and alone.numel():
            return axis
    return None


def _is_at(place: int, count: int, alone: Tensor, together: Tensor, tolerance: float) -> bool:
    """Tell whether one picture's values are at its place in those of ``count`` pictures."""
    axis = _axis(count, alone, together)
    if axis is None:
        return False
    own = together.narrow(axis, place * alone.shape[axis], alone.shape[axis])
    return are_alike(alone.double(), own, tolerance)
