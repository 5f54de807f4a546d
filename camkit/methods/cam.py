"""CAM, for a head of global average pooling and one linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtyping import Float

from camkit.methods.registry import register_method

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # keeps PyTorch out of `camkit methods`; the shapes are checked all the same


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
