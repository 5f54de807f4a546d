"""Compare with an earlier run, picture by picture: what changed by more than chance?"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from camkit.background.pictures import IMAGES, ImageRow
from camkit.background.plan import WORSE
from camkit.errors import InputError, refuse_pipe
from camkit.kit.fingerprint import digest
from camkit.kit.statistics import MIN_GROUPS, Estimate, bootstrap_sums, group_numbers, holm, interval, p_above

BASELINE_FILE = "report.json"
"""The file name of the report that later runs can be compared with."""

SCHEMA = 1
"""The schema of the report that this version writes and reads."""


@dataclass(frozen=True)
class Flip:
    """A picture that the earlier model recognised and this one does not, with the class that each names."""

    name: str
    before: str
    now: str


@dataclass(frozen=True)
class PairChange:
    """The accuracy of the objects of one class on the backgrounds of another, and its change.

    ``p`` is the p-value of a fall above the limit, with Holm's correction over all pairs.
    """

    label: str
    background: str
    now: float
    change: Estimate
    p: float

    @property
    def in_words(self) -> str:
        """By how much it fell."""
        fell = f"fell by {-self.change.value:.2f} to {self.now:.2f} since the baseline"
        return f"the accuracy of {self.label} on backgrounds of {self.background} {fell}"


@dataclass(frozen=True)
class Change:
    """What changed since an earlier run, on the pictures that both runs measured.

    Attributes:
        pictures: how many these are.
        gap: the change of the background gap, the mean over the fills.
        skill: the change of the skill of the heat.
        accuracy: the change of the accuracy on unedited pictures.
        pair: the class and background whose accuracy fell most.
        flips: the pictures that were recognised before and are not now.
        gained: how many were not recognised before and are now.
        limit: how much worse than the baseline a measure may be.
    """

    pictures: int
    gap: Estimate | None
    skill: Estimate | None
    accuracy: Estimate | None = None
    pair: PairChange | None = None
    flips: tuple[Flip, ...] = ()
    gained: int = 0
    limit: float = 0.0

    @property
    def worse(self) -> list[str]:
        """What got worse by more than the limit and by more than chance, in words; the accuracy comes first."""
        gap, pair = self.gap, self.pair
        sentences = (
            self._worse("the accuracy on unedited pictures fell", self.accuracy),
            self._worse("the background gap grew", gap and Estimate(-gap.value, -gap.high, -gap.low, gap.groups)),
            pair.in_words if pair is not None and pair.p <= _ALPHA else "",
            self._worse("the skill of the heat fell", self.skill),
        )
        return [sentence for sentence in sentences if sentence]

    def _worse(self, what: str, change: Estimate | None) -> str:
        if change is None or not change.high < 0 or -change.value <= self.limit:
            return ""
        return f"{what} by {-change.value:.2f} (at least {-change.high:.2f}) since the baseline"


_ALPHA = 0.05
"""The significance level of the fall of a pair."""


def read_baseline(file: Path) -> dict[str, Any]:
    """Read an earlier ``report.json``.

    Raises:
        InputError: the file cannot be read, is not a report of the check, or changed since it was written.
    """
    refuse_pipe(file)
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"the baseline {file} cannot be read: {error}") from error
    if not isinstance(report, dict) or not {"schema", "hashes", "images", "layer", "grids"} <= report.keys():
        raise InputError(f"{file} is not a {BASELINE_FILE} of camkit check")
    if report["schema"] != SCHEMA:
        raise InputError(f"the baseline {file} has schema {report['schema']}, but this camkit reads schema {SCHEMA}")
    if report.get("checksum") != checksum(report):
        raise InputError(
            f"the baseline {file} is damaged: its checksum does not match its contents; make a new baseline"
        )
    return report


def checksum(report: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a report without its own checksum; the order and spacing of the JSON do not matter."""
    contents = {name: value for name, value in report.items() if name != "checksum"}
    return digest(json.dumps(contents, sort_keys=True))


def check_comparable(
    baseline: Mapping[str, Any], hashes: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]], source: Path
) -> None:
    """Refuse a baseline with other data or settings; ``settings`` are this run's, as the report holds them.

    Raises:
        InputError: the two runs cannot be compared.
    """
    if baseline["hashes"].get("data") != hashes["data"]:
        raise InputError(
            f"{source} was made with other pictures or regions and cannot be compared; make a new baseline"
        )
    if baseline["hashes"].get("settings") != hashes["settings"]:
        before = baseline.get("settings") or settings
        differ = [
            f"{table}.{name} = {json.dumps(before.get(table, values).get(name))} and not {json.dumps(value)}"
            for table, values in settings.items()
            for name, value in values.items()
            if name != WORSE and before.get(table, values).get(name) != value
        ]
        what = differ[0] if differ else "another class map, preprocessing or table of classes"
        raise InputError(f"{source} was made with {what} and cannot be compared; make a new baseline")


def check_heat(baseline: Mapping[str, Any], layer: str, grids: Sequence[str]) -> None:
    """Refuse a baseline whose heat was measured at another layer, or never on one of these grids.

    Raises:
        InputError: the two runs cannot be compared.
    """
    if baseline["layer"] != layer:
        raise InputError(
            f"the baseline's heat is from layer {baseline['layer']!r}, this run's from {layer!r}; set the layer in the "
            "config ([check] layer), or make a new baseline"
        )
    if baseline["grids"] and not set(grids) <= set(baseline["grids"]):
        raise InputError(
            f"the baseline's heat has the grid {', '.join(baseline['grids'])}, this run's {', '.join(grids)}; make a "
            "new baseline"
        )


def compare(
    baseline: Mapping[str, Any], rows: Sequence[ImageRow], contents: Mapping[str, str], seed: int, limit: float
) -> Change:
    """Compare with an earlier run. Pictures are paired by the content of their files.

    Args:
        baseline: the earlier report, from ``read_baseline``.
        rows: the pictures of this run.
        contents: the hash of each picture's file, by name.
        seed: seeds the bootstrap, which resamples groups of pairs.
        limit: how much worse a measure may be.
    """
    before = {image["sha256"]: IMAGES.validate_python(image) for image in baseline["images"]}
    pairs = [(row, before[contents[row.name]]) for row in rows if contents[row.name] in before]
    return Change(
        len(pairs),
        gap_change(pairs, seed),
        _skill_change(pairs, seed),
        _mean_change([float(row.right) - float(old.right) for row, old in pairs], pairs, [seed, 3])[0]
        if pairs
        else None,
        _pair_change(pairs, seed, limit),
        tuple(Flip(row.name, old.answer, row.answer) for row, old in pairs if old.right and not row.right),
        sum(row.right and not old.right for row, old in pairs),
        limit,
    )


_Pairs = Sequence[tuple[ImageRow, ImageRow]]
"""The row of each picture in this run, and in the earlier one."""


def gap_change(pairs: _Pairs, seed: int) -> Estimate | None:
    """Return the mean change of the gap over fills and pictures; None if no picture was pasted in both runs."""
    both = [(row, old) for row, old in pairs if row.same and old.same]
    changes = [_mean_gap(row) - _mean_gap(old) for row, old in both]
    return _mean_change(changes, both, [seed, 1])[0] if changes else None


def _mean_change(
    changes: Sequence[float], pairs: _Pairs, seed: Sequence[int]
) -> tuple[Estimate, Float[np.ndarray, " b"]]:
    """Return the mean of some changes with its interval, and its bootstrap draws."""
    numbers = group_numbers([row.group for row, _ in pairs])
    sums = bootstrap_sums(np.array([(change, 1.0) for change in changes]), numbers, seed)
    draws = sums[:, 0] / sums[:, 1]
    return interval(draws, float(np.mean(changes)), int(numbers.max()) + 1), draws


def _pair_change(pairs: _Pairs, seed: int, limit: float) -> PairChange | None:
    """Return the class and background whose accuracy fell most; None if no pair has enough groups."""
    found: dict[tuple[str, str], list[tuple[ImageRow, ImageRow]]] = defaultdict(list)
    for row, old in pairs:
        for background in row.by_background.keys() & old.by_background.keys():
            found[row.label, background].append((row, old))
    enough = {pair: of for pair, of in sorted(found.items()) if len({row.group for row, _ in of}) >= MIN_GROUPS}
    if not enough:
        return None
    changes: list[PairChange] = []
    for number, ((label, background), of) in enumerate(enough.items()):
        shares = np.array([[np.mean(row.by_background[background]) for row in pair] for pair in of])
        change, draws = _mean_change((shares[:, 0] - shares[:, 1]).tolist(), of, [seed, 4, number])
        p = p_above(-draws, limit, change.groups)
        changes.append(PairChange(label, background, float(shares[:, 0].mean()), change, p))
    adjusted = holm([change.p for change in changes])
    changes = [replace(change, p=p) for change, p in zip(changes, adjusted, strict=True)]
    return min(changes, key=lambda change: (change.p, change.change.value))


def _mean_gap(row: ImageRow) -> float:
    return float(np.mean([row.same[fill] - row.other[fill] for fill in row.same]))


def _skill_change(pairs: _Pairs, seed: int) -> Estimate | None:
    skills = [(row.group, *own, *earlier) for row, old in pairs if (own := row.skill) and (earlier := old.skill)]
    if not skills:
        return None
    parts = np.array([parts for _, *parts in skills])
    groups = group_numbers([group for group, *_ in skills])
    sums = bootstrap_sums(parts, groups, [seed, 2])
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]
        now, before = parts[:, 0].sum() / parts[:, 1].sum(), parts[:, 2].sum() / parts[:, 3].sum()
    return interval(draws, float(now - before), int(groups.max()) + 1)
