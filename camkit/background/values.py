"""What the check's rooms pass to each other: frozen, without behaviour beyond reading themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from camkit.types import Box

Stage: TypeAlias = Literal["heat", "sanity", "experiment", "measures"]
Progress: TypeAlias = Callable[[Stage, int, int], None]
"""Told the stage, how many of its steps are done, and how many there are."""
Verdict: TypeAlias = Literal["FAIL", "WARN", "PASS", "INCONCLUSIVE"]
RegionKind: TypeAlias = Literal["mask", "box"]


@dataclass(frozen=True, eq=False)
class ObjectAnnotation:
    """One annotated object of a picture: its box in the picture's pixels and, where it is known, its outline.

    ``category`` is "" where the annotation names none. ``outline`` is what COCO calls a segmentation (polygons or a
    run-length encoding), or the file of a mask. ``shares`` where coordinates are shares of the picture, not pixels.
    A ``crowd`` is no object to explain, but is removed with them. ``size`` is the width and height of the picture it is
    an object of, where they are stated.
    """

    category: str
    box: Box | None = None
    outline: list[Any] | dict[str, Any] | Path | None = None
    shares: bool = False
    crowd: bool = False
    size: tuple[int, int] | None = None

    @property
    def kind(self) -> RegionKind:
        """Whether its outline is known, or only its box."""
        return "box" if self.outline is None else "mask"


@dataclass(frozen=True, eq=False)
class Annotations:
    """What a source of regions says: the objects of each picture, by the name it gives the picture.

    ``problems`` counts what was left out, each kind with a few of the pictures.
    """

    form: str
    source: str
    objects: Mapping[str, tuple[ObjectAnnotation, ...]]
    problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Item:
    """One labelled picture: its file, class, group, and the objects it is about.

    ``name`` is the file's path below the data's folder, with forward slashes. ``objects`` are the objects of its class,
    ``others`` those of the other classes that are checked.
    """

    name: str
    path: Path
    label: str
    group: str
    objects: tuple[ObjectAnnotation, ...] = ()
    others: tuple[ObjectAnnotation, ...] = ()


@dataclass(frozen=True, eq=False)
class Dataset:
    """The pictures that are checked, and what was understood of them, for a person to read.

    ``facts`` are sentences; ``left_out`` names what was not used and why.
    """

    root: Path
    items: tuple[Item, ...]
    classes: tuple[str, ...]
    form: str
    facts: tuple[str, ...] = ()
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
