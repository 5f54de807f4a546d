"""What layers are given, what they return and the gradients of that, recorded while the user's own code runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from camkit.engine.attach import TensorHooks, input_hooks, output_hooks
from camkit.engine.nested import Make, mapped, plain, shares_memory
from camkit.engine.restore import eagerly
from camkit.hooks.calls import Call, Recording
from camkit.layers.names import Selector, select_layers


@contextmanager
def record(
    model: nn.Module,
    layers: Selector | Iterable[Selector],
    *,
    inputs: bool = False,
    outputs: bool = True,
    gradients: bool = False,
    reduce: Make | None = None,
) -> Iterator[Recording]:
    """Record what layers take and return, and the gradients of that, while your own code runs the model.

    The model computes what it would compute without, bit by bit, and keeps no hook afterwards, whatever happens. Only
    what the current thread runs is recorded. A module that activation checkpointing runs again during a backward pass
    isn't counted again; with ``use_reentrant=True`` PyTorch gives the layers inside it no gradients that could be
    recorded. Inside the block, compiled modules run as they are written: hooks don't exist in what was compiled before.
    Hooks are called in the order in which they were set: ``record`` inside ``edit`` sees what was edited.

    Args:
        model: the model, or any part of it.
        layers: names (``"layer4"``, ``"relu#2"`` for the 2nd run), patterns (``"layer*.conv?"``), types (``nn.ReLU``),
            modules, functions of name and module, or a list of these.
        inputs: whether to keep what the layers are given.
        outputs: whether to keep what they return.
        gradients: whether to keep the gradients of what they return, for every backward pass inside the block.
        reduce: a function from a tensor to a statistic, which is kept instead of the tensor. It is given each tensor of
            floating-point numbers, without its graph, and must not change it; of other tensors None is kept.

    Returns:
        A context manager that gives the ``Recording``, which stays when the block has ended.

    Raises:
        LayerError: no layer is meant; reading what was not recorded.
        ModelError: a layer is TorchScript, which has no hooks.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 1))
    >>> with record(net, ["0", nn.ReLU], gradients=True) as recording:
    ...     net(torch.randn(5, 1, 4, 4)).sum().backward()
    >>> list(recording), recording["0"].output.shape, recording["0"].gradient.shape
    (['0', '1'], torch.Size([5, 2, 2, 2]), torch.Size([5, 2, 2, 2]))

    """
    modules = select_layers(model, layers)
    recording = Recording(model, list(modules))
    scope, keep = recording._scope, _copied if reduce is None else partial(_reduced, reduce)
    waiting: defaultdict[str, list[Any]] = defaultdict(list)
    by_name = {ref.name: module for ref, module in modules.items()}

    def begun(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        waiting[name].append(_kept((arguments, keywords), keep))

    def ended(name: str, output: Any) -> None:
        given = waiting[name].pop() if waiting[name] else None  # a layer may have begun before the recording did
        call = recording._ended(name)
        if call is None:
            return
        call._given = given
        if outputs:
            call._returned = (_kept(output, keep),)
        if gradients:
            _watch(call, output, keep, recording._hooks)

    before = [(module, partial(begun, name)) for name, module in by_name.items()] if inputs else []
    after = [(module, partial(ended, name)) for name, module in by_name.items()]
    try:
        with eagerly(), input_hooks(before, scope.first_run), output_hooks(after, scope.first_run):
            yield recording
    finally:
        recording._hooks.remove()


def _kept(value: Any, keep: Make) -> Any:
    if isinstance(value, Tensor):
        return keep(value)
    return mapped(value, lambda item: keep(item) if isinstance(item, Tensor) else plain(item))


def _watch(call: Call, output: Any, keep: Make, hooks: TensorHooks) -> None:
    """Set a hook on each tensor of the output that will have a gradient."""
    tensors: list[Tensor] = []

    def numbered(item: Any) -> int | None:
        if not isinstance(item, Tensor):
            return None
        tensors.append(item)
        return len(tensors) - 1

    call._numbered = mapped(output, numbered)
    watched = [(number, tensor) for number, tensor in enumerate(tensors) if tensor.requires_grad]
    for number, tensor in watched:
        hooks.add(tensor, partial(call._take_gradient, number, keep))
    call._why_none = "" if watched else _WHY_NONE[torch.is_grad_enabled()]
    call._but = _VIEW if any(tensor._is_view() for _, tensor in watched) else ""


_VIEW = (
    "; what it returns is a view, and where that is changed in place afterwards, as by a layer with inplace=True, "
    "PyTorch keeps no gradient of what it was: set inplace=False there"
)

_WHY_NONE = {
    True: "its output depends on nothing that requires gradients",
    False: "it ran where gradients are off, as under no_grad, inference_mode or reentrant checkpointing "
    "(torch.utils.checkpoint with use_reentrant=True; False works)",
}


def _copied(tensor: Tensor) -> Tensor:
    # Gradients need it as much as outputs do: behind a view, PyTorch may make ``.grad`` of their memory and add to it.
    return tensor.detach().clone()


def _reduced(reduce: Make, tensor: Tensor) -> Any:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    whole = tensor.detach()
    value = reduce(whole)
    if isinstance(value, (float, int)):
        return value
    return mapped(value, lambda part: _apart(part, whole) if isinstance(part, Tensor) else part)


def _apart(part: Tensor, whole: Tensor) -> Tensor:
    """Return a statistic without a graph, and where it is a view of what it was made from, a copy."""
    part = part.detach()
    return part.clone() if shares_memory(part, whole) else part
