"""The methods that look at the feature maps alone: they show what stands out, not why the model chose a class.

A (C, cells) is the matrix of one picture's feature maps. None of these methods reads gradients or scores, so they show
the same for every class.
"""

from __future__ import annotations

import math

from jaxtyping import Float

from camkit.methods.registry import Tensor, register_method, torch


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
    cells = tuple(range(2, maps.dim()))
    means = maps.mean(cells, keepdim=True)
    deviations = maps.std(cells, correction=0, keepdim=True)
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

_SAME_COMPONENT = 1e-6
"""How far the component's eigenvalue may be off, as a share of itself: little more than the rounding of the kernel."""


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
    variances, vectors = eigsh(kernel, k=1, which="LA", v0=start, tol=_SAME_COMPONENT)
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
