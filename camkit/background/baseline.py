"""Compare with an earlier run, picture by picture: what changed by more than chance?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from camkit.background.pictures import ImageRow
from camkit.errors import InputError, refuse_pipe
from camkit.kit.fingerprint import digest
from camkit.kit.statistics import Estimate, bootstrap_sums, group_numbers, interval

BASELINE_FILE = "report.json"
"""The file name of the report that later runs can be compared with."""

SCHEMA = 1
"""The schema of the report that this version writes and reads."""


@dataclass(frozen=True)
class Change:
    """How the background gap and the skill changed since an earlier run, on the pictures that both runs measured."""

    pictures: int
    gap: Estimate | None
    skill: Estimate | None

    @property
    def worse(self) -> list[str]:
        """What got worse by more than chance, in words."""
        sentences = []
        if self.gap is not None and self.gap.low > 0:
            sentences.append(
                f"the background gap grew by {self.gap.value:.2f} (at least {self.gap.low:.2f}) since the baseline"
            )
        if self.skill is not None and self.skill.high < 0:
            sentences.append(f"the skill of the heat fell by {-self.skill.value:.2f} (at least {-self.skill.high:.2f})")
        return sentences


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


def check_comparable(baseline: Mapping[str, Any], hashes: Mapping[str, str], source: Path) -> None:
    """Refuse a baseline with other data or settings.

    Raises:
        InputError: the two runs cannot be compared.
    """
    for part, name in (("data", "pictures or regions"), ("settings", "settings")):
        if baseline["hashes"].get(part) != hashes[part]:
            raise InputError(f"{source} was made with other {name} and cannot be compared; make a new baseline")


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


def compare(baseline: Mapping[str, Any], rows: Sequence[ImageRow], contents: Mapping[str, str], seed: int) -> Change:
    """Compare with an earlier run. Pictures are paired by the content of their files.

    Args:
        baseline: the earlier report, from ``read_baseline``.
        rows: the pictures of this run.
        contents: the hash of each picture's file, by name.
        seed: seeds the bootstrap, which resamples groups of pairs.
    """
    before = {image["sha256"]: image for image in baseline["images"]}
    pairs = [(row, before[contents[row.name]]) for row in rows if contents[row.name] in before]
    return Change(len(pairs), _gap_change(pairs, seed), _skill_change(pairs, seed))


_Pairs = Sequence[tuple[ImageRow, Mapping[str, Any]]]
"""Each picture of this run with its entry in the earlier report."""


def _gap_change(pairs: _Pairs, seed: int) -> Estimate | None:
    both = [(row, old) for row, old in pairs if row.same and old["same"]]
    if not both:
        return None
    changes = [_mean_gap(row.same, row.other) - _mean_gap(old["same"], old["other"]) for row, old in both]
    groups = group_numbers([row.group for row, _ in both])
    sums = bootstrap_sums(np.array([(change, 1.0) for change in changes]), groups, [seed, 1])
    return interval(sums[:, 0] / sums[:, 1], float(np.mean(changes)), int(groups.max()) + 1)


def _mean_gap(same: Mapping[str, float], other: Mapping[str, float]) -> float:
    return float(np.mean([same[fill] - other[fill] for fill in same]))


def _skill_change(pairs: _Pairs, seed: int) -> Estimate | None:
    both = [
        (row, old) for row, old in pairs if row.skilled and old["shuffled"] is not None and old["energy"] is not None
    ]
    if not both:
        return None
    parts = np.array([(*_skill_parts(vars(row)), *_skill_parts(old)) for row, old in both])
    groups = group_numbers([row.group for row, _ in both])
    sums = bootstrap_sums(parts, groups, [seed, 2])
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]
        now, before = parts[:, 0].sum() / parts[:, 1].sum(), parts[:, 2].sum() / parts[:, 3].sum()
    return interval(draws, float(now - before), int(groups.max()) + 1)


def _skill_parts(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the numerator and the denominator of the skill: how far the map and a perfect map beat a shuffled one."""
    return row["energy"] - row["shuffled"], row["ceiling"] - row["shuffled"]
