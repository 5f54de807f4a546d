"""Encodes pictures as image files and shrinks them, with OpenCV."""

from __future__ import annotations

import cv2
import numpy as np

from camkit.errors import OutputError
from camkit.types import Pixels


def encode(pixels: Pixels, extension: str = ".png") -> bytes:
    """Return a picture as the bytes of an image file.

    Raises:
        OutputError: OpenCV cannot write this file type.
    """
    try:
        done, data = cv2.imencode(extension, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))
    except cv2.error:
        done = False
    if not done:
        raise OutputError(f"camkit cannot write pictures as {extension!r}; use .png, .jpg, .webp or .tiff")
    return bytes(data)


def shrink(pixels: Pixels, side: int) -> Pixels:
    """Return the picture with its longer side reduced to ``side`` pixels."""
    height, width = pixels.shape[:2]
    ratio = side / max(height, width)
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))
