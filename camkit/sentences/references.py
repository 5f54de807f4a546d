"""The pictures with which a picture is compared: the user's, or some that camkit makes, at the size of the picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from camkit.drawing.pixels import size_within
from camkit.errors import ImageError
from camkit.images.read import from_array, open_picture, upright
from camkit.images.references import chosen, smooth_noise
from camkit.types import ImageLike, ReferencesLike

_EACH = 8
"""Pictures of noise, and plain ones, that stand for references."""

_LONGEST = 512
"""The longer side at which noise is made, in pixels; it is enlarged for larger pictures."""


def read(image: ImageLike, source: str) -> Image.Image:
    """Return a picture, upright and RGB.

    Raises:
        ImageError: it cannot be read, or is of another type, such as a tensor, which has passed the processor already.
    """
    if isinstance(image, (str, Path)):
        return open_picture(image)
    if isinstance(image, Image.Image):
        return upright(image, source)
    if not isinstance(image, np.ndarray):
        kind = type(image).__name__
        raise ImageError(f"{source} is of the type {kind}; pass a path, a PIL picture or an array, or a list of these")
    try:
        return from_array(image)
    except ImageError as error:
        raise ImageError(f"{source}: {error}") from None


def reference_pictures(references: ReferencesLike | None, picture: Image.Image) -> tuple[list[Image.Image], str]:
    """Return reference pictures at the size of a picture, and what they are, as a phrase.

    The picture itself may be in the folder of its references, and is left out.

    Raises:
        ImageError: there are none, or one cannot be read.
    """
    size = picture.size
    if references is None:
        return made_pictures(size), f"{_EACH} pictures of smooth noise and {_EACH} plain grey ones, made by camkit"
    pictures, words = chosen(references)
    read_in = [read(each, f"reference picture {number}") for number, each in enumerate(pictures, start=1)]
    others = [each for each in read_in if each.size != size or each.tobytes() != picture.tobytes()]
    if not others:
        raise ImageError("the picture itself is the only reference picture; pass others")
    words += ", without this picture itself" if len(others) < len(read_in) else ""
    return [each.resize(size, Image.Resampling.BICUBIC) for each in others], words


def made_pictures(size: tuple[int, int]) -> list[Image.Image]:
    """Return pictures (width, height) of smooth noise, each around a colour and with a contrast of its own, and greys.

    A model may say the same about all noise ("two things"), and something else about all plain pictures. A word that
    needs no picture is probable with both.
    """
    width, height = size_within(size, min(_LONGEST, max(size)))
    noise = smooth_noise(3 * _EACH, (height, width)).reshape(_EACH, 3, height, width)
    generator = torch.Generator().manual_seed(0)
    colours, contrasts = (torch.rand(_EACH, count, 1, 1, generator=generator) for count in (3, 1))
    varied = (colours + contrasts * (noise - noise.mean((2, 3), keepdim=True))).clamp(0, 1)
    levels = (255 * varied).round().permute(0, 2, 3, 1).numpy().astype(np.uint8)
    greys = np.linspace(0, 255, 2 * _EACH + 1).round().astype(int)[1::2].tolist()
    enlarged = (Image.fromarray(each).resize(size, Image.Resampling.BICUBIC) for each in levels)
    return [*enlarged, *(Image.new("RGB", size, (grey, grey, grey)) for grey in greys)]
