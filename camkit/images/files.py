"""Finds picture files in folders and by patterns, and writes files completely or not at all."""

from __future__ import annotations

import glob
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path

from camkit.errors import OutputError

_WILDCARDS = "*?["

_PICTURE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".png", ".apng", ".webp", ".avif", ".gif", ".bmp", ".dib"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".qoi"),
)
"""The files of a folder that are pictures. A file that is named explicitly may have any suffix."""


def find_pictures(patterns: Iterable[str | Path], skip: Path | None = None) -> list[Path]:
    """List picture files from files, folders and glob patterns.

    Folders are searched recursively, in order of name. Hidden files and folders are left out, and so is everything in
    ``skip``. A pattern that matches nothing stays in the list, so that reading it reports the error. A file that is
    reached in two ways is listed once.
    """
    paths: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        matches = [path]
        if not os.path.lexists(path) and any(sign in str(pattern) for sign in _WILDCARDS):
            matches = _matches(str(pattern))
            matches = [match for match in matches if not _is_within(match, skip)] or matches or [path]
        for match in matches:
            inside = _pictures_in(match, skip) if os.path.isdir(match) else []
            paths.extend(inside or [match])
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.absolute(), path)
    return list(unique.values())


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


def _pictures_in(folder: Path, skip: Path | None) -> list[Path]:
    skipped = None if skip is None else skip.resolve()
    pictures: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and Path(parent, name).resolve() != skipped]
        pictures += [Path(parent, name) for name in files if name[0] != "." and _has_picture_suffix(Path(name))]
    return sorted(pictures)


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
