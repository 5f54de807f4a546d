"""YOLO's text files: a class and a box, or a polygon, on each line, as shares of the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from camkit.background.regions.table import Collected, register
from camkit.background.values import Annotations
from camkit.errors import InputError
from camkit.types import Box

_NAMES = ("classes.txt", "obj.names", "data.yaml", "data.yml", "dataset.yaml")
_OTHER = {"readme.txt", "requirements.txt", "labels.txt", *_NAMES}


def _files(place: Path) -> list[Path]:
    return [file for file in sorted(place.rglob("*.txt")) if file.name.lower() not in _OTHER]


def find(folder: Path) -> list[Path]:
    """Return the folder that holds the files: ``labels``, that beside ``images``, or that of the pictures."""
    parts = list(folder.parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    beside = Path(*parts)
    for place in dict.fromkeys((folder / "labels", folder.parent / "labels", beside, folder)):
        files = _files(place) if place.is_dir() else []
        if any(map(_is_of_numbers, files)):
            return [place]
    return []


def _is_of_numbers(file: Path) -> bool:
    try:
        rows = _rows(file)
    except (OSError, ValueError):
        return False
    return bool(rows) and all(len(row) >= 5 for row in rows)


def _rows(file: Path) -> list[list[float]]:
    lines = file.read_text(encoding="utf-8-sig").splitlines()
    return [[float(part) for part in line.split()] for line in lines if line.strip()]


@register("yolo", find)
def read(place: Path) -> Annotations:
    """Read every text file below a folder; ``classes.txt`` or ``data.yaml`` beside or above it names the classes.

    Raises:
        InputError: a line is not a class and a box or polygon.
    """
    names = _names(place)
    collected = Collected()
    for file in _files(place):
        try:
            rows = _rows(file)
        except (OSError, ValueError) as error:
            raise InputError(f"{file} is not an annotation of YOLO: {error}") from error
        picture = file.relative_to(place).with_suffix("").as_posix()
        for row in rows:
            if len(row) < 5 or (len(row) > 6 and len(row) % 2 == 0) or not np.isfinite(row).all():
                raise InputError(f"{file}: a line is a class and a box (5 numbers) or a polygon, not {row}")
            if row[0] < 0 or row[0] % 1:
                raise InputError(f"{file}: a class is a whole number from 0, not {row[0]:g}")
            category = names.get(int(row[0]), "") if names else str(int(row[0]))
            if not category:
                collected.problems["objects of a class that the file of names does not list"].append(picture)
                continue
            if len(row) > 6:
                across, down = row[1::2], row[2::2]
                around = Box(min(across), min(down), max(across), max(down))
                collected.add(picture, category, around, [row[1:]], shares=True)
            else:
                x, y, width, height = row[1:5]
                box = Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
                collected.add(picture, category, box, shares=True)
    return collected.done("YOLO", place)


def _names(place: Path) -> dict[int, str]:
    """Return the names of the classes by number, as the nearest file that lists them says."""
    for folder in (place, place.parent, place.parent.parent):
        for name in _NAMES:
            file = folder / name
            if not file.is_file():
                continue
            try:
                found = _listed(file)
            except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError) as error:
                raise InputError(f"the classes in {file} cannot be read: {error}") from error
            if found is not None:
                return found
    return {}


def _listed(file: Path) -> dict[int, str] | None:
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix not in (".yaml", ".yml"):
        return {number: line.strip() for number, line in enumerate(text.splitlines())}
    found: Any = (yaml.safe_load(text) or {}).get("names")
    if isinstance(found, list):
        return {number: str(one) for number, one in enumerate(found)}
    if isinstance(found, dict):
        return {int(number): str(one) for number, one in found.items()}
    if found is not None:
        raise ValueError(f"names must be a list, or a table from number to name, not {found!r}")
    return None
