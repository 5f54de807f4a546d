"""Recognise annotations in formats that camkit does not read, so that their pictures do not count as unannotated."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from camkit.background.regions.coco import looks_like_coco
from camkit.background.regions.masks import is_mask_in, mask_folders
from camkit.drawing.encode import JPEG_SUFFIXES
from camkit.errors import advice
from camkit.images.files import files_in

_BESIDE = ("annotations", "Annotations", "labels", "ann", "json", "jsons", "labelme", "labelTxt", "xml", "xmls")
_FOLDERS = ("", *(f"../{name}" for name in _BESIDE))

_PICTURE_FOLDERS = ("images", "img", "jpegimages", "train", "val", "valid", "test")
"""The annotations of such a folder may lie directly beside it."""

_MOST_FILES = 50
"""At most this many files of each type are examined, because thousands of other files may be beside the pictures."""

_MOST_CHARACTERS = 1 << 16
"""How many characters of a file are examined: its first objects show the format."""

_TYPES = {
    ".json": "JSON",
    ".jsonl": "JSON",
    ".ndjson": "JSON",
    ".xml": "XML",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".txt": "text",
}

_UNREAD_MASKS = (".jpg", ".jpeg", ".npy", ".npz", ".mat")

_ADVICE = "export them as COCO JSON, Pascal VOC XML or YOLO text"

_FORMATS = (
    ("JSON", "LabelMe", r'"(shapes|imageData)"\s*:', "convert them to COCO with labelme2coco"),
    ("JSON", "VIA", r'"_via_|"(region|shape)_attributes"|"xy"\s*:', "export them as COCO from VIA's menu"),
    ("JSON", "CreateML", r'(?s)\A(?=.*"image(filename)?"\s*:)(?=.*"coordinates"\s*:\s*\{)', _ADVICE),
    ("JSON", "Label Studio", r'"(rectangle|polygon|brush)labels"', "export them as COCO from Label Studio"),
    ("XML", "CVAT", r"(?s)<annotations\b.*<(version|image|track)\b", "export the task as COCO 1.0 from CVAT"),
    ("text", "DOTA", r"(?m)^(-?[\d.]+\s+){8}[^\d\s]\S*\s+[012]\s*$", _ADVICE),
    ("CSV", "VIA", r"\A.*\bregion_shape_attributes\b", "export them as COCO from VIA's menu"),
)
"""For each format: the type of its files, its name, what these contain, and what the user can do."""

_VOC = r"(?s)<annotation\b.*<bndbox>"

_BOX = (
    r"bbox|bnd_?box|bounding_?box|box2d|polygon|exterior|segmentation|keypoints|encodedpixels|predictionstring"
    r"|\brle\b|\bx_?min\b|\broi\b"
)
"""Usual names for a box or an outline."""

_CENTRE = r"\bx_?cent(er|re)|cent(er|re)_?x|\bcx\b|\bx\W+y\W+w"
"""Usual names of columns for a box that is given by its centre, or by its corner and size."""

_OTHER_FORMATS = {
    "JSON": rf'(?i)"[^"\n]*({_BOX})[^"\n]*"\s*:',
    "XML": rf"(?i)<\w*({_BOX})",
    "CSV": rf"(?i)\A.*({_BOX}|{_CENTRE})|\A.*\.(jpe?g|png|bmp|tiff?|webp)\W(.*\b\d+\b){{4}}",
    "text": r"(?m)^\S+([ \t,;]+\d+(\.\d+)?){4,}[ \t]*$",
}
"""What annotations of each type contain in any other format; a CSV may have no header."""


def find_unread(folder: Path, classes: Collection[str] = (), *, deep: bool = True) -> str | None:
    """Return a sentence about annotations that camkit does not read, in or beside a folder; None if there are none.

    ``deep`` includes its subfolders. ``classes`` are folders that hold pictures of a class, even if their names are
    usual for regions.
    """
    for file in _files(folder, deep=deep):
        try:
            with file.open(encoding="utf-8-sig", errors="replace") as lines:
                text = lines.read(_MOST_CHARACTERS)
        except OSError:
            continue
        if (sentence := _recognise(file, text)) is not None:
            return sentence
    places = [place for place in mask_folders(folder) if place.parent != folder or place.name not in classes]
    beside = [file for file in files_in(folder, JPEG_SUFFIXES, deep=deep) if is_mask_in(folder, file)]
    for file in [*beside, *(file for place in places for file in files_in(place, _UNREAD_MASKS))]:
        return f"masks found, such as {file}, in a format that camkit does not read: save them as PNG"
    return None


def _files(folder: Path, *, deep: bool) -> Iterator[Path]:
    for place in (folder / name for name in _FOLDERS):
        files = files_in(place, [*_TYPES], deep=deep)
        for suffix in _TYPES:
            yield from [file for file in files if file.suffix.lower() == suffix][:_MOST_FILES]
    if folder.name.lower() in _PICTURE_FOLDERS:
        yield from files_in(folder.parent, [*_TYPES], deep=False)[:_MOST_FILES]


def _recognise(file: Path, text: str) -> str | None:
    kind = _TYPES[file.suffix.lower()]
    usual = "COCO" if kind == "JSON" and looks_like_coco(file) else ""
    usual = "Pascal VOC" if kind == "XML" and re.search(_VOC, text) else usual
    if usual:
        return f"{file} is a {usual} file in a folder that camkit does not search; pass it or its folder as " + advice(
            "regions=...", "--regions"
        )
    for known, name, pattern, conversion in _FORMATS:
        if kind == known and re.search(pattern, text):
            return f"{name} files found, such as {file}; camkit does not read them: {conversion}"
    if kind not in _OTHER_FORMATS or re.search(_OTHER_FORMATS[kind], text) is None:
        return None
    conversion = "give it the columns path, xmin, ymin, xmax and ymax" if kind == "CSV" else _ADVICE
    return f"{kind} annotations found, such as {file}, in a format that camkit does not read: {conversion}"
