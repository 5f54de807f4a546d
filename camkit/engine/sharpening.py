"""Sharpens Grad-CAM of a coarse layer by gradients times activations of a finer one."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from camkit.engine.features import Capture, Features
from camkit.engine.heatmap import moved_to, weighted_sum
from camkit.methods.gradient import gradcam, gradcam_elementwise


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
        _weights(fine, own, coarse, other, size) for own, other in zip(fine.by_target, coarse.by_target, strict=True)
    )
    return replace(captured, features=(replace(fine, by_target=weights),))


def _weights(
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
