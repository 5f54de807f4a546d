"""Follow regions of a picture through a preprocessing to the model's input."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from camkit.engine.guard import generators
from camkit.errors import InputError, as_error
from camkit.images.crop import is_deterministic
from camkit.types import Preprocess

_LEAST_CONTRAST = 1e-12
"""Keeps divisions by the contrast finite where the model sees padding: there black and white look the same."""

_KEPT = 64
"""So many different shades are kept."""

_TOLERANCE = 0.5
"""How far a region may overshoot 0 and 1. Bicubic and Lanczos resizing overshoot by less."""


@dataclass(frozen=True, eq=False)
class Shades:
    """The tensors (C, H, W) into which a preprocessing turns a black and a white picture.

    If the preprocessing only resizes, crops, pads and changes colours, every pixel of a picture lies between the two.
    """

    black: Float[Tensor, "c h w"]
    white: Float[Tensor, "c h w"]

    def equals(self, other: Shades) -> bool:
        """Whether black and white look the same."""
        return torch.equal(self.black, other.black) and torch.equal(self.white, other.white)

    @functools.cached_property
    def contrast(self) -> Float[Tensor, "c h w"]:
        """The difference between white and black."""
        return self.white - self.black

    @functools.cached_property
    def view(self) -> Bool[Tensor, "h w"]:
        """True where the model sees the picture, False where it sees padding."""
        contrast = self.contrast.abs().amax(0)
        return contrast > 0.5 * contrast.amax()

    @functools.cached_property
    def _scale(self) -> Float[Tensor, "c h w"]:
        """What turns a difference from black into brightness; zero where the model sees padding."""
        return torch.where(self.view & (self.contrast != 0), 1 / self.contrast, 0)

    def pixels(self, tensor: Float[Tensor, "c h w"]) -> Float[Tensor, "c h w"]:
        """Return a model's input as brightness from 0 to 1, with black padding."""
        return (tensor - self.black).mul_(self._scale).clamp_(0, 1)

    @functools.cached_property
    def _weights(self) -> Float[Tensor, "c h w"]:
        """The weight of each channel in the brightness, so that a channel with more contrast counts more."""
        return self.contrast / self.contrast.square().sum(0).clamp_min(_LEAST_CONTRAST)

    def brightness(self, tensor: Float[Tensor, "c h w"]) -> Float[Tensor, "h w"]:
        """Return the brightness of a black and white picture, without limits; near 0 where the model sees padding."""
        return (tensor - self.black).mul_(self._weights).sum(0)


class ShadesBySize:
    """The shades of one preprocessing, measured once for each size of picture.

    Pictures of all sizes have the same shades if the preprocessing crops and does not pad. These are kept once. Several
    threads may share one.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        self._preprocess = preprocess
        self._of_size: dict[tuple[int, int], Shades] = {}

    def of(self, size: tuple[int, int]) -> Shades:
        """Return the shades for a picture of ``size`` (width, height); errors are those of ``measure_shades``."""
        shades = self._of_size.get(size)
        if shades is None:
            measured = measure_shades(self._preprocess, size)
            different = {id(each): each for each in list(self._of_size.values())}.values()
            shades = next((each for each in different if each.equals(measured)), measured)
            if len(different) == _KEPT:
                self._of_size = {}
            self._of_size[size] = shades
        return shades


def measure_shades(preprocess: Preprocess, size: tuple[int, int]) -> Shades:
    """Return what a preprocessing makes of a black and a white picture of ``size`` (width, height).

    Raises:
        InputError: regions cannot be followed, because both become the same or the preprocessing is random.
    """
    before = generators()
    black, white = (_apply(preprocess, Image.new("RGB", size, colour)) for colour in ("black", "white"))
    finite = bool(torch.isfinite(black).all() and torch.isfinite(white).all())
    if black.shape != white.shape or not finite or not bool((black != white).any()):
        raise InputError(
            "regions cannot be followed through this preprocessing: black and white pictures become the same"
        )
    if generators() != before and not is_deterministic(functools.partial(_apply, preprocess), size):
        raise InputError(
            "regions cannot be followed through this preprocessing: its result is random; pass the preprocessing "
            "for evaluation, without augmentation"
        )
    return Shades(black, white)


def _apply(preprocess: Preprocess, picture: Image.Image) -> Float[Tensor, "c h w"]:
    said = "regions cannot be followed through this preprocessing: it fails on a picture that shows a region"
    with as_error(InputError, lambda error: f"{said} ({type(error).__name__})"):
        tensor: Tensor = preprocess(picture)
    return (tensor[0] if tensor.dim() == 4 else tensor).detach().float().cpu()


def preprocess_region(
    region: Bool[np.ndarray, "H W"], preprocess: Preprocess, shades: Shades | None = None
) -> Float[Tensor, "h w"]:
    """Return how much of each pixel of the model's input a region of the picture covers, from 0 to 1.

    The region passes through the preprocessing itself, as a black and white picture. ``shades`` are those of the
    preprocessing for a picture of this size; None measures them.

    Raises:
        InputError: the preprocessing does more than resize, crop, pad and change colours.
    """
    if shades is None:
        shades = measure_shades(preprocess, (region.shape[1], region.shape[0]))
    tensor = _apply(preprocess, Image.fromarray(np.where(region, 255, 0).astype(np.uint8)).convert("RGB"))
    if tensor.shape != shades.black.shape:
        raise InputError("regions cannot be followed through this preprocessing: the size of its output varies")
    share = shades.brightness(tensor)
    lowest, highest = torch.aminmax(share)  # NaN if any value is
    if not (lowest >= -_TOLERANCE and highest <= 1 + _TOLERANCE):
        raise InputError(
            "regions cannot be followed through this preprocessing: it does more than resize, crop, pad and change "
            "colours"
        )
    return share.clamp(0, 1) * shades.view


def extent(region: Bool[Tensor, "h w"]) -> tuple[int, int, int, int]:
    """Return the left, top, right and bottom of the box around a region, which must not be empty."""
    rows, columns = (torch.nonzero(region.any(axis)).flatten() for axis in (1, 0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
