"""The statistics of a judgement: which methods beat a random map, which are as good as the best, and which to use.

Every function is pure: from the values of the metrics to what is said about the methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Float

from camkit.background.statistics import Estimate, bootstrap_sums, holm, interval, p_above

SIGNIFICANCE = 0.05
"""The chance, over all methods of a metric together, of calling any of them better or worse by luck."""

UNMOVED = 0.7
"""A map whose rank correlation with the maps of shuffled weights is above this shows the picture rather than what the
network learned. docs/methods.md has the values of all methods: CAM methods lie clearly below."""

PRACTICALLY_LEVEL = 0.1
"""A method is level with the best if it may lack less than this share of the best one's advantage over the random map.
Maps of one picture are so alike that the bootstrap finds differences of a hundredth, which matter to nobody and change
with the sample."""

_SIMILAR_COST = 1.6
"""Costs up to this many times the cheapest method's are alike: the time of a map on a small network varies by as much
on a busy machine."""

_RESAMPLES = 4000
"""Bootstrap resamples; the normal tail serves for smaller p-values."""

Better: TypeAlias = Literal["higher", "lower"]


@dataclass(frozen=True)
class Standing:
    """What one metric says about one row.

    Attributes:
        estimate: the mean over the pictures with its 95 % interval, and the number of pictures with a value.
        beats_random: whether it is significantly better than the random map on the same pictures.
        level_with_best: whether it is not significantly worse than the metric's best method by more than
            ``PRACTICALLY_LEVEL`` of that one's advantage over the random map.
    """

    estimate: Estimate
    beats_random: bool
    level_with_best: bool


def standings(
    values: Mapping[str, Float[np.ndarray, " n"]], references: Sequence[str], better: Better, seed: int
) -> dict[str, Standing]:
    """Judge all rows of one metric.

    Comparisons are paired: two rows are compared on the pictures in which both have a value, by the bootstrap over
    pictures. P-values are corrected for the number of methods (Holm).

    Args:
        values: for each row one value per picture; NaN where it has none. It includes the reference rows.
        references: the names of the reference rows; "random" must be among them.
        better: whether higher or lower values are better.
        seed: the seed of the draws.
    """
    sign = 1.0 if better == "higher" else -1.0
    methods = [name for name in values if name not in references]
    means = {name: _mean(values[name]) for name in methods}
    ordered = sorted((name for name in methods if np.isfinite(means[name])), key=lambda name: -sign * means[name])
    above = _p_values({name: sign * (values[name] - values["random"]) for name in values if name != "random"}, seed)
    beats = _significant({name: above[name] for name in methods})
    beats |= {name: above[name] < SIGNIFICANCE for name in references if name != "random"}
    worse: dict[str, bool] = {}
    if ordered:
        best = values[ordered[0]]
        margin = PRACTICALLY_LEVEL * max(0.0, sign * (means[ordered[0]] - _mean(values["random"])))
        behind = {name: sign * (best - values[name]) for name in ordered[1:]}
        worse = _significant(_p_values(behind, seed + 1, margin))
    return {
        name: Standing(
            _estimate(values[name], seed),
            beats.get(name, False),
            name in ordered and not worse.get(name, False),
        )
        for name in values
    }


def _mean(values: Float[np.ndarray, " n"]) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _draws(values: Float[np.ndarray, " n"], seed: int) -> Float[np.ndarray, " b"]:
    """Return bootstrap draws of the mean of the values that are known."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.zeros(0)
    sums = bootstrap_sums(known[:, None], np.arange(len(known)), (seed,), _RESAMPLES)
    return np.asarray(sums[:, 0] / len(known))


def _estimate(values: Float[np.ndarray, " n"], seed: int) -> Estimate:
    known = int(np.isfinite(values).sum())
    return interval(_draws(values, seed), _mean(values), known)


def _p_values(differences: Mapping[str, Float[np.ndarray, " n"]], seed: int, limit: float = 0.0) -> dict[str, float]:
    """Return for each mean difference the one-sided p-value that it is not above a limit."""
    return {
        name: p_above(_draws(values, seed), limit, int(np.isfinite(values).sum())) if np.isfinite(values).any() else 1.0
        for name, values in differences.items()
    }


def _significant(p_values: Mapping[str, float]) -> dict[str, bool]:
    corrected = holm(list(p_values.values()))
    return {name: p < SIGNIFICANCE for name, p in zip(p_values, corrected, strict=True)}


@dataclass(frozen=True)
class Recommendation:
    """What to use.

    Attributes:
        row: the name of the row; None if there is nothing to recommend.
        sentence: the recommendation with its reason.
        agreed: whether the metrics that decide agree on it.
    """

    row: str | None
    sentence: str
    agreed: bool


def recommend(
    deciding: Mapping[str, Mapping[str, Standing]],
    order: Sequence[str],
    costs: Mapping[str, float],
    unmoved: Sequence[str] = (),
) -> Recommendation:
    """Return which method to use, by several metrics together.

    A method is fit if it beats the random map in each metric in which it has values, and if its map changes with the
    weights. Of the fit ones, those count that are level with the best in the most metrics; of these, those that
    cost about as little as the cheapest; of these, the first.

    Args:
        deciding: for each deciding metric, by its title, the standing of each row.
        order: the rows of methods, the simplest first.
        costs: the time of each row in plain passes.
        unmoved: the rows whose maps hardly change if the weights are shuffled.
    """
    known = {
        name: [standing[name] for standing in deciding.values() if name in standing and standing[name].estimate.groups]
        for name in order
    }
    fit = [name for name in order if known[name] and name not in unmoved and all(s.beats_random for s in known[name])]
    if not fit:
        return Recommendation(None, _nothing(deciding), agreed=True)
    levels = {name: sum(standing.level_with_best for standing in known[name]) for name in fit}
    shares = {name: (levels[name], len(known[name])) for name in fit}
    most = max(levels[name] for name in fit)
    as_good = [name for name in fit if levels[name] == most]
    cheap = _SIMILAR_COST * max(1.0, min(costs[name] for name in as_good))
    chosen = min((name for name in as_good if costs[name] <= cheap), key=order.index)
    agreed = shares[chosen][0] == len(deciding)
    return Recommendation(chosen, _reason(chosen, deciding, order, costs, agreed=agreed), agreed)


def _nothing(deciding: Mapping[str, Mapping[str, Standing]]) -> str:
    pictures = max(standing.estimate.groups for of_metric in deciding.values() for standing in of_metric.values())
    return (
        f"On these {pictures} pictures no method is significantly better than a random map in all of "
        f"{_listed(list(deciding))}. Judge more pictures; if none is better there, do not trust any map of this model."
    )


def _reason(
    chosen: str,
    deciding: Mapping[str, Mapping[str, Standing]],
    order: Sequence[str],
    costs: Mapping[str, float],
    *,
    agreed: bool,
) -> str:
    cost = f"{costs[chosen]:.1f} plain passes"
    if agreed:
        return (
            f"Use {chosen}: it beats a random map in {_listed(list(deciding))}, no method is clearly better in any "
            f"of them, and none that is as good is much cheaper ({cost})."
        )
    best = {title: _best(standing, order) for title, standing in deciding.items()}
    leaders = ", ".join(f"{title} prefers {name}" for title, name in best.items() if name)
    level = [title for title, standing in deciding.items() if standing[chosen].level_with_best]
    good = f"it is as good as the best in {_listed(level)}" if level else "it beats a random map in all of them"
    return f"The metrics disagree: {leaders}. Use {chosen}, since {good} ({cost}), and look at more than one map."


def _best(standing: Mapping[str, Standing], order: Sequence[str]) -> str:
    """Return the row that is level with the best and comes first in its metric: the best itself."""
    level = [name for name in order if name in standing and standing[name].level_with_best]
    return level[0] if len(level) == 1 else " and ".join(level[:2]) + (" and others" if len(level) > 2 else "")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
