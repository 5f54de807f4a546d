"""What ``record`` returns: the recorded calls of layers, and how to look them up."""

from __future__ import annotations

import html
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from camkit.engine.attach import Scope, TensorHooks, backward_pass
from camkit.engine.nested import Make, mapped, tensors_in
from camkit.errors import LayerError, did_you_mean, nearest_numbers, printable
from camkit.layers.names import THE_MODEL, modules_by_name, split_call
from camkit.types import LayerRef

_MOST_NAMED = 3
"""Calls that the line for a recording names."""
_MOST_ROWS = 100
"""Calls in the table that a notebook shows."""
_LONGEST = 80
"""Characters of a description of an output: a layer may return nested tuples of many tensors."""


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
    _view_hint: str = ""
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
            raise LayerError(
                f"no backward pass has reached layer {str(self)!r}; call backward() inside the with block, on a value "
                f"that depends on the layer{self._view_hint}"
            )
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


class Recording(Mapping[str, Call]):
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

    def __init__(self, model: nn.Module, refs: Sequence[LayerRef]) -> None:
        self._refs = frozenset(refs)
        modules = modules_by_name(model)
        recorded_names = {modules[ref.name]: ref.name for ref in refs}
        self._names = {name: recorded_names[module] for name, module in modules.items() if module in recorded_names}
        self._call_counts: defaultdict[str, int] = defaultdict(int)
        self._calls: list[Call] = []
        self._scope = Scope()
        self._hooks = TensorHooks()

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
        self._calls.clear()
        self._call_counts.clear()
        self._hooks.remove()

    def __len__(self) -> int:
        """Return the number of recorded calls."""
        return len(self._calls)

    def __iter__(self) -> Iterator[str]:
        """Return the names of the calls, numbered if a layer ran several times or was selected by call number."""
        return iter([self._key(call) for call in self._calls])

    def __contains__(self, key: object) -> bool:
        """Return whether exactly one call has that name."""
        return isinstance(key, str) and isinstance(self._call_or_error(key), Call)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the call with that name, or the default."""
        call = self._call_or_error(key)
        return call if isinstance(call, Call) else default

    def __getitem__(self, key: str) -> Call:
        """Return the call with that name.

        Raises:
            LayerError: no call has that name, or several have.

        """
        call = self._call_or_error(key)
        if isinstance(call, str):
            raise LayerError(call)
        return call

    def _key(self, call: Call) -> str:
        ran_once = self._call_counts[call.name] == 1 and LayerRef(call.name) in self._refs
        return call.name if ran_once else str(call)

    def _call_or_error(self, key: str) -> Call | str:
        """Return the call with that name, or the sentence that says why there is none."""
        name, digits = split_call(key, self._names)
        if name not in self._names:
            recorded = [layer for layer in self._names if layer]
            hint = nearest_numbers(name, recorded) or did_you_mean(name, recorded)
            return f"layer {name or THE_MODEL!r} is not among those recorded{hint}"
        name = self._names[name]
        count = self._call_counts[name]
        if not count:
            thread = "; it ran in another thread, and a recording covers only the thread that opened it"
            return f"layer {name!r} has not run while it was recorded{thread if self._scope.elsewhere else ''}"
        if digits is None and count > 1:
            return f"layer {name!r} ran {count} times; choose the call, for example {name + '#1'!r} or {name + '#2'!r}"
        number = 1 if digits is None else int(digits) if digits.isdecimal() else 0
        call = next((call for call in self._calls if call.name == name and call.number == number), None)
        return call or f"layer {name!r} ran {count} times, and no call {key!r} was recorded"

    def _count_call(self, name: str) -> Call | None:
        """Count a call of a layer, and return it if this call is to be recorded."""
        self._call_counts[name] += 1
        number = self._call_counts[name]
        if LayerRef(name) not in self._refs and LayerRef(name, number) not in self._refs:
            return None
        call = Call(name, number)
        self._calls.append(call)
        return call
