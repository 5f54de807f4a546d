"""The methods that weight the feature maps of a layer: by gradients or class weights, or by the maps alone.

Most go from feature maps A and gradients G = dS/dA to weights. The index names are those of the papers: k is a channel,
i and j are a cell, S is the score before the softmax. Weights are computed in float32, whatever the precision of the
pass. No method adds an epsilon: if a formula can divide by zero, its docstring says what replaces the quotient.

The methods that look at the feature maps alone show what stands out, not why the model chose a class: they read neither
gradients nor scores, so they show the same for every class. For them, A (C, cells) is the matrix of one picture's maps.
"""

from __future__ import annotations

import math

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


def _scaled(maps: Float[Tensor, "n c *grid"]) -> Float[Tensor, "n c cells"]:
    """Return each picture's maps in float32 with a largest absolute value of 1, so that no product overflows.

    Values that are not finite become 0: eigenvectors of them do not exist.
    """
    cells = maps.float().flatten(2).nan_to_num(0, 0, 0)
    largest = cells.abs().amax((1, 2), keepdim=True)
    scaled: Tensor = cells / torch.where(largest > 0, largest, 1)
    return scaled


def first_component(maps: Float[Tensor, "n c *grid"]) -> Float[Tensor, "n c *ones"]:
    """Return each picture's first right singular vector of its maps (cells x channels), as weights of the channels.

    A singular vector has no sign of its own. It gets the sign with which the projection is positive on average, so that
    the map shows where the maps are strong. If that average is only rounding error, as after an instance norm, the sign
    of ``_skewness`` decides.
    """
    cells = _scaled(maps)
    # The vector is an eigenvector of the smaller of the two products of the matrix with itself.
    if cells.shape[1] <= cells.shape[2]:
        vectors = torch.linalg.eigh(cells @ cells.mT).eigenvectors[:, :, -1]
    else:
        left = torch.linalg.eigh(cells.mT @ cells).eigenvectors[:, :, -1]
        vectors = torch.nn.functional.normalize((cells @ left[:, :, None])[:, :, 0], dim=1)
    projections = (vectors[:, None] @ cells)[:, 0]
    sums, rounding = projections.sum(1), (vectors.abs()[:, None] @ cells.abs()).sum((1, 2))
    precision = max(torch.finfo(kind).eps for kind in (maps.dtype, cells.dtype))
    sums = torch.where(sums.abs() > precision * rounding, sums, _skewness(projections))
    signed: Tensor = vectors * torch.where(sums < 0, -1, 1)[:, None]
    return signed.reshape(*signed.shape, *[1] * (maps.dim() - 2))


def _skewness(projections: Float[Tensor, "*n cells"]) -> Float[Tensor, "*n"]:
    """Return a number with the sign of the projections' skewness: it is positive if few cells lie far above the others.

    It gives a component its sign if a normalisation has made the feature maps equally strong everywhere. An object that
    stands out usually covers fewer cells than the rest of the picture.
    """
    third: Tensor = (projections - projections.mean(-1, keepdim=True)).pow(3).sum(-1)
    return third


@register_method(
    "eigencam",
    title="Eigen-CAM",
    summary="the first principal direction of the feature maps; the same for every class",
    paper="Muhammad and Yeasin 2020, Eigen-CAM, arXiv:2008.00299",
    needs="activations",
    cost="1",
    unit="First principal component, in units of the feature maps",
)
def eigencam(activations: Float[Tensor, "n c *grid"]) -> Float[Tensor, "n c *ones"]:
    """Weight the channels by the first right singular vector of the maps (cells x channels): M = A V_1."""
    return first_component(activations)


@register_method(
    "eigengradcam",
    title="EigenGrad-CAM",
    summary="the first principal direction of gradient times activation",
    paper="Muhammad and Yeasin 2020, Eigen-CAM, with the maps weighted by their gradients",
    unit="Evidence in units of the score",
)
def eigengradcam(
    activations: Float[Tensor, "n c *grid"], gradients: Float[Tensor, "n c *grid"]
) -> Float[Tensor, "n c *grid"]:
    """Project G_kij A_kij on its own first right singular vector V_1: cell by cell, the weight is G_kij V_1k."""
    return gradients.float() * first_component(gradients.float() * activations.float())


@register_method(
    "fem",
    title="FEM",
    summary="cells that are far above their channel's mean; the same for every class",
    paper="Fuad et al. 2020, Features Understanding in 3D CNNs for Actions Recognition in Video, FEM",
    needs="activations",
    cost="1",
    unit="Sum of channel means, in units of the feature maps",
)
def fem(activations: Float[Tensor, "n c *grid"]) -> Float[Tensor, "n *grid"]:
    """Sum over the channels B_k mean(A_k): B_k is 1 in cells above the mean plus two standard deviations, else 0."""
    maps = activations.float()
    means = maps.mean(_cells(maps), keepdim=True)
    deviations = maps.std(_cells(maps), correction=0, keepdim=True)
    return ((maps > means + 2 * deviations) * means).sum(1)


@register_method(
    "kpcacam",
    title="KPCA-CAM",
    summary="the first kernel principal component of the cells; the same for every class",
    paper="Karmani et al. 2024, KPCA-CAM, arXiv:2410.00267, with the sigmoid kernel",
    needs="activations",
    cost="1, and each cell compared with each other",
    unit="First kernel principal component, without units",
)
def kpcacam(activations: Float[Tensor, "n c *grid"]) -> Float[Tensor, "n *grid"]:
    """Project the cells on their first kernel principal component, with the kernel tanh(x y / C + 1).

    x and y are the channels of two cells, less their mean over all cells, and C is the number of channels. A component
    has no sign of its own. It gets the sign with which it rises with the sum of a cell's channels. If that sum differs
    between cells by rounding error only, as after a layer norm, the component gets the sign with which it is skewed to
    positive values: few cells lie far above the others.
    """
    # In float32, rounding would hide the differences of small features; MPS has no float64.
    exact = activations.float() if activations.device.type == "mps" else activations.double()
    precision = torch.finfo(activations.dtype).eps
    maps = [_first_kernel_component(cells.mT, precision) for cells in exact.flatten(2)]
    return torch.stack(maps).reshape(len(maps), *activations.shape[2:]).float()


_FEW_CELLS = 256
"""The kernel of so few cells is decomposed whole: that takes 10 ms, and SciPy takes longer to import."""


def _first_kernel_component(cells: Float[Tensor, "cells c"], precision: float) -> Float[Tensor, " cells"]:
    """Return the projection of each cell of one picture; NaN if a value is not finite, and there is no component."""
    if not bool(cells.isfinite().all()):
        return torch.full_like(cells[:, 0], torch.nan)
    if bool((cells == cells[0]).all()):
        return torch.zeros_like(cells[:, 0])
    sizes = cells.abs().sum(1)
    cells = cells - cells.mean(0)
    if len(cells) <= _FEW_CELLS:
        variances, vectors = torch.linalg.eigh(_centred_kernel(cells))
        variance, vector = float(variances[-1]), vectors[:, -1]
    else:
        variance, vector = _largest(cells)
    projection: Tensor = vector * math.sqrt(max(variance, 0.0))
    rises = projection @ cells.sum(1)
    if rises.abs() <= precision * (projection.abs() @ sizes):
        rises = _skewness(projection)
    return -projection if bool(rises < 0) else projection


def _centred_kernel(cells: Float[Tensor, "cells c"]) -> Float[Tensor, "cells cells"]:
    kernel = (cells @ cells.mT).div_(cells.shape[1]).add_(1).tanh_()
    return kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()


def _largest(cells: Float[Tensor, "cells c"]) -> tuple[float, Float[Tensor, " cells"]]:
    """Return the largest eigenvalue of the centred kernel, and its eigenvector, by the Lanczos method.

    It takes less time for many cells.
    """
    import numpy as np  # noqa: PLC0415 - only this method needs it
    from scipy.sparse.linalg import eigsh  # noqa: PLC0415

    start = np.random.default_rng(0).standard_normal(len(cells))
    kernel = _centred_kernel(cells).double().numpy(force=True)
    if not (kernel @ start).any():  # the cells differ by less than rounding
        return 0.0, torch.zeros_like(cells[:, 0])
    # The eigenvalue may be off by this share of itself, little more than the rounding of the kernel
    variances, vectors = eigsh(kernel, k=1, which="LA", v0=start, tol=1e-6)
    return float(variances[0]), torch.from_numpy(vectors[:, 0]).to(cells)


class KeptMaps:
    """The weights of a method without heat, which keeps the feature maps of the pictures explained with it.

    Attributes:
        maps: (C, *grid) of each picture, on the CPU; of each picture and layer if several layers are fused.
    """

    def __init__(self) -> None:
        self.maps: list[Tensor] = []

    def __call__(self, activations: Float[Tensor, "n c *grid"]) -> Float[Tensor, "n *grid"]:
        """Keep the feature maps of a batch, and return a map without heat."""
        self.maps.extend(activations.detach().cpu())
        return activations.new_zeros(activations[:, 0].shape)
