"""Maps may be smoothed: as the mean over changed versions of a picture, and as a first principal component."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.engine.features import Features
from camkit.errors import LayerError, MethodError, advice, listing_layers
from camkit.methods.activations import first_component
from camkit.types import Smoothing

_FACTORS = (0.9, 1.0, 1.1)
"""What the normalised input is multiplied by: the factors of grad-cam's ``aug_smooth``."""

CHANGES = tuple((mirrored, factor) for mirrored in (False, True) for factor in _FACTORS if mirrored or factor != 1)
"""The changed versions of a picture: whether it is mirrored, and its factor. The picture itself is not among them."""

_SAME_SHARE = 1e-6
"""How far the middle of the input may lie from the middle of the grid, as a share of the grid: rounding."""


def averages(smooth: Smoothing | None) -> bool:
    """Tell whether maps are averaged over changed versions of the picture."""
    return smooth is not None and "augment" in smooth


def takes_component(smooth: Smoothing | None) -> bool:
    """Tell whether a map is the first principal component of the weighted feature maps."""
    return smooth is not None and "eigen" in smooth


def changed(inputs: Float[Tensor, "n c *size"], factor: float, *, mirrored: bool) -> Float[Tensor, "n c *size"]:
    """Return pictures mirrored along their last axis, and multiplied by a factor."""
    return (inputs.flip(-1) if mirrored else inputs) * factor


def check_mirrors(features: Sequence[Features]) -> None:
    """Refuse a grid that a mirrored picture would lie elsewhere on: the model pads its input on one side.

    Raises:
        LayerError: such a grid.
    """
    for maps in features:
        extent = () if maps.placement.positions else maps.placement.extent
        if extent and abs(sum(extent[-1]) - 1) > _SAME_SHARE:
            instead = advice("smooth='eigen'", "--smooth eigen")
            raise LayerError(
                "the model pads the picture on one side only, so the cells of its mirror image lie elsewhere; use "
                f"{instead}, or another layer ({listing_layers()})"
            )


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
