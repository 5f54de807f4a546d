"""How a method is run: the pass that it needs, its weights, and the signed maps that they sum to."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from camkit.engine.attach import ForwardHook, forward_hooks, precise, with_tensors
from camkit.engine.cut import EntangledError
from camkit.engine.guard import interruptible
from camkit.engine.heatmap import finest, moved_to, resample, weighted_sum
from camkit.engine.passes import Capture, Features, Pass, are_alike, capture, is_absent, to_grid
from camkit.errors import LayerError, MethodError, TargetError, advice, listing_layers
from camkit.methods.feature_maps import first_component, gradcam, gradcam_elementwise, layercam
from camkit.methods.on_attention import of_attention
from camkit.methods.on_input import of_guided, of_parts, second_derivatives
from camkit.methods.on_one_picture import of_pictures, of_references, of_scores, only_layer
from camkit.methods.registry import CENTRED, ODAM, SHARPENED, Method
from camkit.models.modules import HeatFile, black_box_in
from camkit.targets.scores import Scores, describe, logits_of, passing_through
from camkit.types import CellPositions, LayerRef, Placement

CHANGES = ((False, 0.9), (False, 1.1), (True, 0.9), (True, 1.0), (True, 1.1))
"""The changed versions of a picture: whether it is mirrored, and what the normalised input is multiplied by, the
factors of grad-cam's ``aug_smooth``. The picture itself is not among them."""


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


def pooled(captured: Capture, size: tuple[int, ...], *, centred: bool = False) -> Capture:
    """Return what a pass captured at several grids as the sum of their maps on the finest one.

    A map is the positive part of gradients times activations, summed over the channels. A cell of a coarse grid covers
    more of the picture, so its heat is spread over as many cells of the finest grid. The sum over the picture stays,
    and each grid has the share in the heat that it has in the score.

    Args:
        captured: of one or more layers, with gradients.
        size: of the input.
        centred: True for positive gradients times activations less their channel's mean over the cells: after a SiLU or
            a batch normalisation, an activation of 0 does not stand for "nothing there".
    """
    grids = [tuple(features.activations.shape[2:]) for features in captured.features]
    goal = captured.features[finest(grids)]
    wanted = goal.placement.centres(tuple(goal.activations.shape[2:]), size)
    summed = tuple(
        torch.stack([_spread_over(wanted, features, number, size, centred) for features in captured.features]).sum(0)
        for number in range(len(captured.scores))
    )
    return replace(captured, features=(replace(goal, by_target=summed),))


def _spread_over(
    wanted: CellPositions, features: Features, number: int, size: tuple[int, ...], centred: bool
) -> Tensor:
    """Return one layer's map for the target with this number on another grid, with the same sum."""
    weights, maps = features.by_target[number], features.activations.float()
    if centred:
        weights, maps = layercam(maps, weights), maps - maps.mean(tuple(range(2, maps.dim())), keepdim=True)
    raw = weighted_sum(weights, maps).relu()
    grid = tuple(raw.shape[1:])
    own = features.placement.centres(grid, size)
    if own == wanted:
        return raw
    return moved_to(wanted, raw, own) * (math.prod(grid) / math.prod(map(len, wanted)))


_SAME_FP32, _SAME_AUTOCAST = 1e-4, 2e-2
"""How far a linear layer's input may differ from the mean of the feature maps, as a share of the largest mean: several
times the rounding of a sum over the cells in fp32, and in bf16, the coarsest type of autocast."""


def _of_head(options: Pass, _: Method) -> Capture:
    """Run the model once without gradients, and return the class weights of its linear layer.

    The head must be global average pooling of the layer followed by that linear layer. This is not guessed from names:
    the linear layer's input must equal the mean of the feature maps (or of their positive part, if a ReLU comes between
    them, as in DenseNet).

    Raises:
        MethodError: the head has another form; the message names methods that work.
        TargetError: a target is not a class.
    """
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def note(module: nn.Module, arguments: list[Tensor], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        calls.append((module, arguments[0].detach(), precise(output)))

    linears: dict[nn.Module, ForwardHook] = {
        module: note for module in options.model.modules() if isinstance(module, nn.Linear)
    }
    with options.forward(forward_hooks(linears), gradients=False) as run, interruptible():
        scores = run.scores()
        if any(scored.indices is None for scored in scores):
            raise TargetError("cam explains classes only; use 'gradcam' for a target function")
        heads = [(linear, read) for linear, read, logits in calls if all(_gives(logits, scored) for scored in scores)]
        maps = zip(run.layouts, run.features(), strict=True)
        return run.captured([_class_weights(ref, of_layer, heads[-1:], scores) for ref, of_layer in maps], scores)


def _class_weights(
    ref: LayerRef, features: Features, heads: Sequence[tuple[nn.Linear, Tensor]], scores: Sequence[Scores]
) -> Features:
    """Return a layer's maps with the class weights of the linear layer that reads their mean."""
    maps = features.activations
    for linear, read in heads:
        for positive_part in (maps, maps.relu()):
            mean = positive_part.mean(tuple(range(2, maps.dim())))
            tolerance = _SAME_FP32 if read.dtype == mean.dtype == torch.float32 else _SAME_AUTOCAST
            if are_alike(mean, read, tolerance):
                weights = tuple(linear.weight.detach()[list(scored.indices or ())].float() for scored in scores)
                return Features(positive_part, weights, features.placement)
    raise MethodError(
        "cam needs a head of global average pooling and one linear layer, and this model has no such head after layer "
        f"{str(ref)!r}; use 'gradcam' or 'hirescam', which work with any head"
    )


def _gives(logits: Tensor, scored: Scores) -> bool:
    """Tell whether a linear layer's output contains the scores of the classes."""
    classes = scored.indices or ()
    if logits.dim() != 2 or len(logits) != len(classes) or max(classes) >= logits.shape[1]:
        return False
    return torch.equal(logits[range(len(logits)), classes], scored.values)


def _of_activations(options: Pass, _: Method) -> Capture:
    """Run the model once, and return feature maps and scores alone.

    The head has a graph if it can have one: it shows whether the model ends in a softmax or sigmoid.
    """
    with suppress(EntangledError), options.forward() as run, interruptible():
        return run.captured(run.features(), run.scores())
    with options.forward(gradients=False) as run, interruptible():
        return run.captured(run.features(), run.scores())


def _of_curvature(options: Pass, method: Method) -> Capture:
    """Run the model once; differentiate its head, and its gradients in the direction of the feature maps.

    The method gets the activations, the gradients and the products, each (N, C, *grid).

    Raises:
        MethodError: several layers are fused, or an operation of the head has no second derivative.
    """
    ref = only_layer(options, "need second derivatives")
    # The faster kernels of attention have no second derivative.
    with options.forward(sdpa_kernel(SDPBackend.MATH)) as run, interruptible():
        (layout,), (maps,) = run.layouts.values(), run.features()
        saved = run.tape.layers[ref]
        saved.settle()
        weights: list[Tensor] = []
        for target in run.targets:
            scored = run.score(target)
            if is_absent(scored):
                weights.append(torch.zeros_like(maps.activations))
                continue
            with passing_through(scored.activation):
                derivatives = second_derivatives(scored.values.float(), saved)
            weights.append(method.weigh(maps.activations, *(to_grid(tensor, layout) for tensor in derivatives)))
        return run.captured([replace(maps, by_target=tuple(weights))], run.scores())


def _of_file(options: Pass, method: Method) -> Capture:
    """Run a file that returns its heat, once for the scores and once for each target.

    Raises:
        MethodError: the model is not such a file, or it returns the heat of the best class only.
    """
    box = black_box_in(options.model)
    if not isinstance(box, HeatFile):
        raise MethodError(f"method {method.name!r} works only on files that camkit export wrote; use another method")
    with options.forward(leaf=True) as run:  # a graph shows a sigmoid at the end
        output, scores = run.output, run.scores()
    best = tuple(logits_of(output, len(options.inputs)).argmax(1).tolist())
    maps: list[Tensor] = []
    for scored in scores:
        if scored.indices is None or (scored.indices != best and not box.explains_any):
            instead = advice("export(..., target='input')", "camkit export --target input")
            raise MethodError(
                f"the file returns the heat of each picture's best class only; {instead} writes one for all classes"
            )
        maps.append(box.heat(options.inputs, scored.indices))
    features = Features(maps[0][:, None], tuple(maps), Placement(positions=box.places))
    return Capture((features,), scores)


RUNS: Mapping[str, Callable[[Pass, Method], Capture]] = {
    "gradients": lambda options, _: capture(options),
    "curvature": _of_curvature,
    "head": _of_head,
    "activations": _of_activations,
    "scores": of_scores,
    "references": of_references,
    "attention": of_attention,
    "attention-gradients": of_attention,
    "attention-by-layer": of_attention,
    "pictures": of_pictures,
    "file": _of_file,
    "parts": of_parts,
    "guided": of_guided,
}
"""The pass of each kind of method: it runs the model, and leaves gradients, or the method's finished weights."""


JOINS: Mapping[str, Callable[[Capture, tuple[int, ...]], Capture]] = {
    SHARPENED.name: sharpened,
    ODAM.name: pooled,
    CENTRED.name: functools.partial(pooled, centred=True),
}
"""How the methods that read several layers make one map of what a pass captured there."""


def users_weights(method: Method, *given: Any) -> Tensor:
    """Return the weights of a user's function; see ``Method.weigh``."""
    weights = method.weights(*with_tensors(given, Tensor.clone))
    is_dense = isinstance(weights, Tensor) and weights.layout is torch.strided and not weights.is_nested
    if not is_dense or not weights.is_floating_point() or not weights.dim():
        kind = describe(weights) + (f" of {weights.dtype}" if isinstance(weights, Tensor) else "")
        raise MethodError(f"method {method.name!r} must return a dense floating-point tensor of weights, not {kind}")
    return weights.detach()


def check_weights(method: Method, weights: Tensor, activations: Tensor) -> None:
    """Check that what a method returned can weight the activations.

    Raises:
        MethodError: the weights do not broadcast against the activations.
    """
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

        Raises:
            LayerError: a mirrored picture lies elsewhere on the grid, because the model pads its input on one side.
        """
        raws: list[Tensor] = []
        for raw, placement in zip(self.raws, placements, strict=True):
            turned = raw.flip(-1)
            if placement.positions:
                places = placement.positions[-1]
                turned = resample(turned, raw.dim() - 1, tuple(size[-1] - 1 - place for place in places[::-1]), places)
            elif placement.extent and abs(sum(placement.extent[-1]) - 1) > 1e-6:  # more than rounding
                instead = advice("smooth='eigen'", "--smooth eigen")
                raise LayerError(
                    "the model pads the picture on one side only, so the cells of its mirror image lie elsewhere; use "
                    f"{instead}, or another layer ({listing_layers()})"
                )
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
    found: list[SignedMaps] = []
    for number, scores in enumerate(captured.scores):
        used = method if scores.boxes is None else for_boxes or method
        is_finished = used.needs not in ("activations", "gradients", "head")
        raws: list[Tensor] = []
        for maps in captured.features:
            given = [] if used.needs == "activations" else [maps.by_target[number]]
            weights = given[0] if is_finished else used.weigh(maps.activations, *given)
            check_weights(used, weights, maps.activations)
            if component:
                weights = component_weights(used.name, weights, maps.activations)
            raws.append(weighted_sum(weights, maps.activations))
        if used.needs == "activations":  # nothing tells whether the score depends on the layer
            influenced = torch.ones(scores.values.shape[0], dtype=torch.bool)
        else:
            influences = (maps.by_target[number].flatten(1).any(1) for maps in captured.features)
            influenced = functools.reduce(torch.logical_or, influences)
        found.append(SignedMaps(used, tuple(raws), influenced))
    return found
