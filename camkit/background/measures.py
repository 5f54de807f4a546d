"""From rows to measures: for each class and for all of them, with intervals and p-values."""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from camkit.background.statistics import Estimate, interval, numbered, p_above, resampled, wilson

OVERALL = ""
"""The name under which the measures of all classes together are kept."""


@dataclass(frozen=True)
class ImageRow:
    """What was measured of one picture; see the fields' names in docs/check.md.

    ``same``, ``other`` and ``removed`` are by fill: the share of right answers on backgrounds of its own class, on
    those of others, and whether the answer was right with the object removed; ``named`` is the class then named.
    ``pasted`` are, by fill, the class and the group of each background that the object was shown on, and the class
    named there.
    """

    name: str
    label: str
    group: str
    right: bool
    answer: str
    probability: float
    status: str
    energy: float | None = None
    shuffled: float | None = None
    ceiling: float | None = None
    room: float | None = None
    hit: bool | None = None
    centre_hit: bool | None = None
    rank: float | None = None
    area: float | None = None
    grid: tuple[int, ...] | None = None
    same: Mapping[str, float] = field(default_factory=dict)
    other: Mapping[str, float] = field(default_factory=dict)
    pasted: Mapping[str, Sequence[tuple[str, str, str]]] = field(default_factory=dict)
    removed: Mapping[str, bool] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    background_change: float | None = None
    object_change: float | None = None
    right_with_noise_on_object: bool | None = None
    right_with_noise_on_background: bool | None = None

    @property
    def skilled(self) -> bool:
        """Whether the map could be held against its region."""
        return self.energy is not None and self.shuffled is not None and self.ceiling is not None


@dataclass(frozen=True)
class Tested:
    """A measured effect of one fill, how surely it is above the limit, and the two shares it is the difference of."""

    effect: Estimate
    p: float
    accuracies: tuple[float, float]
    pictures: int


@dataclass(frozen=True)
class Measures:
    """The measures of one class, or of all.

    Attributes:
        name: of the class; OVERALL for all.
        pictures: with a map, or without one for lack of evidence.
        tested: pictures in the experiment.
        accuracy: on the pictures as they are, with Wilson's interval.
        empty: share of maps without any evidence.
        energy, shuffled, ceiling: means of E, S and C; None without regions.
        room: how much more heat perfect maps have in their own region than in other pictures'; mean.
        skill: mean(E - S) / mean(C - S).
        hits, centre_hits, rank, area: means.
        gap: for each fill, accuracy on backgrounds of its own class minus that on those of others.
        sufficiency: for each fill, how far the accuracy without the object is above chance.
        attraction: for each fill, how often objects of other classes are given this class's name on its backgrounds,
            minus how often elsewhere; none for all classes together, whose gap it is.
        foreground_sensitivity: Moayeri et al. 2022; None where either accuracy is undefined.
        background_change, object_change: how far the margin falls when as much of either is smoothed; means.
    """

    name: str
    pictures: int
    tested: int
    accuracy: Estimate
    empty: float
    energy: float | None = None
    shuffled: float | None = None
    ceiling: float | None = None
    room: float | None = None
    skill: Estimate | None = None
    hits: float | None = None
    centre_hits: float | None = None
    rank: float | None = None
    area: float | None = None
    gap: Mapping[str, Tested] = field(default_factory=dict)
    sufficiency: Mapping[str, Tested] = field(default_factory=dict)
    attraction: Mapping[str, Tested] = field(default_factory=dict)
    foreground_sensitivity: float | None = None
    background_change: float | None = None
    object_change: float | None = None


@dataclass(frozen=True)
class Limits:
    """Beyond what an effect counts."""

    gap: float
    sufficiency: float
    attraction: float


Effect = Literal["gap", "sufficiency", "attraction"]


def _number_of(name: str) -> int:
    """Return a number for a name, the same on every machine."""
    return zlib.crc32(name.encode(errors="surrogateescape"))


def weakest(tested: Mapping[str, Tested]) -> Tested | None:
    """Return the fill that shows the least effect, which decides."""
    return min(tested.values(), key=lambda one: one.effect.value, default=None)


def measure_all(
    rows: Sequence[ImageRow], limits: Limits, seed: int, apart: Collection[str] = (), classes: Collection[str] = ()
) -> dict[str, Measures]:
    """Measure each class, and all together, but those ``apart``, under OVERALL.

    ``classes`` are those there should be: one of which no picture could be used is measured as well, as nothing.
    """
    by_class: dict[str, list[ImageRow]] = defaultdict(list, {name: [] for name in classes})
    for row in rows:
        by_class[row.label].append(row)
    fills = sorted({fill for row in rows for fill in row.removed})
    chances = {fill: _chances(rows, fill) for fill in fills}
    drawn = _attractions([row for row in rows if row.label not in apart], limits.attraction, seed)
    found = {}
    for name, of_class in sorted(by_class.items()):
        false = {fill: by_class_of[name] for fill, (by_class_of, _) in chances.items() if name in by_class_of}
        one = _measured(name, of_class, limits, seed, {fill: _always(one) for fill, one in false.items()})
        found[name] = replace(one, attraction=drawn.get(name, {}))
    counted = [row for row in rows if row.label not in apart]
    shares = {fill: _chances(counted, fill)[1] for fill in fills}
    overall = {fill: _by_answer(fill, share) for fill, share in shares.items()}
    found[OVERALL] = _measured(OVERALL, counted, limits, seed, overall)
    return found


Chance = Callable[[ImageRow], float]
"""What an answer without the object is worth at random."""


def _always(value: float) -> Chance:
    return lambda _: value


def _by_answer(fill: str, shares: Mapping[str, float]) -> Chance:
    return lambda row: shares.get(row.named[fill], 0.0)


def _chances(rows: Sequence[ImageRow], fill: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return what the answers without the object would be worth if they were dealt to the pictures at random.

    For one class that is how often pictures of the other classes are given its name: a model that names one class
    whenever it sees nothing is not above chance. For all it is, on average over the answers, the share of pictures that
    are of the class named. Either is taken as known, since it is of many more pictures.

    Returns:
        By class, how often others are given its name, where there are others; and each class's share of the pictures.
    """
    of_fill = [row for row in rows if fill in row.removed]
    labels, named = Counter(row.label for row in of_fill), Counter(row.named[fill] for row in of_fill)
    right = Counter(row.label for row in of_fill if row.named[fill] == row.label)
    rest = {name: len(of_fill) - count for name, count in labels.items()}
    false = {name: (named[name] - right[name]) / others for name, others in rest.items() if others}
    return false, {name: count / len(of_fill) for name, count in labels.items()}


class _Pair(NamedTuple):
    """An object of another class on a class's background, and whether it was given that class's name."""

    picture: str
    group: str
    background: str
    drawn: bool


def _attractions(rows: Sequence[ImageRow], limit: float, seed: int) -> dict[str, dict[str, Tested]]:
    """Return by class and fill how much its backgrounds draw the answers to objects of other classes.

    How often they are given its name on other backgrounds is taken as known, since it is of many more pictures.
    """
    found: dict[str, dict[str, Tested]] = defaultdict(dict)
    for fill in sorted({fill for row in rows for fill in row.pasted}):
        on_it: dict[str, list[_Pair]] = defaultdict(list)
        shown, named = Counter[str](), Counter[str]()  # pairs of an object and a background that is not the class's
        pairs = 0
        for row in rows:
            for background, group, answer in row.pasted.get(fill, ()):
                if background != row.label:
                    on_it[background].append(_Pair(row.name, row.group, group, answer == background))
                pairs += 1
                shown.update({background, row.label})
                named.update({answer} - {background, row.label})
        for name, parts in on_it.items():
            elsewhere = pairs - shown[name]
            if not elsewhere:
                continue
            column = np.array([(float(one.drawn), named[name] / elsewhere, 1.0) for one in parts])
            by_object, by_background = (
                _tested(resampled(column, numbered(of), [seed, _number_of(name), turn]), column, of, limit)
                for turn, of in enumerate(([one.group for one in parts], [one.background for one in parts]))
            )
            pictures = len({one.picture for one in parts})
            found[name][fill] = _surer(replace(by_object, pictures=pictures), by_background)
    return found


def _surer(by_object: Tested, by_background: Tested) -> Tested:
    """Join a test over objects with that over the backgrounds they were shown on: neither alone may decide."""
    one, other = by_object.effect, by_background.effect
    low, high = np.minimum(one.low, other.low), np.maximum(one.high, other.high)  # no number where either is none
    widest = Estimate(one.value, float(low), float(high), min(one.groups, other.groups))
    return replace(by_object, effect=widest, p=max(by_object.p, by_background.p))


def _gap_by_background(name: str, rows: Sequence[ImageRow], fill: str, limit: float, seed: int) -> Tested | None:
    """Test a gap by resampling the backgrounds, of either kind by itself; None where there are none of a kind."""
    arms: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([], [])
    for row in rows:
        for background, group, answer in row.pasted.get(fill, ()):
            arms[background != row.label].append((group, answer == row.label))
    if not all(arms):
        return None
    shares, draws = [], []
    for turn, arm in enumerate(arms):
        column = np.array([(float(right), 1.0) for _, right in arm])
        sums = resampled(column, numbered([group for group, _ in arm]), [seed, _number_of(name), 2 + turn])
        draws.append(sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], np.nan))
        shares.append(float(column[:, 0].mean()))
    groups = min(len({group for group, _ in arm}) for arm in arms)
    gap = draws[0] - draws[1]
    effect = interval(gap, shares[0] - shares[1], groups)
    return Tested(effect, p_above(gap, limit, groups), (shares[0], shares[1]), len(rows))


def _mean(values: Sequence[float | bool | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _measured(
    name: str, rows: Sequence[ImageRow], limits: Limits, seed: int, chances: Mapping[str, Chance]
) -> Measures:
    if not rows:
        return Measures(name, 0, 0, Estimate(math.nan, math.nan, math.nan, 0), 0.0)
    right = sum(row.right for row in rows)
    low, high = wilson(right, len(rows))
    skilled = [row for row in rows if row.skilled]
    effects = _effects(name, rows, limits, seed, chances)
    on_object, on_background = (
        _mean([row.right_with_noise_on_object for row in rows]),
        _mean([row.right_with_noise_on_background for row in rows]),
    )
    return Measures(
        name=name,
        pictures=len(rows),
        tested=sum(bool(row.same) for row in rows),
        accuracy=Estimate(right / len(rows), low, high, len({row.group for row in rows})),
        empty=float(np.mean([row.status != "ok" for row in rows])),
        energy=_mean([row.energy for row in skilled]),
        shuffled=_mean([row.shuffled for row in skilled]),
        ceiling=_mean([row.ceiling for row in skilled]),
        room=_mean([row.room for row in skilled]),
        skill=effects.skill,
        hits=_mean([row.hit for row in rows]),
        centre_hits=_mean([row.centre_hit for row in rows]),
        rank=_mean([row.rank for row in rows]),
        area=_mean([row.area for row in rows]),
        gap=effects.gap,
        sufficiency=effects.sufficiency,
        foreground_sensitivity=_sensitivity(on_object, on_background),
        background_change=_mean([row.background_change for row in rows]),
        object_change=_mean([row.object_change for row in rows]),
    )


def _sensitivity(on_object: float | None, on_background: float | None) -> float | None:
    """Return the relative foreground sensitivity (Moayeri et al. 2022, arXiv:2201.10766, Eq. 1)."""
    if on_object is None or on_background is None:
        return None
    mean = (on_object + on_background) / 2
    return None if mean in (0, 1) else (on_background - on_object) / (2 * min(mean, 1 - mean))


@dataclass
class _Effects:
    skill: Estimate | None = None
    gap: dict[str, Tested] = field(default_factory=dict)
    sufficiency: dict[str, Tested] = field(default_factory=dict)


def _effects(name: str, rows: Sequence[ImageRow], limits: Limits, seed: int, chances: Mapping[str, Chance]) -> _Effects:
    """Measure every effect on the same resamples: each is a ratio of sums over the pictures that have it."""
    pairs = sorted({fill for row in rows for fill in row.same.keys() & row.other.keys()})
    columns: dict[tuple[str, str], Float[np.ndarray, "n 3"]] = {}
    for fill in pairs:
        columns["gap", fill] = _column(rows, functools.partial(_gap_of, fill))
    for fill, chance in chances.items():
        columns["sufficiency", fill] = _column(rows, functools.partial(_sufficiency_of, fill, chance))
    columns["skill", ""] = _column(rows, _skill_of)
    columns = {key: column for key, column in columns.items() if column.any()}
    if not columns:
        return _Effects()
    sums = resampled(np.hstack(list(columns.values())), numbered([row.group for row in rows]), [seed, _number_of(name)])
    found = _Effects()
    for number, ((what, fill), column) in enumerate(columns.items()):
        groups = [row.group for row, part in zip(rows, column, strict=True) if part[2] or part[1]]
        if what == "skill":
            first, second, _ = sums[:, 3 * number : 3 * number + 3].T
            total = column.sum(0)
            value = float(total[0] / total[1]) if total[1] > 0 else float("nan")
            found.skill = interval(first / np.where(second > 0, second, np.nan), value, len(set(groups)))
            continue
        part = sums[:, 3 * number : 3 * number + 3]
        if what == "gap":
            by_object = _tested(part, column, groups, limits.gap)
            by_background = _gap_by_background(name, rows, fill, limits.gap, seed)
            found.gap[fill] = by_object if by_background is None else _surer(by_object, by_background)
        else:
            found.sufficiency[fill] = _tested(part, column, groups, limits.sufficiency)
    return found


def _tested(
    sums: Float[np.ndarray, "b 3"], column: Float[np.ndarray, "n 3"], groups: Sequence[str], limit: float
) -> Tested:
    """Test a difference of two shares, from its sums over resamples of groups and what it is made of."""
    first, second, count = sums.T
    total = column.sum(0)
    draws = (first - second) / np.where(count > 0, count, np.nan)
    both = (float(total[0] / total[2]), float(total[1] / total[2]))
    known = len(set(groups))
    pictures = int(np.count_nonzero(column[:, 2]))
    return Tested(interval(draws, both[0] - both[1], known), p_above(draws, limit, known), both, pictures)


_Part = tuple[float, float, float]
_NOTHING: _Part = (0.0, 0.0, 0.0)


def _column(rows: Sequence[ImageRow], part: Callable[[ImageRow], _Part]) -> Float[np.ndarray, "n 3"]:
    return np.array([part(row) for row in rows]).reshape(-1, 3)


def _gap_of(fill: str, row: ImageRow) -> _Part:
    return (row.same[fill], row.other[fill], 1.0) if fill in row.same and fill in row.other else _NOTHING


def _sufficiency_of(fill: str, chance: Chance, row: ImageRow) -> _Part:
    return (float(row.removed[fill]), chance(row), 1.0) if fill in row.removed else _NOTHING


def _skill_of(row: ImageRow) -> _Part:
    if row.energy is None or row.shuffled is None or row.ceiling is None:
        return _NOTHING
    return row.energy - row.shuffled, row.ceiling - row.shuffled, 1.0
