"""Shortcut detectors that others published and that run without retraining, beside the check on the same pictures."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture
from torch import nn

CLUSTERS = range(2, 6)
"""Numbers of clusters that are tried for each class."""

_COMPONENTS = 8
"""Principal components that are clustered: more would leave too few pictures for each number of a Gaussian mixture."""

_LEAST = 5
"""Pictures that a cluster must have for its accuracy to count."""


def worst_cluster_loss(network: nn.Sequential, maps: NDArray[np.float16], labels: NDArray[np.int64]) -> float:
    """Return how much less accurate a network is on its worst cluster of pictures than on all.

    This is the first step of GEORGE (Sohoni et al. 2020, arXiv:2011.12945): cluster the features of each class without
    knowing the groups, and look at the worst cluster. Principal components stand for its UMAP, and the Bayesian
    information criterion chooses the number of clusters.
    """
    features, named = _features_and_answers(network, maps)
    right = named == labels
    worst = 1.0
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        components = PCA(min(_COMPONENTS, len(rows) - 1), random_state=0).fit_transform(features[rows])
        mixtures = [
            GaussianMixture(count, covariance_type="diag", random_state=0).fit(components) for count in CLUSTERS
        ]
        cluster = min(mixtures, key=lambda mixture: float(mixture.bic(components))).predict(components)
        accuracies = [
            right[rows[cluster == number]].mean()
            for number in np.unique(cluster)
            if (cluster == number).sum() >= _LEAST
        ]
        worst = min([worst, *map(float, accuracies)])
    return float(right.mean()) - worst


@torch.inference_mode()
def _features_and_answers(
    network: nn.Sequential, maps: NDArray[np.float16]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    last = network[0](torch.from_numpy(maps).float())
    return last.mean((2, 3)).numpy(), network[1](last).argmax(1).numpy()
