"""``edit`` and ``edit_gradients``: change outputs and gradients while the user's own code runs the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from camkit.engine.attach import (
    Scope,
    TensorHooks,
    backward_pass,
    differentiable,
    hooked,
    noting_starts,
    own_output,
)
from camkit.engine.guard import eagerly
from camkit.errors import LayerError
from camkit.hooks.changes import Change
from camkit.hooks.recording import NO_BACKWARD, why_no_gradient
from camkit.layers.names import THE_MODEL, Selector, chooses_layers, modules_by_name, select_layers, select_parameters
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
        LayerError: no layer matches; while the model runs: a function returned None; at the end of the block, unless
            another exception ends it: an edit was never applied, because none of its layers ran inside the block.
        ModelError: a layer is TorchScript, which has no hooks.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    >>> with edit(net, {nn.ReLU: lambda maps: torch.zeros_like(maps)}):
    ...     net(torch.ones(1, 2)).tolist()
    [[0.0]]

    """
    scope = Scope()
    planned = [_layer_edit(model, selector, change) for selector, change in edits.items()]
    with eagerly(), _after(model, planned, _replaced, scope):
        yield
    _check_applied(planned, scope)


def _replaced(edit: _Edit, name: str, _: nn.Module, output: Any) -> Any:
    edit.applied = True
    replaced = edit.change(output)
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
            returns several tensors, each gradient is edited separately.

    Raises:
        LayerError: no layer or parameter matches, or the parameter does not require gradients; in the backward pass: a
            function returned anything but a tensor of the gradient's shape; at the end of the block, unless another
            exception ends it: none of the layers of an edit ran inside the block, or the backward pass reached none of
            its layers or parameters. This includes a layer that returns a view that is then changed in place, as
            ``nn.Flatten`` before ``nn.ReLU(inplace=True)``: PyTorch has no gradient of it.
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
    scope, hooks, modules = Scope(), TensorHooks(), modules_by_name(model)
    layers: list[_Edit] = []
    parameters: list[tuple[_Edit, dict[str, nn.Parameter]]] = []
    for key, change in edits.items():
        if isinstance(key, str) and not chooses_layers(modules, key):
            of_parameters = _Edit(f"the gradient of parameter {key!r}", change, {}, _UNREACHED)
            parameters.append((of_parameters, select_parameters(model, key)))
        else:
            layers.append(_layer_edit(model, key, change))

    def hook_output(edit: _Edit, name: str, module: nn.Module, output: Any) -> Any:
        output = own_output(output, started.get(module, 0))
        tensors = differentiable(output)
        for tensor in tensors:
            hooks.add(tensor, partial(_changed, edit, f"layer {name!r}"))
        edit.why_not = _UNREACHED if tensors else f"it has no gradient: {why_no_gradient()}"
        return output

    def change_parameter(edit: _Edit, name: str, gradient: Tensor | None) -> Tensor | None:
        return _changed(edit, f"parameter {name!r}", gradient) if scope.any_run() else None

    edited = {module for edit in layers for module in edit.layers.values()}
    try:
        try:
            with eagerly(), noting_starts(edited) as started, _after(model, layers, hook_output, scope):
                for edit, chosen in parameters:
                    for name, parameter in chosen.items():
                        hooks.add(parameter, partial(change_parameter, edit, name))
                yield
        finally:
            hooks.remove()
    except KeyboardInterrupt:  # it may have interrupted the removal
        hooks.remove()
        raise
    _check_applied([*layers, *(edit for edit, _ in parameters)], scope)


_UNREACHED = f"no backward pass reached it; {NO_BACKWARD}"


def _changed(edit: _Edit, what: str, gradient: Tensor | None) -> Tensor | None:
    edit.applied = True
    if gradient is None:  # a custom function may return None for one of its inputs
        return None
    changed = edit.change(gradient)
    if not isinstance(changed, Tensor) or changed.shape != gradient.shape:
        returned = f"shape {tuple(changed.shape)}" if isinstance(changed, Tensor) else f"a {type(changed).__name__}"
        raise LayerError(
            f"the function that edits the gradient of {what} returned {returned}; it must return a tensor of shape "
            f"{tuple(gradient.shape)}"
        )
    return changed


@dataclass(eq=False)
class _Edit:
    """One entry of ``edits``, and whether it was applied in the block; if not, ``why_not`` gives the likely reason."""

    what: str
    change: Callable[[Any], Any]
    layers: dict[LayerRef, nn.Module]
    why_not: str
    applied: bool = False


_DID_NOT_RUN = (
    "it did not run inside the block; a layer does not run if its forward() is called directly, or if only its weights "
    "are used, as nn.MultiheadAttention uses those of out_proj"
)


def _layer_edit(model: nn.Module, selector: Selector, change: Callable[[Any], Any]) -> _Edit:
    layers = select_layers(model, selector)
    first, *others = [str(ref) or THE_MODEL for ref in layers]
    more = f" (and {len(others)} more)" if others else ""
    return _Edit(f"layer {first!r}{more}", change, layers, _DID_NOT_RUN)


def _check_applied(edits: Iterable[_Edit], scope: Scope) -> None:
    for edit in edits:
        if not edit.applied:
            thread = "it ran in another thread, and edits apply only in the thread that opened the block"
            raise LayerError(f"{edit.what} was not edited: {thread if scope.elsewhere else edit.why_not}")


@contextmanager
def _after(
    model: nn.Module, edits: Iterable[_Edit], act: Callable[[_Edit, str, nn.Module, Any], Any], scope: Scope
) -> Iterator[None]:
    """Call ``act(edit, layer's name, layer, output)`` after each call of each edited layer."""
    selected = [(edit, ref, module) for edit in edits for ref, module in edit.layers.items()]
    counts: Counter[nn.Module] = Counter()  # of the calls in the current pass through the model

    def begin_pass(*_: Any) -> None:
        counts.clear()

    def count(module: nn.Module, *_: Any) -> None:
        counts[module] += 1

    def end_call(edit: _Edit, ref: LayerRef, module: nn.Module, _: Any, __: Any, output: Any) -> Any:
        if ref.call is None:
            return act(edit, ref.name, module, output)
        if backward_pass() != scope.inside:
            raise LayerError(
                f"layer {str(ref)!r} runs again in the backward pass, under activation checkpointing, where its calls "
                f"cannot be told apart; edit every call with {ref.name!r}"
            )
        if counts[module] == ref.call:
            return act(edit, str(ref), module, output)
        if counts[module] < ref.call:
            edit.why_not = f"layer {ref.name!r} ran fewer than {ref.call} times in a pass"
        return None

    with ExitStack() as stack:
        numbered = {module for _, ref, module in selected if ref.call is not None}
        if numbered:
            whole = getattr(model, "_orig_mod", model)
            stack.enter_context(hooked([(whole, begin_pass)], [(each, count) for each in numbered], scope.first_run))
        hooks = [(module, partial(end_call, edit, ref)) for edit, ref, module in selected]
        stack.enter_context(hooked(after=hooks, acts=scope.any_run))
        yield
