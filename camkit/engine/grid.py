"""Turn layers' outputs into grids of cells over the input."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxtyping import Shaped
from torch import Tensor

from camkit.errors import LayerError
from camkit.types import Extent, Layout


def margins(size: Sequence[int], extent: Extent) -> list[int]:
    """Return how many pixels a grid extends before and after an input of this size, from the last axis to the first.

    This is the order that ``torch.nn.functional.pad`` takes. A negative number means that the grid misses pixels.
    """
    amounts: list[int] = []
    for side, (start, end) in zip(reversed(size), reversed(extent), strict=True):
        whole = round(side / (end - start))
        before = round(start * whole)
        amounts += [before, whole - before - side]
    return amounts


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
        cells = cells[:, :, layout.prefix :][:, :, : math.prod(layout.grid)]
        return cells.reshape(*cells.shape[:2], *layout.grid)
    except RuntimeError as error:
        raise LayerError(
            f"a layer's output of shape {tuple(tensor.shape)} does not match its layout {str(layout)!r}; "
            "the model may have changed"
        ) from error


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
