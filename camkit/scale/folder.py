"""Explains a list of picture files and writes the drawings, as a stream."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from camkit.drawing import overlay
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, InputError, OutputError, RunError
from camkit.explainer import explain_many
from camkit.explanation import ColourScale, Explanation
from camkit.images.files import check_folder, names_file
from camkit.images.video import is_video
from camkit.methods import MethodLike
from camkit.models.loaded import LoadedModel
from camkit.scale.naming import drawing_names, free_file, note_of, slug, write_drawing
from camkit.scale.video import FRAMES_PER_PASS, Explained, WrittenVideo, draw_video, frames_of
from camkit.targets import TargetLike
from camkit.targets.scores import Expands
from camkit.types import Failure, Fusion, Pixels, Precision, Scale

_NOT_IN_METHOD_NAMES = r"[^\w+.-]"
"""Characters that no registered method has in its name, but a function may: a lambda is called "<lambda>"."""
_WRITERS = 2
"""Threads that draw and write, while the model computes in the main thread."""
_MOST_UNWRITTEN = 8
"""Explanations that may wait to be drawn, so that memory stays bounded."""


@dataclass(frozen=True)
class Drawing:
    """How to draw the heat.

    Raises:
        InputError: the style or the colormap is unknown, or alpha is out of range.
    """

    style: str = "overlay"
    colormap: str = "turbo"
    alpha: float = 0.5
    scale: Scale | ColourScale = "shared"

    def __post_init__(self) -> None:
        overlay.check(self.style, self.colormap, self.alpha)


@dataclass(frozen=True, eq=False)
class Written:
    """An explanation, the file with its drawing, and how it was drawn."""

    explanation: Explanation
    file: Path
    drawing: Drawing

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values; "scale" has the value of the strongest colour for each layer."""
        is_coloured = self.explanation.status == "ok"
        scale = list(self.explanation.colour_scale(self.drawing.scale).limits) if is_coloured else None
        return {**self.explanation.to_dict(), "scale": scale, "file": str(self.file)}


def explain_files(
    model: LoadedModel,
    pictures: Sequence[Path],
    out: Path,
    drawing: Drawing,
    *,
    method: MethodLike | None = None,
    layers: Sequence[str] | None = None,
    targets: Sequence[TargetLike] | None = None,
    precision: Precision = "fp32",
    batch_size: int = 32,
    fuse: Fusion = "mean",
    places: Mapping[Path, Path] | None = None,
    about: Mapping[str, str] | None = None,
    overwrite: bool = False,
    one_scale: bool = False,
    every: int = 1,
) -> Iterator[Written | WrittenVideo | Failure]:
    """Explain picture files and write one drawing per picture and target into a folder; videos follow the pictures.

    Reading, computing and writing overlap. A picture that cannot be read, or a drawing that cannot be written, becomes
    a Failure in its place. A video or an animated picture becomes one drawn video.

    A drawing is called after its picture, the method and, if the caller chose them, the layer and the target. If a
    file of that name shows something else, what differs (such as the model or the style) is added to the name.

    Args:
        model: a model from ``camkit.load_model``.
        pictures: the files, each listed once.
        out: the folder for the drawings, which is created if it does not exist; or a file such as "heat.png" for one
            picture with one target.
        drawing: style, colours and their weight.
        method, targets, precision, batch_size, fuse: as for ``camkit.explain``.
        layers: the names of the layers to explain; None lets camkit choose.
        places: where each picture's drawings lie below ``out``, as ``find_places`` returns it; None for no subfolders.
        about: further settings that distinguish a drawing from others of the same name, such as the weights.
        overwrite: write into files that show something else, and name none differently.
        one_scale: draw all pictures on one scale, and all frames of a video on one. Each is explained twice then: the
            first time to find the largest value.
        every: every how many frames of a video one is drawn.

    Raises:
        InputError: something in the call is wrong, or the folder cannot be written to. Nothing was computed then.
    """
    explained = functools.partial(
        explain_many,
        model,
        target_layer=layers or None,
        method=method,
        target=list(targets) if targets else None,
        precision=precision,
        fuse=fuse,
        on_error="yield",
    )
    has_several = targets is not None and (len(targets) > 1 or any(isinstance(target, Expands) for target in targets))
    videos = [path for path in pictures if is_video(path)]
    moving = set(videos)
    stills = [path for path in pictures if path not in moving]
    if every < 1:
        raise InputError(f"every is a number of frames from 1, not {every}")
    if videos and has_several:
        raise InputError(f"{videos[0]} is a video, and a video shows one target; explain the targets one by one")
    explained([], batch_size=batch_size)  # checks the arguments
    is_one_file = names_file(out)
    if is_one_file and (len(pictures) != 1 or has_several):
        what = "several targets" if has_several else f"{len(pictures)} pictures"
        raise InputError(f"{out} is one file, but there are {what}; name a folder")
    if is_one_file and (out.suffix.lower() == ".mp4") != bool(videos):
        raise InputError(f"{out} must end in .mp4 for a video, and in the type of a picture for a picture")
    check_folder(out.parent if is_one_file else out)
    requested = {
        "model": model.name,
        **(about or {}),
        "style": drawing.style,
        "colormap": drawing.colormap,
        "alpha": f"alpha-{drawing.alpha}",
        "scale": "shared-by-all" if one_scale else str(drawing.scale),
        "every": f"every-{every}",
    }
    files = _DrawingFiles(
        out,
        drawing_names(places or {picture: Path(picture.name) for picture in pictures}),
        requested,
        with_layer=bool(layers),
        with_target=bool(targets),
        with_rank=has_several,
        overwrite=overwrite,
    )
    of_stills = functools.partial(explained, stills, batch_size=batch_size)
    tasks = _drawing_tasks(of_stills, files, drawing, {os.path.realpath(path) for path in pictures}, one_scale)
    of_frames = functools.partial(explained, batch_size=min(batch_size, FRAMES_PER_PASS))
    drawn_videos = (_drawn_video(video, every, of_frames, files, drawing, one_scale) for video in videos)
    return itertools.chain(in_order(tasks, workers=_WRITERS, ahead=_MOST_UNWRITTEN, prompt=True), drawn_videos)


ScaleKey: TypeAlias = tuple[str, str]
"""A layer and a method: maps of others have other units."""


def _scale_key(row: Explanation) -> ScaleKey:
    return row.layer, row.method


def _one_scale(rows: Iterable[Explanation | Failure]) -> dict[ScaleKey, ColourScale]:
    """Return the scale that reaches to the largest value of all maps, for each layer and method."""
    scales: dict[ScaleKey, ColourScale] = {}
    for row in rows:
        if isinstance(row, Explanation):
            scales[_scale_key(row)] = row.colour_scale("each").with_more(scales.get(_scale_key(row)))
    return scales


def _drawn_video(
    video: Path, every: int, explained: Explained, files: _DrawingFiles, drawing: Drawing, one_scale: bool
) -> WrittenVideo | Failure:
    scales: dict[ScaleKey, ColourScale] = {}

    def draw(row: Explanation) -> Pixels:
        settings = vars(replace(drawing, scale=scales.get(_scale_key(row), drawing.scale)))
        if drawing.style != "figure":
            return row.overlay(**settings)
        del settings["style"]
        return row.captioned(**settings, fixed=True)

    try:
        if one_scale:
            scales = _one_scale(explained(frames_of(video, every)))
    except CamkitError as error:
        return Failure(str(video), error)
    file_for = functools.partial(files.file_for_video, video)
    row = draw_video(video, every, explained, draw, files.folder, file_for, captioned=drawing.style == "figure")
    return row if isinstance(row, Failure) else replace(row, scale=scales.get((row.layer, row.method)))


@dataclass(frozen=True)
class _DrawingFiles:
    """Names the file of each drawing.

    Attributes:
        out: the folder, or the one file.
        names: where each picture's drawings lie below the folder, without the method.
        requested: what decides a drawing besides its picture, method, layer and target, as words for its name.
        with_layer, with_target: whether the caller chose them, so that they belong to the name.
        with_rank: whether a picture has several targets, which are numbered.
        overwrite: whether a file that shows something else may be replaced.
    """

    out: Path
    names: Mapping[Path, Path]
    requested: Mapping[str, str]
    with_layer: bool
    with_target: bool
    with_rank: bool
    overwrite: bool

    @property
    def folder(self) -> Path:
        """The folder of all drawings."""
        return self.out.parent if names_file(self.out) else self.out

    def file_for_video(self, video: Path, row: Explanation) -> tuple[Path, str]:
        """Return the file for a video, given one of its explanations, and a note on what it shows."""
        file, shows = self.file_for(replace(row, source=str(video)), 1, ".mp4")
        return file, note_of(shows)

    def file_for(self, row: Explanation, rank: int, suffix: str = ".png") -> tuple[Path, dict[str, str]]:
        """Return the file for an explanation, and what it shows.

        Args:
            row: the explanation.
            rank: its place among those of its picture, from 1.
            suffix: the type of the drawing.

        Raises:
            OutputError: as ``free_file``.
        """
        picture = Path(row.source)
        words = [re.sub(_NOT_IN_METHOD_NAMES, "", row.method)]
        if self.with_layer:
            words.append(slug(row.layer))
        if self.with_target:
            words.append(f"{rank}-{slug(row.name)}" if self.with_rank else slug(row.name))
        shows = {"picture": str(picture.absolute()), "name": ".".join(words), **self.requested}
        name = self.names[picture]
        name = name.with_suffix("") if name.suffix == suffix == ".mp4" else name
        return free_file(self.out, name, words, shows, suffix, overwrite=self.overwrite), shows


def _drawing_tasks(
    explained: Callable[[], Iterator[Explanation | Failure]],
    files: _DrawingFiles,
    drawing: Drawing,
    pictures: set[str],
    one_scale: bool,
) -> Iterator[Task[Written | Failure]]:
    """Return for each row the task that draws it, to be run in another thread; a failure is passed on."""
    scales = _one_scale(explained()) if one_scale else {}
    rank, source = 0, ""
    for row in explained():
        rank, source = rank + 1 if row.source == source else 1, row.source
        if isinstance(row, Failure):
            yield functools.partial(_unchanged, row), True
        else:
            used = replace(drawing, scale=scales.get(_scale_key(row), drawing.scale))
            yield functools.partial(_write, row, rank, files, used, pictures), True


def _unchanged(failure: Failure) -> Failure:
    return failure


def _write(
    explanation: Explanation, rank: int, files: _DrawingFiles, drawing: Drawing, pictures: set[str]
) -> Written | Failure:
    """Draw an explanation into its file, unless that is one of the pictures."""
    source = explanation.source
    try:
        file, shows = files.file_for(explanation, rank)
        if os.path.realpath(file) in pictures:
            return Failure(source, OutputError(f"{file} is itself a picture to explain; choose another folder"))
        write_drawing(file, explanation.overlay(**vars(drawing)), shows)
    except CamkitError as error:
        return Failure(source, error)
    except Exception as error:
        return Failure(source, RunError(f"it could not be drawn: {type(error).__name__}: {error}"))
    return Written(explanation, file, drawing)
