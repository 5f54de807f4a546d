"""Explains a list of picture files and writes the drawings, as a stream."""

from __future__ import annotations

import functools
import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from camkit.drawing import overlay
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, InputError, OutputError, RunError
from camkit.explainer import explain_many
from camkit.explanation import ColourScale, Explanation
from camkit.images.files import check_folder
from camkit.images.video import is_video
from camkit.methods import MethodLike
from camkit.models.loaded import LoadedModel
from camkit.scale.video import FRAMES_PER_PASS, Explained, WrittenVideo, draw_video, frames_of
from camkit.targets import TargetLike
from camkit.targets.scores import Expands
from camkit.types import Failure, Fusion, Pixels, Precision, Scale

_LONGEST_SLUG = 30
"""Characters of a layer's or a target's name in the name of a drawing."""
_LONGEST_STEM = 120
"""Bytes of a picture's name in the name of its drawing; most file systems allow 255 bytes in all."""
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
        """Return the row as plain JSON values."""
        return {**self.explanation.to_dict(), "file": str(self.file)}


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
    one_scale: bool = False,
    every: int = 1,
) -> Iterator[Written | WrittenVideo | Failure]:
    """Explain picture files and write one drawing per picture and target into a folder; videos follow the pictures.

    Reading, computing and writing overlap. A picture that cannot be read, or a drawing that cannot be written, becomes
    a Failure in its place. A video or an animated picture becomes one drawn video.

    Args:
        model: a model from ``camkit.load_model``.
        pictures: the files, each listed once.
        out: the folder for the drawings; it is created if it does not exist.
        drawing: style, colours and their weight.
        method, targets, precision, batch_size, fuse: as for ``camkit.explain``.
        layers: the names of the layers to explain; None lets camkit choose.
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
    check_folder(out)
    files = _DrawingFiles(out, output_names(pictures), bool(layers), bool(targets), has_several)
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
    return draw_video(video, every, explained, draw, files.folder, file_for, captioned=drawing.style == "figure")


@dataclass(frozen=True)
class _DrawingFiles:
    """Names the file of each drawing: picture, method and, if the caller chose them, layer and target."""

    folder: Path
    stems: Mapping[Path, str]
    with_layer: bool
    with_target: bool
    with_rank: bool

    def file_for_video(self, video: Path, row: Explanation) -> Path:
        """Return the file for a video, given one of its explanations."""
        return self.file_for(replace(row, source=str(video)), 1).with_suffix(".mp4")

    def file_for(self, row: Explanation, rank: int) -> Path:
        """Return the file for an explanation; ``rank`` is its place among those of its picture, from 1."""
        parts = [self.stems[Path(row.source)], re.sub(_NOT_IN_METHOD_NAMES, "", row.method)]
        if self.with_layer:
            parts.append(_slug(row.layer))
        if self.with_target:
            parts.append(f"{rank}-{_slug(row.name)}" if self.with_rank else _slug(row.name))
        return self.folder / f"{'.'.join(parts)}.png"


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
            yield functools.partial(_write, row, files.file_for(row, rank), used, pictures), True


def _unchanged(failure: Failure) -> Failure:
    return failure


def _write(explanation: Explanation, file: Path, drawing: Drawing, pictures: set[str]) -> Written | Failure:
    """Draw an explanation into a file, unless that is one of the pictures."""
    source = explanation.source
    if os.path.realpath(file) in pictures:
        return Failure(source, OutputError(f"{file} is itself a picture to explain; choose another folder"))
    try:
        return Written(explanation, explanation.save(file, **vars(drawing)), drawing)
    except CamkitError as error:
        return Failure(source, error)
    except Exception as error:
        return Failure(source, RunError(f"{file} could not be drawn: {type(error).__name__}: {error}"))


def output_names(pictures: Sequence[Path]) -> dict[Path, str]:
    """Return a unique name for each picture's drawings, the shortest that is unique.

    It is the stem, the whole name, or the folder's name before either; else the stem and a number.

    >>> output_names([Path("a/cat.png"), Path("b/cat.png"), Path("dog.png")])
    {PosixPath('a/cat.png'): 'a-cat', PosixPath('b/cat.png'): 'b-cat', PosixPath('dog.png'): 'dog'}
    """
    forms: tuple[Callable[[Path], str], ...] = (
        lambda path: _cut(path.stem),
        lambda path: _cut(path.name),
        lambda path: _cut(f"{path.absolute().parent.name}-{path.stem}"),
        lambda path: _cut(f"{path.absolute().parent.name}-{path.name}"),
    )
    counts = [Counter(form(path).casefold() for path in pictures) for form in forms]
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for number, path in enumerate(pictures, start=1):
        unique = (form(path) for form, count in zip(forms, counts, strict=True) if count[form(path).casefold()] == 1)
        numbered = (f"{_cut(path.stem)}-{n}" for n in itertools.count(number))
        name = next(form for form in itertools.chain(unique, numbered) if form.casefold() not in taken)
        taken.add(name.casefold())
        names[path] = name
    return names


def _cut(name: str) -> str:
    while len(os.fsencode(name)) > _LONGEST_STEM:
        name = name[:-1]
    return name


def _slug(text: str) -> str:
    text = re.sub(r"^- ", "minus ", text)  # the sign of a direction
    slug = re.sub(r"[^\w.-]+", "-", text).strip("-.") or "target"
    return (
        slug if len(slug) <= _LONGEST_SLUG else f"{slug[:_LONGEST_SLUG]}-{zlib.crc32(text.encode(errors='replace')):x}"
    )


def sheet_name(picture: Path, layer: str) -> str:
    """Return the file name for a sheet of feature maps.

    >>> sheet_name(Path("photos/cat.jpg"), "layer4.1.relu#2")
    'cat.features.layer4.1.relu-2.png'
    """
    return f"{_cut(picture.stem)}.features.{_slug(layer)}.png"
