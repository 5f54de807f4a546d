"""Encodes pictures as image files and shrinks them, with OpenCV."""

from __future__ import annotations

import base64
import html
import struct
import zlib

import cv2
import numpy as np

from camkit.errors import OutputError, printable
from camkit.types import Pixels

PNG_MARK = b"tEXtSoftware\0camkit"
"""The PNG chunk that names the program that wrote the file; camkit recognises its own drawings by it."""

_PNG_HEAD = 33
"""The length of a PNG's signature and header chunk, in bytes."""


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
    return _marked(bytes(data)) if extension.lower() == ".png" else bytes(data)


def _marked(png: bytes) -> bytes:
    """Return a PNG with camkit's mark after its header."""
    length, checksum = struct.pack(">I", len(PNG_MARK) - 4), struct.pack(">I", zlib.crc32(PNG_MARK))
    return png[:_PNG_HEAD] + length + PNG_MARK + checksum + png[_PNG_HEAD:]


def as_html(pixels: Pixels, words: str) -> str:
    """Return a picture as an element of an HTML page, with words for those who cannot see it."""
    data = base64.b64encode(encode(pixels)).decode()
    return f'<img alt="{html.escape(printable(words))}" style="max-width: 100%" src="data:image/png;base64,{data}">'


def shrink(pixels: Pixels, side: int) -> Pixels:
    """Return the picture with its longer side reduced to ``side`` pixels."""
    height, width = pixels.shape[:2]
    ratio = side / max(height, width)
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))
