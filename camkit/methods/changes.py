"""The methods that run the head on changed feature maps, or the whole model on changed pictures.

Those of the head, the part of the model after the layer, take the feature maps of one picture (1, C, *grid) and a
function from changed feature maps (M, C, *grid) to the scores (M,) that the picture would have with them. The trunk is
not run again. Expected gradients take the gradients of such scores instead.

Those of the whole model take the feature maps of one picture, or for RISE the picture itself, and a function that
returns the scores (T, M) of changed pictures for T targets. Each returns a row for each target. A picture is masked by
multiplying the model's input, as in all four papers. So what is masked becomes the zero of the normalised input, which
for most preprocessings is the mean colour of the training pictures.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from jaxtyping import Bool, Float, Integer

from camkit.methods.registry import (
    Between,
    ScoresOfMaps,
    ScoresOfPictures,
    Tensor,
    Whole,
    register_method,
    torch,
)


def _portions(count: int, at_once: int) -> Iterator[range]:
    """Divide the numbers below ``count`` into portions of at most ``at_once``."""
    return (range(start, min(start + at_once, count)) for start in range(0, count, at_once))


def _scaled(maps: Float[Tensor, "m *cells"]) -> Float[Tensor, "m *cells"]:
    """Scale each map to 0..1; one that is the same everywhere becomes 0."""
    cells = tuple(range(1, maps.dim()))
    low, high = maps.amin(cells, keepdim=True), maps.amax(cells, keepdim=True)
    return (maps - low) / torch.where(high > low, high - low, 1)


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
    for portion in _portions(channels, head.at_once):
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
    masks = _scaled(activations[0])
    scores = [head(activations * masks[list(portion), None]) for portion in _portions(len(masks), head.at_once)]
    increases = torch.cat(scores) - head(torch.zeros_like(activations))
    varies = masks.flatten(1).any(1)
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
        [head(activations * masks[list(portion), None].to(activations)) for portion in _portions(cells, head.at_once)]
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


@register_method(
    "scorecam",
    title="Score-CAM",
    summary="the score if the picture is multiplied by one channel, for every channel",
    paper="Wang et al. 2020, Score-CAM, arXiv:1910.01279",
    needs="pictures",
    cost="1, and 1 for each channel",
    unit="Feature maps times the softmax of the scores",
)
def scorecam(activations: Float[Tensor, "1 c *grid"], scores: ScoresOfPictures) -> Float[Tensor, "t c *ones"]:
    """Weight channel k by softmax_k(S(X H_k) - S(X_b)), where H_k is channel k enlarged, and then scaled to 0..1.

    S is the score before the softmax, as in the paper's Algorithm 1. The score of the baseline X_b is the same for all
    channels and drops out of the softmax, so no baseline is run. A channel that is the same everywhere masks nothing
    and has no weight.
    """
    return _weights(activations, scores, lambda masks, _: masks)


@register_method(
    "sscam",
    title="SS-CAM",
    summary="Score-CAM, averaged over masks with noise",
    paper="Wang et al. 2020, SS-CAM, arXiv:2006.14255",
    needs="pictures",
    cost="1, and 35 for each channel",
    unit="Feature maps times the softmax of the scores",
    values={"samples": Whole(1), "sigma": Between(0.0)},
)
def sscam(
    activations: Float[Tensor, "1 c *grid"], scores: ScoresOfPictures, *, samples: int = 35, sigma: float = 2.0
) -> Float[Tensor, "t c *ones"]:
    """Weight channel k by softmax_k(mean_i S(X (H_k + e_i))), where e_i is Gaussian noise with deviation ``sigma``.

    This is the paper's second form, with noise on the normalised mask of the input. The noise depends on the number of
    the picture alone, so the map is the same in every run.
    """
    size, device = scores.image.shape[2:], activations.device

    def noisy(masks: Tensor, part: range) -> Tensor:
        generator = torch.Generator(device)
        noise = [torch.randn(size, generator=generator.manual_seed(number), device=device) for number in part]
        return masks + sigma * torch.stack(noise)

    return _weights(activations, scores, noisy, samples, samples)


@register_method(
    "iscam",
    title="IS-CAM",
    summary="Score-CAM, averaged over masks of growing strength",
    paper="Naidu et al. 2020, IS-CAM, arXiv:2010.03023",
    needs="pictures",
    cost="1, and 9 for each channel",
    unit="Feature maps times the softmax of the scores",
    values={"steps": Whole(2)},
)
def iscam(
    activations: Float[Tensor, "1 c *grid"], scores: ScoresOfPictures, *, steps: int = 10
) -> Float[Tensor, "t c *ones"]:
    """Weight channel k by softmax_k(mean_i S(M_i)), where M_i is the sum of X H_k j / N over j = 0..i-1, for i = 1..N.

    The steps add up, so the last pictures of the published N = 10 are 4.5 times as strong as X H_k. The first is black
    for every channel and drops out of the softmax, so it is not run.
    """
    strengths = torch.arange(1, steps, device=activations.device).cumsum(0) / steps

    def stronger(masks: Tensor, part: range) -> Tensor:
        step = [number % len(strengths) for number in part]
        return masks * strengths[step].reshape(-1, *[1] * (masks.dim() - 1))

    return _weights(activations, scores, stronger, len(strengths), steps)


@register_method(
    "rise",
    title="RISE",
    summary="the mean probability of random masks that show a pixel; needs neither layers nor gradients",
    paper="Petsiuk et al. 2018, RISE, arXiv:1806.07421",
    needs="pictures",
    cost="4001",
    layer=False,
    unit="Probability where the pixel is shown, less the mean",
    values={"masks": Whole(2), "cells": Whole(1), "kept": Between(0.0, 1.0)},
)
def rise(
    image: Float[Tensor, "1 c *size"],
    scores: ScoresOfPictures,
    *,
    masks: int = 4000,
    cells: int = 7,
    kept: float = 0.5,
) -> Float[Tensor, "t *size"]:
    """Give pixel x the value sum_i (P_i - mean P) M_i(x) / (N p), where P_i is the probability if mask M_i is applied.

    Eq. 6 of the paper has P_i instead of P_i - mean P, so that a pixel without influence has the mean probability. Here
    it has 0, and a pixel that lowers the probability is negative. A target without a probability has its score
    instead. A mask is a grid of ``cells`` along each axis, each 1 with probability p = ``kept``, else 0; it is enlarged
    to one cell more than the picture and cut out at a random place (section 3.2). Mask i depends on i alone, so the
    map is the same in every run.

    For a box of a detector, P_i is how well the boxes of the masked picture match it (Petsiuk et al. 2021, D-RISE,
    arXiv:2006.03204), which published 5,000 masks of 16 cells; see ``camkit.targets.places.SameBoxTarget``.
    """
    size = image.shape[2:]
    sides = [-(-side // cells) for side in size]
    larger = tuple((cells + 1) * side for side in sides)

    def made(part: range) -> Tensor:
        grids: list[Tensor] = []
        corners: list[list[int]] = []
        for number in part:
            generator = torch.Generator().manual_seed(number)
            grids.append((torch.rand([cells] * len(size), generator=generator) < kept).float())
            corners.append([int(torch.randint(side, (), generator=generator)) for side in sides])
        enlarged = scores.enlarge(torch.stack(grids).to(image.device), larger)
        crops = zip(enlarged, corners, strict=True)
        return torch.stack([whole[tuple(map(_slice, corner, size))] for whole, corner in crops])

    found = scores(masks, lambda part: image * made(part)[:, None], probabilities=True)
    return _summed(found - found.mean(1, keepdim=True), made) / (masks * kept)


@register_method(
    "occlusion",
    title="Occlusion",
    summary="what the score loses if a window covers a part of the picture; needs neither layers nor gradients",
    paper="Zeiler & Fergus 2014, Visualizing and Understanding Convolutional Networks, arXiv:1311.2901",
    needs="pictures",
    cost="1, and 1 for each place of the window: 169",
    layer=False,
    unit="Loss of the score where the pixel is covered",
    values={"window": Whole(1), "stride": Whole(1), "segments": Whole(2)},
)
def occlusion(
    image: Float[Tensor, "1 c *size"],
    scores: ScoresOfPictures,
    *,
    window: int | None = None,
    stride: int | None = None,
    segments: int | None = None,
) -> Float[Tensor, "t *size"]:
    """Give pixel x the mean of S(X) - S(X_i) over the places i of a window that covers x, where X_i is X covered there.

    The window has ``window`` pixels along each axis, by default a seventh of the shorter side, and moves by ``stride``
    pixels, by default half a window; the last places are cut off at the edge. With ``segments``, about this many
    regions of similar colour are covered one by one in its place (watershed from a regular grid).
    """
    size = image.shape[2:]
    if segments is not None:
        regions = _segments(image, segments)
        places: list[Any] = [regions == number for number in range(int(regions.max()) + 1)]
    else:
        length = window or max(1, round(min(size) / 7))
        step = stride or max(1, length // 2)
        starts = [range(0, max(side - length, 0) + step, step) for side in size]
        places = [tuple(_slice(start, length) for start in corner) for corner in itertools.product(*starts)]

    def covers(part: range) -> Bool[Tensor, "m *size"]:
        made = torch.zeros(len(part), *size, dtype=torch.bool, device=image.device)
        for mask, number in zip(made, part, strict=True):
            mask[places[number]] = True
        return made

    plain = scores(1, lambda _: image.clone())
    lost = plain - scores(len(places), lambda part: image * ~covers(part)[:, None])
    sums = _summed(torch.cat([lost, torch.ones_like(lost[:1])]), lambda part: covers(part).float())
    return sums[:-1] / sums[-1].clamp(min=1)


def _segments(image: Float[Tensor, "1 c h w"], count: int) -> Integer[Tensor, "h w"]:
    """Divide a picture into about ``count`` regions of similar colour, numbered from 0."""
    import cv2  # noqa: PLC0415 - only this method needs it
    import numpy as np  # noqa: PLC0415

    pixels = image[0].float().mean(0) if image.shape[1] not in (1, 3) else image[0].float()
    low, high = pixels.amin(), pixels.amax()
    levels = ((pixels - low) * (255 / (high - low).clamp(min=1e-12))).byte().reshape(-1, *image.shape[2:])
    colours = levels.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()
    height, width = colours.shape[:2]
    side = (height * width / count) ** 0.5
    numbers_of = [max(1, round(length / side)) for length in (height, width)]
    rows, columns = (
        ((np.arange(number) + 0.5) * length / number).astype(int)
        for number, length in zip(numbers_of, (height, width), strict=True)
    )
    seeds = np.zeros((height, width), np.int32)
    seeds[np.ix_(rows, columns)] = np.arange(1, len(rows) * len(columns) + 1).reshape(len(rows), -1)
    found = cv2.watershed(np.ascontiguousarray(colours), seeds)
    while (found < 1).any():  # a pixel on the line between regions belongs to the neighbour of the nearest colour
        labels, shades = np.pad(found, 1), np.pad(colours.astype(np.float32), ((1, 1), (1, 1), (0, 0)), mode="edge")
        shifts = [np.s_[row : row + height, column : column + width] for row in range(3) for column in range(3)]
        beside = np.stack([labels[shift] for shift in shifts])
        differs = np.stack([np.abs(shades[shift] - colours).sum(2) for shift in shifts])
        nearest = np.where(beside < 1, np.inf, differs).argmin(0)
        found = np.where(found < 1, np.take_along_axis(beside, nearest[None], 0)[0], found)
    _, numbers = np.unique(found, return_inverse=True)
    return torch.from_numpy(numbers.reshape(height, width)).to(image.device)


def _summed(values: Float[Tensor, "t m"], made: Callable[[range], Tensor]) -> Float[Tensor, "t *size"]:
    """Return the sum of M masks, times T values of each; ``made(part)`` makes those with the numbers in ``part``."""
    parts = _portions(values.shape[1], 64)  # 64 masks of 224 x 224 pixels take 13 MB
    sums = (torch.tensordot(values[:, part.start : part.stop], made(part), 1) for part in parts)
    total: Tensor = functools.reduce(torch.add, sums)
    return total


def _slice(start: int, length: int) -> slice:
    return slice(start, start + length)


def _weights(
    activations: Float[Tensor, "1 c *grid"],
    scores: ScoresOfPictures,
    change: Callable[[Tensor, range], Tensor],
    count: int = 1,
    total: int = 1,
) -> Float[Tensor, "t c *ones"]:
    """Weight each channel by the softmax of its summed scores, divided by ``total``, with its mask changed.

    A mask is the channel, enlarged to the picture's size, and scaled to 0..1.
    ``change(masks, part)`` returns the masks for the changed pictures with the numbers in ``part``; each channel has
    ``count`` of them in a row. A channel that is the same everywhere has no weight.
    """
    cells = activations[0].flatten(1)
    varying = cells.amax(1) > cells.amin(1)
    maps = activations[0, varying]

    def pictures(part: range) -> Tensor:
        first, last = part.start // count, (part.stop - 1) // count
        channels = [number // count - first for number in part]
        masks = _scaled(scores.enlarge(maps[first : last + 1].float()))
        return scores.image * change(masks[channels], part)[:, None]

    gained = scores(count * len(maps), pictures)
    weights = gained.new_zeros(len(gained), len(varying))
    weights[:, varying] = (gained.reshape(len(gained), len(maps), count).sum(2) / total).softmax(1)
    return weights.reshape(*weights.shape, *[1] * (activations.dim() - 2))
