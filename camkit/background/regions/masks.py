"""Find mask pictures: one per picture, named after it. ``camkit.images.masks`` says what their values mean."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from camkit.background.regions.annotations import AnnotationCollector, Annotations
from camkit.images.files import files_in
from camkit.images.mask_pictures import is_photograph
from camkit.images.masks import MaskFile, understand_masks

_FOLDERS = (
    "masks",
    "mask",
    "Masks",
    "Mask",
    "segmentations",
    "SegmentationClass",
    "SegmentationObject",
    "annotations/trimaps",
    "trimaps",
)
_MASK_SUFFIX = re.compile(r"[._-](mask|segmentation_mask|seg)$", re.IGNORECASE)
_MASK_EXTENSIONS = (".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_PICTURE_EXTENSIONS = (".jpg", ".jpeg", *_MASK_EXTENSIONS)

_MOST_EXAMINED = 5
"""At most this many pictures are examined to tell photographs from masks."""

_KINDS = {
    "alpha": "masks with transparency",
    "palette": "masks with a palette",
    "colour": "colour masks",
    "grey": "grey masks",
}


def is_mask(file: Path) -> bool:
    """Return whether a file among pictures is the mask of one: ``dog-mask.png`` or ``dog_seg.png`` beside ``dog.jpg``.

    If there is no such picture beside it, the file is itself a picture, perhaps of somebody who wears a mask.
    """
    if file.suffix.lower() not in _MASK_EXTENSIONS or _MASK_SUFFIX.search(file.stem) is None:
        return False
    picture = file.with_name(f"{_MASK_SUFFIX.sub('', file.stem)}.any")
    extensions = (variant for extension in _PICTURE_EXTENSIONS for variant in (extension, extension.upper()))
    return any(picture.with_suffix(extension).is_file() for extension in extensions)


def find(folder: Path) -> list[Path]:
    """Return the folder of masks in or beside a folder of pictures, or that folder itself if it contains masks."""
    for masks in mask_folders(folder):
        if _possible_masks(masks):
            return [masks]
    return [folder] if any(map(is_mask, _possible_masks(folder))) else []


def mask_folders(folder: Path) -> list[Path]:
    """List the folders in and beside a folder of pictures that hold masks, judging by their names."""
    inside = [masks for masks in (folder / name for name in _FOLDERS) if not holds_photographs(masks)]
    return [masks for masks in (*inside, *(folder.parent / name for name in _FOLDERS)) if masks.is_dir()]


def holds_photographs(folder: Path) -> bool:
    """Return whether a folder with a usual name for masks holds photographs, as the folder of a class "mask" does.

    Most of its pictures must be photographs in colour; the others may be grey.
    """
    pictures = [file for file in files_in(folder, _PICTURE_EXTENSIONS) if not file.name.startswith(".")]
    examined = pictures[:_MOST_EXAMINED]
    return sum(map(is_photograph, examined)) > len(examined) / 2


def _possible_masks(folder: Path) -> list[Path]:
    # Archives made on a Mac, such as the one of Oxford-IIIT Pets, hold a hidden file for each picture.
    return [file for file in files_in(folder, _MASK_EXTENSIONS) if not file.name.startswith(".")]


def read(folder: Path) -> Annotations:
    """List the masks in a folder: the files named as masks or, if there are none, all pictures.

    Raises:
        InputError: no mask can be read, or it is not clear which values are the object.
    """
    collector = AnnotationCollector()
    possible = _possible_masks(folder)
    files = [file for file in possible if is_mask(file)] or possible
    readings = understand_masks(files)
    for file in files:
        name = file.relative_to(folder).with_suffix("").as_posix()
        collector.add(_MASK_SUFFIX.sub("", name) or name, "", None, MaskFile(file, readings))
    facts = tuple(f"{_KINDS[storage]}: {reading.words}" for storage, reading in readings.items())
    return replace(collector.finish("mask pictures", folder), facts=facts)
