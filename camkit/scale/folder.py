"""Explains files and writes the drawings and a table, as a stream: memory does not grow with their number.

A picture passes three functions of ``Run``: ``_tasks`` computes its maps, ``_drawn`` draws each into a file,
``_rows`` adds them to the table. Videos and animated pictures are explained frame by frame, and drawn as MP4 files.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
from PIL import Image

from camkit.drawing.encode import bytes_of, mark_video, size_of
from camkit.drawing.figure import Caption, ColourScale, compose, fitted, side_within
from camkit.drawing.overlay import limited, render
from camkit.engine.passes import cores_of_a_pass
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, ImageError, InputError, OutputError, RunError, TargetError, advice, as_error
from camkit.explaining.explainer import explain_many
from camkit.explaining.explanation import Explanation
from camkit.images.files import names_file, write_picture
from camkit.images.listing import FoundPicture
from camkit.images.read import is_video, opened_video, quiet_decoders
from camkit.models import device_of, usual_batch_size
from camkit.models.loaded import LoadedModel
from camkit.models.modules import ClipPreprocess
from camkit.scale.job import Job, Written
from camkit.scale.table import Bundle, Table, row_of, row_of_failure
from camkit.types import ClipFrame, Failure, Pixels, Status

Stream: TypeAlias = Callable[..., Iterator[Any]]
"""Explains pictures, and yields Explanations, and Failures of pictures without the target; its argument ``on_pass`` is
called before the rows of each pass."""
Scales: TypeAlias = dict[tuple[str, str], ColourScale]
"""The scales that reach to the largest value of all maps: one for each layer and method, whose units differ."""
Result: TypeAlias = Written | Failure
"""What becomes of a picture and target, or of a video."""


def _scales_of(rows: Iterable[Explanation | Failure]) -> Scales:
    scales: Scales = {}
    for row in rows:
        if isinstance(row, Explanation):
            key = row.layer, row.method
            scales[key] = row.colour_scale("each").with_more(scales.get(key))
    return scales


class _Undrawn(Failure):
    """A picture that was explained, but could not be drawn."""


class Run(Iterator[Result], AbstractContextManager["Run"]):
    """Explains picture files and writes one drawing per picture and target into a folder; yields what was written.

    Reading, computing, drawing and writing overlap. The pictures are listed while they are explained, and memory grows
    neither with their number nor with their size. A picture that cannot be read, or a drawing that cannot be written,
    becomes a Failure in its place. A video or an animated picture becomes one drawn video; videos follow the pictures.
    With a table, a video is a Failure, and the first frame of an animated picture is explained.

    The name of a drawing consists of its picture's name, the method and, if the caller chose them, the layer and the
    target. A drawing of that name is replaced; a file that camkit did not draw is not. As a context, it ends the run,
    and writes what is finished into the table.

    Args:
        model: a model from ``camkit.load_model``.
        job: the pictures, how they are explained and drawn, and where the results go.
        elsewhere: explains the pictures, such as ``Cluster.explain``; None explains them in this process.

    Attributes:
        videos: the videos that were found among the pictures.
        skipped: the pictures that were left out because the table has them.
        failed_before: the skipped pictures for which the table has only errors.

    Raises:
        InputError: something in the call is wrong, or the table belongs to a run with other settings. In these cases,
            nothing has been computed.
        OutputError: while it runs: the table cannot be written.
    """

    def __init__(self, model: LoadedModel, job: Job, *, elsewhere: Stream | None = None) -> None:
        options, how, results = job.arguments(), job.how, job.results
        if how.batch_size is None:
            options["batch_size"] = usual_batch_size(device_of(model.module))
        self._batch_size: int = options["batch_size"]
        self._here: Stream = functools.partial(explain_many, model, on_error="yield", **options)
        self._here([])  # checks the arguments
        self._stream = self._here if elsewhere is None else functools.partial(elsewhere, **options)
        self._job = job
        self._is_clip = isinstance(model.preprocess, ClipPreprocess)
        self._table = self._bundle = None
        if results.table is not None:
            overwritten = how.overwrite and not results.resume
            self._table = Table(results.table, job.fingerprint(model), resume=results.resume, overwrite=overwritten)
        if results.bundle is not None:
            self._bundle = Bundle(results.bundle, job.fingerprint(model), overwrite=how.overwrite)
        self._pending: deque[FoundPicture] = deque()
        self.videos: list[FoundPicture] = []
        self.skipped = self.failed_before = 0
        self._finished = self._rows()

    def __next__(self) -> Result:
        """Return the next row when it is finished."""
        return next(self._finished)

    def __exit__(self, *error: object) -> None:
        """End the run."""
        self._finished.close()

    def _rows(self) -> Generator[Result, None, None]:
        """Yield all rows. Each explanation goes into the bundle too, whose manifest lists what was finished.

        The rows of a pass go into the table together when it is complete. A picture that lacks a drawing is not
        finished, so none of its rows is added.
        """
        workers = max(2, min(4, os.cpu_count() or 1))  # threads that draw and write
        # The most explanations that may wait to be drawn, and the most bytes of their pictures, so that memory stays
        # bounded. The bytes suffice for small pictures, or for a photo of 12 megapixels.
        ahead, most, cores = max(64, 2 * self._batch_size), 72 * 2**20, cores_of_a_pass()
        drawn = in_order(self._tasks(), workers=workers, ahead=ahead, prompt=True, most=most, cores=cores)
        try:
            # Also after an error, whose traceback would keep the threads that draw.
            with contextlib.closing(drawn), self._table or contextlib.nullcontext():
                for _, of_pass in itertools.groupby(drawn, key=lambda numbered: numbered[0]):
                    rows: list[Result] = []
                    for _, row in of_pass:
                        rows.append(row)
                        yield self._bundled(row)
                    if self._table is not None:
                        undrawn = {row.source for row in rows if isinstance(row, _Undrawn)}
                        whole = [row for row in rows if row.source not in undrawn]
                        self._table.append(
                            [row_of_failure(row) if isinstance(row, Failure) else row.row or {} for row in whole]
                        )
            for found in self.videos if self._job.out is not None else ():
                yield self._bundled(self._draw(found))
        finally:
            if self._bundle is not None:
                self._bundle.close()

    def _bundled(self, row: Result) -> Result:
        if self._bundle is not None:
            if isinstance(row, Failure):
                self._bundle.fail(row)
            elif row.video is None:
                self._bundle.add(row.explanation, row.drawing)
        return row

    def _paths(self) -> Iterator[Path]:
        """List the pictures that are not finished."""
        for found in self._job.pictures:
            failed = None if self._table is None else self._table.failed(found.path)
            if failed is not None:
                self.skipped, self.failed_before = self.skipped + 1, self.failed_before + failed
            elif self._table is None and is_video(found.path):
                self.videos.append(found)
            else:
                self._pending.append(found)
                yield found.path

    def _tasks(self) -> Iterator[Task[tuple[int, Result]]]:
        """Explain the pictures that are not finished, and yield the work of drawing each row.

        ``rank`` is the place of a row among those of its picture, and ``number`` that of its pass, from 1.
        """
        scales: Scales = {}
        if self._job.how.scale == "shared" and self._job.out is not None:
            every = (found.path for found in self._job.pictures)
            scales = _scales_of(self._stream(path for path in every if self._table is not None or not is_video(path)))
        rank, source, number = 0, "", 0

        def on_pass() -> None:
            nonlocal number
            number += 1

        for row in self._stream(self._paths(), on_pass=on_pass):
            rank, source = 1 if row.source != source else rank + 1, row.source
            while str(self._pending[0].path) != source:  # rows come in the order of the pictures
                self._pending.popleft()
            shown = row.shown if isinstance(row, Explanation) and rank == 1 else None
            size = bytes_of(shown) if isinstance(shown, Image.Image) else 0
            draw = functools.partial(self._drawn, number, row, self._pending[0], rank, scales)
            yield Task(draw, in_thread=True, size=size)

    def _drawn(
        self, number: int, explanation: Explanation | Failure, found: FoundPicture, rank: int, scales: Scales
    ) -> tuple[int, Result]:
        """Draw an explanation into a file; return the number of its pass too."""
        if isinstance(explanation, Failure):
            return number, explanation
        job = self._job
        drawing, file, scale = job.drawing(scales.get((explanation.layer, explanation.method))), None, None
        try:
            name = job.file_for(explanation, found, rank, job.suffix_for(explanation.source))
            if job.out is not None:
                file, name = name, name.relative_to(job.folder)
                write_picture(file, explanation.overlay(**drawing))
                scale = explanation.colour_scale(drawing["scale"]) if explanation.status == "ok" else None
            row = None if self._table is None else row_of(explanation, file)
        except CamkitError as error:
            return number, _Undrawn(explanation.source, error)
        except Exception as error:
            failed = RunError(f"it could not be drawn: {type(error).__name__}: {error}")
            return number, _Undrawn(explanation.source, failed)
        return number, Written(explanation.released(found.path), file, scale, name, drawing, row)

    def _draw(self, found: FoundPicture) -> Result:
        """Explain a video and draw it; of a model of clips, the frames that the model saw."""
        video = str(found.path)
        try:
            if self._job.has_several_targets:
                raise InputError(f"{video} is a video, and a video shows one target")
            # The most frames in one pass. A frame stays in memory until it is drawn, and a 4K frame takes 25 MB.
            explained = functools.partial(self._here, batch_size=min(self._batch_size, 8))
            return (_draw_clip if self._is_clip else _draw_video)(found, self._job, explained)
        except CamkitError as error:
            return Failure(video, error)


def _draw_video(found: FoundPicture, job: Job, explained: Stream) -> Written:
    """Explain every ``job.every``-th frame of a video, and write the drawn frames as an MP4 file of the same speed.

    A frame without the target, for example without a box of that class, is written without heat. If the video breaks
    off, what was read is written, and the row says so.
    """
    video, every = found.path, job.how.every
    scales = _scales_of(explained(_frames_of(video, every)) if job.how.scale == "shared" else ())
    labels: Counter[str] = Counter()
    statuses: set[Status] = set()
    first: Explanation | None = None
    absent: Failure | None = None
    more: dict[str, str] = {}
    with opened_video(video, every) as opened, _VideoFile(job.folder, opened.rate / every) as file:
        waiting: deque[Pixels] = deque()
        try:
            for row in explained(_noted(video, opened.frames, waiting)):
                pixels = waiting.popleft()
                if isinstance(row, Explanation):
                    first = first or row
                    labels[row.name] += 1
                    statuses.add(row.status)
                    file.write(_frame(row, job.drawing(scales.get((row.layer, row.method)))))
                elif isinstance(row.error, TargetError):
                    absent = row
                    file.write(_without_target(pixels, str(row.error), job.drawing()))
                else:
                    raise row.error
        except ImageError as error:
            if first is None:
                raise
            more["error"] = str(error)
        if first is None:
            assert absent is not None
            raise absent.error
        status: Status = "ok" if "ok" in statuses else first.status
        scale = scales.get((first.layer, first.method)) if status == "ok" else None
        return _finished(file, found, job, first, scale, status=status, labels=dict(labels.most_common()), **more)


def _finished(
    file: _VideoFile, found: FoundPicture, job: Job, row: Explanation, scale: ColourScale | None, **more: Any
) -> Written:
    """Give the file of a video its name, and return what was written; ``more`` is what JSON has of it besides."""
    written = job.file_for(row, found, 1, ".mp4")
    file.finish(written)
    drawn = {"source": str(found.path), "frames": file.frames, "every": job.how.every, "rate": file.rate, **more}
    return Written(row, written, scale, video=drawn)


def _draw_clip(found: FoundPicture, job: Job, explained: Stream) -> Written:
    """Explain a video with a model of clips, and draw the frames that the model saw, as an MP4 file and as a sheet."""
    if job.how.every > 1:
        leave_out = advice("leave out every", "leave out --every")
        raise InputError(f"a model of clips chooses the frames itself; {leave_out}")
    (row,) = explained([found.path])
    if isinstance(row, Failure):
        raise row.error
    options = job.drawing()
    del options["max_side"]  # the frames have the size of the model's input
    first, last = row.frames[0].time or 0.0, row.frames[-1].time or 0.0
    # Frames per second of a drawn clip of one frame
    rate = (len(row.frames) - 1) / (last - first) if last > first else 4.0
    more = {}
    if job.out is not None and not names_file(job.out):
        sheet = job.file_for(row, found, 1, ".png")
        write_picture(sheet, row.overlay(**job.drawing()))
        more["sheet"] = str(sheet)
    with _VideoFile(job.folder, rate) as file:
        for frame in row.drawn_frames(**options):
            file.write(frame)
        scale = row.colour_scale("each") if row.status == "ok" else None
        return _finished(file, found, job, row, scale, status=row.status, labels={row.name: file.frames}, **more)


def _frame(row: Explanation, drawing: dict[str, Any]) -> Pixels:
    """Draw a frame; all frames of a video get the same size."""
    if drawing["style"] != "figure":
        return row.overlay(**drawing)
    figure = {name: drawing[name] for name in ("colormap", "alpha", "opacity", "scale")}
    return row.captioned(side=side_within(drawing["max_side"]), fixed=True, **figure)


def _noted(video: Path, frames: Iterable[tuple[ClipFrame, Pixels]], waiting: deque[Pixels]) -> Iterator[Image.Image]:
    """Yield frames as pictures, and note the pixels of those whose rows have not come back.

    The file name of a picture becomes the source of its explanation.
    """
    for frame, pixels in frames:
        waiting.append(pixels)
        picture = Image.fromarray(pixels)
        picture.filename = f"{video.name}, frame {frame.number} at {frame.time:.2f} s"  # type: ignore[attr-defined]
        yield picture


def _without_target(pixels: Pixels, reason: str, drawing: dict[str, Any]) -> Pixels:
    """Draw a frame in which the target does not exist, as the other frames are drawn."""
    style, most = drawing["style"], drawing["max_side"]
    if style == "figure":
        caption = Caption("no such target in this frame", ("", ""), meaning=reason)
        return compose(fitted(pixels, side_within(most)), caption, fixed=True)
    picture = pixels if most is None else limited(pixels, most)
    return render(picture, np.zeros(size_of(picture), np.float32), None, style=style, colormap=drawing["colormap"])


class _VideoFile(AbstractContextManager["_VideoFile"]):
    """An MP4 file that is written under another name until it is finished, and removed if it never is."""

    def __init__(self, folder: Path, rate: float) -> None:
        self.rate = rate
        self.frames = 0
        self._size: tuple[int, int] | None = None
        self._unfinished = folder / f".camkit-{secrets.token_hex(8)}.mp4"
        self._writer: Any = None

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.release()
        self._unfinished.unlink(missing_ok=True)

    def write(self, pixels: Pixels) -> None:
        """Add a frame. All have the size of the first: one without heat may be drawn larger than one with it.

        Raises:
            OutputError: this OpenCV cannot write MP4 files.
        """
        height, width = pixels.shape[:2]
        if height % 2 or width % 2:  # the codec halves the resolution of colours: the last row or column is repeated
            pixels = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if self._writer is None:
            self._size = size = pixels.shape[1], pixels.shape[0]
            self._unfinished.parent.mkdir(parents=True, exist_ok=True)
            with quiet_decoders():
                # MPEG-4 Part 2: every build of OpenCV can write it, and every player plays it, though few browsers do.
                # Builds with H.264 are rare because of its licence.
                self._writer = cv2.VideoWriter(str(self._unfinished), cv2.VideoWriter.fourcc(*"mp4v"), self.rate, size)
            if not self._writer.isOpened():
                raise OutputError(f"cannot write MP4 files into {self._unfinished.parent}: this OpenCV has no encoder")
        if pixels.shape[1::-1] != self._size:  # the encoder would leave the frame out
            pixels = cv2.resize(pixels, self._size, interpolation=cv2.INTER_AREA)
        self._writer.write(cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))
        self.frames += 1

    def finish(self, file: Path) -> None:
        """Close the file, mark it as camkit's, and give it its name.

        Raises:
            OutputError: the file is empty, as on a full disk, or cannot be renamed.
        """
        self._writer.release()
        if not self._unfinished.is_file() or not self._unfinished.stat().st_size:
            raise OutputError(f"cannot write {file}: nothing was written; perhaps the disk is full")
        with as_error(OutputError, lambda error: f"cannot write {file}: {getattr(error, 'strerror', None) or error}"):
            mark_video(self._unfinished)
            self._unfinished.replace(file)


def _frames_of(video: Path, every: int) -> Iterator[Image.Image]:
    """Yield every ``every``-th frame of a video, up to where it breaks off."""
    with opened_video(video, every) as opened, contextlib.suppress(ImageError):
        yield from _noted(video, opened.frames, deque(maxlen=0))
