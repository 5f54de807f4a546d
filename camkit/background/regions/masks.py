"""Mask pictures: white, or any colour but black, where the object is; one per picture, named after it."""

from __future__ import annotations

import re
from pathlib import Path

from camkit.background.regions.table import Collected, register
from camkit.background.values import Annotations

_FOLDERS = ("masks", "mask", "segmentations", "SegmentationClass", "SegmentationObject")
_ENDING = re.compile(r"[._-](mask|segmentation_mask|seg)$", re.IGNORECASE)
_KINDS = (".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_PICTURES = (".jpg", ".jpeg", *_KINDS)


def is_mask(file: Path) -> bool:
    """Whether a file among pictures is by its name the mask of one: ``dog-mask.png``, ``dog_seg.png`` beside ``dog``.

    Without that picture it is one itself, of somebody with a mask.
    """
    if file.suffix.lower() not in _KINDS or _ENDING.search(file.stem) is None:
        return False
    of = file.with_name(f"{_ENDING.sub('', file.stem)}.any")
    return any(of.with_suffix(ending).is_file() for kind in _PICTURES for ending in (kind, kind.upper()))


def find(folder: Path) -> list[Path]:
    """Return the folder of masks beside the pictures, or the pictures' own where masks lie among them."""
    for place in (*(folder / name for name in _FOLDERS), *(folder.parent / name for name in _FOLDERS)):
        if place.is_dir() and any(file.suffix.lower() in _KINDS for file in place.rglob("*")):
            return [place]
    return [folder] if any(is_mask(file) for file in folder.rglob("*") if file.suffix.lower() in _KINDS) else []


@register("masks", find)
def read(place: Path) -> Annotations:
    """List every mask below a folder: those named as masks where there are any, else all pictures."""
    collected = Collected()
    files = [file for file in sorted(place.rglob("*")) if file.suffix.lower() in _KINDS]
    named = [file for file in files if is_mask(file)]
    for file in named or files:
        picture = file.relative_to(place).with_suffix("").as_posix()
        collected.add(_ENDING.sub("", picture) or picture, "", None, file)
    return collected.done("mask pictures", place)
