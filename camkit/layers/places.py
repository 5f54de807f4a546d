"""Where a layer's cells are drawn: in the middle of their strides, or at the centres of their kernels.

With padding, the centre of a cell's kernels lies beside the middle of the pixels between which the cell and its
neighbours divide the picture. Training makes up for that: in a trained network, a cell looks at the middle of its
stride, and the cells' middle is the picture's. ``scripts/placement/measure_placement.py`` measured it. Nearly all
networks are trained on sides that are multiples of their strides. There, cells that are spread evenly lie in the
middle of their strides. On other sides they lie one stride apart as well, and not as far apart as an even spread draws
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from camkit.engine.passes import is_out_of_memory
from camkit.engine.record import ModelRecord
from camkit.layers.layouts import KNOWN, Cells, cells_of, grid_in
from camkit.layers.trace import followed
from camkit.types import CellPositions, Layout, Spread, TargetLayer

_STRIDES = (1, 2, 4, 8, 14, 16, 32)
"""The usual strides. If cells are as far apart as another number says, such as 30, strides may not fill the input."""

_DECIMALS = 3
"""The decimals of a position in pixels: finer than any drawing shows, and coarser than float32's rounding."""

_ROUNDED = 1e-3
"""A step backwards that is smaller than this share of half a picture, divided by its side, is rounding."""

_WHOLE = 32
"""Networks are trained on sides that are multiples of this, which is a multiple of nearly all strides."""


def _are_even(layout: Layout, size: tuple[int, ...], spread: Spread) -> bool:
    """Tell whether cells are spread evenly. In the middle of their strides they are if these fill the input."""
    if spread == "centres":
        return False
    if spread == "even" or layout.extent or len(layout.grid) != len(size):
        return True
    return all(side % cells == 0 and side // cells in _STRIDES for side, cells in zip(size, layout.grid, strict=True))


def with_places(
    model: nn.Module, image: Float[Tensor, "1 c *size"], layer: TargetLayer, spread: Spread, record: ModelRecord
) -> Layout:
    """Return a layer's layout with the places of its cells if they can be followed through the model.

    For cells that are not spread evenly it runs a pass. For cells in the middle of their strides, it runs another one
    on a picture of the usual size: the cells' middle is the picture's there, which says how far all lie beside the
    centres of their kernels.
    """
    assert layer.layout is not None
    if _are_even(layer.layout, tuple(image.shape[2:]), spread):
        return layer.layout
    centred = _centred(model, image, layer, record)
    if spread == "centres" or not centred.positions:
        return centred
    sides = _usual_sides(model, tuple(image.shape[2:]))
    usual = centred
    if sides != list(image.shape[2:]):
        try:
            usual = _centred(model, functional.interpolate(image, sides), layer, record)
        except Exception as error:  # a model that takes one size raises anything
            if is_out_of_memory(error):
                raise
            return layer.layout
    if not usual.positions:
        return layer.layout
    moved = [(side - 1) / 2 - sum(places) / len(places) for side, places in zip(sides, usual.positions, strict=True)]
    positions = tuple(
        tuple(place + by for place in places) for places, by in zip(centred.positions, moved, strict=True)
    )
    return replace(centred, positions=positions)


def _usual_sides(model: nn.Module, size: tuple[int, ...]) -> list[int]:
    """Return the sides of the pictures that a model was trained on, as far as it is known; frames keep their number."""
    about = getattr(model, "pretrained_cfg", None)  # timm's models have one
    known = about.get("input_size", ()) if isinstance(about, Mapping) else ()
    known = (3, 299, 299) if type(model).__name__ == "Inception3" else known
    if len(size) == len(known) - 1:
        return list(known[1:])
    return [*size[:-2], *(max(1, side // _WHOLE) * _WHOLE for side in size[-2:])]


def _centred(model: nn.Module, image: Float[Tensor, "1 c *size"], layer: TargetLayer, record: ModelRecord) -> Layout:
    """Return a layer's layout for an input of any size, with the centres of its cells' kernels if they are followed."""
    layout, size = layer.layout, tuple(image.shape[2:])
    assert layout is not None
    found = followed(model, image, (layer.name, layer.call or 1), record)
    if found is None or layout.kind not in found.places:
        return layout
    read = grid_in(layout.kind, cells_of(found.places[layout.kind]))
    if read is None:
        return layout
    own, cells = read
    return replace(layout, grid=own.grid, positions=_positions_of(cells, size))


def _positions_of(cells: Cells, size: tuple[int, ...]) -> CellPositions:
    """Return where the cells of a grid look along each axis, in pixels; empty if that cannot be told.

    Cells whose place is not known, such as those of padding, continue the row of the others.
    """
    weights, *coordinates = cells.double().cpu().numpy()
    known = weights > KNOWN
    positions: list[tuple[float, ...]] = []
    for axis, (side, places) in enumerate(zip(size, coordinates, strict=True)):
        others = tuple(other for other in range(len(size)) if other != axis)
        counts = known.sum(others)
        certain = np.flatnonzero(counts)
        if len(certain) < min(2, len(counts)):
            return ()
        means = np.where(known, places, 0).sum(others)[certain] / counts[certain]
        numbers = np.arange(len(counts))
        along = np.interp(numbers, certain, means)
        for end, inner in ((certain[0], certain[1]), (certain[-1], certain[-2])) if len(certain) > 1 else ():
            beyond = (numbers - end) * (end - inner) > 0
            step = (along[end] - along[inner]) / (end - inner)
            along[beyond] = along[end] + (numbers[beyond] - end) * step
        if (np.diff(along) < -_ROUNDED / side).any():
            return ()
        pixels = np.round((along + 1) / 2 * side - 0.5, _DECIMALS)
        positions.append(tuple(np.maximum.accumulate(pixels).tolist()))
    return tuple(positions)
