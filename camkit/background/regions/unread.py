"""Recognise annotations in formats that camkit does not read, so that their pictures do not count as unannotated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import filterfalse, product
from pathlib import Path

from camkit.background.regions.coco import looks_like_coco
from camkit.background.regions.masks import holds_photographs, mask_folders
from camkit.errors import advice
from camkit.images.files import files_in

_FOLDERS = ("", "../annotations", "../Annotations", "../labels")

_PICTURE_FOLDERS = ("images", "jpegimages")
"""The annotations of such a folder may lie directly beside it."""

_MOST_FILES = 50
"""At most this many files of each type are examined: other files may lie beside the pictures by the thousand."""

_MOST_CHARACTERS = 1 << 16
"""Characters of a file that are examined: formats show themselves in their first objects."""

_ADVICE = "export them as COCO JSON, Pascal VOC XML or YOLO text"

_TYPES = {".json": "JSON", ".jsonl": "JSON", ".ndjson": "JSON", ".xml": "XML", ".csv": "CSV", ".txt": "text"}

_UNREAD_MASKS = (".jpg", ".jpeg", ".npy", ".npz", ".mat")

_FORMATS = (
    (".json", "LabelMe", r'"shapes"\s*:', "convert them to COCO with labelme2coco"),
    (".json", "VIA", r'"_via_|"region_attributes"|"shape_attributes"', "export them as COCO from VIA's menu"),
    (".json", "CreateML", r'"image(filename)?"\s*:(?s:.*)"coordinates"\s*:\s*\{', _ADVICE),
    (".json", "Label Studio", r'"(rectangle|polygon|brush)labels"', "export them as COCO from Label Studio"),
    (".xml", "CVAT", r"<annotations\b(?s:.*)<(image|track)\b", "export the task as COCO 1.0 from CVAT"),
    (".txt", "DOTA", r"(?m)^(-?[\d.]+\s+){8}\S+\s+[012]\s*$", _ADVICE),
    (".csv", "VIA", r"\A.*\bregion_shape_attributes\b", "export them as COCO from VIA's menu"),
)
"""For each format: the type of its files, its name, what these contain, and what the user can do."""

_BOXES = re.compile(
    r"bbox|bnd_?box|bounding_?box|box2d|polygon|segmentation|keypoints|encodedpixels|predictionstring|\brle\b"
    r"|x_?min\b|\A[^\n]*\.(jpe?g|png|bmp|tiff?|webp)\W(.*\b\d+\b){4}",
    re.IGNORECASE,
)
"""What annotations in any other format contain: a usual name for a box or an outline, or a CSV without a header, whose
first line is a picture and its box."""


def find_unread(folder: Path, *, deep: bool = True) -> str | None:
    """Return a sentence about annotations in or beside a folder that camkit does not read; None if there are none.

    ``deep`` includes its subfolders.
    """
    for file in _files(folder, deep=deep):
        try:
            with file.open(encoding="utf-8-sig", errors="replace") as lines:
                text = lines.read(_MOST_CHARACTERS)
        except OSError:
            continue
        if (sentence := _recognise(file, text)) is not None:
            return sentence
    for place in filterfalse(holds_photographs, mask_folders(folder)):
        for file in files_in(place, _UNREAD_MASKS)[:1]:
            return f"masks in other files than PNG found, such as {file}; camkit does not read them: save them as PNG"
    return None


def _files(folder: Path, *, deep: bool) -> Iterator[Path]:
    for place, suffix in product(_FOLDERS, _TYPES):
        yield from files_in(folder / place, [suffix], deep=deep)[:_MOST_FILES]
    if folder.name.lower() in _PICTURE_FOLDERS:
        yield from files_in(folder.parent, [*_TYPES], deep=False)


def _recognise(file: Path, text: str) -> str | None:
    suffix = file.suffix.lower()
    if suffix == ".json" and looks_like_coco(file):
        return f"{file} is a COCO file in a folder where camkit looks for none; pass it as " + advice(
            "regions=...", "--regions"
        )
    for known, name, pattern, conversion in _FORMATS:
        if suffix == known and re.search(pattern, text):
            return f"{name} files found, such as {file}; camkit does not read them: {conversion}"
    if suffix == ".txt" or _BOXES.search(text if suffix != ".csv" else text.partition("\n")[0]) is None:
        return None
    conversion = "give it the columns path, xmin, ymin, xmax and ymax" if suffix == ".csv" else _ADVICE
    return f"{_TYPES[suffix]} annotations found, such as {file}, in a format that camkit does not read: {conversion}"
