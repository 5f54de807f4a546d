"""Regions of a picture, followed through a preprocessing to the model's input."""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from camkit.engine.randomness import generators
from camkit.errors import InputError
from camkit.types import Preprocess

_LEAST_CONTRAST = 1e-12


_KEPT = 64
"""Sizes of pictures for which it is remembered what a preprocessing makes of black and white."""


_REPEATS = 8


@dataclass(frozen=True, eq=False)
class Shades:
    """What a preprocessing makes of black and of white: (C, H, W) each; every picture's pixel lies between the two."""

    black: Float[Tensor, "c h w"]
    white: Float[Tensor, "c h w"]

    @functools.cached_property
    def contrast(self) -> Float[Tensor, "c h w"]:
        """How far white is from black."""
        return self.white - self.black

    @functools.cached_property
    def view(self) -> Bool[Tensor, "h w"]:
        """Where the model sees the picture, and not padding."""
        contrast = self.contrast.abs().amax(0)
        return contrast > 0.5 * contrast.amax()

    @functools.cached_property
    def size_of_contrast(self) -> Float[Tensor, "h w"]:
        """The squares of the channels' contrasts, added up, and never zero."""
        return self.contrast.square().sum(0).clamp_min(_LEAST_CONTRAST)

    def pixels(self, tensor: Float[Tensor, "c h w"]) -> Float[Tensor, "c h w"]:
        """Return a model's input as brightness 0..1, padding black."""
        contrast = torch.where(self.contrast == 0, 1, self.contrast)
        return ((tensor - self.black) / contrast * self.view).clamp(0, 1)


_known: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], Shades]] = weakref.WeakKeyDictionary()


_lock = threading.Lock()


def shades(preprocess: Preprocess, size: tuple[int, int]) -> Shades:
    """Return what a preprocessing makes of black and white pictures of ``size`` (width, height).

    Raises:
        InputError: it makes the same of both, or draws random numbers, so regions cannot be followed through it.
    """
    try:
        with _lock:
            known = _known.setdefault(preprocess, {})
    except TypeError:  # cannot be weakly referenced, so is not remembered
        known = {}
    found = known.get(size)
    if found is None:
        before = generators()
        black, white = (_made(preprocess, Image.new("RGB", size, shade)) for shade in ("black", "white"))
        finite = bool(torch.isfinite(black).all() and torch.isfinite(white).all())
        if black.shape != white.shape or not finite or not bool((black != white).any()):
            raise InputError(
                "regions cannot be followed through this preprocessing: it makes the same of black and of white"
            )
        if generators() != before and not _is_steady(preprocess, size):
            raise InputError(
                "regions cannot be followed through this preprocessing: it does another thing each time; pass the one "
                "for evaluation, without random changes"
            )
        found = Shades(black, white)
        with _lock:
            while len(known) >= _KEPT:
                known.pop(next(iter(known)))
            known[size] = found
    return found


def _is_steady(preprocess: Preprocess, size: tuple[int, int]) -> bool:
    """Whether a preprocessing makes the same of a picture without symmetry each time."""
    across, down = np.meshgrid(*(np.linspace(0, end, side) for end, side in zip((155, 100), size, strict=True)))
    picture = Image.fromarray((across + down).astype(np.uint8)).convert("RGB")
    first = _made(preprocess, picture)
    return all(torch.equal(first, _made(preprocess, picture)) for _ in range(_REPEATS))


def _made(preprocess: Preprocess, picture: Image.Image) -> Float[Tensor, "c h w"]:
    tensor: Tensor = preprocess(picture)
    return (tensor[0] if tensor.dim() == 4 else tensor).detach().float().cpu()


def seen(region: Bool[np.ndarray, "H W"], preprocess: Preprocess) -> Float[Tensor, "h w"]:
    """Return how much of each pixel of the model's input a region of the picture covers, 0..1.

    The region goes through the preprocessing itself, as a picture of black and white.

    Raises:
        InputError: the preprocessing does more than resize, crop, pad and change colours.
    """
    size = (region.shape[1], region.shape[0])
    known = shades(preprocess, size)
    shown = _made(preprocess, Image.fromarray(np.where(region, 255, 0).astype(np.uint8)).convert("RGB"))
    if shown.shape != known.black.shape:
        raise InputError("regions cannot be followed through this preprocessing: the size of its output varies")
    share = ((shown - known.black) * known.contrast).sum(0) / known.size_of_contrast
    if float(share.min()) < -0.5 or float(share.max()) > 1.5 or not bool(torch.isfinite(share).all()):
        raise InputError(
            "regions cannot be followed through this preprocessing: it does more than resize, crop and change colours"
        )
    return share.clamp(0, 1) * known.view
