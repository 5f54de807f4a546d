"""``edit`` and ``edit_gradients``: change outputs and gradients while the user's own code runs the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from camkit.engine.attach import Scope, TensorHooks, backward_pass, input_hooks, output_hooks
from camkit.engine.nested import tensors_in
from camkit.engine.restore import eagerly
from camkit.errors import LayerError
from camkit.hooks.changes import Change
from camkit.layers.names import Selector, chooses_layers, modules_by_name, select_layers, select_parameters
from camkit.types import LayerRef


@contextmanager
def edit(model: nn.Module, edits: Mapping[Selector, Callable[[Any], Any]]) -> Iterator[None]:
    """Replace what layers return: the model continues with the new output, and that is what is differentiated.

    Edits apply only in the current thread, and to the calls that activation checkpointing repeats for it. Several edits
    of one layer are applied in order; blocks can be nested, and the outer block's edits come first. Inside the block,
    compiled modules run uncompiled.

    Args:
        model: the model, or any part of it.
        edits: for each layer (chosen as in ``record``) a function from what it returns, usually a tensor, to what the
            model continues with. ``"relu#2"`` is the second call of ``relu`` in each pass through ``model``.

    Raises:
        LayerError: no layer matches; while the model runs: a function returned None.
        ModelError: a layer is TorchScript, which has no hooks.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    >>> with edit(net, {nn.ReLU: lambda maps: torch.zeros_like(maps)}):
    ...     net(torch.ones(1, 2)).tolist()
    [[0.0]]

    """
    scope = Scope()
    with eagerly(), _after(model, edits, _replaced, scope):
        yield


def _replaced(name: str, change: Callable[[Any], Any], output: Any) -> Any:
    replaced = change(output)
    if replaced is None and output is not None:
        raise LayerError(
            f"the function that edits layer {name!r} returned None; it must return what the model continues with"
        )
    return replaced


@contextmanager
def edit_gradients(model: nn.Module, edits: Mapping[Selector, Change]) -> Iterator[None]:
    """Replace the gradients of layers' outputs, which also changes all gradients before them, or of parameters.

    The backward pass must run inside the block. A parameter's gradient is changed once in each backward pass, before it
    is added to ``.grad``. Edits apply only in the current thread, except for parameters on a GPU, for which PyTorch
    does not say which thread started the backward pass. Inside the block, compiled modules run uncompiled.

    Args:
        model: the model, or any part of it.
        edits: for each layer (chosen as in ``record``) or parameter (by name or pattern, such as
            ``"layer1.0.conv1.weight"`` or ``"*.bias"``) a function from a gradient of any shape to another of the same
            shape. ``scale``, ``clip_value``, ``clip_norm`` and ``noise`` make such functions. A name or pattern that
            matches a layer means layers; if it matches a layer and layers inside it, each is edited. If a layer
            returns several tensors, each gradient is edited separately. If a layer returns a view that is then changed
            in place, as ``nn.Flatten`` before ``nn.ReLU(inplace=True)``, PyTorch has no gradient of it, and nothing is
            edited.

    Raises:
        LayerError: no layer or parameter matches, or the parameter does not require gradients; in the backward pass: a
            function returned anything but a tensor of the gradient's shape.
        ModelError: a layer is TorchScript, which has no hooks.

    >>> import torch
    >>> from torch import nn
    >>> from camkit.hooks import clip_value
    >>> net = nn.Linear(2, 1)
    >>> with edit_gradients(net, {"weight": clip_value(0.5)}):
    ...     net(torch.tensor([[0.25, 4.0]])).sum().backward()
    >>> net.weight.grad
    tensor([[0.2500, 0.5000]])

    """
    scope, hooks = Scope(), TensorHooks()
    modules = modules_by_name(model)
    parameter_keys = [key for key in edits if isinstance(key, str) and not chooses_layers(modules, key)]
    layer_edits = {key: change for key, change in edits.items() if key not in parameter_keys}

    def hook_output(name: str, change: Change, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                hooks.add(tensor, partial(_changed, f"layer {name!r}", change))

    def change_parameter(name: str, change: Change, gradient: Tensor | None) -> Tensor | None:
        return _changed(f"parameter {name!r}", change, gradient) if scope.any_run() else None

    try:
        try:
            with eagerly(), _after(model, layer_edits, hook_output, scope):
                for key in parameter_keys:
                    for name, parameter in select_parameters(model, key).items():
                        hooks.add(parameter, partial(change_parameter, name, edits[key]))
                yield
        finally:
            hooks.remove()
    except KeyboardInterrupt:  # it may have interrupted the removal
        hooks.remove()
        raise


def _changed(what: str, change: Change, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:  # a custom function may return None for one of its inputs
        return None
    changed = change(gradient)
    if not isinstance(changed, Tensor) or changed.shape != gradient.shape:
        returned = f"shape {tuple(changed.shape)}" if isinstance(changed, Tensor) else f"a {type(changed).__name__}"
        raise LayerError(
            f"the function that edits the gradient of {what} returned {returned}; it must return a tensor of shape "
            f"{tuple(gradient.shape)}"
        )
    return changed


class _CallCounter:
    """Counts the calls of modules in the current pass through the model."""

    def __init__(self) -> None:
        self.calls: Counter[nn.Module] = Counter()

    def begin_pass(self, *_: Any) -> None:
        self.calls.clear()

    def count(self, module: nn.Module, _: Any) -> None:
        self.calls[module] += 1


@contextmanager
def _after(
    model: nn.Module,
    edits: Mapping[Selector, Callable[[Any], Any]],
    act: Callable[[str, Callable[[Any], Any], Any], Any],
    scope: Scope,
) -> Iterator[None]:
    """Call ``act(name, function, output)`` after each call of each selected layer."""
    selected = [
        (ref, module, change) for key, change in edits.items() for ref, module in select_layers(model, key).items()
    ]
    counter = _CallCounter()

    def end_call(ref: LayerRef, module: nn.Module, change: Callable[[Any], Any], output: Any) -> Any:
        if ref.call is None:
            return act(ref.name, change, output)
        if backward_pass() != scope.inside:
            raise LayerError(
                f"layer {str(ref)!r} runs again in the backward pass, under activation checkpointing, where its calls "
                f"cannot be told apart; edit every call with {ref.name!r}"
            )
        return act(str(ref), change, output) if counter.calls[module] == ref.call else None

    with ExitStack() as stack:
        numbered = {module for ref, module, _ in selected if ref.call is not None}
        if numbered:
            stack.enter_context(
                input_hooks([(getattr(model, "_orig_mod", model), counter.begin_pass)], scope.first_run)
            )
            counts = [(module, partial(counter.count, module)) for module in numbered]
            stack.enter_context(output_hooks(counts, scope.first_run))
        hooks = [(module, partial(end_call, ref, module, change)) for ref, module, change in selected]
        stack.enter_context(output_hooks(hooks, scope.any_run))
        yield
