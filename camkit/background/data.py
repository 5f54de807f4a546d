"""From a folder or a table to labelled pictures with the objects they are about."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from PIL import Image

from camkit.background.classes import plain
from camkit.background.regions import find_regions, is_mask, read_regions
from camkit.background.regions.boxes import columns
from camkit.background.values import Annotations, Dataset, Item, ObjectAnnotation
from camkit.errors import ImageError, InputError, did_you_mean
from camkit.images.files import find_pictures
from camkit.types import Box

_BESIDE = {"masks", "mask", "labels", "annotations", "segmentations", "segmentationclass", "segmentationobject"}
"""Folders that hold regions, not pictures of a class."""

_COLUMNS = {
    "path": ("path", "file", "filename", "file_name", "image", "image_path", "picture"),
    "label": ("label", "class", "class_name", "category", "target"),
    "group": ("group",),
}


def read_data(
    data: Path,
    *,
    regions: Path | None = None,
    group: str | None = None,
    skip: Path | None = None,
    only: Collection[str] | None = None,
    also: Mapping[str, frozenset[str]] | None = None,
) -> Dataset:
    """Read labelled pictures and the regions that belong to them.

    Args:
        data: a folder with a folder per class; a CSV of path, label and perhaps group; or a folder of pictures whose
            regions name their objects' classes: a picture's class is then that of its largest object.
        regions: where the regions are; searched for below the data and beside it if None.
        group: the column of the CSV that says which pictures belong together.
        skip: a folder that is not data, such as that of the reports.
        only: the classes there may be, where they are those of annotated objects.
        also: categories whose objects count as a class's own, in lower case, by class.

    Raises:
        InputError: there is nothing of that kind, or regions were named and none belongs to a picture.
    """
    if not data.exists():
        raise InputError(f"there is no {data}")
    root = data if data.is_dir() else data.parent
    found = read_regions(regions) if regions is not None else find_regions(root)
    items, form, left_out = _labelled(data, found, group, skip, only)
    if not items:
        raise InputError(
            f"{data} holds no labelled pictures: expected a folder per class, a CSV with the columns path and label, "
            "or pictures with regions that name classes"
        )
    classes = tuple(sorted({item.label for item in items}))
    facts = [f"{len(items)} pictures of {len(classes)} classes ({form})"]
    if not found:
        facts.append("no regions")
        return Dataset(root, tuple(items), classes, form, tuple(facts), left_out)
    index = [_Index(source, [item.name for item in items]) for source in found]
    lowered = {plain(name) for name in classes}
    _check_allowed(also or {}, index)
    matched = [_with_things(item, index, lowered, (also or {}).get(item.label, frozenset())) for item in items]
    for source, known in zip(found, index, strict=True):
        facts.append(_belonging(source, known, items, root))
        for what, names in source.problems.items():
            left_out[f"{source.form}: {what}"] = (*left_out.get(f"{source.form}: {what}", ()), *names)
    facts += _without_classes(index, lowered)
    bare = tuple(item.name for item in matched if not item.objects)
    if len(bare) == len(matched):
        sources = " and ".join(f"{one.form} in {one.source}" for one in found)
        raise InputError(
            f"no picture matches a region: {len(items)} pictures such as {items[0].name!r}, and {sources} for such as "
            f"{_first(found)!r}"
        )
    kinds = Counter(
        "box" if all(one.kind == "box" for one in item.objects) else "mask" for item in matched if item.objects
    )
    facts.append(
        ", ".join(f"{count} pictures with {_KINDS[kind]}" for kind, count in sorted(kinds.items(), reverse=True))
    )
    if bare:
        left_out["pictures without a region of their class"] = bare
    return Dataset(root, tuple(matched), classes, form, tuple(facts), left_out)


_NAMED = 5
_KINDS = {"mask": "outlined objects", "box": "boxes alone"}


def _without_classes(index: Sequence[_Index], classes: Collection[str]) -> list[str]:
    """Say where regions are of categories of which none is a class: every object then counts as its picture's."""
    return [
        f"none of the regions' categories ({', '.join(sorted(one.categories)[:_NAMED])}) is a class: every object "
        "counts as what its picture is about"
        for one in index
        if one.categories - {""} and not one.categories & set(classes)
    ]


def _check_allowed(also: Mapping[str, frozenset[str]], index: Sequence[_Index]) -> None:
    """Refuse categories, named in a config, that no object is of."""
    known = {category for one in index for category in one.categories} - {""}
    for label, names in also.items():
        for name in sorted(names - known):
            raise InputError(
                f"the config lets {label!r} be recognised by {name!r}, and no object is of that category"
                f"{did_you_mean(name, sorted(known))}"
            )


def _first(found: Sequence[Annotations]) -> str:
    return next((name for source in found for name in source.objects), "nothing")


def _labelled(
    data: Path, found: Sequence[Annotations], group: str | None, skip: Path | None, only: Collection[str] | None
) -> tuple[list[Item], str, dict[str, tuple[str, ...]]]:
    """Return the pictures with their labels, how these were found, and what was left out."""
    if data.is_file():
        return _from_table(data, group)
    if group and _table_of(data) is None:
        raise InputError(
            f"the groups are a column of a CSV of path and label, and {data} has none: leave {group!r} out"
        )
    folders = [
        folder
        for folder in sorted(data.iterdir())
        if folder.is_dir() and folder.name[0] != "." and (skip is None or folder.resolve() != skip.resolve())
    ]
    beside = tuple(folder.name for folder in folders if folder.name.lower() in _BESIDE)
    folders = [folder for folder in folders if folder.name not in beside]
    by_class = {folder.name: [file for file in find_pictures([folder]) if _is_picture(file)] for folder in folders}
    empty = tuple(name for name, files in by_class.items() if not files)
    named = any(
        annotation.category for source in found for objects in source.objects.values() for annotation in objects
    )
    if sum(map(bool, by_class.values())) == 1 and named:  # pictures beside their annotations, such as JPEGImages
        return _by_largest(data, found, only, skip)
    if any(by_class.values()):
        items = [
            Item(file.relative_to(data).as_posix(), file, name, file.relative_to(data).as_posix())
            for name, files in by_class.items()
            for file in files
        ]
        left_out = {"classes without pictures": empty, "folders that are regions' by their names": beside}
        return items, "a folder per class", {what: names for what, names in left_out.items() if names}
    table = _table_of(data)
    if table is not None:
        return _from_table(table, group)
    return _by_largest(data, found, only, skip)


def _is_picture(file: Path) -> bool:
    return file.is_file() and not is_mask(file)


def _table_of(folder: Path) -> Path | None:
    for file in sorted(folder.glob("*.csv")):
        try:
            with file.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
                header = next(csv.reader(lines), [])
        except (OSError, csv.Error):
            continue
        if {"path", "label"} <= columns(header, _COLUMNS).keys():
            return file
    return None


def _from_table(file: Path, group: str | None) -> tuple[list[Item], str, dict[str, tuple[str, ...]]]:
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            table = csv.DictReader(lines)
            header = list(table.fieldnames or ())
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    wanted = {**_COLUMNS, "group": (group.lower(),)} if group else _COLUMNS
    known = columns(header, wanted)
    if not {"path", "label"} <= known.keys():
        raise InputError(f"{file} must have the columns path and label; it has {', '.join(header) or 'none'}")
    if group and "group" not in known:
        raise InputError(f"{file} has no column {group!r} for the groups; it has {', '.join(header)}")
    items: dict[tuple[str, str], Item] = {}
    missing, unlabelled = [], []
    for row in rows:
        name, label = row[known["path"]] or "", (row[known["label"]] or "").strip()
        path = file.parent / name
        if not _is_there(path):
            missing.append(name)
        elif not label:
            unlabelled.append(name)
        else:  # a table of boxes has a line for each object of a picture
            group_of = row.get(known.get("group", "")) or name
            items.setdefault((Path(name).as_posix(), label), Item(Path(name).as_posix(), path, label, group_of))
    left_out = {"files that are not there": tuple(missing), "pictures without a label": tuple(unlabelled)}
    return list(items.values()), f"the table {file.name}", {what: names for what, names in left_out.items() if names}


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name of a file: too long, or not of characters
        return False


def _by_largest(
    data: Path, found: Sequence[Annotations], only: Collection[str] | None, skip: Path | None
) -> tuple[list[Item], str, dict[str, tuple[str, ...]]]:
    """Label each picture by the class of its largest annotated object."""
    names = {file.relative_to(data).as_posix(): file for file in find_pictures([data], skip) if _is_picture(file)}
    names = {name: file for name, file in names.items() if not {one.lower() for one in Path(name).parts[:-1]} & _BESIDE}
    index = [_Index(source, names) for source in found]
    items, bare = [], []
    for name, file in names.items():
        areas: dict[str, float] = defaultdict(float)
        for one in index:
            for annotation in one.of(name):
                if annotation.category and not annotation.crowd and (only is None or annotation.category in only):
                    areas[annotation.category] = max(areas[annotation.category], _area(annotation.box))
        if areas:
            items.append(Item(name, file, max(sorted(areas), key=lambda category: areas[category]), name))
        else:
            bare.append(name)
    form = "each picture's class is that of its largest annotated object"
    return items, form, {"pictures without an annotated class": tuple(bare)} if bare else {}


def _area(box: Box | None) -> float:
    return 0.0 if box is None else (box.right - box.left) * (box.bottom - box.top)


class _Index:
    """Finds what a source says of a picture: by its path, by its name, each with and without the ending.

    What a source says belongs to one picture. It is that which it names best; of two that it names equally well neither
    is believed to be meant, so that no picture has the objects of another.
    """

    def __init__(self, source: Annotations, pictures: Collection[str]) -> None:
        self.categories = {plain(annotation.category) for objects in source.objects.values() for annotation in objects}
        self._things: dict[str, tuple[ObjectAnnotation, ...]] = {}
        for form in (_as_path, _as_path_without_ending, _as_name, _as_stem):
            known, meant = _grouped(source.objects, form), _grouped(pictures, form)
            for shared in known.keys() & meant.keys():
                if len(known[shared]) == len(meant[shared]) == 1:
                    self._things.setdefault(meant[shared].pop(), source.objects[known[shared].pop()])

    def of(self, picture: str) -> tuple[ObjectAnnotation, ...]:
        """Return the objects of a picture; none where the source has none, or several pictures of such a name."""
        return self._things.get(picture, ())


def _grouped(names: Iterable[str], form: Callable[[str], str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        found[form(name)].add(name)
    return found


def _as_path(name: str) -> str:
    return PurePosixPath(name.replace("\\", "/")).as_posix()


def _as_path_without_ending(name: str) -> str:
    path = PurePosixPath(_as_path(name))
    return path.with_suffix("").as_posix() if path.suffix.lower() in Image.registered_extensions() else path.as_posix()


def _as_name(name: str) -> str:
    return PurePosixPath(_as_path(name)).name


def _as_stem(name: str) -> str:
    return PurePosixPath(_as_path_without_ending(name)).name


def _with_things(item: Item, index: Sequence[_Index], classes: set[str], also: frozenset[str]) -> Item:
    """Add the objects a picture is about: those of its class, or all where no category is a class."""
    objects: list[ObjectAnnotation] = []
    others: list[ObjectAnnotation] = []
    for one in index:
        about_classes = bool(one.categories & classes)
        for annotation in one.of(item.name):
            own = not about_classes or plain(annotation.category) in {plain(item.label), *also}
            if own and not annotation.crowd:
                objects.append(annotation)
            elif own or plain(annotation.category) in classes:
                others.append(annotation)
    return replace(item, objects=tuple(objects), others=tuple(others))


def _belonging(source: Annotations, index: _Index, items: Iterable[Item], root: Path) -> str:
    """Say how many pictures a source of regions speaks of."""
    count = sum(bool(index.of(item.name)) for item in items)
    where = Path(source.source)
    shown = where.relative_to(root).as_posix() if where.is_relative_to(root) else where.name
    return f"{source.form} in {shown}: objects of {len(source.objects)} pictures, {count} of them here"


def scaled(annotation: ObjectAnnotation, size: tuple[int, int]) -> ObjectAnnotation:
    """Return an object in pixels of a picture of ``size`` (width, height).

    Raises:
        ImageError: it was drawn on a picture of another size.
    """
    if annotation.size is not None and annotation.size != size:
        turned = " (it is shown turned, as its EXIF data says)" if annotation.size == size[::-1] else ""
        raise ImageError(
            f"its objects are those of a picture of {annotation.size[0]}x{annotation.size[1]} pixels, and it has "
            f"{size[0]}x{size[1]}{turned}"
        )
    if not annotation.shares:
        return annotation
    width, height = size
    box = annotation.box and Box(
        annotation.box.left * width,
        annotation.box.top * height,
        annotation.box.right * width,
        annotation.box.bottom * height,
    )
    outline = annotation.outline
    if isinstance(outline, list):
        outline = [[side * (width, height)[number % 2] for number, side in enumerate(part)] for part in outline]
    return ObjectAnnotation(annotation.category, box, outline, crowd=annotation.crowd)
