"""Against an earlier run: what changed, picture by picture, and whether by more than chance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from camkit.background.measures import ImageRow
from camkit.background.statistics import Estimate, bootstrap_sums, group_numbers, interval
from camkit.errors import InputError

_COMPARED = {"sha256", "same", "other", "energy", "shuffled", "ceiling"}
"""What is read of a picture of an earlier run."""


@dataclass(frozen=True)
class Change:
    """How the gap and the skill changed since an earlier run, on the pictures that both have measured."""

    pictures: int
    gap: Estimate | None
    skill: Estimate | None

    @property
    def worse(self) -> list[str]:
        """What got worse by more than chance, in words."""
        found = []
        if self.gap is not None and self.gap.low > 0:
            found.append(
                f"the background gap grew by {self.gap.value:.2f} (at least {self.gap.low:.2f}) since the baseline"
            )
        if self.skill is not None and self.skill.high < 0:
            found.append(f"the skill of the heat fell by {-self.skill.value:.2f} (at least {-self.skill.high:.2f})")
        return found


def read_baseline(file: Path) -> dict[str, Any]:
    """Read an earlier ``report.json``.

    Raises:
        InputError: it cannot be read, or is none.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"the baseline {file} cannot be read: {error}") from error
    if not isinstance(found, dict) or not {"schema", "hashes", "images", "layer", "grids"} <= found.keys():
        raise InputError(f"{file} is no report.json of camkit check")
    if not isinstance(found["hashes"], dict) or not all(isinstance(found[name], list) for name in ("images", "grids")):
        raise InputError(f"{file} is no report.json of camkit check: it is damaged")
    if not all(isinstance(one, dict) and one.keys() >= _COMPARED for one in found["images"]):
        raise InputError(f"{file} is no report.json of camkit check: its pictures are damaged")
    if found["schema"] != 1:
        raise InputError(f"{file} has the schema {found['schema']}, and this camkit reads 1")
    return found


def check_comparable(baseline: Mapping[str, Any], hashes: Mapping[str, str], source: Path) -> None:
    """Refuse a baseline of other data or settings, before anything is computed.

    Raises:
        InputError: the two runs cannot be compared.
    """
    for what, name in (("data", "pictures or regions"), ("settings", "settings")):
        if baseline["hashes"].get(what) != hashes[what]:
            raise InputError(f"{source} is of other {name}, so it cannot be compared; make a new baseline")


def check_layer(baseline: Mapping[str, Any], layer: str, grid: Sequence[int] | None = None) -> None:
    """Refuse a baseline whose heat is of another layer, or of another grid than a first picture's.

    Raises:
        InputError: the two runs cannot be compared.
    """
    if baseline["layer"] != layer:
        raise InputError(
            f"the baseline's heat is of layer {baseline['layer']!r} and this one of {layer!r}; name the layer "
            "([check] layer) or make a new baseline"
        )
    found = [] if grid is None else ["x".join(map(str, grid))]
    if baseline["grids"] and not set(found) <= set(baseline["grids"]):
        raise InputError(_other_grids(baseline, found))


def _other_grids(baseline: Mapping[str, Any], grids: Sequence[str]) -> str:
    before = ", ".join(map(str, baseline["grids"]))
    return f"the baseline's heat is of the grid {before}, this one of {', '.join(grids)}; make a new baseline"


def compare(
    baseline: Mapping[str, Any],
    rows: Sequence[ImageRow],
    contents: Mapping[str, str],
    layer: str,
    grids: Sequence[str],
    seed: int,
) -> Change:
    """Compare with an earlier run, pairing pictures by what their files hold.

    Args:
        baseline: as ``read_baseline`` gives it.
        rows: of this run.
        contents: the hash of each picture's file, by name.
        layer, grids: where this run's heat was measured.
        seed: of the bootstrap, which draws groups of pairs.

    Raises:
        InputError: another layer or grid, or the baseline is damaged.
    """
    check_layer(baseline, layer)
    if list(baseline["grids"]) != list(grids):
        raise InputError(_other_grids(baseline, grids))
    try:
        return _paired(baseline, rows, contents, seed)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the baseline's pictures cannot be read, it is damaged: {error!r}") from error


def _paired(baseline: Mapping[str, Any], rows: Sequence[ImageRow], contents: Mapping[str, str], seed: int) -> Change:
    before = {image["sha256"]: image for image in baseline["images"]}
    pairs = [(row, before[contents[row.name]]) for row in rows if contents[row.name] in before]
    gaps = [
        (row.group, _gap(row.same, row.other) - _gap(old["same"], old["other"]))
        for row, old in pairs
        if row.same and old["same"]
    ]
    return Change(len(pairs), _gap_change(gaps, seed), _skill_change(pairs, seed))


def _gap(same: Mapping[str, float], other: Mapping[str, float]) -> float:
    return float(np.mean([same[fill] - other[fill] for fill in same]))


def _gap_change(gaps: Sequence[tuple[str, float]], seed: int) -> Estimate | None:
    if not gaps:
        return None
    groups = group_numbers([group for group, _ in gaps])
    sums = bootstrap_sums(np.array([(change, 1.0) for _, change in gaps]), groups, [seed, 1])
    return interval(sums[:, 0] / sums[:, 1], float(np.mean([change for _, change in gaps])), int(groups.max()) + 1)


def _skill_change(pairs: Sequence[tuple[ImageRow, Mapping[str, Any]]], seed: int) -> Estimate | None:
    both = [
        (row, old) for row, old in pairs if row.skilled and old["shuffled"] is not None and old["energy"] is not None
    ]
    if not both:
        return None
    parts = np.array([(*_room(vars(row)), *_room(old)) for row, old in both])
    groups = group_numbers([row.group for row, _ in both])
    sums = bootstrap_sums(parts, groups, [seed, 2])
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]
        now, then = parts[:, 0].sum() / parts[:, 1].sum(), parts[:, 2].sum() / parts[:, 3].sum()
    return interval(draws, float(now - then), int(groups.max()) + 1)


def _room(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["energy"] - row["shuffled"], row["ceiling"] - row["shuffled"]
