import itertools

import numpy as np
import pytest
from scipy import stats

from camkit.kit.statistics import Estimate, bootstrap_sums, holm, interval, p_above, strata_of_groups, widened, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_gives_the_intervals_of_newcombe_1998_table_1(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def closed_test(p_values, alpha):
    """Holm's procedure as the closure of Bonferroni's test: reject a hypothesis if every set with it is rejected."""
    numbers = range(len(p_values))
    sets = [chosen for size in range(1, len(p_values) + 1) for chosen in itertools.combinations(numbers, size)]
    rejected = {chosen: min(p_values[number] for number in chosen) <= alpha / len(chosen) for chosen in sets}
    return [all(rejected[chosen] for chosen in sets if number in chosen) for number in numbers]


@pytest.mark.parametrize("seed", range(20))
def test_holm_rejects_what_the_closed_test_rejects(seed):
    p_values = (np.random.default_rng(seed).random(6) ** 4).tolist()
    assert [p <= 0.05 for p in holm(p_values)] == closed_test(p_values, 0.05)
    assert holm([]) == []


def test_whole_groups_are_drawn():
    groups = np.repeat(np.arange(10), 20)
    values = np.repeat(np.random.default_rng(1).normal(size=10), 20)
    rows = np.column_stack([values, np.ones(200)])
    together = bootstrap_sums(rows, groups, [0])
    alone = bootstrap_sums(rows, np.arange(200), [0])
    assert (together[:, 1] == 200).all()
    spread, narrow = ((sums[:, 0] / sums[:, 1]).std() for sums in (together, alone))
    assert spread == pytest.approx(np.unique(values).std() / 10**0.5, rel=0.05)
    assert narrow < spread / 3


def test_the_draws_depend_on_the_seed_alone():
    rows = np.random.default_rng(0).random((30, 2))
    first, again, other = (bootstrap_sums(rows, np.arange(30), seed, 50) for seed in ([1, 2], [1, 2], [1, 3]))
    assert (first == again).all()
    assert (first != other).any()


NEAR_A_HALF = np.random.default_rng(0).normal(0.5, 0.05, 10_000)


@pytest.mark.parametrize(
    ("draws", "limit", "groups", "expected"),
    [
        (np.ones(99), 0.5, 30, 0.5**30),  # never zero
        (np.array([1.0, np.nan, 1.0]), 0.5, 30, 0.5),  # a NaN is not above the limit
        (NEAR_A_HALF, 0.1, 100, stats.norm.sf(8)),  # may be smaller than one over the number of draws
        (NEAR_A_HALF, 0.4, 100, stats.norm.sf(2)),
        (np.ones(9999), 0.5, 5, 1 / 32),  # few groups have a large p-value
        (np.ones(9999), 0.5, 4, 1.0),
    ],
)
def test_p_values(draws, limit, groups, expected):
    assert p_above(draws, limit, groups) == pytest.approx(expected, rel=0.5 if limit == 0.1 else 0.1, abs=0)


def test_sums_over_many_groups_follow_the_bootstrap():
    rows = np.random.default_rng(0).random((6_000, 3)) < (0.9, 0.4, 0.99)
    many = bootstrap_sums(rows.astype(float), np.arange(6_000), [1])
    few = np.array([rows[np.random.default_rng(n).integers(6_000, size=6_000)].sum(0) for n in range(2_000)])
    assert many.shape == (10_000, 3)
    assert np.allclose(many.mean(0), few.mean(0), rtol=0.005)
    assert np.allclose(many.std(0), few.std(0), rtol=0.1)
    assert np.allclose(np.corrcoef(many.T), np.corrcoef(few.T), atol=0.08)


RATES = (0.9, 0.3, 0.05, 0.0)
"""Shares of right answers in four classes: what is left differs between classes if the object is removed."""


def stratified_interval(rng, per_class, trial):
    """Return the interval of the mean over the classes, from a sample with a fixed number of pictures of each."""
    right = np.concatenate([rng.random(per_class) < rate for rate in RATES]).astype(float)
    numbers = np.arange(len(right))
    strata = strata_of_groups(numbers, np.repeat([*"abcd"], per_class).tolist())
    sums = bootstrap_sums(np.column_stack([right, np.ones(len(right))]), numbers, [trial], 1000, strata)
    return widened(interval(sums[:, 0] / sums[:, 1], right.mean(), len(right)))


def mean_interval(rng, trial):
    """Return the interval of the mean of a sample of 60 numbers around 0.3."""
    values = rng.normal(0.3, 1, 60)
    sums = bootstrap_sums(np.column_stack([values, np.ones(60)]), np.arange(60), [trial], 1000)
    return interval(sums[:, 0] / sums[:, 1], values.mean(), 60)


@pytest.mark.parametrize(
    ("estimate", "truth", "most"),
    [(mean_interval, 0.3, 198), (lambda rng, trial: stratified_interval(rng, 40, trial), np.mean(RATES), 200)],
)
def test_95_percent_of_the_intervals_hold_the_truth(estimate, truth, most):
    rng = np.random.default_rng(0)
    estimates = [estimate(rng, trial) for trial in range(200)]
    hits = sum(each.low < truth < each.high for each in estimates)
    assert 180 <= hits <= most  # 190 expected; three standard deviations of a binomial are 9


def test_differences_between_classes_do_not_widen_the_interval():
    rng = np.random.default_rng(0)
    estimate = stratified_interval(rng, 100, 0)
    expected = np.sqrt(np.mean([rate * (1 - rate) for rate in RATES]) / 400)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * expected, rel=0.1)
    pooled = np.sqrt(np.mean(RATES) * (1 - np.mean(RATES)) / 400)
    assert expected < 0.7 * pooled


def test_groups_of_several_classes_and_small_classes_share_a_stratum():
    labels = [*"aaaaaa", *"bbbbb", "c", "a", "b"]
    groups = np.array([*range(12), 12, 12])  # the last group has pictures of two classes
    assert strata_of_groups(groups, labels).tolist() == [1] * 6 + [2] * 5 + [0, 0]


@pytest.mark.parametrize("many", [False, True])
def test_a_stratum_keeps_its_share_in_every_resample(many):
    count = 6000 if many else 60
    labels = ["a"] * (count // 3) + ["b"] * (count - count // 3)
    rows = np.column_stack([np.array(labels) == "a", np.ones(count)]).astype(float)
    sums = bootstrap_sums(rows, np.arange(count), [0], 200, strata_of_groups(np.arange(count), labels))
    assert np.allclose(sums, [count // 3, count], atol=1e-6)


@pytest.mark.parametrize(("groups", "reach"), [(30, 0.1135), (40, 0.0876), (100, 0.0370)])
def test_an_interval_is_never_narrower_than_wilsons_for_no_change(groups, reach):
    nothing, everything = widened(Estimate(0.0, 0.0, 0.0, groups)), widened(Estimate(1.0, 1.0, 1.0, groups))
    assert (nothing.low, nothing.high) == pytest.approx((-reach, reach), abs=5e-5)
    assert (everything.low, everything.high) == pytest.approx((1 - reach, 1), abs=5e-5)
    assert widened(Estimate(0.0, -0.5, 0.5, groups)) == Estimate(0.0, -0.5, 0.5, groups)


def test_few_groups_have_no_interval():
    for estimate in (interval(np.array([0.5, 0.5]), 0.5, 1), widened(Estimate(0.0, np.nan, np.nan, 3))):
        assert np.isnan([estimate.low, estimate.high]).all()
