"""From the order of a map's cells to the sets that are removed, and from scores to areas: pure functions.

All metrics that remove cells share one family of sets. The hot set H(a) holds the cells that are at least as hot as the
one at share a of the order. Cells of equal heat are never separated, so the order of equal cells, such as those without
any evidence, cannot matter, and no random draw decides. H(a) may therefore be larger than a: its own share is returned,
and areas are taken over these shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
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
    """Return the hot set of each share: the cells that are at least as hot as the ceil(share x cells)-th hottest.

    Args:
        heat: the map; it may have any sign.
        shares: ascending, above 0 and up to 1.
    """
    ordered = heat.flatten().sort(descending=True).values
    places = [min(len(ordered), max(1, math.ceil(share * len(ordered) - _ROUNDING))) - 1 for share in shares]
    return heat[None] >= ordered[places].reshape(-1, *[1] * heat.dim())


_ROUNDING = 1e-6
"""Cells by which a share times the number of cells may exceed a whole number by rounding."""


def distinct(sets: Bool[Tensor, "k *size"]) -> Bool[Tensor, "m *size"]:
    """Return nested sets in ascending order without repetitions, without the one that holds all cells."""
    counts = sets.flatten(1).sum(1)
    keep = [
        number
        for number, count in enumerate(counts.tolist())
        if count < sets[0].numel() and (not number or count != counts[number - 1])
    ]
    return sets[keep]


def shares_of(sets: Bool[Tensor, "k *size"]) -> Float[np.ndarray, " k"]:
    """Return the share of the cells in each set."""
    return np.asarray(sets.flatten(1).double().mean(1).numpy())


def area(shares: Float[np.ndarray, " k"], scores: Float[np.ndarray, " k"]) -> float:
    """Return the area under a curve by trapezoids."""
    return float(((scores[1:] + scores[:-1]) / 2 * np.diff(shares)).sum())
