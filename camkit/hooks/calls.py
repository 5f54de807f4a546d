"""What was recorded: the runs of layers, and what can be asked of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from camkit.engine.attach import Scope, TensorHooks, backward_pass
from camkit.engine.nested import Make, mapped
from camkit.errors import LayerError, did_you_mean
from camkit.layers.names import WHOLE_MODEL, modules_by_name, split_call
from camkit.types import LayerRef


@dataclass(eq=False)
class Call:
    """One run of one layer.

    Attributes:
        name: of the layer.
        number: which run of the layer it was since the recording began or was cleared, from 1.

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
    _given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    _returned: tuple[Any] | None = None
    _numbered: Any = None
    _why_none: str = "gradients were not asked for: record(..., gradients=True)"
    _but: str = ""
    _passes: dict[int, dict[int, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return ``"layer4#1"``."""
        return f"{self.name}#{self.number}"

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments, as they were before the layer ran; with ``reduce`` statistics of them.

        Raises:
            LayerError: they weren't asked for.
        """
        return self._arguments()[0]

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments, likewise."""
        return self._arguments()[1]

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._given is None:
            raise LayerError(f"the inputs of layer {str(self)!r} were not asked for: record(..., inputs=True)")
        return self._given

    @property
    def output(self) -> Any:
        """What the layer returned: a tensor of its shape, or tuples, dictionaries and the like of tensors.

        A copy, so that what is done to the output in place afterwards isn't seen; with ``reduce`` the statistic. Of
        objects other than numbers, words and such structures there is None.

        Raises:
            LayerError: outputs weren't asked for.
        """
        if self._returned is None:
            raise LayerError(f"the output of layer {str(self)!r} was not asked for: record(..., outputs=True)")
        return self._returned[0]

    @property
    def gradient(self) -> Any:
        """The gradient of the output, of its shape and structure, None beside tensors that have none.

        It is the gradient of what the layer returned, before anything was done to it in place.

        Raises:
            LayerError: no backward pass reached the layer, or several did, or gradients weren't asked for.
        """
        found = self.gradients
        if not found:
            raise LayerError(
                f"no backward pass has reached layer {str(self)!r}; call backward() inside the with block, on what "
                f"depends on the layer{self._but}"
            )
        if len(found) > 1:
            raise LayerError(
                f"{len(found)} backward passes have reached layer {str(self)!r}; .gradients has one entry for each"
            )
        return found[0]

    @property
    def gradients(self) -> tuple[Any, ...]:
        """The gradient of each backward pass that reached the layer, in their order; empty before the first.

        Raises:
            LayerError: the output has no gradient, or gradients weren't asked for.
        """
        if self._why_none:
            raise LayerError(f"layer {str(self)!r} has no gradient: {self._why_none}")
        return tuple(mapped(self._numbered, found.get) for found in list(self._passes.values()))

    def _take_gradient(self, number: int, keep: Make, gradient: Tensor | None) -> None:
        if gradient is not None:  # a custom function may have none for one of its inputs
            self._passes.setdefault(backward_pass(), {})[number] = keep(gradient)


class Recording(Mapping[str, Call]):
    """The runs of the recorded layers, in the order in which they ended.

    ``recording["layer4"]`` is the run of a layer that ran once, ``recording["relu#2"]`` the second of several. Its keys
    are these names. A module with two names answers to both.

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
        self._selected = {ref.name for ref in refs}
        layers = modules_by_name(model)
        first = {layers[name]: name for name in self._selected}
        self._names = {name: first[module] for name, module in layers.items() if module in first}
        self._runs: defaultdict[str, int] = defaultdict(int)
        self._calls: list[Call] = []
        self._scope = Scope()
        self._hooks = TensorHooks()

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every run, in the order in which they ended."""
        return tuple(self._calls)

    def clear(self) -> None:
        """Forget what was recorded, and number the runs from 1 again, as for another step of a training."""
        self._calls.clear()
        self._runs.clear()
        self._hooks.remove()

    def only_while(self, acts: Callable[[], bool]) -> None:
        """Record from now on only what runs while ``acts()``."""
        self._scope.acts = acts

    def __len__(self) -> int:
        """Return how many runs were recorded."""
        return len(self._calls)

    def __iter__(self) -> Iterator[str]:
        """Return the names of the runs: with their number where a layer ran several times, or it was asked for."""
        return iter([self._key(call) for call in self._calls])

    def __contains__(self, key: object) -> bool:
        """Tell whether there is one run of that name."""
        return isinstance(key, str) and isinstance(self._find(key), Call)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the run of that name, or the default."""
        found = self._find(key)
        return found if isinstance(found, Call) else default

    def __getitem__(self, key: str) -> Call:
        """Return the run of that name.

        Raises:
            LayerError: there is no such run, or several.

        """
        found = self._find(key)
        if isinstance(found, str):
            raise LayerError(found)
        return found

    def _key(self, call: Call) -> str:
        alone = self._runs[call.name] == 1 and LayerRef(call.name) in self._refs
        return call.name if alone else str(call)

    def _find(self, key: str) -> Call | str:
        """Return the run, or what to say of there being none."""
        name, run = split_call(key, self._names)
        if name not in self._names:
            hint = did_you_mean(name, [known for known in self._names if known])
            return f"layer {name or WHOLE_MODEL!r} is not among those recorded{hint}"
        name = self._names[name]
        runs = self._runs[name]
        if not runs:
            where = "; it ran in another thread, and records are of the thread they are made in"
            return f"layer {name!r} has not run while it was recorded{where if self._scope.elsewhere else ''}"
        if run is None and runs > 1:
            return f"layer {name!r} ran {runs} times; choose the call, for example {name + '#1'!r} or {name + '#2'!r}"
        number = 1 if run is None else int(run) if run.isdecimal() else 0
        found = next((call for call in self._calls if call.name == name and call.number == number), None)
        return found or f"of layer {name!r}, which ran {runs} times, no run {key!r} was recorded"

    def _ended(self, name: str) -> Call | None:
        """Take note of a run, and return it if it is to be recorded."""
        self._runs[name] += 1
        number = self._runs[name]
        if LayerRef(name) not in self._refs and LayerRef(name, number) not in self._refs:
            return None
        call = Call(name, number)
        self._calls.append(call)
        return call
