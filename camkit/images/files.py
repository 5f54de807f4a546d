"""Picture files found in folders and by patterns, and files written whole or not at all."""

from __future__ import annotations

import glob
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path

from camkit.errors import OutputError

_GLOB = "*?["


_ENDINGS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".png", ".apng", ".webp", ".avif", ".gif", ".bmp", ".dib"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".qoi"),
)
"""Which files of a folder are taken for pictures; a file named by itself may have any name."""


def find_pictures(patterns: Iterable[str | Path], skip: Path | None = None) -> list[Path]:
    """List picture files from files, folders (searched through, in order of name) and glob patterns.

    Hidden files and folders are left out of a search, and so is the folder ``skip`` where it lies within the one
    searched or is met by a pattern. A pattern that matches nothing stays in the list as it is, so that it is reported
    where it would have been read. A file reached in two ways is listed once.
    """
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        matches = [path]
        if not os.path.lexists(path) and any(sign in str(pattern) for sign in _GLOB):
            matches = _matches(str(pattern))
            matches = [match for match in matches if not _within(match, skip)] or matches or [path]
        for match in matches:
            inside = _inside(match, skip) if os.path.isdir(match) else []
            found.extend(inside or [match])
    once: dict[Path, Path] = {}
    for path in found:
        once.setdefault(path.absolute(), path)
    return list(once.values())


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.name == "**":  # all there is below a folder, as for the folder itself
        return _matches(str(path.parent)) if glob.has_magic(str(path.parent)) else [path.parent]
    found = sorted(map(Path, glob.glob(pattern, recursive=True)))
    if path.name == "*":
        found = [match for match in found if match.suffix.lower() in _ENDINGS or os.path.isdir(match)] or found
    return found


def _within(path: Path, folder: Path | None) -> bool:
    return folder is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _inside(folder: Path, skip: Path | None) -> list[Path]:
    left_out = None if skip is None else skip.resolve()
    pictures: list[Path] = []
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and Path(where, name).resolve() != left_out]
        pictures += [Path(where, name) for name in files if name[0] != "." and Path(name).suffix.lower() in _ENDINGS]
    return sorted(pictures)


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: an older file of the name stays until the new one is complete.

    Raises:
        OutputError: the folder cannot be made or written to.
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
    """Make a folder, and make sure that files can be written into it, before anything is computed.

    Raises:
        OutputError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"cannot write into the folder {folder}: {error.strerror or error}") from error
