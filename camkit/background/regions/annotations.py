"""Annotated objects, and what the readers of all formats share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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

    objects: dict[str, list[ObjectAnnotation]] = field(default_factory=lambda: defaultdict(list))
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(
        self,
        picture: str,
        category: str,
        box: Box | None,
        outline: Any = None,
        *,
        shares: bool = False,
        crowd: bool = False,
    ) -> None:
        """Add an object, or record a problem if its box has no area, lies outside its picture or is in another unit.

        Raises:
            ValueError: no picture is named.
        """
        if not Path(picture).name:
            raise ValueError(f"an object must name its picture, not {picture!r}")
        clipped = None if box is None else clip_box(box, _UNIT_SQUARE if shares else self.sizes.get(picture))
        if box is not None and clipped is None:
            empty = box.right <= box.left or box.bottom <= box.top
            self.problems["boxes without an area" if empty else "boxes outside their picture"].append(picture)
            return
        if clipped is not None and not shares and are_shares([clipped]):
            self.problems["boxes inside the corner pixel, probably given as shares instead of pixels"].append(picture)
            return
        if clipped is not None and clipped != box:
            self.problems["boxes clipped to their picture"].append(picture)
        size = self.sizes.get(picture)
        self.objects[picture].append(ObjectAnnotation(category, clipped, outline, shares, crowd, size))

    def finish(self, format_name: str, source: Path) -> Annotations:
        """Return what was collected."""
        return Annotations(
            format_name,
            str(source),
            {picture: tuple(objects) for picture, objects in self.objects.items()},
            {problem: tuple(names) for problem, names in self.problems.items()},
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
