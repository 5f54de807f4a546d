"""What camkit remembers of a model's modules between passes, so that it notices when the model has changed."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from camkit.engine.attach import is_ours
from camkit.engine.copies import Copier

PYTORCHS = frozenset(vars(nn.Module()))
"""Attributes that belong to PyTorch, such as the hooks. Other threads may set them during a pass."""

CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
"""Containers that a forward pass may fill, and whose items are restored."""

_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size])
"""Types of values that refer to no other object."""

_MOST_ITEMS = 64
"""Longer containers and arrays are tables of labels or results, not switches; only their lengths are compared."""

_PACKAGES = ("torch.", "torchvision.", "timm.")
"""Packages whose networks use only PyTorch's random generators in evaluation mode, and write to nothing but buffers."""

_FORWARD = operator.attrgetter("forward")
_MODULES, _BUFFERS = operator.attrgetter("_modules"), operator.attrgetter("_buffers")
_HOOKS, _PRE_HOOKS = operator.attrgetter("_forward_hooks"), operator.attrgetter("_forward_pre_hooks")


class ModelRecord:
    """Remembers enough of a model to notice changes, without keeping the model alive.

    It holds modules by weak references, and the values of their plain attributes. A module whose ``forward`` PyTorch
    wrote is expected to set no attributes; all others are ``authored``. Each call of an Explainer reads the record, so
    its loops use ``map`` and ``itertools``, which run in C.

    Attributes:
        keys: the identities of the modules.
        devices: the devices besides the CPU that the model's tensors are on.
        runs_own_code: True if hooks or modules of others than PyTorch, torchvision and timm run.
        copier: copies what passes may write to; a guard replaces it if the model has got other tensors.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._kinds = list(dict.fromkeys(map(type, modules)))
        self._first_tensors = _first_parameters(modules)
        self._authored = [number for number, module in enumerate(modules) if not _is_pytorchs(module)]
        self.keys = frozenset(map(id, modules))
        tensors = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
        devices = {tensor.device for tensor in tensors if tensor is not None}
        self.devices = frozenset(device for device in devices if device.type in ("cuda", "mps", "xpu"))
        authored = self.authored(modules)
        self.runs_own_code = bool(_users_hooks(modules)) or not all(map(_is_packages, authored))
        self.copier = Copier([])
        self._plain = [(number, getter) for number, module in enumerate(modules) if (getter := _plain_getter(module))]
        self._others = [
            (number, name)
            for number in self._authored
            for name, value in vars(modules[number]).items()
            if name not in PYTORCHS and not _is_plain(value)
        ]
        self._state = self._state_of(modules)

    @classmethod
    def of_model(cls, model: nn.Module) -> ModelRecord:
        """Prepare the record of a model and all its submodules."""
        return cls(list(model.modules()))

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU if it has none."""
        tensor = _tensor_at(self._first_tensors[0])
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's first floating-point parameter, which the input must have too."""
        tensor = _tensor_at(self._first_tensors[1])
        return torch.float32 if tensor is None else tensor.dtype

    def modules(self) -> list[nn.Module]:
        """Return the modules that still exist, in the model's order."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def authored(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Select, from the result of ``modules()``, the modules whose ``forward`` PyTorch did not write."""
        return [modules[number] for number in self._authored]

    def others(self, modules: Sequence[nn.Module]) -> list[Any]:
        """Return the attributes of the authored modules that are not plain values: containers, tensors, objects."""
        tables = [(vars(modules[number]), name) for number, name in self._others]
        return [table[name] for table, name in tables if name in table]

    def is_current(self) -> bool:
        """Tell whether modules, buffers, hooks and attributes are the same as before; weights may have changed.

        Not compared are globals, closures, classes, the user's own objects and what lies deeper in containers.
        """
        modules = self.modules()
        try:
            return len(modules) == len(self._modules) and self._state_of(modules) == self._state
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or a number became a tensor or an array
            return False

    def _state_of(self, modules: Sequence[nn.Module]) -> list[Any]:
        """Return everything that may switch what the modules compute, as plain values and identities."""
        attributes = list(map(vars, modules))
        tables = (*map(_MODULES, modules), *map(_BUFFERS, modules))
        return [
            list(map(type, modules)),
            list(map(_FORWARD, self._kinds)),
            list(map(len, attributes)),
            [getter(attributes[number]) for number, getter in self._plain],
            list(map(_switch, self.others(modules))),
            list(map(id, itertools.chain.from_iterable(map(dict.values, tables)))),
            _users_hooks(modules),
        ]


_TensorRef: TypeAlias = "tuple[weakref.ref[nn.Module], str, str] | None"
"""Where a model keeps a tensor: the module, the name of the dictionary, and the key."""


def _first_parameters(modules: Sequence[nn.Module]) -> tuple[_TensorRef, _TensorRef]:
    """Return references to the first parameter or buffer, and to the first floating-point parameter."""
    refs = [
        (weakref.ref(module), kind, name)
        for kind in ("_parameters", "_buffers")
        for module in modules
        for name, tensor in vars(module)[kind].items()
        if tensor is not None
    ]
    floating = (ref for ref in refs if ref[1] == "_parameters" and _tensor_at(ref).is_floating_point())
    return next(iter(refs), None), next(floating, None)


def _tensor_at(ref: Any) -> Any:
    """Return the tensor that a reference leads to; None if there is none any more."""
    module = None if ref is None else ref[0]()
    return None if module is None else vars(module)[ref[1]].get(ref[2])


def _is_packages(module: nn.Module) -> bool:
    """Tell whether PyTorch, torchvision or timm wrote a module's class and its ``forward``."""
    names = f"{type(module).__module__}.", f"{_FORWARD(type(module)).__module__}."
    return "forward" not in vars(module) and all(name.startswith(_PACKAGES) for name in names)


def _is_pytorchs(module: nn.Module) -> bool:
    """Tell whether PyTorch wrote a module's ``forward``, which then sets no attributes."""
    forward = _FORWARD(type(module))
    return "forward" not in vars(module) and str(getattr(forward, "__module__", "")).startswith("torch.nn.modules")


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _plain_getter(module: nn.Module) -> Callable[[dict[str, Any]], Any] | None:
    """Return a function that reads a module's plain attributes; None if it has none."""
    names = [name for name, value in vars(module).items() if name not in PYTORCHS and _is_plain(value)]
    return operator.itemgetter(*names) if names else None


def _switch(value: Any) -> Any:
    """Return what of an attribute that is not plain may be a switch, without a reference to any object."""
    if isinstance(value, Tensor):
        is_plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
        return repr(value.detach().tolist()) if is_plain and value.numel() <= _MOST_ITEMS else None
    if isinstance(value, np.ndarray):
        return repr(value.tolist()) if value.size <= _MOST_ITEMS else None
    if type(value) in CONTAINERS or type(value) is tuple:
        items = values_in(value) if len(value) <= _MOST_ITEMS else ()
        return len(value), [item if _is_plain(item) else id(item) for item in items]
    return id(value)


def values_in(container: Any) -> Iterable[Any]:
    """Return the values of a dictionary, or the items of another container."""
    return container.values() if isinstance(container, dict) else container


def _users_hooks(modules: Sequence[nn.Module]) -> list[int]:
    """Return the numbers of all forward hooks except camkit's; PyTorch gives each hook its own number."""
    hooked = [hooks for kind in (_HOOKS, _PRE_HOOKS) for hooks in filter(None, map(kind, modules))]
    hooked += [_global_forward_hooks, _global_forward_pre_hooks]
    return [number for hooks in hooked for number, hook in list(hooks.items()) if not is_ours(hook)]
