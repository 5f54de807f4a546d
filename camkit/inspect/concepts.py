"""The concepts of one layer, and how they are drawn: regions in one picture, each with its colour and its name."""

from __future__ import annotations

import colorsys
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from camkit.drawing.encode import as_html
from camkit.drawing.figure import percent, resized, scaled_box, sheet, shown_size
from camkit.drawing.overlay import blend, stretch
from camkit.drawing.text import GREY, INK, PAPER, Canvas, fitting, wrapped
from camkit.engine.heatmap import enlarge
from camkit.errors import InputError
from camkit.explaining.explanation import Explanation
from camkit.images.files import file_name, write_picture
from camkit.kit.wording import counted
from camkit.types import Box, Pixels

_COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
"""Okabe and Ito's colours, which people with any kind of colour vision can tell apart."""

_SIDE = 480
"""The longer side of each picture on a sheet, in pixels."""
_LINE, _SWATCH, _GAP = 22, 14, 10
"""The height of a line of the legend, the side of its colour, and the gap around them, in pixels."""
_MARK = 11
"""Half the side of the square that holds a concept's number on the picture, in pixels."""
_LEAST_MARKED = 0.25
"""A concept gets its number on a picture if its strength there reaches this share of its largest of all pictures."""
_MOST_IN_NOTEBOOK = 12
"""Pictures on the sheet that a notebook shows."""
_NAMED_IN_LINE = 3
"""Concepts that the line names."""


@dataclass(frozen=True, eq=False)
class Concepts:
    """The concepts of a layer's feature maps, the one that makes up most of them first.

    Attributes:
        maps: for each picture (k, h, w) float32, how strong each concept is in each cell; 1 is the concept's strongest
            cell of all pictures.
        vectors: (k, C) float32, each concept's feature vector where it is strongest, in units of the feature maps.
        classes: the class that the model gives to a picture whose every cell is one concept; None if the part of the
            model after the layer cannot be run alone, or the model is no classifier.
        probabilities: that class's probability.
        labels: that class's name; None if the names are not known.
        unexplained: the share of the feature maps' squares that the concepts leave out.
        layer, model: the names of the layer and of the model.
        pictures: for each picture its Explanation, without heat, which knows where the cells lie in it.
    """

    maps: tuple[Float[np.ndarray, "k *_"], ...]
    vectors: Float[np.ndarray, "k c"]
    classes: tuple[int, ...] | None
    probabilities: tuple[float, ...] | None
    labels: tuple[str, ...] | None
    unexplained: float
    layer: str
    model: str
    pictures: tuple[Explanation, ...] = field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Each concept's number from 1, with the class and its probability if they are known."""
        numbers = range(len(self.vectors))
        if self.classes is None or self.probabilities is None:
            return tuple(f"concept {number + 1}" for number in numbers)
        labels = self.labels or [f"class {index}" for index in self.classes]
        return tuple(f"{number + 1}: {labels[number]} {percent(self.probabilities[number])}" for number in numbers)

    def heatmaps(self, picture: int = 0) -> Float[np.ndarray, "k *size"]:
        """Return a picture's maps at the size of the model's input (k, H, W).

        Raises:
            InputError: there is no such picture.
        """
        row = self._row(picture)
        return np.asarray(enlarge(torch.from_numpy(self.maps[picture]), row.maps.size, row.maps.placements[0]).numpy())

    def overlay(self, picture: int = 0, *, alpha: float = 0.65) -> Pixels:
        """Draw a picture with the concepts as coloured regions, each with its number where it is strongest.

        A pixel has the colour of the concept that is strongest there, and the more of it the stronger the concept is.

        Args:
            picture: the number of the picture, from 0.
            alpha: the weight of the colours, 0..1.

        Returns:
            The picture, H x W x 3 uint8 RGB; its longer side is at most 480 pixels.

        Raises:
            InputError: there is no such picture, it cannot be drawn, or alpha is out of range.
        """
        if not 0 <= alpha <= 1:
            raise InputError(f"alpha is a weight from 0 to 1, not {alpha!r}")
        row, heatmaps = self._row(picture), self.heatmaps(picture)
        if heatmaps.ndim != 3:
            raise InputError(f"only maps with two axes can be drawn, and these have {heatmaps.ndim - 1}; see .maps")
        height, width = heatmaps.shape[1:] if row.picture is None else row.picture.shape[:2]
        size = shown_size(height, width, _SIDE)
        white = np.full((*size, 3), 255, np.uint8)
        box = Box(0, 0, width, height) if row.box is None else row.box
        box = scaled_box(box, (height, width), size)
        placed = np.stack([np.nan_to_num(stretch(heatmap, box, size)) for heatmap in heatmaps])
        # Without heat, this darkens what the model did not see.
        shown = white if row.picture is None else blend(resized(row.picture, size), np.zeros((1, 1), np.float32), box)
        weight = alpha * placed.max(0)[..., None]
        colours = np.array(colours_of(len(heatmaps)), np.float32)[placed.argmax(0)]
        canvas = Canvas(size[1], size[0])
        canvas.picture(0, 0, np.rint(shown * (1 - weight) + colours * weight).astype(np.uint8))
        for number, strength in enumerate(placed):
            if strength.max() >= _LEAST_MARKED:
                _mark(canvas, strength, number)
        return canvas.pixels()

    def sheet(self, *, alpha: float = 0.65) -> Pixels:
        """Draw all pictures side by side, above a legend of the concepts.

        Raises:
            InputError: as for ``overlay``.
        """
        return self._sheet(len(self.maps), alpha)

    def _sheet(self, pictures: int, alpha: float) -> Pixels:
        drawn = [self.overlay(number, alpha=alpha) for number in range(pictures)]
        above = drawn[0] if len(drawn) == 1 else sheet(drawn)
        legend = self._legend(max(above.shape[1], _SIDE))
        canvas = Canvas(max(above.shape[1], legend.shape[1]), above.shape[0] + legend.shape[0])
        canvas.picture(0, 0, above)
        canvas.picture(0, above.shape[0], legend)
        return canvas.pixels()

    def _legend(self, width: int) -> Pixels:
        room = width - 2 * _GAP
        title = f"{self.model}, layer {self.layer}: {self._count()}"
        known = "The class is what the model says if every cell is this concept. " if self.classes else ""
        share = percent(1 - self.unexplained)
        notes = wrapped(f"{known}Together the concepts make up {share} of the feature maps.", room, 12)
        canvas = Canvas(width, (1 + len(self.vectors) + len(notes)) * _LINE + 2 * _GAP)
        middles = itertools.count(_GAP + _LINE // 2, _LINE)
        canvas.text(_GAP, next(middles), fitting(title, room, 15), size=15)
        for name, colour in zip(self.names, colours_of(len(self.vectors)), strict=True):
            middle = next(middles)
            canvas.box(_GAP, middle - _SWATCH // 2, _GAP + _SWATCH, middle + _SWATCH // 2, colour)
            canvas.text(2 * _GAP + _SWATCH, middle, fitting(name, room - _SWATCH - _GAP, 14), size=14)
        for note in notes:
            canvas.text(_GAP, next(middles), note, size=12, colour=GREY)
        return canvas.pixels()

    def save(self, path: str | Path, *, alpha: float = 0.65) -> Path:
        """Write the sheet to a file, completely or not at all. The suffix decides the type; folders are created.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        return write_picture(file_name(path, "concepts.png"), self.sheet(alpha=alpha))

    def _row(self, picture: int) -> Explanation:
        if not 0 <= picture < len(self.maps):
            raise InputError(f"there is no picture {picture}: the first is 0, and the last is {len(self.maps) - 1}")
        return self.pictures[picture]

    def _count(self) -> str:
        return f"{counted(len(self.vectors), 'concept')} in {counted(len(self.maps), 'picture')}"

    def __repr__(self) -> str:
        """Return one line."""
        names = ", ".join(self.names[:_NAMED_IN_LINE]) + (", ..." if len(self.names) > _NAMED_IN_LINE else "")
        return f"<Concepts of layer {self.layer!r} of {self.model}: {self._count()} ({names})>"

    def _repr_html_(self) -> str | None:
        """Show the sheet in a notebook, of the first pictures if there are many; None if it cannot be drawn."""
        if self.maps[0].ndim != 3:
            return None
        return as_html(self._sheet(min(len(self.maps), _MOST_IN_NOTEBOOK), 0.65), repr(self))


def colours_of(count: int) -> Sequence[tuple[int, int, int]]:
    """Return a colour for each concept; beyond seven, evenly spaced hues."""
    if count <= len(_COLOURS):
        return _COLOURS[:count]
    hues = (colorsys.hsv_to_rgb(number / count, 0.8, 0.6 + 0.4 * (number % 2)) for number in range(count))
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in hues]


def _mark(canvas: Canvas, strength: Float[np.ndarray, "h w"], number: int) -> None:
    """Write a concept's number where it is strongest, in a square of its own that stays inside the picture."""
    row, column = np.unravel_index(int(strength.argmax()), strength.shape)
    half = min(_MARK, math.floor(min(strength.shape) / 2))
    y, x = (min(max(int(place), half), side - half) for place, side in zip((row, column), strength.shape, strict=True))
    canvas.box(x - half, y - half, x + half, y + half, INK)
    canvas.text(x, y, str(number + 1), size=half + 4, colour=PAPER, anchor="middle")
