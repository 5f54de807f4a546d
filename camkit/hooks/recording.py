"""``record``: keep what layers take and return, and their gradients, while the user's own code runs the model."""

from __future__ import annotations

import html
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from camkit.engine.attach import Scope, TensorHooks, backward_pass, hooked, nodes_of_graph, own_output
from camkit.engine.guard import eagerly
from camkit.engine.nested import Make, mapped, plain, shares_memory, tensors_in
from camkit.errors import LayerError, did_you_mean, nearest_numbers, printable
from camkit.layers.names import THE_MODEL, Layers, modules_by_name, select_layers, split_call
from camkit.types import LayerRef

_MOST_NAMED = 3
"""Calls that the line for a recording names."""
_MOST_ROWS = 100
"""Calls in the table that a notebook shows."""
_LONGEST = 80
"""Characters of a description of an output: a layer may return nested tuples of many tensors."""


NO_BACKWARD = (
    "call backward() inside the with block, on a value that depends on it; if it returns a view that is changed in "
    "place afterwards, for example by a layer with inplace=True, PyTorch keeps no gradient: set inplace=False there"
)
"""What to do if no backward pass reached a layer or parameter."""


class NumberedCalls:
    """Hooks on layers that act in one thread, and number the calls of each layer.

    A subclass says in ``_begun`` and ``_ended`` what to note. Calls that activation checkpointing repeats in a backward
    pass are left out.

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
        self._counts: Counter[str] = Counter()
        self._open: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)  # calls that have not ended

    def clear(self) -> None:
        """Forget all calls and number new ones from 1 again, for example before the next training step."""
        self._counts.clear()
        self._tensor_hooks.remove()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
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
        self._ended(name, module, kept, output)
        return output

    def _begun(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return what to keep of a call that begins, until it ends."""

    def _ended(self, name: str, module: nn.Module, begun: Any, output: Any) -> None:
        """Note a call that has ended."""

    def _key(self, name: str, number: int) -> str:
        """Return a call's name: that of the layer, numbered if it ran several times or was selected by call number."""
        return name if self._counts[name] == 1 and LayerRef(name) in self._refs else f"{name}#{number}"


def _described(output: Any) -> str:
    """Return the shapes of the tensors in an output, or the value of a statistic, on one line."""
    shapes = [str(tuple(tensor.shape)) for tensor in tensors_in(output)]
    text = ", ".join(shapes) or " ".join(repr(output).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


@dataclass(eq=False, repr=False)
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

    name: str
    number: int
    _arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    _output: tuple[Any] | None = None  # a tuple of one, since a layer may return None
    _tensor_numbers: Any = None  # the output's structure, with each tensor's number in its place
    _why_no_gradient: str = "gradients were not requested; use record(..., gradients=True)"
    _gradients_by_pass: dict[int, dict[int, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return ``"layer4#1"``."""
        return f"{self.name}#{self.number}"

    def __repr__(self) -> str:
        """Return one line with the shape of the output."""
        return f"<Call {self} with output {_described(self._output[0]) if self._output else 'not recorded'}>"

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments as they were before the layer ran, or with ``reduce`` their statistics.

        Raises:
            LayerError: inputs were not recorded.
        """
        return self._recorded_arguments()[0]

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments, otherwise like ``inputs``."""
        return self._recorded_arguments()[1]

    def _recorded_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._arguments is None:
            raise LayerError(f"the inputs of layer {str(self)!r} were not recorded; use record(..., inputs=True)")
        return self._arguments

    @property
    def output(self) -> Any:
        """What the layer returned: a tensor of its shape, or tuples, dictionaries and the like of tensors.

        It is a copy, so later in-place changes don't show, or with ``reduce`` the statistic. Objects other than
        tensors, numbers, strings and such structures are replaced by None.

        Raises:
            LayerError: outputs were not recorded.
        """
        if self._output is None:
            raise LayerError(f"the output of layer {str(self)!r} was not recorded; use record(..., outputs=True)")
        return self._output[0]

    @property
    def gradient(self) -> Any:
        """The gradient of the output, with its shape and structure; None for tensors without a gradient.

        It is the gradient of what the layer returned, before any in-place change.

        Raises:
            LayerError: no backward pass reached the layer, several did, or gradients were not recorded.
        """
        gradients = self.gradients
        if not gradients:
            raise LayerError(f"no backward pass has reached layer {str(self)!r}; {NO_BACKWARD}")
        if len(gradients) > 1:
            raise LayerError(
                f"{len(gradients)} backward passes have reached layer {str(self)!r}; .gradients has one entry for each"
            )
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

    def _take_gradient(self, number: int, keep: Make, gradient: Tensor | None) -> None:
        if gradient is not None:  # a custom function may return None for one of its inputs
            self._gradients_by_pass.setdefault(backward_pass(), {})[number] = keep(gradient)


class Recording(NumberedCalls, Mapping[str, Call]):
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
        self, model: nn.Module, layers: Layers, keep: Make, *, inputs: bool, outputs: bool, gradients: bool
    ) -> None:
        super().__init__(model, layers, gradients=gradients)
        modules = modules_by_name(model)
        recorded_names = {module: name for name, module in self._layers.items()}
        self._names = {name: recorded_names[module] for name, module in modules.items() if module in recorded_names}
        self._keep, self._inputs, self._outputs = keep, inputs, outputs
        self._calls: list[Call] = []

    def __repr__(self) -> str:
        """Return one line with the names of the first calls."""
        names = [repr(key or THE_MODEL) for key in itertools.islice(self, _MOST_NAMED)]
        more = ", ..." if len(self) > _MOST_NAMED else ""
        count = f"{len(self)} call{'' if len(self) == 1 else 's'}"
        return f"<Recording of {count}{': ' if names else ''}{', '.join(names)}{more}>"

    def _repr_html_(self) -> str:
        """Show a table of the calls in a notebook: the layer, the shape of its output, and whether it has gradients."""
        rows = "".join(
            f"<tr><td>{html.escape(printable(key or THE_MODEL))}</td>"
            f"<td>{html.escape(_described(call._output[0]) if call._output else 'not recorded')}</td>"
            f"<td>{len(call._gradients_by_pass)}</td></tr>"
            for key, call in itertools.islice(self.items(), _MOST_ROWS)
        )
        rest = len(self) - _MOST_ROWS
        more = f"<p>and {rest} more calls</p>" if rest > 0 else ""
        head = "<tr><th>call</th><th>output</th><th>backward passes</th></tr>"
        return f"<table>{head}{rows}</table>{more}"

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every recorded call, in the order in which they ended."""
        return tuple(self._calls)

    def clear(self) -> None:
        """Forget all calls and number new ones from 1 again, for example before the next training step."""
        super().clear()
        self._calls.clear()

    def __len__(self) -> int:
        """Return the number of recorded calls."""
        return len(self._calls)

    def __iter__(self) -> Iterator[str]:
        """Return the names of the calls, numbered if a layer ran several times or was selected by call number."""
        return iter([self._key(call.name, call.number) for call in self._calls])

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
        count = self._counts[name]
        if not count:
            thread = "; it ran in another thread, and a recording covers only the thread that opened it"
            raise LayerError(
                f"layer {name!r} has not run while it was recorded{thread if self._scope.elsewhere else ''}"
            )
        if digits is None and count > 1:
            raise LayerError(
                f"layer {name!r} ran {count} times; choose the call, for example {name + '#1'!r} or {name + '#2'!r}"
            )
        number = 1 if digits is None else int(digits) if digits.isdecimal() else 0
        call = next((call for call in self._calls if call.name == name and call.number == number), None)
        if call is None:
            raise LayerError(f"layer {name!r} ran {count} times, and no call {key!r} was recorded")
        return call

    def _begun(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:  # noqa: ARG002
        return _kept((arguments, keywords), self._keep) if self._inputs else None

    def _ended(self, name: str, module: nn.Module, begun: Any, output: Any) -> None:  # noqa: ARG002
        call = Call(name, self._counts[name], begun)
        self._calls.append(call)
        if self._outputs:
            call._output = (_kept(output, self._keep),)
        if not self._reads_gradients:
            return
        tensors = tensors_in(output)
        numbers = iter(range(len(tensors)))
        call._tensor_numbers = mapped(output, lambda item: next(numbers) if isinstance(item, Tensor) else None)
        call._why_no_gradient = why_no_gradient()
        for number, tensor in enumerate(tensors):
            if torch.is_grad_enabled() and tensor.requires_grad:
                self._tensor_hooks.add(tensor, partial(call._take_gradient, number, self._keep))
                call._why_no_gradient = ""


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
    keep = _copied if reduce is None else partial(_reduced, reduce)
    recording = Recording(model, layers, keep, inputs=inputs, outputs=outputs, gradients=gradients)
    with recording._hooked():
        yield recording


def _kept(value: Any, keep: Make) -> Any:
    if isinstance(value, Tensor):
        return keep(value)
    return mapped(value, lambda item: keep(item) if isinstance(item, Tensor) else plain(item))


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
