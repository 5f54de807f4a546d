"""The gradient methods, from feature maps A and gradients G = dS/dA to weights; and CAM, from class weights.

The index names are those of the papers: k is a channel, i and j are a cell, S is the score before the softmax. Weights
are computed in float32, whatever the precision of the pass. No method adds an epsilon: if a formula can divide by zero,
its docstring says what replaces the quotient.
"""

from __future__ import annotations

from jaxtyping import Float

from camkit.methods.registry import Tensor, register_method, torch

_CANCELLED = 1e-5
"""The share of its terms below which a sum over the channels counts as 0. Layer norms leave 1e-7 to 3e-6 in float32 and
in float64; real maps have 0.02 and more."""


def _cells(maps: Tensor) -> tuple[int, ...]:
    return tuple(range(2, maps.dim()))


@register_method(
    "gradcam",
    title="Grad-CAM",
    summary="the mean gradient of each channel; the standard choice",
    paper="Selvaraju et al. 2017, Grad-CAM, arXiv:1610.02391, Eq. 1",
    unit="Evidence in units of the score",
)
def gradcam(
    activations: Float[Tensor, "n c *grid"],  # noqa: ARG001 - every gradient method takes the same two tensors
    gradients: Float[Tensor, "n c *grid"],
) -> Float[Tensor, "n c *ones"]:
    """Weight channel k by the mean of G_kij over the cells."""
    return gradients.float().mean(_cells(gradients), keepdim=True)


@register_method(
    "gradcam++",
    title="Grad-CAM++",
    summary="positive gradients, weighted so that several instances of a class count equally",
    paper="Chattopadhay et al. 2018, Grad-CAM++, arXiv:1710.11063, Eq. 19",
    unit="Feature maps times weights from positive gradients",
)
def gradcam_plus_plus(
    activations: Float[Tensor, "n c *grid"], gradients: Float[Tensor, "n c *grid"]
) -> Float[Tensor, "n c *ones"]:
    """Weight channel k by the sum of alpha_kij ReLU(G_kij) over the cells.

    Eq. 19 with Y = exp(S) is alpha = G^2 / (2 G^2 + G^3 sum_ab A_kab). Dividing by G^2 gives 1 / (2 + G sum A), and
    only cells with G > 0 count. The factor exp(S) scales all weights equally and drops out of the scaled map. The
    formula depends on the scale of S, because it adds G sum A to 2.

    The paper derives the formula for feature maps after a ReLU. The sum here is therefore that of ReLU(A). With
    negative values, 2 + G sum A could cross 0, and near there noise would decide the map.
    """
    positive = gradients.float().relu()
    alpha = positive / (2 + positive * activations.float().relu().sum(_cells(activations), keepdim=True))
    return alpha.sum(_cells(gradients), keepdim=True)


@register_method(
    "hirescam",
    title="HiResCAM",
    summary="each cell's own gradient; shows exactly what a one-layer head used",
    paper="Draelos and Carin 2020, Use HiResCAM instead of Grad-CAM, arXiv:2011.08891",
    unit="Evidence in units of the score",
)
def hirescam(
    activations: Float[Tensor, "n c *grid"], gradients: Float[Tensor, "n c *grid"]
) -> Float[Tensor, "n c *grid"]:
    """Weight each cell of channel k by its own gradient G_kij.

    If only a layer norm reads the cells, as after the last block but one of a ViT that reads its class token, the score
    does not change with a cell's length: the sum of G A over the channels is 0, apart from rounding and the norm's
    epsilon. If no cell of a picture keeps more than a share ``_CANCELLED`` of its terms, the weights are 0.
    """
    weights = gradients.float()
    terms = weights * activations.float()
    largest, most = (maps.flatten(1).amax(1) for maps in (terms.sum(1).abs(), terms.abs().sum(1)))
    cancelled = largest <= max(torch.finfo(activations.dtype).eps, _CANCELLED) * most
    return weights.masked_fill(cancelled.reshape(-1, *[1] * (weights.dim() - 1)), 0)


@register_method(
    "xgradcam",
    title="XGrad-CAM",
    summary="the mean gradient of each channel, with the activations as weights",
    paper="Fu et al. 2020, Axiom-based Grad-CAM, arXiv:2008.02312",
    unit="Evidence in units of the score",
)
def xgradcam(
    activations: Float[Tensor, "n c *grid"], gradients: Float[Tensor, "n c *grid"]
) -> Float[Tensor, "n c *ones"]:
    """Weight channel k by the sum of G_kij A_kij / sum_ab A_kab over the cells.

    If a channel's sum is no larger than the rounding error of the pass (its precision times the sum of the absolute
    values), the weight is 0. The paper's maps follow a ReLU. If a layer has negative values and a channel sums to about
    0, noise can decide its weight.
    """
    maps = activations.float()
    total = maps.sum(_cells(maps), keepdim=True)
    precision = max(torch.finfo(kind).eps for kind in (activations.dtype, maps.dtype))
    rounding = precision * maps.abs().sum(_cells(maps), keepdim=True)
    mean = (gradients.float() * maps).sum(_cells(maps), keepdim=True) / total
    return mean.masked_fill(total.abs() <= rounding, 0)


@register_method(
    "layercam",
    title="LayerCAM",
    summary="positive gradients, cell by cell; stays sharp in early layers",
    paper="Jiang et al. 2021, LayerCAM, IEEE Transactions on Image Processing 30",
    unit="Evidence in units of the score",
)
def layercam(
    activations: Float[Tensor, "n c *grid"],  # noqa: ARG001 - every gradient method takes the same two tensors
    gradients: Float[Tensor, "n c *grid"],
) -> Float[Tensor, "n c *grid"]:
    """Weight each cell of channel k by ReLU(G_kij)."""
    return gradients.float().relu()


@register_method(
    "gradcam-elementwise",
    title="Grad-CAM element-wise",
    summary="the positive part of gradient times activation, cell by cell",
    paper="Pillai and Pirsiavash 2021, Explainable Models with Consistent Interpretations, AAAI 35(3)",
    unit="Evidence in units of the score",
)
def gradcam_elementwise(
    activations: Float[Tensor, "n c *grid"], gradients: Float[Tensor, "n c *grid"]
) -> Float[Tensor, "n c *grid"]:
    """Weight each cell of channel k by G_kij if G_kij A_kij > 0, else by 0: the map then sums ReLU(G_kij A_kij)."""
    weights = gradients.float()
    return weights.masked_fill(weights * activations.float() <= 0, 0)


@register_method(
    "finercam",
    title="Finer-CAM",
    summary="Grad-CAM of what tells the class from its three nearest classes",
    paper="Zhang et al. 2025, Finer-CAM, arXiv:2501.11309, with the paper's weight 0.6",
    finer=True,
    unit="Evidence in units of the score",
)
def finercam(
    activations: Float[Tensor, "n c *grid"], gradients: Float[Tensor, "n c *grid"]
) -> Float[Tensor, "n c *ones"]:
    """Weight channel k as Grad-CAM does, with S less 0.6 times the mean score of the three nearest classes."""
    return gradcam(activations, gradients)


@register_method(
    "shapleycam",
    title="ShapleyCAM",
    summary="the mean gradient, corrected by the curvature of the score",
    paper="Cai 2025, CAMs as Shapley Value-based Explainers, arXiv:2501.06261",
    needs="curvature",
    cost="1, and back through the head twice",
    unit="Evidence in units of the score",
)
def shapleycam(
    activations: Float[Tensor, "n c *grid"],  # noqa: ARG001 - the first argument of every method
    gradients: Float[Tensor, "n c *grid"],
    products: Float[Tensor, "n c *grid"],
) -> Float[Tensor, "n c *ones"]:
    """Weight channel k by the mean of G_kij - (H A)_kij / 2, with H the second derivatives of S.

    This is Grad-CAM where the head is piecewise linear in A, as a mean and one linear layer are.
    """
    return (gradients.float() - products.float() / 2).mean(_cells(gradients), keepdim=True)


@register_method(
    "refinecam",
    title="RefineCAM",
    summary="Grad-CAM++ at the last layer of each size of grid, multiplied; sharp",
    paper="Domeniconi et al. 2026, How to Evaluate and Refine your CAM, arXiv:2605.14641",
    cost="1, and back through most of the model",
    stages=True,
    unit="Feature maps times weights from positive gradients",
)
def refinecam(
    activations: Float[Tensor, "n c *grid"], gradients: Float[Tensor, "n c *grid"]
) -> Float[Tensor, "n c *ones"]:
    """Weight channel k of each layer as Grad-CAM++ does; the positive maps, each scaled to 1, are multiplied."""
    return gradcam_plus_plus(activations, gradients)


@register_method(
    "cam",
    title="CAM",
    summary="the weights of the linear layer; only for global average pooling followed by one linear layer",
    paper="Zhou et al. 2016, Learning Deep Features for Discriminative Localization, arXiv:1512.04150",
    needs="head",
    cost="1",
    unit="Evidence in units of the score",
)
def cam(activations: Float[Tensor, "n c *grid"], class_weights: Float[Tensor, "n c"]) -> Float[Tensor, "n c *ones"]:
    """Weight channel k by the class weight w_k (section 2): M(x, y) = sum_k w_k f_k(x, y), without the bias."""
    return class_weights.reshape(*class_weights.shape, *[1] * (activations.dim() - 2))
