"""What camkit remembers of a model between passes, so that it notices when its modules or its weights have changed."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from camkit.engine.attach import is_ours

PYTORCHS = frozenset(vars(nn.Module()))
"""Attributes that belong to PyTorch, such as the hooks. Other threads may set them during a pass."""

_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size])
"""Types of values that refer to no other object."""

_MOST_ITEMS = 64
"""Longer tensors are tables or results, not switches."""

_PACKAGES = ("torch.nn.", "torchvision.", "timm.")
"""Packages whose networks use only PyTorch's random generators in evaluation mode, and write to nothing but their own
buffers. The graphs of ``torch.fx`` run the user's code."""

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
        self.runs_own_code = bool(_users_hooks(modules)) or not all(
            _is_packages(modules[number]) for number in self._authored
        )
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
    def placement(self) -> tuple[torch.device, torch.dtype]:
        """The device of the model's first parameter or buffer, and the type of its first floating-point parameter.

        The input must have both. A model without any takes float32 on the CPU.
        """
        first, floating = map(_tensor_at, self._first_tensors)
        device = torch.device("cpu") if first is None else first.device
        return device, torch.float32 if floating is None else floating.dtype

    def modules(self) -> list[nn.Module]:
        """Return the modules that still exist, in the model's order."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def written(self, modules: Sequence[nn.Module]) -> tuple[list[nn.Module], list[Any]]:
        """Select, from the result of ``modules()``, those that others than PyTorch wrote.

        Returns:
            These modules, and their attributes that are not plain values: tensors and objects.
        """
        tables = [(vars(modules[number]), name) for number, name in self._others]
        return [modules[number] for number in self._authored], [table[name] for table, name in tables if name in table]

    def is_current(self) -> bool:
        """Tell whether modules, buffers, hooks and attributes are the same as before; weights may have changed.

        Globals, closures, and the contents of containers and of the user's own objects are not compared.
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
            list(map(_switch, self.written(modules)[1])),
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
    return id(value)


def _users_hooks(modules: Sequence[nn.Module]) -> list[int]:
    """Return the numbers of all forward hooks except camkit's; PyTorch gives each hook its own number."""
    hooked = [hooks for kind in (_HOOKS, _PRE_HOOKS) for hooks in filter(None, map(kind, modules))]
    hooked += [_global_forward_hooks, _global_forward_pre_hooks]
    return [number for hooks in hooked for number, hook in list(hooks.items()) if not is_ours(hook)]


class WeightMarks:
    """The identities and versions of parameters and buffers, which show whether they were written to or replaced.

    Without ``buffers``, only parameters count: some models write a buffer in each pass.
    """

    def __init__(self, modules: Iterable[nn.Module], *, buffers: bool = True) -> None:
        self._buffers = buffers
        self._marks = _marks_of(modules, buffers=buffers)

    def still_hold(self, modules: Iterable[nn.Module]) -> bool:
        """Tell whether nothing has been written to in between."""
        return _marks_of(modules, buffers=self._buffers) == self._marks


def _marks_of(modules: Iterable[nn.Module], *, buffers: bool) -> list[int]:
    held = [
        tensor
        for module in modules
        for tensor in (*module._parameters.values(), *(module._buffers.values() if buffers else ()))
    ]
    tensors = [tensor for tensor in held if tensor is not None]
    return [*map(id, tensors), *versions_of(tensors)]


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the number that PyTorch raises with each change in place; -1 for inference tensors, which have none."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
