"""Annotated objects, and what the readers of all formats share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from camkit.images.masks import MaskFile
from camkit.types import Box


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
    def kind(self) -> Literal["mask", "box"]:
        """Return "mask" if the outline is known, "box" if only the box is."""
        return "box" if self.outline is None else "mask"


@dataclass(frozen=True, eq=False)
class Annotations:
    """The annotated objects of one source, such as a COCO file, by the name the source gives each picture.

    ``problems`` lists, for each kind of problem, the pictures or annotations that have it. ``facts`` tell the
    user how camkit understood the source.
    """

    format: str
    source: str
    objects: Mapping[str, tuple[ObjectAnnotation, ...]]
    problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    facts: tuple[str, ...] = ()


@dataclass
class AnnotationCollector:
    """Collects objects, picture sizes and problems while a source is read."""

    rows: list[tuple[str, ObjectAnnotation]] = field(default_factory=list)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, picture: str, category: str, box: Box | None, outline: Any = None, *, crowd: bool = False) -> None:
        """Add an object.

        Raises:
            ValueError: no picture is named, or a side of the box is not finite.
        """
        if not Path(picture).name:
            raise ValueError(f"an object must name its picture, not {picture!r}")
        if box is not None and not all(map(math.isfinite, box)):
            raise ValueError(f"the sides of a box must be finite, not {tuple(box)}")
        self.rows.append((picture, ObjectAnnotation(category, box, outline, crowd=crowd)))

    def finish(
        self, format_name: str, source: Path, *, shares: bool | None = None, first: int = 0, facts: tuple[str, ...] = ()
    ) -> Annotations:
        """Return what was collected; of a box with no area, outside its picture or in another unit only the problem.

        Args:
            format_name: what camkit calls the format.
            source: the file or folder.
            shares: whether boxes are in shares of the picture; None for shares if all lie in the corner pixels.
            first: the number of the first pixel.
            facts: how camkit understood the source.
        """
        boxes = [annotation.box for _, annotation in self.rows if annotation.box is not None]
        shares = are_shares(boxes) if shares is None else shares
        objects: dict[str, list[ObjectAnnotation]] = defaultdict(list)
        for picture, annotation in self.rows:
            box, size = annotation.box, self.sizes.get(picture)
            if box is not None and first and not shares:  # the last pixel belongs to the box
                box = Box(box.left - first, box.top - first, *box[2:])
            clipped = None if box is None else clip_box(box, _UNIT_SQUARE if shares else size)
            problem = None
            if box is not None and clipped is None:
                empty = box.right <= box.left or box.bottom <= box.top
                problem = "boxes without an area" if empty else "boxes outside their picture"
            elif clipped is not None and not shares and are_shares([clipped]):
                problem = "boxes inside the corner pixel, probably given as shares instead of pixels"
            if problem is None:
                objects[picture].append(replace(annotation, box=clipped, shares=shares, size=size))
                if clipped != box:
                    problem = "boxes clipped to their picture"
            if problem is not None:
                self.problems[problem].append(picture)
        return Annotations(
            format_name,
            str(source),
            {picture: tuple(annotations) for picture, annotations in objects.items()},
            {problem: tuple(names) for problem, names in self.problems.items()},
            facts,
        )


LARGEST_SHARE = 1.5
"""If all sides of all boxes of a source are below this, they count as shares of the picture. In pixels, all boxes would
be in its corner."""


def are_shares(boxes: Iterable[Box]) -> bool:
    """Return whether boxes are in shares of the picture and not in pixels."""
    return all(max(box) < LARGEST_SHARE for box in boxes)


_UNIT_SQUARE = (1, 1)
"""The size of a picture in shares of its sides."""

_SLACK = 1.0
"""Pixels by which a box may reach out of its picture without being clipped: annotation tools round coordinates."""

_SLACK_OF_SHARES = 0.01
"""The same for boxes in shares of the picture."""


def clip_box(box: Box, size: tuple[int, int] | None) -> Box | None:
    """Return the part of a box inside its picture; None if there is none or the box has no area."""
    if not (box.right > box.left and box.bottom > box.top):
        return None
    if size is None:
        return box
    clipped = Box(max(box.left, 0), max(box.top, 0), min(box.right, size[0]), min(box.bottom, size[1]))
    if clipped.right <= clipped.left or clipped.bottom <= clipped.top:
        return None
    slack = _SLACK if size != _UNIT_SQUARE else _SLACK_OF_SHARES
    return box if max(abs(a - b) for a, b in zip(clipped, box, strict=True)) <= slack else clipped
