"""Judge the stored photo lab under the check's rule, with the stored verdict beside it.

    python -m scripts.lab.rejudge_photos --markdown scripts/results/validation.md

``assets/photo_lab.jsonl.gz`` has every effect with each fill, but not the answers to each picture, so three things that
the rule needs are not in it: how the errors of the two fills go together, the effective number of groups, and the
p-values above 0. So each network is judged twice, once with errors that go fully together (the mean's interval is as
wide as it can be) and once with independent errors (as narrow as it can be unless they oppose each other), and normal
p-values. A verdict counts as known only if both agree.

The lab calls a network clean if it does not lose accuracy without the planted cue. "Clean of their mark" are those that
``natural_backgrounds.py`` found to rely on the animals' own backgrounds all the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import norm

from camkit.background.effects import CUE_NAMES, OVERALL, Effect, MeasuredEffect, Measures, limit_of
from camkit.background.reasons import Reason
from camkit.background.rule import judge
from camkit.config.settings import LimitsSection
from camkit.kit.statistics import Estimate, smallest_p, widened
from scripts.lab.lab_report import CLEAN, kind
from scripts.lab.lab_run import Row, write_between

STORED = Path(__file__).parents[2] / "assets" / "photo_lab.jsonl.gz"
NATURAL = Path(__file__).parents[2] / "assets" / "natural_backgrounds.jsonl"
"""What ``natural_backgrounds.py`` measured of the networks of the marked worlds."""
MARK = "rejudge_photos"

_Z = 1.96
_VERDICTS = ("FAIL", "WARN", "INCONCLUSIVE", "PASS")


def stored() -> list[Row]:
    """Return the rows of the lab's networks."""
    with gzip.open(STORED, "rt") as lines:
        return [json.loads(line) for line in lines]


def group_of(row: Row, natural: Mapping[str, float]) -> str:
    """Return the kind of a network; one that relies on natural backgrounds is not clean, although its mark is."""
    of_mark = kind(row)
    if of_mark != "clean":
        return of_mark
    return "clean of their mark" if natural.get(row["name"], 0) >= CLEAN else "clean"


def natural_gaps() -> Mapping[str, float]:
    """Return the true gap of natural backgrounds of each network that was measured."""
    rows = map(json.loads, NATURAL.read_text("utf-8").splitlines())
    return {row["name"]: row["gap"] for row in rows}


def verdict_of(row: Row, together: float) -> str:
    """Return the verdict of the check's rule, if the errors of the fills have this correlation."""
    limits = LimitsSection()
    parts = {OVERALL: row["overall"], **row["classes"]}
    measures = {name: _measures(name, part, limits, together) for name, part in parts.items()}
    bad = {
        pair["label"]: [Reason("less accurate on one place", "a pair")]
        for pair in row["pairs"]
        if pair["p"] is not None and pair["p"] <= limits.alpha and _loss(pair, row["pairs"]) > limits.gap
    }
    judged = judge(measures, limits, exempt={}, waived={}, heat_problems=row["sanity"]["problems"], warnings=bad)
    return judged[OVERALL].verdict


def _loss(pair: Row, pairs: Sequence[Row]) -> float:
    """Return how much less accurate a class is on a place than on the others."""
    others = [other for other in pairs if other["label"] == pair["label"] and other["place"] != pair["place"]]
    shown = sum(other["shown"] for other in others)
    return sum(other["accuracy"] * other["shown"] for other in others) / shown - pair["accuracy"] if shown else 0.0


def _measures(name: str, part: Row, limits: LimitsSection, together: float) -> Measures:
    effects: dict[Any, Effect] = {}
    for effect in ("gap", "sufficiency", "attraction"):
        by_fill = {fill: _measured(of_fill, limit_of(effect, limits)) for fill, of_fill in part[effect].items()}
        mean = _mean(list(by_fill.values()), limit_of(effect, limits), together) if by_fill else None
        effects[effect] = Effect(effect, by_fill, limit_of(effect, limits), mean, name)
    for cue in CUE_NAMES:
        if cue in part["cues"]:
            measured = _measured(part["cues"][cue], limits.gap)
            effects[cue] = Effect(cue, {"whole picture": measured}, limits.gap, measured, name)
    same = ("pictures", "tested", "empty", "energy", "shuffled", "ceiling", "room", "hits", "rank", "area")
    skill = None if part["skill"] is None else Estimate(**part["skill"])
    return Measures(
        name=name, accuracy=Estimate(**part["accuracy"]), skill=skill, effects=effects,
        **{measure: part[measure] for measure in same},
    )  # fmt: skip


def _measured(stored_effect: Row, limit: float) -> MeasuredEffect:
    estimate = Estimate(**stored_effect["effect"])
    accuracies, pictures = tuple(stored_effect["accuracies"]), stored_effect["pictures"]
    return MeasuredEffect(estimate, _p(estimate, limit), _p(estimate, 0.0), accuracies, pictures)


def _p(estimate: Estimate, limit: float) -> float:
    reach = (estimate.high - estimate.low) / 2
    p = float(norm.sf(_Z * (estimate.value - limit) / reach)) if reach > 0 else float(estimate.value <= limit)
    return max(p, smallest_p(estimate.groups))


def _mean(of_fills: Sequence[MeasuredEffect], limit: float, together: float) -> MeasuredEffect:
    """Return the mean of the fills, with the interval that a correlation of their errors gives."""
    count = len(of_fills)
    reaches = [(fill.effect.high - fill.effect.low) / 2 for fill in of_fills]
    square = sum(reach**2 for reach in reaches)
    square += together * (sum(reaches) ** 2 - square)
    value, reach = sum(fill.effect.value for fill in of_fills) / count, square**0.5 / count
    groups = min(fill.effect.groups for fill in of_fills)
    estimate = widened(Estimate(value, value - reach, value + reach, groups))
    own, other = (sum(fill.accuracies[side] for fill in of_fills) / count for side in (0, 1))
    pictures = min(fill.pictures for fill in of_fills)
    return MeasuredEffect(estimate, _p(estimate, limit), _p(estimate, 0.0), (own, other), pictures)


def table(rows: Sequence[Row]) -> str:
    """Return the verdicts by kind of network: as stored, and of the check's rule with both correlations."""
    verdicts = {
        "stored": [row["verdict"] for row in rows],
        "the check's, errors of the fills together": [verdict_of(row, 1.0) for row in rows],
        "the check's, errors independent": [verdict_of(row, 0.0) for row in rows],
    }
    lines = [f"| networks | rule | {' | '.join(_VERDICTS)} |", "|---|---|---:|---:|---:|---:|"]
    natural = natural_gaps()
    groups = [group_of(row, natural) for row in rows]
    for group in ("biased", "between", "clean of their mark", "clean"):
        for name, of_rule in verdicts.items():
            counts = Counter(verdict for own, verdict in zip(groups, of_rule, strict=True) if own == group)
            total = sum(counts.values())
            lines.append(f"| {total} {group} | {name} | {' | '.join(str(counts[v]) for v in _VERDICTS)} |")
    _, first, second = verdicts.values()
    same = sum(a == b for a, b in zip(first, second, strict=True))
    return "\n".join([*lines, "", f"Both correlations give the same verdict for {same} of {len(rows)} networks."])


def disagreements(rows: Sequence[Row]) -> Mapping[str, tuple[str, ...]]:
    """Return the verdicts of the networks on which any two of the three differ, for a closer look."""
    found = {row["name"]: (row["verdict"], verdict_of(row, 1.0), verdict_of(row, 0.0)) for row in rows}
    return {name: verdicts for name, verdicts in found.items() if len(set(verdicts)) > 1}


def main() -> None:
    """Judge the networks, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write the table into")
    options = parser.parse_args()
    rows = stored()
    if options.markdown is None:
        print(table(rows))
        for name, verdicts in disagreements(rows).items():
            print(name, *verdicts, sep="; ")
    else:
        write_between(options.markdown, MARK, table(rows))


if __name__ == "__main__":
    main()
