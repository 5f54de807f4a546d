"""Find mask pictures: one per picture, named after it. ``camkit.images.masks`` says what their values mean."""

from __future__ import annotations

from pathlib import Path

from camkit.background.regions.annotations import AnnotationCollector, Annotations
from camkit.images.files import PICTURE_SUFFIXES, files_in
from camkit.images.masks import (
    MASK_SUFFIXES,
    MaskFile,
    is_mask,
    is_photograph,
    names_masks,
    picture_of,
    understand_masks,
)

_MOST_EXAMINED = 5
"""At most this many pictures are examined to tell photographs from masks."""


def find(folder: Path) -> list[Path]:
    """Return the folder of masks in or beside a folder of pictures, or that folder itself if it contains masks."""
    for masks in mask_folders(folder):
        if _possible_masks(masks):
            return [masks]
    return [folder] if any(is_mask_in(folder, file) for file in _possible_masks(folder)) else []


def mask_folders(folder: Path) -> list[Path]:
    """List the folders in and beside a folder of pictures that hold masks, judging by their names and pictures."""
    folders = [
        place
        for parent in (folder, folder.parent)
        for place in sorted([*parent.glob("*"), *parent.glob("annotations/*")], key=_likely)
    ]
    named = (place for place in folders if names_masks(place.name) and place.is_dir() and place != folder)
    return [place for place in named if not holds_photographs(place)]


def _likely(folder: Path) -> tuple[bool, bool, int, str]:
    """Sort folders of masks first, then those of segmentations, then others, which often hold boxes."""
    return "mask" not in folder.name.lower(), "seg" not in folder.name.lower(), -len(folder.parts), folder.name


def is_mask_in(folder: Path, file: Path) -> bool:
    """Return whether a file is a mask among the pictures in a folder, or in the folder of a class below it."""
    parts = file.relative_to(folder).parts
    return is_mask(file, folder / parts[0] if len(parts) > 1 else folder)


def holds_photographs(folder: Path) -> bool:
    """Return whether a folder with a usual name for masks holds photographs, as the folder of a class "mask" does.

    Most of its pictures must be photographs in colour; the others may be grey.
    """
    pictures = [file for file in files_in(folder, PICTURE_SUFFIXES) if not file.name.startswith(".")]
    examined = pictures[:_MOST_EXAMINED]
    return sum(map(is_photograph, examined)) > len(examined) / 2


def _possible_masks(folder: Path) -> list[Path]:
    # Archives made on a Mac, such as the one of Oxford-IIIT Pets, hold a hidden file for each picture.
    return [file for file in files_in(folder, MASK_SUFFIXES) if not file.name.startswith(".")]


def read(folder: Path) -> Annotations:
    """List the masks in a folder: the files named as masks or, if there are none, all pictures.

    Raises:
        InputError: no mask can be read, or it is not clear which values are the object.
    """
    collector = AnnotationCollector()
    possible = _possible_masks(folder)
    files = [file for file in possible if is_mask_in(folder, file)] or possible
    reading = understand_masks(files)
    for file in files:
        name = picture_of(file.relative_to(folder)).as_posix()
        collector.add(name, "", None, MaskFile(file, reading))
    return collector.finish("mask pictures", folder, facts=(f"masks: {reading.words}",))
