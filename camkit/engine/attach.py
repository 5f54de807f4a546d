"""Temporary hooks on modules and tensors: they act in the right thread only, and all are removed at the end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from camkit.engine.nested import replaced, tensors_in

ForwardHook = Callable[[nn.Module, list[Tensor], Any], Any]
"""``hook(module, argument tensors, output)``; a result other than None replaces the output."""

BeforeHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
AfterHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]

GradientHook = Callable[[Tensor], "Tensor | None"]
"""``hook(gradient)``; a result other than None replaces the gradient."""


def backward_pass() -> int:
    """Return the number of the backward pass that the current thread runs; -1 if it runs none."""
    return int(torch._C._current_graph_task_id())


@dataclass
class Scope:
    """The thread, and the backward pass if any, in which hooks were set.

    A module that runs during another backward pass repeats its forward pass, to recompute what activation checkpointing
    (``torch.utils.checkpoint``) did not keep. ``elsewhere`` is True after a module ran in a thread where the hooks do
    not act. ``acts``, if given, can switch the hooks off for a while.
    """

    thread: int = field(default_factory=threading.get_ident)
    inside: int = field(default_factory=backward_pass)
    elsewhere: bool = False
    acts: Callable[[], bool] | None = None

    def first_run(self) -> bool:
        """Tell whether the current call belongs to this thread and is not a repetition during a backward pass."""
        if threading.get_ident() != self.thread:
            self.elsewhere = True
            return False
        return backward_pass() == self.inside and (self.acts is None or self.acts())

    def any_run(self) -> bool:
        """Tell whether the current call belongs to this thread, or to a thread of PyTorch's that may work for it.

        PyTorch runs backward passes on GPUs in its own threads, which do not tell whose pass they run.
        """
        if threading.get_ident() == self.thread or (backward_pass() >= 0 and not _of_python()):
            return True
        self.elsewhere = True
        return False


def _of_python() -> bool:
    """Tell whether Python started the current thread."""
    current = threading.get_ident()
    threads = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))
    return any(thread.ident == current for thread in threads)


@dataclass(eq=False)
class _Hook:
    """Wraps a function as a hook that is not copied or saved with its module: in a copy it does nothing."""

    function: Callable[..., Any]
    acts: Callable[[], bool] | None
    thread: int = field(default_factory=threading.get_ident)

    def __call__(self, *given: Any) -> Any:
        # Another thread may call the hook without keyword arguments, while this thread is removing it.
        acts = threading.get_ident() == self.thread if self.acts is None else self.acts()
        return self.function(*given) if acts else None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # accepts any arguments, does nothing, and loads without camkit


def is_ours(hook: object) -> bool:
    """Tell whether camkit set a hook."""
    return isinstance(hook, _Hook)


@contextmanager
def hooked(
    before: Iterable[tuple[nn.Module, BeforeHook]] = (),
    after: Iterable[tuple[nn.Module, AfterHook]] = (),
    acts: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Call functions before and after modules run in the block, in the order given.

    They are found again by identity and not by handles, since Ctrl-C may come before a handle is stored.

    Args:
        before: modules and their ``hook(module, arguments, keyword arguments)``.
        after: modules and their ``hook(module, arguments, keyword arguments, output)``; a result other than None
            replaces the output.
        acts: tells of a call whether the hooks act in it; None means in the current thread.
    """
    first = [(module, _Hook(function, acts)) for module, function in before]
    last = [(module, _Hook(function, acts)) for module, function in after]
    try:
        try:
            for module, hook in first:
                module.register_forward_pre_hook(hook, with_kwargs=True)
            for module, hook in last:
                module.register_forward_hook(hook, with_kwargs=True)
            yield
        finally:
            _detach([*first, *last])
    except KeyboardInterrupt:
        _detach([*first, *last])
        raise


def _detach(hooks: Sequence[tuple[nn.Module, _Hook]]) -> None:
    own = {id(hook) for _, hook in hooks}
    for module in {module for module, _ in hooks}:
        _remove(module, lambda _, hook: id(hook) in own)


def remove_hooks_since(module: nn.Module, first: int) -> None:
    """Remove the forward hooks that were set since PyTorch gave a hook the number ``first``, except camkit's own."""
    _remove(module, lambda number, hook: number >= first and not is_ours(hook))


def _remove(module: nn.Module, wanted: Callable[[int, object], bool]) -> None:
    """Remove hooks by their numbers, which differ between all hooks of a process."""
    hooks = module._forward_hooks, module._forward_pre_hooks
    with_keywords = module._forward_hooks_with_kwargs, module._forward_pre_hooks_with_kwargs
    numbers = [number for table in hooks for number, hook in list(table.items()) if wanted(number, hook)]
    for number in numbers:
        for table in (*with_keywords, module._forward_hooks_always_called, *hooks):
            table.pop(number, None)


def forward_hooks(hooks: Mapping[nn.Module, ForwardHook]) -> AbstractContextManager[None]:
    """Call a hook after each of the modules runs in the block, in the current thread."""

    def given(hook: ForwardHook) -> AfterHook:
        return lambda module, args, kwargs, output: hook(module, tensors_in((args, kwargs) if kwargs else args), output)

    return hooked(after=[(module, given(hook)) for module, hook in hooks.items()])


def starts(modules: Iterable[nn.Module], note: Callable[[nn.Module], None]) -> AbstractContextManager[None]:
    """Call ``note(module)`` whenever one of the modules starts a forward pass in the current thread."""
    return hooked(before=[(module, lambda started, _, __: note(started)) for module in modules])


def nodes_of_graph() -> int:
    """Return how many nodes the current thread has added to graphs so far; later nodes have this number or more."""
    return int(torch._C._autograd._get_sequence_nr())


@contextmanager
def noting_starts(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, int]]:
    """Yield a dictionary that holds ``nodes_of_graph()`` at the start of each module's latest call."""
    started: dict[nn.Module, int] = {}

    def note(module: nn.Module) -> None:
        started[module] = nodes_of_graph()

    with starts(modules, note):
        yield started


def own_output(output: Any, started: int) -> Any:
    """Return a layer's output in which an alias stands for each tensor that other code uses too.

    The gradient of a tensor is that of all its uses. A layer may return a tensor that existed before the call, as
    ``nn.Identity`` does, or one tensor twice. An alias has the same memory, so in-place changes show in both, but only
    the uses of this output add to its gradient. What the layer changed in place is its own.

    Args:
        output: what the layer returned.
        started: the layer's entry in ``noting_starts``.
    """
    if not torch.is_grad_enabled():
        return output
    is_tensor = isinstance(output, Tensor)
    positions = Counter() if is_tensor else Counter(map(id, tensors_in(output)))

    def owned(item: Any) -> Any:
        if type(item) not in _ORDINARY or not item.requires_grad or item.layout is not torch.strided:
            return item
        node = item.grad_fn
        if node is not None and node._sequence_nr() >= started and positions[id(item)] < 2:
            return item
        if not is_tensor and isinstance(item, nn.Parameter):
            return item  # the structure may be the module's own list of parameters
        alias = item[...]
        vars(alias).update(vars(item))
        return alias

    return owned(output) if is_tensor else replaced(output, owned)


def differentiable(output: Any) -> list[Tensor]:
    """Return the tensors in a layer's output whose gradient is the layer's.

    While gradients are off, there are none: the tensors that require gradients come from elsewhere.
    """
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad] if torch.is_grad_enabled() else []


_ORDINARY = (Tensor, nn.Parameter)
"""Types of tensors that an alias can stand for: operations on other types may return anything."""


def aliased_tensor(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a tensor is an alias of; None if it is not an alias but a tensor or view of its own."""
    base = tensor._base
    if base is None or base.is_leaf or base.shape != tensor.shape or base.stride() != tensor.stride():
        return None
    return base


@dataclass(eq=False)
class State:
    """Tells whether a tensor was changed in place since this was made."""

    _tensor: Tensor
    _version: int

    @classmethod
    def of(cls, tensor: Tensor) -> State:
        """Remember a tensor's present state, without its graph."""
        return cls(tensor.detach(), 0 if tensor.is_inference() else tensor._version)

    def changed(self) -> bool:
        """Tell whether the tensor, or another with the same memory, was changed in place."""
        return not self._tensor.is_inference() and self._tensor._version != self._version


def hook_gradient(tensor: Tensor, hook: GradientHook) -> list[torch.utils.hooks.RemovableHandle]:
    """Have a hook called with the gradient of a tensor in its present state, before later in-place changes.

    If a view is changed in place later, PyTorch returns only the gradients of its uses before the change. If the view
    is an alias, the hook then gets the gradient of the original tensor instead, because that includes the change.
    """
    original = aliased_tensor(tensor)
    if original is None:
        return [tensor.register_hook(hook)]
    state = State.of(original)
    return [
        tensor.register_hook(lambda gradient: None if state.changed() else hook(gradient)),
        original.register_hook(lambda gradient: hook(gradient) if state.changed() else None),
    ]


class TensorHooks:
    """Hooks on tensors that are removed together. Hooks whose tensors are gone are forgotten."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._cleanup_length = _MANY

    def __len__(self) -> int:
        """Return how many hooks are remembered."""
        return len(self._handles)

    def add(self, tensor: Tensor, hook: GradientHook) -> None:
        """Have the hook called with each gradient of a tensor, as ``hook_gradient`` says."""
        self._handles += hook_gradient(tensor, hook)
        if len(self._handles) > self._cleanup_length:
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._cleanup_length = 2 * len(self._handles) + _MANY

    def remove(self) -> None:
        """Remove all of them."""
        while self._handles:
            self._handles[-1].remove()  # before it is forgotten, in case Ctrl-C comes in between
            self._handles.pop()


_MANY = 256
"""How many handles may accumulate before those of deleted tensors are dropped: a few passes' worth, some kilobytes."""


def nodes_behind(tensor: Tensor) -> set[Node]:
    """Return the nodes of the autograd graph that a tensor was computed by."""
    waiting = [tensor.grad_fn]
    found: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [before for before, _ in node.next_functions]
    return found


def contiguous_gradients(values: Tensor) -> None:
    """Make gradients contiguous before they reach the batch normalisations that a tensor was computed with.

    On a CPU, PyTorch 2.15 differentiates a batch normalisation in evaluation mode wrongly for a single image whose
    gradient is not contiguous, as after ``flatten(2).transpose(1, 2)``: the error is as large as the gradient.
    """
    for node in nodes_behind(values):
        if "BatchNorm" in node.name():
            node.register_prehook(_contiguous)


def _contiguous(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient.contiguous() for gradient in gradients)
