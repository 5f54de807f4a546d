"""Read COCO JSON: boxes, polygons, run-length encodings and crowds (Lin et al. 2014, arXiv:1405.0312)."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool
from pycocotools import mask as rle

from camkit.background.regions.annotations import (
    AnnotationCollector,
    Annotations,
    are_shares,
    clip_box,
)
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
        parsed = [_parse_annotation(collector, row, pictures, categories) for row in content["annotations"]]
        objects = [annotation for annotation in parsed if annotation is not None]
        shares = are_shares(annotation.box for annotation in objects)
        for annotation in objects:
            if annotation.crowd:
                collector.problems["crowds, removed but not explained"].append(annotation.picture)
            collector.add(*annotation[:4], shares=shares, crowd=annotation.crowd)
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


class _Annotation(NamedTuple):
    picture: str
    category: str
    box: Box
    outline: list[list[float]] | dict[str, Any] | None
    crowd: bool


def _parse_annotation(
    collector: AnnotationCollector, row: Any, pictures: dict[Any, str], categories: dict[Any, str]
) -> _Annotation | None:
    """Return one annotation, or record the problem that it has and return None."""
    name, category = pictures.get(row["image_id"]), categories.get(row.get("category_id"))
    if name is None or category is None:
        collector.problems[
            f"annotations of a {'picture' if name is None else 'category'} that is not listed (an id must be a number "
            "everywhere, or text everywhere)"
        ].append(str(row.get("id")))
        return None
    outline = _parse_segmentation(row.get("segmentation") or None)
    box = None if outline is None else _bounding_box(outline)
    if (box is None or clip_box(box, None) is None) and row.get("bbox"):  # some tools write an empty box or outline
        outline = None
        left, top, width, height = parse_numbers(row["bbox"], 4)
        box = Box(left, top, left + width, top + height)
    if box is None:
        collector.problems["annotations with neither box nor outline"].append(name)
        return None
    return _Annotation(name, category, box, outline, bool(row.get("iscrowd")))


def _parse_segmentation(value: Any) -> list[list[float]] | dict[str, Any] | None:
    """Return the polygons with at least three corners, or a valid run-length encoding; None if there is neither.

    Raises:
        KeyError, TypeError, ValueError: the value is malformed.
    """
    if isinstance(value, dict):
        _parse_runs(value)
        return value
    if value is not None and not isinstance(value, list):
        raise ValueError(f"a segmentation must be polygons or a run-length encoding, not {brief(repr(value))}")
    polygons = [parse_numbers(part) for part in value or ()]
    odd = next((polygon for polygon in polygons if len(polygon) % 2), None)
    if odd is not None:
        raise ValueError(f"a polygon must have pairs of x and y, not {len(odd)} numbers")
    return [polygon for polygon in polygons if len(polygon) >= 6] or None


def _bounding_box(outline: Any) -> Box:
    if not isinstance(outline, list):
        is_packed = isinstance(outline["counts"], str)
        left, top, width, height = rle.toBbox(outline if is_packed else rle.frPyObjects(outline, *outline["size"]))
        return Box(left, top, left + width, top + height)
    across, down = ([side for polygon in outline for side in polygon[start::2]] for start in (0, 1))
    return Box(min(across), min(down), max(across), max(down))


def decode_runs(encoding: Mapping[str, Any]) -> Bool[np.ndarray, "h w"]:
    """Decode a run-length encoding, compressed or not: alternating runs of outside and inside, column by column.

    pycocotools is not used because it leaves memory uninitialised if the runs end before the picture does.

    Raises:
        KeyError, TypeError, ValueError: the encoding is malformed, or its runs do not fill the picture.
    """
    runs = _parse_runs(encoding)
    height, width = map(int, encoding["size"])
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def _parse_runs(encoding: Mapping[str, Any]) -> list[int]:
    height, width = parse_numbers(encoding["size"], 2)
    counts = encoding["counts"]
    runs = _decompress_runs(counts) if isinstance(counts, str) else [int(run) for run in parse_numbers(counts)]
    if runs != counts and not isinstance(counts, str):
        raise ValueError("the runs of an encoding must be whole numbers")
    if min(runs, default=0) < 0 or min(height, width) < 1 or sum(runs) != height * width:
        raise ValueError(
            f"the runs of an encoding fill {sum(runs)} pixels, but its size is {brief(repr(encoding['size']))}"
        )
    return runs


def _decompress_runs(text: str) -> list[int]:
    """Return the runs that COCO compresses into text.

    Each character holds 5 bits of a number, the lowest first, and a flag that more follow. From the fourth run on, a
    number is the difference to the run before the previous one.
    """
    runs: list[int] = []
    characters = iter(text)
    for first in characters:
        value, shift = 0, 0
        for character in itertools.chain(first, characters):
            bits = ord(character) - 48
            if not 0 <= bits < 64:
                raise ValueError(f"{character!r} is not allowed in a compressed encoding")
            value |= (bits & 31) << shift
            shift += 5
            if not bits & 32:
                break
        else:
            raise ValueError("a compressed encoding ends within a number")
        value -= (bits & 16) and 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs
