"""A linear layer on pooled features, predicted in cross-validation: what do the features know about the classes?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from camkit.engine.attach import hooked, tensors_in
from camkit.kit.statistics import (
    MIN_GROUPS,
    Estimate,
    bootstrap_sums,
    effective_groups,
    group_numbers,
    interval,
    strata_of_groups,
    widened,
)

FOLDS = 5
"""Parts of the groups. Each is predicted by a layer that is trained on the others."""

PULL = 0.003
"""The weight of the squared weights in the loss. On photos, layers with 0.001 to 0.01 are right equally often."""


def parts_of(labels: Sequence[Any], groups: Sequence[str], seed: int) -> Int[Tensor, " n"]:
    """Return the part of each row's group, from 0 to FOLDS - 1. The groups of each class are spread over the parts."""
    names, first, numbers = np.unique(groups, return_index=True, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    order = order[np.argsort(np.array(labels)[first][order], kind="stable")]  # class by class
    return torch.from_numpy(np.argsort(order)[numbers] % FOLDS)


def cross_validated(
    features: Float[Tensor, "n d"], labels: Int[Tensor, " n"], groups: Sequence[str], seed: int
) -> Int[Tensor, " n"]:
    """Return the class that a linear layer predicts for each row, trained on rows of other groups alone.

    The layer minimises the mean squared difference to 1 for the row's class and 0 for the others, in which all classes
    have the same weight, plus PULL times the squared weights, for features with a mean square of 1 / d around their
    mean. This ridge regression has a closed form, and is right as often as a logistic one.

    Args:
        features: what the layer sees, in any units.
        labels: each row's class, numbered from 0.
        groups: each row's group; there must be two or more.
        seed: decides which groups form a part.
    """
    parts, predicted = parts_of(labels.tolist(), groups, seed), torch.empty_like(labels)
    centred, wanted = features.double() - features.double().mean(0), functional.one_hot(labels).double()
    scale = centred.square().mean(0).sqrt() * features.shape[1] ** 0.5
    # Columns that have the same products: the layer predicts the same from them, and there are at most as many as rows.
    columns = torch.linalg.qr((centred / scale.where(scale > 0, torch.inf)).T, mode="r").R.T
    pull = PULL * torch.eye(columns.shape[1], dtype=torch.float64)
    for part in parts.unique():
        used = parts != part
        weights = 1 / labels[used].bincount()[labels[used]].double()[:, None]
        weights = weights / weights.sum()
        mean, share = ((weights * values[used]).sum(0) for values in (columns, wanted))
        own = columns[used] - mean
        layer = torch.linalg.solve((own * weights).T @ own + pull, (own * weights).T @ (wanted[used] - share))
        predicted[~used] = ((columns[~used] - mean) @ layer + share).argmax(1)
    return predicted


@contextmanager
def noted(model: nn.Module, found: list[Tensor], count: int) -> Iterator[None]:
    """Add a model's pooled features (count, C) to a list after a pass: what its last module with weights gets.

    They are averaged over the grid or the tokens. Nothing is added if that module does not get a row for each picture.
    """
    last = list[Tensor]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The last module that starts has no other one inside it. Later operations may change its input in place.
        for features in tensors_in((args, kwargs))[:1]:
            last.clear()
            if features.dim() > 1 and len(features) == count and features.numel():
                by_channel = features if isinstance(module, nn.modules.conv._ConvNd) else features.movedim(-1, 1)
                last.append(by_channel.detach().float().reshape(count, by_channel.shape[1], -1).mean(2))

    with_weights = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    with hooked(before=[(module, note) for module in with_weights]):
        yield
    found += [features.cpu() for features in last]


@dataclass(frozen=True)
class Shortcut:
    """How often linear layers name the class of pictures whose object was removed; shares are means over the classes.

    Attributes:
        chance: the share that is right if the layer guesses.
        box: the share if it knows only the size and place of the removed box.
        all: the share if it also sees a model's features of the rest of the picture.
        gain: the difference between these two, and its interval.
    """

    chance: float
    box: float
    all: float
    gain: Estimate


def find_shortcut(
    pictures: Sequence[tuple[str, str, Float[np.ndarray, " d"], Sequence[float]]], seed: int
) -> Shortcut | None:
    """Measure the shortcut in pictures without their object.

    It is None if there are fewer than MIN_GROUPS groups, or if the pictures do not all have equally many features.

    The features also show where something was filled, and so the box. What a layer gets from the box alone is no
    shortcut of the background.

    Args:
        pictures: the class, the group and the features of each picture, and numbers for the size and place of its box.
        seed: the seed of the parts and of the bootstrap.
    """
    labels, groups, features, boxes = zip(*pictures, strict=True) if pictures else ((), (), (), ())
    size, *others = {len(own) for own in features} or {0}
    if others or not size or len(set(groups)) < MIN_GROUPS:
        return None
    classes, of_group, rest = group_numbers(labels), group_numbers(groups), np.stack(features)
    places = np.array(boxes) - np.mean(boxes, 0)
    places /= np.maximum(places.std(0), 1e-9)
    box = np.hstack([places, (places[:, :, None] * places[:, None]).reshape(len(places), -1)])
    # The box counts as much as the features, however many these are
    repeated = np.tile(box, max(1, size // box.shape[1]))
    weights = 1 / np.bincount(classes)[classes] / len(set(labels))
    alone, both = (
        weights * (cross_validated(torch.from_numpy(shown), torch.from_numpy(classes), groups, seed).numpy() == classes)
        for shown in (box, np.hstack([rest, repeated]))
    )
    terms, strata = np.column_stack([both - alone, weights]), strata_of_groups(of_group, labels)
    sums = bootstrap_sums(terms, of_group, [seed], strata=strata)
    share, of_all = float(alone.sum()), float(both.sum())
    gain = interval(sums[:, 0] / sums[:, 1], of_all - share, effective_groups(groups))
    return Shortcut(1 / len(set(labels)), share, of_all, widened(gain))
