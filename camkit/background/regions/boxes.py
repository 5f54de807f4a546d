"""Read a CSV of boxes: each row has a picture and the corners of a box, in columns that the header names."""

from __future__ import annotations

import csv
from pathlib import Path

from camkit.background.regions.annotations import AnnotationCollector, Annotations
from camkit.errors import InputError, brief
from camkit.images.files import files_in
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


def header_of(file: Path) -> list[str]:
    """Return the first row of a CSV file; an empty list if it cannot be read."""
    try:
        with file.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
            return next(csv.reader(lines), [])
    except (OSError, csv.Error):
        return []


def find_columns(header: list[str], names: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the column of a table for each meaning, by the usual names; a meaning without a column is left out."""
    by_name = {column.strip().lower(): column for column in header}
    columns = {
        meaning: next((by_name[name] for name in usual if name in by_name), None) for meaning, usual in names.items()
    }
    return {meaning: column for meaning, column in columns.items() if column is not None}


def _box_columns(header: list[str]) -> dict[str, str] | None:
    """Return the columns of a table of boxes; None if there is no picture or no complete box."""
    columns = find_columns(header, {"picture": _PICTURE, "class": _CLASS, **_SIDES})
    corners = {"left", "top", "right", "bottom"} <= columns.keys()
    sized = {"width", "height"} <= columns.keys() and (
        {"x", "y"} <= columns.keys() or {"left", "top"} <= columns.keys()
    )
    return columns if "picture" in columns and (corners or sized) else None


def find(folder: Path) -> list[Path]:
    """List the CSV files in a folder whose header names a picture and a box."""
    return [file for file in files_in(folder, [".csv"], deep=False) if _box_columns(header_of(file))]


def read(file: Path) -> Annotations:
    """Read a table of boxes in pixels, or in shares of the picture as in Open Images.

    Raises:
        InputError: a column is missing, or a row has no picture or no valid box.
    """
    collector = AnnotationCollector()
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            table = csv.DictReader(lines)
            columns = _box_columns(list(table.fieldnames or ()))
            if columns is None:
                raise InputError(
                    f"{file} needs columns for a picture and its box, such as path, xmin, ymin, xmax and ymax"
                )
            for row in table:
                if any(row.get(None, ())):
                    raise ValueError("it has more values than the header has columns")  # noqa: TRY301
                picture, category = (row.get(columns.get(name, "")) or "" for name in ("picture", "class"))
                collector.add(picture.strip(), category.strip(), _parse_box(row, columns))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"the boxes in {file} cannot be read: {brief(error)}") from error
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{file}, line {table.line_num}: expected a picture and four numbers for its box: {brief(error)}"
        ) from error
    return collector.finish("CSV boxes", file)


def _parse_box(row: dict[str, str], columns: dict[str, str]) -> Box:
    sides = {side: float(row[column]) for side, column in columns.items() if side in _SIDES}
    left, top = (sides["left"], sides["top"]) if "left" in sides else (sides["x"], sides["y"])
    if "right" in sides:
        return Box(left, top, sides["right"], sides["bottom"])
    return Box(left, top, left + sides["width"], top + sides["height"])
