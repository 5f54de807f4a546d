"""Read a folder or a table into labelled pictures with their annotated objects."""

from __future__ import annotations

import csv
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from camkit.background.classes import ClassMap
from camkit.background.regions import find_regions, read_regions, yolo
from camkit.background.regions.annotations import Annotations, ObjectAnnotation
from camkit.background.regions.boxes import find_columns, header_of
from camkit.background.regions.masks import holds_photographs
from camkit.background.regions.unread import find_unread
from camkit.config.settings import normalize_name
from camkit.errors import InputError, did_you_mean, refuse_pipe
from camkit.images.files import files_in, has_picture_suffix, is_regular
from camkit.images.listing import find_pictures
from camkit.images.mask_pictures import MASK_SUFFIXES, has_few_values, names_masks
from camkit.kit.wording import first_of
from camkit.types import Box

_COLUMNS = {
    "path": ("path", "file", "filename", "file_name", "image", "image_path", "picture"),
    "label": ("label", "class", "class_name", "category", "target"),
    "group": ("group",),
    "place": ("place",),
}

_KINDS = {"mask": "outlines", "box": "boxes only"}

_MOST_LISTED = 5
"""The most categories or names that a sentence lists."""


@dataclass(frozen=True, eq=False)
class Item:
    """One labelled picture with its file, class, group and objects.

    Attributes:
        name: the file's path relative to the data folder, with forward slashes.
        path: the file.
        label: the class.
        group: pictures with the same group belong together; without groups it is the name.
        objects: the objects of the picture's class.
        others: the crowds of the picture's class, and the objects of other checked classes.
        place: the kind of background that the data names; "" if it names none.
    """

    name: str
    path: Path
    label: str
    group: str
    objects: tuple[ObjectAnnotation, ...] = ()
    others: tuple[ObjectAnnotation, ...] = ()
    place: str = ""


@dataclass(frozen=True, eq=False)
class Dataset:
    """The pictures to check.

    Attributes:
        root: the data folder.
        items: the pictures.
        classes: the classes, sorted by name.
        facts: sentences for the user about what was found.
        left_out: what is not used, by reason.
    """

    root: Path
    items: tuple[Item, ...]
    classes: tuple[str, ...]
    facts: tuple[str, ...] = ()
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def left_out_in_words(self) -> list[str]:
        """What is not used, a line for each reason with a few examples."""
        return [
            f"{len(names)} {reason}: {', '.join(names[:_MOST_LISTED])}{', ...' if len(names) > _MOST_LISTED else ''}"
            for reason, names in self.left_out.items()
        ]


def read_data(
    data: Path,
    *,
    regions: Path | None = None,
    group: str | None = None,
    skip: Path | None = None,
    class_map: ClassMap | None = None,
    also: Mapping[str, frozenset[str]] | None = None,
) -> Dataset:
    """Read labelled pictures and the regions of their objects.

    Args:
        data: a folder with a folder per class; a CSV with the columns path, label and optionally group and place; a
            folder of pictures whose regions name classes (each picture then has the class of its largest object); or
            the data.yaml of a YOLO data set, which stands for the folder of its validation pictures.
        regions: the regions; if None, camkit searches for them in the data folder and beside it.
        group: the CSV column that says which pictures belong together.
        skip: a folder to ignore, such as the one the reports go into.
        class_map: the classes that may label a picture: those with an entry; None allows all. Pictures of classes that
            it maps to None are left out.
        also: for each class, further categories (lower case) whose objects count as objects of that class.

    Raises:
        InputError: there are no labelled pictures, or there are regions and none of them belongs to a picture.
    """
    try:
        return _read_data(data, regions, group, skip, class_map, also or {})
    except OSError as error:  # any folder or file may be unreadable
        raise InputError(f"{error.filename or data} cannot be read: {error.strerror or error}") from error


def _read_data(
    data: Path,
    regions: Path | None,
    group: str | None,
    skip: Path | None,
    class_map: ClassMap | None,
    also: Mapping[str, frozenset[str]],
) -> Dataset:
    if not data.exists():
        raise InputError(f"{data} does not exist")
    refuse_pipe(data)
    if data.is_file() and has_picture_suffix(data.name):
        raise InputError(
            f"{data} is a single picture, but the check needs many; pass a folder with a folder per class, or a CSV "
            "with the columns path and label"
        )
    table = data if data.suffix.lower() in (".yaml", ".yml") else None
    if table is not None:
        data = yolo.pictures_of(table)
    root = data if data.is_dir() else data.parent
    without = [name for name, entries in (class_map or {}).items() if entries is None]
    only = None if class_map is None else class_map.keys() - without
    of_classes = _class_folders(root, only or ())
    sources = find_regions(root, of_classes, table) if regions is None else read_regions(regions, table)
    # Beside a table, subfolders need not belong to the data.
    if not sources and (unread := find_unread(root, of_classes, deep=root == data)) is not None:
        raise InputError(f"{unread}, or move such files away to check without regions")
    labelled = _label_pictures(data, sources, group, skip, regions, only, of_classes)
    if not labelled.items:
        raise InputError(
            f"{data} holds no labelled pictures; expected a folder per class, a CSV with the columns path and label, "
            "or pictures with regions that name classes"
        )
    labelled = _without_classes(labelled, without)
    classes = tuple(sorted({item.label for item in labelled.items}))
    counted = f"{len(classes)} class{'' if len(classes) == 1 else 'es'}"
    fact = f"{len(labelled.items)} pictures of {counted} ({labelled.rule})"
    dataset = Dataset(root, tuple(labelled.items), classes, (fact,), labelled.left_out)
    if not sources:
        return replace(dataset, facts=(fact, "no regions"))
    return _annotate(dataset, sources, also)


def _without_classes(labelled: _Labelled, classes: Collection[str]) -> _Labelled:
    """Leave out the pictures of classes that the class map sets to null.

    Raises:
        InputError: no picture remains.
    """
    items = [item for item in labelled.items if item.label not in classes]
    if not items:
        raise InputError("the class map leaves out every class that has pictures; give at least one class an entry")
    left_out = {
        f"pictures of {name!r}, which the class map leaves out (null)": tuple(
            item.name for item in labelled.items if item.label == name
        )
        for name in sorted(classes)
    }
    return replace(labelled, items=items, left_out={**labelled.left_out, **_without_empty(left_out)})


def _annotate(data: Dataset, sources: Sequence[Annotations], also: Mapping[str, frozenset[str]]) -> Dataset:
    """Add the objects to each picture, and say what the sources contain."""
    indexes = [_AnnotationIndex(source, [item.name for item in data.items]) for source in sources]
    _check_categories(also, indexes)
    names = {normalize_name(name) for name in data.classes}
    items = tuple(_with_objects(item, indexes, names, also.get(item.label, frozenset())) for item in data.items)
    bare = tuple(item.name for item in items if not item.objects)
    if len(bare) == len(items):
        raise InputError(_no_region_of_class(items, indexes) or _no_match([item.name for item in items], indexes))
    left_out = dict(data.left_out)
    for source in sources:
        for problem, pictures in source.problems.items():
            key = f"{source.format}: {problem}"
            left_out[key] = (*left_out.get(key, ()), *pictures)
    unclear = {picture for index in indexes for _, candidates in index.ambiguous for picture in candidates}
    left_out |= _without_empty(
        {
            "pictures whose region has an ambiguous name": tuple(name for name in bare if name in unclear),
            "pictures without a region of their class": tuple(name for name in bare if name not in unclear),
        }
    )
    facts = [
        *(_coverage(source, index, items, data.root) for source, index in zip(sources, indexes, strict=True)),
        *(fact for source in sources for fact in source.facts),
        *(_foreign_categories(index) for index in indexes if index.categories - {""} and not index.categories & names),
        _count_kinds(items),
    ]
    return replace(data, items=items, facts=(*data.facts, *facts), left_out=left_out)


def _no_region_of_class(items: Sequence[Item], indexes: Sequence[_AnnotationIndex]) -> str | None:
    """Say that pictures have regions, but none of their class; None if no picture has regions at all."""
    for item in items:
        annotations = [annotation for index in indexes for annotation in index.objects_in(item.name)]
        if annotations:
            others = sorted({annotation.category for annotation in annotations if not annotation.crowd})
            regions = _listed(others) if others else "only crowds"
            return (
                f"no picture has a region of its own class: {item.name!r} has the class {item.label!r}, but its "
                f"regions are {regions}; give classes and categories the same names, or allow further categories in "
                "the config (expect)"
            )
    return None


def _no_match(pictures: Sequence[str], indexes: Sequence[_AnnotationIndex]) -> str:
    """Say why no picture has a region."""
    listed = " and ".join(f"{index.source.format} in {index.source.source}" for index in indexes)
    for names, candidates in (ambiguous for index in indexes for ambiguous in index.ambiguous):
        return (
            f"no picture matches a region: the names of the regions ({listed}) are ambiguous, because "
            f"{_listed(names)} can mean any of {_listed(candidates)}; name each picture with its folder"
        )
    example = next((name for index in indexes for name in index.source.objects), None)
    problems = [f"{len(names)} {problem}" for index in indexes for problem, names in index.source.problems.items()]
    if example is None and problems:
        return f"no region can be used ({listed}): {'; '.join(problems)}"
    return (
        f"no picture matches a region: {len(pictures)} pictures have names such as {pictures[0]!r}, but the regions "
        f"({listed}) have {'no objects' if example is None else f'names such as {example!r}'}"
    )


def _listed(names: Iterable[str]) -> str:
    return first_of(sorted(map(repr, names)), _MOST_LISTED)


def _coverage(source: Annotations, index: _AnnotationIndex, items: Iterable[Item], root: Path) -> str:
    """Say how many pictures a source annotates, and how many of these are in the data."""
    count = sum(bool(index.objects_in(item.name)) for item in items)
    path = Path(source.source)
    shown = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return f"{source.format} in {shown}: {len(source.objects)} annotated pictures, {count} of them found here"


def _foreign_categories(index: _AnnotationIndex) -> str:
    """Say that a source names no class; all its objects then count as objects of their picture's class."""
    listed = ", ".join(sorted(index.categories - {""})[:_MOST_LISTED])
    return f"none of the regions' categories ({listed}) is a class, so every object counts for its picture's class"


def _count_kinds(items: Iterable[Item]) -> str:
    """Say how many pictures have outlines, and how many have only boxes."""
    kinds = Counter(
        "box" if all(annotation.kind == "box" for annotation in item.objects) else "mask"
        for item in items
        if item.objects
    )
    return ", ".join(f"{count} pictures with {_KINDS[kind]}" for kind, count in sorted(kinds.items(), reverse=True))


def _check_categories(also: Mapping[str, frozenset[str]], indexes: Sequence[_AnnotationIndex]) -> None:
    """Refuse a category in the config that no object has."""
    categories = {category for index in indexes for category in index.categories} - {""}
    for label, names in also.items():
        for name in sorted(names - categories):
            raise InputError(
                f"the config allows {label!r} to be recognised by {name!r}, but no object has that category"
                f"{did_you_mean(name, sorted(categories))}"
            )


@dataclass(frozen=True)
class _Labelled:
    """Labelled pictures, the rule that labelled them, and what was left out for which reason."""

    items: list[Item]
    rule: str
    left_out: Mapping[str, tuple[str, ...]]


def _label_pictures(
    data: Path,
    sources: Sequence[Annotations],
    group: str | None,
    skip: Path | None,
    regions: Path | None,
    only: Collection[str] | None,
    of_classes: Collection[str],
) -> _Labelled:
    """Find the pictures and their labels: by table, by folder or by largest object."""
    if data.is_file():
        return _label_by_table(data, group)
    table = _find_table(data, group)
    if group and table is None:
        raise InputError(
            f"the group {group!r} must be a column of a CSV with path and label, but {data} has no such CSV; "
            "remove the group setting"
        )
    folders = [
        folder
        for folder in sorted(data.iterdir())
        if folder.is_dir() and folder.name[0] != "."
        if not any(_is_same(folder, other) for other in (skip, regions) if other is not None)
    ]
    by_class = {
        folder.name: _pictures_in(folder)
        for folder in folders
        if folder.name in of_classes or not names_masks(folder.name)
    }
    with_pictures = [name for name, files in by_class.items() if files]
    has_categories = any(
        annotation.category for source in sources for objects in source.objects.values() for annotation in objects
    )
    without_objects = bool(sources) and not any(source.objects for source in sources)
    if len(with_pictures) == 1 and (has_categories or without_objects):  # a folder such as JPEGImages
        return _label_by_largest(data, sources, only, skip)
    if with_pictures:
        labelled = _label_by_folder(data, by_class, [folder.name for folder in folders if folder.name not in by_class])
        return labelled if table is None else _with_groups(labelled, table, group)
    if table is not None:
        return _label_by_table(table, group)
    return _label_by_largest(data, sources, only, skip)


def _class_folders(data: Path, classes: Collection[str]) -> set[str]:
    """Return the folders that hold pictures of a class, although their names are usual for folders of regions.

    A folder counts if the class map names it or its pictures are photographs: "mask" may be a class of people who wear
    masks.
    """
    folders = [folder for folder in data.iterdir() if names_masks(folder.name) and folder.is_dir()]
    return {folder.name for folder in folders if folder.name in classes or holds_photographs(folder)}


def _label_by_folder(data: Path, by_class: Mapping[str, Sequence[Path]], region_folders: Sequence[str]) -> _Labelled:
    """Give each picture the class that its folder is named after; ``region_folders`` hold regions, not pictures."""
    _refuse_masks(by_class)
    names = {file: file.relative_to(data).as_posix() for files in by_class.values() for file in files}
    items = [Item(names[file], file, label, names[file]) for label, files in by_class.items() for file in files]
    left_out = {
        "classes without pictures": tuple(name for name, files in by_class.items() if not files),
        "folders that hold regions, judging by their names": tuple(region_folders),
    }
    return _Labelled(items, "a folder per class", _without_empty(left_out))


_MOST_EXAMINED = 4
"""In each folder, at most this many of the pictures that may be masks are examined."""


def _refuse_masks(by_class: Mapping[str, Sequence[Path]]) -> None:
    """Refuse masks with unusual names among photographs: they would count as pictures of a class."""
    masks, photographs = [], 0
    for files in by_class.values():
        for _, of_folder in itertools.groupby(files, key=lambda file: file.parent):
            pictures = list(of_folder)
            possible = [file for file in pictures if file.suffix.lower() in MASK_SUFFIXES]
            examined = possible[:_MOST_EXAMINED]
            few = list(filter(has_few_values, examined))
            masks += few if 2 * len(few) >= len(examined) else []
            photographs += len(pictures) - len(possible) + len(examined) - len(few)
    if masks and photographs:
        raise InputError(
            f"{masks[0]} has only a few colours, like a mask, but is in the folder of a class; name masks like their "
            "pictures, either in a folder named masks or as NAME_mask.png, or list the pictures and classes in a CSV"
        )


def _without_empty(left_out: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {reason: names for reason, names in left_out.items() if names}


def _is_same(folder: Path, other: Path) -> bool:
    return os.path.realpath(folder) == os.path.realpath(other)


def _pictures_in(folder: Path, skip: Path | None = None) -> list[Path]:
    """List the pictures in a folder and its subfolders, without masks.

    Raises:
        InputError: a folder cannot be read, so its pictures would be missing unnoticed.
    """
    paths = find_pictures([folder], skip)
    folders = {path for path in paths if path.is_dir()}
    unreadable = sorted(path for path in folders if not os.access(path, os.R_OK | os.X_OK))
    if unreadable:
        raise InputError(
            f"the folder {unreadable[0]} cannot be read; grant read permission, or move it out of the data"
        )
    return [path for path in paths if path not in folders]


def _columns_of(header: list[str], group: str | None) -> dict[str, str]:
    return find_columns(header, {**_COLUMNS, "group": (group.lower(),)} if group else _COLUMNS)


def _find_table(folder: Path, group: str | None) -> Path | None:
    """Return the CSV of a folder that has the columns path and label, if possible with groups."""
    has = {file: _columns_of(header_of(file), group).keys() for file in files_in(folder, [".csv"], deep=False)}
    tables = [file for file, columns in has.items() if {"path", "label"} <= columns]
    return max(tables, key=lambda file: ("group" in has[file], "place" in has[file]), default=None)


def _with_groups(labelled: _Labelled, table: Path, group: str | None) -> _Labelled:
    """Give pictures in class folders the groups and places that a table beside the folders says."""
    if not group and not {"group", "place"} & _columns_of(header_of(table), group).keys():
        return labelled
    rows = {Path(row.path).as_posix(): row for row in _rows_of_table(table, group)}
    items = [
        replace(item, group=rows[item.name].group or item.group, place=rows[item.name].place)
        if item.name in rows
        else item
        for item in labelled.items
    ]
    return replace(labelled, items=items)


_MOST_NAMES, _LONGEST_NAME = 8, 40
"""Columns that an error lists, and letters of each."""


class _TableRow(NamedTuple):
    """A row of a table of pictures; what it does not say is empty."""

    path: str
    label: str
    group: str
    place: str


def _rows_of_table(file: Path, group: str | None) -> list[_TableRow]:
    """Read a table of pictures.

    Raises:
        InputError: it cannot be read, or lacks a column.
    """
    if file.suffix.lower() == ".json":
        raise InputError(f"{file} is not a table of pictures; pass the folder, and this file as the regions")
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            table = csv.DictReader(lines)
            header = list(table.fieldnames or ())
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    columns = _columns_of(header, group)
    if not {"path", "label"} <= columns.keys():
        shown = first_of([name[:_LONGEST_NAME] for name in header], _MOST_NAMES) or "none"
        raise InputError(f"{file} must have the columns path and label; it has {shown}")
    if group and "group" not in columns:
        raise InputError(f"{file} has no column {group!r} for the groups; it has {', '.join(header)}")

    def value(row: Mapping[str, str], meaning: str) -> str:
        return ((row.get(columns[meaning]) if meaning in columns else None) or "").strip()

    return [_TableRow(*(value(row, meaning) for meaning in _TableRow._fields)) for row in rows]


SEVERAL_CLASSES = "pictures that the table lists with several classes"
"""Why pictures are left out. If there are any, camkit assumes that the model's classes do not exclude each other."""


def _label_by_table(file: Path, group: str | None) -> _Labelled:
    """Read the pictures and labels that a CSV lists."""
    items: dict[str, Item] = {}
    missing, unlabelled = [], []
    ambiguous: dict[str, None] = {}
    for name, label, own_group, place in _rows_of_table(file, group):
        path = file.parent / name
        if not is_regular(path):
            missing.append(name)
        elif not label:
            unlabelled.append(name)
        else:  # a table of boxes has one row for each object, so several rows for one picture
            item_name = Path(name).as_posix()
            item = Item(item_name, path, label, own_group or name, place=place)
            if items.setdefault(item_name, item).label != label:
                ambiguous[item_name] = None
    left_out = {
        "files that do not exist": tuple(missing),
        "pictures without a label": tuple(unlabelled),
        SEVERAL_CLASSES: tuple(ambiguous),
    }
    labelled = [item for name, item in items.items() if name not in ambiguous]
    if ambiguous and not labelled:
        raise InputError(f"{file} lists every picture with several classes; give each picture one class")
    return _Labelled(labelled, f"the table {file.name}", _without_empty(left_out))


def _label_by_largest(
    data: Path, sources: Sequence[Annotations], only: Collection[str] | None, skip: Path | None
) -> _Labelled:
    """Give each picture the class of its largest annotated object."""
    files = {file.relative_to(data).as_posix(): file for file in _pictures_in(data, skip)}
    files = {name: file for name, file in files.items() if not any(map(names_masks, Path(name).parts[:-1]))}
    indexes = [_AnnotationIndex(source, files) for source in sources]
    items, bare = [], []
    for name, file in files.items():
        areas: dict[str, float] = defaultdict(float)
        for annotation in (annotation for index in indexes for annotation in index.objects_in(name)):
            category = annotation.category
            if category and not annotation.crowd and (only is None or category in only):
                areas[category] = max(areas[category], _area(annotation.box))
        if areas:
            items.append(Item(name, file, max(sorted(areas), key=lambda category: areas[category]), name))
        else:
            bare.append(name)
    if bare and not items and sources:
        raise InputError(_no_class(bare, indexes, only))
    rule = "each picture has the class of its largest annotated object"
    return _Labelled(items, rule, _without_empty({"pictures without an annotated class": tuple(bare)}))


def _no_class(pictures: Sequence[str], indexes: Sequence[_AnnotationIndex], only: Collection[str] | None) -> str:
    """Say why no picture gets a class from its objects."""
    annotations = [annotation for name in pictures for index in indexes for annotation in index.objects_in(name)]
    if not annotations:
        return _no_match(pictures, indexes)
    categories = {annotation.category for annotation in annotations} - {""}
    if not categories:
        return "the regions name no classes; sort the pictures into a folder per class, or list them in a CSV"
    if only is not None and not categories & set(only):
        return f"the class map has no entry for the categories of the regions ({_listed(categories)})"
    return f"no region can name the class of a picture, because all regions are crowds ({_listed(categories)})"


def _area(box: Box | None) -> float:
    return 0.0 if box is None else (box.right - box.left) * (box.bottom - box.top)


class _AnnotationIndex:
    """Finds the objects that a source annotates in a picture.

    Names are compared as paths first, then as paths without extension, with the picture's first folder left out ("a/0"
    is then "images/a/0.png"), as file names, and as file names without extension. A match counts only if exactly one
    annotated name and exactly one picture share the key. So an ambiguous name matches nothing, and no picture receives
    the objects of another.
    """

    def __init__(self, source: Annotations, pictures: Collection[str]) -> None:
        self.source = source
        self.categories = {
            normalize_name(annotation.category) for objects in source.objects.values() for annotation in objects
        }
        self._objects: dict[str, tuple[ObjectAnnotation, ...]] = {}
        several: list[tuple[set[str], set[str]]] = []
        for of_annotation, of_picture in (
            (_as_path, _as_path),
            (_as_path_without_extension, _as_path_without_extension),
            (_as_path_without_extension, _as_path_below_first_folder),
            (_as_name, _as_name),
            (_as_stem, _as_stem),
        ):
            annotated_names, picture_names = _group_by(of_annotation, source.objects), _group_by(of_picture, pictures)
            for shared in annotated_names.keys() & picture_names.keys():
                if len(annotated_names[shared]) == len(picture_names[shared]) == 1:
                    objects = source.objects[annotated_names[shared].pop()]
                    self._objects.setdefault(picture_names[shared].pop(), objects)
                else:
                    several.append((annotated_names[shared], picture_names[shared]))
        self.ambiguous = [(names, matches) for names, matches in several if not self._objects.keys() & matches]
        """Names in the source, and the pictures that they could mean, if there are several of either."""

    def objects_in(self, picture: str) -> tuple[ObjectAnnotation, ...]:
        """Return the objects of a picture; none if the source has none, or if the name is ambiguous."""
        return self._objects.get(picture, ())


def _group_by(key: Callable[[str], str], names: Iterable[str]) -> dict[str, set[str]]:
    groups: dict[str, set[str]] = defaultdict(set)
    for name in names:
        groups[key(name)].add(name)
    return groups


def _as_path(name: str) -> str:
    return PurePosixPath(name.replace("\\", "/")).as_posix()


def _as_path_without_extension(name: str) -> str:
    path = PurePosixPath(_as_path(name))
    return path.with_suffix("").as_posix() if has_picture_suffix(path.name) else path.as_posix()


def _as_path_below_first_folder(name: str) -> str:
    return _as_path_without_extension(name).partition("/")[2]


def _as_name(name: str) -> str:
    return PurePosixPath(_as_path(name)).name


def _as_stem(name: str) -> str:
    return PurePosixPath(_as_path_without_extension(name)).name


def _with_objects(
    item: Item, indexes: Sequence[_AnnotationIndex], classes: Collection[str], also: frozenset[str]
) -> Item:
    """Add a picture's objects: those of its class, or all of them if the source names no class of the data."""
    objects: list[ObjectAnnotation] = []
    others: list[ObjectAnnotation] = []
    for index in indexes:
        names_classes = not index.categories.isdisjoint(classes)
        for annotation in index.objects_in(item.name):
            category = normalize_name(annotation.category)
            own = not names_classes or category in {normalize_name(item.label), *also}
            if own and not annotation.crowd:
                objects.append(annotation)
            elif own or category in classes:
                others.append(annotation)
    return replace(item, objects=tuple(objects), others=tuple(others))
