"""Read a dataset in memory, of PyTorch or of Hugging Face, into labelled pictures with their annotated objects.

All rows are read once for their labels, objects and hashes. A picture is read again when it is needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Integer, Shaped
from PIL import Image
from pycocotools import mask as rle
from torch.utils.data import DataLoader, IterableDataset
from torchvision.transforms import Compose, Grayscale, Normalize, ToTensor
from torchvision.transforms.v2.functional import convert_bounding_box_format
from torchvision.tv_tensors import BoundingBoxes

from camkit.background.data import ClassMap, Dataset, Item, Row, joined
from camkit.background.regions import Annotations, ObjectAnnotation, find_columns, read_regions
from camkit.errors import ImageError, InputError, as_error, brief, whole_number
from camkit.images.masks import MaskReading, mask_numbers, understand_masks
from camkit.images.read import as_rgb, from_array
from camkit.kit.store import digest
from camkit.models.loaded import LoadedModel, as_labels
from camkit.types import Box

_COLUMNS = {
    "image": ("image", "img", "picture", "pixel_values"),
    "label": ("label", "labels", "class", "category", "target", "fine_label"),
    "mask": ("mask", "masks", "segmentation"),
    "boxes": ("boxes",),
    "regions": ("regions",),
    "crowds": ("iscrowd",),
    "objects": ("objects", "annotations"),
    "group": ("group",),
    "place": ("place",),
}
"""The columns of a table, and the keys of torchvision's targets."""

_OF_OBJECTS = {
    "corners_and_sizes": ("bbox",),
    "categories": ("category", "category_id", "label", "labels"),
    "outlines": ("segmentation",),
    "crowds": ("iscrowd",),
}
"""The columns of a table's objects, and the keys of COCO's annotations."""


class Rows:
    """The rows of a dataset, by their numbers.

    Args:
        data: a dataset with a length, or a loader of one.
        group: the column that says which pictures belong together; None for "group".

    Attributes:
        names: the names of the classes, in the order of their indices; None if the dataset names none.

    Raises:
        InputError: the dataset has no length.
    """

    def __init__(self, data: Any, group: str | None = None) -> None:
        self.data: Any = data.dataset if isinstance(data, DataLoader) else data
        if isinstance(self.data, (IterableDataset, Mapping)) or not isinstance(self.data, Sized):
            raise InputError(
                f"{type(self.data).__name__} has no numbered rows; pass a folder, or a dataset with a length, such as "
                "one split of a Hugging Face table"
            )
        kinds = _attribute(self.data, "features")
        self._columns = {**_COLUMNS, "group": (group.lower(),)} if group else _COLUMNS
        columns = find_columns(list(kinds), self._columns) if isinstance(kinds, Mapping) else {}
        of_label, of_objects = (
            _names_in(kinds[columns[key]]) if key in columns else None for key in ("label", "objects")
        )
        self.names = as_labels(_attribute(self.data, "classes") or of_label or of_objects)
        self._reading = threading.Lock()  # a dataset may read from one open file
        self._shades = _shades_of(ToTensor())
        self._sample = range(0, len(self.data), max(1, len(self.data) // 16))

    def fitted(self, model: LoadedModel) -> LoadedModel:
        """Return the model with a preprocessing that turns a row's picture into the values that the row holds.

        The model is unchanged if it prepares pictures itself and the rows are not normalised, or if no row that was
        looked at holds floating-point numbers.

        Raises:
            ImageError: no row that was looked at can be read.
            InputError: a row changes when it is read again, or the rows are normalised in an unknown way.
        """
        arrays, failure = list[Shaped[np.ndarray, "h w c"]](), None
        for number in self._sample:
            try:
                row = self.row(number)
                if self.picture(number, row) != self.picture(number):
                    raise InputError("the dataset changes its pictures at random; pass it without augmentation")
                arrays.append(_as_array(row["image"]))
            except ImageError as error:  # if others can be read, this one is left out
                failure = failure or error
        if failure is not None and not arrays:
            raise failure
        samples = [array for array in arrays if array.dtype.kind == "f"]
        if not samples:
            return model
        channels = samples[0].shape[2]
        for preprocess in (_attribute(self.data, "transform"), ToTensor(), model.preprocess):
            self._shades = _shades_of(preprocess)[:, -channels:]
            levels = [self._levels(sample) for sample in samples]
            # An interpolation between pixels may leave the range by less than a tenth
            if all(each.min() >= -0.1 and each.max() <= 1.1 for each in levels):
                break
        else:
            raise InputError(
                f"the dataset's pictures are normalised (from {min(map(np.min, samples)):.3g} to "
                f"{max(map(np.max, samples)):.3g}) in an unknown way; pass the transform that normalised them as "
                "preprocess=..., or the dataset without its normalisation"
            )
        mean = self._levels(np.zeros(channels))
        deviation = self._levels(np.ones(channels)) - mean
        if model.preprocess is not None and not mean.any() and (deviation == 1).all():
            return model
        steps = [*[Grayscale()] * (channels == 1), ToTensor(), Normalize(mean.tolist(), deviation.tolist())]
        return replace(model, preprocess=Compose(steps))

    def _levels(self, array: Float[np.ndarray, "*h_w c"]) -> Float[np.ndarray, "*h_w c"]:
        black, white = self._shades
        return np.asarray((array - black) / np.where(white == black, np.nan, white - black))

    def row(self, number: int) -> dict[str, Any]:
        """Return what a row holds, by the names in ``_COLUMNS``.

        Raises:
            ImageError: reading it fails.
            InputError: it has an unknown form.
        """
        with self._reading, _unreadable(number):
            row = self.data[number]
        if isinstance(row, (tuple, list)) and row:
            row = _by_name(row)
        columns = find_columns(list(row), self._columns) if isinstance(row, Mapping) else {}
        if "image" not in columns:
            raise InputError(
                f"row {number} of the data is {brief(row)}; a row must be (image, label), (image, label, mask or "
                "boxes), (image, {'boxes': ..., 'labels': ...}), or have the columns image and label"
            )
        found = {name: row[column] for name, column in columns.items() if row[column] is not None}
        objects = found.pop("objects", {})
        if isinstance(objects, list):
            objects = {key: [each[key] for each in objects] for key in (objects[0] if objects else ())}
        found |= {name: objects[column] for name, column in find_columns(list(objects), _OF_OBJECTS).items()}
        if "regions" in found:
            is_boxes = np.ndim(found["regions"]) < 3 and np.shape(found["regions"])[-1:] == (4,)
            is_boxes = is_boxes or isinstance(found["regions"], BoundingBoxes)
            found["boxes" if is_boxes else "mask"] = found.pop("regions")
        if np.ndim(found.get("label", 0)) == 1 and found.keys() & {"boxes", "mask"}:
            found["categories"] = found.pop("label")
        return found

    def picture(self, number: int, row: Mapping[str, Any] | None = None) -> Image.Image:
        """Return the picture of a row as 8-bit RGB, not normalised. The errors are those of ``row``.

        ``row`` is what ``row`` returned; None reads it.
        """
        with _unreadable(number):
            array = _as_array((row or self.row(number))["image"])
        return from_array(np.clip(self._levels(array), 0, 1) if array.dtype.kind == "f" else array)

    @functools.cached_property
    def masks(self) -> MaskReading:
        """What the values of the masks mean, judging by a sample of them.

        Raises:
            InputError: it is not clear what the object is.
        """
        empty = np.zeros((2, 2))
        return understand_masks(range(len(self.data)), lambda number: _numbers_of(self.row(number).get("mask", empty)))

    def objects(
        self, row: Mapping[str, Any], own: str | None, size: tuple[int, int], names: Sequence[str] | None
    ) -> Iterator[tuple[float, ObjectAnnotation]]:
        """Yield the objects of a row, each with its area in pixels.

        Args:
            row: what ``row`` returned.
            own: the class of the picture; None if only the objects have classes.
            size: width and height of the picture.
            names: the names of the classes.

        Raises:
            InputError: a class is wrong, or it is not clear what the masks mean.
        """
        categories = [class_of(each, names) for each in row.get("categories", ())]
        given = row.get("boxes", row.get("corners_and_sizes", ()))
        if isinstance(given, BoundingBoxes):
            with as_error(InputError, lambda error: f"the boxes have no corners: {brief(error)}; pass them as XYXY"):
                given = convert_bounding_box_format(given, new_format="XYXY")
        boxes = np.array(given, float).reshape(-1, 4)
        if "boxes" not in row and not isinstance(given, BoundingBoxes):
            boxes[:, 2:] += boxes[:, :2]
        outlines = row.get("outlines", ())
        if "mask" in row:
            numbers = _numbers_of(row["mask"])
            alone = numbers.ndim == 2 and len(categories) != 1  # otherwise there is a mask for each object
            regions = [self.masks.is_object(numbers)] if alone else numbers.reshape(-1, *numbers.shape[-2:]) > 0
            outlines = [rle.encode(np.asfortranarray(region, np.uint8)) for region in regions]
        crowds = row.get("crowds", ())
        for sides, outline, category, crowd in itertools.zip_longest(boxes.tolist(), outlines, categories, crowds):
            box = None if sides is None else Box(*sides)
            drawn = ObjectAnnotation(category or own or "", box, outline or None, crowd=bool(crowd), size=size)
            area = drawn.area if box is not None else float(rle.area(outline))
            if box is not None or area > 0:
                yield area, drawn


def read_rows(
    rows: Rows,
    labels: Sequence[str] | None,
    regions: Path | None,
    class_map: ClassMap | None,
    also: Mapping[str, frozenset[str]],
) -> Dataset:
    """Read the rows of a dataset. A picture whose row has no label has the class of its largest object.

    Args:
        rows: the rows.
        labels: the names of the classes if the dataset has none.
        regions, class_map, also: as for ``read_data``.

    Raises:
        InputError: as ``read_data``, or a row has an unknown form.
    """
    items, unlabelled, unreadable = list[Item](), list[str](), list[str]()
    source = Annotations("objects", Path("the dataset"))
    names = rows.names or labels
    for number in range(len(rows.data)):
        name = str(number)
        try:
            row = rows.row(number)
            picture = rows.picture(number, row)
        except ImageError:
            unreadable.append(name)
            continue
        label = class_of(row.get("label"), names)
        objects = list(rows.objects(row, label, picture.size, names))
        named = ((area, each.category) for area, each in objects if each.category and not each.crowd)
        label = label or max(named, default=(0, ""))[1]
        if label:
            for _, each in objects:
                source.add(name, each)
            read = Row(functools.partial(rows.picture, number), digest([str(picture.size), picture.tobytes()]))
            items.append(Item(name, read, label, str(row.get("group", name)), place=str(row.get("place", ""))))
        else:
            unlabelled.append(name)
    if "masks" in vars(rows):
        source.facts = (f"masks: {rows.masks.words}",)
    left_out = {"pictures without a label": tuple(unlabelled), "rows that cannot be read": tuple(unreadable)}
    return joined(
        Path(str(_attribute(rows.data, "root") or type(rows.data).__name__)),
        [*[source.finished()] * bool(source.added), *(read_regions(regions) if regions else [])],
        (items, "the rows of a dataset", left_out),
        class_map,
        also,
    )


def class_of(value: Any, names: Sequence[str] | None) -> str | None:
    """Return the name of a class; None if there is none, and its number if no names are known.

    Raises:
        InputError: the value is neither the name nor the number of one class.
    """
    if value is None or isinstance(value, str):
        return value
    index = whole_number(value, "the label of a picture, its only class,")
    if names is not None and index >= len(names):
        raise InputError(f"the data has the label {index}, but only {len(names)} classes have names")
    return None if index < 0 else str(index) if names is None else names[index]


def _attribute(data: Any, name: str) -> Any:
    """Return an attribute of a dataset, or of the dataset that it wraps, as a Subset does; None if neither has it."""
    while data is not None and getattr(data, name, None) is None:
        data = getattr(data, "dataset", None) or next(iter(getattr(data, "datasets", ())), None)
    return getattr(data, name, None)


def _names_in(feature: Any) -> Sequence[str] | None:
    """Return the names of the classes in a feature of a Hugging Face table, or in one of its parts."""
    if isinstance(feature, Mapping):
        return next(filter(None, map(_names_in, feature.values())), None)
    part = getattr(feature, "feature", None)
    return getattr(feature, "names", None) if part is None else _names_in(part)


def _unreadable(number: int) -> contextlib.AbstractContextManager[None]:
    """Raise an ImageError that names the row in place of whatever the block raises."""
    return as_error(ImageError, lambda error: f"row {number} of the data cannot be read: {brief(error)}")


def _by_name(row: Sequence[Any]) -> dict[str, Any]:
    """Return the parts of a row that is a tuple, by the usual names."""
    # torchvision puts several targets into a tuple
    targets = row[1] if len(row) == 2 and isinstance(row[1], tuple) else row[1:]
    named = {"image": row[0]}
    for name, target in zip(("label", "regions"), targets, strict=False):
        named |= target if isinstance(target, Mapping) else {name: target}
    return named


def _as_array(image: Any) -> Shaped[np.ndarray, "h w c"]:
    """Return a picture as an array of bytes or of floating-point numbers, with the channels last."""
    array = np.asarray(as_rgb(image) if isinstance(image, Image.Image) else image)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    return array[..., None] if array.ndim == 2 else array


def _shades_of(preprocess: Any) -> Shaped[np.ndarray, "2 c"]:
    """Return what a preprocessing makes of black and white, for each channel; NaN if it cannot be called so."""
    with contextlib.suppress(Exception):
        inputs = [preprocess(Image.new("RGB", (256, 256), shade)) for shade in ("black", "white")]
        return np.array(
            [each.reshape(-1, *each.shape[-2:])[:, each.shape[-2] // 2, each.shape[-1] // 2] for each in inputs]
        )
    return np.full((2, 3), np.nan)


def _numbers_of(mask: Any) -> Integer[np.ndarray, "*k h w"]:
    """Return a mask as whole numbers, without an axis of one channel."""
    if isinstance(mask, Image.Image):
        return mask_numbers(mask)
    numbers: np.ndarray = np.rint(np.squeeze(np.asarray(mask, float))).astype(int)
    return numbers
