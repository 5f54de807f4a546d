"""Annotated objects: find and read them, tell which picture an object is in, and draw the region that it covers.

In the order of the file: what a source says (``ObjectAnnotation``, ``Annotations``); the objects of a picture
(``RegionIndex``); the pixels of the objects (``object_region``); and last the formats, each with its readers.

Regions are read from COCO, Pascal VOC, YOLO, a CSV of boxes, or mask pictures. For each format, ``find_*`` lists its
files or folders for a folder of pictures, and ``read_*`` reads one of these.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from xml.etree import ElementTree

import cv2
import numpy as np
import torch
import yaml
from jaxtyping import Bool, Float
from pycocotools import mask as rle
from torch import Tensor
from torchvision.datasets import VOCDetection

from camkit.errors import ImageError, InputError, as_error, brief, refuse_pipe
from camkit.images.files import PICTURE_SUFFIXES, files_in, has_picture_suffix
from camkit.images.masks import (
    MASK_SUFFIXES,
    MaskFile,
    is_mask,
    is_photograph,
    names_masks,
    picture_of,
    understand_masks,
)
from camkit.images.regions import Shades, extent, preprocess_region
from camkit.kit.wording import first_of, listed
from camkit.options.settings import normalize_name
from camkit.types import Box, Preprocess


@dataclass(frozen=True, eq=False)
class ObjectAnnotation:
    """One annotated object of a picture.

    Attributes:
        category: the category; "" if the annotation names none.
        box: the box in pixels of the picture; None if only an outline is known.
        outline: a COCO segmentation (polygons or a run-length encoding) or a mask picture; None if only a box is known.
        shares: True if the coordinates are shares of the picture's width and height instead of pixels.
        crowd: True for a COCO crowd. The check removes crowds with the objects, but does not explain them.
        size: width and height of the annotated picture, if the annotation states them.
    """

    category: str
    box: Box | None = None
    outline: list[Any] | dict[str, Any] | MaskFile | None = None
    shares: bool = False
    crowd: bool = False
    size: tuple[int, int] | None = None

    @property
    def area(self) -> float:
        """The area of the box; 0 if there is none."""
        return 0.0 if self.box is None else (self.box.right - self.box.left) * (self.box.bottom - self.box.top)

    @property
    def kind(self) -> Literal["mask", "box"]:
        """Return "mask" if the outline is known, "box" if only the box is."""
        return "box" if self.outline is None else "mask"


@dataclass(eq=False)
class Annotations:
    """The annotated objects of one source, such as a COCO file. A reader adds them, and returns ``finished()``.

    Attributes:
        format: what camkit calls the format.
        source: the file or folder.
        facts: how camkit understood the source, for the user.
        added: each object with its picture, in the order of the source.
        objects: the objects that can be used, by the name that the source gives their picture.
        problems: for each kind of problem, the pictures or annotations that have it.
    """

    format: str
    source: Path
    facts: tuple[str, ...] = ()
    added: list[tuple[str, ObjectAnnotation]] = field(default_factory=list)
    objects: dict[str, list[ObjectAnnotation]] = field(default_factory=lambda: defaultdict(list))
    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @functools.cached_property
    def categories(self) -> set[str]:
        """The categories of the objects that can be used, as ``normalize_name`` writes them."""
        return {normalize_name(each.category) for objects in self.objects.values() for each in objects} - {""}

    def add(self, picture: str, annotation: ObjectAnnotation) -> None:
        """Add an object.

        Raises:
            ValueError: no picture is named, or a side of the box is not finite.
        """
        if not Path(picture).name or not all(map(math.isfinite, annotation.box or ())):
            raise ValueError(f"an object needs a picture's name and finite sides, not {picture!r} and {annotation.box}")
        self.added.append((picture, annotation))

    def finished(self, *, shares: bool | None = None, first: int = 0) -> Annotations:
        """Tell the objects that can be used from boxes with no area, outside their picture or in another unit.

        Args:
            shares: whether boxes are in shares of the picture; None for shares if all lie in the corner pixels.
            first: the number of the first pixel.
        """
        if shares is None:
            shares = are_shares(annotation.box for _, annotation in self.added if annotation.box is not None)
        for picture, annotation in self.added:
            box = annotation.box
            if box is not None and first and not shares:  # the last pixel belongs to the box
                box = Box(box.left - first, box.top - first, *box[2:])
            clipped = None if box is None else clip_box(box, _UNIT_SQUARE if shares else annotation.size)
            problem = "" if clipped == box else "boxes clipped to their picture"
            if box is not None and clipped is None:
                empty = box.right <= box.left or box.bottom <= box.top
                problem = "boxes without an area" if empty else "boxes outside their picture"
            elif clipped is not None and not shares and are_shares([clipped]):
                problem = "boxes inside the corner pixel, probably given as shares instead of pixels"
            else:
                self.objects[picture].append(replace(annotation, box=clipped, shares=shares))
            if problem:
                self.problems[problem].append(picture)
        return self


LARGEST_SHARE = 1.5
"""If all sides of all boxes of a source are below this, they count as shares of the picture. In pixels, all boxes would
be in its corner."""


def are_shares(boxes: Iterable[Box]) -> bool:
    """Return whether boxes are in shares of the picture and not in pixels."""
    return all(max(box) < LARGEST_SHARE for box in boxes)


_UNIT_SQUARE = (1, 1)
"""The size of a picture in shares of its sides."""


def clip_box(box: Box, size: tuple[int, int] | None) -> Box | None:
    """Return the part of a box inside its picture; None if there is none or the box has no area."""
    clipped = box
    if size is not None:
        clipped = Box(max(box.left, 0), max(box.top, 0), min(box.right, size[0]), min(box.bottom, size[1]))
    if not (clipped.right > clipped.left and clipped.bottom > clipped.top):
        return None
    # Annotation tools round coordinates, so a box may reach out of its picture by a pixel, or a hundredth of its side.
    slack = 1.0 if size != _UNIT_SQUARE else 0.01
    return box if max(abs(a - b) for a, b in zip(clipped, box, strict=True)) <= slack else clipped


MOST_LISTED = 5
"""The most names that a sentence lists."""


class RegionIndex:
    """Finds the objects that a source annotates in a picture.

    Names are compared as paths first, then as paths without extension, with the picture's first folder left out ("a/0"
    is then "images/a/0.png"), as file names, and as file names without extension. A match counts only if exactly one
    annotated name and exactly one picture share the key. So an ambiguous name matches nothing, and no picture receives
    the objects of another.
    """

    def __init__(self, source: Annotations, pictures: Collection[str]) -> None:
        self.source = source
        self.objects: dict[str, list[ObjectAnnotation]] = {}
        """The objects of the pictures that have any."""
        several: set[str] = set()
        keys = zip(_keys_of(source.objects), _keys_of(pictures, below_folder=True), strict=True)
        for annotated_names, picture_names in keys:
            for shared in annotated_names.keys() & picture_names.keys():
                if len(annotated_names[shared]) == len(picture_names[shared]) == 1:
                    objects = source.objects[annotated_names[shared].pop()]
                    self.objects.setdefault(picture_names[shared].pop(), objects)
                else:
                    several |= picture_names[shared]
        self.ambiguous = several - self.objects.keys()
        """Pictures without objects that share their name with others, or the names of several annotations."""

    def coverage(self, root: Path) -> str:
        """Say how many pictures the source annotates, and how many of these are in the data."""
        path, annotated, found = self.source.source, len(self.source.objects), len(self.objects)
        shown = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        return f"{self.source.format} in {shown}: {annotated} annotated pictures, {found} of them found here"


def unmatched(classes: Collection[str], pictures: Sequence[str], indexes: Sequence[RegionIndex]) -> str:
    """Say how pictures and regions are named, if no picture has a region that can be used."""
    sources = []
    for source, index in ((index.source, index) for index in indexes):
        problems = [f"{len(names)} {problem}" for problem, names in source.problems.items()]
        ambiguous = [f"the names of {len(index.ambiguous)} pictures are ambiguous"] if index.ambiguous else []
        names = f"names such as {_quoted(source.objects)}" if source.objects else "no objects"
        categories = f"the categories {_quoted(source.categories)}" if source.categories else "no categories"
        sources.append(
            f"the regions of {source.format} in {source.source} have "
            + "; ".join([f"{names} and {categories}", *ambiguous, *problems])
        )
    return (
        f"{len(pictures)} pictures have names such as {pictures[0]!r}"
        + (f" and the classes {_quoted(classes)}" if classes else "")
        + f"; {'; '.join(sources)}; use the same names for both, or allow more categories with expect in the config"
    )


def _quoted(names: Iterable[str]) -> str:
    """Return the first names in alphabetical order."""
    return first_of(sorted(map(repr, names)), MOST_LISTED)


def _keys_of(names: Iterable[str], *, below_folder: bool = False) -> list[dict[str, set[str]]]:
    """Return the names by each key: as ``RegionIndex`` says, in its order."""
    by_key: list[dict[str, set[str]]] = [defaultdict(set) for _ in range(5)]
    for name in names:
        path = PurePosixPath(name.replace("\\", "/"))
        bare = path.with_suffix("") if has_picture_suffix(path.name) else path
        inner = bare.as_posix().partition("/")[2] if below_folder else bare.as_posix()
        for groups, key in zip(by_key, (path.as_posix(), bare.as_posix(), inner, path.name, bare.name), strict=True):
            groups[key].add(name)
    return by_key


def in_pixels(objects: Sequence[ObjectAnnotation], size: tuple[int, int]) -> Iterator[ObjectAnnotation]:
    """Yield the objects in pixels of a picture of this size (width, height), on which they must have been drawn."""

    def scaled(sides: Sequence[float]) -> list[float]:
        return [side * size[number % 2] for number, side in enumerate(sides)]

    for annotation in objects:
        if annotation.size is not None and annotation.size != size:
            rotated = " (shown rotated, as its EXIF data says)" if annotation.size == size[::-1] else ""
            raise ImageError(
                f"its objects were drawn on {annotation.size[0]}x{annotation.size[1]} pixels, but the picture has "
                f"{size[0]}x{size[1]}{rotated}"
            )
        box, outline = annotation.box, annotation.outline
        if annotation.shares:
            box = box and Box(*scaled(box))
            outline = list(map(scaled, outline)) if isinstance(outline, list) else outline
        yield replace(annotation, box=box, outline=outline, shares=False)


def object_region(
    objects: Sequence[ObjectAnnotation], size: tuple[int, int], *, round_boxes: bool = False
) -> Bool[np.ndarray, "h w"]:
    """Return the union of the objects on a picture of ``size`` (width, height): their outlines, or else their boxes.

    ``round_boxes`` draws the ellipse in a box instead of the box, because an object rarely reaches into the corners.

    Raises:
        ImageError: an object or a mask was drawn on a picture of another size, or an outline cannot be read.
    """
    width, height = size
    region = np.zeros((height, width), bool)
    for annotation in in_pixels(objects, size):
        if isinstance(annotation.outline, MaskFile):
            region |= annotation.outline.region(size)
        elif annotation.outline is not None:
            region |= _decode_outline(annotation.outline, size)
        elif annotation.box is not None:
            region |= _fill_ellipse(annotation.box, size) if round_boxes else _fill_box(annotation.box, size)
    return region


def widened_boxes(objects: Sequence[ObjectAnnotation], size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the union of the objects' boxes on a picture of ``size`` (width, height), with a margin around each.

    A mask may show several objects, so each connected part gets its own box. An object with a box and an outline is
    covered by both, since the outline may reach out of the box.
    """
    region = np.zeros((size[1], size[0]), bool)
    for annotation in in_pixels(objects, size):
        boxes = [] if annotation.outline is None else _boxes_of_parts(object_region([annotation], size))
        for box in [*([] if annotation.box is None else [annotation.box]), *boxes]:
            # The margin is a share of the side, for shadows and boxes drawn too small, and at least 2 pixels: the soft
            # edge of a small object is as wide as that of a large one
            across, down = (max(2, 0.08 * side) for side in (box.right - box.left, box.bottom - box.top))
            region |= _fill_box(Box(box.left - across, box.top - down, box.right + across, box.bottom + down), size)
    return region


def boxes_on_input(
    objects: Sequence[ObjectAnnotation], size: tuple[int, int], preprocess: Preprocess, shades: Shades
) -> Float[Tensor, "k 4"]:
    """Return the boxes (left, top, right, bottom) of objects in pixels of the model's input, as far as it shows them.

    An object without a box has one around each connected part of its outline.

    Args:
        objects: the objects.
        size: the width and height of the picture.
        preprocess: makes the model's input of the picture.
        shades: what it makes of black and white pictures of this size.
    """
    boxes = [
        box
        for annotation in in_pixels(objects, size)
        for box in (_boxes_of_parts(object_region([annotation], size)) if annotation.box is None else [annotation.box])
    ]
    seen = [preprocess_region(_fill_box(box, size), preprocess, shades) > 0.5 for box in boxes]
    corners = [extent(region) for region in seen if bool(region.any())]
    return torch.tensor(corners, dtype=torch.float32).reshape(-1, 4)


def _fill_box(box: Box, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the pixels of a box: at least one in each direction, none if the box lies outside the picture."""
    region = np.zeros((size[1], size[0]), bool)
    clipped = clip_box(box, size)
    if clipped is not None:
        left, top = (min(max(0, round(low)), side - 1) for low, side in zip(clipped[:2], size, strict=True))
        region[top : max(top + 1, round(clipped.bottom)), left : max(left + 1, round(clipped.right))] = True
    return region


def _fill_ellipse(box: Box, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the pixels whose centre lies in the ellipse inscribed in a box."""
    across, down = (np.arange(side) + 0.5 for side in size)
    width, height = max(1e-9, box.right - box.left), max(1e-9, box.bottom - box.top)
    x, y = (2 * across - box.left - box.right) / width, (2 * down - box.top - box.bottom) / height
    inside = np.asarray(x**2 + y[:, None] ** 2 <= 1)
    return inside if inside.any() else _fill_box(box, size)


def _boxes_of_parts(region: Bool[np.ndarray, "h w"]) -> list[Box]:
    """Return the bounding box of each connected part of a region."""
    _, _, parts, _ = cv2.connectedComponentsWithStats(region.astype(np.uint8))
    return [_box_at(*corner_and_size) for *corner_and_size, _ in parts[1:].tolist()]


def _box_at(left: float, top: float, width: float, height: float) -> Box:
    return Box(left, top, left + width, top + height)


def _box_around(polygons: Sequence[Sequence[float]]) -> Box:
    across, down = ([side for polygon in polygons for side in polygon[start::2]] for start in (0, 1))
    return Box(min(across), min(down), max(across), max(down))


def _read_runs(counts: str | bytes) -> list[int]:
    """Read COCO's compressed runs: five bits a character; from the fourth on, the difference to the last but one."""
    runs: list[int] = []
    value = shift = 0
    for code in counts.encode() if isinstance(counts, str) else counts:
        bits = code - 48
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits & 16) << (shift - 4)
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return runs


def _decode_outline(outline: Any, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Draw COCO polygons or decode a run-length encoding."""
    width, height = size
    # pycocotools raises many types for outlines it cannot read.
    with as_error(ImageError, lambda error: f"an outline cannot be read: {type(error).__name__}: {brief(error)}"):
        if isinstance(outline, list):
            return np.asarray(rle.decode(rle.merge(rle.frPyObjects(outline, height, width))) == 1)
        runs, stated = outline["counts"], tuple(map(int, outline["size"]))
        runs = runs if isinstance(runs, list) else _read_runs(runs)
        region = np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(stated[::-1]).T
    if stated != (height, width):
        raise ImageError(f"an outline is for {stated[1]}x{stated[0]} pixels, but the picture has {width}x{height}")
    return region


# --- formats

READ = (
    "COCO JSON, Pascal VOC XML, YOLO text, CSV files with the columns path, xmin, ymin, xmax and ymax, masks, and the "
    "masks or boxes in the rows of a dataset"
)
"""The annotations that camkit reads, in words."""


def find_regions(
    folder: Path, classes: Collection[str] = (), table: Path | None = None, *, inside: bool = False
) -> list[Annotations]:
    """Read all regions that are in a folder of pictures or beside it.

    Args:
        folder: the folder.
        classes: folders that hold pictures of a class, even if their names are usual for regions.
        table: the data.yaml that the user named.
        inside: read only what is in the folder.
    """
    finders: list[tuple[Callable[[Path], list[Path]], Callable[[Path], Annotations]]] = [
        (find_boxes, read_boxes),
        (find_coco, read_coco),
        (find_masks, read_masks),
        (find_voc, read_voc),
        (find_yolo, functools.partial(read_yolo, table=table)),
    ]
    root = os.path.realpath(folder)
    return [
        read(file)
        for read, file in [(read, file) for find, read in finders for file in find(folder)]
        if file.parent != folder or file.name not in classes
        if not inside or Path(os.path.realpath(file)).is_relative_to(root)
    ]


def read_regions(source: Path, table: Path | None = None) -> list[Annotations]:
    """Read the regions that the user named: a file, or a folder of files.

    Raises:
        InputError: there are no regions in a known format.
    """
    refuse_pipe(source)
    readers = {".csv": read_boxes, ".json": read_coco, ".xml": read_voc}
    if source.suffix.lower() in readers and not source.is_dir():
        return [readers[source.suffix.lower()](source)]
    regions = find_regions(source, table=table, inside=True) if source.is_dir() else []
    if not regions and files_in(source, [".png"]):
        regions = [read_masks(source)]
    if not regions:
        raise InputError(f"no regions found in {source}; camkit reads {READ}")
    return regions


# --- CSV: each row has a picture and the corners of a box, in columns that the header names

_COLUMNS = {
    "picture": (
        "path", "file", "filename", "file_name", "image", "image_id", "imageid", "image_path", "picture", "name",
    ),
    "class": ("class", "label", "category", "class_name", "labelname"),
    "left": ("xmin", "x_min", "left", "x1"),
    "top": ("ymin", "y_min", "top", "y1"),
    "right": ("xmax", "x_max", "right", "x2"),
    "bottom": ("ymax", "y_max", "bottom", "y2"),
    "width": ("w", "width", "box_width", "bbox_width"),
    "height": ("h", "height", "box_height", "bbox_height"),
    "x": ("x", "bbox_x"),
    "y": ("y", "bbox_y"),
}  # fmt: skip


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
    columns = find_columns(header, _COLUMNS)
    ways = ({"left", "top", "right", "bottom"}, {"left", "top", "width", "height"}, {"x", "y", "width", "height"})
    return columns if "picture" in columns and any(way <= columns.keys() for way in ways) else None


def find_boxes(folder: Path) -> list[Path]:
    """List the CSV files in a folder whose header names a picture and a box."""
    return [file for file in files_in(folder, [".csv"], deep=False) if _box_columns(header_of(file))]


def read_boxes(file: Path) -> Annotations:
    """Read a table of boxes in pixels, or in shares of the picture as in Open Images.

    Raises:
        InputError: a column is missing, or a row has no picture or no valid box.
    """
    annotations = Annotations("CSV boxes", file)
    with (
        file.open(newline="", encoding="utf-8-sig") as lines,
        as_error(
            InputError,
            lambda error: (
                f"{file}, line {table.line_num}: expected a picture and four numbers for its box: {brief(error)}"
            ),
        ),
    ):
        table = csv.DictReader(lines)
        columns = _box_columns(list(table.fieldnames or ()))
        if columns is None:
            raise InputError(f"{file} needs columns for a picture and its box, such as path, xmin, ymin, xmax and ymax")
        for row in table:
            picture, category = (row.get(columns.get(name, "")) or "" for name in ("picture", "class"))
            sides = {name: float(row[at]) for name, at in columns.items() if name not in ("picture", "class")}
            left, top = (sides["left"], sides["top"]) if "left" in sides else (sides["x"], sides["y"])
            right = sides["right"] if "right" in sides else left + sides["width"]
            bottom = sides["bottom"] if "right" in sides else top + sides["height"]
            annotations.add(picture.strip(), ObjectAnnotation(category.strip(), Box(left, top, right, bottom)))
    return annotations.finished()


# --- COCO: boxes, polygons, run-length encodings and crowds (Lin et al. 2014, arXiv:1405.0312)


def find_coco(folder: Path) -> list[Path]:
    """List the JSON files in a folder, or in ``annotations`` in or beside it, that look like COCO."""
    places = (folder, folder / "annotations", folder / "../annotations")
    return [file for place in places for file in files_in(place, [".json"], deep=False) if _looks_like_coco(file)]


def _looks_like_coco(file: Path) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        # A broken file with a usual name counts, so that reading it tells the user what is wrong.
        usual = re.search(r"coco|instances|annotation", file.stem, re.IGNORECASE)
        return file.parent.name == "annotations" or usual is not None
    return isinstance(content, dict) and {"images", "annotations"} <= content.keys()


def read_coco(file: Path) -> Annotations:
    """Read a COCO file of instances.

    Raises:
        InputError: the file is not a valid COCO file of instances.
    """
    reading = as_error(
        InputError,
        lambda error: f"{file} is not a COCO file of instances: {type(error).__name__}: {brief(error)}",
    )
    with reading:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
        pictures = {row["id"]: str(row["file_name"]) for row in content["images"]}
        categories = {row["id"]: str(row["name"]) for row in content.get("categories", [])}
        sizes = {
            str(row["file_name"]): (int(row["width"]), int(row["height"]))
            for row in content["images"]
            if (row.get("width") or 0) > 0 and (row.get("height") or 0) > 0
        }
        annotations = Annotations("COCO", file)
        for row in content["annotations"]:
            name, category = pictures.get(row["image_id"]), categories.get(row.get("category_id"))
            if name is None or category is None:
                annotations.problems[
                    f"annotations of a {'picture' if name is None else 'category'} that is not listed (an id must be a "
                    "number everywhere, or text everywhere)"
                ].append(str(row.get("id")))
                continue
            outline: Any = row.get("segmentation") or None
            box = None
            if isinstance(outline, list):
                outline = [list(map(float, part)) for part in outline if len(part) >= 6] or None
                box = outline and _box_around(outline)
            elif outline is not None:
                packed = isinstance(outline["counts"], str)
                box = _box_at(*rle.toBbox(outline if packed else rle.frPyObjects(outline, *outline["size"])))
            is_empty = box is None or clip_box(box, None) is None  # some tools write an empty box or outline
            outline = None if is_empty and row.get("bbox") else outline
            # An outline that was cut from a box may miss parts of the object inside the box
            if row.get("bbox") and (is_empty or row.get("from_box")):
                box = _box_at(*map(float, row["bbox"]))
            if box is None:
                annotations.problems["annotations with neither box nor outline"].append(name)
                continue
            crowd = bool(row.get("iscrowd"))
            if crowd:
                annotations.problems["crowds, removed but not explained"].append(name)
            annotations.add(name, ObjectAnnotation(category, box, outline, crowd=crowd, size=sizes.get(name)))
    return annotations.finished()


# --- Pascal VOC: one XML file of boxes for each picture, named after it (Everingham et al. 2010)


def find_voc(folder: Path) -> list[Path]:
    """Return the folder that holds the XML files: the pictures' own, or ``Annotations`` in or beside it."""
    places = (folder, folder / "Annotations", folder / "annotations", folder.parent / "Annotations")
    return [place for place in places if any(map(_may_be_voc, files_in(place, [".xml"])))][:1]


def _may_be_voc(file: Path) -> bool:
    """Return whether a file is VOC or broken; other XML, such as a test report, is neither."""
    try:
        return bool(ElementTree.parse(file).getroot().tag == "annotation")
    except (OSError, ElementTree.ParseError, ValueError, LookupError):
        return True


def read_voc(source: Path) -> Annotations:
    """Read one XML file, or all XML files of annotations in a folder.

    Either all boxes are in pixels, or all are in shares of the picture.

    Raises:
        InputError: a file is not a valid VOC annotation.
    """
    annotations = Annotations("Pascal VOC", source)
    for file in filter(_may_be_voc, files_in(source, [".xml"])) if source.is_dir() else [source]:
        # Pictures in two folders may share a name. Their annotations then lie in folders with the same names.
        subfolder = file.relative_to(source).parent if source.is_dir() else Path()
        with as_error(InputError, lambda error: f"{file} is not a Pascal VOC annotation with boxes: {brief(error)}"):  # noqa: B023
            annotation = VOCDetection.parse_voc_xml(ElementTree.parse(file).getroot())["annotation"]
            picture = (subfolder / str(annotation.get("filename") or file.stem)).as_posix()
            width, height = (int(annotation.get("size", {}).get(side, 0)) for side in ("width", "height"))
            size = (width, height) if width > 0 and height > 0 else None
            objects = annotation.get("object", [])
            for row in objects if isinstance(objects, list) else [objects]:
                box = Box(*(float(row["bndbox"][side]) for side in ("xmin", "ymin", "xmax", "ymax")))
                annotations.add(picture, ObjectAnnotation(str(row["name"]), box, size=size))
    return annotations.finished(first=1)  # VOC counts pixels from 1


# --- YOLO: text files whose lines have a class and a box, a polygon or a pose, in shares of the picture

_CLASS_FILES = ("classes.txt", "obj.names", "data.yaml", "data.yml", "dataset.yaml")


def find_yolo(folder: Path) -> list[Path]:
    """Return the folder that holds the text files: ``labels`` in or beside the pictures' folder, or that folder."""
    parts = list(folder.parts)
    if "images" in parts:  # labels/val belongs to images/val
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    for place in dict.fromkeys((folder / "labels", folder.parent / "labels", Path(*parts), folder)):
        for file in _text_files(place):
            with contextlib.suppress(OSError, ValueError):
                rows = _rows_of(file)
                if rows and min(map(len, rows)) > 4:
                    return [place]
    return []


def _text_files(folder: Path) -> list[Path]:
    """List the text files that may be annotations; data sets also hold README.dataset.txt and the like."""
    others = {"requirements.txt", "labels.txt", *_CLASS_FILES}
    files = ((file, file.name.lower()) for file in files_in(folder, [".txt"]))
    return [file for file, name in files if name not in others and not name.startswith("readme")]


def _rows_of(file: Path) -> list[list[float]]:
    """Return the lines of a file; none if it only lists pictures, as the train.txt of CVAT and Darknet does."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    return [] if all(map(has_picture_suffix, lines)) else [list(map(float, line.split())) for line in lines]


def read_yolo(folder: Path, table: Path | None = None) -> Annotations:
    """Read all text files in a folder; ``classes.txt`` or ``data.yaml`` in or above it names the classes.

    A ``table`` with the content of a data.yaml comes first. Only the box of a pose is used.

    Raises:
        InputError: a line is not a class and a box, polygon or pose.
    """
    places = (folder, folder.parent, folder.parent.parent)
    candidates = (table, *(place / name for place in places for name in _CLASS_FILES))
    tables = [_yolo_table(file) for file in candidates if file is not None and file.is_file()]
    class_names: dict[int, str] = next((names for table in tables if (names := table.get("names")) is not None), {})
    rows_of: dict[Path, list[list[float]]] = {}
    for file in _text_files(folder):
        with as_error(InputError, lambda error: f"{file} is not a YOLO annotation: {brief(error)}"):  # noqa: B023
            rows_of[file] = _rows_of(file)
    longer = [numbers for rows in rows_of.values() for _, *numbers in rows if len(numbers) > 5]
    is_outline = _outline_test(next((count for table in tables if (count := table.get("kpt_shape"))), None), longer)
    annotations = Annotations("YOLO", folder)
    for file, rows in rows_of.items():
        picture = file.relative_to(folder).with_suffix("").as_posix()
        for number, *numbers in rows:
            outline = is_outline(numbers)
            is_whole = number >= 0 and number.is_integer() and all(map(math.isfinite, numbers))
            if not is_whole or len(numbers) < 4 or (outline and len(numbers) % 2):
                raise InputError(
                    f"{file}: each line must be a class (a whole number from 0) and a box (4 numbers) or a polygon, "
                    f"not {brief(' '.join(map(str, [number, *numbers])))}; for poses, data.yaml must have kpt_shape"
                )
            category = class_names.get(int(number), "") if class_names else str(int(number))
            if not category:
                annotations.problems["objects of a class that the file of class names does not list"].append(picture)
            elif max(map(abs, numbers if outline else numbers[:4])) >= LARGEST_SHARE:
                annotations.problems["boxes in pixels, but YOLO needs shares of the picture (0 to 1)"].append(picture)
            elif outline:
                annotations.add(picture, ObjectAnnotation(category, _box_around([numbers]), [numbers]))
            else:  # a detector's confidence or keypoints may follow the box
                x, y, width, height = numbers[:4]
                box = Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
                annotations.add(picture, ObjectAnnotation(category, box))
    return annotations.finished(shares=True)


def _outline_test(keypoints: int | None, longer: list[list[float]]) -> Callable[[list[float]], bool]:
    """Return a function that tells whether the numbers of a row are a polygon, and not a box with something after it.

    ``longer`` has the rows that are longer than a box with a confidence. ``keypoints`` says how many keypoints follow a
    box, if that is known; a detector adds its confidence to every row. Otherwise, the rows are poses if, in all of
    them, every third number after the box is a visibility (0, 1 or 2). A confidence and a track number count as such if
    all have six numbers that end in a whole number.
    """
    if keypoints is not None:
        lengths = {4 + size * keypoints for size in (2, 3)}
        used = {*map(len, longer)}
        lengths |= used & {length + 1 for length in lengths} if len(used) == 1 else set()
        return lambda numbers: len(numbers) > 5 and len(numbers) not in lengths
    visible = all(len(numbers) % 3 == 1 and {*numbers[6::3]} <= {0, 1, 2} for numbers in longer)
    poses = visible and any(number % 1 for numbers in longer for number in numbers)
    tracks = all(len(numbers) == 6 and numbers[5].is_integer() for numbers in longer)
    return lambda numbers: len(numbers) > 5 and not (poses or tracks)


def _yolo_table(file: Path) -> dict[str, Any]:
    """Return the content of a data.yaml, or of a text file with a name per line; ``names`` is by number.

    Raises:
        InputError: it cannot be read.
    """
    with as_error(InputError, lambda error: f"{file} cannot be read: {brief(error)}"):
        text = file.read_text(encoding="utf-8-sig")
        is_yaml = file.suffix in (".yaml", ".yml")
        table = dict(yaml.safe_load(text) or {}) if is_yaml else {"names": text.splitlines()}
        if (names := table.get("names")) is not None:
            by_number = dict(enumerate(names)) if isinstance(names, list) else names
            table["names"] = {int(number): str(name).strip() for number, name in by_number.items()}
        if table.get("kpt_shape"):
            table["kpt_shape"] = int(table["kpt_shape"][0])
        return table


def pictures_of(table: Path) -> Path:
    """Return the folder of a data set's validation pictures, which its data.yaml names.

    Raises:
        InputError: the file cannot be read, or names no folder that exists.
    """
    settings = _yolo_table(table)
    parts = ("val", "valid", "test", "train")  # the best for a check first: a model knows its training pictures
    named = [str(settings[part]) for part in parts if settings.get(part)]
    root = table.parent / str(settings.get("path") or "")
    for folder in named:
        if folder.startswith("["):  # several; those that follow may be the training pictures
            break
        # Exports of annotation tools write ../valid/images, as seen from a folder that does not exist.
        for place in (root / folder, table.parent / folder, table.parent / folder.removeprefix("../")):
            if place.is_dir():
                return place
    raise InputError(
        f"{table} must name one folder that exists as {listed(parts, 'or')}, not {', '.join(named) or 'none'}; pass "
        "the folder of the pictures itself"
    )


# --- masks: one picture for each, named after it; ``camkit.images.masks`` says what their values mean


def find_masks(folder: Path) -> list[Path]:
    """Return the folder of masks in or beside a folder of pictures, or that folder itself if it contains masks."""
    # Folders of masks first, then those of segmentations, then others, which often hold boxes
    places = [
        place
        for parent in (folder, folder.parent)
        for place in sorted(
            [*parent.glob("*"), *parent.glob("annotations/*")],
            key=lambda place: (
                "mask" not in place.name.lower(),
                "seg" not in place.name.lower(),
                -len(place.parts),
                place.name,
            ),
        )
        if names_masks(place.name) and place.is_dir() and place != folder
    ]
    masks = next((place for place in places if not holds_photographs(place) and _possible_masks(place)), None)
    if masks is not None:
        return [masks]
    return [folder] if any(_is_mask_in(folder, file) for file in _possible_masks(folder)) else []


def _is_mask_in(folder: Path, file: Path) -> bool:
    """Return whether a file is a mask among the pictures in a folder, or in the folder of a class below it."""
    parts = file.relative_to(folder).parts
    return is_mask(file, folder / parts[0] if len(parts) > 1 else folder)


def holds_photographs(folder: Path) -> bool:
    """Return whether a folder with a usual name for masks holds photographs, as the folder of a class "mask" does.

    Most of its first pictures must be photographs in colour; the others may be grey.
    """
    examined = [file for file in files_in(folder, PICTURE_SUFFIXES) if not file.name.startswith(".")][:5]
    return sum(map(is_photograph, examined)) > len(examined) / 2


def _possible_masks(folder: Path) -> list[Path]:
    # Archives made on a Mac, such as the one of Oxford-IIIT Pets, hold a hidden file for each picture.
    return [file for file in files_in(folder, MASK_SUFFIXES) if not file.name.startswith(".")]


def read_masks(folder: Path) -> Annotations:
    """List the masks in a folder: the files named as masks or, if there are none, all pictures.

    Raises:
        InputError: no mask can be read, or it is not clear which values are the object.
    """
    possible = _possible_masks(folder)
    files = [file for file in possible if _is_mask_in(folder, file)] or possible
    reading = understand_masks(files)
    annotations = Annotations("mask pictures", folder, (f"masks: {reading.words}",))
    for file in files:
        name = picture_of(file.relative_to(folder)).as_posix()
        annotations.add(name, ObjectAnnotation("", None, MaskFile(file, reading)))
    return annotations.finished()
