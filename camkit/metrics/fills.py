"""What replaces removed pixels: one function for each fill.

A fill is prepared once for a picture: ``FILLS[name](picture, seed)`` returns a function from masks (M, *size), True
where pixels are removed, to the changed pictures (M, C, *size).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from camkit.errors import InputError
from camkit.images.filling import fill_linearly, fill_smoothly

Remove: TypeAlias = Callable[[Tensor], Tensor]

BLUR = 0.05
"""Standard deviation of the Gaussian blur as a share of each side: 11 pixels of 224. On 20 photos it leaves SqueezeNet
0.6 % of its mean confidence, and MobileNetV2 less than 0.1 %; with the 5 pixels of Petsiuk et al., SqueezeNet keeps
5 %."""

ROAD_NOISE = 0.01
"""Standard deviation of ROAD's noise, as a share of the picture's: the authors' code adds 0.01 to pictures whose
standard deviation is 1."""


def _replaced(picture: Float[Tensor, "c *size"], other: Float[Tensor, "c *size"]) -> Remove:
    def filled(removed: Bool[Tensor, "m *size"]) -> Float[Tensor, "m c *size"]:
        return torch.where(removed[:, None], other, picture)

    return filled


def _draws(picture: Float[Tensor, "c *size"], seed: int) -> Float[Tensor, "c *size"]:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(picture.shape), np.float32))


def blurred(picture: Float[Tensor, "c *size"]) -> Float[Tensor, "c *size"]:
    """Return a picture after a Gaussian blur along each axis; beyond its edges, the nearest pixel repeats.

    The window reaches three standard deviations to each side.
    """
    for axis in range(1, picture.dim()):
        deviation = BLUR * picture.shape[axis]
        reach = max(1, round(3 * deviation))
        weights = np.exp(-((np.arange(-reach, reach + 1) / deviation) ** 2) / 2)
        lines = picture.movedim(axis, -1)
        rows = np.ascontiguousarray(lines.reshape(-1, lines.shape[-1]).numpy())
        mean = cv2.sepFilter2D(rows, -1, weights / weights.sum(), np.ones(1), borderType=cv2.BORDER_REPLICATE)
        picture = torch.from_numpy(mean.reshape(lines.shape)).movedim(-1, axis)
    return picture.contiguous()


def blur(picture: Float[Tensor, "c *size"], seed: int) -> Remove:  # noqa: ARG001 - nothing is drawn
    """Removed pixels come from the blurred picture."""
    return _replaced(picture, blurred(picture))


def mean(picture: Float[Tensor, "c *size"], seed: int) -> Remove:  # noqa: ARG001 - nothing is drawn
    """Removed pixels take the picture's mean colour."""
    return _replaced(picture, _channel(picture.flatten(1).mean(1), picture).expand_as(picture))


def noise(picture: Float[Tensor, "c *size"], seed: int) -> Remove:
    """Removed pixels are normal noise with the mean and the standard deviation of each channel of the picture."""
    middle, spread = picture.flatten(1).mean(1), picture.flatten(1).std(1, unbiased=False)
    return _replaced(picture, _channel(middle, picture) + _channel(spread, picture) * _draws(picture, seed))


def inpaint(picture: Float[Tensor, "c *size"], seed: int) -> Remove:  # noqa: ARG001 - nothing is drawn
    """Removed pixels are filled smoothly from what remains, as the background check does (Gortler et al. 1996, 3.4)."""
    if picture.dim() > 3:
        raise InputError("the fill 'inpaint' works on pictures and signals; choose 'blur', 'mean' or 'noise'")
    flat = picture if picture.dim() == 3 else picture[:, None]

    def filled(removed: Bool[Tensor, "m *size"]) -> Float[Tensor, "m c *size"]:
        made = [fill_smoothly(flat, hole.reshape(flat.shape[1:])).reshape(picture.shape) for hole in removed]
        return torch.stack(made)

    return filled


def linear(picture: Float[Tensor, "c *size"], seed: int) -> Remove:
    """Removed pixels are ROAD's noisy linear imputation: the weighted mean of their neighbours, and a little noise."""
    added = ROAD_NOISE * float(picture.std(unbiased=False)) * _draws(picture, seed)

    def filled(removed: Bool[Tensor, "m *size"]) -> Float[Tensor, "m c *size"]:
        return torch.stack([fill_linearly(picture, hole) + hole * added for hole in removed])

    return filled


def _channel(values: Float[Tensor, " c"], picture: Float[Tensor, "c *size"]) -> Tensor:
    return values.reshape(-1, *[1] * (picture.dim() - 1))


FILLS: Mapping[str, Callable[[Tensor, int], Remove]] = {
    "blur": blur,
    "mean": mean,
    "noise": noise,
    "inpaint": inpaint,
    "linear": linear,
}
"""The fills by name: ``fill=`` takes one of them."""
