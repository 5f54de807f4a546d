"""How a method is run: the pass that it needs, its weights, and the signed maps that they sum to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from camkit.engine.capture import Pass, capture, capture_activations, capture_for_cam
from camkit.engine.capture_attention import capture_attention
from camkit.engine.capture_curvature import capture_curvature
from camkit.engine.capture_head import capture_with_head
from camkit.engine.capture_input import capture_guided, capture_parts
from camkit.engine.capture_pictures import capture_with_pictures
from camkit.engine.capture_references import capture_with_references
from camkit.engine.features import Capture, Features
from camkit.engine.heatmap import resample, weighted_sum
from camkit.engine.nested import mapped
from camkit.errors import MethodError, refusing_other_arguments
from camkit.methods.joined import component_weights
from camkit.methods.registry import Method, Needs
from camkit.targets.outputs import describe
from camkit.targets.scores import Scores, Target
from camkit.types import Placement

_Plain: TypeAlias = Callable[[nn.Module, Tensor, Sequence[Target], Pass], Capture]
"""A pass after which the method is called."""

_Weighing: TypeAlias = Callable[..., Capture]
"""A pass that calls the method, as the fifth argument, while the model's graph is there or the model may run again."""

_PLAIN: Mapping[Needs, _Plain] = {
    "gradients": capture,
    "head": capture_for_cam,
    "activations": capture_activations,
}

_WEIGHING: Mapping[Needs, _Weighing] = {
    "curvature": capture_curvature,
    "scores": capture_with_head,
    "references": capture_with_references,
    "pictures": capture_with_pictures,
    "parts": capture_parts,
    "guided": capture_guided,
    "attention": functools.partial(capture_attention, reads="maps"),
    "attention-gradients": functools.partial(capture_attention, reads="gradients"),
    "attention-by-layer": functools.partial(capture_attention, reads="layers"),
}


def run(method: Method, model: nn.Module, inputs: Tensor, targets: Sequence[Target], options: Pass) -> Capture:
    """Run the pass that a method needs; ``engine.capture.capture`` explains the arguments.

    Raises:
        LayerError, TargetError: as for ``capture``.
        MethodError: the model does not have what the method needs.
    """
    if method.needs in _PLAIN:
        return _PLAIN[method.needs](model, inputs, targets, options)
    return _WEIGHING[method.needs](model, inputs, targets, options, _Weigher(method))


@dataclass(frozen=True)
class _Weigher:
    """A method as a pass calls it."""

    method: Method

    @property
    def name(self) -> str:
        return self.method.name

    def __call__(self, *given: Any) -> Tensor:
        return weigh(self.method, *given)


def weigh(method: Method, *given: Any) -> Tensor:
    """Return the weights of a method. A function of the user's gets copies, since it may work in place.

    Raises:
        MethodError: it takes other arguments, or returns no dense floating-point tensor. Each pass checks the shape.
    """
    if not method.users:
        return method.weights(*given)
    copies = mapped(given, lambda value: value.clone() if isinstance(value, Tensor) else value)
    with refusing_other_arguments(method.weights, len(given), MethodError, f"method {method.name!r}"):
        weights = method.weights(*copies)
    is_dense = isinstance(weights, Tensor) and weights.layout is torch.strided and not weights.is_nested
    if not is_dense or not weights.is_floating_point() or not weights.dim():
        kind = describe(weights) + (f" of {weights.dtype}" if isinstance(weights, Tensor) else "")
        raise MethodError(f"method {method.name!r} must return a dense floating-point tensor of weights, not {kind}")
    return weights.detach()


def check_weights(method: Method, weights: Any, activations: Tensor) -> None:
    """Check that what a method returned can weight the activations; looks at shapes and types, not at values.

    Raises:
        MethodError: the weights are no floating-point tensor, or do not broadcast against the activations.
    """
    if not isinstance(weights, Tensor):
        raise MethodError(f"method {method.name!r} must return a tensor of weights, not {type(weights).__name__}")
    if not weights.is_floating_point() or weights.device != activations.device:
        raise MethodError(
            f"method {method.name!r} must return floating-point weights on {activations.device}, "
            f"not {weights.dtype} on {weights.device}"
        )
    expected, given = tuple(activations.shape), tuple(weights.shape)
    if given == (expected[0], *expected[2:]):  # the signed map itself
        return
    if len(given) != len(expected) or any(size not in (1, full) for size, full in zip(given, expected, strict=True)):
        per_channel = (*expected[:2], *[1] * (len(expected) - 2))
        raise MethodError(
            f"method {method.name!r} returned weights of shape {given} for activations of shape {expected}; return "
            f"{per_channel} (one per channel: keepdim=True keeps the axes), {expected} (one per cell), or the map "
            f"itself, {(expected[0], *expected[2:])}"
        )


@dataclass(frozen=True, eq=False)
class SignedMaps:
    """The signed maps of a batch for one target.

    Attributes:
        method: the method that weighted them.
        raws: (N, *grid) for each layer.
        influenced: for each picture, whether the target depends on any of the layers.
    """

    method: Method
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
    captured: Capture, method: Method, for_boxes: Method | None = None, *, component: bool = False
) -> list[SignedMaps]:
    """Weight what one pass captured, and return the signed maps of each target.

    Args:
        captured: the feature maps, gradients and scores of the pass.
        method: how the maps are weighted.
        for_boxes: the method for a detector's boxes, if it is another one.
        component: True to keep the first principal component of each map alone.
    """
    methods = [method if scores.boxes is None else for_boxes or method for scores in captured.scores]
    return [
        _weighted_sums(captured.features, number, scores, of_target, component=component)
        for number, (scores, of_target) in enumerate(zip(captured.scores, methods, strict=True))
    ]


def _weighted_sums(
    features: Sequence[Features], number: int, scores: Scores, method: Method, *, component: bool
) -> SignedMaps:
    """Weight and sum the feature maps of each layer for the target with this number."""
    raws = []
    for maps in features:
        weights = _weights_of(method, maps, number)
        check_weights(method, weights, maps.activations)
        if component:
            weights = component_weights(method.name, weights, maps.activations)
        raws.append(weighted_sum(weights, maps.activations))
    if method.need.alone:  # nothing tells whether the score depends on the layer
        influenced = torch.ones(len(scores.values), dtype=torch.bool)
    else:
        influences = (maps.by_target[number].flatten(1).any(1) for maps in features)
        influenced = functools.reduce(torch.logical_or, influences)
    return SignedMaps(method, tuple(raws), influenced)


def _weights_of(method: Method, maps: Features, number: int) -> Tensor:
    """Return a method's weights for a layer's feature maps, for the target with this number."""
    if method.need.alone:
        return weigh(method, maps.activations)
    given = maps.by_target[number]
    return given if method.need.in_pass else weigh(method, maps.activations, given)
