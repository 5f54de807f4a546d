"""The autograd graph of a pass: which operation was computed from which others.

Each operation has a higher number than those it was computed from. A set of operations is an integer with one bit per
operation, which makes it cheap to look up ancestors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

_KEEPING = frozenset(
    [
        "AdaptiveAvgPool2D", "Add", "AvgPool2D", "AvgPool3D", "Clamp", "ClampMin", "Clone", "Convolution",
        "CudnnBatchNorm", "Div", "Elu", "Gelu", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu",
        "MaxPool2DWithIndices", "MaxPool3DWithIndices", "Mean", "Mish", "Mul", "NativeBatchNorm", "NativeDropout",
        "NativeGroupNorm", "PreluKernel", "Relu", "Sigmoid", "Silu", "Softplus", "Squeeze", "Sub", "Tanh", "ToCopy",
        "Unsqueeze", "UpsampleBilinear2D", "UpsampleNearest2D",
    ]
)  # fmt: skip
"""The operations of convolutional networks, which leave every cell in its place. After any other operation, camkit
changes the picture to see where cells lie, which takes passes."""

_ON_AXES = frozenset(
    [
        "Cat", "Expand", "ReshapeAlias", "Select", "Slice", "Softmax", "Split", "Stack", "Sum", "Transpose", "Unbind",
        "UnsafeView", "View",
    ]
)  # fmt: skip
"""The operations that leave every cell in its place if they work on other axes than those of the grid, such as the
shuffle of channels in ShuffleNet."""


class Graph:
    """The operations of a pass, recorded as tensors are asked for.

    Args:
        leaf: the input of the pass.
    """

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = leaf
        self._numbers: dict[Node, int] = {}
        self._inputs: list[list[int]] = []
        self._ancestors: list[int] = []
        self.kept = 0
        """The set of operations up to which every cell of the input stays in its place."""
        self.leaves = 0
        """The set of operations that stand for the input of the pass."""
        self.attention = 0
        """The set of softmaxes along the last axis, which are weights and not features."""
        self.regional = 0
        """The set of operations that crop regions from feature maps."""
        self.sampling = 0
        """The set of operations that may take pixels from places that the picture decides (Jaderberg et al. 2015)."""

    def begin_at(self, node: Node | None) -> None:
        """Count cells as kept from this operation on, whatever a model does to its picture before."""
        number = self.number(node)
        if number is not None:
            self.kept |= 1 << number

    def number(self, node: Node | None) -> int | None:
        """Return the number of an operation; record it and all operations before it if necessary."""
        waiting = [] if node is None else [node]
        while waiting:
            current = waiting[-1]
            if current in self._numbers:
                waiting.pop()
                continue
            behind = [before for before, _ in current.next_functions if before is not None]
            missing = [before for before in behind if before not in self._numbers]
            if not missing:
                self._record(current, [self._numbers[before] for before in behind])
            waiting += missing
        return None if node is None else self._numbers[node]

    def _record(self, node: Node, inputs: list[int]) -> None:
        own = 1 << len(self._inputs)
        self._numbers[node] = len(self._inputs)
        self._inputs.append(inputs)
        self._ancestors.append(own | self.ancestors(*inputs))
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        derived = [number for number in inputs if self._ancestors[number] & self.leaves]
        if getattr(node, "variable", None) is self._leaf:
            self.leaves |= own
            self.kept |= own
        keeps = kind in _KEEPING or (kind in _ON_AXES and _leaves_grid(node, self._leaf.dim() - 2))
        if derived and keeps and all(self.kept >> number & 1 for number in derived):
            self.kept |= own
        if kind in ("Softmax", "SafeSoftmax") and not _leaves_grid(node, 1):
            self.attention |= own
        if "roi" in kind.casefold():
            self.regional |= own
        if any(name in kind.casefold() for name in ("gridsampler", "deformconv")):
            self.sampling |= own

    def ancestors(self, *numbers: int | None) -> int:
        """Return the set of all operations that some operations were computed from, including themselves."""
        members = 0
        for number in numbers:
            if number is not None:
                members |= self._ancestors[number]
        return members

    def inputs(self, *numbers: int) -> list[int]:
        """Return the operations whose results some operations use."""
        return [before for number in numbers for before in self._inputs[number]]

    def before(self, end: int | None, without: int = 0) -> int:
        """Return the set of operations from which a path leads to ``end`` that touches none of the set ``without``."""
        waiting, members = [] if end is None else [end], 0
        while waiting:
            number = waiting.pop()
            if not (members | without) >> number & 1:
                members |= 1 << number
                waiting += self._inputs[number]
        return members


def _leaves_grid(node: Any, rank: int) -> bool:
    """Tell whether an operation on axes leaves the last ones, those of a grid, alone."""
    after = tuple(node._input_metadata[0].shape)
    before = tuple(getattr(node, "_saved_self_sym_sizes", after))
    axes: list[int] = []
    for name in ("_saved_dim", "_saved_dim0", "_saved_dim1"):
        axis = getattr(node, name, ())
        axes += axis if isinstance(axis, tuple) else [axis]
    count = max(len(before), len(after))
    # Autograd stores the axis -1 as 2^64 - 1.
    return before[-rank:] == after[-rank:] and all(axis < count - rank for axis in axes)


def set_of(*numbers: int | None) -> int:
    """Return the set of some operations."""
    members = 0
    for number in numbers:
        if number is not None:
            members |= 1 << number
    return members
