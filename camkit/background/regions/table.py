"""The table of region formats: each finds its files below a folder and reads them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from camkit.background.values import Annotations, ObjectAnnotation
from camkit.types import Box

Reader = Callable[[Path], Annotations]
Finder = Callable[[Path], list[Path]]


@dataclass(frozen=True)
class Form:
    """A format: how its files are found below a folder of pictures, and how one of them is read."""

    name: str
    find: Finder
    read: Reader


FORMS: dict[str, Form] = {}


def register(name: str, find: Finder) -> Callable[[Reader], Reader]:
    """Enter a reader into the table."""

    def enter(read: Reader) -> Reader:
        FORMS[name] = Form(name, find, read)
        return read

    return enter


@dataclass
class Collected:
    """Objects and problems while a source is read."""

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
        """Add an object, or say why not: its box must have an area, and lie in its picture where the size is known.

        Raises:
            ValueError: no picture is named, or a side of the box is no finite number.
        """
        if not Path(picture).name:
            raise ValueError(f"an object must name its picture, not {picture!r}")
        if box is not None and not all(map(math.isfinite, box)):
            raise ValueError(f"the sides of a box must be finite, not {tuple(box)}")
        where = None if box is None else placed(box, (1, 1) if shares else self.sizes.get(picture))
        if box is not None and where is None:
            empty = box.right <= box.left or box.bottom <= box.top
            self.problems["boxes without an area" if empty else "boxes outside their picture"].append(picture)
            return
        if where is not None and where != box:
            self.problems["boxes that reach out of their picture, cut"].append(picture)
        self.objects[picture].append(ObjectAnnotation(category, where, outline, shares, crowd, self.sizes.get(picture)))

    def done(self, form: str, source: Path) -> Annotations:
        """Return what was collected."""
        return Annotations(
            form,
            str(source),
            {name: tuple(found) for name, found in self.objects.items()},
            {what: tuple(names) for what, names in self.problems.items()},
        )


_SLACK = 1.0
"""Pixels by which a box may reach out of its picture without a word: annotation tools round."""


def placed(box: Box, size: tuple[int, int] | None) -> Box | None:
    """Return the part of a box within its picture; None where there is none, or the box has no area."""
    if not (box.right > box.left and box.bottom > box.top):
        return None
    if size is None:
        return box
    cut = Box(max(box.left, 0), max(box.top, 0), min(box.right, size[0]), min(box.bottom, size[1]))
    if cut.right <= cut.left or cut.bottom <= cut.top:
        return None
    slack = _SLACK if size != (1, 1) else _SLACK / 100
    return box if max(abs(a - b) for a, b in zip(cut, box, strict=True)) <= slack else cut
