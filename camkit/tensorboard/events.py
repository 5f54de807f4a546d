"""TensorBoard event files: opening them, and writing results: an explanation, a diagnosis, a check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from camkit.errors import InputError, OutputError, as_markdown
from camkit.explaining.explanation import Explanation, ScaleLike
from camkit.inspect import Diagnosis, TensorStatistics
from camkit.kit.tiles import Tile, contact_sheet
from camkit.types import Pixels, Style

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from camkit import CheckResult


@contextmanager
def opened(writer: SummaryWriter | str | Path) -> Iterator[SummaryWriter]:
    """Open a SummaryWriter for a folder and close it at the end; an existing writer is only flushed.

    Raises:
        InputError: TensorBoard is not installed, or this is neither a writer nor a folder.
        OutputError: the folder cannot be written.
    """
    events: Any = writer
    if isinstance(writer, (str, Path)):
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise InputError("TensorBoard needs the package tensorboard: pip install 'camkit[tensorboard]'") from error
        with naming_the_folder(writer):
            events = SummaryWriter(str(writer))
    elif not all(hasattr(writer, name) for name in ("add_scalar", "add_image", "add_histogram_raw")):
        raise InputError(f"writer must be a SummaryWriter or a folder, not a {type(writer).__name__}")
    try:
        yield events
    finally:
        with naming_the_folder(events):
            if isinstance(writer, (str, Path)):
                events.close()
            else:
                writer.flush()


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


def write_explanation(
    found: Explanation,
    writer: SummaryWriter | str | Path,
    step: int = 0,
    *,
    tag: str | None = None,
    style: Style = "overlay",
    colormap: str = "turbo",
    alpha: float = 0.5,
    scale: ScaleLike = "shared",
    max_side: int | None = None,
) -> None:
    """Write an explanation's picture, and a table of all else as text.

    Args:
        found: the explanation; if its map has one axis, it has no picture.
        writer: a SummaryWriter, or a folder, in which each call creates a new file.
        step: the step in the events.
        tag: the tag of both in the events; None means ``explain/SOURCE/TARGET``.
        style, colormap, alpha, scale, max_side: as for ``Explanation.overlay``.

    Raises:
        InputError: TensorBoard is not installed, the style or colormap is unknown, or alpha is out of range.
        OutputError: the folder cannot be written.
    """
    tag = tag or f"explain/{found.source}/{found.name}"
    with opened(writer) as events, naming_the_folder(events):
        if found.heatmap.ndim > 1:
            drawn = found.overlay(style=style, colormap=colormap, alpha=alpha, scale=scale, max_side=max_side)
            add_picture(events, tag, drawn, step)
        lines = [f"| {name} | {as_markdown(str(value))} |" for name, value in found.values().items()]
        events.add_text(tag, "\n".join(["| field | value |", "| --- | --- |", *lines]), step)


def write_diagnosis(found: Diagnosis, writer: SummaryWriter | str | Path, step: int = 0) -> None:
    """Write a diagnosis: histograms and scalars of each layer, the picture, and the findings as text.

    Layers have the same tags as in ``TrainingWatch``. Arguments and errors are as for ``write_explanation``.
    """
    with opened(writer) as events, naming_the_folder(events):
        for row in found.rows:
            add_histogram(events, f"activations/{row.name}", row.activations, step)
            if row.gradients is not None:
                add_histogram(events, f"gradients/{row.name}", row.gradients, step)
            if row.parameter_gradient is not None:
                _add_scalar(events, f"gradient_norm/{row.name}", row.parameter_gradient, step)
            if row.dead is not None and row.channels:
                _add_scalar(events, f"dead_share/{row.name}", len(row.dead) / row.channels, step)
        add_picture(events, "diagnosis", found.sheet(), step)
        sentences = [*(finding.text for finding in found.findings), *found.remarks]
        text = "\n".join(f"- {sentence}" for sentence in sentences)
        events.add_text("findings", text or "Nothing wrong was found.", step)


def write_check(result: CheckResult, writer: SummaryWriter | str | Path, step: int = 0) -> None:
    """Write a check: its summary as text, the measures of each class as scalars, the worst pictures with their edits.

    If an effect was measured with several fills, the scalar is the weakest. Arguments and errors are as
    for ``write_explanation``.
    """
    with opened(writer) as events, naming_the_folder(events):
        for tag, shown in result.events():
            if isinstance(shown, str):
                events.add_text(tag, shown, step)
            elif isinstance(shown, float):
                _add_scalar(events, tag, shown, step)
            else:
                tiles = []
                for panel in shown.panels:
                    unknown = panel.answer is None or panel.probability is None
                    note = "" if unknown else f"{panel.answer} ({panel.probability:.0%})"
                    tiles.append(Tile(panel.pixels, panel.title, note))
                add_picture(events, tag, contact_sheet(tiles, columns=len(tiles), title=shown.title), step)


def _add_scalar(events: Any, tag: str, value: float, step: int) -> None:
    if math.isfinite(value):
        events.add_scalar(tag, value, step)
