"""Run the model once, and differentiate its head twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from camkit.engine.attach import nodes_behind
from camkit.engine.capture import (
    Pass,
    expand,
    features_of,
    is_absent,
    layouts_of,
    plain_scores,
)
from camkit.engine.cut import cut
from camkit.engine.features import Capture, Weigh, to_grid
from camkit.engine.interrupts import interruptible
from camkit.engine.passes import is_out_of_memory
from camkit.errors import MethodError
from camkit.targets.probabilities import passing_through
from camkit.targets.scores import Target

_NO_SECOND = ("torch::autograd::Error", "torch::autograd::NotImplemented")
"""PyTorch's nodes in the place of an operation that has no second derivative. It raises an error in most of them, but
skips a function that is marked as once differentiable."""


def capture_curvature(
    model: nn.Module,
    inputs: Float[Tensor, "n c *size"],
    targets: Sequence[Target],
    options: Pass,
    weigh: Weigh,
) -> Capture:
    """Run the model once; differentiate its head, and its gradients in the direction of the feature maps.

    The method gets the activations, the gradients and the products, each (N, C, *grid).

    Raises:
        LayerError, TargetError: as for ``capture``.
        MethodError: several layers are fused, or an operation of the head has no second derivative.
    """
    if len(options.modules) > 1:
        raise MethodError(
            "methods that need second derivatives explain one layer; name one, or use 'gradcam' or 'hirescam', which "
            "fuse several"
        )
    with (
        options.quiet(model, inputs.device),
        cut(options.modules) as tape,
        options.resizing(model) as resized,
        sdpa_kernel(SDPBackend.MATH),  # the faster kernels have no second derivative
        interruptible(),
    ):
        output = model(inputs.clone(memory_format=options.memory_format))
        layouts = layouts_of(tape, options, len(inputs), resized.padded or tuple(inputs.shape[2:]))
        single = expand(targets, output, len(inputs))
        ((ref, layout),) = layouts.items()
        saved = tape.layers[ref]
        saved.settle()
        maps = features_of(saved, layout, resized.extent)
        weights: list[Tensor] = []
        for target in single:
            scored = target(output, len(inputs))
            if is_absent(scored):
                weights.append(torch.zeros_like(maps.activations))
                continue
            with passing_through(scored.activation):
                gradients, products = _derivatives(scored.values.float(), cast("Tensor", saved.end), saved.output)
            derivatives = (to_grid(tensor, layout) for tensor in (gradients, products))
            weights.append(weigh(maps.activations, *derivatives))
        scores = plain_scores(single, output, len(inputs))
    return Capture((replace(maps, by_target=tuple(weights)),), scores, tuple(layouts.values()), bool(resized.padded))


def _derivatives(values: Tensor, end: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the scores, and the product of their second derivatives with the feature maps."""
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
            gradients, end, grad_outputs=maps.detach().to(gradients.dtype), retain_graph=True, allow_unused=True
        )[0]
    except RuntimeError as error:  # operations of other packages, such as torchvision's roi_align, raise their own
        if is_out_of_memory(error):
            raise
        raise refusal from error
    return gradients.detach(), torch.zeros_like(gradients) if products is None else products.detach()
