"""From rows to measures: for each class and for all of them, with intervals and p-values."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int

from camkit.background.statistics import Estimate, interval, p_above, resampled, wilson

OVERALL = ""
"""The name under which the measures of all classes together are kept."""


@dataclass(frozen=True)
class ImageRow:
    """What was measured of one picture; see the fields' names in docs/check.md.

    ``same``, ``other`` and ``removed`` are by fill: the share of right answers on backgrounds of its own class, on
    those of others, and whether the answer was right with the object removed; ``named`` is the class then named.
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
    hit: bool | None = None
    centre_hit: bool | None = None
    rank: float | None = None
    area: float | None = None
    grid: tuple[int, ...] | None = None
    same: Mapping[str, float] = field(default_factory=dict)
    other: Mapping[str, float] = field(default_factory=dict)
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
    """A measured effect of one fill, and how surely it is above the limit."""

    effect: Estimate
    p: float
    accuracies: tuple[float, float]


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
        skill: mean(E - S) / mean(C - S).
        hits, centre_hits, rank, area: means.
        gap: for each fill, accuracy on backgrounds of its own class minus that on those of others.
        sufficiency: for each fill, how far the accuracy without the object is above chance.
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
    skill: Estimate | None = None
    hits: float | None = None
    centre_hits: float | None = None
    rank: float | None = None
    area: float | None = None
    gap: Mapping[str, Tested] = field(default_factory=dict)
    sufficiency: Mapping[str, Tested] = field(default_factory=dict)
    foreground_sensitivity: float | None = None
    background_change: float | None = None
    object_change: float | None = None


@dataclass(frozen=True)
class Limits:
    """Beyond what an effect counts, and by how much of it the rest is judged."""

    gap: float
    sufficiency: float


def measure_all(
    rows: Sequence[ImageRow], limits: Limits, seed: int, apart: Collection[str] = ()
) -> dict[str, Measures]:
    """Measure each class, and all together, but those ``apart``, under OVERALL."""
    by_class: dict[str, list[ImageRow]] = defaultdict(list)
    for row in rows:
        by_class[row.label].append(row)
    found = {name: _measured(name, of_class, limits, seed) for name, of_class in sorted(by_class.items())}
    counted = [row for row in rows if row.label not in apart] or rows
    found[OVERALL] = _measured(OVERALL, counted, limits, seed)
    return _with_sufficiency(found, rows, limits, seed)


def _mean(values: Sequence[float | bool | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _measured(name: str, rows: Sequence[ImageRow], limits: Limits, seed: int) -> Measures:
    right = sum(row.right for row in rows)
    low, high = wilson(right, len(rows))
    skilled = [row for row in rows if row.skilled]
    tested = [row for row in rows if row.same]
    on_object, on_background = (
        _mean([row.right_with_noise_on_object for row in rows]),
        _mean([row.right_with_noise_on_background for row in rows]),
    )
    return Measures(
        name=name,
        pictures=len(rows),
        tested=len(tested),
        accuracy=Estimate(right / len(rows), low, high, len({row.group for row in rows})),
        empty=float(np.mean([row.status != "ok" for row in rows])),
        energy=_mean([row.energy for row in skilled]),
        shuffled=_mean([row.shuffled for row in skilled]),
        ceiling=_mean([row.ceiling for row in skilled]),
        skill=_skill(name, skilled, seed),
        hits=_mean([row.hit for row in rows]),
        centre_hits=_mean([row.centre_hit for row in rows]),
        rank=_mean([row.rank for row in rows]),
        area=_mean([row.area for row in rows]),
        gap=_gaps(name, tested, limits, seed),
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


def _groups(rows: Sequence[ImageRow]) -> Int[np.ndarray, " n"]:
    known = {name: number for number, name in enumerate(sorted({row.group for row in rows}))}
    return np.array([known[row.group] for row in rows], dtype=int)


def _seed(seed: int, name: str, what: str) -> list[int]:
    return [seed, zlib.crc32(f"{what} {name}".encode())]


def _skill(name: str, rows: Sequence[ImageRow], seed: int) -> Estimate | None:
    if not rows:
        return None
    parts = np.array([_parts(row) for row in rows])
    total, room = parts.mean(0)
    sums = resampled(parts, _groups(rows), _seed(seed, name, "skill"))
    draws = sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], np.nan)
    return interval(draws, float(total / room) if room > 0 else float("nan"), len({row.group for row in rows}))


def _parts(row: ImageRow) -> tuple[float, float]:
    assert row.energy is not None
    assert row.shuffled is not None
    assert row.ceiling is not None
    return row.energy - row.shuffled, row.ceiling - row.shuffled


def _gaps(name: str, rows: Sequence[ImageRow], limits: Limits, seed: int) -> dict[str, Tested]:
    found = {}
    for fill in sorted({fill for row in rows for fill in row.same}):
        of_fill = [row for row in rows if fill in row.same and fill in row.other]
        parts = np.array([(row.same[fill], row.other[fill], 1.0) for row in of_fill])
        sums = resampled(parts, _groups(of_fill), _seed(seed, name, "gap"))
        draws = (sums[:, 0] - sums[:, 1]) / sums[:, 2]
        same, other, _ = parts.mean(0)
        groups = len({row.group for row in of_fill})
        effect = interval(draws, float(same - other), groups)
        found[fill] = Tested(effect, p_above(draws, limits.gap), (float(same), float(other)))
    return found


def _with_sufficiency(
    found: dict[str, Measures], rows: Sequence[ImageRow], limits: Limits, seed: int
) -> dict[str, Measures]:
    """Add how far the answers without the object are above chance, for each class and for all.

    Chance is what the same answers would be worth if they were dealt to the pictures at random. For one class that is
    how often pictures of the other classes, their objects removed, are given its name: a model that names one class
    whenever it sees nothing is not above chance. For all it is the sum over the classes of the share of pictures that
    are of it times the share that are called it.
    """
    fills = sorted({fill for row in rows for fill in row.removed})
    names = [name for name in found if name != OVERALL]
    tested: dict[str, dict[str, Tested]] = {name: {} for name in found}
    for fill in fills:
        of_fill = [row for row in rows if fill in row.removed]
        labels = np.array([names.index(row.label) for row in of_fill])
        answers = np.array([names.index(row.named[fill]) if row.named[fill] in names else -1 for row in of_fill])
        is_of = labels[:, None] == np.arange(len(names))
        is_named = answers[:, None] == np.arange(len(names))
        right = np.array([float(row.removed[fill]) for row in of_fill])
        columns = np.column_stack([right, np.ones(len(of_fill)), is_of, is_named, is_named & ~is_of]).astype(float)
        sums = resampled(columns, _groups(of_fill), _seed(seed, OVERALL, "sufficiency"))
        once = columns.sum(0)[None]
        count = len(names)
        accuracy, chance = _overall(once, count)
        drawn, drawn_chance = _overall(sums, count)
        groups = len({row.group for row in of_fill})
        effect = interval(drawn - drawn_chance, float(accuracy[0] - chance[0]), groups)
        p = p_above(drawn - drawn_chance, limits.sufficiency)
        tested[OVERALL][fill] = Tested(effect, p, (float(accuracy[0]), float(chance[0])))
        for number, name in enumerate(names):
            own = [row for row in of_fill if row.label == name]
            if not own or len(own) == len(of_fill):
                continue
            hits = np.array([(float(row.removed[fill]), 1.0) for row in own])
            own_sums = resampled(hits, _groups(own), _seed(seed, name, "sufficiency"))
            rest = sums[:, 1] - sums[:, 2 + number]
            false = sums[:, 2 + 2 * count + number] / np.where(rest > 0, rest, np.nan)
            draws = own_sums[:, 0] / own_sums[:, 1] - false
            known = float(hits[:, 0].mean())
            by_chance = float(once[0, 2 + 2 * count + number] / (once[0, 1] - once[0, 2 + number]))
            effect = interval(draws, known - by_chance, len({row.group for row in own}))
            tested[name][fill] = Tested(effect, p_above(draws, limits.sufficiency), (known, by_chance))
    return {name: replace(one, sufficiency=tested[name]) for name, one in found.items()}


def _overall(sums: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the accuracy, and what the same answers would be worth at random, of each row of sums."""
    number = sums[:, 1]
    of, named = sums[:, 2 : 2 + classes], sums[:, 2 + classes : 2 + 2 * classes]
    return sums[:, 0] / number, (of * named).sum(1) / number**2
