"""The hook toolbox: record what layers compute, change it, and change gradients, while your own code runs the model.

    >>> import torch, camkit
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 1))
    >>> with camkit.hooks.record(net, torch.nn.Linear, gradients=True) as recording:
    ...     net(torch.ones(2, 4)).sum().backward()
    >>> recording["0"].output.shape, recording["0"].gradient.shape
    (torch.Size([2, 3]), torch.Size([2, 3]))

Hooks exist only inside a ``with`` block and act only in the thread that opened it. They are removed at its end, also
after an error.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Inexact
from torch import Tensor, nn

from camkit.engine.attach import (
    GradientHook,
    Make,
    backward_pass,
    hook_gradient,
    hooked,
    mapped,
    nodes_of_graph,
    own_output,
    plain,
    shares_memory,
    starts,
    tensors_in,
    with_tensors,
)
from camkit.engine.guard import eagerly
from camkit.errors import InputError, LayerError, did_you_mean, nearest_numbers
from camkit.layers.names import (
    THE_MODEL,
    Layers,
    Selector,
    chooses_layers,
    modules_by_name,
    select_layers,
    select_parameters,
    split_call,
)
from camkit.tables import Rows, Tabular
from camkit.types import LayerRef

__all__ = ["Call", "Recording", "clip_norm", "clip_value", "edit", "edit_gradients", "noise", "record", "scale"]

_MOST_NAMED = 3
"""Calls that the line for a recording names, and a refusal."""

NO_BACKWARD = (
    "call backward() inside the with block, on a value that depends on it; if it returns a view that is changed in "
    "place afterwards, for example by a layer with inplace=True, PyTorch keeps no gradient: set inplace=False there"
)
"""What to do if no backward pass reached a layer or parameter."""


class Scope:
    """The thread, and the backward pass if any, in which hooks were set.

    A module that runs during another backward pass repeats its forward pass, to recompute what activation checkpointing
    (``torch.utils.checkpoint``) did not keep. ``acts``, if given, can switch the hooks off for a while.
    """

    def __init__(self, acts: Callable[[], bool] | None = None) -> None:
        self.thread, self.inside, self._acts = threading.get_ident(), backward_pass(), acts

    def first_run(self) -> bool:
        """Tell whether the current call belongs to this thread and is not a repetition during a backward pass."""
        is_first = threading.get_ident() == self.thread and backward_pass() == self.inside
        return is_first and (self._acts is None or self._acts())

    def any_run(self) -> bool:
        """Tell whether the current call belongs to this thread, or to a thread of PyTorch's that may work for it.

        PyTorch runs backward passes on GPUs in its own threads, which do not tell whose pass they run.
        """
        current = threading.get_ident()
        if current == self.thread or backward_pass() < 0:
            return current == self.thread
        threads = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))
        return all(thread.ident != current for thread in threads)  # Python has started those


class TensorHooks:
    """Hooks on tensors that are removed together. Hooks whose tensors are gone are forgotten."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._cleanup_length = 0

    def add(self, tensor: Tensor, hook: GradientHook) -> None:
        """Have the hook called with each gradient of a tensor, as ``hook_gradient`` says."""
        self._handles += hook_gradient(tensor, hook)
        if len(self._handles) > self._cleanup_length:
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            # A few passes' worth may accumulate: some kilobytes
            self._cleanup_length = 2 * len(self._handles) + 256

    def remove(self) -> None:
        """Remove all of them."""
        while self._handles:
            self._handles[-1].remove()  # before it is forgotten, in case Ctrl-C comes in between
            self._handles.pop()


class NumberedCalls:
    """Hooks on layers that act in one thread, number the calls of each layer, and keep what a subclass notes of each.

    A subclass says in ``_begun`` and ``_ended`` what to note, and in ``_take_gradient`` what to do with the gradient of
    a tensor that a layer returned. Calls that activation checkpointing repeats in a backward pass are left out.

    Args:
        model: the model.
        layers: the layers, as for ``record``.
        gradients: whether the gradients of what the layers return are read, so that each must have tensors of its own.
        acts: tells whether the hooks act at present; None means always.
    """

    def __init__(
        self, model: nn.Module, layers: Layers, *, gradients: bool, acts: Callable[[], bool] | None = None
    ) -> None:
        selected = select_layers(model, layers)
        self._layers = {ref.name: module for ref, module in selected.items()}
        self._refs, self._reads_gradients = frozenset(selected), gradients
        self._scope, self._tensor_hooks = Scope(acts=acts), TensorHooks()
        self._calls: list[Any] = []
        self._counts: Counter[str] = Counter()
        self._open: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)  # calls that have not ended

    def clear(self) -> None:
        """Forget all calls and number new ones from 1 again, for example before the next training step."""
        self._calls.clear()
        self._counts.clear()
        self._tensor_hooks.remove()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Note calls in the block."""
        before = [(module, partial(self._begin, name)) for name, module in self._layers.items()]
        after = [(module, partial(self._end, name)) for name, module in self._layers.items()]
        try:
            with eagerly(), hooked(before, after, self._scope.first_run):
                yield
        finally:
            self._tensor_hooks.remove()

    def _begin(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._open[name].append((nodes_of_graph(), self._begun(name, module, arguments, keywords)))

    def _end(self, name: str, module: nn.Module, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> Any:
        begun = self._open[name]
        started, kept = begun.pop() if begun else (0, None)  # it may have begun before the hooks were set
        self._counts[name] += 1
        if not self._refs & {LayerRef(name), LayerRef(name, self._counts[name])}:
            return None
        output = own_output(output, started) if self._reads_gradients else output
        call = self._ended(name, module, kept, output)
        self._calls.append(call)
        if self._reads_gradients:
            for number, tensor in differentiable(output):
                self._tensor_hooks.add(tensor, partial(self._take_gradient, call, number))
        return output

    def _begun(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return what to keep of a call that begins, until it ends."""

    def _ended(self, name: str, module: nn.Module, begun: Any, output: Any) -> Any:
        """Return what to keep of a call that has ended."""

    def _take_gradient(self, call: Any, number: int, gradient: Tensor | None) -> None:
        """Note the gradient of the tensor with this number; a custom function may return None for one."""

    def by_name(self) -> dict[str, Any]:
        """Return the calls in the order in which they ended, by the names of their layers.

        A name is numbered if the layer ran several times or was selected by call number.
        """
        alone = {name for name, count in self._counts.items() if count == 1 and LayerRef(name) in self._refs}
        return {call.name if call.name in alone else f"{call.name}#{call.number}": call for call in self._calls}


class Call:
    """One call of one layer.

    Attributes:
        name: the layer's name.
        number: which call of the layer it was since the recording started or was cleared, from 1.

    >>> import torch
    >>> from camkit.hooks import record
    >>> layer = torch.nn.Linear(2, 1)
    >>> with record(layer, "", inputs=True) as recording:
    ...     _ = layer(torch.ones(5, 2))
    >>> call = recording.calls[0]
    >>> call.number, call.inputs[0].shape, call.output.shape
    (1, torch.Size([5, 2]), torch.Size([5, 1]))

    """

    def __init__(
        self,
        name: str,
        number: int,
        arguments: tuple[tuple[Any, ...], dict[str, Any]] | None,
        output: tuple[Any] | None,  # a tuple of one, since a layer may return None
        tensor_numbers: Any,  # the output's structure, with each tensor's number in its place
        why_no_gradient: str,
    ) -> None:
        self.name, self.number, self._arguments, self._output = name, number, arguments, output
        self._tensor_numbers, self._why_no_gradient = tensor_numbers, why_no_gradient
        self._gradients_by_pass: dict[int, dict[int, Any]] = {}

    def __str__(self) -> str:
        """Return ``"layer4#1"``."""
        return f"{self.name}#{self.number}"

    def __repr__(self) -> str:
        """Return one line with the shape of the output."""
        return f"<Call {self} with output {self.described}>"

    @property
    def described(self) -> str:
        """The shapes of the tensors in the output, or the value of a statistic, on one line."""
        if self._output is None:
            return "not recorded"
        shapes = [str(tuple(tensor.shape)) for tensor in tensors_in(self._output)]
        text = ", ".join(shapes) or " ".join(repr(self._output[0]).split())
        return text if len(text) <= 80 else f"{text[:77]}..."  # a layer may return nested tuples of many tensors

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments as they were before the layer ran, or with ``reduce`` their statistics.

        Raises:
            LayerError: inputs were not recorded.
        """
        return self._recorded("inputs", self._arguments)[0]  # type: ignore[no-any-return]

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments, otherwise like ``inputs``."""
        return self._recorded("inputs", self._arguments)[1]  # type: ignore[no-any-return]

    def _recorded(self, what: str, kept: Any) -> Any:
        if kept is None:
            raise LayerError(f"the {what} of layer {str(self)!r} were not recorded; use record(..., {what}=True)")
        return kept

    @property
    def output(self) -> Any:
        """What the layer returned: a tensor of its shape, or tuples, dictionaries and the like of tensors.

        It is a copy, so later in-place changes don't show, or with ``reduce`` the statistic. Objects other than
        tensors, numbers, strings and such structures are replaced by None.

        Raises:
            LayerError: outputs were not recorded.
        """
        return self._recorded("outputs", self._output)[0]

    @property
    def gradient(self) -> Any:
        """The gradient of the output, with its shape and structure; None for tensors without a gradient.

        It is the gradient of what the layer returned, before any in-place change.

        Raises:
            LayerError: no backward pass reached the layer, several did, or gradients were not recorded.
        """
        gradients = self.gradients
        if len(gradients) != 1:
            several = f"{len(gradients)} backward passes have reached layer {str(self)!r}"
            none = f"no backward pass has reached layer {str(self)!r}; {NO_BACKWARD}"
            raise LayerError(f"{several}; .gradients has one entry for each" if gradients else none)
        return gradients[0]

    @property
    def gradients(self) -> tuple[Any, ...]:
        """The gradient of each backward pass that reached the layer, in order; empty before the first.

        Raises:
            LayerError: the output has no gradient, or gradients were not recorded.
        """
        if self._why_no_gradient:
            raise LayerError(f"layer {str(self)!r} has no gradient: {self._why_no_gradient}")
        return tuple(
            mapped(self._tensor_numbers, by_number.get) for by_number in list(self._gradients_by_pass.values())
        )


class Recording(Tabular, NumberedCalls, Mapping[str, Call]):
    """The calls of the recorded layers, in the order in which they ended.

    ``recording["layer4"]`` is the call of a layer that ran once, ``recording["relu#2"]`` the second of several. The
    keys are these names. A module with two names is found under both.

    >>> import torch
    >>> from camkit.hooks import record
    >>> relu = torch.nn.ReLU()
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), relu, torch.nn.Linear(3, 1), relu)
    >>> with record(net, "*", reduce=torch.numel) as recording:
    ...     _ = net(torch.ones(5, 2))
    >>> {name: call.output for name, call in recording.items()}
    {'0': 15, '1#1': 15, '2': 5, '1#2': 5}
    """

    def __init__(
        self, model: nn.Module, layers: Layers, reduce: Make | None, *, inputs: bool, outputs: bool, gradients: bool
    ) -> None:
        super().__init__(model, layers, gradients=gradients)
        modules = modules_by_name(model)
        recorded_names = {module: name for name, module in self._layers.items()}
        self._names = {name: recorded_names[module] for name, module in modules.items() if module in recorded_names}
        self._reduce, self._inputs, self._outputs = reduce, inputs, outputs

    def __repr__(self) -> str:
        """Return one line with the names of the first calls."""
        names = [repr(key or THE_MODEL) for key in itertools.islice(self, _MOST_NAMED)]
        more = ", ..." if len(self) > _MOST_NAMED else ""
        count = f"{len(self)} call{'' if len(self) == 1 else 's'}"
        return f"<Recording of {count}{': ' if names else ''}{', '.join(names)}{more}>"

    def table(self) -> Rows:
        """Return a row for each call: the layer, the shape of its output, and how many backward passes reached it."""
        return [
            {"call": key or THE_MODEL, "output": call.described, "backward passes": len(call._gradients_by_pass)}
            for key, call in self.items()
        ]

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every recorded call, in the order in which they ended."""
        return tuple(self._calls)

    def __len__(self) -> int:
        """Return the number of recorded calls."""
        return len(self._calls)

    def __iter__(self) -> Iterator[str]:
        """Return the names of the calls, numbered if a layer ran several times or was selected by call number."""
        return iter(self.by_name())

    def __contains__(self, key: object) -> bool:
        """Return whether exactly one call has that name."""
        return isinstance(key, str) and self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the call with that name, or the default."""
        try:
            return self[key]
        except LayerError:
            return default

    def __getitem__(self, key: str) -> Call:
        """Return the call with that name.

        Raises:
            LayerError: no call has that name, or several have.

        """
        name, digits = split_call(key, self._names)
        if name not in self._names:
            recorded = [layer for layer in self._names if layer]
            hint = nearest_numbers(name, recorded) or did_you_mean(name, recorded)
            raise LayerError(f"layer {name or THE_MODEL!r} is not among those recorded{hint}")
        name = self._names[name]
        calls = {str(call.number): call for call in self._calls if call.name == name}
        if digits is None and self._counts[name] == 1:
            digits = "1"
        if digits not in calls:
            named = [repr(str(call)) for call in calls.values()][:_MOST_NAMED]
            raise LayerError(
                f"layer {name!r} ran {self._counts[name]} times while it was recorded, in the thread that opened the "
                f"recording; {key!r} must be one of its recorded calls: {', '.join(named) or 'none'}"
            )
        return calls[digits]  # type: ignore[no-any-return]

    def _begun(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:  # noqa: ARG002
        return self._kept((arguments, keywords)) if self._inputs else None

    def _ended(self, name: str, module: nn.Module, begun: Any, output: Any) -> Call:  # noqa: ARG002
        kept = (self._kept(output),) if self._outputs else None
        if not self._reads_gradients:
            why = "gradients were not requested; use record(..., gradients=True)"
            return Call(name, self._counts[name], begun, kept, None, why)
        count = itertools.count()
        numbers = mapped(output, lambda item: next(count) if isinstance(item, Tensor) else None)
        return Call(name, self._counts[name], begun, kept, numbers, why_no_gradient(output))

    def _take_gradient(self, call: Call, number: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            call._gradients_by_pass.setdefault(backward_pass(), {})[number] = self._kept(gradient)

    def _kept(self, value: Any) -> Any:
        """Return a copy of what a layer takes or returns, with a statistic for each tensor if ``reduce`` makes one."""
        return mapped(value, lambda item: self._copied(item) if isinstance(item, Tensor) else plain(item))

    def _copied(self, tensor: Tensor) -> Any:
        detached = tensor.detach()
        if self._reduce is None:
            # Gradients too: if the output is a view, PyTorch may use their memory for ``.grad`` and add to it.
            return detached.clone()
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return None

        def own(part: Tensor) -> Tensor:
            return part.detach().clone() if shares_memory(part, detached) else part.detach()

        return with_tensors(self._reduce(detached), own)


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
    recording = Recording(model, layers, reduce, inputs=inputs, outputs=outputs, gradients=gradients)
    with recording.hooked():
        yield recording


def differentiable(output: Any) -> list[tuple[int, Tensor]]:
    """Return the tensors with a gradient that a layer has just returned, and the number of each among all of them."""
    # While gradients are off, a tensor that requires them was not computed by this layer.
    tensors = tensors_in(output) if torch.is_grad_enabled() else []
    return [(number, tensor) for number, tensor in enumerate(tensors) if tensor.requires_grad]


def why_no_gradient(output: Any) -> str:
    """Return why what a layer has just returned has no gradient; empty if it has one."""
    if torch.is_grad_enabled():
        return "" if differentiable(output) else "its output depends on nothing that requires gradients"
    return (
        "it ran while gradients are off, as under no_grad, inference_mode or reentrant checkpointing "
        "(torch.utils.checkpoint with use_reentrant=True; False works)"
    )


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

    def replaced(edit: _Edit, name: str, _: nn.Module, output: Any) -> Any:
        edit.applied = True
        changed = edit.change(output)
        if changed is None and output is not None:
            raise LayerError(
                f"the function that edits layer {name!r} returned None; it must return what the model continues with"
            )
        return changed

    with _editing(model, [_Edit.of_layers(model, key, change) for key, change in edits.items()], replaced, Scope()):
        yield


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
    planned: list[_Edit] = []
    parameters: list[tuple[_Edit, str, nn.Parameter]] = []
    for key, change in edits.items():
        if isinstance(key, str) and not chooses_layers(modules, key):
            edit = _Edit(f"the gradient of parameter {key!r}", change, {}, _UNREACHED)
            parameters += [(edit, name, parameter) for name, parameter in select_parameters(model, key).items()]
        else:
            edit = _Edit.of_layers(model, key, change)
        planned.append(edit)

    started: dict[nn.Module, int] = {}

    def begin(module: nn.Module) -> None:
        started[module] = nodes_of_graph()

    def hook_output(edit: _Edit, name: str, module: nn.Module, output: Any) -> Any:
        output = own_output(output, started.get(module, 0))
        why_not = why_no_gradient(output)
        edit.why_not = f"it has no gradient: {why_not}" if why_not else _UNREACHED
        for _, tensor in differentiable(output):
            hooks.add(tensor, partial(_changed, edit, f"layer {name!r}"))
        return output

    def change_parameter(edit: _Edit, name: str, gradient: Tensor | None) -> Tensor | None:
        return _changed(edit, f"parameter {name!r}", gradient) if scope.any_run() else None

    edited = {module for edit in planned for module in edit.layers.values()}
    try:
        with starts(edited, begin), _editing(model, planned, hook_output, scope):
            for edit, name, parameter in parameters:
                hooks.add(parameter, partial(change_parameter, edit, name))
            yield
    finally:
        hooks.remove()


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


class _Edit:
    """One entry of ``edits``, and whether it was applied in the block; if not, ``why_not`` gives the likely reason."""

    def __init__(
        self, what: str, change: Callable[[Any], Any], layers: dict[LayerRef, nn.Module], why_not: str
    ) -> None:
        self.what, self.change, self.layers, self.why_not = what, change, layers, why_not
        self.applied = False

    @classmethod
    def of_layers(cls, model: nn.Module, selector: Selector, change: Callable[[Any], Any]) -> _Edit:
        layers = select_layers(model, selector)
        first, *others = [str(ref) or THE_MODEL for ref in layers]
        more = f" (and {len(others)} more)" if others else ""
        did_not_run = (
            "it did not run inside the block, in this thread; a layer does not run if its forward() is called "
            "directly, or if only its weights are used, as nn.MultiheadAttention uses those of out_proj"
        )
        return cls(f"layer {first!r}{more}", change, layers, did_not_run)


@contextmanager
def _editing(
    model: nn.Module, edits: Iterable[_Edit], act: Callable[[_Edit, str, nn.Module, Any], Any], scope: Scope
) -> Iterator[None]:
    """Call ``act(edit, layer's name, layer, output)`` after each call of each edited layer.

    Raises:
        LayerError: at the end of the block, unless another exception ends it: an edit was never applied.
    """
    selected = [(edit, ref, module) for edit in edits for ref, module in edit.layers.items()]
    counts: Counter[nn.Module] = Counter()  # of the calls in the current pass through the model

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

    numbered = {module for _, ref, module in selected if ref.call is not None}
    passes = [(getattr(model, "_orig_mod", model), lambda *_: counts.clear())] if numbered else []
    calls = [(module, partial(end_call, edit, ref)) for edit, ref, module in selected]
    with (
        eagerly(),
        hooked(passes, [(module, count) for module in numbered], scope.first_run),
        hooked(after=calls, acts=scope.any_run),
    ):
        yield
    for edit in edits:
        if not edit.applied:
            raise LayerError(f"{edit.what} was not edited: {edit.why_not}")


Change: TypeAlias = Callable[[Tensor], Tensor]
"""A function from a tensor to another of the same shape."""


def scale(factor: float) -> Change:
    """Return a function that multiplies a tensor of any shape.

    >>> scale(0.5)(torch.ones(2))
    tensor([0.5000, 0.5000])
    """
    return lambda tensor: tensor * factor


def clip_value(limit: float) -> Change:
    """Return a function that clips the values of a tensor of any shape to between ``-limit`` and ``limit``.

    Raises:
        InputError: the limit is not a positive number.

    >>> clip_value(1.0)(torch.tensor([-3.0, 0.5]))
    tensor([-1.0000,  0.5000])

    """
    _positive("limit", limit)
    return lambda tensor: tensor.clamp(-limit, limit)


def clip_norm(limit: float) -> Change:
    """Return a function that scales a tensor of any shape down to the Euclidean norm ``limit`` if its norm is larger.

    The norm is that of the whole tensor, all images of a batch together.

    Raises:
        InputError: the limit is not a positive number.

    >>> clip_norm(1.0)(torch.tensor([3.0, 4.0])), clip_norm(10.0)(torch.tensor([3.0, 4.0]))
    (tensor([0.6000, 0.8000]), tensor([3., 4.]))

    """
    _positive("limit", limit)

    def clipped(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        # The norm is not read on the CPU, which would have to wait for the GPU. Squares overflow fp16, hence float32.
        wide = torch.promote_types(tensor.dtype, torch.float32)
        norm = torch.linalg.vector_norm(tensor, dtype=wide)
        shortened: Tensor = tensor * (limit / norm).clamp(max=1)
        return shortened.to(tensor.dtype)  # the product of two tensors without axes has the wider type

    return clipped


def noise(std: float, generator: torch.Generator | None = None) -> Change:
    """Return a function that adds normal noise with this standard deviation to a tensor of any shape.

    Args:
        std: the standard deviation, in the tensor's unit.
        generator: a generator on the tensor's device, for repeatable noise that leaves the default generator alone.

    Raises:
        InputError: the standard deviation is not a positive number.

    >>> noise(0.1, torch.Generator().manual_seed(0))(torch.zeros(2))
    tensor([ 0.1541, -0.0293])

    """
    _positive("std", std)

    def noisy(tensor: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)
        return tensor + std * drawn

    return noisy


def _positive(name: str, number: float) -> None:
    if not (number > 0 and math.isfinite(number)):
        raise InputError(f"{name} must be a positive number, not {number!r}")
