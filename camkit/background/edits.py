"""What the experiment changes in a picture.

Each picture of the sample gets a handful of edits. The statistics of the whole picture are exchanged for those of a
picture of its own class, and of another class (``cues.py``). With regions, the object is pasted on backgrounds of its
own class and of other classes, and the object is removed. Without regions, the outer ring is exchanged for the ring of
a picture of its own class or of another class, and the middle is made grey.

All edits act on model inputs (C, H, W). A preprocessing changes colours the same way at every pixel, so pasting before
it and pasting after it give the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from camkit.background import cues
from camkit.images.filling import fill_smoothly
from camkit.images.read import LOSSLESS
from camkit.images.regions import Shades, extent

Arm: TypeAlias = Literal["same", "other", "same-cue", "other-cue", "removed"]
"""What an edit does: paste the object on a background of its own class or of another class, or exchange the outer ring;
exchange a statistic with a picture of its own class or of another class; or remove the object."""


class Edit(NamedTuple):
    """An edit of a picture.

    Attributes:
        arm: what the edit does.
        fill: how holes are filled, or RING; for an exchanged statistic, its name.
        lender: the picture that lends its background or its statistic.
    """

    arm: Arm
    fill: str
    lender: str = ""


Edits: TypeAlias = dict[Edit, Callable[[], Float[Tensor, "c h w"]]]
"""For each edit, what makes the edited picture."""

MIN_RECTANGLE = 0.02
"""Share of the picture that a rectangle beside the objects must cover. The texture of a smaller rectangle does not
represent the background."""

_SEARCH_CELLS = 32
"""Cells along the shorter side of the grid on which that rectangle is searched."""


def fill_with_texture(picture: Float[Tensor, "c h w"], hole: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"] | None:
    """Fill a hole with mirrored copies of the largest rectangle beside it; None if no rectangle is large enough.

    The backgrounds of ImageNet-9 are made this way (Xiao et al. 2020, arXiv:2006.09994); the mirrors avoid seams.
    """
    rectangle = largest_rectangle(hole)
    if rectangle is None:
        return None
    left, top, right, bottom = rectangle
    rows, columns = _mirrored_indices(hole.shape[0], top, bottom), _mirrored_indices(hole.shape[1], left, right)
    return torch.where(hole, picture[:, rows][:, :, columns], picture)


def _mirrored_indices(length: int, start: int, end: int) -> Tensor:
    """Return, for each index of an axis, the index in start..end that shows there if both ends are mirrors."""
    span = end - start
    offsets = (torch.arange(length) - start) % (2 * span)
    return start + torch.where(offsets < span, offsets, 2 * span - 1 - offsets)


def largest_rectangle(hole: Bool[Tensor, "h w"]) -> tuple[int, int, int, int] | None:
    """Return the largest rectangle (left, top, right, bottom) without a hole; None if all are below MIN_RECTANGLE."""
    height, width = hole.shape
    step = max(1, min(height, width) // _SEARCH_CELLS)
    cells = functional.max_pool2d(hole.float()[None, None], step)[0, 0].numpy() > 0
    rows, columns = cells.shape
    tops, bottoms = np.triu_indices(rows)
    counts = np.pad(cells.cumsum(0), ((1, 0), (0, 0)))
    free = counts[bottoms + 1] == counts[tops]  # for each range of rows, the columns without a hole
    run, longest, end = np.zeros(len(tops), int), np.zeros(len(tops), int), np.zeros(len(tops), int)
    for column in range(columns):
        run = np.where(free[:, column], run + 1, 0)
        end = np.where(run > longest, column + 1, end)
        longest = np.maximum(longest, run)
    areas = longest * (bottoms + 1 - tops)
    best = int(areas.argmax())
    if areas[best] * step * step < MIN_RECTANGLE * height * width:
        return None
    left, top, right, bottom = end[best] - longest[best], tops[best], end[best], bottoms[best] + 1
    return int(left) * step, int(top) * step, int(right) * step, int(bottom) * step


TILE, BLUR = "tile", "blur"
FILLS = {TILE: fill_with_texture, BLUR: fill_smoothly}
"""How the hole of an object is filled. Both ways must agree before a model fails."""

RING = "ring"
"""Stands in place of a fill's name if the data has no regions, so that the outer ring is exchanged."""


def outer_ring(size: tuple[int, int], share: float) -> Bool[Tensor, "h w"]:
    """Return the outer ring of a picture of ``size`` (height, width). Its width is ``share`` of each side."""
    height, width = size
    down, across = max(1, round(share * height)), max(1, round(share * width))
    outer = torch.ones(size, dtype=torch.bool)
    outer[down : height - down, across : width - across] = False
    return outer


@dataclass(frozen=True, eq=False)
class PreparedPicture:
    """One picture of the sample as the model sees it.

    Attributes:
        tensor: the model's input (C, H, W).
        shades: black and white after the preprocessing.
        region: how much of each pixel the objects of the picture's own class cover, 0..1; None without regions.
        hole: the slightly widened boxes of all objects of the checked classes; None without regions.
        silhouettes: the slightly widened outlines of the same objects; None without regions.
        quality: the quality of the JPEG file; LOSSLESS if the file is not a JPEG.
    """

    tensor: Float[Tensor, "c h w"]
    shades: Shades
    region: Float[Tensor, "h w"] | None = None
    hole: Bool[Tensor, "h w"] | None = None
    silhouettes: Bool[Tensor, "h w"] | None = None
    quality: float = LOSSLESS

    @property
    def has_cues(self) -> bool:
        """Whether the statistics of the whole picture can be measured: it has three colours."""
        return len(self.tensor) == 3

    def value_of(self, cue: str) -> Float[np.ndarray, " k"]:
        """Return the value of a statistic of the whole picture."""
        return np.array([self.quality]) if cue == cues.COMPRESSION else self._values[cue]

    @functools.cached_property
    def _values(self) -> dict[str, Float[np.ndarray, " k"]]:
        """The statistics of the pixels. They are kept because the picture lends them to others."""
        pixels, where = self._pixels
        return {name: cue.measure(pixels, where) for name, cue in cues.CUES.items() if cue.measure is not None}

    @property
    def _pixels(self) -> tuple[Float[np.ndarray, "h w 3"], Bool[np.ndarray, "h w"]]:
        """The picture with values 0..1, and where its statistics are measured."""
        hole = torch.zeros_like(self.shades.view) if self.hole is None else self.hole
        pixels = self.shades.pixels(self.tensor).permute(1, 2, 0).numpy()
        return np.ascontiguousarray(pixels), cues.beside(hole.numpy(), self.shades.view.numpy())

    def with_value(self, cue: str, lender: PreparedPicture) -> Float[Tensor, "c h w"]:
        """Return the picture with another picture's value of a statistic."""
        pixels, where = self._pixels
        imposed = torch.from_numpy(np.ascontiguousarray(cues.CUES[cue].impose(pixels, where, lender.value_of(cue))))
        tensor = self.shades.black + imposed.permute(2, 0, 1) * self.shades.contrast
        return torch.where(self.shades.view, tensor, self.tensor)

    def without(self, fill: str) -> Float[Tensor, "c h w"]:
        """Return the picture with its objects' boxes filled. If there is no texture to copy, the fill is smooth."""
        assert self.hole is not None
        return self._with_fill(fill, self.hole)

    def pasted_on(self, background: PreparedPicture, fill: str) -> Float[Tensor, "c h w"]:
        """Return the object on the background of another picture, at the same place."""
        assert self.region is not None
        return self.tensor * self.region + _behind(self, background, fill) * (1 - self.region)

    def as_background(self, fill: str) -> Float[Tensor, "c h w"]:
        """Return the picture with only its objects' silhouettes filled, to paste another object onto.

        The boxes cover far more: filling them would destroy much of the background.
        """
        return self._as_background[fill]

    @functools.cached_property
    def _as_background(self) -> dict[str, Float[Tensor, "c h w"]]:
        """The background for each fill. It is kept because several pictures are pasted on it."""
        assert self.silhouettes is not None
        return {fill: self._with_fill(fill, self.silhouettes) for fill in FILLS}

    def _with_fill(self, fill: str, hole: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
        unknown = hole | ~self.shades.view
        filled = FILLS[fill](self.tensor, unknown)
        if filled is None:
            filled = fill_smoothly(self.tensor, unknown)
        return torch.where(hole & self.shades.view, filled, self.tensor)

    @functools.cached_property
    def has_background(self) -> bool:
        """Whether enough of the picture lies beside its objects to serve as a background."""
        return self._has_room_beside(self.silhouettes)

    @functools.cached_property
    def can_lose_boxes(self) -> bool:
        """Whether enough of the picture is left if the objects' boxes are removed."""
        return self._has_room_beside(self.hole)

    def _has_room_beside(self, hole: Bool[Tensor, "h w"] | None) -> bool:
        return hole is not None and largest_rectangle(hole | ~self.shades.view) is not None


Backgrounds: TypeAlias = Mapping[str, PreparedPicture]
"""The pictures that lend their background or their statistics, by name."""


def region_edits(picture: PreparedPicture, same: Backgrounds, other: Backgrounds) -> Edits:
    """List the edits of a picture whose object's region is known."""
    listed: Edits = {}
    for fill in FILLS:
        for edit, background in _lent(fill, ("same", same), ("other", other)):
            listed[edit] = functools.partial(picture.pasted_on, background, fill)
        if picture.can_lose_boxes:
            listed[Edit("removed", fill)] = functools.partial(picture.without, fill)
    return listed


def cue_edits(picture: PreparedPicture, same: Backgrounds, other: Backgrounds, names: Sequence[str]) -> Edits:
    """List the exchanges of the picture's statistics: with a picture of its own class, and one of another class."""
    if not (picture.has_cues and same and other):
        return {}
    first_same, first_other = (dict([next(iter(backgrounds.items()))]) for backgrounds in (same, other))
    return {
        edit: functools.partial(picture.with_value, cue, lender)
        for cue in names
        for edit, lender in _lent(cue, ("same-cue", first_same), ("other-cue", first_other))
    }


def ring_edits(picture: PreparedPicture, same: Backgrounds, other: Backgrounds, share: float) -> Edits:
    """List the edits of a picture without regions: its middle in the rings of other pictures, and its ring alone."""
    outer = outer_ring((picture.tensor.shape[1], picture.tensor.shape[2]), share)
    listed: Edits = {
        edit: functools.partial(picture.tensor.where, ~outer, background.tensor)
        for edit, background in _lent(RING, ("same", same), ("other", other))
    }
    grey = (picture.shades.black + picture.shades.white) / 2
    listed[Edit("removed", RING)] = functools.partial(picture.tensor.where, outer, grey)
    return listed


def _lent(fill: str, *arms: tuple[Arm, Backgrounds]) -> Iterator[tuple[Edit, PreparedPicture]]:
    """Yield an edit for each background, with the picture that lends it."""
    for arm, backgrounds in arms:
        for lender, background in backgrounds.items():
            yield Edit(arm, fill, lender), background


def _behind(picture: PreparedPicture, background: PreparedPicture, fill: str) -> Float[Tensor, "c h w"]:
    """Return a background for a picture: resized and cropped to cover the same part of the input, if the two differ."""
    lent, whole, view = background.as_background(fill), background.shades.view, picture.shades.view
    if torch.equal(whole, view):
        return lent
    (left, top, right, bottom), (start, first, end, last) = extent(whole), extent(view)
    height, width = last - first, end - start
    times = max(height / (bottom - top), width / (right - left))
    size = max(height, round(times * (bottom - top))), max(width, round(times * (right - left)))
    resized = functional.interpolate(lent[None, :, top:bottom, left:right], size, mode="bilinear", antialias=True)[0]
    down, across = (size[0] - height) // 2, (size[1] - width) // 2
    covered = picture.tensor.clone()
    covered[:, first:last, start:end] = resized[:, down : down + height, across : across + width]
    return covered
