"""TensorBoard event files: opening them, and writing what camkit measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from camkit.diagnosis.tensor_statistics import TensorStatistics
from camkit.drawing.pixels import size_within
from camkit.drawing.text import AMBER, INK, Canvas, fitting
from camkit.errors import InputError, OutputError
from camkit.types import Pixels

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_TILE = 224  # the longer side of a picture on a contact sheet, in pixels
_GAP = 4
_HEAD = 24
_LINE = 18
_CAPTION = 2 * _LINE + 4
_SIZE = 13


@contextmanager
def opened(writer: SummaryWriter | str | Path) -> Iterator[SummaryWriter]:
    """Open a SummaryWriter for a folder and close it at the end; an existing writer is only flushed.

    Raises:
        InputError: TensorBoard is not installed, or this is neither a writer nor a folder.
        OutputError: the folder cannot be written.
    """
    events = _writer(writer)
    try:
        yield events
    finally:
        with naming_the_folder(events):
            if events is writer:
                events.flush()
            else:
                events.close()


@contextmanager
def naming_the_folder(writer: Any) -> Iterator[None]:
    """Turn an error of the operating system, such as a full disk, into a sentence that names the folder.

    Raises:
        OutputError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        folder = getattr(writer, "log_dir", writer)
        raise OutputError(f"cannot write events into {folder}: {error.strerror or error}") from error


def _writer(writer: SummaryWriter | str | Path) -> SummaryWriter:
    if not isinstance(writer, (str, Path)):
        missing = [name for name in ("add_scalar", "add_image", "add_histogram_raw") if not hasattr(writer, name)]
        if missing:
            raise InputError(f"writer must be a SummaryWriter or a folder, not a {type(writer).__name__}")
        return writer
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise InputError("TensorBoard needs the package tensorboard: pip install 'camkit[tensorboard]'") from error
    with naming_the_folder(writer):
        return SummaryWriter(str(writer))


def add_histogram(writer: Any, tag: str, distribution: TensorStatistics, step: int) -> None:
    """Write the distribution of a tensor's finite numbers; if there are none, write nothing."""
    count = sum(distribution.histogram.counts)
    if not count or not math.isfinite(distribution.low):
        return
    writer.add_histogram_raw(
        tag,
        min=distribution.low,
        max=distribution.high,
        num=count,
        sum=distribution.mean * count,
        sum_squares=distribution.norm * distribution.norm,
        bucket_limits=list(distribution.histogram.edges[1:]),
        bucket_counts=list(distribution.histogram.counts),
        global_step=step,
    )


def add_picture(writer: Any, tag: str, pixels: Pixels, step: int) -> None:
    """Write a picture, H x W x 3."""
    writer.add_image(tag, np.ascontiguousarray(pixels), step, dataformats="HWC")


@dataclass(frozen=True)
class Tile:
    """A picture on a contact sheet, with a line below it and a second line in amber."""

    pixels: Pixels
    line: str = ""
    warning: str = ""


def contact_sheet(tiles: Sequence[Tile], columns: int | None = None, title: str = "") -> Pixels:
    """Lay pictures side by side, each in a square; with about as many rows as columns unless ``columns`` is given.

    The sheet's size depends on the number of tiles alone, and on whether there are a title and lines.

    >>> contact_sheet([Tile(np.zeros((10, 20, 3), np.uint8))] * 5).shape
    (460, 688, 3)
    """
    columns = columns or math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    below = _CAPTION if any(tile.line for tile in tiles) else 0
    head = _HEAD if title else 0
    across, down = _TILE + _GAP, _TILE + below + _GAP
    canvas = Canvas(columns * across + _GAP, head + rows * down + _GAP)
    canvas.text(_GAP, head / 2 + 2, fitting(title, columns * across - _GAP, _SIZE + 1), size=_SIZE + 1)
    for number, tile in enumerate(tiles):
        height, width = size_within(tile.pixels.shape[:2], _TILE)
        method = cv2.INTER_AREA if max(tile.pixels.shape[:2]) > _TILE else cv2.INTER_NEAREST
        drawn = cv2.resize(tile.pixels, (width, height), interpolation=method)
        left, top = _GAP + number % columns * across, head + _GAP + number // columns * down
        canvas.picture(left + (_TILE - width) // 2, top + (_TILE - height) // 2, np.asarray(drawn))
        for place, (words, colour) in enumerate(((tile.line, INK), (tile.warning, AMBER))):
            middle = top + _TILE + (place + 0.5) * _LINE + 2
            canvas.text(left, middle, fitting(words, _TILE, _SIZE), size=_SIZE, colour=colour)
    return canvas.pixels()
