"""From the order of a map's cells to the sets that are removed, and from scores to areas: pure functions.

All metrics that remove cells share one family of sets. The hot set H(a) holds the cells that are at least as hot as the
one at share a of the order. Cells of equal heat are never separated, so the order of equal cells, such as those without
any evidence, cannot matter, and no random draw decides. If equal cells make H(a) larger than a, the set of the hotter
cells alone is used as well: the few hot cells of a sparse map are judged by themselves. Areas are taken over the sets'
own shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Curve:
    """The model's confidence along the hot sets of a map, from the empty set to all cells.

    Attributes:
        shares: the share of the cells in each hot set, from 0 to 1.
        scores: the confidence for each.
    """

    shares: Float[np.ndarray, " k"]
    scores: Float[np.ndarray, " k"]

    @property
    def area(self) -> float:
        """The area under the curve, by trapezoids; in the unit of the scores."""
        return area(self.shares, self.scores)


def even_shares(steps: int) -> tuple[float, ...]:
    """Return the shares of ``steps`` equal steps, without 0: ``(0.25, 0.5, 0.75, 1.0)`` for 4."""
    return tuple((number + 1) / steps for number in range(steps))


def hot_sets(heat: Float[Tensor, "*size"], shares: Sequence[float]) -> Bool[Tensor, "k *size"]:
    """Return the set of the hottest cells for each share, as near to it in size as equal cells allow.

    Args:
        heat: the map; it may have any sign.
        shares: ascending, above 0 and up to 1.
    """
    wanted, sets, hotter = _sets(heat, shares)
    counts, fewer = sets.flatten(1).sum(1), hotter.flatten(1).sum(1)
    nearer = (wanted - fewer < counts - wanted) & (fewer > 0)
    return torch.where(nearer.reshape(-1, *[1] * heat.dim()), hotter, sets)


def curve_sets(heat: Float[Tensor, "*size"], shares: Sequence[float]) -> Bool[Tensor, "m *size"]:
    """Return the sets of a curve, from the smallest to the largest, without the empty set and that of all cells.

    Args:
        heat, shares: as for ``hot_sets``.
    """
    wanted, sets, hotter = _sets(heat, shares)
    tied = sets.flatten(1).sum(1) > wanted
    both = torch.cat([sets, hotter[tied]])
    counts = both.flatten(1).sum(1)
    order = [number for number in counts.argsort(stable=True).tolist() if 0 < counts[number] < heat.numel()]
    kept = [number for place, number in enumerate(order) if not place or counts[number] != counts[order[place - 1]]]
    return both[kept]


def _sets(
    heat: Float[Tensor, "*size"], shares: Sequence[float]
) -> tuple[Int[Tensor, " k"], Bool[Tensor, "k *size"], Bool[Tensor, "k *size"]]:
    """Return for each share its number of cells, the cells at least as hot as the last of them, and the hotter ones."""
    cells = heat.numel()
    wanted = cells_of(shares, cells)
    ranks = [cells - count for count in wanted]
    ordered = np.partition(heat.numpy(), ranks, axis=None)  # puts these ranks in order, which is faster than sorting
    limits = torch.from_numpy(ordered[ranks]).reshape(-1, *[1] * heat.dim())
    return torch.tensor(wanted), heat[None] >= limits, heat[None] > limits


def cells_of(shares: Sequence[float], cells: int) -> list[int]:
    """Return how many of a map's cells make up each share: rounded up, and at least one."""
    return [min(cells, max(1, math.ceil(share * cells - _ROUNDING))) for share in shares]


_ROUNDING = 1e-6
"""Cells by which a share times the number of cells may exceed a whole number by rounding."""


def shares_of(sets: Bool[Tensor, "k *size"]) -> Float[np.ndarray, " k"]:
    """Return the share of the cells in each set."""
    return np.asarray(sets.flatten(1).double().mean(1).numpy())


def area(shares: Float[np.ndarray, " k"], scores: Float[np.ndarray, " k"]) -> float:
    """Return the area under a curve by trapezoids."""
    return float(((scores[1:] + scores[:-1]) / 2 * np.diff(shares)).sum())
