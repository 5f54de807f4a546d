"""Encodes pictures as image files and shrinks them, with OpenCV."""

from __future__ import annotations

import base64
import html
import io
import math
import struct
import zlib
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
from PIL import Image

from camkit.drawing.pixels import size_within, swap_red_and_blue
from camkit.errors import OutputError, advice, printable
from camkit.types import Pixels

MARK = b"Software\0camkit"
"""The text that names the program that wrote a file; camkit recognises its own drawings by it."""

JPEG_QUALITY = 90
"""Above it, files grow faster than the eye sees a difference; below it, the edges of a caption blur."""

_PDF_QUALITY = 95
"""The quality of the JPEG in a PDF, which is enlarged to a wall."""

_NOTE = b"Comment\0"
"""The start of the text that says what a drawing shows."""

_PNG_HEAD = 33
"""The length of a PNG's signature and header chunk, in bytes."""
_JPEG_HEAD = 20
"""The length of a JPEG's first two segments as OpenCV writes them: the start, and the JFIF header."""

JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")

_MOST_PIXELS = {**dict.fromkeys(JPEG_SUFFIXES, 65_500), ".webp": 16_383}
"""The most pixels along a side that a file of these types can have."""


def encode(pixels: Pixels, extension: str = ".png", *, overwrite: bool = False) -> bytes:
    """Return a picture as the bytes of an image file; a PNG or a JPEG says that camkit wrote it.

    ``overwrite`` allows the pixels to be changed, which saves a copy of a large picture.

    Raises:
        OutputError: OpenCV cannot write this file type, or no such file can be so large.
    """
    kind = extension.lower()
    most, longest = _MOST_PIXELS.get(kind, math.inf), max(pixels.shape[:2])
    if longest > most:
        raise OutputError(
            f"a file of the type {extension} has at most {most:,} pixels along a side, and this drawing has "
            f"{longest:,}; reduce it with {advice('max_side', '--max-side')}, or write it as .png"
        )
    options = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY] if kind in JPEG_SUFFIXES else []
    try:
        if overwrite and pixels.flags.writeable and pixels.flags.c_contiguous:
            swap_red_and_blue(swapped := pixels)
        else:
            swapped = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
        done, data = cv2.imencode(".jpg" if kind in JPEG_SUFFIXES else extension, swapped, options)
    except cv2.error:
        done = False
    if not done:
        raise OutputError(f"camkit cannot write pictures as {extension!r}; use .png, .jpg, .webp or .tiff")
    return _with_text(data.tobytes(), MARK)


def with_note(file: bytes, note: str) -> bytes:
    """Return a PNG or a JPEG that ``encode`` made, with an ASCII text about it after camkit's mark."""
    return _with_text(file, _NOTE + note.encode("ascii"), after=_text_of(file, MARK))


def _with_text(file: bytes, text: bytes, after: bytes = b"") -> bytes:
    """Return a PNG or a JPEG with a text after its header and after what already follows that; other files as they are.

    Other programs skip the text, and show it among the properties of a picture.
    """
    head = _head(file) + len(after)
    inserted = _text_of(file, text)
    return file[:head] + inserted + file[head:] if inserted else file


def _head(file: bytes) -> int:
    """Return the length of a file's header, which stands before all texts."""
    return _JPEG_HEAD if file.startswith(_JPEG) else _PNG_HEAD


def _text_of(file: bytes, text: bytes) -> bytes:
    """Return a text as the kind of file holds it: as a segment of a JPEG, or as a chunk of a PNG."""
    if file.startswith(_JPEG):
        return _JPEG_COMMENT + struct.pack(">H", len(text) + 2) + text
    return _chunk(b"tEXt" + text) if file.startswith(_PNG) else b""


_JPEG, _JPEG_COMMENT, _PNG = b"\xff\xd8", b"\xff\xfe", b"\x89PNG"


def _chunk(content: bytes) -> bytes:
    """Return a chunk of a PNG; its content begins with its type, which the length does not count."""
    return struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))


_VIDEO_NOTE = b"freetEXt" + MARK
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
            if head[4:] == _VIDEO_NOTE[:4] and (head[4:] + video.read(len(_VIDEO_NOTE) - 4)) == _VIDEO_NOTE:
                return video.read(size - 4 - len(_VIDEO_NOTE)).decode("ascii", errors="replace")
            video.seek(start + size - 8)
    return ""


def read_note(file: Path) -> str:
    """Return the text that ``with_note`` or ``add_video_note`` wrote into a file; "" if there is none."""
    try:
        if file.suffix.lower() == ".mp4":
            return _read_video_note(file)
        with file.open("rb") as start:
            texts = _texts(start.read(_LONGEST_START))
    except (OSError, struct.error):
        return ""
    is_note = texts[:1] == [MARK] and texts[1:2] and texts[1].startswith(_NOTE)
    return texts[1].removeprefix(_NOTE).decode("ascii", errors="replace") if is_note else ""


_LONGEST_START = 1 << 16
"""The bytes of a file in which its texts are: a segment of a JPEG can hold no more."""


def _texts(start: bytes) -> list[bytes]:
    """Return the texts that follow the header of a PNG or a JPEG."""
    texts: list[bytes] = []
    at = _head(start)
    if start.startswith(_JPEG):  # the kind of the segment, its length with these two bytes, the text
        while start[at : at + 2] == _JPEG_COMMENT:
            end = at + 2 + struct.unpack(">H", start[at + 2 : at + 4])[0]
            texts.append(start[at + 4 : end])
            at = end
    while start[at + 4 : at + 8] == b"tEXt":  # the length of the text, the kind of the chunk, the text, a checksum
        end = at + 8 + struct.unpack(">I", start[at : at + 4])[0]
        texts.append(start[at + 8 : end])
        at = end + 4
    return texts


def as_pdf(pixels: Pixels, dpi: int) -> bytes:
    """Return a picture as a PDF with one page."""
    page = io.BytesIO()
    Image.fromarray(pixels).save(page, "PDF", resolution=dpi, quality=_PDF_QUALITY)
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
