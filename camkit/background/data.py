"""Read a folder or a table into labelled pictures with their annotated objects."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from PIL import Image

from camkit.background.regions import (
    MOST_LISTED,
    READ,
    Annotations,
    ObjectAnnotation,
    RegionIndex,
    find_columns,
    find_regions,
    header_of,
    holds_photographs,
    pictures_of,
    read_regions,
    unmatched,
)
from camkit.errors import InputError, advice, as_error, did_you_mean, refuse_pipe
from camkit.images.files import files_in, has_picture_suffix, is_regular
from camkit.images.listing import find_pictures
from camkit.images.masks import MASK_SUFFIXES, has_few_values, names_masks
from camkit.images.read import open_picture
from camkit.kit.statistics import wilson
from camkit.kit.wording import first_of, listed
from camkit.options.settings import normalize_name

_COLUMNS = {
    "path": ("path", "file", "filename", "file_name", "image", "image_path", "picture"),
    "label": ("label", "class", "class_name", "category", "target"),
    "group": ("group",),
    "place": ("place",),
}


_T = TypeVar("_T")
_K = TypeVar("_K")


def grouped(entries: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Return entries by their key, in their order.

    >>> grouped([3, 5, 8], lambda number: number % 2)
    {1: [3, 5], 0: [8]}
    """
    groups: dict[_K, list[_T]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


@dataclass(frozen=True, eq=False)
class Row:
    """A picture in a row of a dataset: what reads it, and the hash of its pixels."""

    open: Callable[[], Image.Image]
    content: str


@dataclass(frozen=True, eq=False)
class Item:
    """One labelled picture with its file or row, class, group and objects.

    Attributes:
        name: the file's path relative to the data folder, with forward slashes; or the number of the row.
        source: the file or the row.
        label: the class.
        group: pictures with the same group belong together; without groups it is the name.
        objects: the objects of the picture's class.
        others: the crowds of the picture's class, and the objects of other checked classes.
        place: the kind of background that the data names; "" if it names none.
    """

    name: str
    source: Path | Row
    label: str
    group: str
    objects: tuple[ObjectAnnotation, ...] = ()
    others: tuple[ObjectAnnotation, ...] = ()
    place: str = ""

    def open(self) -> Image.Image:
        """Read the picture.

        Raises:
            ImageError: it cannot be read.
        """
        return self.source.open() if isinstance(self.source, Row) else open_picture(self.source)

    def named_in(self, error: Exception) -> str:
        """Return what an error about the picture says, with its name, wherever the data lies."""
        text = str(error).replace(str(self.source), self.name)
        return text if self.name in text else f"{self.name}: {text}"


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
            f"{len(names)} {reason}: {', '.join(names[:MOST_LISTED])}{', ...' if len(names) > MOST_LISTED else ''}"
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
    only = None if class_map is None else {name for name, entries in class_map.items() if entries is not None}
    try:
        refuse_pipe(data)
        if not data.exists() or (data.is_file() and has_picture_suffix(data.name)):
            raise InputError(
                f"{data} {'is a single picture, but the check needs many' if data.exists() else 'does not exist'}; "
                "pass a folder with a folder per class, or a CSV with the columns path and label"
            )
        table = data if data.suffix.lower() in (".yaml", ".yml") else None
        data = data if table is None else pictures_of(table)
        root = data if data.is_dir() else data.parent
        # A folder may hold pictures of a class although its name is usual for folders of regions: "mask" may be a class
        # of people who wear masks. It does if the class map names it or its pictures are photographs.
        usual = [folder for folder in root.iterdir() if names_masks(folder.name) and folder.is_dir()]
        of_classes = {folder.name for folder in usual if folder.name in (only or ()) or holds_photographs(folder)}
        sources = find_regions(root, of_classes, table) if regions is None else read_regions(regions, table)
        labelled = _label_pictures(data, sources, group, skip, regions, only, of_classes)
    except OSError as error:  # any folder or file may be unreadable
        raise InputError(f"{error.filename or data} cannot be read: {error.strerror or error}") from error
    return joined(root, sources, labelled, class_map, also)


def joined(
    root: Path,
    sources: Sequence[Annotations],
    labelled: Labelled,
    class_map: ClassMap | None,
    also: Mapping[str, frozenset[str]] | None,
) -> Dataset:
    """Leave out the classes that the class map leaves out, and add the objects. The errors are those of ``read_data``.

    ``root`` is what the data is called; ``class_map`` and ``also`` are those of ``read_data``.
    """
    pictures, rule, left_out = labelled
    without = [name for name, entries in (class_map or {}).items() if entries is None]
    items = tuple(item for item in pictures if item.label not in without)
    if not items:
        raise InputError(
            f"{root} holds no labelled pictures; expected a folder per class, a CSV with the columns path and label, "
            "pictures with regions that name classes, or a dataset of images and labels; the class map must keep at "
            "least one class"
        )
    left_out |= {
        f"pictures of {name!r}, which the class map leaves out (null)": tuple(
            item.name for item in pictures if item.label == name
        )
        for name in sorted(without)
    }
    classes = tuple(sorted({item.label for item in items}))
    fact = f"{len(items)} pictures of {len(classes)} class{'' if len(classes) == 1 else 'es'} ({rule})"
    dataset = Dataset(root, items, classes, (fact,), left_out)
    if sources:
        dataset = _annotated(dataset, sources, also or {})
    else:
        dataset = replace(dataset, facts=(*dataset.facts, f"no regions (camkit reads {READ})"))
    return replace(dataset, left_out={reason: names for reason, names in dataset.left_out.items() if names})


def _annotated(data: Dataset, sources: Sequence[Annotations], also: Mapping[str, frozenset[str]]) -> Dataset:
    """Add the objects to each picture, and say what the sources contain."""
    indexes = [RegionIndex(source, [item.name for item in data.items]) for source in sources]
    categories = {category for source in sources for category in source.categories}
    for label, allowed in also.items():
        for name in sorted(allowed - categories):
            raise InputError(
                f"the config allows {label!r} to be recognised by {name!r}, but no object has that category"
                f"{did_you_mean(name, sorted(categories))}"
            )
    names = {normalize_name(name) for name in data.classes}
    items = tuple(_with_objects(item, indexes, names, also.get(item.label, frozenset())) for item in data.items)
    bare = tuple(item.name for item in items if not item.objects)
    if len(bare) == len(items):
        raise InputError(f"no picture has a region of its own class: {unmatched(data.classes, bare, indexes)}")
    left_out = dict(data.left_out)
    for source in sources:
        for problem, pictures in source.problems.items():
            key = f"{source.format}: {problem}"
            left_out[key] = (*left_out.get(key, ()), *pictures)
    unclear = {picture for index in indexes for picture in index.ambiguous}
    left_out |= {
        "pictures whose region has an ambiguous name": tuple(name for name in bare if name in unclear),
        "pictures without a region of their class": tuple(name for name in bare if name not in unclear),
    }
    facts = [index.coverage(data.root) for index in indexes]
    facts += [fact for source in sources for fact in source.facts]
    facts += [
        f"none of the regions' categories ({', '.join(sorted(source.categories)[:MOST_LISTED])}) is a class, so every "
        "object counts for its picture's class"
        for source in sources
        if source.categories and not source.categories & names
    ]
    kinds = Counter(max(annotation.kind for annotation in item.objects) for item in items if item.objects)
    shown = {"mask": "outlines", "box": "boxes only"}
    counts = ", ".join(f"{count} pictures with {shown[kind]}" for kind, count in sorted(kinds.items(), reverse=True))
    return replace(data, items=items, facts=(*data.facts, *facts, counts), left_out=left_out)


Labelled: TypeAlias = tuple[list[Item], str, dict[str, tuple[str, ...]]]
"""Labelled pictures, the rule that labelled them, and what was left out for which reason."""


def _label_pictures(
    data: Path,
    sources: Sequence[Annotations],
    group: str | None,
    skip: Path | None,
    regions: Path | None,
    only: Collection[str] | None,
    of_classes: Collection[str],
) -> Labelled:
    """Label the pictures by a table, by their folders or by their largest objects.

    ``of_classes`` has the folders that are named like folders of masks but hold photographs of a class.
    """
    if data.is_file():
        return _label_by_table(data, group)
    # Of the CSVs with the columns path and label, one with groups and places comes first.
    has = {file: _columns_of(header_of(file), group).keys() for file in files_in(data, [".csv"], deep=False)}
    tables = [file for file, columns in has.items() if {"path", "label"} <= columns]
    table = max(tables, key=lambda file: ("group" in has[file], "place" in has[file]), default=None)
    if group and table is None:
        raise InputError(
            f"the group {group!r} must be a column of a CSV with path and label, but {data} has no such CSV; "
            "remove the group setting"
        )
    others = [os.path.realpath(folder) for folder in (skip, regions) if folder is not None]
    folders = [
        folder
        for folder in sorted(data.iterdir())
        if folder.is_dir() and folder.name[0] != "." and os.path.realpath(folder) not in others
    ]
    of_masks = [folder.name for folder in folders if names_masks(folder.name) and folder.name not in of_classes]
    by_class = {folder.name: _pictures_in(folder) for folder in folders if folder.name not in of_masks}
    with_pictures = [name for name, files in by_class.items() if files]
    # The only folder, such as JPEGImages, may hold the pictures of all classes. Then the regions name the classes.
    named = any(source.categories for source in sources) or not any(source.objects for source in sources)
    if with_pictures and not (len(with_pictures) == 1 and sources and named):
        _refuse_masks(by_class)
        rows = [] if table is None or not (group or {"group", "place"} & has[table]) else _rows_of_table(table, group)
        return _label_by_folder(data, by_class, of_masks, rows)
    if table is not None and not with_pictures:
        return _label_by_table(table, group)
    return _label_by_largest(data, sources, only, skip)


def _label_by_folder(
    data: Path, by_class: Mapping[str, Sequence[Path]], of_masks: Sequence[str], rows: Sequence[Mapping[str, str]]
) -> Labelled:
    """Give each picture the name of its folder as its class; the rows of a table say its group and place."""
    listed_in = {Path(row["path"]).as_posix(): row for row in rows}
    items = []
    for label, files in by_class.items():
        for file in files:
            name = file.relative_to(data).as_posix()
            row = listed_in.get(name, {"group": "", "place": ""})
            items.append(Item(name, file, label, row["group"] or name, place=row["place"]))
    left_out = {
        "classes without pictures": tuple(name for name, files in by_class.items() if not files),
        "folders that hold regions, judging by their names": tuple(of_masks),
    }
    return items, "a folder per class", left_out


def _refuse_masks(by_class: Mapping[str, Sequence[Path]]) -> None:
    """Refuse masks with unusual names among photographs: they would count as pictures of a class."""
    masks, photographs = [], 0
    by_folder = grouped((file for files in by_class.values() for file in files), lambda file: file.parent)
    for pictures in by_folder.values():
        possible = [file for file in pictures if file.suffix.lower() in MASK_SUFFIXES]
        # In each folder, at most this many of the pictures that may be masks are examined
        examined = possible[:4]
        few = list(filter(has_few_values, examined))
        masks += few if 2 * len(few) >= len(examined) else []
        photographs += len(pictures) - len(possible) + len(examined) - len(few)
    if masks and photographs:
        raise InputError(
            f"{masks[0]} has only a few colours, like a mask, but is in the folder of a class; name masks like their "
            "pictures, either in a folder named masks or as NAME_mask.png, or list the pictures and classes in a CSV"
        )


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


def _rows_of_table(file: Path, group: str | None) -> list[dict[str, str]]:
    """Read a table of pictures: path, label, group and place of each; what the table does not say is empty.

    Raises:
        InputError: it cannot be read, or lacks a column.
    """
    reading = as_error(InputError, lambda error: f"{file} cannot be read: {error}")
    with reading, file.open(newline="", encoding="utf-8-sig") as lines:
        table = csv.DictReader(lines)
        header = list(table.fieldnames or ())
        rows = list(table)
    columns = _columns_of(header, group)
    if not {"path", "label", *(["group"] if group else [])} <= columns.keys():
        shown = first_of([name[:40] for name in header], 8) or "none"
        raise InputError(
            f"{file} must have the columns {listed(['path', 'label', *filter(None, [group])])}; it has {shown}"
        )
    missing = dict.fromkeys(_COLUMNS, "")
    return [missing | {name: (row.get(column) or "").strip() for name, column in columns.items()} for row in rows]


SEVERAL_CLASSES = "pictures that the table lists with several classes"
"""Why pictures are left out. If there are any, camkit assumes that the model's classes do not exclude each other."""


def _label_by_table(file: Path, group: str | None) -> Labelled:
    """Read the pictures and labels that a CSV lists."""
    items: dict[str, Item] = {}
    left_out: dict[str, dict[str, None]] = defaultdict(dict)
    for row in _rows_of_table(file, group):
        name, label = row["path"], row["label"]
        path = file.parent / name
        if not is_regular(path):
            left_out["files that do not exist"][name] = None
        elif not label:
            left_out["pictures without a label"][name] = None
        else:  # a table of boxes has one row for each object, so several rows for one picture
            item_name = Path(name).as_posix()
            item = Item(item_name, path, label, row["group"] or name, place=row["place"])
            if items.setdefault(item_name, item).label != label:
                left_out[SEVERAL_CLASSES][item_name] = None
    labelled = [item for name, item in items.items() if name not in left_out.get(SEVERAL_CLASSES, ())]
    if items and not labelled:
        raise InputError(f"{file} lists every picture with several classes; give each picture one class")
    return labelled, f"the table {file.name}", {reason: tuple(names) for reason, names in left_out.items()}


def _label_by_largest(
    data: Path, sources: Sequence[Annotations], only: Collection[str] | None, skip: Path | None
) -> Labelled:
    """Give each picture the class of its largest annotated object."""
    files = {file.relative_to(data).as_posix(): file for file in _pictures_in(data, skip)}
    files = {name: file for name, file in files.items() if not any(map(names_masks, Path(name).parts[:-1]))}
    indexes = [RegionIndex(source, files) for source in sources]
    items, bare = [], []
    for name, file in files.items():
        objects = [annotation for index in indexes for annotation in index.objects.get(name, ())]
        named = [one for one in objects if one.category and not one.crowd and (only is None or one.category in only)]
        named.sort(key=lambda one: (-one.area, one.category))
        if named:
            items.append(Item(name, file, named[0].category, name))
        else:
            bare.append(name)
    if bare and not items and sources:
        raise InputError(f"no picture gets a class from its regions: {unmatched(only or (), bare, indexes)}")
    left_out = {"pictures without an annotated class": tuple(bare)}
    return items, "each picture has the class of its largest annotated object", left_out


def _with_objects(item: Item, indexes: Sequence[RegionIndex], classes: Collection[str], also: frozenset[str]) -> Item:
    """Add a picture's objects: those of its class, or all of them if the source names no class of the data."""
    objects: list[ObjectAnnotation] = []
    others: list[ObjectAnnotation] = []
    for index in indexes:
        names_classes = not index.source.categories.isdisjoint(classes)
        for annotation in index.objects.get(item.name, ()):
            category = normalize_name(annotation.category)
            own = not names_classes or category in {normalize_name(item.label), *also}
            if own and not annotation.crowd:
                objects.append(annotation)
            elif own or category in classes:
                others.append(annotation)
    return replace(item, objects=tuple(objects), others=tuple(others))


ClassMap = Mapping[str, Sequence[int | str] | None]
"""Maps each class to indices or labels of the model; None leaves the pictures of a class out."""


def match_classes(
    classes: Sequence[str],
    labels: Sequence[str] | None,
    outputs: int,
    class_map: ClassMap | None,
    counts: Mapping[str, int] | None = None,
) -> tuple[Mapping[str, tuple[int, ...]], str]:
    """Find the model's outputs for each class of the data.

    Args:
        classes: the classes of the data, sorted by name.
        labels: the model's labels, in the order of its outputs.
        outputs: how many outputs the model has.
        class_map: maps classes to indices or labels; None if the caller has no map.
        counts: how many pictures each class has, for messages.

    Returns:
        The outputs of each class, and how they were found: by class map if there is one. Else by label, if each class
        is a label or a synonym in one ("tabby, tabby cat"). Else by number. Else by order, as torchvision's ImageFolder
        numbers its classes, if there are as many classes as outputs.

    Raises:
        InputError: none of these rules applies, or the class map is wrong.
    """
    by_name = _outputs_by_name(labels or ())
    indices = {name: by_name.get(normalize_name(name), ()) for name in classes}
    unknown = [name for name in classes if not indices[name]]
    wordnet = all(re.fullmatch(r"n\d{8}", name) for name in classes)
    if class_map is not None:
        indices = {name: _look_up(name, class_map, labels, outputs, counts or {}) for name in classes}
        how = "by the class map"
    elif not unknown:
        several = {name: " and ".join(map(str, own)) for name, own in indices.items() if len(own) > 1}
        how = "; ".join(["by label", *(f"{name!r} has the outputs {numbers}" for name, numbers in several.items())])
    elif all(name.isdecimal() and int(name) < outputs for name in classes):
        indices, how = {name: (int(name),) for name in classes}, "by number"
    elif len(classes) == outputs and (labels is None or wordnet):
        indices = {name: (number,) for number, name in enumerate(sorted(classes))}
        how = "by order, as ImageFolder does"
    elif labels is None:
        raise InputError(
            f"the model has {outputs} unnamed outputs and the data has {len(classes)} classes; pass the model's labels "
            + advice(
                "(labels=[...]) or a class map (class_map={...})",
                "(--labels FILE) or a class map (--class-map FILE)",
            )
        )
    else:
        raise InputError(
            f"the model has no label {first_of(list(map(repr, unknown)), MOST_LISTED)}; rename the classes or pass a "
            f"class map ({advice('class_map={...}', '--class-map FILE')}){did_you_mean(unknown[0], labels)}"
        )
    owners: dict[int, str] = {}
    for name, index in ((name, index) for name, own in indices.items() for index in own):
        if owners.setdefault(index, name) != name:
            raise InputError(
                f"output {index} of the model belongs to both {owners[index]!r} and {name!r}; merge these classes"
            )
    return indices, how


def _outputs_by_name(labels: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the outputs for each label and synonym; a complete label takes precedence over a synonym."""
    complete, synonyms = defaultdict[str, tuple[int, ...]](tuple), defaultdict[str, tuple[int, ...]](tuple)
    for number, label in enumerate(labels):
        complete[normalize_name(label)] += (number,)
        for part in label.split(","):
            synonyms[normalize_name(part)] += (number,)
    return {**synonyms, **complete}


def _look_up(
    name: str, class_map: ClassMap, labels: Sequence[str] | None, outputs: int, counts: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the outputs that the class map gives a class."""
    entries = class_map.get(name)
    if entries is None:
        pictures = f" ({counts[name]} picture{'' if counts[name] == 1 else 's'})" if name in counts else ""
        raise InputError(f"class map: no entry for {name!r}{pictures}; map it to null to leave it out")
    by_name = _outputs_by_name(labels or ())
    indices: list[int] = []
    for entry in entries:
        own = (entry,) if isinstance(entry, int) else by_name.get(normalize_name(entry), ())
        if not own or not 0 <= min(own) <= max(own) < outputs:
            near = did_you_mean(str(entry), labels or ())
            known = f"{outputs} outputs" if own else f"labels{near}"
            raise InputError(f"class map: {entry!r} for {name!r} is not one of the model's {known}")
        indices.extend(own)
    return tuple(dict.fromkeys(indices))


def question_order(
    answers: Iterable[tuple[str, int]], outputs: Mapping[str, Sequence[int]], names: Sequence[str] | None
) -> str | None:
    """Return a question about the order of the classes if those of some seem to be exchanged; else None.

    They are if most of their pictures together get the answer that is the most common one of their class.

    Nothing is asked if two classes would get the same output: the model may then name one class for everything.

    Args:
        answers: the class of each picture, and the output that the model named; below 0 if it named none.
        outputs: the model's outputs for each class.
        names: the model's labels.
    """
    given: dict[str, Counter[int]] = defaultdict(Counter)
    for label, answer in answers:
        given[label][answer] += 1
    most = {label: counts.most_common(1)[0] for label, counts in sorted(given.items())}
    kept = {answer for label, (answer, _) in most.items() if answer in outputs[label]}
    moved = {label: answer for label, (answer, _) in most.items() if answer >= 0 and answer not in outputs[label]}
    agreeing, pictures = sum(most[label][1] for label in moved), sum(given[label].total() for label in moved)
    if len({*moved.values()} - kept) < len(moved) or not moved or wilson(agreeing, pictures)[0] <= 0.5:
        return None
    named = {output: f" ({name})" for output, name in enumerate(names or ())}
    shown = [f"class {answer}{named.get(answer, '')} for {label!r}" for label, answer in moved.items()]
    return f"the model mostly answers {first_of(shown, MOST_LISTED)}: are the labels in the model's order?"


def read_class_map(source: Mapping[str, Any] | Path) -> dict[str, list[int | str] | None]:
    """Read a table, or a JSON file of it, from class to an index, a label or a list of them.

    None leaves the pictures of a class out. Keys that begin with "_" are comments.

    Raises:
        InputError: the file cannot be read, or a value is something else.
    """
    table: Any = source
    named = source if isinstance(source, Path) else "class_map"
    if isinstance(source, Path):
        refuse_pipe(source)
        with as_error(InputError, lambda error: f"the class map {source} cannot be read: {error}"):
            table = {**json.loads(source.read_text(encoding="utf-8-sig"))}
    class_map: dict[str, list[int | str] | None] = {}
    for name, value in ((name, value) for name, value in table.items() if not str(name).startswith("_")):
        entries = list(value) if isinstance(value, (list, tuple)) else [value]
        known = entries and all(isinstance(each, (Integral, str)) and not isinstance(each, bool) for each in entries)
        if not known and value is not None:
            raise InputError(
                f"{named}: {name!r} must have indices or labels of the model, or null to leave it out, not {value!r}"
            )
        class_map[str(name)] = [each if isinstance(each, str) else int(each) for each in entries] if known else None
    return class_map
