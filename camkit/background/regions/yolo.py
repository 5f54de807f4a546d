"""Read YOLO text files: each line has a class and a box, a polygon or a pose, in shares of the picture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml

from camkit.background.regions.annotations import LARGEST_SHARE, AnnotationCollector, Annotations
from camkit.errors import InputError, as_error, brief
from camkit.images.files import PICTURE_SUFFIXES, files_in, has_picture_suffix
from camkit.kit.wording import listed
from camkit.types import Box

_TABLES = ("data.yaml", "data.yml", "dataset.yaml")
_CLASS_FILES = ("classes.txt", "obj.names", *_TABLES)
_OTHER_FILES = {"requirements.txt", "labels.txt", *_CLASS_FILES}

_Row: TypeAlias = tuple[str, list[float]]
"""The class of a line, a number or a name, and the numbers after it."""


def find(folder: Path) -> list[Path]:
    """Return the folder that holds the text files: ``labels`` in or beside the pictures' folder, or that folder."""
    for place in _places(folder):
        for file in _text_files(place):
            with contextlib.suppress(OSError, ValueError):
                rows = _read_rows(file)
                if rows and all(len(numbers) >= 4 and not has_picture_suffix(name) for name, numbers in rows):
                    return [place]
    return []


def refuse_empty(folder: Path) -> None:
    """Refuse a folder of pictures whose text files are all empty, as after an export that went wrong."""
    stems = {picture.stem for picture in files_in(folder, PICTURE_SUFFIXES)}
    for place in _places(folder):
        files = [file for file in _text_files(place) if not stems or file.stem in stems]
        if files and not any(file.read_bytes().strip() for file in files):
            raise InputError(f"the text files in {place} are all empty: export the labels again")


def _places(folder: Path) -> list[Path]:
    """List the folders that may hold a folder's text files, such as ``labels/val`` for ``images/val``."""
    parts = list(folder.parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return [*dict.fromkeys((folder / "labels", folder.parent / "labels", Path(*parts), folder))]


def _text_files(folder: Path) -> list[Path]:
    """List the text files that may be annotations; data sets also hold README.dataset.txt and the like."""
    files = ((file, file.name.lower()) for file in files_in(folder, [".txt"]))
    return [file for file, name in files if name not in _OTHER_FILES and not name.startswith("readme")]


def _read_rows(file: Path) -> list[_Row]:
    """Return the lines of a file; none if it only lists pictures, as the train.txt of CVAT and Darknet does."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    rows: list[_Row] = []
    for words in [] if all(map(has_picture_suffix, lines)) else map(str.split, lines):
        count = next((place for place, word in enumerate(words) if _is_number(word)), len(words))
        count = max(1, count)  # a class is a number, or a name of one or more words
        rows.append((" ".join(words[:count]), [float(word) for word in words[count:]]))
    return rows


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def read(folder: Path, table: Path | None = None) -> Annotations:
    """Read all text files in a folder; ``classes.txt`` or ``data.yaml`` in or above it names the classes.

    A ``table`` with the content of a data.yaml comes first. A class may also be a name. Only the box of a pose is used.

    Raises:
        InputError: a line is not a class and a box, polygon or pose.
    """
    class_names = _class_names(_files_of_names(folder, _CLASS_FILES, table))
    rows_of: dict[Path, list[_Row]] = {}
    for file in _text_files(folder):
        try:
            rows_of[file] = _read_rows(file)
        except (OSError, ValueError) as error:
            raise InputError(f"{file} is not a YOLO annotation: {brief(error)}") from error
    collector = AnnotationCollector()
    all_numbers = [numbers for rows in rows_of.values() for _, numbers in rows]
    is_pose = _pose_test(_files_of_names(folder, _TABLES, table), all_numbers)
    for file, rows in rows_of.items():
        picture = file.relative_to(folder).with_suffix("").as_posix()
        for name, numbers in rows:
            pose = is_pose(numbers)
            _check_row(file, name, numbers, is_pose=pose)
            outline = len(numbers) > 5 and not pose
            in_pixels = max(map(abs, numbers if outline else numbers[:4])) >= LARGEST_SHARE
            category = name
            if _is_number(name):
                category = class_names.get(int(float(name)), "") if class_names else str(int(float(name)))
            if not category:
                collector.problems["objects of a class that the file of class names does not list"].append(picture)
            elif in_pixels:
                collector.problems["boxes in pixels, but YOLO needs shares of the picture (0 to 1)"].append(picture)
            elif outline:
                across, down = numbers[::2], numbers[1::2]
                bounds = Box(min(across), min(down), max(across), max(down))
                collector.add(picture, category, bounds, [numbers])
            else:  # a detector's confidence or keypoints may follow the box
                x, y, width, height = numbers[:4]
                sides = x - width / 2, y - height / 2, x + width / 2, y + height / 2
                collector.add(picture, category, Box(*sides))
    return collector.finish("YOLO", folder, shares=True)


_PARTS = ("val", "valid", "test", "train")
"""The parts of a data set in data.yaml, the best for a check first: a model knows its training pictures by heart."""


def pictures_of(table: Path) -> Path:
    """Return the folder of a data set's validation pictures, which its data.yaml names.

    Raises:
        InputError: the file cannot be read, or names no folder that exists.
    """
    settings = _settings(table)
    named = {part: settings[part] for part in _PARTS if settings.get(part)}
    if not named:
        raise InputError(f"{table} names no folder as {listed(_PARTS, 'or')}; pass the folder of the pictures itself")
    root = table.parent / str(settings.get("path") or "")
    for part, folder in named.items():
        if not isinstance(folder, str):
            raise InputError(f"{table}: {part} must be one folder; pass the folder of the pictures itself")
        # Exports of annotation tools write ../valid/images, as seen from a folder that does not exist.
        for place in (root / folder, table.parent / folder, table.parent / folder.removeprefix("../")):
            if place.is_dir():
                return place
    raise InputError(f"no folder that {table} names exists: {', '.join(named.values())}; pass the folder itself")


def _settings(table: Path) -> dict[str, Any]:
    """Return what a data.yaml says.

    Raises:
        InputError: it cannot be read.
    """
    with as_error(InputError, lambda error: f"{table} cannot be read as a data.yaml: {brief(error)}"):
        return dict(yaml.safe_load(table.read_text(encoding="utf-8-sig")) or {})


def _check_row(file: Path, name: str, numbers: list[float], *, is_pose: bool) -> None:
    """Refuse a row that is not a class with a box (perhaps with a confidence), a polygon or a pose."""
    count = len(numbers)
    if count < 4 or (count > 5 and count % 2 and not is_pose) or not np.isfinite(numbers).all():
        raise InputError(
            f"{file}: each line must be a class and a box (4 numbers) or a polygon, not "
            f"{brief(' '.join([name, *map(str, numbers)]))}; for poses, data.yaml must have kpt_shape"
        )
    if _is_number(name) and not (float(name) >= 0 and float(name).is_integer()):
        raise InputError(f"{file}: a class must be a whole number from 0 or a name, not {name}")


def _pose_test(tables: list[Path], rows: list[list[float]]) -> Callable[[list[float]], bool]:
    """Return a function that tells whether the numbers of a row are a box with keypoints.

    ``kpt_shape``, in one of the tables, says how many keypoints there are; each has 2 or 3 numbers. A detector
    adds its confidence to every row. Without ``kpt_shape``, the rows are poses if, in all rows that are longer than a
    box, every third number after the box is a visibility (0, 1 or 2). Keypoints of two numbers need ``kpt_shape``,
    because they look like a polygon. A confidence and a track number look like one too; they count as such if all
    longer rows have six numbers that end in a whole number.
    """
    longer = [numbers for numbers in rows if len(numbers) > 5]
    shape = next((shape for table in tables if (shape := _settings(table).get("kpt_shape"))), None)
    if shape is not None:
        with as_error(InputError, lambda error: f"kpt_shape is {shape!r}, not two numbers: {brief(error)}"):
            lengths = {4 + size * int(shape[0]) for size in (2, 3)}
        used = {*map(len, longer)}
        lengths |= used & {length + 1 for length in lengths} if len(used) == 1 else set()
        return lambda numbers: len(numbers) in lengths
    visible = all(len(numbers) % 3 == 1 and {*numbers[6::3]} <= {0, 1, 2} for numbers in longer)
    poses = visible and any(number % 1 for numbers in longer for number in numbers)
    tracks = all(len(numbers) == 6 and numbers[5].is_integer() for numbers in longer)
    return lambda numbers: (poses or tracks) and len(numbers) > 5


def _files_of_names(folder: Path, names: tuple[str, ...], table: Path | None) -> list[Path]:
    """List the files with these names in a folder and the two above it, after the table that the user named."""
    files = (place / name for place in (folder, folder.parent, folder.parent.parent) for name in names)
    return [file for file in (table, *files) if file is not None and file.is_file()]


def _class_names(files: list[Path]) -> dict[int, str]:
    """Return the class names by number from the first file that lists them; nothing if there is none.

    Raises:
        InputError: a file cannot be read.
    """
    for file in files:
        try:
            if file.suffix not in (".yaml", ".yml"):  # one per line
                return {number: line.strip() for number, line in enumerate(file.read_text("utf-8-sig").splitlines())}
            names = _settings(file).get("names")
            if names is not None:
                by_number = dict(enumerate(names)) if isinstance(names, list) else names
                return {int(number): str(name) for number, name in by_number.items()}
        except (OSError, AttributeError, TypeError, ValueError) as error:
            raise InputError(f"the classes in {file} cannot be read: {brief(error)}") from error
    return {}
