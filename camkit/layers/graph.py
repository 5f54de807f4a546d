"""What was computed from what: the autograd graph of a pass as a frozen record.

Operations are numbered so that an operation comes after those it was computed from. Sets of operations are integers
with one bit for each, which makes questions about ancestors cheap.
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
"""How autograd writes the axis -1."""


@dataclass(frozen=True)
class Operation:
    """One step of a forward pass.

    Attributes:
        kind: autograd's name for it.
        inputs: the numbers of the operations it was computed from; None for what has no gradient.
        shape: of what it returned, for convolutions, poolings, resizings, products and softmaxes.
        is_input: whether it is the input of the pass.
        axis: of a softmax.
        kernel: how many cells a convolution's kernel covers.
    """

    kind: str
    inputs: tuple[int | None, ...] = ()
    shape: tuple[int, ...] | None = None
    is_input: bool = False
    axis: int | None = None
    kernel: int | None = None

    @functools.cached_property
    def is_spatial(self) -> bool:
        """Whether it is a convolution, pooling or resizing, so that what it returned has a grid for certain."""
        return any(kind in self.kind for kind in _SPATIAL)

    @functools.cached_property
    def moves_over_cells(self) -> bool:
        """Whether it combined neighbouring cells, so that its axes are a grid; a 1 x 1 convolution does not."""
        return "Conv" not in self.kind or (self.kernel is not None and self.kernel > 1)

    @functools.cached_property
    def is_softmax(self) -> bool:
        """Whether it is a softmax."""
        return self.kind.startswith(_SOFTMAXES)

    @functools.cached_property
    def is_product(self) -> bool:
        """Whether it is a batched product of matrices."""
        return self.kind.startswith(_PRODUCTS)

    @functools.cached_property
    def is_choice(self) -> bool:
        """Whether it picked entries by their numbers, as pruning of tokens does."""
        return self.kind.startswith(_CHOICES)

    @property
    def operands(self) -> tuple[int | None, ...]:
        """Where the two matrices of a batched product came from, not what was added to it."""
        return self.inputs[-2:]

    @property
    def rows(self) -> int | None:
        """How many rows the matrices had that it returned."""
        return None if self.shape is None else self.shape[-2]


@dataclass(frozen=True, eq=False)
class Graph:
    """All operations of a pass."""

    operations: tuple[Operation, ...]

    def __getitem__(self, number: int) -> Operation:
        """Return an operation."""
        return self.operations[number]

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

    def ancestors(self, *numbers: int | None) -> int:
        """Return the set of all operations that some were computed from, these included."""
        members = 0
        for number in numbers:
            if number is not None:
                members |= self._ancestors[number]
        return members

    def is_from_input(self, number: int | None) -> bool:
        """Tell whether something was computed from the input of the pass."""
        return number is not None and self._from_input[number]

    def is_learned(self, number: int | None) -> bool:
        """Tell whether something was computed from parameters alone; what is outside the graph may be the input's."""
        return number is not None and not self._from_input[number]

    def is_regional(self, number: int | None) -> bool:
        """Tell whether something was computed from regions taken out of feature maps: its grid is a region's."""
        return bool(self.ancestors(number) & self._regional)

    def is_attention(self, number: int | None, dimensions: int) -> bool:
        """Tell whether a tensor of so many dimensions is a softmax along its last axis: weights, not features."""
        if number is None or not self[number].is_softmax:
            return False
        axis = self[number].axis
        return axis is not None and axis in (dimensions - 1, -1, _LAST_AXIS)

    def queries_of(self, number: int) -> list[int | None] | None:
        """Return where the queries of attention came from, since its result lies where they do.

        None for what is not attention's weighted sum. The list is empty if the weights were no products of queries and
        keys.
        """
        operation = self[number]
        if operation.kind.startswith("ScaledDotProduct"):
            return [operation.inputs[0]]
        if not operation.is_product:
            return None
        softmaxes = [
            before for operand in operation.operands for before in self._back(operand) if self[before].is_softmax
        ]
        if not softmaxes:
            return None
        pairs = [
            (self[softmax], self[before])
            for softmax in softmaxes
            for before in self._back(softmax)
            if self[before].is_product
        ]
        return [product.operands[0 if softmax.rows == product.rows else 1] for softmax, product in pairs]

    def _back(self, number: int | None) -> Iterator[int]:
        """Walk back from an operation to the nearest products, convolutions and softmaxes, these included."""
        waiting, known = deque([number]), {number}
        while waiting:
            current = waiting.popleft()
            if current is None:
                continue
            yield current
            operation = self[current]
            if current == number or not (
                operation.is_softmax or any(kind in operation.kind for kind in ("mm", "Conv"))
            ):
                new = [before for before in operation.inputs if before not in known]
                known.update(new)
                waiting.extend(new)


def _set_of(numbers: Iterable[int]) -> int:
    members = 0
    for number in numbers:
        members |= 1 << number
    return members


def contains(members: int, number: int | None) -> bool:
    """Tell whether an operation is in a set of operations."""
    return number is not None and bool(members >> number & 1)


class Lineage(Generic[Note]):
    """Remembers a note for some operations and finds the nearest notes before an operation.

    Args:
        read: returns the note that an operation without one carries in itself, if any, and where to look behind it.
    """

    def __init__(self, read: Callable[[int], tuple[Note | None, Sequence[int | None]]]) -> None:
        self._notes: dict[int, Note] = {}
        self._read = read

    def add(self, number: int | None, note: Note) -> None:
        """Write a note to an operation, unless it has one."""
        if number is not None:
            self._notes.setdefault(number, note)

    def nearest(self, number: int | None) -> list[Note]:
        """Return the different notes met first on all ways back from an operation, the nearest first."""
        notes: list[Note] = []
        waiting, known = deque([number]), {number}
        while waiting:
            current = waiting.popleft()
            if current is None:
                continue
            note, behind = (self._notes[current], ()) if current in self._notes else self._read(current)
            if note is not None and note not in notes:
                notes.append(note)
            new = [before for before in behind if before not in known]
            known.update(new)
            waiting.extend(new)
        return notes


class GraphRecorder:
    """Turns the graph behind some tensors into a ``Graph``, and tells the number of each tensor's operation."""

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = leaf
        self._numbers: dict[Node, int] = {}
        self._operations: list[Operation] = []

    def graph(self) -> Graph:
        """Return what was recorded so far."""
        return Graph(tuple(self._operations))

    def number(self, node: Node | None) -> int | None:
        """Return the number of an operation; it and all before it are recorded now if they were not yet."""
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
        returned = getattr(
            node, "_input_metadata", ()
        )  # the backward's inputs have the shapes of the forward's outputs
        shape = tuple(returned[0].shape) if returned else None
        axis = getattr(node, "_saved_dim", None) if operation.is_softmax else None
        weight = getattr(node, "_saved_weight", None) if "Conv" in operation.kind else None
        kernel = None if weight is None else weight.shape[2:].numel()
        return Operation(operation.kind, inputs, shape, axis=None if axis is None else int(axis), kernel=kernel)
