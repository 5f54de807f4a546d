"""The methods that differentiate the whole model, down to the picture; their maps have the picture's size."""

from __future__ import annotations

from jaxtyping import Float

from camkit.methods.registry import GuidedGradients, PartsOfScore, Tensor, register_method, torch


@register_method(
    "fullgrad",
    title="FullGrad",
    summary="gradient times input, and gradient times bias of every layer, each as strong as the others",
    paper="Srinivas and Fleuret 2019, Full-Gradient Representation, arXiv:1905.00780",
    needs="parts",
    cost="1, and back through the whole model",
    layer=False,
    unit="Sum over the layers, each scaled to 0..1, without units",
)
def fullgrad(
    inputs: Float[Tensor, "n c *size"],  # noqa: ARG001 - every method takes what it explains
    score: PartsOfScore,
) -> Float[Tensor, "n *size"]:
    """Sum psi(gradient times input) and psi(gradient times bias) of every layer (Eq. 8).

    psi takes the absolute values, scales those of one layer to 0..1, all channels together as in the authors' code,
    sums over the channels, and enlarges. So the map has no sign, and no units.
    """
    total: Tensor | None = None
    for part in score.parts:
        sizes = part.float().abs()
        low, high = (
            bound(sizes.flatten(1), 1).reshape(-1, *[1] * (part.dim() - 1)) for bound in (torch.amin, torch.amax)
        )
        scaled = (sizes - low) / torch.where(high > low, high - low, 1)
        enlarged = score.enlarge(scaled.sum(1))
        total = enlarged if total is None else total + enlarged
    assert total is not None  # the input is always a part
    return total


@register_method(
    "guidedbackprop",
    title="guided backpropagation",
    summary="the gradient at the picture, from which each ReLU removes what is negative; hardly depends on the class",
    paper="Springenberg et al. 2015, Striving for Simplicity, arXiv:1412.6806",
    needs="guided",
    cost="1, and back through the whole model",
    layer=False,
    unit="Guided gradient of the score, largest over the colours",
)
def guidedbackprop(
    inputs: Float[Tensor, "n c *size"],  # noqa: ARG001 - as above
    guided: GuidedGradients,
) -> Float[Tensor, "n *size"]:
    """Give a pixel the largest absolute value of its guided gradient over the colours."""
    return guided.at_input.float().abs().amax(1)


@register_method(
    "guidedgradcam",
    title="Guided Grad-CAM",
    summary="guided backpropagation times the enlarged map of Grad-CAM",
    paper="Selvaraju et al. 2017, Grad-CAM, arXiv:1610.02391, section 3.2",
    needs="guided",
    cost="1, and back through the whole model twice",
    unit="Guided gradient times Grad-CAM",
)
def guidedgradcam(activations: Float[Tensor, "n c *grid"], guided: GuidedGradients) -> Float[Tensor, "n *size"]:
    """Multiply the map of guided backpropagation by ReLU(sum_k mean(G_k) A_k), enlarged to the picture's size."""
    assert guided.at_layer is not None
    cells = tuple(range(2, activations.dim()))
    maps = (guided.at_layer.float().mean(cells, keepdim=True) * activations.float()).sum(1)
    return guided.at_input.float().abs().amax(1) * guided.enlarge(maps.relu())
