"""The autograd graph of a pass as a frozen record: which operation was computed from which others.

Each operation has a higher number than those it was computed from. A set of operations is an integer with one bit per
operation, which makes it cheap to look up ancestors.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.autograd.graph import Node

Note = TypeVar("Note")

_SPATIAL = ("Conv", "Pool", "Upsample")
_PRODUCTS = ("BmmBackward", "BaddbmmBackward")
_SOFTMAXES = ("SoftmaxBackward", "SafeSoftmaxBackward")
_CHOICES = ("IndexBackward", "IndexSelectBackward", "GatherBackward")
_LAST_AXIS = (1 << 64) - 1
"""Autograd stores the axis -1 as this number."""


@dataclass(frozen=True)
class Operation:
    """One step of a forward pass.

    Attributes:
        kind: autograd's name for it.
        inputs: the numbers of the operations it was computed from; None for an input without a gradient.
        shape: the shape of its result, for convolutions, poolings, resizings, matrix products and softmaxes.
        is_input: True if it stands for the input of the pass.
        axis: the axis of a softmax.
        kernel: the number of cells in a convolution's kernel.
    """

    kind: str
    inputs: tuple[int | None, ...] = ()
    shape: tuple[int, ...] | None = None
    is_input: bool = False
    axis: int | None = None
    kernel: int | None = None

    @functools.cached_property
    def is_spatial(self) -> bool:
        """True for a convolution, pooling or resizing, whose result certainly has a grid."""
        return any(kind in self.kind for kind in _SPATIAL)

    @functools.cached_property
    def moves_over_cells(self) -> bool:
        """True if it combined neighbouring cells, so that its axes are a grid; false for a 1 x 1 convolution."""
        return "Conv" not in self.kind or (self.kernel is not None and self.kernel > 1)

    @functools.cached_property
    def is_softmax(self) -> bool:
        """True for a softmax."""
        return self.kind.startswith(_SOFTMAXES)

    @functools.cached_property
    def is_product(self) -> bool:
        """True for a batched matrix product."""
        return self.kind.startswith(_PRODUCTS)

    @functools.cached_property
    def is_choice(self) -> bool:
        """True if it selected entries by index, as token pruning does."""
        return self.kind.startswith(_CHOICES)

    @property
    def operands(self) -> tuple[int | None, ...]:
        """The operations that computed the two matrices of a batched product, without the matrix added to it."""
        return self.inputs[-2:]

    @property
    def rows(self) -> int | None:
        """The number of rows of the matrices that it returned."""
        return None if self.shape is None else self.shape[-2]


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
        return _set_of(number for number, operation in enumerate(self.operations) if operation.is_input)

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
    def _from_input(self) -> list[bool]:
        flags: list[bool] = []
        for operation in self.operations:
            flags.append(operation.is_input or any(flags[before] for before in operation.inputs if before is not None))
        return flags

    @functools.cached_property
    def _regional(self) -> int:
        return _set_of(number for number, operation in enumerate(self.operations) if "roi" in operation.kind.casefold())

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

    def is_from_input(self, number: int | None) -> bool:
        """Tell whether an operation was computed from the input of the pass."""
        return number is not None and self._from_input[number]

    def is_learned(self, number: int | None) -> bool:
        """Tell whether an operation was computed from parameters alone; False for a tensor outside the graph."""
        return number is not None and not self._from_input[number]

    def is_regional(self, number: int | None) -> bool:
        """Tell whether an operation was computed from regions cropped from feature maps: its grid covers a region."""
        return bool(self.ancestors(number) & self._regional)

    def is_attention(self, number: int | None, dimensions: int) -> bool:
        """Tell whether a tensor with this many dimensions is a softmax along its last axis: weights, not features."""
        if number is None or not self[number].is_softmax:
            return False
        axis = self[number].axis
        return axis is not None and axis in (dimensions - 1, -1, _LAST_AXIS)

    def queries_of(self, number: int) -> list[int | None] | None:
        """Return the operations that computed the queries of attention; its result has the positions of the queries.

        None if the operation is not the weighted sum of an attention. The list is empty if the weights were not
        products of queries and keys.
        """
        operation = self[number]
        if operation.kind.startswith("ScaledDotProduct"):
            return [operation.inputs[0]]
        if not operation.is_product:
            return None
        softmaxes = [
            before
            for operand in operation.operands
            for before in self._nearest_before(operand)
            if self[before].is_softmax
        ]
        if not softmaxes:
            return None
        pairs = [
            (self[softmax], self[before])
            for softmax in softmaxes
            for before in self._nearest_before(softmax)
            if self[before].is_product
        ]
        return [product.operands[0 if softmax.rows == product.rows else 1] for softmax, product in pairs]

    def _nearest_before(self, number: int | None) -> Iterator[int]:
        """Walk back from an operation up to and including the nearest products, convolutions and softmaxes."""
        waiting, visited = deque([number]), {number}
        while waiting:
            current = waiting.popleft()
            if current is None:
                continue
            yield current
            operation = self[current]
            if current == number or not (
                operation.is_softmax or any(kind in operation.kind for kind in ("mm", "Conv"))
            ):
                new = [before for before in operation.inputs if before not in visited]
                visited.update(new)
                waiting.extend(new)


def _set_of(numbers: Iterable[int]) -> int:
    members = 0
    for number in numbers:
        members |= 1 << number
    return members


def contains(members: int, number: int | None) -> bool:
    """Tell whether a set of operations contains an operation."""
    return number is not None and bool(members >> number & 1)


class Lineage(Generic[Note]):
    """Stores notes on operations, and finds the nearest notes before an operation.

    Args:
        read: for an operation without a stored note, returns the note that follows from the operation itself, or None,
            and the operations to search before it.
    """

    def __init__(self, read: Callable[[int], tuple[Note | None, Sequence[int | None]]]) -> None:
        self._notes: dict[int, Note] = {}
        self._read = read

    def add(self, number: int | None, note: Note) -> None:
        """Store a note on an operation that has none."""
        if number is not None:
            self._notes.setdefault(number, note)

    def nearest(self, number: int | None) -> list[Note]:
        """Return the distinct notes met first on all paths back from an operation, the nearest first."""
        notes: list[Note] = []
        waiting, visited = deque([number]), {number}
        while waiting:
            current = waiting.popleft()
            if current is None:
                continue
            note, behind = (self._notes[current], ()) if current in self._notes else self._read(current)
            if note is not None and note not in notes:
                notes.append(note)
            new = [before for before in behind if before not in visited]
            visited.update(new)
            waiting.extend(new)
        return notes


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
        operation = Operation(node.name(), inputs)
        if not inputs:
            return Operation(operation.kind, is_input=getattr(node, "variable", None) is self._leaf)
        if not (operation.is_spatial or operation.is_softmax or operation.is_product):
            return operation
        # The inputs of the backward function have the shapes of the forward function's outputs.
        outputs = getattr(node, "_input_metadata", ())
        shape = tuple(outputs[0].shape) if outputs else None
        axis = getattr(node, "_saved_dim", None) if operation.is_softmax else None
        weight = getattr(node, "_saved_weight", None) if "Conv" in operation.kind else None
        kernel = None if weight is None else weight.shape[2:].numel()
        return Operation(operation.kind, inputs, shape, axis=None if axis is None else int(axis), kernel=kernel)
