"""Test the statistics of the check on answers that are drawn from a known truth, without networks and pictures.

    python -m scripts.lab.simulate_check --checks 200 --workers 2

Each scenario is a model whose effects are known exactly. The script draws the answers to the edits of many experiments
from it, passes them through the measures and the decision table of the check, and counts the wrong statements: effects
called excluded that are larger, models that FAIL although no effect is above its limit, and models that pass although
one is.

An answer is right if a sum of normal numbers is positive: one for the object, one for the background, one for the
edit, and one for how the object takes the other backgrounds. So the accuracy is Phi(mean / deviation of the sum), and
the mean follows from the accuracy that is wanted.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from camkit.background.data import Item
from camkit.background.edits import draw_partners
from camkit.background.effects import OVERALL, ImageRow, Pasted, measure_all
from camkit.background.rule import judge
from camkit.kit.statistics import group_numbers
from camkit.options import Limits

FILLS = ("blur", "tile")
FILL_AGREEMENT = 0.7
"""Correlation of the edits' own numbers between the fills: both fills show the same object on the same background."""

RESAMPLES = 500
"""Bootstrap resamples: enough for the ends of intervals, and much faster than the number that the check draws."""

LIMITS = Limits()

CLASSES, PASTES, ACCURACY = 4, 2, 0.85
"""The classes, the backgrounds of either kind for each object, and the accuracy on those of its own class."""

OBJECTS, BACKGROUNDS, UNEVENNESS = 1.0, 0.5, 0.3
"""Deviations of the numbers of an object, of a background, and of how an object takes the backgrounds of other classes,
where that of an edit is 1."""


@dataclass(frozen=True)
class Scenario:
    """A model with known effects, and the folder on which it is checked.

    Attributes:
        name: the name in the table.
        gap: how much accuracy is lost on the backgrounds of each other class. All answers lost name that class.
        marked: the same for backgrounds of the first class, if it differs; a mark on one class.
        sufficiency: how far the accuracy without the object is above chance.
        per_class: the pictures of each class.
        together: the pictures of each group in turn, such as a patient's, which share all their numbers but those of
            the edits.
    """

    name: str
    gap: float = 0.0
    marked: float | None = None
    sufficiency: float = 0.0
    per_class: int = 75
    together: Sequence[int] = (1,)

    def lost_on(self, background: int) -> float:
        """Return the accuracy lost on backgrounds of a class."""
        return self.marked if background == 0 and self.marked is not None else self.gap

    def truth(self, name: str, label: str) -> float:
        """Return the true effect of a class, or of all classes together."""
        if name == "sufficiency":
            return self.sufficiency
        lost = [self.lost_on(number) for number in range(CLASSES)]
        if label == OVERALL:
            return float(np.mean(lost))
        own = _number(label)
        return lost[own] if name == "attraction" else float(np.mean(lost[:own] + lost[own + 1 :]))


UNEVEN = (1, 1, 2, 4, 7, 15)
"""Pictures of each group in turn: 5 on average, but 60 groups are worth only 30 of the same size."""

SCENARIOS = (
    Scenario("gap 0"),
    Scenario("gap 0.02", gap=0.02),
    Scenario("gap 0.02, sufficiency 0.15", gap=0.02, sufficiency=0.15),
    Scenario("gap 0.05", gap=0.05),
    Scenario("at the limit", gap=0.10, sufficiency=0.10),
    Scenario("gap 0.10, sufficiency 0.25", gap=0.10, sufficiency=0.25),
    Scenario("gap 0.15", gap=0.15),
    Scenario("gap 0.20", gap=0.20),
    Scenario("gap 0.20, sufficiency 0.25", gap=0.20, sufficiency=0.25),
    Scenario("one class of four at 0.20", marked=0.20),
    Scenario("gap 0, uneven groups", together=UNEVEN),
    Scenario("gap 0.10, uneven groups", gap=0.10, together=UNEVEN),
    Scenario("gap 0.20, uneven groups", gap=0.20, together=UNEVEN),
)


def _label(number: int) -> str:
    return f"class {number}"


def _number(label: str) -> int:
    return int(label.rpartition(" ")[2])


@dataclass(frozen=True)
class Design:
    """Which object meets which background: one entry for each edit of one fill.

    ``same`` says whether the background is of the object's own class. Objects and backgrounds are numbers of ``items``.
    """

    items: tuple[Item, ...]
    groups: NDArray[np.int_]
    objects: NDArray[np.int_]
    backgrounds: NDArray[np.int_]
    same: NDArray[np.bool_]


@functools.cache
def design_of(scenario: Scenario) -> Design:
    """Draw the partners of every object as the check does."""
    sizes = itertools.cycle(scenario.together)
    group_of = [group for group in range(scenario.per_class) for _ in range(next(sizes))]
    items = tuple(
        Item(f"{label}/{number}", Path(), label, f"{label}/{group_of[number]}")
        for label in map(_label, range(CLASSES))
        for number in range(scenario.per_class)
    )
    numbers = {item.name: number for number, item in enumerate(items)}
    partners = draw_partners(items, items, PASTES, 0)
    pairs = [
        (numbers[item.name], numbers[background.name], background.label == item.label)
        for item in items
        for entries in partners[item]
        for background in _each_once(entries[:PASTES])
    ]
    objects, backgrounds, same = (np.array(column) for column in zip(*pairs, strict=True))
    return Design(items, group_numbers([item.group for item in items]), objects, backgrounds, same)


def _each_once(entries: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the first background of each entry that does not serve yet."""
    chosen: list[Item] = []
    for candidates in entries:
        chosen.append(next(item for item in candidates if item not in chosen))
    return chosen


def draw_rows(scenario: Scenario, seed: int) -> list[ImageRow]:
    """Draw the answers of one experiment."""
    design, rng = design_of(scenario), np.random.default_rng([1, seed])
    count, edits = len(design.items), len(design.objects)
    labels = np.array([_number(item.label) for item in design.items])
    of_group = rng.standard_normal((3, design.groups.max() + 1))[:, design.groups]  # object, background, unevenness
    shown, behind, same = design.objects, design.backgrounds, design.same
    lost = np.where(same, 0.0, np.array([scenario.lost_on(label) for label in range(CLASSES)])[labels[behind]])
    spread = np.sqrt(1 + OBJECTS**2 + BACKGROUNDS**2 + np.where(same, 0, UNEVENNESS) ** 2)
    common = (
        stats.norm.ppf(ACCURACY - lost) * spread
        + OBJECTS * of_group[0, shown]
        + BACKGROUNDS * of_group[1, behind]
        + np.where(same, 0, UNEVENNESS) * of_group[2, shown]
    )
    attracted = rng.random(edits) < lost / (1 - ACCURACY + lost)
    elsewhere = (labels[shown] + rng.integers(1, CLASSES, edits)) % CLASSES
    named_if_wrong = np.where(attracted, labels[behind], elsewhere)
    own_rate = 1 / CLASSES + scenario.sufficiency
    bare = stats.norm.ppf(own_rate) * np.sqrt(1 + OBJECTS**2) + OBJECTS * of_group[0]
    named_if_bare = (labels + rng.integers(1, CLASSES, count)) % CLASSES
    by_fill = {
        fill: (
            np.where(common + noise[:edits] > 0, labels[shown], named_if_wrong),
            np.where(bare + noise[edits:] > 0, labels, named_if_bare),
        )
        for fill, noise in zip(FILLS, _edit_numbers(rng, edits + count), strict=True)
    }
    edits_of = np.split(np.arange(edits), np.flatnonzero(np.diff(shown)) + 1)
    return [_row(design, number, edits_of[number], labels, by_fill) for number in range(count)]


def _edit_numbers(rng: np.random.Generator, count: int) -> list[NDArray[np.float64]]:
    """Return the edits' own numbers for each fill."""
    common = rng.standard_normal(count)
    return [FILL_AGREEMENT**0.5 * common + (1 - FILL_AGREEMENT) ** 0.5 * rng.standard_normal(count) for _ in FILLS]


def _row(
    design: Design,
    number: int,
    edits: NDArray[np.int_],
    labels: NDArray[np.int_],
    by_fill: dict[str, tuple[NDArray[np.int_], NDArray[np.int_]]],
) -> ImageRow:
    item, same = design.items[number], design.same[edits]
    own = int(labels[number])
    return ImageRow(
        name=item.name,
        label=item.label,
        group=item.group,
        right=True,
        answer=item.label,
        probability=1.0,
        status="ok",
        same={fill: float((answers[edits][same] == own).mean()) for fill, (answers, _) in by_fill.items()},
        other={fill: float((answers[edits][~same] == own).mean()) for fill, (answers, _) in by_fill.items()},
        pasted={
            fill: tuple(
                Pasted(design.items[behind].label, design.items[behind].group, _label(answer))
                for behind, answer in zip(design.backgrounds[edits].tolist(), answers[edits].tolist(), strict=True)
            )
            for fill, (answers, _) in by_fill.items()
        },
        removed={fill: bool(bare[number] == own) for fill, (_, bare) in by_fill.items()},
        named={fill: _label(int(bare[number])) for fill, (_, bare) in by_fill.items()},
    )


@dataclass(frozen=True)
class Outcome:
    """What one simulated check said.

    Attributes:
        verdict: of all classes together.
        wrongly: whether an effect of all classes together was called excluded although it is larger.
        covered: whether the interval of each effect of all classes together holds the truth.
    """

    verdict: str
    wrongly: bool
    covered: tuple[bool, ...]


def simulate(scenario: Scenario, seed: int) -> Outcome:
    """Draw one experiment and judge it."""
    measures = measure_all(draw_rows(scenario, seed), LIMITS, seed, resamples=RESAMPLES)
    judged = judge(measures, LIMITS, exempt={}, waived={})[OVERALL]
    wrongly, covered = False, []
    for name, effect in judged.effects.items():
        truth = scenario.truth(name, OVERALL)
        wrongly |= effect.level == "excluded" and effect.excluded_above is not None and truth > effect.excluded_above
        covered += [measured.effect.low <= truth <= measured.effect.high for measured in effect.by_fill.values()]
    return Outcome(judged.verdict, wrongly, tuple(covered))


@dataclass(frozen=True)
class Summary:
    """What the checks of one scenario said, as shares of the checks."""

    scenario: Scenario
    outcomes: tuple[Outcome, ...]

    @property
    def wrongly_excluded(self) -> float:
        """The share of checks in which an effect of all classes together is larger than what was excluded."""
        return float(np.mean([outcome.wrongly for outcome in self.outcomes]))

    def verdicts(self, verdict: str) -> float:
        """Return how often a verdict was given."""
        return float(np.mean([outcome.verdict == verdict for outcome in self.outcomes]))

    @property
    def covered(self) -> float:
        """The share of the intervals of all classes together that hold the truth."""
        return float(np.mean([covered for outcome in self.outcomes for covered in outcome.covered]))


def simulate_all(scenarios: Sequence[Scenario], checks: int, workers: int) -> list[Summary]:
    """Simulate checks of each scenario, and print the line of each as soon as it is known."""
    print("| truth | wrongly excluded | intervals that hold the truth | FAIL | WARN | INCONCLUSIVE | PASS |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    summaries = []
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for scenario in scenarios:
            summary = Summary(
                scenario, tuple(pool.map(functools.partial(simulate, scenario), range(checks), chunksize=10))
            )
            verdicts = (summary.verdicts(verdict) for verdict in ("FAIL", "WARN", "INCONCLUSIVE", "PASS"))
            shares = (summary.wrongly_excluded, summary.covered, *verdicts)
            print(f"| {scenario.name} | {' | '.join(f'{share:.1%}' for share in shares)} |", flush=True)
            summaries.append(summary)
    return summaries


def main() -> None:
    """Simulate the scenarios and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checks", type=int, default=200, help="checks of each scenario")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="scenarios whose name contains this text")
    options = parser.parse_args()
    chosen = [scenario for scenario in SCENARIOS if options.only in scenario.name]
    simulate_all(chosen, options.checks, options.workers)


if __name__ == "__main__":
    main()
