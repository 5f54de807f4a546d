"""Evidence 1: where the heat lies, compared with a blind map and with a perfect map on the same regions.

Notation for each image: h >= 0 is the class map at the size of the input, M is the object's region; both are (H, W).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from camkit.engine.heatmap import enlarge, upsample
from camkit.images.filling import POINTING_TOLERANCE, dilated
from camkit.types import Placement


@dataclass(frozen=True)
class HeatMeasures:
    """How one map fits one region, without regard to the other maps.

    Attributes:
        ceiling: the energy that a perfect map would have: the region averaged to the map's grid and upsampled again.
        hit: the share of the hottest pixels that lie within POINTING_TOLERANCE pixels of the region: 1 or 0 unless
            several tie.
        centre_hit: whether the picture's centre does.
        rank: for a region of n pixels, the share of the n hottest pixels that lies in the region (relevance rank
            accuracy; Arras et al. 2022, arXiv:2003.07258). If pixels of equal heat compete for the last
            places among the n, it is the mean over all choices.
        area: the region's share of the pixels that the model saw.
    """

    ceiling: float
    hit: float
    centre_hit: bool
    rank: float
    area: float


def measure(
    heat: Float[Tensor, "h w"], region: Bool[Tensor, "h w"], view: Bool[Tensor, "h w"], grid: tuple[int, int]
) -> HeatMeasures:
    """Measure one map against one region. The map must have some heat and the region some pixels.

    Args:
        heat: the map at the size of the model's input.
        region: the object's pixels.
        view: the pixels that show the picture and not padding.
        grid: rows and columns of the map before upsampling.
    """
    near = dilated(region, POINTING_TOLERANCE)
    height, width = region.shape
    return HeatMeasures(
        ceiling=ceiling(region, grid),
        hit=float(near[heat == heat.max()].double().mean()),
        centre_hit=bool(near[height // 2, width // 2]),
        rank=_rank_accuracy(heat, region),
        area=int(region.sum()) / max(1, int(view.sum())),
    )


def _rank_accuracy(heat: Float[Tensor, "h w"], region: Bool[Tensor, "h w"]) -> float:
    """Return the share of the n hottest pixels that lies in a region of n pixels, averaged over the order of ties."""
    pixels = int(region.sum())
    coldest = torch.topk(heat.flatten(), pixels).values[-1]
    hotter, tied = heat > coldest, heat == coldest
    places = pixels - int(hotter.sum())
    return (int(region[hotter].sum()) + places * float(region[tied].double().mean())) / pixels


def ceiling(region: Bool[Tensor, "h w"], grid: tuple[int, int]) -> float:
    """Return the energy of the best map that the grid allows: the region averaged to the grid and upsampled."""
    cells = functional.adaptive_avg_pool2d(region.float()[None], grid)
    best = upsample(cells, region.shape)[0].double()
    return float(best[region].sum() / best.sum())


def heat_in_cells(
    region: Bool[Tensor, "h w"], grid: tuple[int, int], placement: Placement
) -> Float[np.ndarray, " cells"]:
    """Return, for each cell of a map, the heat that one unit in the cell puts into a region after upsampling.

    Upsampling is linear, so the heat within a region is a weighted sum over the cells. The energy E of a map is its
    heat within the region divided by its heat within the whole picture. With these weights, any map can be compared
    with any region, and neither is upsampled.
    """
    cells = torch.zeros(1, *grid, requires_grad=True)
    with torch.enable_grad():
        upsampled = enlarge(cells, region.shape, placement)[0]
        within = torch.autograd.grad(upsampled[region].sum(), cells)[0]
    return np.asarray(within.double().numpy().ravel())


def energies(
    maps: Float[np.ndarray, "n cells"], within: Float[np.ndarray, "n cells"], everywhere: Float[np.ndarray, " cells"]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Return each map's energy E in its own region, and the mean energy S of the other maps in that region.

    Args:
        maps: the positive part of each map, on its grid; each must have some heat.
        within: for each region, the weights that ``heat_in_cells`` returns.
        everywhere: the same weights for the whole picture.

    Returns:
        E and S. S, the shuffled baseline, is NaN if there is only one map.
    """
    shares = maps / (maps @ everywhere)[:, None]
    own = (shares * within).sum(1)
    if len(maps) < 2:
        return own, np.full(len(maps), np.nan)
    # Subtracting the map's own part from the sum over all maps gives the mean over the others without a loop.
    return own, ((within @ shares.sum(0)) - own) / (len(maps) - 1)


def headroom(within: Float[np.ndarray, "n cells"], everywhere: Float[np.ndarray, " cells"]) -> Float[np.ndarray, " n"]:
    """Return how much more heat perfect maps have in their own region than in the regions of other pictures.

    If objects lie at the same place in every picture, the headroom is small: no map can show which object it follows.
    It is 0 if there is only one region, or if no cell of the map reaches a region.
    """
    gain = np.zeros(len(within))
    reached = within.any(1)
    if reached.sum() > 1:
        own, shuffled = energies(within[reached], within[reached], everywhere)
        gain[reached] = own - shuffled
    return gain
