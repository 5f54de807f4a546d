"""What the files that belong to a picture are called; no two pictures of a call share a name."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from camkit.errors import without_control
from camkit.images.files import has_picture_suffix
from camkit.kit.store import digest


def drawing_names(places: Mapping[Path, Path]) -> dict[Path, Path]:
    """Return for each picture the path of its drawings below the output folder, without the method.

    It is the picture's place. The suffix belongs to the name, so that the drawings of cat.jpg and cat.png differ even
    if they are explained one after the other; only ``.jpg`` is left out. If named files have the same name, as many of
    their folders are added as it takes to tell them apart.

    >>> pictures = {Path("in/cat.jpg"): Path("cat.jpg"), Path("in/b/cat.png"): Path("b/cat.png")}
    >>> [name.as_posix() for name in drawing_names(pictures).values()]
    ['cat', 'b/cat.png']
    >>> pictures = {Path("a/x.jpg"): Path("x.jpg"), Path("b/x.jpg"): Path("x.jpg")}
    >>> [name.as_posix() for name in drawing_names(pictures).values()]
    ['a/x', 'b/x']
    """
    names = {picture: place.with_name(picture_name(place)) for picture, place in places.items()}
    by_name: defaultdict[str, list[Path]] = defaultdict(list)
    for picture, name in names.items():
        by_name[str(name).casefold()].append(picture)
    for pictures in by_name.values():
        if len(pictures) > 1:
            names.update(_told_apart(pictures))
    return names


def _told_apart(pictures: Sequence[Path]) -> dict[Path, Path]:
    """Return names for pictures that have the same name, with as many of their folders as it takes."""
    folders = {picture: Path(os.path.abspath(picture)).parent.parts[1:] for picture in pictures}  # noqa: PTH100
    names: dict[Path, Path] = {}
    for count in range(1, max(map(len, folders.values())) + 1):
        names = {picture: Path(*folders[picture][-count:], picture_name(picture)) for picture in pictures}
        if len({str(name).casefold() for name in names.values()}) == len(pictures):
            break
    return names


def picture_name(path: Path) -> str:
    r"""Return the name of a picture without ``.jpg``, cut if the name of the drawing might be too long.

    A picture such as ``cat.png.jpg`` keeps its suffix, since it may lie beside ``cat.png``.

    Control characters, which could change a terminal or forge a line of a log, become hyphens. A name that was changed
    ends in a checksum, so that two pictures never have the same name.

    >>> picture_name(Path("cat.jpg")), picture_name(Path("cat.png.jpg")), picture_name(Path("a\nb.jpg"))
    ('cat', 'cat.png.jpg', 'a-b-7e18f737')
    """
    name = path.name.removesuffix(".jpg") or path.name
    name = path.name if has_picture_suffix(name) else name
    safe = without_control(name)
    while len(os.fsencode(safe)) > 120:  # most file systems allow 255 bytes for the whole name of a drawing
        safe = safe[:-1]
    return safe if safe == name else f"{safe}-{digest(name)[:8]}"
