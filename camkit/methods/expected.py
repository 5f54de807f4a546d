"""Expected gradients: gradients on the way from the feature maps of reference pictures to those of a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtyping import Float

from camkit.methods.registry import register_method

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # keeps PyTorch out of `camkit methods`; the shapes are checked all the same


@register_method(
    "expected",
    title="Expected gradients",
    summary="what each cell adds to the score, compared with reference pictures; the cells sum to the difference",
    paper="Erion et al. 2021, Improving performance of deep learning models with axiomatic attribution priors and "
    "expected gradients, Nature Machine Intelligence 3, arXiv:1906.10670, on feature maps",
    needs="references",
    cost="1, and the head and back once for each of 16 references",
    unit="Part of the score's difference from references",
)
def expected(
    activations: Float[Tensor, "1 c *grid"],
    references: Float[Tensor, "m c *grid"],
    gradients: Float[Tensor, "m c *grid"],
) -> Float[Tensor, "1 *grid"]:
    """Give cell ij the mean over the references B of sum_k (A_kij - B_kij) dS/dA_kij, taken at B + a (A - B).

    Each reference has one a, and together they lie evenly in (0, 1). S of a class is its log-odds: its logit minus the
    logarithm of the summed exponentials of the others, so that evidence against a rival counts as evidence for the
    class. S of any other target is its score. The cells sum to S minus its mean over the references, except for three
    parts, which ``Explanation.references`` and ``Explanation.residual`` report:

    - Tokens that are not cells, such as a class token, take part in the step from B to A, and get a share of the
      difference that no cell shows. From the last blocks of a ViT, it is almost all of it.
    - A path beside the layer, such as a skip connection, keeps the values of the picture.
    - A mean over 16 references estimates an integral.
    """
    return ((activations.float() - references.float()) * gradients.float()).sum(1).mean(0, keepdim=True)
