"""From which earlier outputs a tensor was computed, read from the autograd graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

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
