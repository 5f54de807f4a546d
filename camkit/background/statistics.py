"""The statistics of the check: intervals by resampling groups, p-values against a limit, and many tests at once.

Everything here is a pure function of arrays and a seed: nothing depends on threads or on the order of batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

RESAMPLES = 10_000
"""Bootstrap resamples."""

_MANY_GROUPS = 5_000
"""Groups of which sums over resamples are drawn from the normal distribution that they follow by then."""

LEAST_GROUPS = 5
"""Groups a bootstrap interval needs; of one it would have no width."""

_AT_ONCE = 2_000_000
"""Numbers drawn at a time, to bound memory."""


@dataclass(frozen=True)
class Estimate:
    """A measured value with its two-sided interval, and how many independent groups it comes from."""

    value: float
    low: float
    high: float
    groups: int


def numbered(groups: Sequence[str]) -> Int[np.ndarray, " n"]:
    """Return a number from 0 for each group's name, in order of name.

    >>> numbered(["b", "a", "b"]).tolist()
    [1, 0, 1]
    """
    known = {name: number for number, name in enumerate(sorted(set(groups)))}
    return np.array([known[name] for name in groups], dtype=int)


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the score interval of a proportion (Wilson 1927).

    >>> low, high = wilson(0, 30)
    >>> round(low, 3), round(high, 3)
    (0.0, 0.114)
    """
    if trials == 0:
        return 0.0, 1.0
    found = stats.binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(found.low), float(found.high)


def resampled(
    rows: Float[np.ndarray, "n k"], groups: Int[np.ndarray, " n"], seed: Sequence[int], resamples: int = RESAMPLES
) -> Float[np.ndarray, "b k"]:
    """Return the sums of rows over bootstrap resamples of whole groups.

    Args:
        rows: what is summed for each picture: numerators and denominators.
        groups: the group of each row, from 0; rows of one group are drawn together (patients, videos).
        seed: of the draws.
        resamples: how many.
    """
    count = int(groups.max(initial=-1)) + 1
    sums = np.zeros((count, rows.shape[1]))
    np.add.at(sums, groups, rows)
    rng = np.random.default_rng(list(seed))
    if count > _MANY_GROUPS:
        return rng.multivariate_normal(sums.sum(0), count * np.cov(sums.T, bias=True), resamples, method="eigh")
    step = max(1, _AT_ONCE // max(count, 1))
    drawn = np.empty((resamples, rows.shape[1]))
    for start in range(0, resamples, step):
        picks = rng.integers(count, size=(min(step, resamples - start), count))
        places = picks + count * np.arange(len(picks))[:, None]
        weights = np.bincount(places.ravel(), minlength=picks.size).reshape(picks.shape)
        drawn[start : start + len(picks)] = weights.astype(float) @ sums
    return drawn


def interval(draws: Float[np.ndarray, " b"], value: float, groups: int, confidence: float = 0.95) -> Estimate:
    """Return a value with the middle share of its bootstrap draws; draws that are no number are left out.

    Of fewer than LEAST_GROUPS groups the bootstrap says nothing of what others would show: the interval is NaN.
    """
    known = draws[np.isfinite(draws)]
    if groups < LEAST_GROUPS or not len(known):
        return Estimate(value, float("nan"), float("nan"), groups)
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(value, float(low), float(high), groups)


def p_above(draws: Float[np.ndarray, " b"], limit: float, groups: int) -> float:
    """Return the one-sided bootstrap p-value of "the value is not above the limit".

    The draw at hand counts as one of them (Davison and Hinkley 1997, 4.2.3), and a draw that is no number speaks for
    the limit. Where no draw does, the p-value is the tail of the normal distribution with the draws' mean and
    deviation: smaller than draws could tell, which many classes need. Of few groups the bootstrap knows too little: the
    p-value is at least that of a sign test in which all are above the limit, and 1 of fewer than LEAST_GROUPS.

    >>> p_above(np.array([0.3, 0.2, 0.05]), 0.1, 20)
        0.5
    """
    if groups < LEAST_GROUPS:
        return 1.0
    against = int(np.count_nonzero(~(draws > limit)))
    p = (1 + against) / (1 + len(draws))
    if against == 0:
        spread = float(draws.std())
        p = min(p, float(stats.norm.sf((float(draws.mean()) - limit) / spread))) if spread > 0 else 0.0
    return max(p, 0.5**groups)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted so that any false rejection among them is controlled (Holm 1979).

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda number: p_values[number])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, number in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = largest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the share of false ones among those listed (Benjamini and Hochberg 1995)."""
    return [float(p) for p in stats.false_discovery_control(list(p_values))] if p_values else []
