"""The linear layer on pooled features."""

import numpy as np
import pytest
import torch

from camkit.background.probe import PULL, cross_validated


def slow_layer(features, labels, shown):
    """Predict the class of rows by least squares over the weights and the biases at once, in units of the deviation."""
    counts = np.bincount(labels)
    weights = 1 / counts[labels] / np.count_nonzero(counts)
    deviation = np.sqrt(np.cov(features.T, aweights=weights, ddof=0).diagonal())
    ones, size = np.ones((len(features), 1)), features.shape[1]
    rows = np.sqrt(weights)[:, None] * np.hstack([features / deviation / size**0.5, ones])
    pulled = PULL**0.5 * np.eye(size, size + 1)
    targets = np.vstack([np.sqrt(weights)[:, None] * np.eye(3)[labels], np.zeros((size, 3))])
    layer = np.linalg.lstsq(np.vstack([rows, pulled]), targets, rcond=None)[0]
    return (np.hstack([shown / deviation / size**0.5, np.ones((len(shown), 1))]) @ layer).argmax(1)


@pytest.mark.parametrize("size", [3, 40])
def test_each_row_is_predicted_by_the_layer_of_least_loss_on_the_other_groups(size):
    rng = np.random.default_rng(0)
    labels = rng.choice(3, 60, p=[0.6, 0.25, 0.15])
    features = rng.normal(7, 2, (60, size)) + rng.normal(0, 1.5, (3, size))[labels]
    groups = rng.integers(5, size=60)
    expected = np.empty(60, int)
    for group in range(5):
        own = groups == group
        expected[own] = slow_layer(features[~own], labels[~own], features[own])

    predicted = cross_validated(torch.from_numpy(features), torch.from_numpy(labels), [*map(str, groups)], 0)

    assert predicted.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_class_of_two_groups_is_in_two_parts(seed):
    labels = torch.arange(10).repeat_interleave(4)
    groups = [str(row // 2) for row in range(40)]

    assert cross_validated(torch.nn.functional.one_hot(labels).float(), labels, groups, seed).equal(labels)


def test_what_only_names_the_group_does_not_help():
    groups = torch.arange(40).repeat_interleave(5)
    labels = (torch.rand(40, generator=torch.Generator().manual_seed(0)) < 0.5).long()[groups]

    predicted = cross_validated(torch.nn.functional.one_hot(groups).float(), labels, [*map(str, groups.tolist())], 0)

    assert float((predicted == labels).float().mean()) < 0.75
