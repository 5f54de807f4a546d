"""What a metric says of each row: its mean with an interval, and whether it beats a random map or is as good as any.

Every function is pure. Rows are compared in pairs, on the pictures in which both have a value, by the bootstrap over
pictures. P-values are corrected for the number of methods (Holm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from jaxtyping import Float

from camkit.kit.statistics import Estimate, bootstrap_sums, holm, interval, p_above
from camkit.metrics.registry import Better

SIGNIFICANCE = 0.05
"""The chance, over all methods of a metric together, of calling any of them better or worse by luck."""

PRACTICALLY_LEVEL = 0.1
"""A method is level with the best method if it is not significantly behind by more than this share of the best method's
advantage over the random map. Maps of one picture are so alike that the bootstrap finds differences of a hundredth,
which matter to nobody and change with the sample."""

_RESAMPLES = 4000
"""Bootstrap resamples; the normal tail serves for smaller p-values."""

OfRows: TypeAlias = Mapping[str, Float[np.ndarray, " n"]]
"""For each row, one value per picture; NaN where it has none."""

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Standing:
    """What one metric says about one row.

    Attributes:
        estimate: the mean over the pictures with its 95 % interval, and the number of pictures with a value.
        beats_random: whether it is significantly better than the random map on the same pictures.
        loses_to_random: whether it is significantly worse than the random map.
        level_with_best: whether it is not significantly worse than the metric's best method by more than
            ``PRACTICALLY_LEVEL`` of the best method's advantage over the random map.
    """

    estimate: Estimate
    beats_random: bool
    loses_to_random: bool
    level_with_best: bool


def standings(values: OfRows, references: Sequence[str], better: Better, seed: int) -> dict[str, Standing]:
    """Judge all rows of one metric.

    Args:
        values: the rows, with the reference rows.
        references: the names of the reference rows; "random" must be among them.
        better: whether higher or lower values are better.
        seed: the seed of the draws.
    """
    gains = as_gains(values, better)
    methods = [name for name in values if name not in references]
    above = p_values({name: gains[name] - gains["random"] for name in gains if name != "random"}, seed)
    beats = significant({name: above[name] for name in methods})
    beats |= {name: above[name] < SIGNIFICANCE for name in references if name != "random"}
    loses = significant(p_values({name: gains["random"] - gains[name] for name in methods}, seed))
    level = level_with_best(gains, methods, seed)
    return {
        name: Standing(_estimate(values[name], seed), beats.get(name, False), loses.get(name, False), name in level)
        for name in values
    }


def as_gains(values: OfRows, better: Better) -> dict[str, Float[np.ndarray, " n"]]:
    """Return values of which the higher are the better."""
    return {name: of_row if better == "higher" else -of_row for name, of_row in values.items()}


def level_with_best(gains: OfRows, methods: Sequence[str], seed: int) -> list[str]:
    """Return the methods that are level with the best of them, as ``Standing`` describes it."""
    measured = [name for name in methods if np.isfinite(gains[name]).any()]
    if not measured:
        return []
    best = max(measured, key=lambda name: mean(gains[name]))
    margin = PRACTICALLY_LEVEL * max(0.0, mean(gains[best]) - mean(gains["random"]))
    return not_behind({name: gains[best] - gains[name] for name in measured}, best, margin, seed + 1)


def not_behind(behind: Mapping[str, Float[np.ndarray, " n"]], best: str, margin: float, seed: int) -> list[str]:
    """Return the best row, and those that are not significantly behind it by more than a margin.

    Args:
        behind: by how much each row is behind the best on each picture.
        best: the best row.
        margin: a difference that does not matter.
        seed: the seed of the draws.
    """
    clearly = significant(p_values({name: by for name, by in behind.items() if name != best}, seed, margin))
    return [name for name in behind if not clearly.get(name, False)]


def mean(values: Float[np.ndarray, " n"]) -> float:
    """Return the mean of the values that are known; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def p_values(differences: Mapping[_Key, Float[np.ndarray, " n"]], seed: int, limit: float = 0.0) -> dict[_Key, float]:
    """Return for each mean difference the one-sided p-value that it is not above a limit."""
    return {
        name: p_above(_draws(values, seed), limit, int(np.isfinite(values).sum())) if np.isfinite(values).any() else 1.0
        for name, values in differences.items()
    }


def significant(p_values: Mapping[_Key, float]) -> dict[_Key, bool]:
    """Tell which p-values remain significant after the correction for their number."""
    corrected = holm(list(p_values.values()))
    return {name: p < SIGNIFICANCE for name, p in zip(p_values, corrected, strict=True)}


def _draws(values: Float[np.ndarray, " n"], seed: int) -> Float[np.ndarray, " b"]:
    """Return bootstrap draws of the mean of the values that are known."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.zeros(0)
    sums = bootstrap_sums(known[:, None], np.arange(len(known)), (seed,), _RESAMPLES)
    return np.asarray(sums[:, 0] / len(known))


def _estimate(values: Float[np.ndarray, " n"], seed: int) -> Estimate:
    known = int(np.isfinite(values).sum())
    return interval(_draws(values, seed), mean(values), known)
