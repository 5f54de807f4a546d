"""COCO JSON: boxes, polygons and run-length encodings; crowds are ignored (Lin et al. 2014, arXiv:1405.0312)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from camkit.background.regions.table import Collected, register
from camkit.background.values import Annotations
from camkit.errors import InputError
from camkit.values import Box

_FOLDERS = ("", "annotations", "../annotations")


def find(folder: Path) -> list[Path]:
    """List the JSON files beside the pictures, or in ``annotations``, that look like COCO's."""
    files = [file for part in _FOLDERS for file in sorted((folder / part).glob("*.json"))]
    return [file for file in files if _looks_like_it(file)]


def _looks_like_it(file: Path) -> bool:
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"images", "annotations"} <= found.keys()


@register("coco", find)
def read(file: Path) -> Annotations:
    """Read a COCO file of instances.

    Raises:
        InputError: it is not one.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
        pictures = {row["id"]: row for row in found["images"]}
        categories = {row["id"]: str(row["name"]) for row in found.get("categories", ())}
        collected = Collected()
        for row in pictures.values():
            if "width" in row and "height" in row:
                collected.sizes[row["file_name"]] = (int(row["width"]), int(row["height"]))
        for row in found["annotations"]:
            _add(collected, row, pictures, categories)
    except OSError as error:
        raise InputError(f"the regions in {file} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not COCO's JSON of instances: {type(error).__name__}: {error}") from error
    return collected.done("COCO", file)


def _add(collected: Collected, row: dict[str, Any], pictures: dict[Any, Any], categories: dict[Any, str]) -> None:
    picture = pictures.get(row["image_id"])
    if picture is None:
        collected.problems["annotations of a picture that the file does not list"].append(str(row.get("id")))
        return
    name = str(picture["file_name"])
    if row.get("iscrowd"):
        collected.problems["crowds, ignored"].append(name)
        return
    category = categories.get(row.get("category_id"))
    if category is None:
        collected.problems["annotations of a category that the file does not list"].append(str(row.get("id")))
        return
    outline = row.get("segmentation") or None
    if isinstance(outline, list):
        outline = [part for part in outline if len(part) >= 6] or None
    box = None
    if "bbox" in row:
        left, top, width, height = map(float, row["bbox"])
        box = Box(left, top, left + width, top + height)
    if box is None and outline is None:
        collected.problems["annotations with neither box nor outline"].append(name)
        return
    collected.add(name, category, box, outline)
