"""Weights what a pass captured, and sums it to a signed map of each picture for each target and layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from camkit.engine.features import Capture, Features, weigh
from camkit.engine.heatmap import resample, weighted_sum
from camkit.engine.smoothing import component_weights, takes_component
from camkit.methods import WEIGHED_IN_PASS, Method, check_weights
from camkit.targets.scores import Scores
from camkit.types import Placement, Smoothing


@dataclass(frozen=True, eq=False)
class SignedMaps:
    """The signed maps of a batch for one target.

    Attributes:
        method: the name of the method that weighted them.
        raws: (N, *grid) for each layer.
        influenced: for each picture, whether the target depends on any of the layers.
    """

    method: str
    raws: tuple[Tensor, ...]
    influenced: Tensor

    def mirrored(self, placements: Sequence[Placement], size: tuple[int, ...]) -> SignedMaps:
        """Return the maps of mirrored pictures as maps of the pictures themselves.

        If a cell looks at one side of its part of the picture, its mirror image looks at the other side.
        """
        raws: list[Tensor] = []
        for raw, placement in zip(self.raws, placements, strict=True):
            turned = raw.flip(-1)
            if placement.positions:
                places = placement.positions[-1]
                turned = resample(turned, raw.dim() - 1, tuple(size[-1] - 1 - place for place in places[::-1]), places)
            raws.append(turned)
        return replace(self, raws=tuple(raws))

    @classmethod
    def averaged(cls, versions: Sequence[SignedMaps]) -> SignedMaps:
        """Return the mean maps over several versions of the pictures."""
        raws = tuple(torch.stack(raws).mean(0) for raws in zip(*(maps.raws for maps in versions), strict=True))
        influenced = torch.stack([maps.influenced for maps in versions]).any(0)
        return cls(versions[0].method, raws, influenced)


def signed_maps(
    captured: Capture, method: Method, smooth: Smoothing | None = None, for_boxes: Method | None = None
) -> list[SignedMaps]:
    """Weight what one pass captured, and return the signed maps of each target.

    Args:
        captured: the feature maps, gradients and scores of the pass.
        method: how the maps are weighted.
        smooth: how each map is smoothed; a mean over several passes is up to the caller.
        for_boxes: the method for a detector's boxes, if it is another one.
    """
    methods = [method if scores.boxes is None else for_boxes or method for scores in captured.scores]
    return [
        _weighted_sums(captured.features, number, scores, of_target, smooth)
        for number, (scores, of_target) in enumerate(zip(captured.scores, methods, strict=True))
    ]


def _weighted_sums(
    features: Sequence[Features], number: int, scores: Scores, method: Method, smooth: Smoothing | None
) -> SignedMaps:
    """Weight and sum the feature maps of each layer for the target with this number."""
    raws = []
    for maps in features:
        weights = _weights_of(method, maps, number)
        check_weights(method, weights, maps.activations)
        if takes_component(smooth):
            weights = component_weights(method.name, weights, maps.activations)
        raws.append(weighted_sum(weights, maps.activations))
    if method.needs == "activations":  # nothing tells whether the score depends on the layer
        influenced = torch.ones(len(scores.values), dtype=torch.bool)
    else:
        influences = (maps.by_target[number].flatten(1).any(1) for maps in features)
        influenced = functools.reduce(torch.logical_or, influences)
    return SignedMaps(method.name, tuple(raws), influenced)


def _weights_of(method: Method, maps: Features, number: int) -> Tensor:
    """Return a method's weights for a layer's feature maps, for the target with this number."""
    if method.needs == "activations":
        return weigh(method, maps.activations)
    given = maps.by_target[number]
    return given if method.needs in WEIGHED_IN_PASS else weigh(method, maps.activations, given)
