"""Explains picture files and writes the drawings and a table, as a stream: memory does not grow with their number.

A row passes three functions: ``_explained`` computes its map, ``_written`` draws it into a file, ``_tabled`` adds it to
the table.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from PIL import Image

from camkit.drawing.pixels import bytes_of
from camkit.engine.passes import cores_of_a_pass
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, RunError
from camkit.explanation import Explanation
from camkit.images.listing import FoundPicture, Pictures
from camkit.images.video import is_video
from camkit.kit.store import Row
from camkit.models import device_of, usual_batch_size
from camkit.models.clips import ClipPreprocess
from camkit.models.loaded import LoadedModel
from camkit.scale.bundle import Bundle
from camkit.scale.job import Drawing, Job, Scales, write_drawing
from camkit.scale.table import Table, row_of, row_of_failure
from camkit.scale.video import FRAMES_PER_PASS, WrittenVideo, draw
from camkit.session import explain_many
from camkit.types import Failure

_WRITERS = max(2, min(4, os.cpu_count() or 1))
"""Threads that draw and write."""
_MOST_UNWRITTEN = 64
_MOST_UNWRITTEN_BYTES = 72 * 2**20
"""The most explanations that may wait to be drawn, and the most bytes of their pictures, so that memory stays bounded.
The bytes suffice for small pictures, or for a photo of 12 megapixels."""

Stream: TypeAlias = Callable[..., Iterator[Any]]
"""Explains picture files, and yields Explanations and Failures; its argument ``on_pass`` is called before the
rows of each pass."""


@dataclass(frozen=True, eq=False)
class Written:
    """An explanation, and what was written of it.

    Attributes:
        explanation: the explanation.
        file: the file with its drawing; None if nothing was drawn.
        name: its place below the folder of all drawings; if nothing was drawn, where its drawing would be.
        drawing: how it was drawn.
        row: its row in the table; None if there is no table.
        is_reduced: whether the drawing is smaller than the picture because of ``max_side``.
    """

    explanation: Explanation
    file: Path | None
    name: Path
    drawing: Drawing
    row: Row | None = None
    is_reduced: bool = False

    @property
    def source(self) -> str:
        """The picture."""
        return self.explanation.source

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values; "scale" has the value of the strongest colour for each layer."""
        is_coloured = self.file is not None and self.explanation.status == "ok"
        scale = list(self.explanation.colour_scale(self.drawing.scale).limits) if is_coloured else None
        file = None if self.file is None else str(self.file)
        return {**self.explanation.to_dict(), "scale": scale, "file": file}


Result: TypeAlias = Written | WrittenVideo | Failure
"""What becomes of a picture and target, or of a video."""


class _Undrawn(Failure):
    """A picture that was explained, but could not be drawn."""


def explain_files(model: LoadedModel, job: Job, *, elsewhere: Stream | None = None) -> Run:
    """Explain picture files and write one drawing per picture and target into a folder; videos follow the pictures.

    Reading, computing, drawing and writing overlap. The pictures are listed while they are explained, and memory grows
    neither with their number nor with their size. A picture that cannot be read, or a drawing that cannot be written,
    becomes a Failure in its place. A video or an animated picture becomes one drawn video. With a table, a video is a
    Failure, and the first frame of an animated picture is explained.

    The name of a drawing consists of its picture's name, the method and, if the caller chose them, the layer and the
    target. A drawing of that name is replaced; a file that camkit did not draw is not.

    Args:
        model: a model from ``camkit.load_model``.
        job: the pictures, how they are explained and drawn, and where the results go.
        elsewhere: explains the pictures, such as ``Cluster.explain``; None explains them in this process.

    Raises:
        InputError: something in the call is wrong, or the table belongs to a run with other settings. In these cases,
            nothing has been computed.
        OutputError: while it runs: the table cannot be written.
    """
    given = job.how.get("batch_size")
    size = usual_batch_size(device_of(model.module)) if given is None else given
    options = {**job.how, "batch_size": size, "progress": job.progress}
    here = functools.partial(explain_many, model, on_error="yield", **options)
    here([])  # checks the arguments
    table = None
    if job.table is not None:
        table = Table(job.table, job.fingerprint(model), resume=job.resume, overwrite=job.overwrite and not job.resume)
    bundle = None
    if job.bundle is not None:
        bundle = Bundle(job.bundle, job.fingerprint(model), overwrite=job.overwrite)
    stills = Stills(job.pictures, table)
    stream = functools.partial(elsewhere or functools.partial(explain_many, model, on_error="yield"), **options)

    def find_scales() -> Scales:
        measured: Stream = here if elsewhere is None else stream  # its rows are needed, so no photo comes later
        return Scales(measured(stills.all()) if job.drawing.one_scale and job.out is not None else ())

    explained = _explained(stream, stills, find_scales)
    written = _written(explained, job, ahead=max(_MOST_UNWRITTEN, 2 * size))
    rows = (row for row, _ in written) if table is None else _tabled(written, table)
    of_frames = functools.partial(here, batch_size=min(size, FRAMES_PER_PASS))
    is_clip = isinstance(model.preprocess, ClipPreprocess)
    videos = (draw(found, job, of_frames, is_clip=is_clip) for found in stills.videos if job.out is not None)
    everything = _one_after_the_other(rows, videos)
    return Run(everything if bundle is None else _bundled(everything, bundle), stills)


def _one_after_the_other(*parts: Iterator[Result]) -> Generator[Result, None, None]:
    """Chain iterators; closing the result closes the one that runs."""
    for rows in parts:
        yield from rows


def _bundled(rows: Generator[Result, None, None], bundle: Bundle) -> Generator[Result, None, None]:
    """Pass rows on, and write each explanation into the bundle too; its manifest lists what was finished."""
    try:
        for row in rows:
            if isinstance(row, Written):
                options = row.drawing.options()
                bundle.add(row.explanation, {name: options[name] for name in options if name != "style"})
            elif isinstance(row, Failure):
                bundle.fail(row)
            yield row
    finally:
        rows.close()
        bundle.close()


class Run(Iterator[Result], AbstractContextManager["Run"]):
    """The rows of a run, each when it is finished; a context that ends the run.

    Attributes:
        stills: the pictures that are explained.
    """

    def __init__(self, rows: Generator[Result, None, None], stills: Stills) -> None:
        self._rows, self.stills = rows, stills

    def __next__(self) -> Result:
        """Return the next row."""
        return next(self._rows)

    def close(self) -> None:
        """End the run; what is finished is written into the table."""
        self._rows.close()

    def __exit__(self, *error: object) -> None:
        """End the run."""
        self.close()


class Stills:
    """The pictures that are to be explained, and the videos that were found among them.

    Attributes:
        videos: the videos, which are explained last.
        skipped: the pictures that were left out because the table has them.
        failed_before: the skipped pictures for which the table has only errors.
    """

    def __init__(self, pictures: Pictures, table: Table | None) -> None:
        self._pictures, self._table = pictures, table
        self._pending: deque[FoundPicture] = deque()
        self.videos: list[FoundPicture] = []
        self.skipped = self.failed_before = 0

    def paths(self) -> Iterator[Path]:
        """List the pictures that are not finished."""
        for found in self._pictures:
            failed = None if self._table is None else self._table.failed(found.path)
            if failed is not None:
                self.skipped, self.failed_before = self.skipped + 1, self.failed_before + failed
            elif self._table is None and is_video(found.path):
                self.videos.append(found)
            else:
                self._pending.append(found)
                yield found.path

    def all(self) -> Iterator[Path]:
        """List all pictures, including the finished ones, but no videos."""
        return (found.path for found in self._pictures if self._table is not None or not is_video(found.path))

    def of(self, source: str) -> FoundPicture:
        """Return the picture of a row; rows come in the order of the pictures."""
        while str(self._pending[0].path) != source:
            self._pending.popleft()
        return self._pending[0]


class _Explained(NamedTuple):
    """An explanation, or why there is none.

    Attributes:
        row: the explanation or the failure.
        found: its picture.
        rank: its place among the rows of its picture, from 1.
        number: the number of its pass.
        scales: the scales that all pictures share; empty if each has its own.
    """

    row: Explanation | Failure
    found: FoundPicture
    rank: int
    number: int
    scales: Scales


def _explained(stream: Stream, stills: Stills, find_scales: Callable[[], Scales]) -> Iterator[_Explained]:
    """Explain the pictures that are not finished."""
    scales = find_scales()
    rank, source, number = 0, "", 0

    def on_pass() -> None:
        nonlocal number
        number += 1

    for row in stream(stills.paths(), on_pass=on_pass):
        rank, source = 1 if row.source != source else rank + 1, row.source
        yield _Explained(row, stills.of(source), rank, number, scales)


def _written(explained: Iterator[_Explained], job: Job, *, ahead: int) -> Iterator[tuple[Written | Failure, int]]:
    """Draw explanations into files, in other threads, and yield each row with the number of its pass."""

    def tasks() -> Iterator[Task[tuple[Written | Failure, int]]]:
        for item in explained:
            shown = item.row.shown if isinstance(item.row, Explanation) and item.rank == 1 else None
            size = bytes_of(shown) if isinstance(shown, Image.Image) else 0
            yield Task(functools.partial(_drawn, item, job), in_thread=True, size=size)

    most, cores = _MOST_UNWRITTEN_BYTES, cores_of_a_pass()
    yield from in_order(tasks(), workers=_WRITERS, ahead=ahead, prompt=True, most=most, cores=cores)


def _drawn(item: _Explained, job: Job) -> tuple[Written | Failure, int]:
    """Draw a row, and return what was written, with the number of the pass."""
    written = item.row if isinstance(item.row, Failure) else _written_of(item.row, item, job)
    return written, item.number


def _written_of(explanation: Explanation, item: _Explained, job: Job) -> Written | Failure:
    scale, file = item.scales.of(explanation.layer, explanation.method), None
    drawing = job.drawing if scale is None else replace(job.drawing, scale=scale)
    try:
        name = job.file_for(explanation, item.found, item.rank, drawing.suffix_for(explanation.source))
        if job.out is not None:
            file, name = name, name.relative_to(job.folder)
            write_drawing(file, explanation.overlay(**drawing.options()))
        row = None if job.table is None else row_of(explanation, file)
    except CamkitError as error:
        return _Undrawn(explanation.source, error)
    except Exception as error:
        return _Undrawn(explanation.source, RunError(f"it could not be drawn: {type(error).__name__}: {error}"))
    is_reduced = file is not None and drawing.reduces(explanation)
    return Written(explanation.released(item.found.path), file, name, drawing, row, is_reduced)


def _tabled(written: Iterator[tuple[Written | Failure, int]], table: Table) -> Iterator[Written | Failure]:
    """Pass rows on, and add the rows of each pass to the table when it is complete.

    A picture that lacks a drawing is not finished, so none of its rows is added.
    """
    with table:
        for _, of_pass in itertools.groupby(written, key=lambda item: item[1]):
            rows: list[Written | Failure] = []
            for row, _ in of_pass:
                rows.append(row)
                yield row
            undrawn = {row.source for row in rows if isinstance(row, _Undrawn)}
            whole = [row for row in rows if row.source not in undrawn]
            table.append([row_of_failure(row) if isinstance(row, Failure) else row.row or {} for row in whole])
