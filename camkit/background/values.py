"""The frozen values that the modules of the check pass to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from camkit.images.masks import MaskFile
from camkit.types import Box

Stage: TypeAlias = Literal["heat", "sanity", "experiment", "measures"]
Progress: TypeAlias = Callable[[Stage, int, int], None]
"""Called with the stage, the number of finished steps and the number of all steps."""
RowsOf: TypeAlias = Callable[[Sequence["Item"]], Iterator[dict[str, Any]]]
"""Computes the journal's rows of some pictures, and yields each when it is finished."""
Verdict: TypeAlias = Literal["FAIL", "WARN", "PASS", "INCONCLUSIVE"]
Inconclusive: TypeAlias = Literal["pass", "fail"]
"""Whether the verdict INCONCLUSIVE counts as a pass or as a failure."""
RegionKind: TypeAlias = Literal["mask", "box"]


@dataclass(frozen=True)
class Run:
    """When and how a check was run, which the reports for people state beside the results.

    Attributes:
        started: when the check began, with its time zone.
        seconds: how long it took, without the reports.
        command: the command as it was typed; "" if the check was called from Python.
    """

    started: datetime
    seconds: float
    command: str = ""


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
    def kind(self) -> RegionKind:
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


_MAX_NAMES = 3
"""Names of pictures that a line lists as examples."""


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
            f"{len(names)} {reason}: {', '.join(names[:_MAX_NAMES])}{', ...' if len(names) > _MAX_NAMES else ''}"
            for reason, names in self.left_out.items()
        ]
