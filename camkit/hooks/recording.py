"""``record``: keep what layers take and return, and their gradients, while the user's own code runs the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from camkit.engine.attach import TensorHooks, aliased_tensor, hooked, noting_starts, own_output
from camkit.engine.guard import eagerly
from camkit.engine.nested import Make, mapped, plain, shares_memory
from camkit.hooks.calls import Call, Recording
from camkit.layers.names import Layers, select_layers


@contextmanager
def record(
    model: nn.Module,
    layers: Layers,
    *,
    inputs: bool = False,
    outputs: bool = True,
    gradients: bool = False,
    reduce: Make | None = None,
) -> Iterator[Recording]:
    """Record what layers take and return, and the gradients of their outputs, while your own code runs the model.

    The model computes bit by bit what it computes without recording, and keeps no hook afterwards, whatever happens.
    Only calls in the current thread are recorded. Calls that activation checkpointing repeats during a backward pass
    are not counted again; with ``use_reentrant=True`` PyTorch gives the layers inside it no gradients to record.
    Inside the block, compiled modules run uncompiled, because code that was compiled earlier has no hooks. Hooks run
    in the order in which they were set: ``record`` inside ``edit`` sees the edited output.

    Args:
        model: the model, or any part of it.
        layers: names (``"layer4"``, ``"relu#2"`` for the second call), patterns (``"layer*.conv?"``), types
            (``nn.ReLU`` or ``"ReLU"``), modules, functions of name and module, or a list of these.
        inputs: whether to keep what the layers take.
        outputs: whether to keep what they return.
        gradients: whether to keep the gradients of what they return, for every backward pass inside the block.
        reduce: a function from a tensor to a statistic, which is kept instead of the tensor. It receives each
            floating-point tensor without its graph and must not change it; other tensors are replaced by None.

    Returns:
        A context manager that gives the ``Recording``, which remains readable after the block.

    Raises:
        LayerError: no layer matches; or when reading what was not recorded.
        ModelError: a layer is TorchScript, which has no hooks.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 1))
    >>> with record(net, ["0", nn.ReLU], gradients=True) as recording:
    ...     net(torch.randn(5, 1, 4, 4)).sum().backward()
    >>> list(recording), recording["0"].output.shape, recording["0"].gradient.shape
    (['0', '1'], torch.Size([5, 2, 2, 2]), torch.Size([5, 2, 2, 2]))

    """
    selected = select_layers(model, layers)
    recording = Recording(model, list(selected))
    modules = {ref.name: module for ref, module in selected.items()}
    first_run = recording._scope.first_run
    try:
        with eagerly(), noting_starts(modules.values() if gradients else ()) as started:
            keep = _copied if reduce is None else partial(_reduced, reduce)
            recorder = _Recorder(recording, keep, outputs, started if gradients else None)
            before = [(module, partial(recorder.begin, name)) for name, module in modules.items()] if inputs else []
            after = [(module, partial(recorder.end, name)) for name, module in modules.items()]
            with hooked(before, after, first_run):
                yield recording
    finally:
        recording._hooks.remove()


class _Recorder:
    """The hooks of one ``record`` block: they fill its recording."""

    def __init__(
        self, recording: Recording, keep: Make, outputs: bool, started: Mapping[nn.Module, int] | None
    ) -> None:
        self._recording = recording
        self._keep = keep
        self._outputs = outputs
        self._started = started  # None if no gradients are recorded
        self._arguments: defaultdict[str, list[Any]] = defaultdict(list)  # by layer, of calls that have not ended

    def begin(self, name: str, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Keep the arguments of a call until it ends."""
        self._arguments[name].append(_kept((arguments, keywords), self._keep))

    def end(self, name: str, module: nn.Module, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> Any:
        """Record a call that has ended; return the output that the model continues with."""
        started = self._arguments[name]
        arguments = started.pop() if started else None  # the call may have begun before the recording did
        call = self._recording._count_call(name)
        if call is None:
            return None
        call._arguments = arguments
        if self._outputs:
            call._output = (_kept(output, self._keep),)
        if self._started is None:
            return None
        output = own_output(output, self._started.get(module, 0))
        _hook_gradients(call, output, self._keep, self._recording._hooks)
        return output


def _kept(value: Any, keep: Make) -> Any:
    if isinstance(value, Tensor):
        return keep(value)
    return mapped(value, lambda item: keep(item) if isinstance(item, Tensor) else plain(item))


def _hook_gradients(call: Call, output: Any, keep: Make, hooks: TensorHooks) -> None:
    """Set a hook on each tensor of the output that will have a gradient."""
    numbering = _Numbering()
    call._tensor_numbers = mapped(output, numbering.number)
    numbered = enumerate(numbering.tensors if torch.is_grad_enabled() else ())
    with_gradient = [(number, tensor) for number, tensor in numbered if tensor.requires_grad]
    for number, tensor in with_gradient:
        hooks.add(tensor, partial(call._take_gradient, number, keep))
    call._why_no_gradient = "" if with_gradient else why_no_gradient()
    call._view_hint = (
        VIEW_HINT if any(tensor._is_view() and aliased_tensor(tensor) is None for _, tensor in with_gradient) else ""
    )


class _Numbering:
    """Numbers the tensors of an output in their order."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def number(self, item: Any) -> int | None:
        """Return the number of a tensor; None for anything else."""
        if not isinstance(item, Tensor):
            return None
        self.tensors.append(item)
        return len(self.tensors) - 1


VIEW_HINT = (
    "; the layer returns a view, and if that is changed in place afterwards, for example by a layer with inplace=True, "
    "PyTorch keeps no gradient of the original: set inplace=False there"
)


def why_no_gradient() -> str:
    """Return why the output of a layer that has just run has no gradient."""
    if torch.is_grad_enabled():
        return "its output depends on nothing that requires gradients"
    return (
        "it ran while gradients are off, as under no_grad, inference_mode or reentrant checkpointing "
        "(torch.utils.checkpoint with use_reentrant=True; False works)"
    )


def _copied(tensor: Tensor) -> Tensor:
    # Gradients are copied too: if the output is a view, PyTorch may use their memory for ``.grad`` and add to it.
    return tensor.detach().clone()


def _reduced(reduce: Make, tensor: Tensor) -> Any:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    detached = tensor.detach()
    statistic = reduce(detached)
    if isinstance(statistic, (float, int)):
        return statistic
    return mapped(statistic, lambda part: _unshared(part, detached) if isinstance(part, Tensor) else part)


def _unshared(part: Tensor, source: Tensor) -> Tensor:
    """Return a statistic without a graph, as a copy if it shares memory with the tensor it was computed from."""
    part = part.detach()
    return part.clone() if shares_memory(part, source) else part
