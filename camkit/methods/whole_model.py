"""The methods that read the whole model: its gradients down to the picture, or the attention maps of a transformer.

The maps of the first have the picture's size.

The others go from attention maps to the relevance of tokens. A map A (N, heads, queries, keys) says how much each
token, as a query, takes from each other token, as a key; G is the gradient of the score with respect to it. All layers
have one map over all tokens; the last may be the map of an attention pool, whose queries are no tokens. ``rows``
(N, queries) says which queries of the last map the score is computed from, as weights that sum to 1. What comes back is
a value for each token (N, tokens), prefix tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence

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


_BACK = "1, and back through the model"


def _back_to_the_first_layer(
    rows: Float[Tensor, "n q"],
    mixes: Sequence[Float[Tensor, "n _ tokens"]],
    kept: Sequence[Float[Tensor, "n _"] | float],
) -> Float[Tensor, "n tokens"]:
    """Follow what the score is computed from back through the layers, along all paths with at least one attention.

    Layer l passes on ``mixes[l]`` by attention, and ``kept[l]`` of each token by its skip connection. The result is
    rows (M_L + K_L) ... (M_1 + K_1) - rows K_L ... K_1 with K = diag(kept). The path of skip connections alone is left
    out: on it, each token would speak for itself, whatever the model looks at. For a class token that changes nothing
    but the value of the class token itself.
    """
    skipped, relevance = rows, rows * 0
    for mix, keep in zip(reversed(mixes), reversed(kept), strict=True):
        mixed = ((skipped + relevance)[:, None] @ mix)[:, 0]
        pools = mix.shape[1] != mix.shape[2]  # the queries of an attention pool are no tokens, and skip nothing
        skipped, relevance = (mixed * 0, mixed) if pools else (skipped * keep, relevance * keep + mixed)
    return relevance


@register_method(
    "rollout",
    title="Attention rollout",
    summary="where attention leads, layer by layer, back to the patches; the same for every class",
    paper="Abnar and Zuidema 2020, Quantifying Attention Flow in Transformers, arXiv:2005.00928",
    needs="attention",
    cost="1, and back through the head",
    layer=False,
    unit="Share of attention",
)
def rollout(maps: Sequence[Float[Tensor, "n _ _ tokens"]], rows: Float[Tensor, "n q"]) -> Float[Tensor, "n tokens"]:
    """Multiply (A + I) / 2 of all layers, where A is the mean over the heads (section 4)."""
    means = [layer.mean(1) for layer in maps]
    shares = [0.5 if layer.shape[1] == layer.shape[2] else 1.0 for layer in means]
    mixes = [share * layer for share, layer in zip(shares, means, strict=True)]
    return _back_to_the_first_layer(rows, mixes, shares)


@register_method(
    "gradrollout",
    title="Gradient rollout",
    summary="attention rollout of attention times gradient",
    paper="Gildenblat 2020, Exploring Explainability for Vision Transformers, gradient attention rollout",
    needs="attention-gradients",
    cost=_BACK,
    layer=False,
    unit="Relevance by attention and gradients, without units",
)
def gradrollout(
    maps: Sequence[Float[Tensor, "n _ _ tokens"]],
    gradients: Sequence[Float[Tensor, "n _ _ tokens"]],
    rows: Float[Tensor, "n q"],
) -> Float[Tensor, "n tokens"]:
    """Multiply F + I of all layers, each row divided by its sum, where F is ReLU(mean of A G over the heads).

    The author's code also sets the smallest entries of F to zero, nine of ten by default; the formula does not.
    """
    fused = [(layer * gradient).mean(1).relu() for layer, gradient in zip(maps, gradients, strict=True)]
    kept = [1 / (1 + layer.sum(-1)) for layer in fused]
    mixes = [layer * keep[:, :, None] for layer, keep in zip(fused, kept, strict=True)]
    return _back_to_the_first_layer(rows, mixes, kept)


@register_method(
    "chefer",
    title="Generic attention relevance",
    summary="attention times gradient, positive in each head, added up through all layers",
    paper="Chefer et al. 2021, Generic Attention-model Explainability, arXiv:2103.15679, Eq. 5 and 6",
    needs="attention-gradients",
    cost=_BACK,
    layer=False,
    unit="Relevance by attention and gradients, without units",
)
def chefer(
    maps: Sequence[Float[Tensor, "n _ _ tokens"]],
    gradients: Sequence[Float[Tensor, "n _ _ tokens"]],
    rows: Float[Tensor, "n q"],
) -> Float[Tensor, "n tokens"]:
    """Update R to R + F R from layer to layer, starting with I, where F is the mean of ReLU(G A) over the heads."""
    fused = [(layer * gradient).relu().mean(1) for layer, gradient in zip(maps, gradients, strict=True)]
    return _back_to_the_first_layer(rows, fused, [1.0] * len(fused))


@register_method(
    "legrad",
    title="LeGrad",
    summary="how each block's own score would rise with more attention to a patch",
    paper="Bousselham et al. 2024, LeGrad, arXiv:2404.03214",
    needs="attention-by-layer",
    cost=f"{_BACK}, and the head once for each block",
    layer=False,
    unit="Gradient of the score with respect to attention",
)
def legrad(gradients: Sequence[Float[Tensor, "n _ _ tokens"]]) -> Float[Tensor, "n tokens"]:
    """Average ReLU(dS_l / dA_l) over heads and queries, and then over the layers l.

    S_l is the score of the mean of block l's tokens, put through the model's last normalisation and its head. In a
    model that ends in an attention pool, the pool reads the tokens of block l, and A_l is its map.
    """
    layers = [layer.relu().mean((1, 2)) for layer in gradients]
    return sum(layers[1:], layers[0]) / len(layers)
