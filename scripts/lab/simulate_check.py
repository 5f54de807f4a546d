"""Test the statistics of the check on answers that are drawn from a known truth, without networks and pictures.

    python -m scripts.lab.simulate_check --checks 1000 --workers 2 --markdown scripts/results/validation.md

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
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from camkit.background.data import Item
from camkit.background.effects import OVERALL, Effect, measure_all
from camkit.background.experiment import LITTLE_MORE, draw_partners
from camkit.background.pictures import ImageRow, Pasted
from camkit.background.rule import Judgement, judge
from camkit.config.settings import LimitsSection
from camkit.kit.statistics import group_numbers

FILLS = ("blur", "tile")
FILL_AGREEMENT = 0.7
"""Correlation of the edits' own numbers between the fills: both fills show the same object on the same background."""

RESAMPLES = 500
"""Bootstrap resamples: enough for the ends of intervals, and much faster than the number that the check draws."""

LIMITS = LimitsSection()
BEGIN, END = "<!-- simulate_check -->", "<!-- end of simulate_check -->"


@dataclass(frozen=True)
class Scenario:
    """A model with known effects, and the folder on which it is checked.

    Attributes:
        name: the name in the table.
        gap: how much accuracy is lost on the backgrounds of each other class. All answers lost name that class.
        marked: the same for backgrounds of the first class, if it differs; a mark on one class.
        sufficiency: how far the accuracy without the object is above chance.
        classes, per_class, pastes: the size of the experiment.
        accuracy: on backgrounds of the object's own class.
        objects, backgrounds, uneven: deviations of the numbers of an object, of a background, and of how an object
            takes the backgrounds of other classes, where that of an edit is 1.
        filled: the most that is filled of a background; the least is nothing.
        together: the pictures of each group in turn, such as a patient's, which share all their numbers but those of
            the edits.
    """

    name: str
    gap: float = 0.0
    marked: float | None = None
    sufficiency: float = 0.0
    classes: int = 4
    per_class: int = 50
    pastes: int = 2
    accuracy: float = 0.85
    objects: float = 1.0
    backgrounds: float = 0.5
    uneven: float = 0.3
    filled: float = 0.0
    together: Sequence[int] = (1,)

    def lost_on(self, background: int) -> float:
        """Return the accuracy lost on backgrounds of a class."""
        return self.marked if background == 0 and self.marked is not None else self.gap

    def truth(self, name: str, label: str) -> float:
        """Return the true effect of a class, or of all classes together."""
        if name == "sufficiency":
            return self.sufficiency
        lost = [self.lost_on(number) for number in range(self.classes)]
        if label == OVERALL:
            return float(np.mean(lost))
        own = _number(label)
        return lost[own] if name == "attraction" else float(np.mean(lost[:own] + lost[own + 1 :]))


SCENARIOS = (
    Scenario("no effect"),
    Scenario("at the limit", gap=0.10, sufficiency=0.10),
    Scenario("at the limit, groups of 5 pictures", gap=0.10, sufficiency=0.10, together=(5,)),
    Scenario("at the limit, backgrounds differ much", gap=0.10, sufficiency=0.10, backgrounds=1.5),
    Scenario("at the limit, objects differ in their gap", gap=0.10, sufficiency=0.10, uneven=1.5),
    Scenario("at the limit, accuracy 98%", gap=0.10, sufficiency=0.10, accuracy=0.98),
    Scenario("at the limit, one background of either kind", gap=0.10, sufficiency=0.10, pastes=1),
    Scenario("at the limit, large objects", gap=0.10, sufficiency=0.10, filled=0.6),
    Scenario("one class of 8 at the limit", marked=0.10, classes=8),
    Scenario("gap 0.15", gap=0.15),
    Scenario("gap 0.20", gap=0.20),
    Scenario("gap 0.30", gap=0.30),
    Scenario("sufficiency 0.20", sufficiency=0.20),
    Scenario("gap 0.05, sufficiency 0.25", gap=0.05, sufficiency=0.25),
    Scenario("gap 0.20, sufficiency 0.25", gap=0.20, sufficiency=0.25),
    Scenario("one class of 8 with 0.30", marked=0.30, classes=8),
    Scenario("no effect, large objects", filled=0.6),
    Scenario("no effect, 100 pictures of each class", per_class=100),
    Scenario("at the limit, 100 pictures of each class", gap=0.10, sufficiency=0.10, per_class=100),
)

UNEVEN = (1, 1, 2, 4, 7, 15)
"""Pictures of each group in turn: 5 on average, but 60 groups are worth only 30 of the same size."""

WORLDS = (
    Scenario("gap 0", per_class=75),
    Scenario("gap 0.02", gap=0.02, per_class=75),
    Scenario("gap 0.02, sufficiency 0.15", gap=0.02, sufficiency=0.15, per_class=75),
    Scenario("gap 0.05", gap=0.05, per_class=75),
    Scenario("gap 0.10, sufficiency 0.25", gap=0.10, sufficiency=0.25, per_class=75),
    Scenario("gap 0.15", gap=0.15, per_class=75),
    Scenario("gap 0.20", gap=0.20, per_class=75),
    Scenario("gap 0.20, sufficiency 0.25", gap=0.20, sufficiency=0.25, per_class=75),
    Scenario("one class of four at 0.20", marked=0.20, per_class=75),
    Scenario("gap 0, uneven groups", per_class=75, together=UNEVEN),
    Scenario("gap 0.10, uneven groups", gap=0.10, per_class=75, together=UNEVEN),
    Scenario("gap 0.20, uneven groups", gap=0.20, per_class=75, together=UNEVEN),
)
"""The worlds on which two rules are compared."""


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
        for label in map(_label, range(scenario.classes))
        for number in range(scenario.per_class)
    )
    numbers = {item.name: number for number, item in enumerate(items)}
    partners = draw_partners(items, items, scenario.pastes, 0)
    filled = dict(zip(items, (scenario.filled * np.random.default_rng(3).random(len(items))).tolist(), strict=True))
    pairs = [
        (numbers[item.name], numbers[background.name], background.label == item.label)
        for item in items
        for entries in (partners[item].same, partners[item].other)
        for background in _with_most_room(entries[: scenario.pastes], filled)
    ]
    objects, backgrounds, same = (np.array(column) for column in zip(*pairs, strict=True))
    return Design(items, group_numbers([item.group for item in items]), objects, backgrounds, same)


def _with_most_room(entries: Sequence[Sequence[Item]], filled: Mapping[Item, float]) -> list[Item]:
    """Return a background for each entry as the check chooses it; none serves twice."""
    chosen: list[Item] = []
    for candidates in entries:
        left = [item for item in candidates if item not in chosen]
        least = min(filled[item] for item in left)
        chosen.append(next(item for item in left if filled[item] <= least + LITTLE_MORE))
    return chosen


def draw_rows(scenario: Scenario, seed: int) -> list[ImageRow]:
    """Draw the answers of one experiment."""
    design, rng = design_of(scenario), np.random.default_rng([1, seed])
    count, edits = len(design.items), len(design.objects)
    labels = np.array([_number(item.label) for item in design.items])
    of_group = rng.standard_normal((3, design.groups.max() + 1))[:, design.groups]  # object, background, unevenness
    shown, behind, same = design.objects, design.backgrounds, design.same
    lost = np.where(same, 0.0, np.array([scenario.lost_on(label) for label in range(scenario.classes)])[labels[behind]])
    spread = np.sqrt(1 + scenario.objects**2 + scenario.backgrounds**2 + np.where(same, 0, scenario.uneven) ** 2)
    common = (
        stats.norm.ppf(scenario.accuracy - lost) * spread
        + scenario.objects * of_group[0, shown]
        + scenario.backgrounds * of_group[1, behind]
        + np.where(same, 0, scenario.uneven) * of_group[2, shown]
    )
    attracted = rng.random(edits) < lost / (1 - scenario.accuracy + lost)
    elsewhere = (labels[shown] + rng.integers(1, scenario.classes, edits)) % scenario.classes
    named_if_wrong = np.where(attracted, labels[behind], elsewhere)
    own_rate = 1 / scenario.classes + scenario.sufficiency
    bare = stats.norm.ppf(own_rate) * np.sqrt(1 + scenario.objects**2) + scenario.objects * of_group[0]
    named_if_bare = (labels + rng.integers(1, scenario.classes, count)) % scenario.classes
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
        verdict, strict: the verdict, and the verdict of a strict check.
        excluded, wrongly: of the effects of all classes together, how many were called excluded, and how many of these
            are larger than what was excluded.
        class_excluded, class_wrongly: the same for the effects of the classes.
        classes: the effects of classes that were measured.
        reach: how far the interval of the gap of all classes together reaches to either side.
        covered: how many of the intervals of all classes together hold the truth, of how many ``intervals``.
    """

    verdict: str
    strict: str
    excluded: int
    wrongly: int
    class_excluded: int
    class_wrongly: int
    classes: int
    reach: float
    covered: int
    intervals: int


def simulate(scenario: Scenario, seed: int) -> Outcome:
    """Draw one experiment and judge it."""
    rows = draw_rows(scenario, seed)
    measures = measure_all(rows, LIMITS, seed, resamples=RESAMPLES)
    judged = judge(measures, LIMITS, exempt={}, waived={})
    strict = judge(measures, LIMITS.model_copy(update={"strict": True}), exempt={}, waived={})
    overall = _statements(scenario, judged, [OVERALL])
    classes = _statements(scenario, judged, [name for name in judged if name != OVERALL])
    gap = judged[OVERALL].effects["gap"].by_fill
    intervals = [
        (measured.effect, scenario.truth(name, OVERALL))
        for name, effect in judged[OVERALL].effects.items()
        for measured in effect.by_fill.values()
    ]
    return Outcome(
        verdict=judged[OVERALL].verdict,
        strict=strict[OVERALL].verdict,
        excluded=overall[0],
        wrongly=overall[1],
        class_excluded=classes[0],
        class_wrongly=classes[1],
        classes=classes[2],
        reach=float(np.mean([(measured.effect.high - measured.effect.low) / 2 for measured in gap.values()])),
        covered=sum(estimate.low <= truth <= estimate.high for estimate, truth in intervals),
        intervals=len(intervals),
    )


def _statements(scenario: Scenario, judged: dict[str, Judgement], labels: Sequence[str]) -> tuple[int, int, int]:
    """Count the effects that are called excluded, those wrongly called so, and all effects."""
    effects: list[tuple[Effect, float]] = [
        (effect, scenario.truth(name, label)) for label in labels for name, effect in judged[label].effects.items()
    ]
    called = [(effect.excluded_above, truth) for effect, truth in effects if effect.level == "excluded"]
    return len(called), sum(above is not None and truth > above for above, truth in called), len(effects)


@dataclass(frozen=True)
class Summary:
    """What the checks of one scenario said, as shares of the checks."""

    scenario: Scenario
    outcomes: tuple[Outcome, ...]

    def share(self, condition: Sequence[bool]) -> float:
        """Return a share of the checks."""
        return float(np.mean(condition))

    @property
    def has_effect(self) -> bool:
        """Whether any effect is above its limit."""
        labels = [OVERALL, *map(_label, range(self.scenario.classes))]
        names = ("gap", "sufficiency", "attraction")
        return any(self.scenario.truth(name, label) > LIMITS.gap + 1e-9 for label in labels for name in names)

    @property
    def wrongly_excluded(self) -> float:
        """The share of checks in which an effect of all classes together is larger than what was excluded."""
        return self.share([outcome.wrongly > 0 for outcome in self.outcomes])

    @property
    def class_wrongly_excluded(self) -> float:
        """The share of the effects of classes that are larger than what was excluded."""
        return sum(outcome.class_wrongly for outcome in self.outcomes) / sum(o.classes for o in self.outcomes)

    def verdicts(self, verdict: str, *, strict: bool = False) -> float:
        """Return how often a verdict was given."""
        return self.share([(outcome.strict if strict else outcome.verdict) == verdict for outcome in self.outcomes])

    @property
    def covered(self) -> float:
        """The share of the intervals of all classes together that hold the truth."""
        return sum(outcome.covered for outcome in self.outcomes) / sum(outcome.intervals for outcome in self.outcomes)

    @property
    def reach(self) -> float:
        """How far the interval of the gap of all classes together reaches to either side, on average."""
        return float(np.mean([outcome.reach for outcome in self.outcomes]))


def simulate_all(scenarios: Sequence[Scenario], checks: int, workers: int) -> list[Summary]:
    """Simulate checks of each scenario."""
    summaries = []
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for scenario in scenarios:
            outcomes = tuple(pool.map(functools.partial(simulate, scenario), range(checks), chunksize=10))
            summaries.append(Summary(scenario, outcomes))
            print(_line(summaries[-1]), flush=True)
    return summaries


_HEAD = (
    "| truth | wrongly excluded | for a class | intervals that hold the truth | gap's interval | FAIL | WARN "
    "| INCONCLUSIVE | PASS | `--strict` PASS |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
)


def _line(summary: Summary) -> str:
    shares = [summary.verdicts(verdict) for verdict in ("FAIL", "WARN", "INCONCLUSIVE", "PASS")]
    cells = [
        summary.scenario.name,
        f"{summary.wrongly_excluded:.1%}",
        f"{summary.class_wrongly_excluded:.1%}",
        f"{summary.covered:.1%}",
        f"± {summary.reach:.3f}",
        *(f"{share:.1%}" for share in shares),
        f"{summary.verdicts('PASS', strict=True):.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def table(summaries: Sequence[Summary]) -> str:
    """Return the table of the page."""
    return "\n".join([*_HEAD, *map(_line, summaries)])


def write_page(file: Path, summaries: Sequence[Summary]) -> None:
    """Write the table between the marks of a page; the text around it stays."""
    text = file.read_text("utf-8") if file.exists() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    file.write_text(f"{before}{BEGIN}\n\n{table(summaries)}\n\n{END}{after}", "utf-8")


def main() -> None:
    """Simulate all scenarios and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checks", type=int, default=1000, help="checks of each scenario")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="scenarios whose name contains this text")
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write the table into")
    options = parser.parse_args()
    chosen = [scenario for scenario in (*SCENARIOS, *WORLDS) if options.only in scenario.name]
    print("\n".join(_HEAD), flush=True)
    summaries = simulate_all(chosen, options.checks, options.workers)
    if options.markdown is not None:
        write_page(options.markdown, summaries)


if __name__ == "__main__":
    main()
