"""What a file is by its name and its first bytes, and writing files completely or not at all."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from camkit.drawing.encode import JPEG_SUFFIXES, MARK, encode
from camkit.errors import InputError, OutputError, as_error
from camkit.types import Pixels

PICTURE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".png", ".apng", ".webp", ".avif", ".gif", ".bmp", ".dib"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".qoi", ".heic", ".heif", ".hif", ".dcm"),
)
"""The files of a folder that are pictures. A file that is named explicitly may have any suffix."""

_DRAWN_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".mp4")
"""Types of files that camkit draws into."""


def refuse_address(name: str) -> None:
    """Refuse a URL, which is not a file.

    Raises:
        InputError: the name is an address.
    """
    sentence = None if os.path.lexists(name) else about_address(name)
    if sentence is not None:
        raise InputError(sentence)


def about_address(name: str) -> str | None:
    """Return a sentence about the address of a page; None for any other name."""
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}\w", name):  # Path makes one slash of two; a drive has one letter
        return None
    address = re.sub(":/+", "://", name, count=1)
    return f"{address} is a URL, but camkit reads only files; download the picture and pass the file"


def names_file(out: Path) -> bool:
    """Return whether an output path names a picture file and not a folder."""
    return out.suffix.lower() in _DRAWN_SUFFIXES and not out.is_dir()


def refuse_other_file(out: Path) -> None:
    """Refuse an output path that looks like a file of another type than a picture's.

    Raises:
        InputError: the path ends in a dot and three or four letters, is no folder that exists, and is no picture.
    """
    # Names of folders rarely end in a dot and three or four letters, and names of files nearly always do.
    if re.fullmatch(r"\.[A-Za-z]{3,4}", out.suffix) and not names_file(out) and not out.is_dir():
        raise InputError(
            f"{out}: camkit cannot write {out.suffix}; use {', '.join(_DRAWN_SUFFIXES[:3])} or another type of "
            "picture, or name a folder without a dot"
        )


def has_picture_suffix(name: str) -> bool:
    """Return whether a file in a folder is a picture by its name."""
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES  # noqa: PTH122 - for names of millions of files


def is_drawing(file: Path) -> bool:
    """Return whether camkit drew a file, by the mark in its first bytes, or in the last ones of a video."""
    suffix = file.suffix.lower()
    if suffix not in (".png", ".mp4", *JPEG_SUFFIXES) or not is_regular(file):
        return False
    with contextlib.suppress(OSError), file.open("rb") as data:  # reading it as a picture reports the error
        if suffix == ".mp4":
            data.seek(-len(MARK), os.SEEK_END)
        return MARK in data.read(128)  # it follows the header of at most 33 bytes
    return False


def is_regular(file: Path) -> bool:
    """Return whether a path is an ordinary file: reading a pipe or a device might never end."""
    return os.path.isfile(file)  # noqa: PTH113 - pathlib's raises for names that no file can have


def files_in(folder: Path, suffixes: Sequence[str], *, deep: bool = True) -> list[Path]:
    """List the ordinary files in a folder that have one of these suffixes, sorted; none if there is no such folder.

    ``deep`` includes its subfolders; links to folders are not followed.

    Raises:
        InputError: a folder cannot be listed, so its files would be missing unnoticed.
    """
    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_refuse_unreadable):
        folders[:] = folders if deep else []
        files += [Path(parent, name) for name in names if Path(name).suffix.lower() in suffixes]
    return sorted(filter(is_regular, files))


def _refuse_unreadable(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise InputError(f"the folder {error.filename} cannot be read: {error.strerror or error}") from error


def refuse_input(out: Path, inputs: Iterable[Path | None]) -> None:
    """Refuse to write to a file that is also read, even through a link or under another name.

    Raises:
        OutputError: ``out`` is one of the inputs.
    """
    for given in inputs:
        with contextlib.suppress(OSError):  # one of them does not exist
            if given is not None and os.path.samefile(out, given):  # noqa: PTH121 - pathlib's fails in the same way
                raise OutputError(
                    f"{out} is also an input ({given}), so camkit does not replace it; write to another file"
                )


def write_picture(path: str | Path, drawn: Pixels) -> Path:
    """Write a picture as ``write_file`` does, in the type that the suffix says; without one, as a PNG.

    Raises:
        OutputError: the path has no file name, its type is unknown, or as ``write_file``.
    """
    path = Path(path)
    if not path.name:
        raise OutputError(f"{str(path)!r} is not a file name; pass a path such as 'heatmap.png'")
    write_file(path, encode(drawn, path.suffix or ".png"))
    return path


def write_file(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file completely or not at all: an older file of that name stays until the new one is complete.

    Raises:
        OutputError: the folder cannot be created or written to.
    """
    unfinished = path.with_name(f".camkit-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("xb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {why_unwritable(path, error)}") from error


def csv_line(cells: Iterable[Any]) -> bytes:
    """Return cells as a line of a CSV file.

    A writer quotes only those control characters that may end its lines. This one ends them in a carriage return and a
    line feed, so that both are quoted in names; the line itself then ends in a line feed alone.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue().removesuffix("\r\n").encode() + b"\n"


def why_unwritable(path: Path, error: Exception) -> str:
    """Return why a file or folder cannot be written, as words: the system does not say which part of its path it is."""
    for parent in path.parents:
        if is_regular(parent):
            return f"{parent} is a file, not a folder"
    return getattr(error, "strerror", None) or str(error)


def set_aside(folder: Path, names: Iterable[str]) -> None:
    """Rename files of an earlier run, so that ``report.json`` is kept as ``before-report.json``.

    Raises:
        OutputError: a file cannot be renamed.
    """
    with as_error(OutputError, lambda error: f"cannot write into {folder}: {why_unwritable(folder, error)}"):
        for name in names:
            if (folder / name).exists():
                (folder / name).replace(folder / f"before-{name}")


def check_folder(folder: Path) -> None:
    """Check that files can be written into a folder, or that it can be created, without creating it.

    Raises:
        OutputError: the folder cannot be created or written to.
    """
    with as_error(OutputError, lambda error: f"cannot write into the folder {folder}: {why_unwritable(folder, error)}"):
        tempfile.TemporaryFile(dir=next(path for path in (folder, *folder.parents) if path.exists())).close()
