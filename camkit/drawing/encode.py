"""Turns pictures into arrays of pixels, and arrays into image files."""

from __future__ import annotations

import base64
import html
import io
import struct
import zlib
from pathlib import Path
from typing import Literal, TypeAlias

import cv2
import numpy as np
from PIL import Image

from camkit.errors import OutputError, printable
from camkit.types import Pixels

MARK = b"Software\0camkit"
"""The text that names the program that wrote a file; camkit recognises its own drawings by it."""

JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")


def encode(pixels: Pixels, extension: str = ".png") -> bytes:
    """Return a picture as the bytes of an image file; a PNG or a JPEG says that camkit wrote it.

    Raises:
        OutputError: OpenCV cannot write this file type, or no such file can be so large.
    """
    kind = extension.lower()
    # Above this quality, files grow faster than the eye sees a difference; below it, the edges of a caption blur
    options = [cv2.IMWRITE_JPEG_QUALITY, 90] if kind in JPEG_SUFFIXES else []
    try:
        swapped = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
        done, data = cv2.imencode(".jpg" if kind in JPEG_SUFFIXES else extension, swapped, options)
    except cv2.error:
        done = False
    if not done:
        raise OutputError(f"camkit cannot write this picture as {extension!r}; use .png, .jpg, .webp or .tiff")
    file = data.tobytes()
    head, mark = len(file), b""
    if file.startswith(b"\xff\xd8"):
        head = 20  # a JPEG's first two segments as OpenCV writes them: the start, and the JFIF header
        mark = b"\xff\xfe" + struct.pack(">H", len(MARK) + 2) + MARK  # a segment's kind, its length with this, the text
    elif file.startswith(b"\x89PNG"):
        head, chunk = 33, b"tEXt" + MARK  # a PNG's signature and its header chunk
        mark = struct.pack(">I", len(MARK)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return file[:head] + mark + file[head:]


def mark_video(file: Path) -> None:
    """Append camkit's mark to an MP4 file, in a box that players skip.

    Raises:
        OSError: the file cannot be written.
    """
    with file.open("ab") as end:
        end.write(struct.pack(">I", 8 + len(MARK)) + b"free" + MARK)


def as_pdf(pixels: Pixels, dpi: int) -> bytes:
    """Return a picture as a PDF with one page."""
    page = io.BytesIO()
    # The quality is that of the JPEG in the PDF, which is enlarged to a wall
    Image.fromarray(pixels).save(page, "PDF", resolution=dpi, quality=95)
    return page.getvalue()


def as_html(pixels: Pixels, words: str) -> str:
    """Return a picture as an element of an HTML page, with words for those who cannot see it."""
    return f'<img alt="{html.escape(printable(words))}" style="max-width: 100%" src="{as_address(pixels, "png")}">'


def as_address(pixels: Pixels, kind: Literal["png", "jpeg", "webp"]) -> str:
    """Return a picture as the address of an HTML page's element, which has all its data."""
    return f"data:image/{kind};base64,{base64.b64encode(encode(pixels, f'.{kind}')).decode()}"


def shrink(pixels: Pixels, side: int) -> Pixels:
    """Return the picture with its longer side reduced to ``side`` pixels."""
    size = size_within(pixels.shape[:2], side)
    return np.asarray(cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_AREA))


Drawable: TypeAlias = "Pixels | Image.Image"
"""A picture to draw on: an array, or an RGB picture of Pillow."""


def size_of(picture: Drawable) -> tuple[int, int]:
    """Return the height and the width of a picture."""
    height, width = picture.size[::-1] if isinstance(picture, Image.Image) else picture.shape[:2]
    return height, width


def size_within(size: tuple[int, ...], side: int) -> tuple[int, int]:
    """Return the height and width of a picture whose longer side becomes ``side``; its form stays the same."""
    height, width = (max(1, round(length * (side / max(size)))) for length in size)
    return height, width


def bytes_of(picture: Drawable) -> int:
    """Return how much memory a picture takes; Pillow keeps four bytes for each pixel."""
    return 4 * picture.width * picture.height if isinstance(picture, Image.Image) else picture.nbytes


def pixels_of(picture: Drawable) -> Pixels:
    """Return the pixels of a picture as an array; that of a Pillow picture is read-only."""
    return np.asarray(picture)
