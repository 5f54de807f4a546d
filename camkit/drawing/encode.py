"""Encodes pictures as image files and shrinks them, with OpenCV."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from pathlib import Path

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


_VIDEO_NOTE = b"free" + PNG_MARK
"""The type of a box that MP4 players skip, and the start of the text in it."""


def add_video_note(file: Path, note: str) -> None:
    """Append an ASCII text about a video to its MP4 file, in a box that players skip.

    Raises:
        OSError: the file cannot be written.
    """
    content = _VIDEO_NOTE + note.encode("ascii")
    with file.open("ab") as end:
        end.write(struct.pack(">I", 4 + len(content)) + content)


def _read_video_note(file: Path) -> str:
    """Return the text of the first box that ``add_video_note`` wrote; "" if there is none."""
    with file.open("rb") as video:
        while len(head := video.read(8)) == 8:
            size = struct.unpack(">I", head[:4])[0]
            if size == 1:  # the size follows in 64 bits
                size = struct.unpack(">Q", video.read(8))[0] - 8
            if size < 8:
                return ""
            start = video.tell()
            if head[4:] == _VIDEO_NOTE[:4] and (head[4:] + video.read(len(PNG_MARK))) == _VIDEO_NOTE:
                return video.read(size - 8 - len(PNG_MARK)).decode("ascii", errors="replace")
            video.seek(start + size - 8)
    return ""


def read_note(file: Path) -> str:
    """Return the text that ``with_note`` or ``add_video_note`` wrote into a file; "" if there is none."""
    try:
        if file.suffix.lower() == ".mp4":
            return _read_video_note(file)
        with file.open("rb") as start:
            head = start.read(_MARKED_HEAD + 4)
            content = start.read(struct.unpack(">I", head[_MARKED_HEAD:])[0] + 4)
    except (OSError, struct.error):
        return ""
    is_note = PNG_MARK in head and content.startswith(_NOTE)
    return content.removeprefix(_NOTE).decode("ascii", errors="replace") if is_note else ""


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
