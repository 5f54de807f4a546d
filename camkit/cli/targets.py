"""The options of the command line that choose what to explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from camkit.errors import InputError
from camkit.images.read import open_picture
from camkit.targets import TargetLike, above, box, contrast, direction, segment, similar_to, top
from camkit.types import Preprocess

_MASK_THRESHOLD = 127
"""A pixel of a mask counts as white above this level, the middle of 0..255."""
_COVERED = 0.5
"""A pixel of the model's input belongs to the mask if more than this share of it does."""


@dataclass(frozen=True)
class TargetOptions:
    """The options that choose what to explain; without any, each picture's best class."""

    target: Sequence[str] = ()
    top_k: int | None = None
    above: float | None = None
    versus: str | None = None
    direction: Literal["up", "down"] | None = None
    box: int | None = None
    near: tuple[float, float, float, float] | None = None
    mask: Path | None = None
    everywhere: bool = False
    similar_to: Path | None = None

    def check(self) -> None:
        """Check that the options fit together.

        Raises:
            InputError: two options exclude each other, or one needs another.
        """
        kinds = [f"--{name.replace('_', '-')}" for name in _KINDS if getattr(self, name) is not None]
        refinements = [f"--{name}" for name in _REFINEMENTS if getattr(self, name) not in (None, False)]
        if len(kinds) > 1:
            raise InputError(f"{' and '.join(kinds)} exclude each other")
        if kinds and kinds != ["--direction"] and self.target:
            raise InputError(f"{kinds[0]} and --target exclude each other")
        if len(refinements) > 1 or (refinements and self.direction is not None):
            raise InputError(f"{' and '.join([*refinements, *kinds])} exclude each other")
        if refinements and len(self.target) != 1:
            raise InputError(f"{refinements[0]} needs one --target")
        if self.direction is not None:
            self._direction_target()

    def targets(self, pictures: Sequence[Path], preprocess: Preprocess | None) -> list[TargetLike] | None:
        """Return the targets; None for each picture's best class.

        Args:
            pictures: the pictures to explain; a mask belongs to a single one.
            preprocess: the model's preprocessing, which crops the mask as it crops the picture.

        Raises:
            InputError: as ``check``, or the mask does not fit the picture.
        """
        self.check()
        if self.direction is not None:
            return [self._direction_target()]
        if self.target:
            return [self._class_target(name, pictures, preprocess) for name in self.target]
        if self.top_k is not None:
            return [*top(self.top_k)]
        if self.above is not None:
            return [above(self.above)]
        if self.box is not None or self.near is not None:
            return [box(self.box, near=self.near)]
        return None if self.similar_to is None else [similar_to(self.similar_to)]

    def _direction_target(self) -> TargetLike:
        """Return a target for one number of the output, by default the first."""
        if len(self.target) > 1 or not all(index.isdecimal() for index in self.target):
            raise InputError("--direction explains one number of the output, so --target takes one index")
        return direction("+" if self.direction == "up" else "-", int(self.target[0]) if self.target else 0)

    def _class_target(self, name: str, pictures: Sequence[Path], preprocess: Preprocess | None) -> TargetLike:
        if self.versus is not None:
            return contrast(name, self.versus)
        if self.mask is not None:
            return segment(name, _mask_on_input(self.mask, pictures, preprocess))
        return segment(name, everywhere=True) if self.everywhere else name


_KINDS = ("top_k", "above", "direction", "box", "near", "similar_to")
"""Options that each choose another kind of target."""
_REFINEMENTS = ("versus", "mask", "everywhere")
"""Options that refine one --target."""


def _mask_on_input(file: Path, pictures: Sequence[Path], preprocess: Preprocess | None) -> np.ndarray:
    """Return a mask (h, w) over the model's input, resized and cropped in the same way as its picture."""
    from camkit.images.crop import check_crop
    from camkit.images.prepare import prepare
    from camkit.images.regions import preprocess_region

    mask = open_picture(file).convert("L")
    if len(pictures) != 1 or preprocess is None:
        raise InputError("--mask belongs to one picture; explain that picture alone")
    picture = open_picture(pictures[0])
    size = picture.size
    if mask.size != size:
        raise InputError(f"the mask has {mask.width}x{mask.height} pixels, but the picture has {size[0]}x{size[1]}")
    check_crop(preprocess, picture, prepare(picture, preprocess, str(pictures[0])).tensor)
    inside = preprocess_region(np.asarray(mask) > _MASK_THRESHOLD, preprocess) > _COVERED
    if not bool(inside.any()):
        raise InputError(f"no white pixel of {file} lies in the part of the picture that the model sees")
    return inside.numpy()
