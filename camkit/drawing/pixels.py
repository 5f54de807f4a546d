"""The pixels of a picture that Pillow holds, in strips of rows.

Pillow joins an array from many small pieces. Strips fit into the processor's cache, so that a large photo takes a
quarter of the time, and drawing strip by strip needs no array of the whole picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from PIL import Image

from camkit.types import Pixels

Drawable: TypeAlias = "Pixels | Image.Image"
"""A picture to draw on: an array, or an RGB picture of Pillow."""

_STRIP = 64
"""Rows of a strip: those of a photo of 12 megapixels take 0.8 MB."""


def size_of(picture: Drawable) -> tuple[int, int]:
    """Return the height and the width of a picture."""
    if isinstance(picture, Image.Image):
        return picture.height, picture.width
    height, width = picture.shape[:2]
    return height, width


def bytes_of(picture: Drawable) -> int:
    """Return how much memory a picture takes; Pillow keeps four bytes for each pixel."""
    return 4 * picture.width * picture.height if isinstance(picture, Image.Image) else picture.nbytes


def strips_of(picture: Drawable) -> Iterator[tuple[int, Pixels]]:
    """Yield strips of rows from the top down, each with the number of its first row."""
    height, width = size_of(picture)
    for top in range(0, height, _STRIP):
        bottom = min(top + _STRIP, height)
        if isinstance(picture, Image.Image):
            yield top, np.asarray(picture.crop((0, top, width, bottom)))
        else:
            yield top, picture[top:bottom]


def pixels_of(picture: Drawable) -> Pixels:
    """Return the pixels of a picture as an array; one that is made here is read-only, since several may share it."""
    if not isinstance(picture, Image.Image):
        return picture
    pixels = np.empty((picture.height, picture.width, 3), np.uint8)
    for top, strip in strips_of(picture):
        pixels[top : top + len(strip)] = strip
    pixels.flags.writeable = False
    return pixels
