"""TensorBoard event files: opening them, and writing what camkit measures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from camkit.diagnosis.tensor_statistics import TensorStatistics
from camkit.errors import InputError, OutputError
from camkit.types import Pixels

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
