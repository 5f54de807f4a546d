"""Matches pictures to the regions of a source by their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath

from camkit.background.regions.annotations import Annotations, ObjectAnnotation
from camkit.images.files import has_picture_suffix
from camkit.kit.wording import first_of
from camkit.options.settings import normalize_name

_MOST_LISTED = 5
"""The most names that a sentence lists."""


class RegionIndex:
    """Finds the objects that a source annotates in a picture.

    Names are compared as paths first, then as paths without extension, with the picture's first folder left out ("a/0"
    is then "images/a/0.png"), as file names, and as file names without extension. A match counts only if exactly one
    annotated name and exactly one picture share the key. So an ambiguous name matches nothing, and no picture receives
    the objects of another.
    """

    def __init__(self, source: Annotations, pictures: Collection[str]) -> None:
        self.source = source
        self.categories = {
            normalize_name(annotation.category) for objects in source.objects.values() for annotation in objects
        } - {""}
        self._objects: dict[str, tuple[ObjectAnnotation, ...]] = {}
        several: set[str] = set()
        keys = zip(_keys_of(source.objects), _keys_of(pictures, below_folder=True), strict=True)
        for annotated_names, picture_names in keys:
            for shared in annotated_names.keys() & picture_names.keys():
                if len(annotated_names[shared]) == len(picture_names[shared]) == 1:
                    objects = source.objects[annotated_names[shared].pop()]
                    self._objects.setdefault(picture_names[shared].pop(), objects)
                else:
                    several |= picture_names[shared]
        self.ambiguous = several - self._objects.keys()
        """Pictures without objects that share their name with others, or the names of several annotations."""

    def objects_in(self, picture: str) -> tuple[ObjectAnnotation, ...]:
        """Return the objects of a picture; none if the source has none, or if the name is ambiguous."""
        return self._objects.get(picture, ())

    def coverage(self, root: Path) -> str:
        """Say how many pictures the source annotates, and how many of these are in the data."""
        path = Path(self.source.source)
        shown = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        found = sum(map(bool, self._objects.values()))
        annotated = len(self.source.objects)
        return f"{self.source.format} in {shown}: {annotated} annotated pictures, {found} of them found here"


def unmatched(classes: Collection[str], pictures: Sequence[str], indexes: Sequence[RegionIndex]) -> str:
    """Say what pictures and regions are called, for pictures of which none has a region that can be used."""
    sources = []
    for index in indexes:
        problems = [f"{len(names)} {problem}" for problem, names in index.source.problems.items()]
        ambiguous = [f"the names of {len(index.ambiguous)} pictures are ambiguous"] if index.ambiguous else []
        names = f"names such as {listed(index.source.objects)}" if index.source.objects else "no objects"
        categories = f"the categories {listed(index.categories)}" if index.categories else "no categories"
        sources.append(
            f"those of {index.source.format} in {index.source.source} have "
            + "; ".join([f"{names} and {categories}", *ambiguous, *problems])
        )
    return (
        f"{len(pictures)} pictures have names such as {pictures[0]!r}"
        + (f" and the classes {listed(classes)}" if classes else "")
        + f"; {'; '.join(sources)}; give pictures and regions the same names, and classes and categories too, or allow "
        "further categories in the config (expect)"
    )


def listed(names: Iterable[str]) -> str:
    """Return the first names in alphabetical order."""
    return first_of(sorted(map(repr, names)), _MOST_LISTED)


def _keys_of(names: Iterable[str], *, below_folder: bool = False) -> list[dict[str, set[str]]]:
    """Return the names by each key: as ``RegionIndex`` says, in its order."""
    by_key: list[dict[str, set[str]]] = [defaultdict(set) for _ in range(5)]
    for name in names:
        path = PurePosixPath(name.replace("\\", "/"))
        bare = path.with_suffix("") if has_picture_suffix(path.name) else path
        inner = bare.as_posix().partition("/")[2] if below_folder else bare.as_posix()
        for groups, key in zip(by_key, (path.as_posix(), bare.as_posix(), inner, path.name, bare.name), strict=True):
            groups[key].add(name)
    return by_key
