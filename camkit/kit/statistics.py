"""Statistics of samples: bootstrap intervals over groups, p-values against a limit, and corrections of them.

Every function depends on its arguments and a seed alone, never on the number of threads or the order of batches.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

RESAMPLES = 10_000
"""Bootstrap resamples: enough for p-values down to 1e-4 before ``p_above`` turns to the normal tail."""

MIN_GROUPS = 5
"""Groups that a bootstrap interval needs. With one group the interval would have no width."""


@dataclass(frozen=True)
class Estimate:
    """A measured value with its two-sided interval and the number of independent groups behind it."""

    value: float
    low: float
    high: float
    groups: int


def seed_of(name: str) -> int:
    """Return the seed that belongs to a name, the same on every machine."""
    return zlib.crc32(name.encode(errors="surrogateescape"))


def group_numbers(groups: Sequence[str]) -> Int[np.ndarray, " n"]:
    """Return each group's number, from 0, in the alphabetical order of the names.

    >>> group_numbers(["b", "a", "b"]).tolist()
    [1, 0, 1]
    """
    return np.unique(groups, return_inverse=True)[1]


def effective_groups(groups: Sequence[str]) -> int:
    """Return how many groups of equal size say as much as the given ones, one entry for each picture.

    This is (sum n)^2 / sum n^2, where n is the number of pictures of a group (Kish 1965): the mean over pictures whose
    groups are alike inside varies as much as the mean over that many groups of one size.

    >>> effective_groups(["a", "b", "b", "c"]), effective_groups(["a"] * 9 + ["b"])
    (3, 1)
    """
    sizes = Counter(groups).values()
    return round(sum(sizes) ** 2 / sum(size**2 for size in sizes)) if sizes else 0


@functools.cache
def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion (Wilson 1927).

    >>> low, high = wilson(0, 30)
    >>> round(low, 3), round(high, 3)
    (0.0, 0.114)
    """
    if trials == 0:
        return 0.0, 1.0
    score_interval = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    return float(score_interval.low), float(score_interval.high)


def strata_of_groups(groups: Int[np.ndarray, " n"], labels: Sequence[str]) -> Int[np.ndarray, " g"]:
    """Return each group's stratum: its class, or 0 for groups of several classes and for classes of few groups.

    A class with fewer than MIN_GROUPS groups is no stratum of its own, because its spread would be underestimated.

    >>> strata_of_groups(np.arange(11), [*"aaaaabbbbbc"]).tolist()
    [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0]
    """
    classes = group_numbers(labels) + 1
    count = int(groups.max(initial=-1)) + 1
    lowest, highest = np.full(count, len(labels)), np.zeros(count, dtype=int)
    np.minimum.at(lowest, groups, classes)
    np.maximum.at(highest, groups, classes)
    strata = np.where(lowest == highest, lowest, 0)
    return np.where(np.bincount(strata)[strata] < MIN_GROUPS, 0, strata)


def bootstrap_sums(
    rows: Float[np.ndarray, "n k"],
    groups: Int[np.ndarray, " n"],
    seed: Sequence[int],
    resamples: int = RESAMPLES,
    strata: Int[np.ndarray, " g"] | None = None,
) -> Float[np.ndarray, "b k"]:
    """Return the column sums of each bootstrap resample, which draws whole groups with replacement.

    Args:
        rows: one row per picture with the terms to sum: numerators and denominators.
        groups: each row's group, numbered from 0. The rows of a group (a patient, a video) are drawn together.
        seed: the seed of the draws.
        resamples: the number of resamples.
        strata: each group's stratum, numbered from 0; a group is replaced only by groups of its own stratum. The sample
            of the experiment has a fixed number of pictures of each class, so differences between classes are no part
            of its error (Davison and Hinkley 1997, 3.2). None stands for a single stratum.
    """
    count = int(groups.max(initial=-1)) + 1
    sums = np.zeros((count, rows.shape[1]))
    np.add.at(sums, groups, rows)
    strata = np.zeros(count, dtype=int) if strata is None else strata
    rng = np.random.default_rng(list(seed))
    # The sums of many groups follow a normal distribution closely, and drawing group by group would take too long
    if count > 5_000:
        members = [sums[strata == stratum] for stratum in np.unique(strata)]
        covariance = sum(len(own) * np.cov(own.T, bias=True) for own in members)
        return rng.multivariate_normal(sums.sum(0), covariance, resamples, method="eigh")
    sums = sums[np.argsort(strata, kind="stable")]  # now each stratum is a range of rows
    sizes = np.bincount(strata)
    size, first = (np.repeat(column, sizes) for column in (sizes, np.cumsum(sizes) - sizes))
    step = max(1, 2_000_000 // max(count, 1))  # random numbers drawn at a time, to bound memory
    drawn = np.empty((resamples, rows.shape[1]))
    for start in range(0, resamples, step):
        picks = first + (rng.random((min(step, resamples - start), count)) * size).astype(int)
        bins = picks + count * np.arange(len(picks))[:, None]  # one range of bins per resample
        weights = np.bincount(bins.ravel(), minlength=picks.size).reshape(picks.shape)
        drawn[start : start + len(picks)] = weights.astype(float) @ sums
    return drawn


def added_variance(
    residuals: Float[np.ndarray, " m"], first: Int[np.ndarray, " m"], second: Int[np.ndarray, " m"]
) -> float:
    """Return what a second way of grouping adds to the variance of a sum whose terms are grouped in a first way.

    An object is shown on several backgrounds, and a background is shown behind several objects. The variance of the sum
    of the residuals is V(first) + V(second) - V(both), where V adds up the squared sums of the groups, and "both"
    groups the terms that share both (Cameron, Gelbach and Miller 2011, 10.1198/jbes.2010.07136, Eq. 2.11). This
    function returns V(second) - V(both), and 0 if that is negative.

    Args:
        residuals: what each term adds to the sum, minus its expectation.
        first, second: each term's group of either kind, numbered from 0.

    >>> added_variance(np.array([1.0, 1.0, -1.0, -1.0]), np.array([0, 1, 2, 3]), np.array([0, 0, 1, 1]))
    10.66...
    """
    both = np.unique(first * (second.max(initial=0) + 1) + second, return_inverse=True)[1]
    return max(0.0, _variance_over(residuals, second) - _variance_over(residuals, both))


def _variance_over(residuals: Float[np.ndarray, " m"], groups: Int[np.ndarray, " m"]) -> float:
    """Return the variance of the sum of residuals whose groups are independent."""
    count = len(np.unique(groups))
    return float(np.square(np.bincount(groups, residuals)).sum()) * count / max(1, count - 1)


def interval(draws: Float[np.ndarray, " b"], value: float, groups: int) -> Estimate:
    """Return a value with the 95 % percentile interval of its bootstrap draws; NaN and infinite draws are ignored.

    With fewer than MIN_GROUPS groups the bootstrap cannot tell what other groups would show, so the interval is NaN.
    """
    finite = draws[np.isfinite(draws)]
    if groups < MIN_GROUPS or not len(finite):
        return Estimate(value, float("nan"), float("nan"), groups)
    low, high = np.quantile(finite, [0.025, 0.975])
    return Estimate(value, float(low), float(high), groups)


def mean_over_groups(
    values: Sequence[float], groups: Sequence[str], seed: Sequence[int]
) -> tuple[Estimate, Float[np.ndarray, " b"]]:
    """Return the mean of some values with its interval, and its bootstrap draws; a group's values are drawn together.

    >>> mean_over_groups([1.0] * 6, [*"abcdef"], [0])[0]
    Estimate(value=1.0, low=1.0, high=1.0, groups=6)
    """
    numbers = group_numbers(groups)
    sums = bootstrap_sums(np.column_stack([values, np.ones(len(values))]), numbers, seed)
    draws = sums[:, 0] / sums[:, 1]
    return interval(draws, float(np.mean(values)), int(numbers.max()) + 1), draws


def widened(estimate: Estimate) -> Estimate:
    """Return the interval of a difference of shares, no narrower than its number of groups allows.

    The bootstrap of answers that never change has no width. But if none of n groups changes, Wilson's interval still
    allows changes in a share z^2 / (n + z^2) of all groups: 0.11 for 30 groups, 0.04 for 100. Each end of the interval
    lies at least that far from the estimate.

    >>> widened(Estimate(0.0, 0.0, 0.0, 40)).high  # doctest: +ELLIPSIS
    0.087...
    """
    reach = wilson(0, estimate.groups)[1]
    low = np.maximum(-1, np.minimum(estimate.low, estimate.value - reach))  # numpy's minimum and maximum keep NaN
    high = np.minimum(1, np.maximum(estimate.high, estimate.value + reach))
    return Estimate(estimate.value, float(low), float(high), estimate.groups)


def p_above(draws: Float[np.ndarray, " b"], limit: float, groups: int) -> float:
    """Return the one-sided bootstrap p-value of "the value is not above the limit".

    The observed value counts as one of the draws (Davison and Hinkley 1997, 4.2.3), and a NaN draw counts as not above
    the limit. If every draw is above the limit, the p-value is the tail of a normal distribution with the draws' mean
    and deviation: it can be smaller than the draws could show, which a test over many classes needs. A bootstrap over
    few groups is too sure of itself, so the p-value is never below that of a sign test in which all groups are above
    the limit. With fewer than MIN_GROUPS groups it is 1.

    >>> p_above(np.array([0.3, 0.2, 0.05]), 0.1, 20)
        0.5
    """
    not_above = int(np.count_nonzero(~(draws > limit)))
    p = (1 + not_above) / (1 + len(draws))
    if not_above == 0:
        spread = float(draws.std())
        p = min(p, float(stats.norm.sf((float(draws.mean()) - limit) / spread))) if spread > 0 else 0.0
    return max(p, smallest_p(groups))


def smallest_p(groups: int) -> float:
    """Return the smallest p-value that this many groups can give: that of a sign test with all above the limit.

    With fewer than MIN_GROUPS groups it is 1.
    """
    return 0.5**groups if groups >= MIN_GROUPS else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted to control the chance of any false rejection (Holm 1979).

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
