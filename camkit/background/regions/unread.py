"""Recognise annotations that camkit does not read, so that their pictures do not count as unannotated."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from camkit.background.regions.coco import looks_like_coco
from camkit.background.regions.masks import is_mask_in, mask_folders
from camkit.background.regions.yolo import find_empty
from camkit.drawing.encode import JPEG_SUFFIXES
from camkit.errors import advice
from camkit.images.files import files_in

READ = "COCO JSON, Pascal VOC XML, YOLO text, CSV files with the columns path, xmin, ymin, xmax and ymax, and masks"
"""The annotations that camkit reads, in words."""

_BESIDE = ("annotations", "Annotations", "labels", "ann", "json", "jsons", "labelme", "labelTxt", "xml", "xmls")
_FOLDERS = ("", *(f"../{name}" for name in _BESIDE))

_PICTURE_FOLDERS = ("images", "img", "jpegimages", "train", "val", "valid", "test")
"""The annotations of such a folder may lie directly beside it."""

_MOST_FILES = 50
"""At most this many files of each type are examined, because thousands of other files may be beside the pictures."""

_MOST_CHARACTERS = 1 << 16
"""How many characters of a file are examined: its first objects show that it holds annotations."""

_UNREAD_MASKS = (".jpg", ".jpeg", ".npy", ".npz", ".mat")

_BOX = (
    r"bbox|bnd_?box|bounding_?box|box2d|polygon|exterior|segmentation|keypoints|encodedpixels|predictionstring"
    r"|\brle\b|\bx_?min\b|\broi\b|region_shape_attributes"
)
"""Usual names for a box or an outline."""

_CENTRE = r"\bx_?cent(er|re)|cent(er|re)_?x|\bcx\b|\bx\W+y\W+w"
"""Usual names of columns for a box that is given by its centre, or by its corner and size."""

_JSON = (
    rf'(?i)"[^"\n]*({_BOX})[^"\n]*"\s*:|"(shapes|imageData|xy|coordinates"\s*:\s*\{{\s*"x)"\s*:'
    r'|"_via_|"(region|shape)_attributes"|"(rectangle|polygon|brush)labels"'
)
_XML = rf"(?is)<\w*({_BOX})|<annotations\b.*<(version|image|track)\b"
_CSV = rf"(?i)\A.*({_BOX}|{_CENTRE})|\A.*\.(jpe?g|png|bmp|tiff?|webp)\W(.*\b\d+\b){{4}}"
_TEXT = r"(?m)^\S+([ \t,;]+\d+(\.\d+)?){4,}[ \t]*$|^(-?[\d.]+\s+){8}[^\d\s]\S*\s+[012]\s*$"

_TYPES = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), _JSON),
    ".xml": _XML,
    **dict.fromkeys((".csv", ".tsv"), _CSV),
    ".txt": _TEXT,
}
"""What annotations contain, by the suffix of the file; a CSV may have no header."""


def find_unread(folder: Path, classes: Collection[str] = (), *, deep: bool = True) -> str | None:
    """Return a sentence about annotations that camkit does not read, in or beside a folder; None if there are none.

    ``deep`` includes its subfolders. ``classes`` are folders that hold pictures of a class, even if their names are
    usual for regions.
    """
    for file in _files(folder, deep=deep):
        with file.open(encoding="utf-8-sig", errors="replace") as lines:
            text = lines.read(_MOST_CHARACTERS)
        if re.search(_TYPES[file.suffix.lower()], text) or (file.suffix == ".json" and looks_like_coco(file)):
            return (
                f"{file} holds annotations in a format that camkit does not read, or in a folder that it does not "
                f"search; it reads {READ}: export them as one of these, and pass the file or folder as "
                + advice("regions=...", "--regions")
            )
    places = [place for place in mask_folders(folder) if place.parent != folder or place.name not in classes]
    beside = [file for file in files_in(folder, JPEG_SUFFIXES, deep=deep) if is_mask_in(folder, file)]
    for file in [*beside, *(file for place in places for file in files_in(place, _UNREAD_MASKS))]:
        return f"masks found, such as {file}, in a format that camkit does not read: save them as PNG"
    if (empty := find_empty(folder)) is not None:
        return f"the text files in {empty} are all empty: export the labels again"
    return None


def _files(folder: Path, *, deep: bool) -> Iterator[Path]:
    for place in (folder / name for name in _FOLDERS):
        files = files_in(place, [*_TYPES], deep=deep)
        for suffix in _TYPES:
            yield from [file for file in files if file.suffix.lower() == suffix][:_MOST_FILES]
    if folder.name.lower() in _PICTURE_FOLDERS:
        yield from files_in(folder.parent, [*_TYPES], deep=False)[:_MOST_FILES]
