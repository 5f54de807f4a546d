"""Explains picture files and writes the drawings and a table, as a stream: memory does not grow with their number."""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from PIL import Image

from camkit.drawing import overlay
from camkit.drawing.encode import JPEG_SUFFIXES
from camkit.drawing.pixels import bytes_of
from camkit.engine.passes import cores_of_a_pass
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, InputError, OutputError, RunError
from camkit.explainer import explain_many
from camkit.explanation import ColourScale, Explanation
from camkit.images.files import check_folder, names_file, refuse_input, refuse_other_file
from camkit.images.listing import Found, Pictures
from camkit.images.references import chosen
from camkit.images.video import is_video
from camkit.kit.fingerprint import digest, digest_of_code, fingerprint
from camkit.methods import AUTO, MethodLike
from camkit.models import device_of, usual_batch_size
from camkit.models.loaded import LoadedModel
from camkit.scale.naming import drawing_names, free_file, note_of, picture_name, slug, write_drawing
from camkit.scale.schema import Row, row_of, row_of_failure
from camkit.scale.table import Table
from camkit.scale.video import FRAMES_PER_PASS, Explained, WrittenVideo, draw_video, frames_of
from camkit.targets import TargetLike
from camkit.targets.scores import Expands
from camkit.types import Failure, Fusion, Pixels, Precision, Progress, Scale, Smoothing

_NOT_IN_METHOD_NAMES = r"[^\w+.-]"
"""Characters that no registered method has in its name, but a function may: a lambda is called "<lambda>"."""
_WRITERS = max(2, min(4, os.cpu_count() or 1))
"""Threads that draw and write."""
_MOST_UNWRITTEN = 64
_MOST_UNWRITTEN_BYTES = 72 * 2**20
"""The most explanations that may wait to be drawn, and the most bytes of their pictures, so that memory stays bounded.
The bytes suffice for small pictures, or for a photo of 12 megapixels."""

Format: TypeAlias = Literal["jpg", "png"]

_PHOTOGRAPHIC = ("overlay", "side-by-side")
"""The styles whose drawings are mainly the picture itself, at its own size."""


@dataclass(frozen=True)
class Drawing:
    """How to draw the heat.

    Attributes:
        style, colormap, alpha, scale, max_side: as for ``Explanation.overlay``.
        format: "jpg" or "png"; None writes overlays of a JPEG as JPEG, and everything else as PNG, which keeps the
            edges of text and colours sharp.

    Raises:
        InputError: the style, the colormap or the format is unknown, or alpha or max_side is out of range.
    """

    style: str = "overlay"
    colormap: str = "turbo"
    alpha: float = 0.5
    scale: Scale | ColourScale = "shared"
    max_side: int | None = None
    format: Format | None = None

    def __post_init__(self) -> None:
        overlay.check(self.style, self.colormap, self.alpha, self.max_side)
        if self.format is not None and self.format not in get_args(Format):
            raise InputError(f"format must be {' or '.join(get_args(Format))}, not {self.format!r}")

    def options(self, scale: Scale | ColourScale | None = None) -> dict[str, Any]:
        """Return the arguments for ``Explanation.overlay``, with another scale if one is given."""
        named = {name: value for name, value in vars(self).items() if name != "format"}
        return named if scale is None else {**named, "scale": scale}

    def words(self, *, one_scale: bool) -> dict[str, str]:
        """Return what decides a drawing, as words for the names of files."""
        return {
            "style": self.style,
            "colormap": self.colormap,
            "alpha": f"alpha-{self.alpha}",
            "scale": "shared-by-all" if one_scale else str(self.scale),
            "size": "" if self.max_side is None else f"side-{self.max_side}",
        }

    def suffix_for(self, picture: str) -> str:
        """Return the suffix of the drawing of a picture."""
        is_jpeg = os.path.splitext(picture)[1].lower() in JPEG_SUFFIXES  # noqa: PTH122 - a source may be no path
        return f".{self.format or ('jpg' if is_jpeg and self.style in _PHOTOGRAPHIC else 'png')}"


@dataclass(frozen=True, eq=False)
class Written:
    """An explanation, and what was written of it.

    Attributes:
        explanation: the explanation.
        file: the file with its drawing; None if nothing was drawn.
        drawing: how it was drawn.
        row: its row in the table; None if there is no table.
        is_reduced: whether the drawing is smaller than the picture because of ``max_side``.
    """

    explanation: Explanation
    file: Path | None
    drawing: Drawing
    row: Row | None = None
    is_reduced: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values; "scale" has the value of the strongest colour for each layer."""
        is_coloured = self.file is not None and self.explanation.status == "ok"
        scale = list(self.explanation.colour_scale(self.drawing.scale).limits) if is_coloured else None
        file = None if self.file is None else str(self.file)
        return {**self.explanation.to_dict(), "scale": scale, "file": file}


def explain_files(
    model: LoadedModel,
    pictures: Pictures | Iterable[Path],
    out: Path | None,
    drawing: Drawing,
    *,
    method: MethodLike | None = None,
    layers: Sequence[str] | None = None,
    targets: Sequence[TargetLike] | None = None,
    precision: Precision = "fp32",
    batch_size: int | None = None,
    fuse: Fusion = "mean",
    smooth: Smoothing | None = None,
    references: Path | None = None,
    about: Mapping[str, str] | None = None,
    overwrite: bool = False,
    one_scale: bool = False,
    every: int = 1,
    progress: Progress | None = None,
    table: Path | None = None,
    resume: bool = False,
    draft: bool = False,
    rows_per_part: int | None = None,
    elsewhere: Callable[..., Iterator[Explanation | Failure]] | None = None,
) -> Run:
    """Explain picture files and write one drawing per picture and target into a folder; videos follow the pictures.

    Reading, computing, drawing and writing overlap. The pictures are listed while they are explained, and memory grows
    neither with their number nor with their size. A picture that cannot be read, or a drawing that cannot be written,
    becomes a Failure in its place. A video or an animated picture becomes one drawn video. With a table, a video is a
    Failure, and the first frame of an animated picture is explained.

    The name of a drawing consists of its picture's name, the method and, if the caller chose them, the layer and the
    target. If a file of that name shows something else, the new name also says what differs, such as the model or the
    style.

    Args:
        model: a model from ``camkit.load_model``.
        pictures: the files.
        out: the folder for the drawings, which is created if it does not exist; or a file such as "heat.png" for one
            picture with one target; or None to draw nothing.
        drawing: style, colours and their weight, size and type.
        method, targets, precision, batch_size, fuse, smooth, references, progress: as for ``camkit.explain``.
        layers: the names of the layers to explain; None lets camkit choose.
        about: further settings that distinguish a drawing from others of the same name, such as the weights.
        overwrite: replace files that show something else, without adding to their names; replace the table.
        one_scale: draw all pictures on one scale, and all frames of a video on one. Each is explained twice then: the
            first time to find the largest value.
        every: draw one of this many frames of a video.
        table: a file ending in .parquet or .csv for the results; see ``camkit.scale.table``. A drawing that cannot be
            written leaves no row, so that a resumed run draws it again.
        resume: continue the table if it exists: pictures that have their rows in it are left out.
        draft: as for ``camkit.explain_many``.
        rows_per_part: the most rows that are written to the table at a time; None for the usual number.
        elsewhere: explains the pictures, such as ``Cluster.explain``; None explains them in this process.

    Raises:
        InputError: something in the call is wrong, the table belongs to a run with other settings, or the folder cannot
            be written to. In these cases, nothing has been computed.
        OutputError: while it runs: the table cannot be written.
    """
    pictures = pictures if isinstance(pictures, Pictures) else Pictures(pictures)
    options: dict[str, Any] = {
        "target_layer": layers or None,
        "method": method,
        "target": list(targets) if targets else None,
        "precision": precision,
        "fuse": fuse,
        "smooth": smooth,
        "references": references,
        "progress": progress,
        "draft": draft,
    }
    explained = functools.partial(explain_many, model, on_error="yield", **options)
    has_several = targets is not None and (len(targets) > 1 or any(isinstance(target, Expands) for target in targets))
    video = None if table else next((found.path for found in pictures.named() if is_video(found.path)), None)
    if every < 1:
        raise InputError(f"every must be a number of frames, at least 1, not {every}")
    if resume and table is None:
        raise InputError("to resume a run, name the table that says what is finished")
    if out is None and table is None:
        raise InputError("name a table for the results if you draw nothing")
    if video is not None and has_several:
        raise InputError(f"{video} is a video, and a video shows one target; explain the targets one by one")
    batch_size = usual_batch_size(device_of(model.module)) if batch_size is None else batch_size
    explained([], batch_size=batch_size)  # checks the arguments
    if out is not None:
        refuse_other_file(out)
        if names_file(out):
            _check_one_file(out, pictures, drawing.format, is_video=video is not None, has_several=has_several)
        check_folder(out.parent if names_file(out) else out)
    results = None
    if table is not None:
        settings = {
            "method": method or AUTO.name,
            "layers": layers,
            "targets": targets,
            "precision": precision,
            "fuse": fuse,
            "smooth": smooth,
        }
        if references is not None:
            settings["references"] = digest(Path(str(file)).read_bytes() for file in chosen(references)[0])
        drawn = {"drawings": None if out is None else {**vars(drawing), "one scale": one_scale}}
        code = digest_of_code(model, method, targets)
        made_with = fingerprint(model, **settings, draft=draft, **drawn, code=code)
        part = {} if rows_per_part is None else {"rows": rows_per_part}
        results = Table(table, made_with, resume=resume, overwrite=overwrite and not resume, **part)
    files = _DrawingFiles(
        out,
        pictures,
        drawing_names({found.path: found.place for found in pictures.named()}),
        {
            "model": model.name,
            **(about or {}),
            **drawing.words(one_scale=one_scale),
            "every": f"every-{every}",
            "draft": "draft" if draft else "",
        },
        with_layer=bool(layers),
        with_target=bool(targets),
        with_rank=has_several,
        overwrite=overwrite,
    )
    stills = Stills(pictures, results)

    def find_scales() -> Scales:
        return _one_scale(stream(stills.all(), batch_size=batch_size)) if one_scale and out is not None else {}

    writer = _Writer(files, drawing, with_row=table is not None)
    stream = explained if elsewhere is None else functools.partial(elsewhere, **options)
    of_stills = functools.partial(stream, batch_size=batch_size)
    of_frames = functools.partial(explained, batch_size=min(batch_size, FRAMES_PER_PASS))
    drawn_videos = (_drawn_video(found, every, of_frames, files, drawing, one_scale) for found in stills.videos)
    written = in_order(
        _tasks(of_stills, stills, writer, find_scales),
        workers=_WRITERS,
        ahead=max(_MOST_UNWRITTEN, 2 * batch_size),
        prompt=True,
        most=_MOST_UNWRITTEN_BYTES,
        cores=cores_of_a_pass(),
    )
    rows = (row for rows, _ in written for row in rows) if results is None else _tabled(written, results)
    return Run(_one_after_the_other(rows, drawn_videos), stills, drawing.max_side)


def _check_one_file(out: Path, pictures: Pictures, chosen: Format | None, *, is_video: bool, has_several: bool) -> None:
    """Refuse a file for the drawings unless there is one drawing, of another file, and the file has its type."""
    if has_several or len(pictures.first(2)) != 1:
        what = "several targets" if has_several else f"{pictures.count()} pictures"
        raise InputError(f"{out} is one file, but there are {what}; name a folder")
    suffix = out.suffix.lower()
    if (suffix == ".mp4") != is_video:
        raise InputError(f"{out} must end in .mp4 for a video, and in a type of picture such as .png for a picture")
    refuse_input(out, pictures.first(1))
    if chosen is not None and not is_video and suffix not in (JPEG_SUFFIXES if chosen == "jpg" else (".png",)):
        raise InputError(f"{out} does not end in .{chosen}, the format of the drawing; choose another name or format")


def _one_after_the_other(*parts: Iterator[Written | WrittenVideo | Failure]) -> Generator[Any, None, None]:
    """Chain iterators; closing the result closes the one that runs."""
    for rows in parts:
        yield from rows


class Run(Iterator["Written | WrittenVideo | Failure"]):
    """The rows of a run, each when it is finished; a context that ends the run.

    Attributes:
        stills: the pictures that are explained.
        max_side: the most pixels of a drawing's longer side; None for no limit.
    """

    def __init__(self, rows: Generator[Any, None, None], stills: Stills, max_side: int | None) -> None:
        self._rows, self.stills, self.max_side = rows, stills, max_side

    def __next__(self) -> Written | WrittenVideo | Failure:
        """Return the next row."""
        row: Written | WrittenVideo | Failure = next(self._rows)
        return row

    def close(self) -> None:
        """End the run; what is finished is written into the table."""
        self._rows.close()

    def __enter__(self) -> Run:
        """Return the run itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the run."""
        self.close()

    @property
    def skipped(self) -> int:
        """The pictures that were left out so far because the table has them."""
        return self.stills.skipped

    @property
    def failed_before(self) -> int:
        """The skipped pictures for which the table has only errors."""
        return self.stills.failed_before


class Stills:
    """The pictures that are to be explained, and the videos that were found among them.

    Attributes:
        videos: the videos, which are explained last.
        pending: the pictures whose rows have not come back.
        skipped: the pictures that were left out because the table has them.
        failed_before: the skipped pictures for which the table has only errors.
    """

    def __init__(self, pictures: Pictures, table: Table | None) -> None:
        self._pictures, self._table = pictures, table
        self.videos: list[Found] = []
        self.pending: deque[Found] = deque()
        self.skipped = self.failed_before = 0

    def paths(self) -> Iterator[Path]:
        """List the pictures that are not finished."""
        for found in self._pictures:
            if self._table is not None and self._table.has(found.path):
                self.skipped += 1
                self.failed_before += self._table.has_failed(found.path)
                continue
            if self._table is None and is_video(found.path):
                self.videos.append(found)
            else:
                self.pending.append(found)
                yield found.path

    def all(self) -> Iterator[Path]:
        """List all pictures, including the finished ones, but no videos."""
        return (found.path for found in self._pictures if self._table is not None or not is_video(found.path))

    def of(self, row: Explanation) -> Found:
        """Return the picture of a row; rows come in the order of the pictures."""
        while str(self.pending[0].path) != row.source:
            self.pending.popleft()
        return self.pending[0]


class _Undrawn(Failure):
    """A picture that was explained, but could not be drawn."""


def _tabled(written: Iterator[tuple[list[Written | Failure], int]], table: Table) -> Iterator[Written | Failure]:
    """Pass rows on, and add the rows of each picture to the table, with the number of their pass.

    A picture that lacks a drawing is not finished, so none of its rows is added.
    """
    waiting: list[Written | Failure] = []
    pass_of_waiting = 0

    def add() -> None:
        if not any(isinstance(row, _Undrawn) for row in waiting):
            for row in waiting:
                table.add(row_of_failure(row) if isinstance(row, Failure) else _row_in(row), pass_of_waiting)
        waiting.clear()

    with table:
        for rows, number in written:
            if waiting and _source_of(rows[0]) != _source_of(waiting[0]):
                add()
            for row in rows:
                waiting.append(row)
                yield row
            pass_of_waiting = number
        add()


def _row_in(written: Written) -> Row:
    assert written.row is not None
    return written.row


def _source_of(row: Written | Failure) -> str:
    return row.source if isinstance(row, Failure) else row.explanation.source


ScaleKey: TypeAlias = tuple[str, str]
"""A layer and a method: maps of another layer or method have other units."""
Scales: TypeAlias = "dict[ScaleKey, ColourScale]"


def _scale_key(row: Explanation) -> ScaleKey:
    return row.layer, row.method


def _one_scale(rows: Iterable[Explanation | Failure]) -> Scales:
    """Return the scale that reaches to the largest value of all maps, for each layer and method."""
    scales: Scales = {}
    for row in rows:
        if isinstance(row, Explanation):
            scales[_scale_key(row)] = row.colour_scale("each").with_more(scales.get(_scale_key(row)))
    return scales


def _drawn_video(
    found: Found, every: int, explained: Explained, files: _DrawingFiles, drawing: Drawing, one_scale: bool
) -> WrittenVideo | Failure:
    scales: Scales = {}
    video = found.path

    def draw(row: Explanation) -> Pixels:
        settings = drawing.options(scales.get(_scale_key(row)))
        if drawing.style != "figure":
            return row.overlay(**settings)
        return row.captioned(colormap=drawing.colormap, alpha=drawing.alpha, scale=settings["scale"], fixed=True)

    if files.with_rank:
        return Failure(str(video), InputError(f"{video} is a video, and a video shows one target"))
    try:
        if one_scale:
            scales = _one_scale(explained(frames_of(video, every)))
    except CamkitError as error:
        return Failure(str(video), error)
    file_for = functools.partial(files.file_for_video, found)
    row = draw_video(video, every, explained, draw, files.folder, file_for, captioned=drawing.style == "figure")
    return row if isinstance(row, Failure) else replace(row, scale=scales.get((row.layer, row.method)))


@dataclass(frozen=True)
class _DrawingFiles:
    """Names the file of each drawing.

    Attributes:
        out: the folder, or the one file; None if nothing is drawn.
        pictures: the pictures to explain, none of which is replaced.
        names: where the drawings of the pictures that were named themselves lie below the folder, without the method.
        requested: what decides a drawing besides its picture, method, layer and target, as words for its name.
        with_layer, with_target: whether the caller chose them, so that they belong to the name.
        with_rank: whether a picture has several targets, which are numbered.
        overwrite: whether a file that shows something else may be replaced.
    """

    out: Path | None
    pictures: Pictures
    names: Mapping[Path, Path]
    requested: Mapping[str, str]
    with_layer: bool
    with_target: bool
    with_rank: bool
    overwrite: bool

    @property
    def folder(self) -> Path:
        """The folder of all drawings."""
        assert self.out is not None
        return self.out.parent if names_file(self.out) else self.out

    def file_for_video(self, video: Found, row: Explanation) -> tuple[Path, str]:
        """Return the file for a video, given one of its explanations, and a note on what it shows."""
        file, shows = self.file_for(replace(row, source=str(video.path)), video, 1, ".mp4")
        return file, note_of(shows)

    def file_for(self, row: Explanation, found: Found, rank: int, suffix: str) -> tuple[Path, dict[str, str]]:
        """Return the file for an explanation, and what it shows.

        Args:
            row: the explanation.
            found: its picture.
            rank: its place among the explanations of its picture, from 1.
            suffix: the type of the drawing.

        Raises:
            OutputError: as ``free_file``, or the file is one of the pictures to explain.
        """
        assert self.out is not None
        words = [re.sub(_NOT_IN_METHOD_NAMES, "", row.method)]
        if self.with_layer:
            words.append(slug(row.layer))
        if self.with_target:
            words.append(f"{rank}-{slug(row.name)}" if self.with_rank else slug(row.name))
        shows = {"picture": str(found.path.absolute()), "name": ".".join(words), **self.requested}
        name = self.names.get(found.path) or found.place.with_name(picture_name(found.place))
        name = name.with_suffix("") if name.suffix == suffix == ".mp4" else name
        file = free_file(self.out, name, words, shows, suffix, overwrite=self.overwrite)
        if os.path.lexists(file) and file in self.pictures:
            raise OutputError(f"{file} is itself a picture or video to explain; choose another folder")
        return file, shows


def _tasks(
    explained: Callable[..., Iterator[Explanation | Failure]],
    stills: Stills,
    writer: _Writer,
    find_scales: Callable[[], Scales],
) -> Iterator[Task[tuple[list[Written | Failure], int]]]:
    """Return the tasks that draw the rows in other threads, each of which returns a row with the number of its pass."""
    scales = find_scales()
    rank, source, number = 0, "", 0

    def on_pass() -> None:
        nonlocal number
        number += 1

    for row in explained(stills.paths(), on_pass=on_pass):
        is_first = row.source != source
        rank, source = 1 if is_first else rank + 1, row.source
        size = 0
        if isinstance(row, Failure):
            write = functools.partial(writer.pass_on, row, number)
        else:
            size = bytes_of(row.shown) if is_first and isinstance(row.shown, Image.Image) else 0
            write = functools.partial(writer.write_one, row, number, stills.of(row), scales, rank)
        yield Task(write, in_thread=True, size=size)


@dataclass(frozen=True)
class _Writer:
    """Draws explanations into files, and makes their rows for the table."""

    files: _DrawingFiles
    drawing: Drawing
    with_row: bool

    def pass_on(self, failure: Failure, number: int) -> tuple[list[Written | Failure], int]:
        """Return a failure with the number of its pass."""
        return [failure], number

    def write_one(
        self, row: Explanation, number: int, found: Found, scales: Scales, rank: int
    ) -> tuple[list[Written | Failure], int]:
        """Write the drawing of an explanation, and return its row with the number of its pass."""
        return [self.write(row, found, rank, scales.get(_scale_key(row)))], number

    def write(self, explanation: Explanation, found: Found, rank: int, scale: ColourScale | None) -> Written | Failure:
        """Write the drawing of an explanation, and return its row."""
        file = None
        drawing = self.drawing if scale is None else replace(self.drawing, scale=scale)
        try:
            if self.files.out is not None:
                suffix = drawing.suffix_for(explanation.source)
                file, shows = self.files.file_for(explanation, found, rank, suffix)
                write_drawing(file, explanation.overlay(**drawing.options()), shows)
            row = row_of(explanation, file) if self.with_row else None
        except CamkitError as error:
            return _Undrawn(explanation.source, error)
        except Exception as error:
            return _Undrawn(explanation.source, RunError(f"it could not be drawn: {type(error).__name__}: {error}"))
        is_reduced = file is not None and self._is_reduced(explanation)
        return Written(explanation.released(found.path), file, drawing, row, is_reduced)

    def _is_reduced(self, explanation: Explanation) -> bool:
        most, size = self.drawing.max_side, explanation.picture_size
        return most is not None and size is not None and self.drawing.style in _PHOTOGRAPHIC and max(size) > most
