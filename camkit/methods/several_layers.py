"""Maps of several layers that become one: Grad-CAM sharpened by a finer layer, and the grids of a detector's boxes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from camkit.engine.features import Capture, Features
from camkit.engine.heatmap import finest, moved_to, weighted_sum
from camkit.methods.gradient import gradcam, gradcam_elementwise
from camkit.types import CellPositions


def sharpened(captured: Capture, size: tuple[int, ...]) -> Capture:
    """Return what a pass captured at two layers as features of the finer one with finished weights.

    The finer layer's map, the positive products of gradients and activations, says where in a cell of the coarse layer
    the evidence lies. Scaled to at most 1, it multiplies the coarse layer's Grad-CAM map, which says how much evidence
    for the class there is. So the product has the units of the score.

    Args:
        captured: of two layers, with gradients.
        size: of the input.
    """
    fine, coarse = sorted(captured.features, key=lambda features: -features.activations[0, 0].numel())
    weights = tuple(
        _sharpened_weights(fine, own, coarse, other, size)
        for own, other in zip(fine.by_target, coarse.by_target, strict=True)
    )
    return replace(captured, features=(replace(fine, by_target=weights),))


def _sharpened_weights(
    fine: Features, gradients: Tensor, coarse: Features, coarse_gradients: Tensor, size: tuple[int, ...]
) -> Tensor:
    """Return the weights (N, C, *grid) of the finer layer's feature maps."""
    positive = gradcam_elementwise(fine.activations, gradients)
    largest = weighted_sum(positive, fine.activations).flatten(1).amax(1)
    evidence = weighted_sum(gradcam(coarse.activations, coarse_gradients), coarse.activations)
    own, wanted = (part.placement.centres(tuple(part.activations.shape[2:]), size) for part in (coarse, fine))
    evidence = moved_to(wanted, evidence, own)
    largest = largest.where(largest > 0, 1).reshape(-1, *[1] * evidence.dim())
    return positive / largest * evidence[:, None]


def pooled(captured: Capture, size: tuple[int, ...]) -> Capture:
    """Return what a pass captured at several grids as the sum of their maps on the finest one.

    A map is the positive part of gradients times activations, summed over the channels. A cell of a coarse grid covers
    more of the picture, so its heat is spread over as many cells of the finest grid. The sum over the picture stays,
    and each grid has the share in the heat that it has in the score.

    Args:
        captured: of one or more layers, with gradients.
        size: of the input.
    """
    grids = [tuple(features.activations.shape[2:]) for features in captured.features]
    goal = captured.features[finest(grids)]
    wanted = goal.placement.centres(tuple(goal.activations.shape[2:]), size)
    summed = tuple(
        torch.stack([_spread_over(wanted, features, number, size) for features in captured.features]).sum(0)
        for number in range(len(captured.scores))
    )
    return replace(captured, features=(replace(goal, by_target=summed),))


def _spread_over(wanted: CellPositions, features: Features, number: int, size: tuple[int, ...]) -> Tensor:
    """Return one layer's map for the target with this number on another grid, with the same sum."""
    raw = weighted_sum(features.by_target[number], features.activations).relu()
    grid = tuple(raw.shape[1:])
    own = features.placement.centres(grid, size)
    if own == wanted:
        return raw
    return moved_to(wanted, raw, own) * (math.prod(grid) / math.prod(map(len, wanted)))
