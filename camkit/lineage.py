"""From which earlier outputs a tensor was computed, read from the autograd graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch import Tensor
from torch.autograd.graph import Node

Note = TypeVar("Note")


class Lineage(Generic[Note]):
    """Remembers a note for some nodes of a graph and finds the nearest notes before a node.

    Args:
        read: returns the note that a node without one carries in itself, if any, and whether to look behind it.

    """

    def __init__(self, read: Callable[[Node], tuple[Note | None, bool]]) -> None:
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
            note, go_on = (self._notes[current], False) if current in self._notes else self._read(current)
            if note is not None and note not in found:
                found.append(note)
            if go_on:
                new = [before for before, _ in current.next_functions if before not in known]
                known.update(new)
                waiting.extend(new)
        return found


def ancestors(node: Node | None) -> set[Node]:
    """Return all nodes a tensor was computed from, its own among them."""
    known: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current is not None and current not in known:
            known.add(current)
            waiting.extend(before for before, _ in current.next_functions)
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
    if node is None or not node.name().startswith("SoftmaxBackward"):
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
        return node is not None and not self._depends(node)

    def is_learned_attention(self, node: Node) -> bool:
        """Tell whether a node is the weighted sum of attention whose queries were learned.

        What it returns has a place for each query, and such a query has no place in the picture.
        """
        if node.name().startswith("ScaledDotProduct"):
            return not self._depends(node.next_functions[0][0])
        if not _is_product(node):
            return False
        softmaxes = [before for operand in _operands(node) for before in _back(operand) if _is_softmax(before)]
        scores = [before for softmax in softmaxes for before in _back(softmax) if _is_product(before)]
        return bool(scores) and not any(self._depends(_operands(score)[0]) for score in scores)

    def _depends(self, node: Node | None) -> bool:
        waiting = [node]
        while waiting:
            current = waiting[-1]
            if current is None or current in self._from_input:
                waiting.pop()
                continue
            before = [earlier for earlier, _ in current.next_functions]
            unknown = [earlier for earlier in before if earlier not in self._from_input]
            if unknown:
                waiting.extend(unknown)
                continue
            variable = getattr(current, "variable", None)
            self._from_input[current] = variable is self._leaf or any(self._from_input[earlier] for earlier in before)
            waiting.pop()
        return self._from_input[node]


def _is_softmax(node: Node) -> bool:
    return node.name().startswith("SoftmaxBackward")


def _is_product(node: Node) -> bool:
    return node.name().startswith(("BmmBackward", "BaddbmmBackward"))


def _operands(product: Node) -> list[Node | None]:
    """Return where the two matrices of a batched product came from, not what was added to it."""
    return [before for before, _ in product.next_functions[-2:]]


def _back(node: Node | None) -> Iterator[Node]:
    """Walk back from a node to the nearest products, convolutions and softmaxes, these included."""
    waiting, known = deque([node]), {node}
    while waiting:
        current = waiting.popleft()
        if current is None:
            continue
        yield current
        if current is node or not (_is_softmax(current) or any(kind in current.name() for kind in ("mm", "Conv"))):
            new = [before for before, _ in current.next_functions if before not in known]
            known.update(new)
            waiting.extend(new)
