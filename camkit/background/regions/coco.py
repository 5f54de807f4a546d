"""Read COCO JSON: boxes, polygons, run-length encodings and crowds (Lin et al. 2014, arXiv:1405.0312)."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from pycocotools import mask as rle

from camkit.background.regions.annotations import AnnotationCollector, Annotations, clip_box
from camkit.errors import InputError, brief
from camkit.images.files import files_in
from camkit.types import Box

_FOLDERS = ("", "annotations", "../annotations")
_USUAL_NAME = re.compile(r"coco|instances|annotation", re.IGNORECASE)

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""The errors that reading a malformed file may raise."""


def find(folder: Path) -> list[Path]:
    """List the JSON files in a folder, or in ``annotations`` in or beside it, that look like COCO."""
    files = [file for part in _FOLDERS for file in files_in(folder / part, [".json"], deep=False)]
    return [file for file in files if looks_like_coco(file)]


def looks_like_coco(file: Path) -> bool:
    """Return whether a JSON file is COCO; a broken file counts if it has a usual name."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        # A broken file with a usual name counts, so that reading it tells the user what is wrong.
        return file.parent.name == "annotations" or _USUAL_NAME.search(file.stem) is not None
    return isinstance(content, dict) and {"images", "annotations"} <= content.keys()


def read(file: Path) -> Annotations:
    """Read a COCO file of instances.

    Raises:
        InputError: the file is not a valid COCO file of instances.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
        pictures = _names_by_id(content["images"], "file_name")
        categories = _names_by_id(content.get("categories", []), "name")
        collector = AnnotationCollector()
        for row in content["images"]:
            if (row.get("width") or 0) > 0 and (row.get("height") or 0) > 0:
                width, height = parse_numbers([row["width"], row["height"]], 2)
                collector.sizes[str(row["file_name"])] = (int(width), int(height))
        for row in content["annotations"]:
            _add(collector, row, pictures, categories)
    except OSError as error:
        raise InputError(f"the regions in {file} cannot be read: {brief(error)}") from error
    except _MALFORMED as error:
        raise InputError(f"{file} is not a COCO file of instances: {type(error).__name__}: {brief(error)}") from error
    return collector.finish("COCO", file)


def _names_by_id(rows: Any, field: str) -> dict[Any, str]:
    """Return the name for each id.

    Raises:
        ValueError: one id has two names.
    """
    names: dict[Any, str] = {}
    for row in rows:
        name = str(row[field])
        if names.setdefault(row["id"], name) != name:
            raise ValueError(
                f"the id {brief(row['id'])} is used for {brief(repr(names[row['id']]))} and for {brief(repr(name))}"
            )
    return names


def parse_numbers(value: Any, count: int | None = None) -> list[float]:
    """Return a list of finite numbers; ``count`` is the length it must have.

    Raises:
        ValueError: the value is not such a list.
    """
    valid = isinstance(value, list) and all(type(number) in (int, float) and math.isfinite(number) for number in value)
    if not valid or (count is not None and len(value) != count):
        raise ValueError(f"expected {'' if count is None else f'{count} '}numbers, not {brief(repr(value))}")
    return [float(number) for number in value]


def _add(collector: AnnotationCollector, row: Any, pictures: dict[Any, str], categories: dict[Any, str]) -> None:
    """Add one annotation, or record the problem that it has."""
    name, category = pictures.get(row["image_id"]), categories.get(row.get("category_id"))
    if name is None or category is None:
        collector.problems[
            f"annotations of a {'picture' if name is None else 'category'} that is not listed (an id must be a number "
            "everywhere, or text everywhere)"
        ].append(str(row.get("id")))
        return
    outline: Any = row.get("segmentation") or None
    if isinstance(outline, list):
        outline = [parse_numbers(part) for part in outline if len(part) >= 6] or None
    box = None if outline is None else _bounding_box(outline)
    if (box is None or clip_box(box, None) is None) and row.get("bbox"):  # some tools write an empty box or outline
        outline = None
        left, top, width, height = parse_numbers(row["bbox"], 4)
        box = Box(left, top, left + width, top + height)
    if box is None:
        collector.problems["annotations with neither box nor outline"].append(name)
        return
    if row.get("iscrowd"):
        collector.problems["crowds, removed but not explained"].append(name)
    collector.add(name, category, box, outline, crowd=bool(row.get("iscrowd")))


def _bounding_box(outline: Any) -> Box:
    if isinstance(outline, list):
        across, down = ([side for polygon in outline for side in polygon[start::2]] for start in (0, 1))
        return Box(min(across), min(down), max(across), max(down))
    left, top, width, height = rle.toBbox(packed_runs(outline))
    return Box(left, top, left + width, top + height)


def packed_runs(outline: Any) -> Any:
    """Return a run-length encoding in compressed form."""
    return outline if isinstance(outline["counts"], str) else rle.frPyObjects(outline, *outline["size"])
