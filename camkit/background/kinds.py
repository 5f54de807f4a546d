"""Accuracy for each class on each kind of background: what a mean over the backgrounds of a class hides.

The backgrounds of a class are often a mixture. A model may be right on every kind of background but one, and the mean
hardly shows that. So the backgrounds are divided into kinds by the column ``place`` of the data, and the answers of the
experiment are grouped by the kind of the background. The model sees no further picture. A class that is significantly
less accurate on one kind warns.

If groups are known, others report the accuracy of the worst group (Sagawa et al. 2020, arXiv:1911.08731).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from camkit.background.data import Item, grouped
from camkit.background.experiment import Answers
from camkit.background.plan import Plan
from camkit.background.rule import Reason, said
from camkit.kit.statistics import (
    MIN_GROUPS,
    RESAMPLES,
    Estimate,
    added_variance,
    bootstrap_sums,
    group_numbers,
    holm,
    interval,
    p_above,
    widened,
    wilson,
)

LEAST_BACKGROUNDS = 10
"""Pictures that a kind must have: a class's share of an even smaller kind would be a few pictures."""


@dataclass(frozen=True)
class Kind:
    """A kind of background.

    Attributes:
        name: the place that the data names.
        label: the class from which most of its pictures come.
        share: the share of its pictures that come from this class.
        pictures: how many pictures of the experiment have such a background.
    """

    name: str
    label: str
    share: float
    pictures: int

    @property
    def origin(self) -> str:
        """Where its pictures come from, in words: of a class if more than half of them are of this class."""
        return f"mostly backgrounds of {self.label}" if self.share > 0.5 else "backgrounds of several classes"


@dataclass(frozen=True)
class KindPair:
    """The objects of a class on the backgrounds of a kind.

    Attributes:
        label: the class.
        kind: the kind's name.
        shown: how many times the model saw an object of the class on a background of the kind.
        right: how many of these it answered right with at least one fill.
        accuracy: the share, with Wilson's interval; its groups are the objects.
        elsewhere: the accuracy on the other kinds; None if the objects were shown on no other kind.
        loss: how much lower the accuracy is than on the other kinds; None if there is too little to test.
        p: the p-value of "the accuracy is not lower than on the other kinds", corrected for the number of pairs; None
            if that was not tested.
    """

    label: str
    kind: str
    shown: int
    right: int
    accuracy: Estimate
    elsewhere: float | None = None
    loss: Estimate | None = None
    p: float | None = None


@dataclass(frozen=True)
class Kinds:
    """The answers to each class on each kind of background.

    Attributes:
        kinds: the kinds; none if fewer than two have enough pictures.
        pairs: each class on each kind on which it was shown.
        worst: the pair with the lowest accuracy: of those that are significantly bad, and if there is none, of those
            that were tested. None if none was tested.
        bad: the pairs that are significantly bad, the lowest accuracy first.
    """

    kinds: tuple[Kind, ...] = ()
    pairs: tuple[KindPair, ...] = ()
    worst: KindPair | None = None
    bad: tuple[KindPair, ...] = ()

    @property
    def warnings(self) -> dict[str, list[Reason]]:
        """Each class's worst pair that is significantly bad."""
        return {pair.label: [Reason("less accurate on one place", self.in_words(pair))] for pair in self.bad[::-1]}

    @property
    def sentences(self) -> tuple[str, ...]:
        """The worst pair, in words."""
        found = said("kinds", self, LEAST_BACKGROUNDS)
        more = () if not self.bad or self.worst is None else (self.worst.label,)
        return found, *(f"Collect pictures of {label} on backgrounds of this kind." for label in more)

    def in_words(self, pair: KindPair) -> str:
        """Return the accuracy of a pair that was tested, and that on the other kinds, in words."""
        return said("pair_in_words", pair, next(kind for kind in self.kinds if kind.name == pair.kind))


class PastedAnswer(NamedTuple):
    """The answers to an object on a background, with all fills.

    Attributes:
        item: the object's picture.
        behind: the picture that lends the background; its place is the kind of the background.
        right: whether an answer is right with at least one fill.
    """

    item: Item
    behind: Item
    right: bool


def find(plan: Plan, answers: Mapping[str, Answers]) -> Kinds | None:
    """Find the places of the backgrounds, and measure each class on each of them.

    Returns:
        None if the data has no regions or names no place, or if no object was pasted on a background.
    """
    lenders = {edit.lender for of_picture in answers.values() for edit in of_picture}
    backgrounds = [item for item in plan.backgrounds if item.name in lenders]
    if not plan.with_regions or not any(item.place for item in backgrounds):
        return None
    kinds: list[Kind] = []
    for place, items in sorted(grouped(backgrounds, lambda item: item.place).items()):
        if place and len(items) >= LEAST_BACKGROUNDS:
            label, count = min(Counter(item.label for item in items).items(), key=lambda pair: (-pair[1], pair[0]))
            kinds.append(Kind(place, label, count / len(items), len(items)))
    if len(kinds) < 2:
        return Kinds()
    names = {kind.name for kind in kinds}
    shown_on = {item.name: item for item in backgrounds if item.place in names}
    pasted = list(_pasted_answers(plan, answers, shown_on))
    limits, waived = plan.settings.limits, plan.settings.waived(plan.today)
    return measure_kinds(kinds, pasted, limits.gap, limits.alpha, plan.settings.check.seed, waived)


def _pasted_answers(
    plan: Plan, answers: Mapping[str, Answers], backgrounds: Mapping[str, Item]
) -> Iterator[PastedAnswer]:
    """Join the answers with all fills to each object on each background that has a kind."""
    for name, of_picture in answers.items():
        item, outputs = plan.by_name[name], plan.outputs[plan.by_name[name].label]
        by_background: dict[str, list[int]] = defaultdict(list)
        for edit, answer in of_picture.items():
            if edit.arm in ("same", "other") and edit.lender in backgrounds:
                by_background[edit.lender].append(answer.output)
        for background, named in by_background.items():
            behind, right = backgrounds[background], any(output in outputs for output in named)
            if right or not plan.excuses(plan.name_of(named[0]), behind):
                yield PastedAnswer(item, behind, right)


def measure_kinds(
    kinds: Sequence[Kind],
    answers: Sequence[PastedAnswer],
    limit: float,
    alpha: float,
    seed: int,
    without: Collection[str] = (),
    resamples: int = RESAMPLES,
) -> Kinds:
    """Measure each class on each kind, and find the worst pair.

    A pair is significantly bad if its accuracy is significantly lower than that of the same class on the other kinds,
    with Holm's correction over all pairs, and if it is lower by more than the limit.

    Args:
        kinds: the kinds.
        answers: the answers to each object on each background of a kind.
        limit: the largest loss of accuracy that may ship.
        alpha: the significance level.
        seed: the seed of the bootstrap.
        without: classes that are not tested.
        resamples: resamples of each bootstrap.
    """
    by_class = sorted(grouped(answers, lambda answer: answer.item.label).items())
    pairs = [
        pair
        for number, (label, own) in enumerate(by_class)
        for pair in _pairs(label, own, [seed, number], resamples, tested=label not in without)
    ]
    tested = [(number, pair.p, pair.loss) for number, pair in enumerate(pairs) if pair.p is not None and pair.loss]
    bad: list[KindPair] = []
    for (number, _, loss), p in zip(tested, holm([p for _, p, _ in tested]), strict=True):
        pairs[number] = replace(pairs[number], p=p)
        bad += [pairs[number]] if p <= alpha and loss.value > limit else []
    bad.sort(key=_accuracy_first)
    worst = bad[0] if bad else min((pairs[number] for number, *_ in tested), key=_accuracy_first, default=None)
    return Kinds(tuple(kinds), tuple(pairs), worst, tuple(bad))


def _accuracy_first(pair: KindPair) -> tuple[float, str, str]:
    return pair.accuracy.value, pair.label, pair.kind


def _pairs(
    label: str, answers: Sequence[PastedAnswer], seed: Sequence[int], resamples: int, *, tested: bool
) -> Iterator[KindPair]:
    """Measure one class on each kind.

    The resamples draw objects with all their answers, so an object on two kinds stays a pair. A background is shown
    behind several objects, so each resample gets a normally distributed number added, as for the background gap.
    """
    kinds = [answer.behind.place for answer in answers]
    names = sorted(set(kinds))
    shown = np.array([[kind == name for name in names] for kind in kinds], dtype=float)
    right = shown * np.array([[answer.right] for answer in answers])
    objects = group_numbers([answer.item.group for answer in answers])
    backgrounds = group_numbers([answer.behind.group for answer in answers])
    sums = bootstrap_sums(np.hstack([right, shown]), objects, seed, resamples) if tested else np.zeros((0, 0))
    for number, name in enumerate(names):
        on_kind = shown[:, number] > 0
        hits, count = int(right[:, number].sum()), int(on_kind.sum())
        pictures = {answer.item.name for answer in answers if answer.behind.place == name}
        accuracy = Estimate(hits / count, *wilson(hits, count), len(pictures))
        others = len(answers) - count
        elsewhere = float((right.sum() - hits) / others) if others else None
        groups = min(
            len(np.unique(numbers[rows])) for rows in (on_kind, ~on_kind) for numbers in (objects, backgrounds)
        )
        other_pictures = {answer.item.name for answer in answers if answer.behind.place != name}
        loss, p = None, None
        # Objects of a class that must be shown on a kind, and on the others, for a test: as for the attraction of a
        # class
        if tested and elsewhere is not None and min(len(pictures), len(other_pictures)) >= 15 and groups >= MIN_GROUPS:
            residuals = np.where(on_kind, (accuracy.value - right.sum(1)) / count, (right.sum(1) - elsewhere) / others)
            right_of, shown_of = sums[:, : len(names)], sums[:, len(names) :]
            with np.errstate(invalid="ignore", divide="ignore"):  # a resample without the kind counts as no loss
                draws = (right_of.sum(1) - right_of[:, number]) / (shown_of.sum(1) - shown_of[:, number])
                draws = draws - right_of[:, number] / shown_of[:, number]
            deviation = added_variance(residuals, objects, backgrounds) ** 0.5
            draws = draws + deviation * np.random.default_rng([*seed, number]).standard_normal(len(draws))
            loss = widened(interval(draws, elsewhere - accuracy.value, groups))
            p = p_above(draws, 0.0, groups)
        yield KindPair(label, name, count, hits, accuracy, elsewhere, loss, p)
