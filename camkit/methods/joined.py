"""Maps that are made of several: of versions of a picture, of one component of the channels, and of several layers.

Grad-CAM of a coarse layer may be sharpened by a finer layer; the maps of a detector's boxes are added over their grids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.engine.capture import Capture, Features
from camkit.engine.heatmap import finest, moved_to, weighted_sum
from camkit.errors import LayerError, MethodError, advice, listing_layers
from camkit.methods.activations import first_component
from camkit.methods.gradient import gradcam, gradcam_elementwise
from camkit.types import CellPositions

_FACTORS = (0.9, 1.0, 1.1)
"""What the normalised input is multiplied by: the factors of grad-cam's ``aug_smooth``."""

CHANGES = tuple((mirrored, factor) for mirrored in (False, True) for factor in _FACTORS if mirrored or factor != 1)
"""The changed versions of a picture: whether it is mirrored, and its factor. The picture itself is not among them."""

_SAME_SHARE = 1e-6
"""How far the middle of the input may lie from the middle of the grid, as a share of the grid: rounding."""


def changed(inputs: Float[Tensor, "n c *size"], factor: float, *, mirrored: bool) -> Float[Tensor, "n c *size"]:
    """Return pictures mirrored along their last axis, and multiplied by a factor."""
    return (inputs.flip(-1) if mirrored else inputs) * factor


def check_mirrors(features: Sequence[Features]) -> None:
    """Refuse a grid that a mirrored picture would lie elsewhere on: the model pads its input on one side.

    Raises:
        LayerError: such a grid.
    """
    for maps in features:
        extent = () if maps.placement.positions else maps.placement.extent
        if extent and abs(sum(extent[-1]) - 1) > _SAME_SHARE:
            instead = advice("smooth='eigen'", "--smooth eigen")
            raise LayerError(
                "the model pads the picture on one side only, so the cells of its mirror image lie elsewhere; use "
                f"{instead}, or another layer ({listing_layers()})"
            )


def component_weights(
    method: str, weights: Float[Tensor, "n *_"], activations: Float[Tensor, "n c *grid"]
) -> Float[Tensor, "n c *_"]:
    """Return the weights with which the map is the first principal component of weights times activations.

    W is the matrix (cells x channels) of the weighted feature maps, whose sum over the channels is the plain map. The
    component is W V_1, with V_1 the first right singular vector. It gets the sign with which it agrees with the plain
    map: their product is the square of the first singular value times the sum of V_1.

    Raises:
        MethodError: the method returns a map and no weights.
    """
    if weights.dim() < activations.dim():
        instead = advice("smooth='augment'", "--smooth augment")
        raise MethodError(
            f"method {method!r} returns a map and no weights, so it has no principal component; use {instead}, or a "
            "method that weights feature maps, such as 'gradcam'"
        )
    weights = weights.float()
    vectors = first_component(weights * activations.float())
    return weights * vectors * torch.where(vectors.sum(1, keepdim=True) < 0, -1, 1)


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
