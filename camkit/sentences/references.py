"""The pictures with which a picture is compared: the user's, or smooth noise, at the size of the picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from camkit.errors import ImageError
from camkit.images.read import from_array, open_picture, upright
from camkit.images.references import MOST, chosen, smooth_noise
from camkit.types import ImageLike, ReferencesLike


def read(image: ImageLike, source: str) -> Image.Image:
    """Return a picture, upright and RGB.

    Raises:
        ImageError: it cannot be read, or is a tensor, which has passed the processor already.
    """
    if isinstance(image, Tensor):
        raise ImageError("words() gives the picture to the model's processor; pass a path, a PIL picture or an array")
    if isinstance(image, (str, Path)):
        return open_picture(image)
    return upright(image, source) if isinstance(image, Image.Image) else from_array(image)


def reference_pictures(references: ReferencesLike | None, picture: Image.Image) -> tuple[list[Image.Image], str]:
    """Return reference pictures at the size of a picture, and what they are, as a phrase.

    The picture itself may be in the folder of its references, and is left out.

    Raises:
        ImageError: there are none, or one cannot be read.
    """
    size = picture.size
    if references is None:
        width, height = size
        noise = smooth_noise(3 * MOST, (height, width)).reshape(MOST, 3, height, width)
        levels = (255 * noise).round().permute(0, 2, 3, 1).numpy().astype(np.uint8)
        return [Image.fromarray(each) for each in levels], f"{MOST} pictures of smooth noise, made by camkit"
    pictures, words = chosen(references)
    read_in = [read(each, f"reference picture {number}") for number, each in enumerate(pictures, start=1)]
    others = [each for each in read_in if each.size != size or each.tobytes() != picture.tobytes()]
    if not others:
        raise ImageError("the picture itself is the only reference picture; pass others")
    words += ", without this picture itself" if len(others) < len(read_in) else ""
    return [each.resize(size, Image.Resampling.BICUBIC) for each in others], words
