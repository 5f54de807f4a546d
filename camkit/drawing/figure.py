"""Drawings in all styles: on a picture, on the frames of a clip or the slices of a volume, and with a caption.

The captioned form has a title, what the colours mean, the picture, a colour bar with its numbers, notes, and in small
print what was done. The functions here lay out what they are given; the caller, who knows what was explained, passes
the words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import cv2
import numpy as np
from jaxtyping import Float, UInt8

from camkit.drawing.encode import Drawable, pixels_of, size_of, size_within
from camkit.drawing.overlay import blend, colorize, render
from camkit.drawing.text import AMBER, GREY, INK, LINE, PAPER, Anchor, Canvas, Colour, fitting, wrapped
from camkit.errors import InputError
from camkit.types import Box, Opacity, Pixels, Style

Resize: TypeAlias = Callable[[Drawable], Drawable]
"""Makes a picture smaller or larger before it is drawn on."""

_MOST = 16
"""Slices on a sheet: four rows of four stay large enough to read."""
_SIDE = 200
"""The longer side of a slice, in pixels."""
_SLICE_GAP = 8
_CAPTION = 20
_SIZE = 13
_TILE_GAP = 4


def draw(
    heatmap: Float[np.ndarray, "*size"],
    picture: Drawable | None,
    box: Box | None = None,
    detection: Box | None = None,
    *,
    volume: UInt8[np.ndarray, "d h w 3"] | None = None,
    names: Sequence[str] = (),
    style: Style = "overlay",
    colormap: str = "turbo",
    alpha: float = 0.5,
    opacity: Opacity = "evidence",
    resize: Resize | None = None,
) -> Pixels:
    """Draw a heatmap without a caption, on the picture as ``resize`` returns it; a volume is a sheet of slices.

    Args:
        heatmap: values 0..1.
        picture: the picture; None draws the colours alone.
        box: the part of the picture that the model saw; None for all of it.
        detection: the box to outline.
        volume: the slices or frames, if the map has three axes.
        names: the names of the frames.
        style, colormap, alpha, opacity: as for ``render``.
        resize: what is done with the picture before.

    Raises:
        InputError: the map has one axis.
    """
    if heatmap.ndim == 3:
        return draw_slices(heatmap, volume, colormap, alpha, opacity, names)
    if heatmap.ndim != 2:
        raise InputError("the map of a signal has one axis and cannot be drawn as a picture; plot its heatmap")
    boxes = [box, detection]
    if resize is not None:
        if picture is None:
            return pixels_of(resize(colorize(heatmap, colormap)))
        before, picture = size_of(picture), resize(picture)
        boxes = [None if each is None else scaled_box(each, before, size_of(picture)) for each in boxes]
    return render(
        picture,
        heatmap,
        boxes[0],
        style=style,
        colormap=colormap,
        alpha=alpha,
        opacity=opacity,
        detection=boxes[1],
    )


def chosen_slices(heatmap: Float[np.ndarray, "d h w"]) -> list[int]:
    """Return the numbers of the slices to draw, from 0: all of them, or some evenly spaced and the strongest.

    >>> chosen_slices(np.eye(40, dtype=np.float32)[:, :, None])[:4]
    [0, 3, 5, 8]
    """
    depth = len(heatmap)
    if depth <= _MOST:
        return list(range(depth))
    numbers = np.rint(np.linspace(0, depth - 1, _MOST)).astype(int)
    strongest = int(heatmap.max((1, 2)).argmax())
    numbers[np.abs(numbers - strongest).argmin()] = strongest
    return [int(number) for number in numbers]


def draw_slices(
    heatmap: Float[np.ndarray, "d h w"],
    volume: UInt8[np.ndarray, "d h w 3"] | None,
    colormap: str,
    alpha: float,
    opacity: Opacity,
    names: Sequence[str] = (),
) -> Pixels:
    """Return a sheet of slices, each with its name or number; without a volume to draw on, of the colours alone."""
    numbers = chosen_slices(heatmap)
    height, width = size_within(heatmap.shape[1:], _SIDE)
    slices = []
    for number in numbers:
        picture = None if volume is None else resized(volume[number], (height, width))
        tile = render(picture, heatmap[number], None, colormap=colormap, alpha=alpha, opacity=opacity)
        canvas = Canvas(width, height + _CAPTION)
        canvas.picture(0, 0, resized(tile, (height, width)))
        words = names[number] if names else f"slice {number + 1} of {len(heatmap)}"
        canvas.text(0, height + _CAPTION / 2, words, size=_SIZE, colour=GREY)
        slices.append(canvas.pixels())
    return sheet(slices, math.ceil(math.sqrt(len(numbers))), gap=_SLICE_GAP, lined=False)


@dataclass(frozen=True)
class Tile:
    """A picture on a contact sheet, with a line below it and a second line, a warning unless it has another colour."""

    pixels: Pixels
    line: str = ""
    note: str = ""
    colour: Colour = AMBER


def contact_sheet(
    tiles: Sequence[Tile], columns: int | None = None, title: str = "", *, side: int = 224, size: int = 13
) -> Pixels:
    """Lay pictures side by side, each in a square; with about as many rows as columns unless ``columns`` is given.

    The sheet's size depends on the number of tiles, the lines of the title, the ``side`` of a square and the ``size``
    of the letters in pixels, and on whether there are lines below the pictures.

    >>> contact_sheet([Tile(np.zeros((10, 20, 3), np.uint8))] * 5).shape
    (460, 688, 3)
    """
    columns = columns or math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    line, above = round(1.4 * size), round(1.7 * (size + 1))
    below = 2 * line + 4 if any(tile.line for tile in tiles) else 0
    titles = title.splitlines()
    head = above * len(titles)
    across, down = side + _TILE_GAP, side + below + _TILE_GAP
    canvas = Canvas(columns * across + _TILE_GAP, head + rows * down + _TILE_GAP)
    for place, words in enumerate(titles):
        middle = above * (place + 0.5) + 2
        canvas.text(_TILE_GAP, middle, fitting(words, columns * across - _TILE_GAP, size + 1), size=size + 1)
    for number, tile in enumerate(tiles):
        height, width = size_within(tile.pixels.shape[:2], side)
        left, top = _TILE_GAP + number % columns * across, head + _TILE_GAP + number // columns * down
        canvas.picture(left + (side - width) // 2, top + (side - height) // 2, resized(tile.pixels, (height, width)))
        for place, (words, colour) in enumerate(((tile.line, INK), (tile.note, tile.colour))):
            middle = top + side + (place + 0.5) * line + 2
            canvas.text(left, middle, fitting(words, side, size), size=size, colour=colour)
    return canvas.pixels()


SMALLEST_SIDE, LARGEST_SIDE = 320, 960
"""The longer side of a picture in a figure, in pixels. Smaller pictures are enlarged so that they stand beside readable
text; larger ones are reduced to what a page or a screen shows."""

_NARROWEST = 320
"""The width of the text in pixels, if the picture is narrower: about 45 letters."""
_GROWTH, _MOST_GROWTH = 0.4, 1.5
"""Text grows with this power of the width, so that it neither shouts under a small picture nor vanishes beside a large
one, up to one and a half times its smallest size."""
_TITLE, _SMALL, _PRINT = 21, 13, 11
"""Font sizes at the smallest width."""
_MARGIN, _GAP = 16, 10
_LEADING = 1.4
"""The distance of lines, in font sizes."""
_BAR = 12
_TICK = 4
_TITLE_LINES, _DETAIL_LINES, _NOTE_LINES, _FIXED_NOTE_LINES = 2, 2, 4, 2


@dataclass(frozen=True)
class Caption:
    """The words around a picture.

    Attributes:
        title: what is explained, and how likely the model finds it.
        lines: what was done, in small print.
        warnings: what the reader must know to read the picture, in amber.
        remarks: what helps to read it, in grey.
        meaning: what the colours mean.
    """

    title: str
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    meaning: str = ""


@dataclass(frozen=True)
class ColourScale:
    """What the strongest colour of a drawing stands for.

    Attributes:
        limits: for each layer, the value of the strongest colour, in the units of its map.
        maps: how many maps share the scale.
    """

    limits: tuple[float, ...]
    maps: int = 1

    @classmethod
    def reaching(cls, maxima: Sequence[tuple[float, ...]]) -> ColourScale:
        """Return the scale that reaches to the largest value of several maps, each with a value for each layer."""
        return cls(tuple(map(max, *maxima)) if len(maxima) > 1 else maxima[0], len(maxima))

    def with_more(self, other: ColourScale | None) -> ColourScale:
        """Return the scale for the maps of both."""
        if other is None:
            return self
        return ColourScale(tuple(map(max, self.limits, other.limits)), self.maps + other.maps)

    @property
    def largest(self) -> float:
        """The number at the end of the colour bar: a value in the map's units, or 1 if several layers are fused."""
        return self.limits[0] if len(self.limits) == 1 else 1.0

    def __str__(self) -> str:
        """Return, for example, ``"0 to 12.3, one scale for 3 maps"``."""
        whose = "scaled to this picture" if self.maps == 1 else f"one scale for {self.maps} maps"
        return f"0 to {number(self.largest)}, {whose}"

    def words(self, unit: str, reached: float | None) -> str:
        """Return what the numbers of a colour bar are, and whose scale it is."""
        unit = unit if len(self.limits) == 1 else "Shares of each layer's largest value"
        if self.maps == 1:
            return f"{unit}. Scaled to this picture."
        own = "" if reached is None else f"; this one reaches {number(reached)}"
        return f"{unit}. One scale for {self.maps} maps{own}."


class _Column:
    """What stands one below the other in a figure, from the top down; drawn when the height is known."""

    def __init__(self, width: int, *, fixed: bool) -> None:
        self.width = width
        self.growth: float = min(math.pow(width / _NARROWEST, _GROWTH), _MOST_GROWTH)
        self.margin = self.grown(_MARGIN)
        self.top = float(self.margin)
        self._fixed = fixed
        self._lines: list[tuple[str, int, Colour, int]] = []

    def grown(self, length: int) -> int:
        """Return a length at the smallest width as it is at this width."""
        return round(length * self.growth)

    def text(self, words: str, size: int, colour: Colour, most: int) -> None:
        """Add a text of at most this many lines; of exactly this many if the figure's size is fixed."""
        leading = size * _LEADING
        lines = wrapped(words, self.width, size, most)
        for line in lines + [""] * (most - len(lines)) * self._fixed:
            self._lines.append((line, size, colour, round(self.top + leading / 2)))
            self.top += leading

    def space(self, height: float | int) -> int:
        """Add empty space, and return where it begins."""
        begin = math.ceil(self.top)
        self.top = begin + float(height)
        return begin

    def canvas(self) -> Canvas:
        """Return the sheet with all lines of text."""
        canvas = Canvas(self.width + 2 * self.margin, math.ceil(self.top + self.margin))
        for words, size, colour, middle in self._lines:
            canvas.text(self.margin, middle, words, size=size, colour=colour)
        return canvas


def shown_size(height: int, width: int, most: int = LARGEST_SIDE) -> tuple[int, int]:
    """Return the height and width at which a picture is shown in a figure; its form stays the same.

    >>> shown_size(32, 32), shown_size(3000, 4000), shown_size(4000, 50), shown_size(480, 640)
    ((320, 320), (720, 960), (960, 12), (480, 640))
    """
    return size_within((height, width), min(max(height, width, min(SMALLEST_SIDE, most)), most))


def side_within(max_side: int | None) -> int:
    """Return the longest side of a picture in a figure, if no side may have more than ``max_side`` pixels."""
    return LARGEST_SIDE if max_side is None else min(max_side, LARGEST_SIDE)


def resized(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Return a picture at another height and width; enlarged pixels stay squares."""
    if pixels.shape[:2] == size:
        return pixels
    method = cv2.INTER_AREA if max(size) < max(pixels.shape[:2]) else cv2.INTER_NEAREST
    return np.asarray(cv2.resize(np.ascontiguousarray(pixels), size[::-1], interpolation=method))


def fitted(picture: Drawable, most: int) -> Pixels:
    """Return a picture at the size at which a figure shows it."""
    return resized(pixels_of(picture), shown_size(*size_of(picture), most))


def scaled_box(box: Box, before: tuple[int, int], after: tuple[int, int]) -> Box:
    """Return a box on a picture that was resized from one height and width to another."""
    across, down = after[1] / before[1], after[0] / before[0]
    return Box(box.left * across, box.top * down, box.right * across, box.bottom * down)


def compose(
    panel: Pixels,
    caption: Caption,
    scale: ColourScale | None = None,
    *,
    unit: str = "",
    colormap: str = "turbo",
    opacity: Opacity = "evidence",
    reached: float | None = None,
    fixed: bool = False,
) -> Pixels:
    """Lay out a drawn picture with its caption.

    Args:
        panel: the drawn picture, at the size at which it is shown.
        caption: the words around it.
        scale: what the strongest colour stands for; None if nothing is coloured.
        unit: what the numbers of the colour bar are.
        colormap: the name of the colour map.
        opacity: as for ``blend``.
        reached: the largest value of the map itself, which gets a mark on the bar; None for no mark.
        fixed: make the size depend on nothing but the panel and the number of lines, as the frames of a video must:
            there is room for the title in one line, its meaning in two, the bar, the small print in one line each,
            and all notes in two.

    Returns:
        The figure, height x width x 3, uint8 RGB.
    """
    column = _Column(max(panel.shape[1], _NARROWEST), fixed=fixed)
    small, gap = column.grown(_SMALL), column.grown(_GAP)
    column.text(caption.title, column.grown(_TITLE), INK, 1 if fixed else _TITLE_LINES)
    column.text(caption.meaning, small, INK, _FIXED_NOTE_LINES if fixed else _NOTE_LINES)
    column.space(gap)
    panel_top = column.space(panel.shape[0])
    column.space(gap)
    bar_top = 0
    if scale is not None or fixed:
        bar_top = column.space(column.grown(_BAR) + column.grown(_TICK) + small * _LEADING + gap / 4)
    notes = [(words, AMBER) for words in caption.warnings] + [(words, GREY) for words in caption.remarks]
    if fixed:
        notes = [(" ".join(words for words, _ in notes), notes[0][1] if notes else GREY)]
    noted = [(words, small, colour, _FIXED_NOTE_LINES if fixed else _NOTE_LINES) for words, colour in notes]
    printed = [
        (words, column.grown(_PRINT), GREY, 1 if fixed else _DETAIL_LINES)
        for words in ("" if scale is None else scale.words(unit, reached), *caption.lines)
    ]
    # In a video, the notes of a frame may be empty, and their space is at the end
    for line in [*printed, *noted] if fixed else [*noted, *printed]:
        column.text(*line)
    canvas = column.canvas()
    canvas.picture(column.margin + (column.width - panel.shape[1]) // 2, panel_top, panel)
    if scale is not None:
        _draw_bar(canvas, scale.largest, colormap, opacity, reached, column, bar_top)
    return canvas.pixels()


def _draw_bar(
    canvas: Canvas, largest: float, colormap: str, opacity: Opacity, reached: float | None, column: _Column, top: int
) -> None:
    """Draw the colours from 0 to the largest value, with numbers at both ends and in the middle, and the map's mark."""
    high, tick, size = column.grown(_BAR), column.grown(_TICK), column.grown(_SMALL)
    left, width = column.margin, column.width
    ramp = np.tile(np.linspace(0, 1, width, dtype=np.float32), (high, 1))
    paper = np.full((high, width, 3), PAPER, np.uint8)
    canvas.box(left - 1, top - 1, left + width + 1, top + high + 1, LINE)
    canvas.picture(left, top, blend(paper, ramp, None, colormap=colormap, alpha=1.0, opacity=opacity))
    middle = round(top + high + tick + size * _LEADING / 2)
    ends: tuple[tuple[float, Anchor], ...] = ((0.0, "left"), (0.5, "middle"), (1.0, "right"))
    for share, anchor in ends:
        x = round(left + share * (width - 1))
        canvas.line((x, top + high), (x, top + high + tick), INK)
        canvas.text(x, middle, number(share * largest), size=size, colour=INK, anchor=anchor)
    if reached is not None and largest > 0:
        x = round(left + min(reached / largest, 1) * (width - 1))
        canvas.box(x - 1, top - tick, x + 2, top + high + tick, INK)


def number(value: float | int) -> str:
    """Return a number with three digits.

    >>> number(0), number(12.3456), number(0.000123456), number(123456.0), number(1250.0)
    ('0', '12.3', '0.000123', '1.23e+05', '1250')
    """
    return f"{value:.0f}" if 1000 <= abs(value) < 10_000 else f"{value:.3g}"


def percent(share: float | int) -> str:
    """Return a probability in percent; only exactly 0 and 1 are written as 0% and 100%.

    >>> percent(0.731), percent(0.0001), percent(0.99999), percent(1.0), percent(float("nan"))
    ('73.1%', '<0.1%', '>99.9%', '100%', 'NaN')
    """
    if not math.isfinite(share):
        return "NaN"
    if share in (0, 1):
        return f"{share:.0%}"
    return "<0.1%" if share < 0.0005 else ">99.9%" if share >= 0.9995 else f"{share:.1%}"


def sheet(figures: Sequence[Pixels], columns: int | None = None, *, gap: int = 12, lined: bool = True) -> Pixels:
    """Lay figures out in rows, each row as high as its highest figure and each column as wide as its widest."""
    if columns is None:
        high, wide = (sum(figure.shape[axis] for figure in figures) for axis in (0, 1))
        # Width by height that the sheet of several figures comes near to
        columns = max(1, min(len(figures), round(math.sqrt(len(figures) * 1.6 * high / wide))))
    rows = [figures[start : start + columns] for start in range(0, len(figures), columns)]
    widths = [max(figure.shape[1] for figure in figures[column::columns]) for column in range(len(rows[0]))]
    heights = [max(figure.shape[0] for figure in row) for row in rows]
    canvas = Canvas(sum(widths) + gap * (len(widths) - 1), sum(heights) + gap * (len(heights) - 1))
    for row, figures_of_row in enumerate(rows):
        top = sum(heights[:row]) + gap * row
        if row and lined:
            canvas.line((0, top - gap // 2), (sum(widths) + gap * len(widths), top - gap // 2), LINE)
        for column, figure in enumerate(figures_of_row):
            canvas.picture(sum(widths[:column]) + gap * column, top, figure)
    return canvas.pixels()
