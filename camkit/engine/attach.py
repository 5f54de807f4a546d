"""Hooks set on modules and tensors for a while: where they act, and that none is left when the while is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from camkit.engine.nested import tensors_in

ForwardHook = Callable[[nn.Module, list[Tensor], Any], Any]
"""``hook(module, tensors it was called with, output)``; what it returns, unless None, replaces the output."""

OutputHook = Callable[[Any], Any]
"""``hook(output)``; what it returns, unless None, replaces the output."""

InputHook = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""``hook(arguments, keyword arguments)`` of a module that is about to run."""

GradientHook = Callable[[Tensor], "Tensor | None"]
"""``hook(gradient)``; what it returns, unless None, replaces the gradient."""


def backward_pass() -> int:
    """Return the number of the backward pass the current thread is in, -1 outside."""
    return int(torch._C._current_graph_task_id())


@dataclass
class Scope:
    """The thread, and the backward pass if any, in which hooks were set.

    A module that runs while another backward pass is on runs once more, to compute again what activation checkpointing
    (``torch.utils.checkpoint``) didn't keep. ``elsewhere`` tells that a module ran in a thread the hooks don't act in.
    ``acts``, where there is one, says besides whether they act now.
    """

    thread: int = field(default_factory=threading.get_ident)
    inside: int = field(default_factory=backward_pass)
    elsewhere: bool = False
    acts: Callable[[], bool] | None = None

    def first_run(self) -> bool:
        """Tell whether what runs now is this thread's, and not a repetition during a backward pass."""
        if threading.get_ident() != self.thread:
            self.elsewhere = True
            return False
        return backward_pass() == self.inside and (self.acts is None or self.acts())

    def any_run(self) -> bool:
        """Tell whether what runs now is this thread's, or is done for it by a thread of PyTorch's own.

        PyTorch runs backward passes on GPUs in threads of its own, which don't say whose pass it is.
        """
        return threading.get_ident() == self.thread or (backward_pass() >= 0 and not _of_python())


def _of_python() -> bool:
    ours = threading.get_ident()
    known = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))
    return any(thread.ident == ours for thread in known)


class _Hook:
    """A function as a hook that isn't copied or saved with its module: a copy's does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # takes anything and does nothing, and is there without camkit too


def is_ours(hook: object) -> bool:
    """Tell whether a hook is one that camkit set."""
    return isinstance(hook, _Hook)


@contextmanager
def forward_hooks(hooks: Mapping[nn.Module, ForwardHook]) -> Iterator[None]:
    """Set forward hooks that act only on calls made by the current thread; all are removed at the end."""
    owner = threading.get_ident()

    def guarded(hook: ForwardHook) -> _Hook:
        def called(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            # Another thread that is just about to call a hook removed here may leave the keyword arguments out.
            if threading.get_ident() != owner:
                return None
            kwargs, output = rest
            return hook(module, list(tensors_in((args, kwargs))), output)

        return _Hook(called)

    with _attached(
        [(module, guarded(hook)) for module, hook in hooks.items()],
        lambda module, hook: module.register_forward_hook(hook, with_kwargs=True),
    ):
        yield


@contextmanager
def starts(modules: Iterable[nn.Module], note: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``note(module)`` in the current thread whenever one of the modules begins a forward pass."""
    owner = threading.get_ident()

    def guarded(module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001 - PyTorch passes it
        if threading.get_ident() == owner:
            note(module)

    with _attached([(module, _Hook(guarded)) for module in modules], nn.Module.register_forward_pre_hook):
        yield


@contextmanager
def output_hooks(hooks: Iterable[tuple[nn.Module, OutputHook]], acts: Callable[[], bool]) -> Iterator[None]:
    """Call each module's hooks, in their order, with what it returns, while ``acts()``.

    Lean, for hooks on every layer of a network in training: arguments aren't looked at.
    """

    def guarded(hook: OutputHook) -> _Hook:
        def called(_: nn.Module, __: Any, *rest: Any) -> Any:
            return hook(rest[-1]) if acts() else None

        return _Hook(called)

    with _attached([(module, guarded(hook)) for module, hook in hooks], nn.Module.register_forward_hook):
        yield


@contextmanager
def input_hooks(hooks: Iterable[tuple[nn.Module, InputHook]], acts: Callable[[], bool]) -> Iterator[None]:
    """Call each module's hooks with its arguments when it is about to run, while ``acts()``."""

    def guarded(hook: InputHook) -> _Hook:
        def called(_: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
            if acts():  # in this thread PyTorch passes the keyword arguments; see forward_hooks
                hook(args, *rest)

        return _Hook(called)

    with _attached(
        [(module, guarded(hook)) for module, hook in hooks],
        lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True),
    ):
        yield


@contextmanager
def _attached(hooks: Sequence[tuple[nn.Module, _Hook]], attach: Callable[[nn.Module, _Hook], object]) -> Iterator[None]:
    """Attach hooks for a while.

    They are found again by what they are and not by handles, which Ctrl-C may keep from being remembered.
    """
    try:
        try:
            for module, hook in hooks:
                attach(module, hook)
            yield
        finally:
            _detach(hooks)
    except KeyboardInterrupt:
        _detach(hooks)
        raise


def _detach(hooks: Sequence[tuple[nn.Module, _Hook]]) -> None:
    for module, hook in hooks:
        for there, with_keywords in (
            (module._forward_hooks, module._forward_hooks_with_kwargs),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        ):
            for key in [key for key, one in list(there.items()) if one is hook]:
                with_keywords.pop(key, None)
                there.pop(key, None)


class TensorHooks:
    """The hooks set on tensors, to be removed together; of those that died with their tensors nothing is kept."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._enough = _MANY

    def __len__(self) -> int:
        """Return how many hooks are remembered."""
        return len(self._handles)

    def add(self, tensor: Tensor, hook: GradientHook) -> None:
        """Have the hook called with each gradient of a tensor, as it is now: before what is done to it in place.

        Of a view that is then changed in place PyTorch has the gradients of its uses before, and no others.
        """
        self._handles.append(tensor.register_hook(hook))
        if len(self._handles) > self._enough:
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._enough = 2 * len(self._handles) + _MANY

    def remove(self) -> None:
        """Remove all of them."""
        while self._handles:
            self._handles[-1].remove()  # first, so that it isn't forgotten where Ctrl-C comes in between
            self._handles.pop()


_MANY = 256
"""Handles that may pile up, in a loop of many passes, before those of tensors that are gone are dropped."""


@contextmanager
def ordinary_gradients(model: nn.Module) -> Iterator[None]:
    """Have batch normalisations be given gradients that lie in memory in the ordinary order.

    On a CPU, PyTorch 2.15 differentiates one in evaluation mode wrongly for a single image whose gradient does not, as
    behind ``flatten(2).transpose(1, 2)``: the error is as large as the gradient.
    """

    def hook(_: nn.Module, __: list[Tensor], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(torch.Tensor.contiguous)

    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    with forward_hooks({module: hook for module in model.modules() if isinstance(module, kinds)}):
        yield


def contiguous_gradients(values: Tensor) -> None:
    """Have the batch normalisations that a tensor was computed with receive gradients in the ordinary order of memory.

    On a CPU, PyTorch 2.15 differentiates a batch normalisation in evaluation mode wrongly for a single image whose
    gradient lies in another order, as after ``flatten(2).transpose(1, 2)``: the error is as large as the gradient.
    """
    waiting = [values.grad_fn]
    known = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if "BatchNorm" in node.name():
            node.register_prehook(_contiguous)
        new = [before for before, _ in node.next_functions if before not in known]
        known.update(new)
        waiting += new


def _contiguous(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient.contiguous() for gradient in gradients)
