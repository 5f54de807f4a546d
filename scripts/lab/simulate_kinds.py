"""Test how often the check warns of a class on a kind of background, on answers that are drawn from a known truth.

    python -m scripts.lab.simulate_kinds --checks 1000 --workers 2 --markdown scripts/results/validation.md

The experiments are those of ``simulate_check.py``. Each background also has a kind. It goes with its class as often as
the scenario says and is drawn at random otherwise. One pair of class and kind may be less accurate; all other
differences between pairs come from objects, backgrounds and chance.
"""

from __future__ import annotations

import argparse
import functools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from scipy import stats

from camkit.background.deep.kinds import Kind, PastedAnswer, measure_kinds
from scripts.lab.lab_run import write_between
from scripts.lab.simulate_check import FILLS, LIMITS, RESAMPLES, Scenario, _edit_numbers, design_of

MARK = "simulate_kinds"

BAD_CLASS, BAD_KIND = 0, 1
"""The pair that may be less accurate."""


@dataclass(frozen=True)
class KindScenario:
    """A model with a known accuracy for each class on each kind.

    Attributes:
        name: the name in the table.
        lost: how much accuracy the bad pair loses.
        tie: how often the kind of a background goes with its class.
        kinds: the number of kinds.
        experiment: the experiment, and the deviations of objects and backgrounds.
    """

    name: str
    lost: float = 0.0
    tie: float = 0.95
    kinds: int = 4
    experiment: Scenario = field(default_factory=lambda: Scenario("", per_class=75))


SCENARIOS = (
    KindScenario("no pair is worse"),
    KindScenario("no pair is worse, kinds do not go with classes", tie=0.0),
    KindScenario("no pair is worse, groups of 4 pictures", experiment=Scenario("", per_class=75, together=(4,))),
    KindScenario("no pair is worse, backgrounds differ much", experiment=Scenario("", per_class=75, backgrounds=1.5)),
    KindScenario("no pair is worse, accuracy 98%", experiment=Scenario("", per_class=75, accuracy=0.98)),
    KindScenario("no pair is worse, accuracy 60%", experiment=Scenario("", per_class=75, accuracy=0.60)),
    KindScenario("no pair is worse, 10 classes, 8 kinds", kinds=8, experiment=Scenario("", classes=10)),
    KindScenario("a gap of 0.10 for every class", experiment=Scenario("", per_class=75, gap=0.10)),
    KindScenario("one pair loses 0.10", lost=0.10),
    KindScenario("one pair loses 0.20", lost=0.20),
    KindScenario("one pair loses 0.30", lost=0.30),
    KindScenario("one pair loses 0.45", lost=0.45),
)


@dataclass(frozen=True)
class Outcome:
    """Whether a simulated check warned, and whether the worst pair that it named is the bad one."""

    warned: bool
    right: bool


def simulate(scenario: KindScenario, seed: int) -> Outcome:
    """Draw the answers of one experiment, and find the worst pair."""
    experiment = scenario.experiment
    design, rng = design_of(experiment), np.random.default_rng([2, seed])
    labels = np.array([int(item.label.rpartition(" ")[2]) for item in design.items])
    drawn = rng.integers(scenario.kinds, size=len(labels))
    kinds = np.where(rng.random(len(labels)) < scenario.tie, labels % scenario.kinds, drawn)
    shown, behind = design.objects, design.backgrounds
    of_group = rng.standard_normal((2, design.groups.max() + 1))[:, design.groups]
    bad = (labels[shown] == BAD_CLASS) & (kinds[behind] == BAD_KIND)
    accuracy = experiment.accuracy - np.where(bad, scenario.lost, 0) - np.where(design.same, 0, experiment.gap)
    common = (
        stats.norm.ppf(accuracy) * np.sqrt(1 + experiment.objects**2 + experiment.backgrounds**2)
        + experiment.objects * of_group[0, shown]
        + experiment.backgrounds * of_group[1, behind]
    )
    right = np.any([common + noise > 0 for noise in _edit_numbers(rng, len(shown))], axis=0)
    assert len(FILLS) > 1  # an answer counts as right with either fill, as in the check
    answers = [
        PastedAnswer(
            (item := design.items[number]).name, item.label, item.group,
            design.items[lent].group, f"kind {kinds[lent]}", answer,
        )
        for number, lent, answer in zip(shown.tolist(), behind.tolist(), right.tolist(), strict=True)
    ]  # fmt: skip
    all_kinds = [Kind(f"kind {number}", f"class {number}", 1.0, 0) for number in range(scenario.kinds)]
    found = measure_kinds(all_kinds, answers, LIMITS.gap, LIMITS.alpha, seed, resamples=RESAMPLES)
    worst = found.worst
    named = worst is not None and (worst.label, worst.kind) == (f"class {BAD_CLASS}", f"kind {BAD_KIND}")
    return Outcome(found.significant, named)


def line(scenario: KindScenario, outcomes: list[Outcome]) -> str:
    """Return a row of the table."""
    warned = np.mean([outcome.warned for outcome in outcomes])
    right = np.mean([outcome.warned and outcome.right for outcome in outcomes])
    named = np.mean([outcome.right for outcome in outcomes])
    shares = (f"{warned:.1%}", f"{right:.1%}", f"{named:.1%}") if scenario.lost else (f"{warned:.1%}", "", "")
    return f"| {' | '.join((scenario.name, *shares))} |"


def main() -> None:
    """Simulate all scenarios and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checks", type=int, default=1000, help="checks of each scenario")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write the table into")
    options = parser.parse_args()
    lines = ["| truth | warns | warns of the bad pair | the worst pair is the bad one |", "|---|---:|---:|---:|"]
    print("\n".join(lines), flush=True)
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for scenario in SCENARIOS:
            outcomes = pool.map(functools.partial(simulate, scenario), range(options.checks), chunksize=10)
            lines.append(line(scenario, list(outcomes)))
            print(lines[-1], flush=True)
    if options.markdown is not None:
        write_between(options.markdown, MARK, "\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
