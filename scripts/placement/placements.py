"""Two ways to place the cells of a network's grid, and how far maps and cells lie from where they should."""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import camkit
from camkit.engine.heatmap import enlarge
from camkit.types import CellPositions, Placement, Spread

EVEN, MEASURED = "even", "measured"
"""The ways to spread cells, as ``camkit.Explainer`` names them."""

Profiles = NDArray[np.float64]
"""The sums of maps along the other axis, (maps, pixels)."""


def placements_of(model: nn.Module, size: tuple[int, int], device: torch.device) -> dict[str, CellPositions]:
    """Return the places of the cells of the layer that camkit explains, in pixels of an input (height, width)."""
    picture = torch.randn(3, *size, generator=torch.Generator().manual_seed(0))
    found = {}
    for spread in get_args(Spread):
        explanation = camkit.Explainer(model, method="gradcam", spread=spread, device=device)(picture)
        found[spread] = tuple(tuple(map(float, places)) for places in explanation.positions)
    return found


def drawn(raws: Tensor, size: tuple[int, int], places: CellPositions) -> Tensor:
    """Enlarge the positive part of signed maps (N, h, w) to an input's size, with the cells at these places."""
    if tuple(raws.shape[1:]) != tuple(map(len, places)):
        raise ValueError(f"maps of {tuple(raws.shape[1:])} cells, and places for {tuple(map(len, places))}")
    return enlarge(raws.relu(), size, Placement(positions=places))


def differ(one: CellPositions, other: CellPositions) -> bool:
    """Tell whether some cell lies elsewhere, by at least half a pixel."""
    return any(np.abs(np.subtract(*pair)).max() >= 0.5 for pair in zip(one, other, strict=True))


def profiles(maps: Tensor, axis: int) -> Profiles:
    """Return the profiles of maps (N, H, W) along an axis: 0 is down, 1 is to the right."""
    return np.asarray(maps.double().sum(2 - axis).cpu().numpy())


def likenesses(first: Profiles, second: Profiles, most: int, step: int = 1) -> Profiles:
    """Return the correlation of each pair of profiles if the second is moved by -most to most pixels, in steps.

    Only the middle of the first profile is compared, so all correlations are of equally many pixels. A profile that is
    the same everywhere has the correlation 0.
    """
    width = first.shape[1] - 2 * most
    middle = _normalised(first[:, most : most + width])
    moved = (second[:, most - by : most - by + width] for by in range(-most, most + 1, step))
    return np.stack([(middle * _normalised(part)).sum(1) for part in moved], 1)


def _normalised(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    rows = rows - rows.mean(-1, keepdims=True)
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(np.where(lengths > 1e-9, rows / np.where(lengths > 1e-9, lengths, 1), 0))


def best_shift(likeness: NDArray[np.float64]) -> float:
    """Return the shift at which a curve of ``likenesses``, the mean over pairs, is largest; in parts of a step."""
    most, best = len(likeness) // 2, int(likeness.argmax())
    if not 0 < best < len(likeness) - 1:
        return float(best - most)
    before, top, after = likeness[best - 1 : best + 2]
    bend = before - 2 * top + after
    return float(best - most + (0.5 * (before - after) / bend if bend < 0 else 0.0))


def seen_by_cells(cells: Profiles, objects: Profiles, stride: float) -> NDArray[np.float64]:
    """Return the place in the picture with which each cell's heat varies, by reverse correlation.

    Args:
        cells: the heat of each row or column of cells, (scenes, cells).
        objects: the profiles of the objects' masks, (scenes, pixels).
        stride: pixels from cell to cell.
    """
    totals = cells.sum(1, keepdims=True)
    shares = cells / np.where(totals > 0, totals, 1)
    objects = objects / objects.sum(1, keepdims=True)
    together = (shares - shares.mean(0)).T @ (objects - objects.mean(0))
    pixels = np.arange(objects.shape[1])
    found = []
    for curve in together:
        near = np.abs(pixels - curve.argmax()) <= 1.5 * stride
        weights = np.where(near, curve.clip(0), 0)
        found.append(float((weights * pixels).sum() / max(weights.sum(), 1e-12)))
    return np.array(found)


def centre_of_gradients(gradients: Tensor) -> tuple[float, float]:
    """Return the mean centre of mass of squared gradients at pictures (N, C, H, W), down and to the right."""
    squares = gradients.double().square().sum(1)
    centres = []
    for axis in (0, 1):
        lines = squares.sum(2 - axis)
        places = torch.arange(lines.shape[1], device=lines.device, dtype=torch.float64)
        centres.append(float(((lines * places).sum(1) / lines.sum(1)).nanmean()))
    return centres[0], centres[1]
