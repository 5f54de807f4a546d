"""What is remembered of a model between passes."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from camkit.engine.attach import is_ours

PYTORCHS = frozenset(vars(nn.Module()))
"""Attributes that belong to PyTorch, such as the hooks. Other threads may set them in the meantime."""

CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
"""Containers that a forward pass may fill, and whose items are restored."""

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Values whose change can change what a module does, and that refer to nothing else."""


class ModelRecord:
    """What is remembered of a model between passes: enough to see that it changed, nothing that keeps it alive.

    Modules are held by weak references. Modules whose ``forward`` is PyTorch's own are expected to set no attributes;
    of the others, ``authored``, the attributes are restored after each pass.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._types = list(map(type, modules))
        self._forwards = {kind: _forward_of(kind) for kind in dict.fromkeys(self._types)}
        self._children = _children(modules)
        self._tensors = _tensors(modules)
        self._hooks = _users_hooks(modules)
        authored = [number for number, module in enumerate(modules) if not _is_pytorchs(type(module))]
        self._authored = authored
        self._names = [_plain_names(modules[number]) for number in authored]
        self._values = [
            _plain_values(modules[number], names) for number, names in zip(authored, self._names, strict=True)
        ]
        self._lengths = [len(vars(modules[number])) for number in authored]
        self._containers = [_container_names(modules[number]) for number in authored]
        self.keys = frozenset(map(id, modules))
        self.buffers = BufferCopier(modules)
        self.devices = frozenset(
            tensor.device
            for tensor in self._tensors
            if tensor is not None and tensor.device.type in ("cuda", "mps", "xpu")
        )

    @classmethod
    def of_model(cls, model: nn.Module) -> ModelRecord:
        """Prepare the record of a model with all its submodules."""
        return cls(list(model.modules()))

    def modules(self) -> list[nn.Module]:
        """Return the modules that are still alive, in the model's order."""
        return [module for module in (reference() for reference in self._modules) if module is not None]

    def authored(self, modules: list[nn.Module]) -> list[nn.Module]:
        """Return the modules, of those that ``modules()`` returned, whose forward PyTorch did not write."""
        return [modules[number] for number in self._authored]

    def containers(self, authored: list[nn.Module]) -> list[Any]:
        """Return the ordinary containers that the authors of some modules keep on them."""
        return [
            vars(module)[name]
            for module, names in zip(authored, self._containers, strict=True)
            for name in names
            if name in vars(module)
        ]

    def is_current(self) -> bool:
        """Tell whether the model still has the same modules, tensors, hooks and switches; weights may have changed."""
        modules = self.modules()
        return (
            len(modules) == len(self._modules)
            and list(map(type, modules)) == self._types
            and all(_forward_of(kind) is forward for kind, forward in self._forwards.items())
            and _children(modules) == self._children
            and _are_same(_tensors(modules), self._tensors)
            and _users_hooks(modules) == self._hooks
            and self._same_switches(modules)
        )

    def _same_switches(self, modules: list[nn.Module]) -> bool:
        authored = self.authored(modules)
        if [len(vars(module)) for module in authored] != self._lengths:
            return False
        pairs = zip(authored, self._names, strict=True)
        try:
            return [_plain_values(module, names) for module, names in pairs] == self._values
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or has become a tensor
            return False


def _forward_of(kind: type[nn.Module]) -> Any:
    return kind.forward


def _is_pytorchs(kind: type[nn.Module]) -> bool:
    """Tell whether PyTorch wrote a class's forward pass, which then sets no attributes."""
    return str(getattr(kind.forward, "__module__", "")).startswith("torch.nn.modules")


def _children(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the names and identities of all modules inside others."""
    inside = [module._modules for module in modules]
    return [*itertools.chain.from_iterable(inside), *map(id, itertools.chain.from_iterable(map(dict.values, inside)))]


def _tensors(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    """Return all parameters and buffers."""
    parameters = itertools.chain.from_iterable([module._parameters.values() for module in modules])
    buffers = itertools.chain.from_iterable([module._buffers.values() for module in modules])
    return [*parameters, *buffers]


def _are_same(tensors: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))


def _users_hooks(modules: Sequence[nn.Module]) -> list[int]:
    """Return the numbers of all hooks on forward passes but camkit's; PyTorch gives each hook a number of its own."""
    return [
        number
        for module in modules
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        if hooks
        for number, hook in list(hooks.items())
        if not is_ours(hook)
    ]


def _container_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, value in vars(module).items() if type(value) in CONTAINERS and name not in PYTORCHS)


def _plain_names(module: nn.Module) -> tuple[str, ...]:
    attributes = vars(module).items()
    return tuple(name for name, value in attributes if isinstance(value, _PLAIN) and name != "training")


def _plain_values(module: nn.Module, names: tuple[str, ...]) -> list[Any]:
    attributes = vars(module)
    return [attributes[name] for name in names]


_VERSION, _REQUIRES_GRAD = operator.attrgetter("_version"), operator.attrgetter("requires_grad")


class BufferCopier:
    """Copies all buffers of a model at once: one operation for each type and device instead of one for each buffer."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.tensors = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        self._tracked = [tensor for tensor in self.tensors if not tensor.is_inference()]
        groups: defaultdict[Any, list[int]] = defaultdict(list)
        for number, tensor in enumerate(self.tensors):
            joined = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_contiguous()
            joined = joined and not tensor.is_inference() and not tensor.is_quantized
            groups[(tensor.dtype, tensor.device) if joined else number].append(number)
        self._joined = [numbers for numbers in groups.values() if len(numbers) > 1]
        self._single = [numbers[0] for numbers in groups.values() if len(numbers) == 1]
        self._views = [[self.tensors[number].detach().view(-1) for number in numbers] for numbers in self._joined]
        self._sizes = [list(map(Tensor.numel, views)) for views in self._views]
        self._addresses = self._current_addresses()

    def _current_addresses(self) -> list[int]:
        return [self.tensors[number].data_ptr() for numbers in self._joined for number in numbers]

    def versions(self) -> list[Any]:
        """Return what shows, besides its values, that a buffer was written to: its version, and whether it learns."""
        return [*map(_VERSION, self._tracked), *map(_REQUIRES_GRAD, self.tensors)]

    def copy(self) -> BufferCopies:
        """Return copies of all buffers."""
        if self._current_addresses() != self._addresses:  # a buffer was given other memory through ``.data``
            return BufferCopies([], [], [], dict(enumerate(tensor.detach().clone() for tensor in self.tensors)))
        single = {number: self.tensors[number].detach().clone() for number in self._single}
        return BufferCopies(self._joined, self._sizes, [torch.cat(views) for views in self._views], single)

    def are_equal(self, copies: BufferCopies) -> bool:
        """Tell whether buffers on the CPU still have the values that were copied.

        PyTorch's batch normalisation, ``.data`` and NumPy write into buffers without raising their version. On other
        devices a comparison would wait for the device, so it is left out there.
        """
        if self._current_addresses() != self._addresses or len(copies.flat) != len(self._views):
            return False
        joined = all(
            flat.device.type != "cpu" or torch.equal(flat, torch.cat(views))
            for flat, views in zip(copies.flat, self._views, strict=True)
        )
        return joined and all(
            self.tensors[number].layout is torch.strided
            and (values.device.type != "cpu" or same_values(self.tensors[number], values))
            for number, values in copies.single.items()
        )


class BufferCopies:
    """The values of a model's buffers, several of them in one flat tensor."""

    def __init__(
        self, joined: list[list[int]], sizes: list[list[int]], flat: list[Tensor], single: dict[int, Tensor]
    ) -> None:
        self._joined = joined
        self._sizes = sizes
        self.flat = flat
        self.single = single

    def values(self) -> dict[int, Tensor]:
        """Return the values of each buffer, by its number; those that were copied together are flat."""
        values = dict(self.single)
        for numbers, flat, sizes in zip(self._joined, self.flat, self._sizes, strict=True):
            values.update(zip(numbers, flat.split(sizes), strict=True))
        return values


def same_values(tensor: Tensor, values: Tensor) -> bool:
    """Tell whether a tensor has some values; NaN equals NaN."""
    if tensor.shape != values.shape:
        return False
    if torch.equal(tensor, values):
        return True
    both_nan = tensor.isnan() & values.isnan()
    return torch.equal(tensor.masked_fill(both_nan, 0), values.masked_fill(both_nan, 0))
