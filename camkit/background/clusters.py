"""Kinds of backgrounds in the model's own features: one pass over the pictures without their objects, then clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist
from torch import Tensor

from camkit.background.edits import TILE
from camkit.background.plan import Plan
from camkit.background.trial import Loader
from camkit.background.values import Item
from camkit.explainer import explain_many
from camkit.methods import Method
from camkit.targets import EachTarget

COUNTS = range(2, 9)
"""The numbers of kinds that the search tries."""

_COMPONENTS = 5
"""The number of principal components that are clustered. On photos of four places with animals tied to them, the four
kinds had a purity of 0.90 with 5 components, 0.86 with 8 and 0.88 with all 1,280, and silhouettes of 0.43, 0.34 and
0.08."""

_REFERENCES = 19
"""The number of reference draws, which have no kinds. The kinds of the pictures must have a larger silhouette than
every draw. If there are no kinds, this happens in one check of 20."""

_MOST_CLUSTERED = 500
"""At most this many pictures are clustered, because all pairs are compared. The others join the kind with the nearest
mean."""


class _MeansOfMaps:
    """Keeps the mean of each channel of the feature maps that an Explainer's passes give to its method."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def __call__(self, activations: Float[Tensor, "n c *grid"]) -> Float[Tensor, "n *grid"]:
        """Keep the means of a batch, and return a map without heat."""
        self.rows.extend(activations.detach().float().flatten(2).mean(2).cpu())
        return torch.zeros_like(activations[:, 0])


def background_features(plan: Plan, items: Sequence[Item], load: Loader) -> Float[np.ndarray, "n c"]:
    """Return the mean of each channel of the layer of the heat, for each picture without its objects.

    The objects' boxes are filled with the texture beside them. If there is none, only the objects' outlines are filled.
    """
    means = _MeansOfMaps()
    check = plan.settings.check
    explained = explain_many(
        plan.model,
        _without_objects(items, load),
        check.layer,
        method=Method("kinds", "kinds", "", "", needs="activations", weights=means),
        target=EachTarget(tuple(plan.matched.indices[item.label] for item in items)),
        precision=check.precision,
        batch_size=check.batch_size,
    )
    for _ in explained:
        pass  # only the feature maps are kept
    return torch.stack(means.rows).double().numpy()


def _without_objects(items: Sequence[Item], load: Loader) -> Iterator[Float[Tensor, "c h w"]]:
    for item in items:
        picture = load(item)
        assert picture is not None  # it served as a background before
        yield picture.without(TILE) if picture.can_lose_boxes else picture.as_background(TILE)


def cluster(components: Float[np.ndarray, "n k"], least: int, seed: int) -> Int[np.ndarray, " n"] | None:
    """Divide pictures into kinds by the principal components of their features.

    Ward's method (1963, 10.1080/01621459.1963.10500845) finds the clusters. Their number is the smallest whose mean
    silhouette (Rousseeuw 1987, 10.1016/0377-0427(87)90125-7) lies within one standard error of the largest silhouette.
    The largest silhouette must exceed the silhouette of normally distributed numbers with the same variances, which
    have no kinds: this is the null hypothesis of SigClust (Liu et al. 2008, 10.1198/016214508000000454).

    Args:
        components: a row for each picture.
        least: the least number of pictures in a kind.
        seed: the seed of the reference draws.

    Returns:
        Each picture's kind, numbered from 0; None if the pictures are of one kind.
    """
    random = np.random.default_rng(seed)
    chosen = components[random.permutation(len(components))[:_MOST_CLUSTERED]]
    divisions = _divisions(chosen, least)
    if not divisions:
        return None
    best = max(divisions, key=lambda division: division.silhouette)
    deviations = chosen.std(0)
    for _ in range(_REFERENCES):
        without_kinds = _divisions(random.standard_normal(chosen.shape) * deviations, least)
        if any(division.silhouette >= best.silhouette for division in without_kinds):
            return None
    fewest = next(division for division in divisions if division.silhouette >= best.silhouette - best.error)
    kinds = _nearest(components, _means(chosen, fewest.labels))
    return kinds if np.bincount(kinds).min() >= least else None


def principal_components(features: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "n k"]:
    """Return the first few principal components of the rows."""
    left, sizes, _ = np.linalg.svd(features - features.mean(0), full_matrices=False)
    return np.asarray(left[:, :_COMPONENTS] * sizes[:_COMPONENTS])


class _Division(NamedTuple):
    """Points divided into clusters: each point's cluster, the mean silhouette, and its standard error."""

    labels: Int[np.ndarray, " n"]
    silhouette: float
    error: float


def _divisions(points: Float[np.ndarray, "n k"], least: int) -> list[_Division]:
    """Divide points into each number of clusters, the smallest first; leave out divisions with a small cluster."""
    if len(points) < least * COUNTS[0]:
        return []
    tree, distances = linkage(points, "ward"), cdist(points, points)
    divisions = []
    for count in COUNTS:
        labels = _nearest(points, _means(points, fcluster(tree, count, "maxclust") - 1))
        if np.bincount(labels, minlength=count).min() >= least:
            values = silhouettes(distances, labels)
            divisions.append(_Division(labels, float(values.mean()), float(values.std() / len(values) ** 0.5)))
    return divisions


def _means(points: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, "m k"]:
    return np.stack([points[labels == label].mean(0) for label in range(labels.max() + 1)])


def _nearest(points: Float[np.ndarray, "n k"], means: Float[np.ndarray, "m k"]) -> Int[np.ndarray, " n"]:
    """Return which mean is nearest to each point: one step of k-means, also for points outside the tree."""
    return np.asarray(cdist(points, means).argmin(1))


def silhouettes(distances: Float[np.ndarray, "n n"], labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return (b - a) / max(a, b) of each point, and 0 for a point that is alone in its cluster.

    a is its mean distance to the others of its cluster, b the smallest mean distance to the points of another cluster.

    >>> silhouettes(np.abs(np.subtract.outer([0.0, 1.0, 8.0, 9.0], [0.0, 1.0, 8.0, 9.0])), np.array([0, 0, 1, 1]))
    array([0.88..., 0.86..., 0.86..., 0.88...])
    """
    rows, sizes = np.arange(len(labels)), np.bincount(labels)
    sums = distances @ np.eye(len(sizes))[labels]
    within = sums[rows, labels] / np.maximum(1, sizes[labels] - 1)
    means = sums / sizes
    means[rows, labels] = np.inf
    beside = means.min(1)
    larger = np.maximum(np.maximum(within, beside), np.finfo(float).tiny)
    return np.asarray(np.where(sizes[labels] > 1, (beside - within) / larger, 0))


def most_typical(components: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return the numbers of the pictures, those nearest to the mean of their kind first."""
    return np.argsort(np.linalg.norm(components - _means(components, labels)[labels], axis=1), kind="stable")
