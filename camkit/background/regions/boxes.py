"""A CSV of boxes: a picture and its corners on each line, named by the first line."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from camkit.background.regions.table import Collected, register
from camkit.background.values import Annotations
from camkit.errors import InputError
from camkit.types import Box

_PICTURE = ("path", "file", "filename", "file_name", "image", "image_id", "imageid", "image_path", "picture", "name")
_CLASS = ("class", "label", "category", "class_name", "labelname")
_SIDES = {
    "left": ("xmin", "x_min", "left", "x1"),
    "top": ("ymin", "y_min", "top", "y1"),
    "right": ("xmax", "x_max", "right", "x2"),
    "bottom": ("ymax", "y_max", "bottom", "y2"),
    "width": ("w", "width", "box_width", "bbox_width"),
    "height": ("h", "height", "box_height", "bbox_height"),
    "x": ("x", "bbox_x"),
    "y": ("y", "bbox_y"),
}


_MOST_OF_SHARES = 1.5
"""A table none of whose numbers reaches this is of shares: as pixels all its boxes would lie in a corner."""


def columns(header: list[str], wanted: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Return which column of a table is which, by the names that are usual."""
    known = {name.strip().lower(): name for name in header}
    found = {what: next((known[name] for name in names if name in known), None) for what, names in wanted.items()}
    return {what: name for what, name in found.items() if name is not None}


def _understood(header: list[str]) -> dict[str, str] | None:
    found = columns(header, {"picture": _PICTURE, "class": _CLASS, **_SIDES})
    corners = {"left", "top", "right", "bottom"} <= found.keys()
    sized = {"width", "height"} <= found.keys() and ({"x", "y"} <= found.keys() or {"left", "top"} <= found.keys())
    return found if "picture" in found and (corners or sized) else None


def find(folder: Path) -> list[Path]:
    """List the CSV files beside the pictures whose first line names a picture and a box."""
    found = []
    for file in sorted(folder.glob("*.csv")):
        try:
            with file.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
                if _understood(next(csv.reader(lines), [])):
                    found.append(file)
        except (OSError, csv.Error):
            continue
    return found


@register("boxes", find)
def read(file: Path) -> Annotations:
    """Read a table of boxes in pixels, or in shares of the picture as Open Images has them.

    Raises:
        InputError: the columns are not understood, or a number is none.
    """
    collected = Collected()
    rows: list[tuple[str, str, Box]] = []
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            table = csv.DictReader(lines)
            found = _understood(list(table.fieldnames or ()))
            if found is None:
                raise InputError(
                    f"{file} has no columns for a picture and its box, such as path, xmin, ymin, xmax, ymax"
                )
            for row in table:
                if any(row.get(None, ())):
                    raise ValueError("it has more values than the first line has names")  # noqa: TRY301
                picture, category = (row.get(found.get(what, "")) or "" for what in ("picture", "class"))
                if not picture.strip():
                    raise ValueError("it names no picture")  # noqa: TRY301
                rows.append((picture.strip(), category.strip(), _box(row, found)))
            shares = all(max(box) < _MOST_OF_SHARES for _, _, box in rows)
            for picture, category, box in rows:
                collected.add(picture, category, box, shares=shares)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"the boxes in {file} cannot be read: {error}") from error
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{file}, line {table.line_num}: a picture and a box of numbers are expected: {error}"
        ) from error
    return collected.done("CSV boxes", file)


def _box(row: dict[str, str], found: dict[str, str]) -> Box:
    def number(what: str) -> float:
        value = float(row[found[what]])
        if not math.isfinite(value):
            raise ValueError(f"{value} is no place in a picture")
        return value

    left, top = (number("left"), number("top")) if "left" in found else (number("x"), number("y"))
    if "right" in found:
        return Box(left, top, number("right"), number("bottom"))
    return Box(left, top, left + number("width"), top + number("height"))
