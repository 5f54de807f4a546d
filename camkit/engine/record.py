"""What camkit remembers of a model's modules and buffers between passes."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from camkit.engine.attach import is_ours
from camkit.engine.switches import DEEPEST, different_places, same_state, state_of

PYTORCHS = frozenset(vars(nn.Module()))
"""Attributes that belong to PyTorch, such as the hooks. Other threads may set them during a pass."""

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, bytearray, set)
"""Containers that a forward pass may fill, and whose items are restored."""

_GEOMETRY = frozenset(
    [
        "align_corners", "batch_first", "ceil_mode", "dilation", "dim", "downscale_factor", "end_dim", "groups",
        "kernel_size", "mode", "norm_first", "output_padding", "output_size", "padding", "padding_mode",
        "scale_factor", "size", "start_dim", "stride", "unflattened_size", "upscale_factor",
    ]
)  # fmt: skip
"""The attributes of PyTorch's own modules that decide where their outputs' cells lie."""

_NO_SWITCHES = PYTORCHS | {"training"}
"""Attributes that are watched in another way, or change without changing a decision."""

_PACKAGES = ("torch.", "torchvision.", "timm.")
"""Packages whose networks use only PyTorch's random generators in evaluation mode, and write to nothing but buffers."""

_VERSION, _REQUIRES_GRAD = operator.attrgetter("_version"), operator.attrgetter("requires_grad")
_MODULES, _BUFFERS = operator.attrgetter("_modules"), operator.attrgetter("_buffers")
_HOOKS, _PRE_HOOKS = operator.attrgetter("_forward_hooks"), operator.attrgetter("_forward_pre_hooks")


class ModelRecord:
    """Remembers enough of a model to notice changes, without keeping the model alive.

    It holds modules by weak references. A module whose ``forward`` PyTorch wrote is expected to set no attributes; the
    attributes of all other modules, the ``authored`` ones, are restored after each pass. Each call reads the record, so
    its loops use ``map`` and ``itertools``, which run in C.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._types = list(map(type, modules))
        self._forwards = {kind: _forward_of(kind) for kind in dict.fromkeys(self._types)}
        self._authored = [number for number, module in enumerate(modules) if not _is_pytorchs(module)]
        authored = self.authored(modules)
        self._parents = [number for number, module in enumerate(modules) if module._modules]
        others = set(self._authored)
        self._holders = [number for number, module in enumerate(modules) if module._buffers or number in others]
        self._children = _children(_picked(modules, self._parents))
        self._buffers = _all_buffers(_picked(modules, self._holders))
        self._hooks = _users_hooks(modules)
        self._lengths = list(map(len, map(vars, modules)))
        getters = {number: _geometry_getter(module) for number, module in enumerate(modules) if number not in others}
        self._geometry = {number: getter for number, getter in getters.items() if getter is not None}
        self._values = self._geometries(modules)
        self._depth = DEEPEST
        self._state = self._switches(modules)
        self._grown = False
        self._changed_by_passes: frozenset[int] = frozenset()
        self._containers = [_container_names(module) for module in authored]
        self._first_tensors = _first_parameters(modules)
        self.keys = frozenset(map(id, modules))
        self.buffers = BufferCopier(modules, authored)
        tensors = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
        devices = {tensor.device for tensor in tensors if tensor is not None}
        self.devices = frozenset(device for device in devices if device.type in ("cuda", "mps", "xpu"))
        self.runs_own_code = bool(self._hooks) or not all(map(_is_packages, authored))

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
        return _picked(modules, self._authored)

    def buffer_holders(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Select the modules that have buffers, or may get some in a forward pass."""
        return _picked(modules, self._holders)

    def containers(self, authored: Sequence[nn.Module]) -> list[Any]:
        """Return the lists, dictionaries and sets that the authored modules keep as attributes."""
        return [
            vars(module)[name]
            for module, names in zip(authored, self._containers, strict=True)
            for name in names
            if name in vars(module)
        ]

    def is_current(self) -> bool:
        """Tell whether the modules, buffers, hooks and switches are the same as before; weights may have changed."""
        modules = self.modules()
        return (
            len(modules) == len(self._modules)
            and list(map(type, modules)) == self._types
            and all(_forward_of(kind) is forward for kind, forward in self._forwards.items())
            and _children(_picked(modules, self._parents)) == self._children
            and _are_same(_all_buffers(_picked(modules, self._holders)), self._buffers)
            and _users_hooks(modules) == self._hooks
            and self._same_switches(modules)
        )

    def _same_switches(self, modules: Sequence[nn.Module]) -> bool:
        try:
            return (
                list(map(len, map(vars, modules))) == self._lengths
                and self._geometries(modules) == self._values
                and same_state(self._state, self._switches(modules), self._changed_by_passes)
            )
        except (KeyError, RuntimeError, ValueError):  # an attribute was deleted, or became a tensor
            return False

    def _geometries(self, modules: Sequence[nn.Module]) -> list[Any]:
        return [getter(vars(modules[number])) for number, getter in self._geometry.items()]

    def note_what_a_pass_changes(self) -> bool:
        """Ignore from now on what has changed since the last note; only a pass may have run in between.

        A pass may count its runs in an object of the user, for example. If it added something, another pass must show
        what changes; if it adds something again, only the attributes of the modules themselves are watched.

        Returns:
            True if no further pass is needed.
        """
        state = self._switches(self.modules())
        is_stable = len(state) == len(self._state)
        if is_stable:
            self._changed_by_passes |= different_places(self._state, state)
        elif self._grown:
            self._depth, self._changed_by_passes = 0, frozenset()
            self._state, is_stable = self._switches(self.modules()), True
        else:
            self._state, self._grown = state, True
        return is_stable

    def _switches(self, modules: Sequence[nn.Module]) -> list[Any]:
        return state_of(self.authored(modules), _NO_SWITCHES, self._depth)


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
    names = f"{type(module).__module__}.", f"{_forward_of(type(module)).__module__}."
    return "forward" not in vars(module) and all(name.startswith(_PACKAGES) for name in names)


def _picked(modules: Sequence[nn.Module], numbers: Sequence[int]) -> list[nn.Module]:
    return list(map(modules.__getitem__, numbers))


def _forward_of(kind: type[nn.Module]) -> Any:
    return kind.forward


def _is_pytorchs(module: nn.Module) -> bool:
    """Tell whether PyTorch wrote a module's ``forward``, which then sets no attributes."""
    forward = _forward_of(type(module))
    return "forward" not in vars(module) and str(getattr(forward, "__module__", "")).startswith("torch.nn.modules")


def _children(parents: Iterable[nn.Module]) -> list[int]:
    """Return the identities of the modules' direct children."""
    return list(map(id, itertools.chain.from_iterable(map(dict.values, map(_MODULES, parents)))))


def _all_buffers(holders: Iterable[nn.Module]) -> list[Tensor | None]:
    return list(itertools.chain.from_iterable(map(dict.values, map(_BUFFERS, holders))))


def _are_same(tensors: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))


def _users_hooks(modules: Sequence[nn.Module]) -> list[int]:
    """Return the numbers of all forward hooks except camkit's; PyTorch gives each hook its own number."""
    hooked = [hooks for kind in (_HOOKS, _PRE_HOOKS) for hooks in filter(None, map(kind, modules))]
    hooked += [_global_forward_hooks, _global_forward_pre_hooks]
    return [number for hooks in hooked for number, hook in list(hooks.items()) if not is_ours(hook)]


def _container_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, value in vars(module).items() if type(value) in CONTAINERS and name not in PYTORCHS)


def _geometry_getter(module: nn.Module) -> Callable[[dict[str, Any]], Any] | None:
    """Return a function that reads a module's geometry from its attributes; None if it has none."""
    names = _GEOMETRY & vars(module).keys()
    return operator.itemgetter(*names) if names else None


_FEW_VALUES = 1024
"""Parameters and buffers with at most so many values are compared by value: gates and switches are small, and writing
to ``.data`` does not raise a tensor's version."""


class WeightMarks:
    """Marks that show whether parameters or buffers have been written to or replaced."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        tensors = [
            tensor
            for module in modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        ordinary = [tensor for tensor in tensors if not tensor.is_inference()]
        self._marks = [*map(id, tensors), *map(_VERSION, ordinary)]
        groups: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            if tensor.numel() <= _FEW_VALUES and _can_be_joined(tensor.detach()):
                groups[tensor.dtype, tensor.device].append(tensor.detach().view(-1))
        self._values = [torch.cat(parts) for parts in groups.values()]

    def __eq__(self, other: object) -> bool:
        """Tell whether nothing has been written to in between."""
        if not isinstance(other, WeightMarks) or self._marks != other._marks:
            return False
        return all(map(same_values, self._values, other._values))

    __hash__ = None  # type: ignore[assignment]


class BufferCopier:
    """Copies all buffers of a model at once, with one operation per type and device instead of one per buffer.

    It also detects whether a pass wrote into the buffers. On a CPU it compares values, since PyTorch's batch
    normalisation, ``.data`` and NumPy write without raising a tensor's version. On other devices a comparison would
    wait for the device, so it compares versions there, and also for the counters of PyTorch's own modules.
    """

    def __init__(self, modules: Sequence[nn.Module], authored: Sequence[nn.Module]) -> None:
        self.tensors = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        of_authors = {id(buffer) for module in authored for buffer in module._buffers.values()}
        groups: defaultdict[Any, list[int]] = defaultdict(list)
        for number, tensor in enumerate(self.tensors):
            key = (tensor.dtype, tensor.device, id(tensor) in of_authors)
            groups[key if _can_be_joined(tensor) else number].append(number)
        self._joined = [numbers for numbers in groups.values() if len(numbers) > 1]
        self._single = [numbers[0] for numbers in groups.values() if len(numbers) == 1]
        self._views = [[self.tensors[number].detach().view(-1) for number in numbers] for numbers in self._joined]
        self._sizes = [list(map(Tensor.numel, views)) for views in self._views]
        firsts = [self.tensors[numbers[0]] for numbers in self._joined]
        self._compared = [
            first.device.type == "cpu" and (first.is_floating_point() or id(first) in of_authors) for first in firsts
        ]
        compared = zip(self._joined, self._compared, strict=True)
        by_value = {number for numbers, is_compared in compared if is_compared for number in numbers}
        others = [tensor for number, tensor in enumerate(self.tensors) if number not in by_value]
        self._versioned = [tensor for tensor in others if not tensor.is_inference()]
        self._learning = [tensor for tensor in self.tensors if id(tensor) in of_authors]
        self._pointers = list(itertools.chain.from_iterable([[self.tensors[n] for n in ns] for ns in self._joined]))
        self._addresses = list(map(Tensor.data_ptr, self._pointers))

    def marks(self) -> list[Any]:
        """Return the versions and flags that show, besides the values, that a buffer was written to."""
        return [*map(_VERSION, self._versioned), *map(_REQUIRES_GRAD, self._learning)]

    def copy(self) -> BufferCopies:
        """Return copies of all buffers."""
        if list(map(Tensor.data_ptr, self._pointers)) != self._addresses:  # ``.data`` has given a buffer other memory
            return BufferCopies([], [], [], dict(enumerate(tensor.detach().clone() for tensor in self.tensors)))
        single = {number: self.tensors[number].detach().clone() for number in self._single}
        return BufferCopies(self._joined, self._sizes, [torch.cat(views) for views in self._views], single)

    def are_equal(self, copies: BufferCopies) -> bool:
        """Tell whether the compared buffers still have the copied values."""
        if len(copies.flat) != len(self._views):
            return False
        joined = all(
            not is_compared or torch.equal(flat, torch.cat(views))
            for is_compared, flat, views in zip(self._compared, copies.flat, self._views, strict=True)
        )
        return joined and all(
            values.device.type != "cpu"
            or values.layout is not torch.strided
            or same_values(self.tensors[number], values)
            for number, values in copies.single.items()
        )


def _can_be_joined(tensor: Tensor) -> bool:
    """Tell whether a buffer can be copied together with others, as part of a flat tensor."""
    ordinary = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return ordinary and tensor.is_contiguous() and not tensor.is_inference()


class BufferCopies:
    """Copies of the values of a model's buffers, many of them joined into flat tensors."""

    def __init__(
        self, joined: list[list[int]], sizes: list[list[int]], flat: list[Tensor], single: dict[int, Tensor]
    ) -> None:
        self._joined = joined
        self._sizes = sizes
        self.flat = flat
        self.single = single

    def values(self) -> dict[int, Tensor]:
        """Return the values of each buffer by its number; those that were copied together are flat."""
        values = dict(self.single)
        for numbers, flat, sizes in zip(self._joined, self.flat, self._sizes, strict=True):
            values.update(zip(numbers, flat.split(sizes), strict=True))
        return values


def same_values(tensor: Tensor, values: Tensor) -> bool:
    """Tell whether a tensor has the given values; NaN equals NaN."""
    if tensor.shape != values.shape:
        return False
    if tensor.layout is not torch.strided:
        tensor, values = tensor.to_dense(), values.to_dense()
    values = values.to(tensor.device)
    if torch.equal(tensor, values):
        return True
    both_nan = tensor.isnan() & values.isnan()
    return torch.equal(tensor.masked_fill(both_nan, 0), values.masked_fill(both_nan, 0))


def with_values(tensor: Tensor, values: Tensor, *, required: bool) -> Tensor:
    """Return a tensor with its former values, or a new tensor if it can no longer hold them."""
    try:
        if tensor.shape != values.shape:
            tensor.resize_(values.shape)
        tensor.copy_(values)
        if tensor.requires_grad and not required:
            tensor.detach_()
    except Exception:  # the model made it unwritable
        return values.clone().requires_grad_(required)
    return tensor
