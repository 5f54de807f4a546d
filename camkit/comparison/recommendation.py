"""Which method to use: one rule over several metrics, and the sentence that says what it found.

Every function is pure. Values are gains throughout: higher is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from camkit.comparison.standings import (
    PRACTICALLY_LEVEL,
    OfRows,
    Standing,
    level_with_best,
    mean,
    not_behind,
    p_values,
    significant,
)
from camkit.kit.wording import listed

UNMOVED = 0.7
"""A map whose rank correlation with the maps of shuffled weights is above this shows the picture rather than what the
network learned. scripts/results/judged.md has the values of the methods on three networks."""

_SIMILAR_COST = 1.6
"""Costs up to this many times the cheapest cost count as equal: on a busy machine, the time of a map on a small network
varies by as much."""

REFERENCES = {"random": "a random map", "centre": "a centred blob", "colour": "the best single colour"}
"""The reference rows, with their names in sentences."""

_UNMOVED = "almost the same map if the weights are shuffled"
_CHANCE = "not significantly better than a random map"

Gains: TypeAlias = Mapping[str, OfRows]
"""For each metric, by its title, the values of each row on each picture; higher is better."""

Standings: TypeAlias = Mapping[str, Mapping[str, Standing]]
"""For each metric, by its title, what it says of each row."""

Advantages: TypeAlias = Mapping[str, Float[np.ndarray, "m n"]]
"""For each row, its advantage over the random map in each metric and on each picture."""


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


def recommend(
    gains: Gains,
    standings: Standings,
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
        gains: the metrics that decide.
        standings: what they say.
        order: the rows of methods, the simplest first.
        costs: the time of each row in plain passes.
        unmoved: the rows whose maps hardly change if the weights are shuffled.
        seed: the seed of the draws.
    """
    others = [name for name in REFERENCES if name != "random" and all(name in rows for rows in gains.values())]
    # A metric that tells no method from the random map would only add noise.
    telling = {
        title: gains[title] for title, rows in standings.items() if any(rows[name].beats_random for name in order)
    }
    advantage = advantages(telling, order, others)
    against = _against(standings, advantage, order, others, unmoved)
    fit = [name for name in order if not against[name]]
    if not fit:
        agreed, conflict = _conflict(standings, order)
        return Recommendation(None, conflict + _nothing(standings, against), agreed)
    chosen = _cheap_and_good({name: advantage[name] for name in fit}, costs, seed)
    best = {title: level_with_best(gains[title], fit, seed) for title in _measured(standings, fit)}
    agreed = all(chosen in names for names in best.values())
    sentences = [
        _agreement(chosen, standings, costs) if agreed else _disagreement(chosen, best, costs),
        *_better_but_unfit(chosen, gains, standings, against),
        *_doubts(chosen, gains, standings, advantage, seed),
    ]
    return Recommendation(chosen, " ".join(sentences), agreed)


def advantages(gains: Gains, methods: Sequence[str], others: Sequence[str] = ()) -> dict[str, Float[np.ndarray, "m n"]]:
    """Return for each row its advantage over the random map, in each metric and on each picture.

    In each metric, the mean advantage of the best method counts as 1, so that all metrics weigh the same. A metric in
    which no method has an advantage is left out.

    Args:
        gains: the metrics.
        methods: the rows of methods.
        others: more rows whose advantages are divided by that of the best method.
    """
    shares: dict[str, list[Float[np.ndarray, " n"]]] = {name: [] for name in (*methods, *others)}
    for of_metric in gains.values():
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
    standings: Standings,
    advantage: Advantages,
    order: Sequence[str],
    others: Sequence[str],
    unmoved: Sequence[str],
) -> dict[str, str]:
    """Return what speaks against each method; empty for a fit one.

    A fit method beats the random map in most of the metrics in which it has values, and loses to it in none. Over all
    metrics its mean is better than those of the other reference maps, and its map changes with the weights.
    """
    against: dict[str, str] = {}
    for name in order:
        measured = _measured(standings, [name])
        lost = [title for title, rows in measured.items() if rows[name].loses_to_random]
        beaten = [title for title, rows in measured.items() if rows[name].beats_random]
        if name in unmoved:
            against[name] = _UNMOVED
        elif lost:
            against[name] = f"worse than a random map in {listed(lost)}"
        elif 2 * len(beaten) <= len(measured) or name not in advantage:
            titles = list(standings)
            against[name] = f"{_CHANCE} in {titles[0] if len(titles) == 1 else f'most of {listed(titles)}'}"
        else:
            behind = [
                REFERENCES[other]
                for other in others
                if other in advantage and mean(_overall(advantage[name] - advantage[other])) <= 0
            ]
            against[name] = f"over all metrics no better than {listed(behind, 'or')}" if behind else ""
    return against


def _measured(standings: Standings, names: Sequence[str]) -> dict[str, Mapping[str, Standing]]:
    """Return the metrics in which any of the rows has a value: a metric without values prefers none."""
    return {title: rows for title, rows in standings.items() if any(rows[name].estimate.groups for name in names)}


def _cheap_and_good(advantage: Advantages, costs: Mapping[str, float], seed: int) -> str:
    """Return the first of the cheap rows among those that are not clearly behind the best over all metrics."""
    best = max(advantage, key=lambda name: mean(_overall(advantage[name])))
    behind = {name: _overall(advantage[best] - values) for name, values in advantage.items()}
    as_good = not_behind(behind, best, PRACTICALLY_LEVEL * mean(_overall(advantage[best])), seed)
    cheap = _SIMILAR_COST * max(1.0, min(costs[name] for name in as_good))
    return next(name for name in as_good if costs[name] <= cheap)


# --- the sentence


def _conflict(standings: Standings, order: Sequence[str]) -> tuple[bool, str]:
    """Return whether the metrics agree on what is best, and a sentence if they do not.

    Methods that a metric cannot tell from the random map do not count as its best.
    """
    best = {
        title: [name for name in order if rows[name].beats_random and rows[name].level_with_best]
        for title, rows in standings.items()
    }
    named = {title: names for title, names in best.items() if names}
    lost = {
        title: [name for name in order if rows[name].loses_to_random and any(name in names for names in named.values())]
        for title, rows in standings.items()
    }
    agreed = not named or bool(set.intersection(*map(set, named.values())))
    if agreed and not any(lost.values()):
        return True, ""
    told = [f"{title} prefers {_first_two(names)}" for title, names in named.items()]
    told += [f"{title} finds {_first_two(names)} worse than a random map" for title, names in lost.items() if names]
    return False, f"The metrics disagree: {', '.join(told)}. "


def _nothing(standings: Standings, against: Mapping[str, str]) -> str:
    pictures = max(standing.estimate.groups for rows in standings.values() for standing in rows.values())
    by_reason: dict[str, list[str]] = {}
    for name, reason in against.items():
        by_reason.setdefault(reason, []).append(name)
    reasons = [f"{reason[0].upper()}{reason[1:]}: {', '.join(names)}." for reason, names in by_reason.items()]
    by_chance = any(reason.startswith(_CHANCE) for reason in by_reason)
    advice = ["Judge more pictures. If no method is better there either, do not trust any map of this model."]
    return " ".join([f"On these {pictures} pictures no method can be recommended.", *reasons, *advice * by_chance])


def _agreement(chosen: str, standings: Standings, costs: Mapping[str, float]) -> str:
    beaten = [title for title, rows in standings.items() if rows[chosen].beats_random]
    return (
        f"Use {chosen}: it beats a random map in {listed(beaten)}, no method that can be recommended is clearly "
        f"better in any metric, and none that is as good is much cheaper ({costs[chosen]:.1f} plain passes)."
    )


def _disagreement(chosen: str, best: Mapping[str, Sequence[str]], costs: Mapping[str, float]) -> str:
    """Return the sentence for metrics that prefer different methods; ``best`` has each metric's."""
    leaders = ", ".join(f"{title} prefers {_first_two(names)}" for title, names in best.items())
    level = [title for title, names in best.items() if chosen in names]
    good = f"it is as good as the best in {listed(level)}, and " if level else ""
    return (
        f"The metrics disagree: {leaders}. Use {chosen}: {good}over all metrics no method that can be recommended is "
        f"clearly better ({costs[chosen]:.1f} plain passes). Look at more than one map."
    )


def _better_but_unfit(chosen: str, gains: Gains, standings: Standings, against: Mapping[str, str]) -> list[str]:
    """Return a sentence for each method that is better in some metric and is not recommended for another reason."""
    sentences = []
    for name, reason in against.items():
        ahead = [
            title
            for title, rows in standings.items()
            if rows[name].level_with_best
            and not rows[chosen].level_with_best
            and mean(gains[title][name]) > mean(gains[title][chosen])
        ]
        if reason and ahead:
            sentences.append(f"{name} is better in {listed(ahead)}, but is not recommended: {reason}.")
    return sentences


def _doubts(chosen: str, gains: Gains, standings: Standings, advantage: Advantages, seed: int) -> list[str]:
    """Return sentences on the reference maps that the recommended method is not clearly better than."""
    others = [name for name in REFERENCES if name in advantage]
    clear = significant(p_values({name: _overall(advantage[chosen] - advantage[name]) for name in others}, seed))
    unclear = [REFERENCES[name] for name in others if not clear[name]]
    doubts = [f"Over all metrics it is not clearly better than {listed(unclear, 'or')}."] if unclear else []
    measured = _measured(standings, [chosen])
    leads = {(title, other): gains[title][chosen] - gains[title][other] for title in measured for other in others}
    ahead = significant(p_values(leads, seed))
    by_references: dict[tuple[str, ...], list[str]] = {}
    for title, rows in measured.items():
        alike = [] if rows[chosen].beats_random else [REFERENCES["random"]]
        alike += [REFERENCES[other] for other in others if not ahead[title, other]]
        by_references.setdefault(tuple(alike), []).append(title)
    return doubts + [
        f"In {listed(titles)} it is not clearly better than {listed(alike, 'or')}."
        for alike, titles in by_references.items()
        if alike
    ]


def _first_two(names: Sequence[str]) -> str:
    """Name one or two rows, and say whether there are others."""
    return names[0] if len(names) == 1 else " and ".join(names[:2]) + (" and others" if len(names) > 2 else "")
