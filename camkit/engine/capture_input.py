"""Run the model once, and differentiate the whole of it, down to the picture."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from camkit.engine.attach import nodes_behind
from camkit.engine.biases import NotedBiases, is_spectral
from camkit.engine.capture import Pass, expand, features_of, is_absent, layouts_of
from camkit.engine.cut import Saved, Tape, cut
from camkit.engine.features import Capture, Features, Weigh
from camkit.engine.heatmap import enlarge
from camkit.engine.interrupts import interruptible
from camkit.engine.nested import precise
from camkit.errors import LayerError, MethodError
from camkit.targets.scores import Scores, Target
from camkit.types import GuidedGradients, LayerRef, PartsOfScore, Placement

_INPUT = LayerRef("input")

_COMPLETE_FP32, _COMPLETE_AUTOCAST = 1e-3, 5e-2
"""How far the sum of the parts may be from the score, as a share of the absolute values of all parts' sums. In fp32,
the rounding of torchvision's networks is below 1e-6, and what a layer norm adds is far above 1e-3. In 16 bits, each
part is rounded to 0.4 percent, and errors add up from layer to layer."""


def capture_parts(
    model: nn.Module, inputs: Float[Tensor, "n c *size"], targets: Sequence[Target], options: Pass, weigh: Weigh
) -> Capture:
    """Run the model once, and weigh the parts of each target's score: the input's, and those of all biases.

    Raises:
        TargetError: a target does not fit the model's output.
        MethodError: the score has no gradient at the input, or the parts do not add up to it, or it is a box's.
    """
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

    with _whole_pass(model, inputs, options) as images, options.resizing(model) as resized:
        with NotedBiases(note), interruptible():
            output = model(images.clone(memory_format=options.memory_format))
        tape = Tape({_INPUT: _leaf(images)})
        tape.layers |= {LayerRef(f"bias {number}"): saved for number, (saved, _) in enumerate(biases)}
        scores = _differentiated(tape, expand(targets, output, len(inputs)), output, options)
    to_size = functools.partial(enlarge, size=tuple(inputs.shape[2:]))
    weights: list[Tensor] = []
    for number, scored in enumerate(scores):
        parts = [precise(inputs.detach()) * tape.layers[_INPUT].gradients[number]]
        parts += [_product(saved.gradients[number], bias) for saved, bias in biases]
        _check_complete(parts, scored, options)
        grids = [_as_grid(part, inputs) for part in parts]
        elsewhere = [_of_images(part, inputs) for part, grid in zip(parts, grids, strict=True) if grid is None]
        rest = sum(elsewhere, torch.zeros(len(inputs), device=inputs.device))
        placed = tuple(grid for grid in grids if grid is not None)
        weights.append(weigh(inputs, PartsOfScore(placed, rest, to_size)))
    return Capture((Features(inputs, tuple(weights)),), _detached(scores), (), bool(resized.padded))


def capture_guided(
    model: nn.Module, inputs: Float[Tensor, "n c *size"], targets: Sequence[Target], options: Pass, weigh: Weigh
) -> Capture:
    """Run the model once, and weigh each target's guided gradients; with layers, also their ordinary gradients.

    The guided ones come from a backward pass in which each ReLU removes what is negative. Hooks on the nodes of the
    autograd graph do that, so it does not matter whether a ReLU is a module, a function, or in place.

    Raises:
        LayerError, TargetError: as for ``capture``.
        MethodError: the score has no gradient at the input, the model has no ReLU, or a target is a box.
    """
    size = tuple(inputs.shape[2:])
    with (
        _whole_pass(model, inputs, options) as images,
        cut(options.modules, whole=True) as tape,
        options.resizing(model) as resized,
    ):
        with interruptible():
            output = model(images.clone(memory_format=options.memory_format))
        layouts = layouts_of(tape, options, len(inputs), resized.padded or size)
        for ref, layout in layouts.items():
            tape.layers[ref].images = int(layout.kind == "sequence_first")
        single = expand(targets, output, len(inputs))
        ordinary: dict[LayerRef, Saved] = {}
        if layouts:
            _differentiated(tape, single, output, options, keep_graph=True)
            # The hooks of the layers also save the gradients of the guided passes that follow.
            ordinary = {ref: replace(tape.layers[ref], gradients=[*tape.layers[ref].gradients]) for ref in layouts}
        at_input = Tape({_INPUT: _leaf(images)})
        scores = _differentiated(at_input, single, output, options, guided=True)
    guided = at_input.layers[_INPUT].gradients
    if not layouts:
        to_size = functools.partial(enlarge, size=size)
        weights = tuple(weigh(inputs, GuidedGradients(gradient, None, to_size)) for gradient in guided)
        return Capture((Features(inputs, weights),), _detached(scores), (), bool(resized.padded))
    features: list[Features] = []
    for ref, layout in layouts.items():
        maps = features_of(ordinary[ref], layout, resized.extent)
        # As in the paper, the map is spread evenly over the guided gradients, wherever its cells are drawn.
        to_size = functools.partial(enlarge, size=size, placement=Placement(maps.placement.extent))
        pairs = zip(guided, maps.by_target, strict=True)
        weights = tuple(weigh(maps.activations, GuidedGradients(*pair, to_size)) for pair in pairs)
        features.append(Features(inputs, weights))
    return Capture(tuple(features), _detached(scores), tuple(layouts.values()), bool(resized.padded))


@contextmanager
def _whole_pass(model: nn.Module, inputs: Tensor, options: Pass) -> Iterator[Tensor]:
    """Prepare a pass with a graph from the input on; yields a copy of the input, which is the graph's leaf."""
    with (
        options.quiet(model, inputs.device),
        torch.enable_grad(),
    ):
        yield inputs.detach().clone().requires_grad_()


def _leaf(images: Tensor) -> Saved:
    """Return a record that collects the gradients at the input."""
    saved = Saved(images.detach(), images)
    images.register_hook(saved.keeper())
    return saved


def _differentiated(
    tape: Tape,
    targets: Sequence[Target],
    output: Any,
    options: Pass,
    *,
    keep_graph: bool = False,
    guided: bool = False,
) -> list[Scores]:
    """Differentiate each target's score down to what is on the tape, and return the scores without a graph.

    Raises:
        LayerError: the score does not depend on a layer.
        MethodError: it does not depend on the input, the model has no ReLU to guide, or the target is a box.
    """
    batch = next(iter(tape.layers.values())).output.shape[0]
    scores: list[Scores] = []
    for number, target in enumerate(targets, start=1):
        scored = target(output, batch)
        if scored.boxes is not None:
            raise MethodError(
                "methods that differentiate the whole model explain scores, not boxes; use 'gradcam' or 'hirescam'"
            )
        keep = keep_graph or number < len(targets)
        with _guiding(scored.values) if guided else nullcontext(), interruptible():
            tape.differentiate(scored, keep_graph=keep, fp16=options.precision == "fp16")
        scores.append(replace(scored, values=scored.values.detach()))
    if not any(is_absent(scored) for scored in scores):
        _check_reached(tape)
    return scores


def _check_reached(tape: Tape) -> None:
    """Refuse scores without a gradient where one is needed; a bias that no score depends on may have none."""
    for ref, saved in tape.layers.items():
        if saved.reached or ref.name.startswith("bias "):
            continue
        if ref == _INPUT:
            raise MethodError(
                "the score does not depend on the picture in a differentiable way, so there is no gradient at the "
                "picture; use 'rise', a method without gradients, or a gradient method such as 'gradcam'"
            )
        raise LayerError(
            f"the score does not depend on layer {str(ref)!r} in a differentiable way; choose another layer"
        )


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
