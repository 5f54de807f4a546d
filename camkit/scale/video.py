"""Explains videos and animated pictures frame by frame, and writes the drawn frames as MP4 files."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import cv2
import numpy as np
from PIL import Image

from camkit.drawing.encode import mark_video
from camkit.drawing.figure import Caption, ColourScale, compose, fitted, side_within
from camkit.drawing.overlay import limited, render
from camkit.drawing.pixels import size_of
from camkit.errors import CamkitError, ImageError, InputError, OutputError, TargetError, advice
from camkit.explanation import Explanation
from camkit.images.files import names_file
from camkit.images.listing import FoundPicture
from camkit.images.video import Frame, opened_video, quiet_decoders
from camkit.scale.job import Drawing, Job, Scales, write_drawing
from camkit.types import Failure, Pixels

FRAMES_PER_PASS = 8
"""The most frames in one pass. A frame stays in memory until it is drawn, and a 4K frame takes 25 MB."""

_CODEC = "mp4v"
"""MPEG-4 Part 2: every build of OpenCV can write it, and every player plays it, though few browsers do. Builds with
H.264 are rare because of its licence."""

_CLIP_RATE = 4.0
"""Frames per second of a drawn clip of one frame."""

Explained: TypeAlias = Callable[[Iterable[Image.Image | Path]], Iterator[Explanation | Failure]]
"""Explains pictures as a stream, one row for each, with a Failure for a picture without the target."""


@dataclass(frozen=True, eq=False)
class WrittenVideo:
    """A video whose frames were drawn, and the file with the drawings.

    Attributes:
        source: the video.
        first: the explanation of its first frame with the target; of a clip, that of all frames.
        file: the drawn video.
        frames: how many frames were drawn.
        every: one of this many frames of the video was drawn.
        rate: frames per second of the drawn video.
        labels: in how many of the frames each target was explained, most frequent first.
        status: "ok" if any frame has evidence; otherwise why the first has none, as for a picture.
        scale: the scale that all frames share; None if each has its own.
        problem: a sentence if the video broke off, so that the drawn video is shorter; otherwise empty.
        sheet: for a model of clips, the file with all frames side by side, if the drawings go into a folder.
    """

    source: str
    first: Explanation
    file: Path
    frames: int
    every: int
    rate: float
    labels: dict[str, int]
    status: str = "ok"
    scale: ColourScale | None = None
    problem: str = ""
    sheet: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        scale = None if self.scale is None or self.status != "ok" else list(self.scale.limits)
        values = {name: getattr(self, name) for name in ("source", "frames", "every", "rate", "labels")}
        values |= {name: getattr(self.first, name) for name in ("layer", "layer_reason", "method")}
        values |= {"file": str(self.file), "scale": scale, "status": "error" if self.problem else self.status}
        values |= {} if self.sheet is None else {"sheet": str(self.sheet)}
        return {**values, "error": self.problem} if self.problem else values


def _frames_of(video: Path, every: int) -> Iterator[Image.Image]:
    """Yield every ``every``-th frame of a video, up to where it breaks off."""
    with opened_video(video, every) as opened, contextlib.suppress(ImageError):
        yield from _noted(video, opened.frames, deque(maxlen=0))


def draw(found: FoundPicture, job: Job, explained: Explained, *, is_clip: bool = False) -> WrittenVideo | Failure:
    """Explain a video and draw it; of a model of clips, the frames that the model saw. An error becomes a Failure."""
    video = str(found.path)
    if job.has_several_targets:
        return Failure(video, InputError(f"{video} is a video, and a video shows one target"))
    try:
        return (_draw_clip if is_clip else _draw_video)(found, job, explained)
    except CamkitError as error:
        return Failure(video, error)


def _draw_video(found: FoundPicture, job: Job, explained: Explained) -> WrittenVideo:
    """Explain every ``job.every``-th frame of a video, and write the drawn frames as an MP4 file of the same speed.

    A frame without the target, for example without a box of that class, is written without heat. If the video breaks
    off, what was read is written, and the row says so.
    """
    video, every = found.path, job.every
    scales = Scales(explained(_frames_of(video, every)) if job.drawing.one_scale else ())
    labels: Counter[str] = Counter()
    statuses: set[str] = set()
    first: Explanation | None = None
    absent: Failure | None = None
    problem = ""
    with opened_video(video, every) as opened, _VideoFile(job.folder, opened.rate / every) as file:
        waiting: deque[Pixels] = deque()
        try:
            for row in explained(_noted(video, opened.frames, waiting)):
                pixels = waiting.popleft()
                if isinstance(row, Explanation):
                    first = first or row
                    labels[row.name] += 1
                    statuses.add(row.status)
                    file.write(_frame(row, job.drawing, scales.of(row.layer, row.method)))
                elif isinstance(row.error, TargetError):
                    absent = row
                    file.write(_without_target(pixels, str(row.error), job.drawing))
                else:
                    raise row.error
        except ImageError as error:
            if first is None:
                raise
            problem = str(error)
        if first is None:
            assert absent is not None
            raise absent.error
        written = job.file_for(first, found, 1, ".mp4")
        file.finish(written)
    return WrittenVideo(
        source=str(video),
        file=written,
        frames=file.frames,
        every=every,
        rate=file.rate,
        labels=dict(labels.most_common()),
        first=first,
        status="ok" if "ok" in statuses else first.status,
        scale=scales.of(first.layer, first.method),
        problem=problem,
    )


def _draw_clip(found: FoundPicture, job: Job, explained: Explained) -> WrittenVideo:
    """Explain a video with a model of clips, and draw the frames that the model saw, as an MP4 file and as a sheet."""
    if job.every > 1:
        rest = advice("leave out every", "leave out --every")
        raise InputError(f"a model of clips chooses the frames itself; {rest}")
    (row,) = explained([found.path])
    if isinstance(row, Failure):
        raise row.error
    options = job.drawing.options()
    del options["max_side"]  # the frames have the size of the model's input
    first, last = row.frames[0].time or 0.0, row.frames[-1].time or 0.0
    rate = (len(row.frames) - 1) / (last - first) if last > first else _CLIP_RATE
    with _VideoFile(job.folder, rate) as file:
        for frame in row.drawn_frames(**options):
            file.write(frame)
        written = job.file_for(row, found, 1, ".mp4")
        file.finish(written)
    sheet: Path | None = None
    if job.out is not None and not names_file(job.out):
        sheet = job.file_for(row, found, 1, ".png")
        write_drawing(sheet, row.overlay(**job.drawing.options()))
    return WrittenVideo(
        source=str(found.path),
        file=written,
        frames=file.frames,
        every=1,
        rate=rate,
        labels={row.name: file.frames},
        first=row,
        status=row.status,
        scale=row.colour_scale("each"),
        sheet=sheet,
    )


def _frame(row: Explanation, drawing: Drawing, scale: ColourScale | None) -> Pixels:
    """Draw a frame; all frames of a video get the same size."""
    options = drawing.options(scale)
    if drawing.style != "figure":
        return row.overlay(**options)
    side = side_within(drawing.max_side)
    return row.captioned(colormap=drawing.colormap, alpha=drawing.alpha, scale=options["scale"], side=side, fixed=True)


def _noted(video: Path, frames: Iterable[Frame], waiting: deque[Pixels]) -> Iterator[Image.Image]:
    """Yield frames as pictures, and note the pixels of those whose rows have not come back.

    The file name of a picture becomes the source of its explanation.
    """
    for frame in frames:
        waiting.append(frame.pixels)
        picture = Image.fromarray(frame.pixels)
        picture.filename = f"{video.name}, frame {frame.number} at {frame.time:.2f} s"  # type: ignore[attr-defined]
        yield picture


def _without_target(pixels: Pixels, reason: str, drawing: Drawing) -> Pixels:
    """Draw a frame in which the target does not exist, as the other frames are drawn."""
    if drawing.style == "figure":
        caption = Caption("no such target in this frame", ("", reason))
        return compose(fitted(pixels, side_within(drawing.max_side)), caption, None, fixed=True)
    picture = pixels if drawing.max_side is None else limited(pixels, drawing.max_side)
    return render(picture, np.zeros(size_of(picture), np.float32), None, style=drawing.style, colormap=drawing.colormap)


class _VideoFile:
    """An MP4 file that is written under another name until it is finished, and removed if it never is."""

    def __init__(self, folder: Path, rate: float) -> None:
        self.rate = rate
        self.frames = 0
        self._size: tuple[int, int] | None = None
        self._unfinished = folder / f".camkit-{secrets.token_hex(8)}.mp4"
        self._writer: Any = None

    def __enter__(self) -> _VideoFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.release()
        self._unfinished.unlink(missing_ok=True)

    def write(self, pixels: Pixels) -> None:
        """Add a frame. All have the size of the first: one without heat may be drawn larger than one with it.

        Raises:
            OutputError: this OpenCV cannot write MP4 files.
        """
        pixels = _with_even_sides(pixels)
        if self._writer is None:
            self._size = size = pixels.shape[1], pixels.shape[0]
            self._unfinished.parent.mkdir(parents=True, exist_ok=True)
            with quiet_decoders():
                self._writer = cv2.VideoWriter(str(self._unfinished), cv2.VideoWriter.fourcc(*_CODEC), self.rate, size)
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
        try:
            mark_video(self._unfinished)
            self._unfinished.replace(file)
        except OSError as error:
            raise OutputError(f"cannot write {file}: {error.strerror or error}") from error


def _with_even_sides(pixels: Pixels) -> Pixels:
    """Repeat the last row or column of a frame with odd sides: the codec halves the resolution of colours."""
    height, width = pixels.shape[:2]
    if height % 2 == width % 2 == 0:
        return pixels
    return np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
