"""The autograd graph of a pass as a frozen record: which operation was computed from which others.

Each operation has a higher number than those it was computed from. A set of operations is an integer with one bit per
operation, which makes it cheap to look up ancestors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

_SOFTMAXES = ("SoftmaxBackward", "SafeSoftmaxBackward")
_LAST_AXIS = (1 << 64) - 1
"""Autograd stores the axis -1 as this number."""


@dataclass(frozen=True)
class Operation:
    """One step of a forward pass.

    Attributes:
        kind: autograd's name for it.
        inputs: the numbers of the operations it was computed from; None for an input without a gradient.
        is_input: True if it stands for the input of the pass.
        axis: the axis of a softmax.
    """

    kind: str
    inputs: tuple[int | None, ...] = ()
    is_input: bool = False
    axis: int | None = None


@dataclass(frozen=True, eq=False)
class Graph:
    """All operations of a pass."""

    operations: tuple[Operation, ...]

    def __getitem__(self, number: int) -> Operation:
        """Return the operation with this number."""
        return self.operations[number]

    @functools.cached_property
    def inputs(self) -> int:
        """The set of operations that stand for the input of the pass."""
        return set_of(number for number, operation in enumerate(self.operations) if operation.is_input)

    @functools.cached_property
    def has_own_gradients(self) -> bool:
        """True if a function of the user's or a hook computes a gradient: names of PyTorch's own end in a number."""
        return any(operation.kind.endswith("Backward") for operation in self.operations)

    @functools.cached_property
    def _ancestors(self) -> list[int]:
        sets: list[int] = []
        for number, operation in enumerate(self.operations):
            members = 1 << number
            for before in operation.inputs:
                if before is not None:
                    members |= sets[before]
            sets.append(members)
        return sets

    @functools.cached_property
    def _regional(self) -> int:
        return set_of(number for number, operation in enumerate(self.operations) if "roi" in operation.kind.casefold())

    def before(self, end: int, without: int) -> int:
        """Return the set of operations from which a path leads to ``end`` that touches none of the set ``without``."""
        waiting, members = [end], 0
        while waiting:
            number = waiting.pop()
            if not (members | without) >> number & 1:
                members |= 1 << number
                waiting += [before for before in self[number].inputs if before is not None]
        return members

    def ancestors(self, *numbers: int | None) -> int:
        """Return the set of all operations that some operations were computed from, including themselves."""
        members = 0
        for number in numbers:
            if number is not None:
                members |= self._ancestors[number]
        return members

    def is_regional(self, number: int | None) -> bool:
        """Tell whether an operation was computed from regions cropped from feature maps: its grid covers a region."""
        return bool(self.ancestors(number) & self._regional)

    def is_attention(self, number: int | None, dimensions: int) -> bool:
        """Tell whether a tensor with this many dimensions is a softmax along its last axis: weights, not features."""
        axis = None if number is None else self[number].axis
        return axis is not None and axis in (dimensions - 1, -1, _LAST_AXIS)


def set_of(numbers: Iterable[int | None]) -> int:
    """Return the set of some operations."""
    members = 0
    for number in numbers:
        if number is not None:
            members |= 1 << number
    return members


def contains(members: int, number: int | None) -> bool:
    """Tell whether a set of operations contains an operation."""
    return number is not None and bool(members >> number & 1)


class GraphRecorder:
    """Records the autograd graph of some tensors as a ``Graph``, and gives each operation its number."""

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = leaf
        self._numbers: dict[Node, int] = {}
        self._operations: list[Operation] = []

    def graph(self) -> Graph:
        """Return the operations recorded so far."""
        return Graph(tuple(self._operations))

    def number(self, node: Node | None) -> int | None:
        """Return the number of an operation; record it and all operations before it if necessary."""
        if node is None:
            return None
        waiting = [node]
        while waiting:
            current = waiting[-1]
            if current in self._numbers:
                waiting.pop()
                continue
            behind = [before for before, _ in current.next_functions]
            missing = [before for before in behind if before is not None and before not in self._numbers]
            if missing:
                waiting += missing
                continue
            inputs = tuple(None if before is None else self._numbers[before] for before in behind)
            self._numbers[current] = len(self._operations)
            self._operations.append(self._recorded(current, inputs))
            waiting.pop()
        return self._numbers[node]

    def _recorded(self, node: Node, inputs: tuple[int | None, ...]) -> Operation:
        if not inputs:
            return Operation(node.name(), is_input=getattr(node, "variable", None) is self._leaf)
        axis = getattr(node, "_saved_dim", None) if node.name().startswith(_SOFTMAXES) else None
        return Operation(node.name(), inputs, axis=None if axis is None else int(axis))
