"""Evidence 1: where the heat lies, beside what a blind map and a perfect one would reach on the same regions.

Notation, per image: h >= 0 the class map at the size of the input, M the object's region, both (H, W).
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from camkit.engine.heatmap import enlarge, upsample
from camkit.types import Extent

TOLERANCE = 15
"""Pixels by which a maximum may miss its region in the pointing game (Zhang et al. 2016, arXiv:1608.00507)."""


@dataclass(frozen=True)
class HeatMeasures:
    """What one map says of one region; what other maps say of it is known only when all are.

    Attributes:
        ceiling: the energy of the region itself, averaged down to the map's grid and upsampled again.
        hit: the map's maximum lies within TOLERANCE pixels of the region.
        centre_hit: the picture's centre does.
        rank: share of the hottest pixels, as many as the region has, that lie in it (Arras et al. 2022, relevance rank
            accuracy, arXiv:2003.07258).
        area: the region's share of the pixels that the model saw.
    """

    ceiling: float
    hit: bool
    centre_hit: bool
    rank: float
    area: float


def measure(
    heat: Float[Tensor, "h w"], region: Bool[Tensor, "h w"], view: Bool[Tensor, "h w"], grid: tuple[int, int]
) -> HeatMeasures:
    """Measure one map against one region; the map has heat somewhere, the region has pixels."""
    inside = int(region.sum())
    hottest = torch.topk(heat.flatten(), inside).indices
    near = _widened(region, TOLERANCE)
    height, width = region.shape
    return HeatMeasures(
        ceiling=ceiling(region, grid),
        hit=bool(near.flatten()[heat.flatten().argmax()]),
        centre_hit=bool(near[height // 2, width // 2]),
        rank=float(region.flatten()[hottest].double().mean()),
        area=inside / max(1, int(view.sum())),
    )


def ceiling(region: Bool[Tensor, "h w"], grid: tuple[int, int]) -> float:
    """Return the energy of a map that is as good as its grid allows: the region averaged to it and upsampled."""
    cells = functional.adaptive_avg_pool2d(region.float()[None], grid)
    best = upsample(cells, region.shape)[0].double()
    return float(best[region].sum() / best.sum())


def _widened(region: Bool[Tensor, "h w"], pixels: int) -> Bool[Tensor, "h w"]:
    width = 2 * pixels + 1
    near = cv2.dilate(region.numpy().view(np.uint8), np.ones((width, width), np.uint8))
    return torch.from_numpy(near.view(np.bool_))


def heat_in_cells(region: Bool[Tensor, "h w"], grid: tuple[int, int], extent: Extent) -> Float[np.ndarray, " cells"]:
    """Return how much heat within a region each cell of a map stands for.

    Upsampling is linear, so the heat within a region is a sum over the cells: a map's energy E is its heat within the
    region by that within the whole picture. With these numbers any map can be held against any region without drawing
    either.
    """
    cells = torch.zeros(1, *grid, requires_grad=True)
    with torch.enable_grad():
        drawn = enlarge(cells, region.shape, extent)[0]
        within = torch.autograd.grad(drawn[region].sum(), cells)[0]
    return np.asarray(within.double().numpy().ravel())


def energies(
    maps: Float[np.ndarray, "n cells"], within: Float[np.ndarray, "n cells"], everywhere: Float[np.ndarray, " cells"]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Return each map's energy E in its own region, and the shuffled baseline S: that of the other maps, on average.

    Args:
        maps: the positive part of each map, on its grid; every one has heat.
        within: for each region, the heat within it that each cell stands for.
        everywhere: the heat that each cell stands for.

    Returns:
        E and S; S is NaN where there is one map alone.
    """
    shares = maps / (maps @ everywhere)[:, None]
    own = (shares * within).sum(1)
    if len(maps) < 2:
        return own, np.full(len(maps), np.nan)
    # The mean over the others of sums is the sum over the mean of the others.
    return own, ((within @ shares.sum(0)) - own) / (len(maps) - 1)


def room(within: Float[np.ndarray, "n cells"], everywhere: Float[np.ndarray, " cells"]) -> Float[np.ndarray, " n"]:
    """Return how much more heat perfect maps have in their own region than in those of other pictures.

    Where objects lie at the same place in every picture that is little, and no map can show whose it is. None at all
    where there is one region alone, or where no cell of the map stands for a region.
    """
    found = np.zeros(len(within))
    some = within.any(1)
    if some.sum() > 1:
        own, shuffled = energies(within[some], within[some], everywhere)
        found[some] = own - shuffled
    return found
