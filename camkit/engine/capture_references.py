"""Run the model once for one picture, and its head between the feature maps of reference pictures and the picture's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.capture import Pass, plain_scores
from camkit.engine.capture_head import each_pass_of, first_pass
from camkit.engine.features import Capture, Weigh, to_grid
from camkit.engine.head import Head
from camkit.engine.nested import precise
from camkit.engine.record import ModelRecord
from camkit.engine.references import ReferenceMaps, run_references
from camkit.errors import MethodError
from camkit.targets.log_odds import against_rivals
from camkit.targets.scores import Target
from camkit.types import LayerRef, ReferenceScores


def capture_with_references(
    model: nn.Module, image: Float[Tensor, "1 c *size"], targets: Sequence[Target], options: Pass, weigh: Weigh
) -> Capture:
    """Run the model once for one picture, and its head with gradients between the references' maps and the picture's.

    The method gets the activations (1, C, *grid), those of the M references and the gradients (M, C, *grid).
    The layer's whole output moves from a reference to the picture, with tokens that are not cells. Everything beside it
    stays as the picture gave it. All passes run in fp32, as for ``capture_with_head``.

    Raises:
        LayerError, TargetError: as for ``capture``.
        MethodError: several layers are fused, the head cannot be run alone, or a target is not a score.
    """
    if len(options.modules) > 1:
        raise MethodError(
            "methods that compare a picture with references explain one layer; name one, or use 'gradcam' or "
            "'hirescam', which fuse several"
        )
    with first_pass(model, image, targets, options) as (output, first):
        ((ref, maps),) = first.features.items()
        (layout,) = first.layouts
        weights = [first.missing(maps, scored) for scored in first.scores]
        numbers = [number for number, missing in enumerate(weights) if missing is None]
        fixed = [first.targets[number] for number in numbers]
        compared = [against_rivals(target, target(output, 1)) for target in fixed]
        own = plain_scores(compared, output, 1)
        del output  # frees the graph
    scores: list[ReferenceScores | None] = [None] * len(weights)
    if numbers:
        values = torch.cat([first.scores[number].values for number in numbers])
        head = first.head(ref, functools.partial(_values, fixed), values)
        words, references = _references(model, ref, head, image, options)
        steps = head.output.float() - references.outputs.float()
        shares = torch.movedim(_shares(len(references)).to(steps).reshape(-1, *[1] * (steps.dim() - 1)), 0, head.images)
        points = (references.outputs.float() + shares * steps).to(head.output.dtype)
        gradients = head.gradients(points, compared)
        of_references = to_grid(references.outputs, layout)
        for number, target, scored, gradient in zip(numbers, compared, own, gradients, strict=True):
            weights[number] = weigh(maps.activations, of_references, to_grid(gradient, layout))
            products = steps * gradient.float()
            elsewhere = float(products.sum() - to_grid(products, layout).sum()) / len(references)
            mean = float(references.scores(target).mean())
            quantity = scored.quantity if isinstance(scored.quantity, str) else scored.quantity[0]
            scores[number] = ReferenceScores(words, quantity, float(scored.values), mean, elsewhere)
    by_target = tuple(weight for weight in weights if weight is not None)
    return Capture((replace(maps, by_target=by_target),), first.scores, first.layouts, references=tuple(scores))


def _values(targets: Sequence[Target], output: Any, batch: int) -> Float[Tensor, "n k"]:
    return torch.stack([precise(target(output, batch).values) for target in targets], 1)


def _references(
    model: nn.Module, ref: LayerRef, head: Head, image: Float[Tensor, "1 c *size"], options: Pass
) -> tuple[str, ReferenceMaps]:
    """Return what the reference pictures are, in words, and what the model and the layer return for them."""
    assert options.references is not None
    pictures = options.references(image)
    record = options.record or ModelRecord.of_model(model)
    run = functools.partial(
        run_references,
        model,
        ref,
        head.images,
        pictures.inputs.to(image),
        each_pass_of(model, image, options),
        apart=options.apart,
    )
    references = options.kept_references.maps((ref, pictures.key), record.modules(), run)
    expected = list(head.output.shape)
    expected[head.images] = len(references)
    if list(references.outputs.shape) != expected:
        raise MethodError(
            f"layer {str(ref)!r} returns outputs of another shape for the reference pictures than for the picture; "
            "choose another layer, or use 'gradcam'"
        )
    return pictures.words, references


def _shares(count: int) -> Float[Tensor, " count"]:
    """Return how far on the way from each reference to the picture the gradient is taken: one in each equal part.

    They are in random order, so that they do not follow an order of the references; and the same in every run.
    """
    generator = torch.Generator().manual_seed(0)
    parts = torch.randperm(count, generator=generator)
    return (parts + torch.rand(count, generator=generator)) / count
