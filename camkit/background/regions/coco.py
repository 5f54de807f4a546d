"""COCO JSON: boxes, polygons, run-length encodings; crowds are only removed (Lin et al. 2014, arXiv:1405.0312)."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from camkit.background.regions.table import Collected, register
from camkit.background.values import Annotations
from camkit.errors import InputError
from camkit.types import Box

_FOLDERS = ("", "annotations", "../annotations")
_NAMED = re.compile(r"coco|instances|annotation", re.IGNORECASE)
_MOST_PIXELS = 1 << 30
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a file that is not what it should be may raise."""


def find(folder: Path) -> list[Path]:
    """List the JSON files beside the pictures, or in ``annotations``, that look like COCO's."""
    files = [file for part in _FOLDERS for file in sorted((folder / part).glob("*.json"))]
    return [file for file in files if _looks_like_it(file)]


def _looks_like_it(file: Path) -> bool:
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        # Broken; by its name it may be meant for one, and reading it says what is wrong.
        return file.parent.name == "annotations" or _NAMED.search(file.stem) is not None
    return isinstance(found, dict) and {"images", "annotations"} <= found.keys()


@register("coco", find)
def read(file: Path) -> Annotations:
    """Read a COCO file of instances.

    Raises:
        InputError: it is not one.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
        pictures = _by_id(found["images"], "file_name")
        categories = _by_id(found.get("categories", ()), "name")
        collected = Collected()
        for row in found["images"]:
            if row.get("width") and row.get("height"):
                width, height = numbers([row["width"], row["height"]], 2)
                collected.sizes[str(row["file_name"])] = (int(width), int(height))
        for row in found["annotations"]:
            _add(collected, row, pictures, categories)
    except OSError as error:
        raise InputError(f"the regions in {file} cannot be read: {error}") from error
    except _BROKEN as error:
        raise InputError(f"{file} is not COCO's JSON of instances: {type(error).__name__}: {error}") from error
    return collected.done("COCO", file)


def _by_id(rows: list[dict[str, Any]], what: str) -> dict[Any, str]:
    """Return what each id stands for; one that stands for two objects is an error."""
    known: dict[Any, str] = {}
    for row in rows:
        name = str(row[what])
        if known.setdefault(row["id"], name) != name:
            raise ValueError(f"the id {row['id']!r} stands for {known[row['id']]!r} and for {name!r}")
    return known


def numbers(found: Any, count: int | None = None) -> list[float]:
    """Return a list of finite numbers, of a length if one is given.

    Raises:
        ValueError: it is no such list.
    """
    proper = isinstance(found, list) and all(type(one) in (int, float) and math.isfinite(one) for one in found)
    if not proper or (count is not None and len(found) != count):
        shown = repr(found)
        raise ValueError(
            f"{'' if count is None else f'{count} '}numbers are expected, not {shown[:80]}{'...' * (len(shown) > 80)}"
        )
    return [float(one) for one in found]


def _add(collected: Collected, row: dict[str, Any], pictures: dict[Any, str], categories: dict[Any, str]) -> None:
    name = pictures.get(row["image_id"])
    if name is None:
        collected.problems["annotations of a picture that the file does not list"].append(str(row.get("id")))
        return
    category = categories.get(row.get("category_id"))
    if category is None:
        collected.problems["annotations of a category that the file does not list"].append(str(row.get("id")))
        return
    outline = _outline(row.get("segmentation") or None)
    box = None
    if row.get("bbox"):
        left, top, width, height = numbers(row["bbox"], 4)
        box = Box(left, top, left + width, top + height)
    elif outline is not None:
        box = _around(outline)
    if box is None:
        collected.problems["annotations with neither box nor outline"].append(name)
        return
    crowd = bool(row.get("iscrowd"))
    if crowd:
        collected.problems["crowds, removed but not explained"].append(name)
    collected.add(name, category, box, outline, crowd=crowd)


def _outline(found: Any) -> list[list[float]] | dict[str, Any] | None:
    """Return polygons of three corners and more, or a run-length encoding that fills its picture.

    Raises:
        KeyError, TypeError, ValueError: it is neither.
    """
    if isinstance(found, dict):
        _runs(found)
        return found
    if found is not None and not isinstance(found, list):
        raise ValueError(f"a segmentation is a list of polygons or a run-length encoding, not {found!r}")
    polygons = [numbers(part) for part in found or ()]
    odd = next((part for part in polygons if len(part) % 2), None)
    if odd is not None:
        raise ValueError(f"a polygon has as many x as y, not {len(odd)} numbers")
    return [part for part in polygons if len(part) >= 6] or None


def _around(outline: list[list[float]] | dict[str, Any]) -> Box:
    if isinstance(outline, dict):
        rows, columns = (np.flatnonzero(decoded(outline).any(axis)) for axis in (1, 0))
        if not len(rows):
            return Box(0, 0, 0, 0)
        return Box(int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
    across, down = ([side for part in outline for side in part[start::2]] for start in (0, 1))
    return Box(min(across), min(down), max(across), max(down))


def decoded(encoding: Mapping[str, Any]) -> Bool[np.ndarray, "h w"]:
    """Return the region of a run-length encoding, compressed or not: runs of outside and inside, column by column.

    Written out here because pycocotools leaves memory as it was where the runs end before the picture does.

    Raises:
        KeyError, TypeError, ValueError: it is none, or its runs do not fill its picture.
    """
    runs = _runs(encoding)
    height, width = map(int, encoding["size"])
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def _runs(encoding: Mapping[str, Any]) -> list[int]:
    height, width = numbers(encoding["size"], 2)
    counts = encoding["counts"]
    runs = _unpacked(counts) if isinstance(counts, str) else [int(one) for one in numbers(counts)]
    if runs != counts and not isinstance(counts, str):
        raise ValueError("the runs of an encoding are whole numbers")
    if min(runs, default=0) < 0 or sum(runs) != height * width or not 0 < height * width <= _MOST_PIXELS:
        raise ValueError(f"the runs of an encoding fill {sum(runs)} pixels, and its size is {encoding['size']}")
    return runs


def _unpacked(text: str) -> list[int]:
    """Return the runs that COCO packs into text: 5 bits a sign, lowest first; from the fourth on as differences."""
    runs: list[int] = []
    signs = iter(text)
    for first in signs:
        value, shift = 0, 0
        for sign in itertools.chain(first, signs):
            bits = ord(sign) - 48
            if not 0 <= bits < 64:
                raise ValueError(f"{sign!r} is no sign of a packed encoding")
            value |= (bits & 31) << shift
            shift += 5
            if not bits & 32:
                break
        else:
            raise ValueError("a packed encoding ends within a number")
        value -= (bits & 16) and 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs
