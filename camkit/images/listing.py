"""Lists picture files in folders and by patterns, one by one, so that a folder of millions needs no more memory."""

from __future__ import annotations

import functools
import glob
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from camkit.errors import InputError
from camkit.images.files import has_picture_suffix, is_drawing, refuse_address
from camkit.images.masks import is_mask

_SORTED_AT_ONCE = 1 << 16
"""A folder with more names than this is listed in blocks of as many, each in order of name: a block takes some ten
megabytes, and the first picture comes at once."""


class FoundPicture(NamedTuple):
    """A picture file, and its place below the folder or the pattern by which it was found."""

    path: Path
    place: Path


class Pictures:
    """The picture files in files, folders and glob patterns. Each iteration lists them again.

    Folders are searched in order of name, with their subfolders if ``recursive``; a folder of more than 65,536 names in
    blocks of as many. Hidden files and folders are left out, and so is everything in ``skip``, every drawing that
    camkit wrote, and every mask of a picture. A pattern that matches nothing stays in the list, and so does a folder
    that cannot be listed, so that reading it reports the error. A file that is reached in two ways is listed once.

    The place of ``photos/2020/cat.jpg`` is ``2020/cat.jpg`` if ``photos`` was named, ``photos/2020/cat.jpg`` if
    ``photos`` was one of several names, and ``cat.jpg`` if the file itself was named. If two folders of the same name
    were named, as many of the folders above them are added as it takes to tell them apart.

    Raises:
        InputError: a name is empty, or the address of a page.
    """

    def __init__(self, patterns: Iterable[str | Path], skip: Path | None = None, *, recursive: bool = True) -> None:
        self._skip = None if skip is None else os.path.realpath(skip)
        self._recursive = recursive
        # For each pattern, what the places of its files are relative to, and what matches it.
        self._found = [(Path(pattern), *self._matches_of(pattern)) for pattern in patterns]
        roots = [root for _, root, _ in self._found]
        self._above = _told_apart(roots) if len(roots) > 1 else {}

    def _matches_of(self, pattern: str | Path) -> tuple[Path, list[Path]]:
        """Return what the places of a pattern's files are relative to, and what matches it."""
        if not str(pattern):
            raise InputError("the name of a picture is empty")
        refuse_address(str(pattern))
        path = Path(pattern)
        if os.path.lexists(path) or not glob.has_magic(str(pattern)):
            return path, [path]
        others = [match for match in _matches(str(pattern)) if _is_photo(match, match.parent)]
        fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))  # the folder before it
        return fixed, [match for match in others if not self._skips(match)] or others or [path]

    def _skips(self, path: Path) -> bool:
        return self._skip is not None and Path(os.path.realpath(path)).is_relative_to(self._skip)

    def _placed(self, file: Path, root: Path) -> FoundPicture:
        if file == root or not file.is_relative_to(root):
            return FoundPicture(file, Path(file.name))
        return FoundPicture(file, self._above.get(root, Path()) / file.relative_to(root))

    def __iter__(self) -> Iterator[FoundPicture]:
        """List the pictures."""
        listed: set[str] = set()
        are_several = sum(len(matches) for *_, matches in self._found) > 1
        for pattern, root, matches in self._found:
            is_empty = True
            for match in matches:
                for file in self._below(match, root) if os.path.isdir(match) else [match]:
                    is_empty, name = False, os.path.abspath(file)  # noqa: PTH100
                    if name not in listed:
                        yield self._placed(file, root)
                    if are_several:
                        listed.add(name)
            if is_empty:
                yield FoundPicture(pattern, Path(pattern.name))

    def named(self) -> list[FoundPicture]:
        """Return the files that were named or match a pattern, without those in folders."""
        files = ((match, root) for _, root, matches in self._found for match in matches if not os.path.isdir(match))
        return list(itertools.starmap(self._placed, files))

    def first(self, count: int) -> list[Path]:
        """Return the first pictures, at most ``count``."""
        return [found.path for found in itertools.islice(self, count)]

    def count(self) -> int:
        """Return about how many pictures there are: drawings, masks and files reached in two ways count too."""
        searches = (self._below(folder, folder, quick=True) for folder in self._folders)
        return len(self.named()) + sum(1 for files in searches for _ in files)

    def __contains__(self, file: Path) -> bool:
        """Tell whether an existing file is one of the pictures, or may be one because it is below a searched folder."""
        path = Path(os.path.realpath(file))
        is_photo = has_picture_suffix(path.name) and not self._skips(path)
        folders = (Path(os.path.realpath(folder)) for folder in self._folders)
        return str(path) in self._real_names or any(
            is_photo and path.is_relative_to(folder) and _is_photo(path, folder) for folder in folders
        )

    @functools.cached_property
    def _folders(self) -> list[Path]:
        return [match for *_, matches in self._found for match in matches if os.path.isdir(match)]

    @functools.cached_property
    def _real_names(self) -> set[str]:
        return {os.path.realpath(found.path) for found in self.named()}

    def _below(self, folder: str | Path, root: Path, *, quick: bool = False) -> Iterator[Path]:
        """List a folder's pictures, those of subfolders in the place of their folder.

        Args:
            folder: the folder.
            root: the folder to which the places of its files are relative.
            quick: do not look into files, and leave out what cannot be read.
        """
        try:
            with os.scandir(folder) as entries:
                shown = (entry for entry in entries if entry.name[0] != ".")
                blocks = iter(lambda: sorted(itertools.islice(shown, _SORTED_AT_ONCE), key=lambda each: each.name), [])
                for entry in itertools.chain.from_iterable(blocks):
                    if entry.is_dir(follow_symlinks=False):  # links may lead in circles
                        if self._recursive and (self._skip is None or os.path.realpath(entry.path) != self._skip):
                            yield from self._below(entry.path, root, quick=quick)
                        continue
                    is_file = has_picture_suffix(entry.name) and not os.path.isdir(entry.path)
                    if is_file and (quick or _is_photo(Path(entry.path), root)):
                        yield Path(entry.path)
        except OSError:
            if not quick:
                yield Path(folder)


def _is_photo(file: Path, root: Path) -> bool:
    """Tell whether a file is neither a drawing of camkit's nor the mask of a picture."""
    return not is_drawing(file) and not is_mask(file, root)


def find_pictures(patterns: Iterable[str | Path], skip: Path | None = None, *, recursive: bool = True) -> list[Path]:
    """Return the picture files in files, folders and glob patterns, as ``Pictures`` lists them."""
    return [found.path for found in Pictures(patterns, skip, recursive=recursive)]


def _told_apart(roots: Sequence[Path]) -> dict[Path, Path]:
    """Return for each root its name; for roots of the same name with as many folders above as tell them apart."""
    absolute = {root: Path(os.path.abspath(root)) for root in roots}  # noqa: PTH100
    names: dict[Path, Path] = {}
    for root, path in absolute.items():
        others = [other for other in absolute.values() if other != path and other.name == path.name]
        count = 1
        while count < len(path.parts) and any(other.parts[-count:] == path.parts[-count:] for other in others):
            count += 1
        names[root] = Path(*path.parts[1:][-count:])
    return names


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.name == "**":  # means the same as the folder itself
        return _matches(str(path.parent)) if glob.has_magic(str(path.parent)) else [path.parent]
    matches = sorted(map(Path, glob.glob(pattern, recursive=True)))
    if path.name == "*":
        matches = [match for match in matches if has_picture_suffix(match.name) or os.path.isdir(match)] or matches
    return matches
