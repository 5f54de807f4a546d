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
"""A method is level with the best method if it is not significantly behind by more than this share of the best method's
advantage over the random map. Maps of one picture are so alike that the bootstrap finds differences of a hundredth,
which matter to nobody and change with the sample."""

_SIMILAR_COST = 1.6
"""Costs up to this many times the cheapest cost count as equal: on a busy machine, the time of a map on a small network
varies by as much."""

_RESAMPLES = 4000
"""Bootstrap resamples; the normal tail serves for smaller p-values."""

Better: TypeAlias = Literal["higher", "lower"]


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
    below = _p_values({name: sign * (values["random"] - values[name]) for name in methods}, seed)
    loses = _significant(below)
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
            loses.get(name, False),
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


def advantages(
    values: Mapping[str, Mapping[str, Float[np.ndarray, " n"]]], methods: Sequence[str], better: Mapping[str, Better]
) -> dict[str, Float[np.ndarray, " n"]]:
    """Return for each method and picture its advantage over the random map, averaged over metrics.

    In each metric, the advantage of the method with the best mean counts as 1, so that all metrics weigh the same.

    Args:
        values: for each metric, the values of each row, as ``standings`` takes them.
        methods: the rows of methods.
        better: for each metric, whether higher or lower values are better.
    """
    shares: dict[str, list[Float[np.ndarray, " n"]]] = {name: [] for name in methods}
    for metric, of_metric in values.items():
        sign = 1.0 if better[metric] == "higher" else -1.0
        ahead = {name: sign * (of_metric[name] - of_metric["random"]) for name in methods}
        most = max(
            (_mean(differences) for differences in ahead.values() if np.isfinite(differences).any()), default=0.0
        )
        if most > 0:
            for name, differences in ahead.items():
                shares[name].append(differences / most)
    return {name: _mean_of_known(several) for name, several in shares.items() if several}


def _mean_of_known(several: Sequence[Float[np.ndarray, " n"]]) -> Float[np.ndarray, " n"]:
    """Return the mean of several arrays, entry by entry, without the entries that are not known."""
    stacked = np.stack(several)
    known = np.isfinite(stacked)
    sums = np.where(known, stacked, 0.0).sum(0)
    return np.asarray(np.where(known.any(0), sums / np.maximum(known.sum(0), 1), np.nan))


def recommend(
    deciding: Mapping[str, Mapping[str, Standing]],
    advantage: Mapping[str, Float[np.ndarray, " n"]],
    order: Sequence[str],
    costs: Mapping[str, float],
    unmoved: Sequence[str] = (),
    seed: int = 0,
) -> Recommendation:
    """Return which method to use, by several metrics together.

    A method is fit if it beats the random map in most of the metrics in which it has values and loses to it in none,
    and if its map changes with the weights. The rule keeps the fit methods that are not clearly behind the best in
    their mean advantage. Of these, it keeps the methods that cost about as little as the cheapest, and returns the
    first. If it asked for an advantage in every metric, or counted the metrics in which a method is as good as the
    best, the sample of pictures would decide between methods that are alike.

    Args:
        deciding: for each deciding metric, by its title, the standing of each row.
        advantage: for each row of a method, what ``advantages`` returns.
        order: the rows of methods, the simplest first.
        costs: the time of each row in plain passes.
        unmoved: the rows whose maps hardly change if the weights are shuffled.
        seed: the seed of the draws.
    """
    known = {
        name: [standing[name] for standing in deciding.values() if name in standing and standing[name].estimate.groups]
        for name in order
    }
    fit = [name for name in order if name not in unmoved and name in advantage and _helps(known[name])]
    if not fit:
        return Recommendation(None, _nothing(deciding), agreed=True)
    as_good = _not_behind({name: advantage[name] for name in fit}, seed)
    cheap = _SIMILAR_COST * max(1.0, min(costs[name] for name in as_good))
    chosen = min((name for name in as_good if costs[name] <= cheap), key=order.index)
    measured = [standing for standing in deciding.values() if any(standing[name].estimate.groups for name in order)]
    agreed = all(standing[chosen].level_with_best for standing in measured)  # without values, a metric prefers none
    return Recommendation(chosen, _reason(chosen, deciding, order, costs, agreed=agreed), agreed)


def _not_behind(advantage: Mapping[str, Float[np.ndarray, " n"]], seed: int) -> list[str]:
    """Return the best and all that are not significantly behind it by more than ``PRACTICALLY_LEVEL``."""
    best = max(advantage, key=lambda name: _mean(advantage[name]))
    behind = {name: advantage[best] - values for name, values in advantage.items() if name != best}
    margin = PRACTICALLY_LEVEL * _mean(advantage[best])
    clearly = _significant(_p_values(behind, seed, margin)) if behind else {}
    return [name for name in advantage if not clearly.get(name, False)]


def _helps(known: Sequence[Standing]) -> bool:
    """Tell whether a method beats the random map in most of its metrics, and loses to it in none."""
    beaten = sum(standing.beats_random for standing in known)
    return 2 * beaten > len(known) and not any(standing.loses_to_random for standing in known)


def _nothing(deciding: Mapping[str, Mapping[str, Standing]]) -> str:
    pictures = max(standing.estimate.groups for of_metric in deciding.values() for standing in of_metric.values())
    metrics = _listed(list(deciding)) if len(deciding) == 1 else f"most of {_listed(list(deciding))}"
    return (
        f"On these {pictures} pictures no method is significantly better than a random map in {metrics} without "
        "being worse in any metric. Judge more pictures. If no method is better there either, do not trust any map of "
        "this model."
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
    known = {title: standing[chosen] for title, standing in deciding.items() if standing[chosen].estimate.groups}
    unclear = [title for title, standing in known.items() if not standing.beats_random]
    doubt = f" In {_listed(unclear)} it cannot be told from a random map." if unclear else ""
    if agreed:
        beaten = _listed([title for title in known if title not in unclear])
        return (
            f"Use {chosen}: it beats a random map in {beaten}, no method is clearly better in any metric, and none "
            f"that is as good is much cheaper ({cost}).{doubt}"
        )
    best = {title: _best(standing, order) for title, standing in deciding.items()}
    leaders = ", ".join(f"{title} prefers {name}" for title, name in best.items() if name)
    level = [title for title, standing in deciding.items() if standing[chosen].level_with_best]
    good = f"it is as good as the best in {_listed(level)}, and " if level else ""
    advice = f"Use {chosen}: {good}over all metrics no method is clearly better ({cost}). Look at more than one map."
    return f"The metrics disagree: {leaders}. {advice}{doubt}"


def _best(standing: Mapping[str, Standing], order: Sequence[str]) -> str:
    """Name the rows that are level with the best in a metric: the first two, and whether there are others."""
    level = [name for name in order if name in standing and standing[name].level_with_best]
    return level[0] if len(level) == 1 else " and ".join(level[:2]) + (" and others" if len(level) > 2 else "")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
