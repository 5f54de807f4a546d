"""Temporary hooks on modules and tensors, and the tensors that modules take and return.

Modules take and return nested structures: tensors in tuples, lists, dictionaries and dataclasses. Hooks act only in the
thread that set them, or where ``acts`` says, and are removed at the end of their block.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

Make: TypeAlias = Callable[[Tensor], Any]
"""Computes a value from a tensor, such as a copy or a statistic."""

Keys: TypeAlias = tuple[Any, ...]
"""The keys that lead from a structure to an item in it."""


_PLAIN = (bool, int, float, complex, str, type(None))
"""Types of values that hold no tensors."""


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and items of a structure; None for any other value, such as a tensor."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    return None


def _with_items(value: Any, items: list[tuple[Any, Any]]) -> Any:
    """Return a copy of a structure with other items."""
    if isinstance(value, tuple):
        return _tuple_like(value, [item for _, item in items])
    if type(value) is list:
        return [item for _, item in items]
    made = copy(value)
    _set_items(made, items)
    return made


def _set_items(value: Any, items: list[tuple[Any, Any]]) -> None:
    for key, item in items:
        if isinstance(value, (dict, list)):
            value[key] = item
        else:
            object.__setattr__(value, key, item)


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(value)
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make(items)
    if kind.__module__ == "torch.return_types":  # such as the result of torch.max
        return kind(items)
    return tuple(items) if kind in (tuple, torch.Size) else tuple.__new__(kind, items)


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a copy of a structure with each item replaced by ``leaf(item)``.

    >>> mapped((1, [2, {"a": 3}]), lambda number: 10 * number)
    (10, [20, {'a': 30}])
    """
    items = _items(value)
    return leaf(value) if items is None else _with_items(value, [(key, mapped(item, leaf)) for key, item in items])


def replaced(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a structure with each item replaced by ``leaf(item)``.

    Lists, dictionaries and objects are changed in place, because other code may hold them too.

    >>> rows = [1, 2]
    >>> replaced((rows, 3), lambda number: 10 * number), rows
    (([10, 20], 30), [10, 20])
    """
    items = _items(value)
    if items is None:
        return leaf(value)
    new = [(key, replaced(item, leaf)) for key, item in items]
    if all(item is old for (_, item), (_, old) in zip(new, items, strict=True)):
        return value
    if isinstance(value, tuple):
        return _with_items(value, new)
    _set_items(value, new)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a module's arguments or output."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for _, item in _items(value) or ():
        if not isinstance(item, _PLAIN):  # most of the arguments of PyTorch's operations are
            found += [item] if isinstance(item, Tensor) else tensors_in(item)
    return found


def feature_tensor(output: Any) -> tuple[Keys, Tensor] | None:
    """Return the keys that lead to the tensor with a layer's feature maps, and that tensor.

    It is the first floating-point tensor with at least three dimensions; None if the output contains none.

    >>> import torch
    >>> path, maps = feature_tensor((torch.zeros(1, 5), [torch.zeros(1, 8, 7, 7)]))
    >>> path, tuple(maps.shape)
    ((1, 0), (1, 8, 7, 7))
    """
    if isinstance(output, Tensor):
        return ((), output) if output.dim() >= 3 and output.is_floating_point() else None
    for key, item in _items(output) or ():
        found = feature_tensor(item)
        if found is not None:
            return (key, *found[0]), found[1]
    return None


def with_tensor(value: Any, path: Keys, tensor: Tensor) -> Any:
    """Return a copy of a structure with another tensor at ``path``."""
    if not path:
        return tensor
    key, rest = path[0], path[1:]
    return _with_items(
        value, [(name, with_tensor(item, rest, tensor) if name == key else item) for name, item in _items(value) or ()]
    )


def with_tensors(value: Any, change: Make) -> Any:
    """Return a copy of a structure with each tensor replaced by ``change(tensor)``."""
    return mapped(value, lambda item: change(item) if isinstance(item, Tensor) else item)


def plain(value: Any) -> Any:
    """Return a number, a string or a boolean unchanged; None for any other object, since it may hold tensors."""
    return value if isinstance(value, _PLAIN) else None


def precise(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it is so already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether writing into one tensor may change the other."""
    try:
        first, second = one.untyped_storage(), other.untyped_storage()
        # In a trace, all addresses are 0.
        return first._cdata == second._cdata or first.data_ptr() == second.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # sparse tensors, for example, have no single storage
        return one is other


ForwardHook = Callable[[nn.Module, list[Tensor], Any], Any]
"""``hook(module, argument tensors, output)``; a result other than None replaces the output."""

BeforeHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
AfterHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]

GradientHook = Callable[[Tensor], "Tensor | None"]
"""``hook(gradient)``; a result other than None replaces the gradient."""


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
    own = {id(hook): module for module, hook in (*first, *last)}
    try:
        try:
            for module, hook in first:
                module.register_forward_pre_hook(hook, with_kwargs=True)
            for module, hook in last:
                module.register_forward_hook(hook, with_kwargs=True)
            yield
        finally:
            _remove(own.values(), lambda _, hook: id(hook) in own)
    except KeyboardInterrupt:
        _remove(own.values(), lambda _, hook: id(hook) in own)
        raise


def remove_hooks_since(module: nn.Module, first: int) -> None:
    """Remove the forward hooks that were set since PyTorch gave a hook the number ``first``, except camkit's own."""
    _remove([module], lambda number, hook: number >= first and not is_ours(hook))


def _remove(modules: Iterable[nn.Module], wanted: Callable[[int, object], bool]) -> None:
    """Remove hooks by their numbers, which differ between all hooks of a process."""
    for module in modules:
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


def backward_pass() -> int:
    """Return the number of the backward pass that the current thread runs; -1 if it runs none."""
    return int(torch._C._current_graph_task_id())


def nodes_of_graph() -> int:
    """Return how many nodes the current thread has added to graphs so far; later nodes have this number or more."""
    return int(torch._C._autograd._get_sequence_nr())


def own_output(output: Any, started: int) -> Any:
    """Return a layer's output in which an alias stands for each tensor that other code uses too.

    The gradient of a tensor is that of all its uses. A layer may return a tensor that existed before the call, as
    ``nn.Identity`` does, or one tensor twice. An alias has the same memory, so in-place changes show in both, but only
    the uses of this output add to its gradient. What the layer changed in place is its own.

    Args:
        output: what the layer returned.
        started: ``nodes_of_graph()`` when the call began.
    """
    if not torch.is_grad_enabled():
        return output
    is_tensor = isinstance(output, Tensor)
    positions = Counter() if is_tensor else Counter(map(id, tensors_in(output)))

    def owned(item: Any) -> Any:
        # Operations on other types of tensors may return anything.
        if type(item) not in (Tensor, nn.Parameter) or not item.requires_grad or item.layout is not torch.strided:
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


def aliased_tensor(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a tensor is an alias of; None if it is not an alias but a tensor or view of its own."""
    base = tensor._base
    if base is None or base.is_leaf or base.shape != tensor.shape or base.stride() != tensor.stride():
        return None
    return base


Changed: TypeAlias = Callable[[], bool]
"""Tells whether a tensor, or another with the same memory, was changed in place since this was made."""


def changes_of(tensor: Tensor) -> Changed:
    """Return a function that tells whether a tensor was changed in place since this call; its graph is not kept."""
    watched = tensor.detach()
    version = None if watched.is_inference() else watched._version
    return lambda: version is not None and watched._version != version


def hook_gradient(tensor: Tensor, hook: GradientHook) -> list[torch.utils.hooks.RemovableHandle]:
    """Have a hook called with the gradient of a tensor in its present state, before later in-place changes.

    If a view is changed in place later, PyTorch returns only the gradients of its uses before the change. If the view
    is an alias, the hook then gets the gradient of the original tensor instead, because that includes the change.
    """
    # In PyTorch 2.9 to 2.14, ``register_hook`` crashes on a view that was changed through an alias, unless ``grad_fn``
    # is read first (github.com/pytorch/pytorch/issues/196459).
    tensor.grad_fn  # noqa: B018
    original = aliased_tensor(tensor)
    if original is None:
        return [tensor.register_hook(hook)]
    changed = changes_of(original)
    return [
        tensor.register_hook(lambda gradient: None if changed() else hook(gradient)),
        original.register_hook(lambda gradient: hook(gradient) if changed() else None),
    ]


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
            node.register_prehook(lambda gradients: with_tensors(gradients, Tensor.contiguous))
