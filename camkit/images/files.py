"""Finds picture files in folders and by patterns, and writes files completely or not at all."""

from __future__ import annotations

import glob
import itertools
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from camkit.drawing.encode import PNG_MARK
from camkit.errors import InputError, OutputError

_MARKED_BYTES = 128
"""The first bytes of a PNG, which contain camkit's mark: it follows the 33 bytes of the signature and the header."""

_WILDCARDS = "*?["

_PICTURE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".png", ".apng", ".webp", ".avif", ".gif", ".bmp", ".dib"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".qoi"),
)
"""The files of a folder that are pictures. A file that is named explicitly may have any suffix."""

_DRAWN_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".mp4")
"""Types of files that camkit draws into."""


def find_pictures(patterns: Iterable[str | Path], skip: Path | None = None) -> list[Path]:
    """List picture files from files, folders and glob patterns, as ``find_places`` does."""
    return list(find_places(patterns, skip))


def find_places(
    patterns: Iterable[str | Path], skip: Path | None = None, *, recursive: bool = True
) -> dict[Path, Path]:
    """List picture files from files, folders and glob patterns, each with its place below the folder or pattern.

    Folders are searched in order of name, with their subfolders if ``recursive``. Hidden files and folders are left
    out, and so is everything in ``skip`` and every drawing that camkit wrote. A pattern that matches nothing stays in
    the list, and so does a folder that cannot be listed, so that reading it reports the error. A file that is reached
    in two ways is listed once.

    The place of ``photos/2020/cat.jpg`` is ``2020/cat.jpg`` if ``photos`` was named, ``photos/2020/cat.jpg`` if
    ``photos`` was one of several names, and ``cat.jpg`` if the file itself was named.

    Raises:
        InputError: a name is empty, or the address of a page.
    """
    patterns = list(patterns)
    places: dict[Path, Path] = {}
    for pattern in patterns:
        if not str(pattern):
            raise InputError("the name of a picture is empty")
        refuse_address(str(pattern))
        path = Path(pattern)
        matches, root = [path], path
        if not os.path.lexists(path) and any(sign in str(pattern) for sign in _WILDCARDS):
            matches, root = _matches(str(pattern)), _fixed_part(path)
            others = [match for match in matches if not _is_drawing(match)]
            matches = [match for match in others if not _is_within(match, skip)] or others or [path]
        by_match = [_pictures_in(match, skip, recursive) if os.path.isdir(match) else [match] for match in matches]
        above = Path(os.path.basename(os.path.abspath(root))) if len(patterns) > 1 else Path()  # noqa: PTH100, PTH119
        for file in [file for files in by_match for file in files] or [path]:
            is_below = file != root and file.is_relative_to(root)
            places.setdefault(file, above / file.relative_to(root) if is_below else Path(file.name))
    unique: dict[Path, Path] = {}
    for path in places:
        unique.setdefault(path.absolute(), path)
    return {path: places[path] for path in unique.values()}


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}\w")
"""How the address of a page or a bucket begins; ``Path`` makes one slash of two. A drive has a single letter."""


def refuse_address(name: str) -> None:
    """Refuse the address of a page, which is no file.

    Raises:
        InputError: the name is an address.
    """
    sentence = None if os.path.lexists(name) else about_address(name)
    if sentence is not None:
        raise InputError(sentence)


def about_address(name: str) -> str | None:
    """Return a sentence about the address of a page; None for any other name."""
    if not _ADDRESS.match(name):
        return None
    address = re.sub(":/+", "://", name, count=1)
    return f"{address} is an address, and camkit reads only files: download the picture and name the file"


def names_file(out: Path) -> bool:
    """Return whether an output path names a picture file and not a folder."""
    return out.suffix.lower() in _DRAWN_SUFFIXES and not out.is_dir()


def _fixed_part(pattern: Path) -> Path:
    """Return the folder before the first part of a pattern that has a wildcard."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.name == "**":  # means the same as the folder itself
        return _matches(str(path.parent)) if glob.has_magic(str(path.parent)) else [path.parent]
    matches = sorted(map(Path, glob.glob(pattern, recursive=True)))
    if path.name == "*":
        matches = [match for match in matches if _has_picture_suffix(match) or os.path.isdir(match)] or matches
    return matches


def _is_within(path: Path, folder: Path | None) -> bool:
    return folder is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _has_picture_suffix(path: Path) -> bool:
    return path.suffix.lower() in _PICTURE_SUFFIXES


def _pictures_in(folder: Path, skip: Path | None, recursive: bool) -> list[Path]:
    skipped = None if skip is None else os.path.realpath(skip)
    unreadable: list[Path] = []
    pictures: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=lambda error: unreadable.append(Path(error.filename))):
        if not recursive:
            folders.clear()
        folders[:] = [name for name in folders if name[0] != "." and os.path.realpath(Path(parent, name)) != skipped]
        named = [Path(parent, name) for name in files if name[0] != "." and _has_picture_suffix(Path(name))]
        pictures += [file for file in named if not _is_drawing(file)]
    return sorted([*pictures, *unreadable])


def _is_drawing(file: Path) -> bool:
    """Return whether a file is a drawing that camkit wrote, by the mark in its first bytes."""
    if file.suffix.lower() != ".png" or not is_regular(file):
        return False
    try:
        with file.open("rb") as start:
            return PNG_MARK in start.read(_MARKED_BYTES)
    except OSError:  # reading it as a picture reports the error
        return False


def is_regular(file: Path) -> bool:
    """Return whether a path is an ordinary file: reading a pipe or a device might never end."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except (OSError, ValueError):  # it does not exist, is a loop of links, or is no valid name
        return False


def files_in(folder: Path, suffixes: Sequence[str], *, deep: bool = True) -> list[Path]:
    """List the ordinary files in a folder that have one of these suffixes, sorted; none if there is no such folder.

    ``deep`` includes its subfolders; links to folders are not followed.

    Raises:
        InputError: a folder cannot be listed, so its files would be missing unnoticed.
    """
    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_refuse_unreadable):
        if not deep:
            folders.clear()
        files += [Path(parent, name) for name in names if Path(name).suffix.lower() in suffixes]
    return sorted(filter(is_regular, files))


def _refuse_unreadable(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise InputError(f"the folder {error.filename} cannot be read: {error.strerror or error}") from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file completely or not at all: an older file of that name stays until the new one is complete.

    Raises:
        OutputError: the folder cannot be created or written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".camkit-{secrets.token_hex(8)}")
        try:
            with unfinished.open("xb") as file:
                file.write(data)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def set_aside(folder: Path, names: Iterable[str]) -> None:
    """Rename files of an earlier run, so that ``report.json`` is kept as ``before-report.json``.

    Raises:
        OutputError: a file cannot be renamed.
    """
    try:
        for name in names:
            if (folder / name).exists():
                (folder / name).replace(folder / f"before-{name}")
    except OSError as error:
        raise OutputError(f"cannot write into {folder}: {error.strerror or error}") from error


def check_folder(folder: Path) -> None:
    """Create a folder if it does not exist, and check that files can be written into it.

    Raises:
        OutputError: the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"cannot write into the folder {folder}: {error.strerror or error}") from error
