"""Pictures side by side on one sheet, each with two lines below it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from camkit.drawing.pixels import size_within
from camkit.drawing.text import AMBER, INK, Canvas, Colour, fitting
from camkit.types import Pixels

_GAP = 4


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
    across, down = side + _GAP, side + below + _GAP
    canvas = Canvas(columns * across + _GAP, head + rows * down + _GAP)
    for place, words in enumerate(titles):
        middle = above * (place + 0.5) + 2
        canvas.text(_GAP, middle, fitting(words, columns * across - _GAP, size + 1), size=size + 1)
    for number, tile in enumerate(tiles):
        height, width = size_within(tile.pixels.shape[:2], side)
        method = cv2.INTER_AREA if max(tile.pixels.shape[:2]) > side else cv2.INTER_NEAREST
        drawn = cv2.resize(np.ascontiguousarray(tile.pixels), (width, height), interpolation=method)
        left, top = _GAP + number % columns * across, head + _GAP + number // columns * down
        canvas.picture(left + (side - width) // 2, top + (side - height) // 2, np.asarray(drawn))
        for place, (words, colour) in enumerate(((tile.line, INK), (tile.note, tile.colour))):
            middle = top + side + (place + 0.5) * line + 2
            canvas.text(left, middle, fitting(words, side, size), size=size, colour=colour)
    return canvas.pixels()
