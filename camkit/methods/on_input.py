"""The passes of methods that differentiate more than the head once: the whole model, or the head twice."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from camkit.engine.attach import nodes_behind
from camkit.engine.biases import NotedBiases, is_spectral
from camkit.engine.capture import Capture, Features, Forward, Pass, is_absent
from camkit.engine.cut import Saved, Tape
from camkit.engine.heatmap import enlarge
from camkit.engine.interrupts import interruptible
from camkit.engine.nested import precise
from camkit.engine.passes import is_out_of_memory
from camkit.errors import LayerError, MethodError
from camkit.methods.registry import Method
from camkit.targets.scores import Scores
from camkit.types import GuidedGradients, LayerRef, PartsOfScore, Placement

_INPUT = LayerRef("input")

_COMPLETE_FP32, _COMPLETE_AUTOCAST = 1e-3, 5e-2
"""How far the sum of the parts may be from the score, as a share of the absolute values of all parts' sums. In fp32,
the rounding of torchvision's networks is below 1e-6, and what a layer norm adds is far above 1e-3. In 16 bits, each
part is rounded to 0.4 percent, and errors add up from layer to layer."""

_NO_SECOND = ("torch::autograd::Error", "torch::autograd::NotImplemented")
"""PyTorch's nodes in the place of an operation that has no second derivative. It raises an error in most of them, but
skips a function that is marked as once differentiable."""


def of_parts(options: Pass, method: Method) -> Capture:
    """Run the model once, and weigh the parts of each target's score: the input's, and those of all biases.

    Raises:
        MethodError: the score has no gradient at the input, or the parts do not add up to it, or it is a box's.
    """
    inputs = options.inputs
    biases: list[tuple[Saved, Tensor]] = []
    others: set[Any] = set()

    def note(output: Tensor, bias: Tensor) -> None:
        if _as_grid(output, inputs) is not None and is_spectral(output, others):
            raise MethodError(
                "the model has biases between a Fourier transform and its inverse, and these have no place in the "
                "picture; use 'hirescam' or 'layercam'"
            )
        shape_only = output.detach().new_zeros(()).expand(output.shape)
        biases.append((Saved(shape_only, get_gradient_edge(output)), bias))
        output.register_hook(biases[-1][0].keeper())

    with options.forward(during=NotedBiases(note), leaf=True) as run, interruptible():
        at_input = _leaf(run.images)
        tape = Tape({_INPUT: at_input})
        tape.layers |= {LayerRef(f"bias {number}"): saved for number, (saved, _) in enumerate(biases)}
        scores = _differentiated(tape, run, options)
        captured = run.captured((), scores)
    to_size = functools.partial(enlarge, size=tuple(inputs.shape[2:]))
    weights: list[Tensor] = []
    for number, scored in enumerate(scores):
        parts = [precise(inputs.detach()) * at_input.gradients[number]]
        parts += [_product(saved.gradients[number], bias) for saved, bias in biases]
        _check_complete(parts, scored, options)
        grids = [_as_grid(part, inputs) for part in parts]
        elsewhere = [_of_images(part, inputs) for part, grid in zip(parts, grids, strict=True) if grid is None]
        rest = sum(elsewhere, torch.zeros(len(inputs), device=inputs.device))
        placed = tuple(grid for grid in grids if grid is not None)
        weights.append(method.weigh(inputs, PartsOfScore(placed, rest, to_size)))
    return replace(captured, features=(Features(inputs, tuple(weights)),), scores=_detached(scores))


def of_guided(options: Pass, method: Method) -> Capture:
    """Run the model once, and weigh each target's guided gradients; with layers, also their ordinary gradients.

    The guided ones come from a backward pass in which each ReLU removes what is negative. Hooks on the nodes of the
    autograd graph do that, so it does not matter whether a ReLU is a module, a function, or in place.

    Raises:
        MethodError: the score has no gradient at the input, the model has no ReLU, or a target is a box.
    """
    inputs, size = options.inputs, tuple(options.inputs.shape[2:])
    with options.forward(whole=True, leaf=True) as run, interruptible():
        explained = [Features(inputs, ())]
        if run.layouts:
            _differentiated(run.tape, run, options, keep_graph=True)
            explained = list(run.features())  # the hooks of the layers also save what the guided passes give
        at_input = _leaf(run.images)
        scores = _differentiated(Tape({_INPUT: at_input}), run, options, guided=True)
        captured = run.captured((), _detached(scores))
    features: list[Features] = []
    for maps in explained:
        # As in the paper, the map is spread evenly over the guided gradients, wherever its cells are drawn.
        to_size = functools.partial(enlarge, size=size, placement=Placement(maps.placement.extent))
        at_layer = maps.by_target or [None] * len(scores)
        pairs = zip(at_input.gradients, at_layer, strict=True)
        weights = tuple(method.weigh(maps.activations, GuidedGradients(*pair, to_size)) for pair in pairs)
        features.append(Features(inputs, weights))
    return replace(captured, features=tuple(features))


def _leaf(images: Tensor) -> Saved:
    """Return a record that collects the gradients at the input."""
    saved = Saved(images.detach(), images)
    images.register_hook(saved.keeper())
    return saved


def _differentiated(
    tape: Tape, run: Forward, options: Pass, *, keep_graph: bool = False, guided: bool = False
) -> list[Scores]:
    """Differentiate each target's score down to what is on the tape, and return the scores without a graph.

    Raises:
        LayerError: the score does not depend on a layer.
        MethodError: it does not depend on the input, the model has no ReLU to guide, or the target is a box.
    """
    scores: list[Scores] = []
    for number, target in enumerate(run.targets, start=1):
        scored = run.score(target)
        if scored.boxes is not None:
            raise MethodError(
                "methods that differentiate the whole model explain scores, not boxes; use 'gradcam' or 'hirescam'"
            )
        keep = keep_graph or number < len(run.targets)
        with _guiding(scored.values) if guided else nullcontext():
            tape.differentiate(scored, keep_graph=keep, fp16=options.precision == "fp16")
        scores.append(replace(scored, values=scored.values.detach()))
    if any(is_absent(scored) for scored in scores):
        return scores
    for ref, saved in tape.layers.items():
        if saved.reached or ref.name.startswith("bias "):  # a bias that no score depends on may have no gradient
            continue
        if ref == _INPUT:
            raise MethodError(
                "the score does not depend on the picture in a differentiable way, so there is no gradient at the "
                "picture; use 'rise', a method without gradients, or a gradient method such as 'gradcam'"
            )
        raise LayerError(
            f"the score does not depend on layer {str(ref)!r} in a differentiable way; choose another layer"
        )
    return scores


@contextmanager
def _guiding(score: Tensor) -> Iterator[None]:
    """Let each ReLU behind a score pass on positive gradients alone in the block.

    Raises:
        MethodError: there is no ReLU.
    """
    relus = [node for node in nodes_behind(score) if _is_relu(node)]
    if not relus and score.requires_grad:
        raise MethodError(
            "guided backpropagation changes what ReLUs pass back, and this model ran none; use 'gradcam', 'hirescam' "
            "or 'scorecam'"
        )
    handles = [relu.register_prehook(_positive) for relu in relus]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _positive(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient.relu() for gradient in gradients)


def _is_relu(node: Node) -> bool:
    """Tell whether a node of an autograd graph is a ReLU: ReLU, ReLU6, or clamping at zero."""
    if node.name() in ("HardtanhBackward0", "ClampMinBackward0", "ClampBackward1"):
        return getattr(node, "_saved_min_val", getattr(node, "_saved_min", None)) == 0
    return node.name() == "ReluBackward0"


def _product(gradient: Tensor, bias: Tensor) -> Tensor:
    """Return how far each value of a bias changes the score; PyTorch returns the conjugates of complex gradients."""
    return (gradient.conj() * bias).real if gradient.is_complex() else precise(gradient) * bias


def _check_complete(parts: Sequence[Tensor], scored: Scores, options: Pass) -> None:
    """Refuse parts that do not add up to the score.

    A score from a softmax or sigmoid is not compared, since the gradients are the logit's, which is not known.

    Raises:
        MethodError: they do not.
    """
    if scored.activation is not None or is_absent(scored):
        return
    sums = [float(part.sum()) for part in parts]
    score = float(scored.values.double().sum())
    half = options.precision != "fp32" or scored.values.dtype in (torch.float16, torch.bfloat16)
    tolerance = _COMPLETE_AUTOCAST if half else _COMPLETE_FP32
    if abs(math.fsum(sums) - score) > tolerance * math.fsum(map(abs, [*sums, score])):
        raise MethodError(
            f"the gradients times the input and the biases add up to {math.fsum(sums):.4g}, but the score is "
            f"{score:.4g}: the model has parts that FullGrad has no bias for, such as layer norms or attention; use "
            "'hirescam' or 'layercam'"
        )


def _as_grid(part: Tensor, inputs: Tensor) -> Tensor | None:
    """Return a part (N, C, *grid); None if it has no grid, or one of a single cell, which has no place."""
    return part if part.dim() == inputs.dim() and math.prod(part.shape[2:]) > 1 else None


def _of_images(part: Tensor, inputs: Tensor) -> Float[Tensor, " n"]:
    """Return the sum of a part for each image; what belongs to no image alone is shared out evenly."""
    if part.shape[:1] == inputs.shape[:1]:
        return part.flatten(1).sum(1) if part.dim() > 1 else part
    return (part.sum() / len(inputs)).expand(len(inputs))


def _detached(scores: Sequence[Scores]) -> tuple[Scores, ...]:
    return tuple(replace(scored, values=scored.values.float(), activation=None) for scored in scores)


def second_derivatives(values: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    """Return the gradients of the scores, and the product of their second derivatives with the feature maps."""
    end = cast("Tensor", saved.end)
    gradients = torch.autograd.grad(values.sum(), end, create_graph=True)[0]
    if not gradients.requires_grad:  # the head is linear
        return gradients, torch.zeros_like(gradients)
    refusal = MethodError(
        "an operation after the layer has no second derivative, which 'shapleycam' needs; use 'gradcam'"
    )
    if any(node.name() in _NO_SECOND for node in nodes_behind(gradients)):
        raise refusal
    try:
        products = torch.autograd.grad(
            gradients, end, grad_outputs=saved.output.detach().to(gradients.dtype), retain_graph=True, allow_unused=True
        )[0]
    except RuntimeError as error:  # operations of other packages, such as torchvision's roi_align, raise their own
        if is_out_of_memory(error):
            raise
        raise refusal from error
    return gradients.detach(), torch.zeros_like(gradients) if products is None else products.detach()
