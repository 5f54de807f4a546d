"""Event files: opened, and filled with what camkit measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from camkit.diagnosis.values import TensorStatistics
from camkit.errors import InputError, OutputError
from camkit.types import Pixels

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_TILE = 224
_GAP = 4


@contextmanager
def opened(writer: SummaryWriter | str | Path) -> Iterator[SummaryWriter]:
    """Open a writer of event files for a folder, and close it in the end; one that is given is only flushed.

    Raises:
        InputError: TensorBoard is not installed, or this is no writer.
        OutputError: the folder cannot be written.
    """
    found = _writer(writer)
    try:
        yield found
    finally:
        with told(found):
            if found is writer:
                found.flush()
            else:
                found.close()


@contextmanager
def told(writer: Any) -> Iterator[None]:
    """Say in one sentence why a writer, or what would be one for a folder, can't write, as on a full disk.

    Raises:
        OutputError: for what the operating system has against it.
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
            raise InputError(
                f"events are written by a SummaryWriter or into a folder, not by a {type(writer).__name__}"
            )
        return writer
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InputError("TensorBoard needs the package tensorboard: pip install 'camkit[tensorboard]'") from error
    with told(writer):
        return SummaryWriter(str(writer))


def add_histogram(writer: Any, tag: str, found: TensorStatistics, step: int) -> None:
    """Write the distribution of a tensor's finite numbers; nothing where there are none."""
    held = sum(found.histogram.counts)
    if not held or not math.isfinite(found.low):
        return
    writer.add_histogram_raw(
        tag,
        min=found.low,
        max=found.high,
        num=held,
        sum=found.mean * held,
        sum_squares=found.norm * found.norm,
        bucket_limits=list(found.histogram.edges[1:]),
        bucket_counts=list(found.histogram.counts),
        global_step=step,
    )


def add_picture(writer: Any, tag: str, pixels: Pixels, step: int) -> None:
    """Write a picture, H x W x 3."""
    writer.add_image(tag, np.ascontiguousarray(pixels), step, dataformats="HWC")


def grid(pictures: Sequence[Pixels], columns: int | None = None) -> Pixels:
    """Lay pictures side by side, each within a square of its own; in about as many rows as columns unless told.

    >>> grid([np.zeros((10, 20, 3), np.uint8)] * 5).shape
    (460, 688, 3)
    """
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    pitch = _TILE + _GAP
    sheet = np.full((rows * pitch + _GAP, columns * pitch + _GAP, 3), 255, np.uint8)
    for number, picture in enumerate(pictures):
        factor = _TILE / max(picture.shape[:2])
        size = (max(1, round(picture.shape[1] * factor)), max(1, round(picture.shape[0] * factor)))
        drawn = cv2.resize(picture, size, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_NEAREST)
        top = _GAP + number // columns * pitch + (_TILE - size[1]) // 2
        left = _GAP + number % columns * pitch + (_TILE - size[0]) // 2
        sheet[top : top + size[1], left : left + size[0]] = drawn
    return sheet
