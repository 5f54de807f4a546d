"""What a metric says of each method over a sample of pictures, and the rule by which one method is recommended.

Every function is pure. Rows are compared in pairs, on the pictures in which both have a value, by the bootstrap over
pictures. P-values are corrected for the number of methods (Holm). Gains are values of which the higher are the better.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Float

from camkit.explanation import finite_or_none
from camkit.kit.statistics import bootstrap_sums, holm, interval, p_above
from camkit.kit.wording import NONE, listed
from camkit.metrics.registry import METRICS, Better

SIGNIFICANCE = 0.05
"""The chance, over all methods of a metric together, of calling any of them better or worse by luck."""

PRACTICALLY_LEVEL = 0.1
"""A method is level with the best method if it is not significantly behind by more than this share of the best method's
advantage over the random map. Maps of one picture are so alike that the bootstrap finds differences of a hundredth,
which matter to nobody and change with the sample."""

UNMOVED = 0.7
"""A map whose rank correlation with the maps of shuffled weights is above this shows the picture rather than what the
network learned. scripts/results/judged.md has the values of the methods on three networks."""

REFERENCES = {"random": "a random map", "centre": "a centred blob", "colour": "the best single colour"}
"""The reference rows, with their names in sentences."""

_RESAMPLES = 4000
"""Bootstrap resamples; the normal tail serves for smaller p-values."""

_SIMILAR_COST = 1.6
"""Costs up to this many times the cheapest cost count as equal: on a busy machine, the time of a map on a small network
varies by as much."""

OfRows: TypeAlias = Mapping[str, Float[np.ndarray, " n"]]
"""For each row, one value per picture; NaN where it has none."""

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Figure:
    """What one metric says about one row.

    Attributes:
        mean: the mean over the pictures.
        low, high: its 95 % interval; NaN for few pictures.
        pictures: the number of pictures with a value.
        beats_random: whether it is significantly better than the random map on the same pictures.
        loses_to_random: whether it is significantly worse than the random map.
        level_with_best: whether it is not significantly worse than the metric's best method by more than
            ``PRACTICALLY_LEVEL`` of the best method's advantage over the random map.
        counted_like_random: on how many pictures it has no value although the random map has one. On these pictures it
            counts like the random map: a map that says nothing is as good as chance.
        values: the value on each picture; NaN where it has none.
        mark: "*" for a method that is level with the best and beats the random map, "?" for one that does not beat it,
            "!" for one that loses to it; empty for others and for reference maps.
    """

    mean: float
    low: float
    high: float
    pictures: int
    beats_random: bool
    loses_to_random: bool
    level_with_best: bool
    counted_like_random: int = 0
    values: tuple[float, ...] = field(default=(), repr=False)
    mark: str = ""

    def __str__(self) -> str:
        """Return the mean with two digits; a dash if there is none."""
        return f"{self.mean:z.2f}" if self.pictures else NONE

    @property
    def span(self) -> str:
        """The interval; empty if there is none."""
        return f"[{self.low:z.2f}, {self.high:z.2f}]" if math.isfinite(self.low) else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as plain JSON values."""
        found = {name: finite_or_none(value) for name, value in asdict(self).items() if name not in ("mark", "values")}
        return found | {"values": [finite_or_none(value) for value in self.values]}


def gains_of(measured: OfRows, better: Better) -> dict[str, Float[np.ndarray, " n"]]:
    """Return the gains of one metric, in which a method that has no value for a picture has that of the random map.

    A metric that has no value for any of a method's maps does not apply to it.
    """
    gains = {}
    for row, values in measured.items():
        counts = row not in REFERENCES and np.isfinite(values).any()
        filled = np.where(np.isnan(values), measured["random"], values) if counts else values
        gains[row] = filled if better == "higher" else -filled
    return gains


def figures_of(measured: OfRows, better: Better, seed: int) -> dict[str, Figure]:
    """Judge all rows of one metric.

    Args:
        measured: the rows; those of ``REFERENCES`` are reference maps, and "random" must be among them.
        better: whether higher or lower values are better.
        seed: the seed of the draws.
    """
    gains = gains_of(measured, better)
    methods = [name for name in gains if name not in REFERENCES]
    above = p_values({name: gains[name] - gains["random"] for name in gains if name != "random"}, seed)
    beats = significant({name: above[name] for name in methods})
    beats |= {name: p < SIGNIFICANCE for name, p in above.items() if name in REFERENCES}
    loses = significant(p_values({name: gains["random"] - gains[name] for name in methods}, seed))
    level = level_with_best(gains, methods, seed)
    figures = {}
    for name, of_row in gains.items():
        values = of_row if better == "higher" else -of_row
        known = int(np.isfinite(values).sum())
        estimate = interval(_draws(values, seed), mean(values), known)
        beating, losing, best = beats.get(name, False), loses.get(name, False), name in level
        mark = "*" if best and beating else "" if beating else "!" if losing else "?"
        figures[name] = Figure(
            estimate.value,
            estimate.low,
            estimate.high,
            known,
            beating,
            losing,
            best,
            known - int(np.isfinite(measured[name]).sum()),
            tuple(measured[name].tolist()),
            mark if known and name in methods else "",
        )
    return figures


def level_with_best(gains: OfRows, methods: Sequence[str], seed: int) -> list[str]:
    """Return the methods that are level with the best of them, as ``Figure`` describes it."""
    measured = [name for name in methods if np.isfinite(gains[name]).any()]
    if not measured:
        return []
    best = max(measured, key=lambda name: mean(gains[name]))
    margin = PRACTICALLY_LEVEL * max(0.0, mean(gains[best]) - mean(gains["random"]))
    return not_behind({name: gains[best] - gains[name] for name in measured}, best, margin, seed + 1)


def not_behind(behind: OfRows, best: str, margin: float, seed: int) -> list[str]:
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
    return {name: p < SIGNIFICANCE for name, p in zip(p_values, holm(list(p_values.values())), strict=True)}


def _draws(values: Float[np.ndarray, " n"], seed: int) -> Float[np.ndarray, " b"]:
    """Return bootstrap draws of the mean of the values that are known."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.zeros(0)
    sums = bootstrap_sums(known[:, None], np.arange(len(known)), (seed,), _RESAMPLES)
    return np.asarray(sums[:, 0] / len(known))


# --- the rule


@dataclass(frozen=True)
class Recommendation:
    """What to use.

    Attributes:
        row: the name of the row; None if there is nothing to recommend.
        sentence: the recommendation with its reason.
        agreed: whether the metrics agree on the row, or, if there is no row, on what is best.
        against: for each method that cannot be recommended, why.
    """

    row: str | None
    sentence: str
    agreed: bool
    against: Mapping[str, str] = field(default_factory=dict)


def recommend(
    measured: Mapping[str, OfRows],
    figures: Mapping[str, Mapping[str, Figure]],
    costs: Mapping[str, float],
    unmoved: Sequence[str] = (),
    seed: int = 0,
) -> Recommendation:
    """Return which method to use, by several metrics together.

    A method is fit if nothing speaks against it (``_against``). The rule keeps the fit methods that are not clearly
    behind the best in their mean advantage over the random map. Of these, it keeps the methods that cost about as
    little as the cheapest, and returns the first. The rule does not ask for an advantage in every metric, and does not
    count the metrics in which a method is as good as the best. Otherwise the sample of pictures would decide between
    methods that are alike.

    Args:
        measured: the values of all rows, by the names of the metrics that decide.
        figures: what these metrics, and perhaps others, say.
        costs: the time of each method in plain passes, the simplest method first.
        unmoved: the methods whose maps hardly change if the weights are shuffled.
        seed: the seed of the draws.
    """
    figures = {metric: figures[metric] for metric in measured}
    gains = {metric: gains_of(of_rows, METRICS[metric].better) for metric, of_rows in measured.items()}
    others = [name for name in REFERENCES if name != "random" and all(name in rows for rows in gains.values())]
    # A metric that tells no method from the random map would only add noise.
    telling = [gains[metric] for metric, rows in figures.items() if any(rows[name].beats_random for name in costs)]
    advantage = advantages(telling, list(costs), others)
    reasons = {name: _against(name, figures, advantage, others, unmoved) for name in costs}
    against = {name: reason for name, reason in reasons.items() if reason}
    fit = {name: advantage[name] for name in costs if name not in against}
    if not fit:
        pictures = max(figure.pictures for rows in figures.values() for figure in rows.values())
        sentence = f"On these {pictures} pictures no method can be recommended; judge more before you trust any map."
        return Recommendation(None, sentence, _agree(figures, list(costs)), against)
    best = max(fit, key=lambda name: mean(_overall(fit[name])))
    behind = {name: _overall(fit[best] - values) for name, values in fit.items()}
    as_good = not_behind(behind, best, PRACTICALLY_LEVEL * mean(_overall(fit[best])), seed)
    cheap = _SIMILAR_COST * max(1.0, min(costs[name] for name in as_good))
    chosen = next(name for name in as_good if costs[name] <= cheap)
    level = {metric: level_with_best(of_rows, list(fit), seed) for metric, of_rows in gains.items()}
    beaten = [METRICS[metric].title for metric, rows in figures.items() if rows[chosen].beats_random]
    sentence = (
        f"Use {chosen}: it beats a random map in {listed(beaten)}, no method that can be recommended is clearly better "
        f"over all metrics, and none that is as good is much cheaper ({costs[chosen]:.1f} plain passes)."
    )
    return Recommendation(chosen, sentence, all(chosen in names for names in level.values() if names), against)


def advantages(
    gains: Sequence[OfRows], methods: Sequence[str], others: Sequence[str] = ()
) -> dict[str, Float[np.ndarray, "m n"]]:
    """Return for each row its advantage over the random map, in each metric and on each picture.

    In each metric, the mean advantage of the best method counts as 1, so that all metrics weigh the same. A metric in
    which no method has an advantage is left out.

    Args:
        gains: the metrics.
        methods: the rows of methods.
        others: more rows whose advantages are divided by that of the best method.
    """
    shares: dict[str, list[Float[np.ndarray, " n"]]] = {name: [] for name in (*methods, *others)}
    for of_metric in gains:
        ahead = {name: of_metric[name] - of_metric["random"] for name in shares}
        most = max((mean(ahead[name]) for name in methods if np.isfinite(ahead[name]).any()), default=0.0)
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


def _against(
    name: str,
    figures: Mapping[str, Mapping[str, Figure]],
    advantage: Mapping[str, Float[np.ndarray, "m n"]],
    others: Sequence[str],
    unmoved: Sequence[str],
) -> str:
    """Return what speaks against a method; empty for a fit one.

    A fit method beats the random map in most of the metrics in which it has values, and loses to it in none. Over all
    metrics its mean is better than those of the other reference maps, and its map changes with the weights.
    """
    measured = {METRICS[metric].title: rows[name] for metric, rows in figures.items() if rows[name].pictures}
    lost = [title for title, figure in measured.items() if figure.loses_to_random]
    if name in unmoved:
        return "almost the same map if the weights are shuffled"
    if lost:
        return f"worse than a random map in {listed(lost)}"
    if 2 * sum(figure.beats_random for figure in measured.values()) <= len(measured) or name not in advantage:
        return "not significantly better than a random map in most of the metrics that decide"
    behind = [other for other in others if mean(_overall(advantage[name] - advantage[other])) <= 0]
    return f"over all metrics no better than {listed([REFERENCES[other] for other in behind], 'or')}" if behind else ""


def _agree(figures: Mapping[str, Mapping[str, Figure]], methods: Sequence[str]) -> bool:
    """Tell whether one method is among the best of each metric that tells methods from chance, and loses in none."""
    telling = [rows for rows in figures.values() if any(rows[name].mark == "*" for name in methods)]
    return not telling or any(
        all(rows[name].mark == "*" for rows in telling)
        and not any(rows[name].loses_to_random for rows in figures.values())
        for name in methods
    )
