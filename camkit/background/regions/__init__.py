"""Where the objects are: COCO, Pascal VOC, YOLO, mask pictures or a CSV of boxes, found by themselves."""

from __future__ import annotations

from pathlib import Path

from camkit.background.regions import boxes, coco, masks, voc, yolo
from camkit.background.regions.masks import is_mask
from camkit.background.regions.table import FORMS, Form
from camkit.background.values import Annotations
from camkit.errors import InputError

__all__ = ["FORMS", "Form", "boxes", "coco", "find_regions", "is_mask", "masks", "read_regions", "voc", "yolo"]


def find_regions(folder: Path) -> list[Annotations]:
    """Read what regions there are below a folder of pictures, or beside it."""
    return [form.read(file) for form in FORMS.values() for file in form.find(folder)]


def read_regions(source: Path) -> list[Annotations]:
    """Read the regions that somebody named: a file, or a folder of files.

    Raises:
        InputError: there is nothing there, or nothing that is understood.
    """
    if source.is_dir():
        inside = source.resolve()
        files = [(form, file) for form in FORMS.values() for file in form.find(source)]
        found = [form.read(file) for form, file in files if file.resolve().is_relative_to(inside)]
        found = found or ([masks.read(source)] if any(source.rglob("*.png")) else [])
    elif source.suffix.lower() in _BY_ENDING:
        found = [FORMS[_BY_ENDING[source.suffix.lower()]].read(source)]
    else:
        found = []
    if not found:
        raise InputError(
            f"no regions were found in {source}: camkit reads COCO's JSON, VOC's XML, YOLO's text, masks, and CSV boxes"
        )
    return found


_BY_ENDING = {".json": "coco", ".xml": "voc", ".csv": "boxes"}
