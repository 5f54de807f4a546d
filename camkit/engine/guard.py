"""Runs code on a model, and then restores the model, the random generators and Ctrl-C's handler, also with threads.

From top to bottom: ``undisturbed`` holds Ctrl-C back while camkit changes or restores a model; ``ModelRecord`` notices
that a model has changed between two calls; ``guarded`` saves a model before a pass, and restores it after the pass or
an exception.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.hooks import RemovableHandle

from camkit.engine.attach import is_ours, remove_hooks_since
from camkit.types import Precision

# Ctrl-C. Python may raise KeyboardInterrupt between any two instructions, even in a ``finally`` block. So each pass
# runs inside ``undisturbed``, where Ctrl-C waits, and its slow parts run inside ``interruptible``, where it is raised.

_PRESSES_UNTIL_FORCED = 3
"""The Ctrl-C with this number is always raised at once: the user has waited for something that hangs."""


class _CtrlC:
    """The state of Ctrl-C. Python handles signals only in the main thread, so only this thread uses it."""

    def __init__(self) -> None:
        self.blocks = self.presses = 0
        self.let_through = False
        self.handler: Any = None

    def receive(self, _: int, frame: FrameType | None) -> None:
        """Handle SIGINT: raise KeyboardInterrupt inside ``interruptible``, otherwise remember it."""
        self.presses += 1
        if self.let_through or self.presses >= _PRESSES_UNTIL_FORCED:
            self.deliver(frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        self.presses = 0
        self.handler(signal.SIGINT, frame)


_ctrl_c = _CtrlC()
_RECEIVE = _ctrl_c.receive


class undisturbed:  # noqa: N801 - used like a function
    """Hold Ctrl-C back in a block; it is raised at the block's end, or inside ``interruptible``.

    Blocks may be nested. In other threads, which Python never interrupts, the block does nothing.
    """

    def __enter__(self) -> None:
        """Begin to hold Ctrl-C back."""
        self._counted = False
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = _ctrl_c.handler if _ctrl_c.blocks else signal.getsignal(signal.SIGINT)
        if not callable(handler):  # the process ignores Ctrl-C, or ends at once
            return
        _ctrl_c.blocks += 1  # first, since Python's collector may run a whole block while the handler is set
        if _ctrl_c.blocks == 1:
            _ctrl_c.handler, _ctrl_c.let_through = handler, False
            try:
                signal.signal(signal.SIGINT, _RECEIVE)  # from here on Ctrl-C waits
            except BaseException:  # Ctrl-C
                _ctrl_c.blocks = 0
                raise
        self._let_through, _ctrl_c.let_through = _ctrl_c.let_through, False
        self._counted = True

    def __exit__(self, *_: object) -> None:
        """Raise the Ctrl-C that came in the block, if this is the outermost one."""
        if not self._counted:
            return
        try:
            # A handler that the model has set stays.
            if _ctrl_c.blocks == 1 and signal.getsignal(signal.SIGINT) is _RECEIVE:
                signal.signal(signal.SIGINT, _ctrl_c.handler)
        finally:
            _ctrl_c.let_through = self._let_through
            presses = _ctrl_c.presses if self._let_through or _ctrl_c.blocks == 1 else 0
            _ctrl_c.presses -= presses  # also if another Ctrl-C has just been raised here
            _ctrl_c.blocks -= 1  # last, since the collector may run a whole block before
        if presses:
            _ctrl_c.deliver()


class interruptible:  # noqa: N801 - used like a function
    """Raise Ctrl-C at once in a block inside ``undisturbed``; outside of one, nothing changes."""

    def __enter__(self) -> None:
        """Raise the Ctrl-C that has waited, and let later ones through."""
        self._lets_through = bool(_ctrl_c.blocks) and threading.get_ident() == threading.main_thread().ident
        if self._lets_through:
            self._before, _ctrl_c.let_through = _ctrl_c.let_through, True
            if _ctrl_c.presses:
                _ctrl_c.deliver()

    def __exit__(self, *_: object) -> None:
        """Hold Ctrl-C back again."""
        if self._lets_through:
            _ctrl_c.let_through = self._before


_PYTORCHS = frozenset(vars(nn.Module()))
"""Attributes that belong to PyTorch, such as the hooks. Other threads may set them during a pass."""

_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size])
"""Types of values that refer to no other object."""

PACKAGES = ("torch.nn.", "torchvision.", "timm.")
"""Packages whose networks use only PyTorch's random generators in evaluation mode, write to nothing but their own
buffers, and keep the pictures of a batch apart. The graphs of ``torch.fx`` run the user's code."""

_MODULES, _BUFFERS = operator.attrgetter("_modules"), operator.attrgetter("_buffers")
_HOOKS, _PRE_HOOKS = operator.attrgetter("_forward_hooks"), operator.attrgetter("_forward_pre_hooks")


class ModelRecord:
    """Remembers enough of a model to notice changes, without keeping the model alive.

    It holds modules by weak references, and the values of their plain attributes. camkit assumes
    that PyTorch's own ``forward`` methods change no attribute. Each call of an Explainer reads the record, so its loops
    use ``map`` and ``itertools``, which run in C.

    Attributes:
        keys: the identities of the modules.
        devices: the CPU, and each CUDA, MPS or XPU device that holds a tensor of the model.
        runs_own_code: True if hooks or modules of others than PyTorch, torchvision and timm run.
        changeable: the indices of the modules that a pass may change: all if ``runs_own_code``, else not PyTorch's.
        answers_alike: for each precision, whether the model gives the same results in both memory formats.
        may_resize: False if a pass showed that the model does not resize its input itself.
        reference_maps: what the model returned for reference pictures, with the ``weight_marks`` of that time.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self.keys = frozenset(map(id, modules))
        tensors = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
        devices = {tensor.device for tensor in tensors if tensor is not None}
        drawing = (device for device in devices if device.type in ("cuda", "mps", "xpu"))
        self.devices = frozenset([torch.device("cpu"), *drawing])
        authors = list(map(_author, modules))
        authored = [number for number, author in enumerate(authors) if author != "pytorch"]
        self._plain: list[tuple[int, Callable[[dict[str, Any]], Any]]] = []
        for number, module in enumerate(modules):
            names = [name for name, value in vars(module).items() if name not in _PYTORCHS and _is_plain(value)]
            if names:
                self._plain.append((number, operator.itemgetter(*names)))
        self._others = [
            (number, name)
            for number in authored
            for name, value in vars(modules[number]).items()
            if name not in _PYTORCHS and not _is_plain(value)
        ]
        *_, hooks = self._state = self._state_of(modules)
        self.runs_own_code = bool(hooks) or "user" in authors
        self.changeable = range(len(modules)) if self.runs_own_code else authored
        self.answers_alike: dict[Precision, bool] = {}
        self.may_resize = True
        self.reference_maps: dict[Hashable, tuple[list[int], Any]] = {}

    @classmethod
    def of_model(cls, model: nn.Module) -> ModelRecord:
        """Prepare the record of a model and all its submodules."""
        return cls(list(model.modules()))

    @property
    def placement(self) -> tuple[torch.device, torch.dtype]:
        """The device of the model's first parameter or buffer, and the type of its first floating-point parameter.

        The input must have both. A model without any takes float32 on the CPU.
        """
        modules, kinds = self.modules(), ("_parameters", "_buffers")
        tensors = (each for kind in kinds for module in modules for each in vars(module)[kind].values())
        parameters = (each for module in modules for each in module._parameters.values())
        device = next((each.device for each in tensors if each is not None), torch.device("cpu"))
        floating = (each.dtype for each in parameters if each is not None and each.is_floating_point())
        return device, next(floating, torch.float32)

    def modules(self) -> list[nn.Module]:
        """Return the modules that still exist, in the model's order."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def other_attributes(self, modules: Sequence[nn.Module]) -> list[Any]:
        """Return the tensors and objects that modules keep as attributes, unless PyTorch wrote their ``forward``."""
        tables = [(vars(modules[number]), name) for number, name in self._others]
        return [table[name] for table, name in tables if name in table]

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
        kinds: list[type[nn.Module]] = [type(module) for module in modules]
        tables = (*map(_MODULES, modules), *map(_BUFFERS, modules))
        hooked = [hooks for kind in (_HOOKS, _PRE_HOOKS) for hooks in filter(None, map(kind, modules))]
        hooked += [_global_forward_hooks, _global_forward_pre_hooks]
        return [
            kinds,
            [kind.forward for kind in dict.fromkeys(kinds)],
            list(map(len, attributes)),
            [getter(attributes[number]) for number, getter in self._plain],
            list(map(_switch, self.other_attributes(modules))),
            list(map(id, itertools.chain.from_iterable(map(dict.values, tables)))),
            # PyTorch gives each hook its own number.
            [number for hooks in hooked for number, hook in list(hooks.items()) if not is_ours(hook)],
        ]


def _author(module: nn.Module) -> str:
    """Return who wrote a module's ``forward``: "pytorch", another "package" that camkit knows, or the "user"."""
    written = "" if "forward" in vars(module) else f"{getattr(type(module).forward, '__module__', '')}."
    if written.startswith("torch.nn.modules."):
        return "pytorch"
    return "package" if f"{type(module).__module__}.".startswith(PACKAGES) and written.startswith(PACKAGES) else "user"


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _switch(value: Any) -> Any:
    """Return what of an attribute that is not plain may be a switch, without a reference to any object."""
    if isinstance(value, Tensor):
        is_plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
        # Longer tensors are tables or results, not switches.
        return repr(value.detach().tolist()) if is_plain and value.numel() <= 64 else None
    return id(value)


def weight_marks(modules: Iterable[nn.Module]) -> list[int]:
    """Return the identities and versions of parameters and buffers: others if one is replaced or changed in place.

    ``.data``, NumPy and batch normalisation change values without a new version.
    """
    held = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
    tensors = [tensor for tensor in held if tensor is not None]
    return [*map(id, tensors), *(-1 if tensor.is_inference() else tensor._version for tensor in tensors)]


Restore: TypeAlias = Callable[[], list[Tensor]]
"""Restores what was saved, and returns the parameters that were written to meanwhile."""


def _save_model(record: ModelRecord, new: frozenset[int]) -> Restore:
    """Save a model's modules, except those that another pass has saved, and put them into evaluation mode."""
    if new is not record.keys:
        record = ModelRecord([module for module in record.modules() if id(module) in new])
    modules = record.modules()
    changeable = [modules[number] for number in record.changeable]
    restore_tensors = _save_tensors(changeable, record.other_attributes(modules))
    flags = [module.training for module in modules]
    if any(flags):
        for module in modules:
            module.training = False
    restore_tables = _save_tables(changeable)

    def restore() -> list[Tensor]:
        restore_tables()
        for module, flag in zip(modules, flags, strict=True):
            if module.training != flag:
                module.training = flag
        return restore_tensors()

    return restore


def _save_tables(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Save which attributes, parameters, buffers and hooks modules have."""
    tables = [table for module in modules for table in (vars(module), module._parameters, module._buffers)]
    before, sizes, first_new_hook = _items_of(tables), list(map(len, tables)), RemovableHandle.next_id

    def restore() -> None:
        after = _items_of(tables)
        if len(after) == len(before) and all(map(operator.is_, after, before)):
            return
        names, values = iter(before[: sum(sizes)]), iter(before[sum(sizes) :])
        contents = [
            dict(zip(itertools.islice(names, size), itertools.islice(values, size), strict=True)) for size in sizes
        ]
        # Parameters and buffers go first, since a pass may have turned an attribute into one of these.
        for table, content in zip(reversed(tables), reversed(contents), strict=True):
            _restore_table(table, content)
        for module in modules:
            # A model that sets hooks in its first pass usually notes that in an attribute. Without the note, which is
            # gone now, the next pass would set them again. If no attribute has changed, the note may be elsewhere.
            remove_hooks_since(module, first_new_hook)

    return restore


def _items_of(tables: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the names, and then the values, of all tables in one flat list."""
    return [*itertools.chain.from_iterable(tables), *itertools.chain.from_iterable(map(dict.values, tables))]


def _restore_table(table: dict[str, Any], content: dict[str, Any]) -> None:
    """Restore a module's attributes, parameters or buffers, except what PyTorch manages."""
    if "_modules" not in table:  # parameters or buffers, whose order counts
        if list(table) != list(content) or list(map(id, table.values())) != list(map(id, content.values())):
            table.clear()
            table.update(content)
        return
    for name in table.keys() - _PYTORCHS - content.keys():
        del table[name]
    # A pass may also have turned an attribute into a module.
    kept = content.keys() - _PYTORCHS - table["_modules"].keys()
    table.update({name: content[name] for name in content if name in kept})


def _save_tensors(modules: Sequence[nn.Module], attributes: Sequence[Any]) -> Restore:
    """Save the values of buffers and of tensors among attributes, and which parameters require gradients."""
    parameters = [each for module in modules for each in module._parameters.values() if each is not None]
    required = [(parameter, parameter.requires_grad) for parameter in parameters]
    versions = [(each, each._version) for each in parameters if not each.is_inference()]
    buffers = [each for module in modules for each in module._buffers.values() if each is not None]
    # Larger tensors that a module keeps as attributes are caches, which would take as much memory again.
    held = [each for each in attributes if isinstance(each, Tensor) and each.numel() <= 1_000_000]
    tensors = [each for each in (*buffers, *held) if each.layout is torch.strided and not each.is_inference()]
    copies = [(tensor, tensor.clone(), tensor._version) for tensor in tensors]

    def restore() -> list[Tensor]:
        for parameter, was_required in required:
            if parameter.requires_grad != was_required:
                parameter.requires_grad_(was_required)
        for tensor, copy, version in copies:
            # Batch normalisation, ``.data`` and NumPy do not raise the version. Comparing values would wait for a GPU.
            if tensor._version == version and (not tensor.is_cpu or torch.equal(tensor, copy)):
                continue
            if tensor.shape != copy.shape:
                tensor.resize_(copy.shape)
            tensor.data.copy_(copy)  # a tensor with NaN always gets here; ``.data`` does not raise its version
            if not tensor.is_leaf:
                tensor.detach_()
        return [parameter for parameter, version in versions if parameter._version != version]

    return restore


def _save_process(parts: frozenset[Any]) -> Restore:
    """Save the state of the process: the random generators, and the switch that makes compiled modules run eagerly.

    ``parts`` says what to save: a device for PyTorch's generator on it, "python" for NumPy's and Python's generators,
    "compiler" for the switch. If other threads draw random numbers meanwhile, the same numbers are drawn again.
    """
    of_python = (np.random.get_state(), random.getstate()) if "python" in parts else None
    states: list[tuple[Any, dict[str, Any], Tensor]] = []
    for device in parts - {"python", "compiler"}:
        module: Any = torch if device.type == "cpu" else torch.get_device_module(device.type)
        which = {} if device.type in ("cpu", "mps") else {"device": device}  # these have one generator each
        states.append((module, which, module.get_rng_state(**which)))
    stance: Any = torch.compiler.set_stance("force_eager") if "compiler" in parts else nullcontext()
    stance.__enter__()  # compiled code ignores hooks that are set later

    def restore() -> list[Tensor]:
        stance.__exit__(None, None, None)
        for module, which, state in states:
            module.set_rng_state(state, **which)
        if of_python is not None:
            np.random.set_state(of_python[0])
            random.setstate(of_python[1])
        return []

    return restore


def generators() -> tuple[Any, ...]:
    """Return the states of the CPU's generators (PyTorch, NumPy, Python) in a form that can be compared."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), (numpy[1].tobytes(), *numpy[2:]), random.getstate()


# Several threads may use one model at the same time, or models that share modules, and all threads share the
# generators and the compiler's switch. The first pass that uses a state saves it, and the last one restores it.
# ``camkit.hooks`` blocks use only the switch: they do not restore the random generators.


@dataclass(eq=False)
class _Kept:
    """A saved state that passes may share: the keys of what was saved, and how many passes use it."""

    keys: frozenset[Hashable]
    restore: Restore
    users: int = 0


_in_use: list[_Kept] = []
_lock = threading.RLock()


def _enter(used: list[_Kept], *states: tuple[frozenset[Any], Callable[[frozenset[Any]], Restore]]) -> None:
    """Add to ``used`` every state that a pass uses, and save those that no other pass uses yet.

    Each entry of ``states`` is a set of keys, and a function that saves the state of the keys that it gets.
    """
    with _lock, torch.no_grad():
        for keys, save in states:
            found = [kept for kept in _in_use if not kept.keys.isdisjoint(keys)]
            new = keys.difference(*(kept.keys for kept in found)) if found else keys
            if new:
                found.append(_Kept(new, save(new)))
                _in_use.append(found[-1])
            for kept in found:
                kept.users += 1
                used.append(kept)


def _compiler() -> list[tuple[frozenset[str], Callable[[frozenset[Any]], Restore]]]:
    """Return the compiler's switch for ``_enter``; nothing if it is not imported yet, because that takes seconds."""
    return [(frozenset(["compiler"]), _save_process)] if "torch._dynamo" in sys.modules else []


def _leave(used: list[_Kept]) -> list[Tensor]:
    """Restore the states that no other pass uses, and return the parameters that were written to."""
    with _lock, torch.no_grad():
        for kept in used:
            kept.users -= 1
        ended = [kept for kept in used if not kept.users]
        used.clear()
        _in_use[:] = [kept for kept in _in_use if kept.users]
        return [tensor for kept in ended for tensor in kept.restore()]


@contextmanager
def guarded(model: nn.Module, record: ModelRecord | None = None, *, users_code: bool = True) -> Iterator[None]:
    """Put every submodule into evaluation mode, and restore the model and the random generators at the end.

    Ctrl-C waits in the block; run the model inside ``interruptible``. Compiled modules run eagerly. ``train()`` and
    ``eval()`` are not called, since models may override them.

    Args:
        model: any module.
        record: the model's record, if it is already prepared; a new one walks through all modules.
        users_code: True if functions of the user run inside, besides the model.
    """
    record = record or ModelRecord.of_model(model)
    used: list[_Kept] = []
    # NumPy's and Python's generators are saved only if code of the user's runs: saving them takes as long as a small
    # network's first layer.
    python = ["python"] if users_code or record.runs_own_code else []
    with undisturbed():
        try:
            modules = record.keys, functools.partial(_save_model, record)
            _enter(used, *_compiler(), (record.devices.union(python), _save_process), modules)
            yield
        finally:
            written = _leave(used)
        if written:
            identities = set(map(id, written))
            names = [name for name, parameter in model.named_parameters() if id(parameter) in identities]
            shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
            warnings.warn(
                f"the model's forward pass writes into its own parameters ({shown}), which camkit cannot undo; "
                "explain a copy of the model (copy.deepcopy)",
                stacklevel=2,
            )


def is_in_use(record: ModelRecord) -> bool:
    """Tell whether a pass is running on the model, or on a model that shares modules with it."""
    return any(not kept.keys.isdisjoint(record.keys) for kept in list(_in_use))


@contextmanager
def _using(*states: tuple[frozenset[Any], Callable[[frozenset[Any]], Restore]]) -> Iterator[None]:
    used: list[_Kept] = []
    try:
        with undisturbed():
            _enter(used, *states)
        yield
    finally:
        try:
            with undisturbed():
                _leave(used)
        finally:
            if used:  # Ctrl-C came just before it was held back
                _leave(used)


def same_randomness() -> AbstractContextManager[None]:
    """Restore the random generators at the end of a block: PyTorch's on the CPU, NumPy's and Python's."""
    return _using((frozenset([torch.device("cpu"), "python"]), _save_process))


def eagerly() -> AbstractContextManager[None]:
    """Run compiled modules eagerly in a block. Ctrl-C is raised at once in it, because it runs the user's own code."""
    return _using(*_compiler())


@contextmanager
def same_requirements(model: nn.Module) -> Iterator[None]:
    """Restore at the end which parameters require gradients, since models may freeze parameters in ``train()``."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, required in flags:
            if parameter.requires_grad != required:
                parameter.requires_grad_(required)
