"""The methods that run the head, the part of the model after the layer, on changed feature maps.

Each takes the feature maps of one picture (1, C, *grid) and the head, a function from changed feature maps
(M, C, *grid) to the scores (M,) that the picture would have with them. The trunk is not run again. Expected gradients
take the gradients of such scores instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxtyping import Float

from camkit.methods.registry import ScoresOfMaps, Tensor, register_method, torch


def _portions(count: int, head: ScoresOfMaps) -> Iterator[range]:
    """Divide the numbers below ``count`` into as many as the head takes at once."""
    return (range(start, min(start + head.at_once, count)) for start in range(0, count, head.at_once))


@register_method(
    "ablationcam",
    title="Ablation-CAM",
    summary="how far the score falls if one channel is set to zero, for every channel",
    paper="Desai and Ramaswamy 2020, Ablation-CAM, WACV",
    needs="scores",
    cost="1, and the head once for each channel",
    unit="Feature maps times the fall of the score without each",
)
def ablationcam(activations: Float[Tensor, "1 c *grid"], head: ScoresOfMaps) -> Float[Tensor, "1 c *ones"]:
    """Weight channel k by S - S_k, where S_k is the score with channel k set to zero.

    The paper divides by S, which scales the map; if S is negative, it would also turn it round, so camkit does not.
    """
    channels = activations.shape[1]
    without: list[Tensor] = []
    for portion in _portions(channels, head):
        changed = activations.repeat(len(portion), *[1] * (activations.dim() - 1))
        changed[range(len(portion)), list(portion)] = 0
        without.append(head(changed))
    drops = head(activations.clone()) - torch.cat(without)
    return drops.reshape(1, channels, *[1] * (activations.dim() - 2))


@register_method(
    "feature-scorecam",
    title="Score-CAM in feature space",
    summary="the score if the feature maps are multiplied by one channel, for every channel",
    paper="after Wang et al. 2020, Score-CAM, arXiv:1910.01279, which multiplies the picture instead",
    needs="scores",
    cost="1, and the head once for each channel",
    unit="Feature maps times the softmax of the scores",
)
def feature_scorecam(activations: Float[Tensor, "1 c *grid"], head: ScoresOfMaps) -> Float[Tensor, "1 c *ones"]:
    """Weight channel k by softmax_k(S(A H_k) - S(0)), where H_k is channel k scaled to 0..1.

    Score-CAM does the same to the picture, with the channel enlarged. A channel that is the same everywhere masks
    nothing and has no weight.
    """
    maps = activations[0]
    cells = tuple(range(1, maps.dim()))
    low, high = maps.amin(cells, keepdim=True), maps.amax(cells, keepdim=True)
    masks = (maps - low) / torch.where(high > low, high - low, 1)
    scores = [head(activations * masks[list(portion), None]) for portion in _portions(len(masks), head)]
    increases = torch.cat(scores) - head(torch.zeros_like(activations))
    varies = (high > low).flatten()
    weights = increases.masked_fill(~varies, -torch.inf).softmax(0) if bool(varies.any()) else increases * 0
    return weights.reshape(1, -1, *[1] * (activations.dim() - 2))


@register_method(
    "reciprocam",
    title="Recipro-CAM",
    summary="the score if only one cell of the feature maps is kept, for every cell",
    paper="Byun and Lee 2022, Recipro-CAM, arXiv:2209.14074; for transformers 2023, ViT-ReciproCAM, arXiv:2310.02588",
    needs="scores",
    cost="1, and the head once for each cell",
    unit="Score with this cell alone, less the lowest",
)
def reciprocam(activations: Float[Tensor, "1 c *grid"], head: ScoresOfMaps) -> Float[Tensor, "1 *grid"]:
    """Give cell ij the score of the maps times a Gaussian of 3 x 3 cells around ij, minus the lowest such score.

    In a transformer the cells are the patches; the class token and other prefix tokens keep their values.
    """
    grid = activations.shape[2:]
    cells = grid.numel()
    masks = torch.eye(cells, device=activations.device).reshape(cells, *grid)
    for axis in range(1, masks.dim()):
        line = masks.movedim(axis, -1)
        padded = torch.nn.functional.pad(line, (1, 1))
        masks = (padded[..., :-2] / 4 + line / 2 + padded[..., 2:] / 4).movedim(-1, axis)
    scores = torch.cat(
        [head(activations * masks[list(portion), None].to(activations)) for portion in _portions(cells, head)]
    )
    return (scores - scores.amin()).reshape(1, *grid)


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
