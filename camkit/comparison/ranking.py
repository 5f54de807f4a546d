"""The statistics of a judgement: which methods beat a random map, which are as good as the best, and which to use.

Every function is pure: from the values of the metrics to what is said about the methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Float

from camkit.kit.statistics import Estimate, bootstrap_sums, holm, interval, p_above

SIGNIFICANCE = 0.05
"""The chance, over all methods of a metric together, of calling any of them better or worse by luck."""

UNMOVED = 0.7
"""A map whose rank correlation with the maps of shuffled weights is above this shows the picture rather than what the
network learned. scripts/results/judged.md has the values of the methods on three networks."""

PRACTICALLY_LEVEL = 0.1
"""A method is level with the best method if it is not significantly behind by more than this share of the best method's
advantage over the random map. Maps of one picture are so alike that the bootstrap finds differences of a hundredth,
which matter to nobody and change with the sample."""

_SIMILAR_COST = 1.6
"""Costs up to this many times the cheapest cost count as equal: on a busy machine, the time of a map on a small network
varies by as much."""

_RESAMPLES = 4000
"""Bootstrap resamples; the normal tail serves for smaller p-values."""

REFERENCES = {"random": "a random map", "centre": "a centred blob", "colour": "the best single colour"}
"""The reference rows, with their names in sentences."""

Better: TypeAlias = Literal["higher", "lower"]

Values: TypeAlias = Mapping[str, Mapping[str, Float[np.ndarray, " n"]]]
"""For each metric, the values of each row on each picture; NaN where it has none."""

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
    above = _p_values({name: sign * (values[name] - values["random"]) for name in values if name != "random"}, seed)
    beats = _significant({name: above[name] for name in methods})
    below = _p_values({name: sign * (values["random"] - values[name]) for name in methods}, seed)
    loses = _significant(below)
    beats |= {name: above[name] < SIGNIFICANCE for name in references if name != "random"}
    level = _level_with_best(values, methods, better, seed)
    return {
        name: Standing(_estimate(values[name], seed), beats.get(name, False), loses.get(name, False), name in level)
        for name in values
    }


def _level_with_best(
    values: Mapping[str, Float[np.ndarray, " n"]], methods: Sequence[str], better: Better, seed: int
) -> list[str]:
    """Return the methods that are level with the best of them, as ``Standing`` describes it; the best comes first."""
    sign = 1.0 if better == "higher" else -1.0
    means = {name: _mean(values[name]) for name in methods}
    ordered = sorted((name for name in methods if np.isfinite(means[name])), key=lambda name: -sign * means[name])
    if not ordered:
        return []
    margin = PRACTICALLY_LEVEL * max(0.0, sign * (means[ordered[0]] - _mean(values["random"])))
    behind = {name: sign * (values[ordered[0]] - values[name]) for name in ordered[1:]}
    worse = _significant(_p_values(behind, seed + 1, margin))
    return [name for name in ordered if not worse.get(name, False)]


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


def _p_values(differences: Mapping[_Key, Float[np.ndarray, " n"]], seed: int, limit: float = 0.0) -> dict[_Key, float]:
    """Return for each mean difference the one-sided p-value that it is not above a limit."""
    return {
        name: p_above(_draws(values, seed), limit, int(np.isfinite(values).sum())) if np.isfinite(values).any() else 1.0
        for name, values in differences.items()
    }


def _significant(p_values: Mapping[_Key, float]) -> dict[_Key, bool]:
    corrected = holm(list(p_values.values()))
    return {name: p < SIGNIFICANCE for name, p in zip(p_values, corrected, strict=True)}


@dataclass(frozen=True)
class Recommendation:
    """What to use.

    Attributes:
        row: the name of the row; None if there is nothing to recommend.
        sentence: the recommendation with its reason.
        agreed: whether the metrics agree on the row, or, if there is no row, on what is best.
    """

    row: str | None
    sentence: str
    agreed: bool


def advantages(
    values: Values, methods: Sequence[str], better: Mapping[str, Better], others: Sequence[str] = ()
) -> dict[str, Float[np.ndarray, "m n"]]:
    """Return for each row its advantage over the random map, in each metric and on each picture.

    In each metric, the mean advantage of the best method counts as 1, so that all metrics weigh the same. A metric in
    which no method has an advantage is left out.

    Args:
        values: for each metric, the values of each row, as ``standings`` takes them.
        methods: the rows of methods.
        better: for each metric, whether higher or lower values are better.
        others: more rows whose advantages are divided by that of the best method.
    """
    shares: dict[str, list[Float[np.ndarray, " n"]]] = {name: [] for name in (*methods, *others)}
    for metric, of_metric in values.items():
        sign = 1.0 if better[metric] == "higher" else -1.0
        ahead = {name: sign * (of_metric[name] - of_metric["random"]) for name in shares}
        most = max((_mean(ahead[name]) for name in methods if np.isfinite(ahead[name]).any()), default=0.0)
        if most > 0:
            for name, differences in ahead.items():
                shares[name].append(differences / most)
    return {name: np.stack(several) for name, several in shares.items() if several}


def _overall(advantage: Float[np.ndarray, "m n"]) -> Float[np.ndarray, " n"]:
    """Return the mean over the metrics that are known, for each picture.

    Of a difference of two rows, these are the metrics in which both have values.
    """
    known = np.isfinite(advantage)
    sums = np.where(known, advantage, 0.0).sum(0)
    return np.asarray(np.where(known.any(0), sums / np.maximum(known.sum(0), 1), np.nan))


def recommend(
    values: Values,
    deciding: Mapping[str, Mapping[str, Standing]],
    better: Mapping[str, Better],
    order: Sequence[str],
    costs: Mapping[str, float],
    unmoved: Sequence[str] = (),
    seed: int = 0,
) -> Recommendation:
    """Return which method to use, by several metrics together.

    A method is fit if ``_against`` finds nothing that speaks against it. The rule keeps the fit methods that are not
    clearly behind the best in their mean advantage over the random map. Of these, it keeps the methods that cost about
    as little as the cheapest, and returns the first. The rule does not ask for an advantage in every metric, and does
    not count the metrics in which a method is as good as the best. Otherwise the sample of pictures would decide
    between methods that are alike.

    Args:
        values: for each deciding metric, by its title, the values of each row, as ``standings`` takes them.
        deciding: for each of these metrics, what ``standings`` returns.
        better: for each of them, whether higher or lower values are better.
        order: the rows of methods, the simplest first.
        costs: the time of each row in plain passes.
        unmoved: the rows whose maps hardly change if the weights are shuffled.
        seed: the seed of the draws.
    """
    references = [name for name in REFERENCES if all(name in rows for rows in values.values())]
    # A metric that tells no method from the random map would only add noise.
    telling = {
        title: values[title] for title, rows in deciding.items() if any(rows[name].beats_random for name in order)
    }
    advantage = advantages(telling, order, better, [name for name in references if name != "random"])
    against = _against(deciding, advantage, order, references, unmoved)
    fit = {name: advantage[name] for name in order if not against[name]}
    if not fit:
        agreed, conflict = _conflict(deciding, order)
        return Recommendation(None, conflict + _nothing(deciding, against), agreed)
    as_good = _not_behind(fit, seed)
    cheap = _SIMILAR_COST * max(1.0, min(costs[name] for name in as_good))
    chosen = min((name for name in as_good if costs[name] <= cheap), key=order.index)
    best: dict[str, list[str]] = {}
    for title in _measured(deciding, list(fit)):
        level = _level_with_best(values[title], list(fit), better[title], seed)
        best[title] = [name for name in fit if name in level]
    agreed = all(chosen in names for names in best.values())
    sentences = [
        _agreement(chosen, deciding, costs) if agreed else _disagreement(chosen, best, costs),
        *_better_but_unfit(chosen, deciding, better, against),
        *_doubts(chosen, values, better, advantage, deciding, seed),
    ]
    return Recommendation(chosen, " ".join(sentences), agreed)


def _against(
    deciding: Mapping[str, Mapping[str, Standing]],
    advantage: Mapping[str, Float[np.ndarray, "m n"]],
    order: Sequence[str],
    references: Sequence[str],
    unmoved: Sequence[str],
) -> dict[str, str]:
    """Return what speaks against each method; empty for a fit one.

    A fit method beats the random map in most of the metrics in which it has values, and loses to it in none. Over all
    metrics its mean is better than those of the other reference maps, and its map changes with the weights.
    """
    others = [name for name in references if name != "random" and name in advantage]
    against: dict[str, str] = {}
    for name in order:
        measured = _measured(deciding, [name])
        lost = [title for title, rows in measured.items() if rows[name].loses_to_random]
        beaten = [title for title, rows in measured.items() if rows[name].beats_random]
        behind = [REFERENCES[other] for other in others if name in advantage and _lead(advantage, name, other) <= 0]
        if name in unmoved:
            against[name] = _UNMOVED
        elif lost:
            against[name] = f"worse than a random map in {_listed(lost)}"
        elif 2 * len(beaten) <= len(measured) or name not in advantage:
            titles = list(deciding)
            metrics = titles[0] if len(titles) == 1 else f"most of {_listed(titles)}"
            against[name] = f"{_CHANCE} in {metrics}"
        else:
            against[name] = f"over all metrics no better than {_listed(behind, 'or')}" if behind else ""
    return against


def _lead(advantage: Mapping[str, Float[np.ndarray, "m n"]], name: str, other: str) -> float:
    """Return by how much a row's mean advantage exceeds another's, where both have one."""
    return _mean(_overall(advantage[name] - advantage[other]))


_UNMOVED = "almost the same map if the weights are shuffled"
_CHANCE = "not significantly better than a random map"


def _measured(
    deciding: Mapping[str, Mapping[str, Standing]], names: Sequence[str]
) -> dict[str, Mapping[str, Standing]]:
    """Return the metrics in which any of the rows has a value: a metric without values prefers none."""
    return {
        title: rows
        for title, rows in deciding.items()
        if any(name in rows and rows[name].estimate.groups for name in names)
    }


def _not_behind(advantage: Mapping[str, Float[np.ndarray, "m n"]], seed: int) -> list[str]:
    """Return the best and all that are not significantly behind it by more than ``PRACTICALLY_LEVEL``."""
    best = max(advantage, key=lambda name: _mean(_overall(advantage[name])))
    behind = {name: _overall(advantage[best] - values) for name, values in advantage.items() if name != best}
    margin = PRACTICALLY_LEVEL * _mean(_overall(advantage[best]))
    clearly = _significant(_p_values(behind, seed, margin)) if behind else {}
    return [name for name in advantage if not clearly.get(name, False)]


def _conflict(deciding: Mapping[str, Mapping[str, Standing]], order: Sequence[str]) -> tuple[bool, str]:
    """Return whether the metrics agree on what is best, and a sentence if they do not.

    Methods that a metric cannot tell from the random map do not count as its best.
    """
    best = {
        title: [name for name in order if rows[name].beats_random and rows[name].level_with_best]
        for title, rows in deciding.items()
    }
    named = {title: names for title, names in best.items() if names}
    agreed = not named or bool(set.intersection(*map(set, named.values())))
    lost = {
        title: [name for name in order if rows[name].loses_to_random and any(name in names for names in named.values())]
        for title, rows in deciding.items()
    }
    if agreed and not any(lost.values()):
        return True, ""
    told = [f"{title} prefers {_first_two(names)}" for title, names in named.items()]
    told += [f"{title} finds {_first_two(names)} worse than a random map" for title, names in lost.items() if names]
    return False, f"The metrics disagree: {', '.join(told)}. "


def _nothing(deciding: Mapping[str, Mapping[str, Standing]], against: Mapping[str, str]) -> str:
    pictures = max(standing.estimate.groups for of_metric in deciding.values() for standing in of_metric.values())
    by_reason: dict[str, list[str]] = {}
    for name, reason in against.items():
        by_reason.setdefault(reason, []).append(name)
    reasons = [f"{reason[0].upper()}{reason[1:]}: {', '.join(names)}." for reason, names in by_reason.items()]
    by_chance = any(reason.startswith(_CHANCE) for reason in by_reason)
    advice = ["Judge more pictures. If no method is better there either, do not trust any map of this model."]
    return " ".join([f"On these {pictures} pictures no method can be recommended.", *reasons, *advice * by_chance])


def _agreement(chosen: str, deciding: Mapping[str, Mapping[str, Standing]], costs: Mapping[str, float]) -> str:
    beaten = [title for title, rows in deciding.items() if rows[chosen].beats_random]
    return (
        f"Use {chosen}: it beats a random map in {_listed(beaten)}, no method that can be recommended is clearly "
        f"better in any metric, and none that is as good is much cheaper ({costs[chosen]:.1f} plain passes)."
    )


def _disagreement(chosen: str, best: Mapping[str, Sequence[str]], costs: Mapping[str, float]) -> str:
    """Return the sentence for metrics that prefer different methods; ``best`` has each metric's."""
    leaders = ", ".join(f"{title} prefers {_first_two(names)}" for title, names in best.items())
    level = [title for title, names in best.items() if chosen in names]
    good = f"it is as good as the best in {_listed(level)}, and " if level else ""
    return (
        f"The metrics disagree: {leaders}. Use {chosen}: {good}over all metrics no method that can be recommended is "
        f"clearly better ({costs[chosen]:.1f} plain passes). Look at more than one map."
    )


def _better_but_unfit(
    chosen: str,
    deciding: Mapping[str, Mapping[str, Standing]],
    better: Mapping[str, Better],
    against: Mapping[str, str],
) -> list[str]:
    """Return a sentence for each method that is better in some metric and is not recommended for another reason."""
    sentences = []
    for name, reason in against.items():
        ahead = [
            title
            for title, rows in deciding.items()
            if rows[name].level_with_best
            and not rows[chosen].level_with_best
            and (rows[name].estimate.value > rows[chosen].estimate.value) == (better[title] == "higher")
        ]
        if reason and ahead:
            sentences.append(f"{name} is better in {_listed(ahead)}, but is not recommended: {reason}.")
    return sentences


def _doubts(
    chosen: str,
    values: Values,
    better: Mapping[str, Better],
    advantage: Mapping[str, Float[np.ndarray, "m n"]],
    deciding: Mapping[str, Mapping[str, Standing]],
    seed: int,
) -> list[str]:
    """Return sentences on the reference maps that the recommended method is not clearly better than."""
    others = [name for name in REFERENCES if name in advantage]
    leads = {name: _overall(advantage[chosen] - advantage[name]) for name in others}
    overall = _significant(_p_values(leads, seed))
    unclear = [REFERENCES[name] for name in others if not overall[name]]
    doubts = [f"Over all metrics it is not clearly better than {_listed(unclear, 'or')}."] if unclear else []
    signs = {title: 1.0 if better[title] == "higher" else -1.0 for title in values}
    measured = _measured(deciding, [chosen])
    differences = {
        (title, other): signs[title] * (values[title][chosen] - values[title][other])
        for title in measured
        for other in others
    }
    ahead = _significant(_p_values(differences, seed))
    by_references: dict[tuple[str, ...], list[str]] = {}
    for title, rows in measured.items():
        alike = [] if rows[chosen].beats_random else [REFERENCES["random"]]
        alike += [REFERENCES[other] for other in others if not ahead[title, other]]
        by_references.setdefault(tuple(alike), []).append(title)
    return doubts + [
        f"In {_listed(titles)} it is not clearly better than {_listed(alike, 'or')}."
        for alike, titles in by_references.items()
        if alike
    ]


def _first_two(names: Sequence[str]) -> str:
    """Name one or two rows, and say whether there are others."""
    return names[0] if len(names) == 1 else " and ".join(names[:2]) + (" and others" if len(names) > 2 else "")


def _listed(names: Sequence[str], last: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"
