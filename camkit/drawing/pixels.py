"""The pixels of a picture that Pillow holds, in strips of rows.

Pillow joins an array from many small pieces. Strips fit into the processor's cache, so that a large photo takes a
quarter of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import cv2
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


def size_within(size: tuple[int, ...], side: int) -> tuple[int, int]:
    """Return the height and width of a picture whose longer side becomes ``side``; its form stays the same."""
    height, width = (max(1, round(length * (side / max(size)))) for length in size)
    return height, width


def bytes_of(picture: Drawable) -> int:
    """Return how much memory a picture takes; Pillow keeps four bytes for each pixel."""
    return 4 * picture.width * picture.height if isinstance(picture, Image.Image) else picture.nbytes


def strips_into(drawn: Pixels, picture: Drawable) -> Iterator[tuple[int, Pixels]]:
    """Copy a picture into an array of its size, strip by strip.

    Yields:
        The number of the strip's first row, and the strip as a part of the array, to be drawn on.
    """
    height, width = size_of(picture)
    for top in range(0, height, _STRIP):
        bottom = min(top + _STRIP, height)
        strip = drawn[top:bottom]
        if isinstance(picture, Image.Image):
            with_padding = picture.crop((0, top, width, bottom)).tobytes("raw", "RGBX")
            pixels = np.frombuffer(with_padding, np.uint8).reshape(bottom - top, width, 4)
            cv2.cvtColor(pixels, cv2.COLOR_RGBA2RGB, dst=strip)
        else:
            strip[:] = picture[top:bottom]
        yield top, strip


def pixels_of(picture: Drawable) -> Pixels:
    """Return the pixels of a picture as an array; one that is made here is read-only, since several may share it."""
    if not isinstance(picture, Image.Image):
        return picture
    pixels = np.empty((picture.height, picture.width, 3), np.uint8)
    for _ in strips_into(pixels, picture):
        pass
    pixels.flags.writeable = False
    return pixels
