"""From which earlier outputs a tensor was computed, read from the autograd graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from torch import Tensor
from torch.autograd.graph import Node

Note = TypeVar("Note")


class Lineage(Generic[Note]):
    """Remembers a note for some nodes of a graph and finds the nearest notes before a node.

    Args:
        read: returns the note that a node without one carries in itself, if any, and which nodes to look at behind it.

    """

    def __init__(self, read: Callable[[Node], tuple[Note | None, Sequence[Node | None]]]) -> None:
        self._notes: dict[Node, Note] = {}
        self._read = read

    def add(self, node: Node | None, note: Note) -> None:
        """Write a note to a node, unless it has one."""
        if node is not None:
            self._notes.setdefault(node, note)

    def nearest(self, node: Node | None) -> list[Note]:
        """Return the different notes met first on all ways back from a node, the nearest first."""
        found: list[Note] = []
        waiting, known = deque([node]), {node}
        while waiting:
            current = waiting.popleft()
            if current is None:
                continue
            note, behind = (self._notes[current], ()) if current in self._notes else self._read(current)
            if note is not None and note not in found:
                found.append(note)
            new = [before for before in behind if before not in known]
            known.update(new)
            waiting.extend(new)
        return found


def behind(node: Node) -> list[Node | None]:
    """Return where a node's inputs came from."""
    return [before for before, _ in node.next_functions]


def ancestors(*nodes: Node | None) -> set[Node]:
    """Return all nodes that tensors were computed from, their own among them."""
    known: set[Node] = set()
    waiting = [*nodes]
    while waiting:
        current = waiting.pop()
        if current is not None and current not in known:
            known.add(current)
            waiting.extend(behind(current))
    return known


def spatial_shape(node: Node) -> tuple[int, ...] | None:
    """Return what a convolution, pooling or resizing returned, which has a grid for certain; None of other nodes."""
    if not any(kind in node.name() for kind in ("Conv", "Pool", "Upsample")):
        return None
    returned = getattr(node, "_input_metadata", ())  # the backward's inputs are shaped as the forward's outputs
    return tuple(returned[0].shape) if returned else None


def moves_over_cells(node: Node) -> bool:
    """Tell whether a node combined neighbouring cells, so that its axes are a grid; a 1 x 1 convolution does not."""
    if "Conv" not in node.name():
        return True
    weight = getattr(node, "_saved_weight", None)
    return weight is not None and weight.shape[2:].numel() > 1


def is_attention(node: Node | None, dimensions: int) -> bool:
    """Tell whether a tensor of so many dimensions came out of a softmax along its last: weights, not features."""
    if node is None or not _is_softmax(node):
        return False
    axis = getattr(node, "_saved_dim", None)
    return axis is not None and int(axis) in (dimensions - 1, -1, (1 << 64) - 1)


def is_regional(node: Node | None) -> bool:
    """Tell whether a tensor was computed from regions taken out of feature maps: its grid is a region's."""
    return any("roi" in before.name().casefold() for before in ancestors(node))


class Origin:
    """Tells what was computed from the input from what was only learned, such as a Perceiver's latent vectors.

    Args:
        leaf: the input.
    """

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = leaf
        self._from_input: dict[Node | None, bool] = {None: False}

    def is_learned(self, node: Node | None) -> bool:
        """Tell whether a tensor was computed from parameters alone; one outside the graph may be the input's."""
        return node is not None and not self.is_inputs(node)

    def is_inputs(self, node: Node | None) -> bool:
        """Tell whether the way back from a tensor leads to the input."""
        waiting = [node]
        while waiting:
            current = waiting[-1]
            if current is None or current in self._from_input:
                waiting.pop()
                continue
            unknown = [before for before in behind(current) if before not in self._from_input]
            if unknown:
                waiting.extend(unknown)
                continue
            variable = getattr(current, "variable", None)
            self._from_input[current] = variable is self._leaf or any(map(self._from_input.get, behind(current)))
            waiting.pop()
        return self._from_input[node]


def is_choice(node: Node) -> bool:
    """Tell whether a node picked entries by their numbers, as pruning of tokens does."""
    return node.name().startswith(("IndexBackward", "IndexSelectBackward", "GatherBackward"))


def queries_of(node: Node) -> list[Node | None] | None:
    """Return where the queries of attention came from, whose places its result has; None of what is no attention's sum.

    The list is empty where the weights were no products of queries and keys.
    """
    if node.name().startswith("ScaledDotProduct"):
        return [behind(node)[0]]
    if not _is_product(node):
        return None
    softmaxes = [before for operand in _operands(node) for before in _back(operand) if _is_softmax(before)]
    if not softmaxes:
        return None
    pairs = [(softmax, before) for softmax in softmaxes for before in _back(softmax) if _is_product(before)]
    return [_operands(product)[0 if _rows(softmax) == _rows(product) else 1] for softmax, product in pairs]


def _rows(node: Node) -> int:
    returned = node._input_metadata  # shaped as what the forward returned
    return int(returned[0].shape[-2])


def _is_softmax(node: Node) -> bool:
    return node.name().startswith(("SoftmaxBackward", "SafeSoftmaxBackward"))


def _is_product(node: Node) -> bool:
    return node.name().startswith(("BmmBackward", "BaddbmmBackward"))


def _operands(product: Node) -> list[Node | None]:
    """Return where the two matrices of a batched product came from, not what was added to it."""
    return behind(product)[-2:]


def _back(node: Node | None) -> Iterator[Node]:
    """Walk back from a node to the nearest products, convolutions and softmaxes, these included."""
    waiting, known = deque([node]), {node}
    while waiting:
        current = waiting.popleft()
        if current is None:
            continue
        yield current
        if current is node or not (_is_softmax(current) or any(kind in current.name() for kind in ("mm", "Conv"))):
            new = [before for before in behind(current) if before not in known]
            known.update(new)
            waiting.extend(new)
