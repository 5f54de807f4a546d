"""Encodes pictures as image files and shrinks them, with OpenCV."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import cv2
import numpy as np

from camkit.errors import OutputError
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
    return png[:_PNG_HEAD] + _chunk(PNG_MARK) + png[_PNG_HEAD:]


def _chunk(content: bytes) -> bytes:
    """Return a chunk of a PNG; its content begins with its type, which the length does not count."""
    return struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))


_NOTE = b"tEXtComment\0"
"""The start of the PNG chunk with what a drawing shows."""

_MARKED_HEAD = _PNG_HEAD + len(_chunk(PNG_MARK))


def with_note(png: bytes, note: str) -> bytes:
    """Return a PNG that ``encode`` made, with an ASCII text about it after camkit's mark."""
    return png[:_MARKED_HEAD] + _chunk(_NOTE + note.encode("ascii")) + png[_MARKED_HEAD:]


def read_note(file: Path) -> str:
    """Return the text that ``with_note`` wrote into a file; "" if there is none, or no such file."""
    try:
        with file.open("rb") as start:
            head = start.read(_MARKED_HEAD + 4)
            content = start.read(struct.unpack(">I", head[_MARKED_HEAD:])[0] + 4)
    except (OSError, struct.error):
        return ""
    is_note = PNG_MARK in head and content.startswith(_NOTE)
    return content.removeprefix(_NOTE).decode("ascii", errors="replace") if is_note else ""


def shrink(pixels: Pixels, side: int) -> Pixels:
    """Return the picture with its longer side reduced to ``side`` pixels."""
    height, width = pixels.shape[:2]
    ratio = side / max(height, width)
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA))
