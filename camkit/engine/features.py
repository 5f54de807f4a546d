"""A layer's output as feature maps on a grid of cells, and what one pass through a model leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Shaped
from torch import Tensor

from camkit.errors import LayerError
from camkit.targets.scores import Scores
from camkit.types import EVEN, Layout, Placement, ReferenceScores


@dataclass(frozen=True, eq=False)
class Features:
    r"""One layer's feature maps (N, C, \*grid), and for each target the tensor that weights them.

    ``by_target`` holds the gradients (N, C, \*grid), the class weights (N, C) of a linear head, or the finished weights
    of a method that was called during the pass. ``placement`` says where the cells lie on the input.
    """

    activations: Float[Tensor, "n c *grid"]
    by_target: tuple[Tensor, ...]
    placement: Placement = EVEN


@dataclass(frozen=True, eq=False)
class Capture:
    """The result of one pass: features and layouts per layer, in the order given, and scores per target.

    ``resized`` is True if the model resized and padded its input itself. ``references`` has, for each target, what the
    picture was compared with; it is empty if it was not, and None stands for a target that does not exist.
    """

    features: tuple[Features, ...]
    scores: tuple[Scores, ...]
    layouts: tuple[Layout, ...] = ()
    resized: bool = False
    references: tuple[ReferenceScores | None, ...] = ()


def to_grid(tensor: Shaped[Tensor, "*shape"], layout: Layout) -> Shaped[Tensor, "n c *grid"]:
    r"""Return a layer's output as (N, C, \*grid) without a copy if its memory allows.

    Raises:
        LayerError: the output no longer has the shape that the layout was read from.

    """
    try:
        if layout.kind == "channels_first":
            return tensor
        if layout.kind == "channels_last":
            return tensor.movedim(-1, 1)
        if layout.kind == "sequence_first":
            tensor = tensor.movedim(0, 1)
        cells = tensor if layout.kind == "tokens_last" else tensor.movedim(-1, 1)
        return on_grid(cells, layout)
    except RuntimeError as error:
        raise LayerError(
            f"a layer's output of shape {tuple(tensor.shape)} does not match its layout {str(layout)!r}; "
            "the model may have changed"
        ) from error


def on_grid(tokens: Shaped[Tensor, "*before tokens"], layout: Layout) -> Shaped[Tensor, "*before *grid"]:
    """Return the tokens of a grid, in the last axis of a tensor, as that grid."""
    cells, before = tokens[..., layout.prefix :][..., : math.prod(layout.grid)], tokens.shape[:-1]
    if not layout.order:
        return cells.reshape(*before, *layout.grid)
    cells = cells.reshape(*before, *(layout.grid[axis] for axis in layout.order))
    return cells.permute(*range(len(before)), *(len(before) + place for place in inverse(layout.order)))


def inverse(order: Sequence[int]) -> list[int]:
    """Return the places of the axes 0, 1, ... in an order of axes.

    >>> inverse((1, 2, 0))
    [2, 0, 1]
    """
    return [order.index(axis) for axis in range(len(order))]


def from_grid(maps: Shaped[Tensor, "n c *grid"], output: Shaped[Tensor, "*shape"], layout: Layout) -> Tensor:
    r"""Return feature maps (N, C, \*grid) in the layout of a layer's output: the reverse of ``to_grid``.

    Args:
        maps: the feature maps of N pictures.
        output: the layer's output for one picture; what is no cell, such as a class token, is repeated from it.
        layout: its layout.
    """
    if layout.kind == "channels_first":
        return maps
    if layout.kind == "channels_last":
        return maps.movedim(1, -1)
    repeats = [1] * output.dim()
    repeats[1 if layout.kind == "sequence_first" else 0] = len(maps)
    wide = output.repeat(repeats)
    to_grid(wide, layout).copy_(maps)
    return wide
