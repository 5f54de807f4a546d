"""Read YOLO text files: each line has a class and a box or a polygon, in shares of the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from camkit.background.regions.table import AnnotationCollector, register, shorten
from camkit.background.values import Annotations
from camkit.errors import InputError, brief
from camkit.images.files import files_in
from camkit.types import Box

_CLASS_FILES = ("classes.txt", "obj.names", "data.yaml", "data.yml", "dataset.yaml")
_OTHER_FILES = {"readme.txt", "requirements.txt", "labels.txt", *_CLASS_FILES}


def find(folder: Path) -> list[Path]:
    """Return the folder that holds the text files: ``labels`` in or beside the pictures' folder, or that folder."""
    for place in dict.fromkeys((folder / "labels", folder.parent / "labels", _labels_of_images(folder), folder)):
        if place.is_dir() and any(map(_looks_like_yolo, _text_files(place))):
            return [place]
    return []


def _labels_of_images(folder: Path) -> Path:
    """Return a path with its last ``images`` replaced by ``labels``."""
    parts = list(folder.parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return Path(*parts)


def _text_files(folder: Path) -> list[Path]:
    return [file for file in files_in(folder, [".txt"]) if file.name.lower() not in _OTHER_FILES]


def _looks_like_yolo(file: Path) -> bool:
    try:
        rows = _read_rows(file)
    except (OSError, ValueError):
        return False
    return bool(rows) and all(len(row) >= 5 for row in rows)


def _read_rows(file: Path) -> list[list[float]]:
    lines = file.read_text(encoding="utf-8-sig").splitlines()
    return [[float(part) for part in line.split()] for line in lines if line.strip()]


@register("yolo", find)
def read(folder: Path) -> Annotations:
    """Read all text files in a folder; ``classes.txt`` or ``data.yaml`` in or above it names the classes.

    Raises:
        InputError: a line is not a class and a box or polygon.
    """
    class_names = _find_class_names(folder)
    collector = AnnotationCollector()
    for file in _text_files(folder):
        try:
            rows = _read_rows(file)
        except (OSError, ValueError) as error:
            raise InputError(f"{file} is not a YOLO annotation: {brief(error)}") from error
        picture = file.relative_to(folder).with_suffix("").as_posix()
        for row in rows:
            _check_row(file, row)
            category = class_names.get(int(row[0]), "") if class_names else str(int(row[0]))
            if category:
                _add_object(collector, picture, category, row[1:])
            else:
                collector.problems["objects of a class that the file of class names does not list"].append(picture)
    return collector.finish("YOLO", folder)


def _check_row(file: Path, row: list[float]) -> None:
    """Refuse a row that is not a class with a box (perhaps with a confidence) or with a polygon."""
    if len(row) < 5 or (len(row) > 6 and len(row) % 2 == 0) or not np.isfinite(row).all():
        raise InputError(f"{file}: each line must be a class and a box (5 numbers) or a polygon, not {shorten(row)}")
    if row[0] < 0 or row[0] % 1:
        raise InputError(f"{file}: a class must be a whole number from 0, not {row[0]:g}")


def _add_object(collector: AnnotationCollector, picture: str, category: str, coordinates: list[float]) -> None:
    if len(coordinates) > 5:
        across, down = coordinates[::2], coordinates[1::2]
        bounds = Box(min(across), min(down), max(across), max(down))
        collector.add(picture, category, bounds, [coordinates], shares=True)
    else:  # the fifth number is a detector's confidence
        x, y, width, height = coordinates[:4]
        box = Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        collector.add(picture, category, box, shares=True)


def _find_class_names(folder: Path) -> dict[int, str]:
    """Return the class names by number from the nearest file that lists them; nothing if there is none."""
    for place in (folder, folder.parent, folder.parent.parent):
        for name in _CLASS_FILES:
            file = place / name
            if not file.is_file():
                continue
            try:
                names = _read_class_names(file)
            except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError) as error:
                raise InputError(f"the classes in {file} cannot be read: {brief(error)}") from error
            if names is not None:
                return names
    return {}


def _read_class_names(file: Path) -> dict[int, str] | None:
    """Return the names in a text file (one per line) or a YAML file; None for YAML without names."""
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix not in (".yaml", ".yml"):
        return {number: line.strip() for number, line in enumerate(text.splitlines())}
    names: Any = (yaml.load(text, _WithoutAliases) or {}).get("names")
    if names is None:
        return None
    by_number = dict(enumerate(names)) if isinstance(names, list) else names
    if not isinstance(by_number, dict) or any(isinstance(name, (list, dict)) for name in by_number.values()):
        raise ValueError("names must be a list or a table from number to name")
    return {int(number): str(name) for number, name in by_number.items()}


class _WithoutAliases(yaml.SafeLoader):
    """Refuses aliases: a few lines of aliases to aliases stand for billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node."""
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not supported; write the values out")
        return super().compose_node(parent, index)
