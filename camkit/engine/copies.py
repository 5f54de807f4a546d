"""Copies of many tensors at once, which show whether the tensors were written to, and restore them."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_VERSION, _SHAPE = operator.attrgetter("_version"), operator.attrgetter("shape")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")

FEW_VALUES = 1024
"""Parameters with at most this many values are copied and compared by value: gates, scales and tokens. Writing to
``.data`` does not raise a tensor's version. Copies of all weights would take the memory of the model once more."""


class Copier:
    """Copies tensors with one operation per type and device.

    On a CPU, it compares values, since PyTorch's batch normalisation, ``.data`` and NumPy write without raising a
    tensor's version. On other devices that would wait for the device, so it compares versions there.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        groups: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            groups[(tensor.dtype, tensor.device) if _can_be_joined(tensor) else id(tensor)].append(tensor)
        self._groups = list(groups.values())
        joined = [tensor for group in self._groups if len(group) > 1 for tensor in group]
        self._views = [
            [tensor.detach().view(-1) for tensor in group] if len(group) > 1 else [group[0].detach()]
            for group in self._groups
        ]
        self._joined, self._addresses = joined, list(map(Tensor.data_ptr, joined))
        self._versioned = [tensor for tensor in tensors if not tensor.is_inference()]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether it was made for these very tensors, and none of them has got other memory through ``.data``."""
        same = len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))
        return same and list(map(Tensor.data_ptr, self._joined)) == self._addresses

    def values(self) -> list[Tensor]:
        """Return copies of the values; those of tensors of one type and device are one flat tensor."""
        return list(map(_joined, self._views))

    def marks(self) -> tuple[list[int], list[bool]]:
        """Return the versions and flags that show, besides the values, that a tensor was written to."""
        return list(map(_VERSION, self._versioned)), list(map(_REQUIRES_GRAD, self.tensors))

    def are_equal(self, values: Sequence[Tensor]) -> bool:
        """Tell whether the tensors on a CPU have the values that were copied."""
        on_cpu = [(views, copy) for views, copy in zip(self._views, values, strict=True) if copy.device.type == "cpu"]
        return all(same_values(_joined(views), copy) for views, copy in on_cpu)

    def pairs(self, values: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor, with its copied values; they are flat if they were copied with others."""
        for group, views, copy in zip(self._groups, self._views, values, strict=True):
            yield from zip(group, copy.split([*map(Tensor.numel, views)]) if len(group) > 1 else [copy], strict=True)


class Copies:
    """The values, shapes and flags that tensors had when they were copied."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._values = copier.values()
        self._marks = copier.marks()
        self._shapes = list(map(_SHAPE, copier.tensors))

    def restore(self) -> dict[int, Tensor]:
        """Restore all tensors that were written to.

        Returns:
            By the identity of each tensor that can no longer hold its values, a new tensor in its place.
        """
        if self._copier.marks() == self._marks and self._copier.are_equal(self._values):
            return {}
        before = dict(zip(map(id, self._copier.tensors), zip(self._shapes, self._marks[1], strict=True), strict=True))
        replaced = {}
        for tensor, copy in self._copier.pairs(self._values):
            shape, required = before[id(tensor)]
            values = copy.view(shape) if copy.layout is torch.strided else copy
            restored = _with_values(tensor, values, required=required)
            if restored is not tensor:
                replaced[id(tensor)] = restored
        return replaced


class WeightMarks:
    """Marks that show whether parameters or buffers have been written to or replaced."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tensors = _weights(modules)
        self._marks = _identities(tensors)
        self._copier = Copier(_small(tensors))
        self._values = self._copier.values()

    def still_hold(self, modules: Iterable[nn.Module]) -> bool:
        """Tell whether nothing has been written to in between."""
        tensors = _weights(modules)
        if _identities(tensors) != self._marks or not self._copier.fits(_small(tensors)):
            return False
        return all(map(same_values, self._copier.values(), self._values))


def _weights(modules: Iterable[nn.Module]) -> list[Tensor]:
    held = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
    return [tensor for tensor in held if tensor is not None]


def _small(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.numel() <= FEW_VALUES]


def _identities(tensors: Sequence[Tensor]) -> list[int]:
    return [*map(id, tensors), *map(_VERSION, (tensor for tensor in tensors if not tensor.is_inference()))]


def mark_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's values, and its version; 0 or -1 if it has none."""
    address = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return address, -1 if tensor.is_inference() else tensor._version


def _joined(views: list[Tensor]) -> Tensor:
    """Return a copy of tensors, as one flat tensor if they are several."""
    return torch.cat(views) if len(views) > 1 else views[0].clone()


def _can_be_joined(tensor: Tensor) -> bool:
    """Tell whether a tensor can be copied together with others, as part of a flat tensor."""
    ordinary = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
    return ordinary and tensor.is_contiguous() and not tensor.is_inference()


def same_values(tensor: Tensor, values: Tensor) -> bool:
    """Tell whether a tensor has the given values; NaN equals NaN."""
    if (tensor.shape, tensor.dtype) != (values.shape, values.dtype):
        return False
    if tensor.layout is not torch.strided:
        tensor, values = tensor.to_dense(), values.to_dense()
    if torch.equal(tensor, values):
        return True
    both_nan = tensor.isnan() & values.isnan()
    return torch.equal(tensor.masked_fill(both_nan, 0), values.masked_fill(both_nan, 0))


def _with_values(tensor: Tensor, values: Tensor, *, required: bool) -> Tensor:
    """Return a tensor with its former values, or a new tensor if it can no longer hold them."""
    if tensor.requires_grad == required and same_values(tensor, values):
        return tensor
    try:
        if tensor.dtype != values.dtype:  # ``.data`` was set
            tensor.data = values
        elif tensor.shape != values.shape:
            tensor.resize_(values.shape)
        tensor.copy_(values)
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.detach_()
        return tensor.requires_grad_(required)
    except Exception:
        return values.clone().requires_grad_(required)
