"""Explains a list of picture files and writes the drawings, as a stream."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camkit.drawing import overlay
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, InputError, OutputError, RunError
from camkit.explainer import explain_many
from camkit.explanation import Explanation
from camkit.images.files import check_folder, names_file
from camkit.methods import MethodLike
from camkit.models.loaded import LoadedModel
from camkit.scale.naming import drawing_names, free_file, slug, write_drawing
from camkit.targets import TargetLike
from camkit.targets.scores import Expands
from camkit.types import Failure, Fusion, Precision

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

    def __post_init__(self) -> None:
        overlay.check(self.style, self.colormap, self.alpha)


@dataclass(frozen=True, eq=False)
class Written:
    """An explanation and the file with its drawing."""

    explanation: Explanation
    file: Path

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
    places: Mapping[Path, Path] | None = None,
    about: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Iterator[Written | Failure]:
    """Explain picture files and write one drawing per picture and target into a folder.

    Reading, computing and writing overlap. A picture that cannot be read, or a drawing that cannot be written, becomes
    a Failure in its place.

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

    Raises:
        InputError: something in the call is wrong, or the folder cannot be written to. Nothing was computed then.
    """
    explained = explain_many(
        model,
        pictures,
        layers or None,
        method=method,
        target=list(targets) if targets else None,
        precision=precision,
        batch_size=batch_size,
        fuse=fuse,
        on_error="yield",
    )
    is_one_file = names_file(out)
    has_several = targets is not None and (len(targets) > 1 or any(isinstance(target, Expands) for target in targets))
    if is_one_file and (len(pictures) != 1 or has_several):
        what = "several targets" if has_several else f"{len(pictures)} pictures"
        raise InputError(f"{out} is one file, but there are {what}; name a folder")
    check_folder(out.parent if is_one_file else out)
    requested = {
        "model": model.name,
        **(about or {}),
        **{name: value if isinstance(value, str) else f"{name}-{value}" for name, value in vars(drawing).items()},
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
    tasks = _drawing_tasks(explained, files, drawing, {os.path.realpath(path) for path in pictures})
    return in_order(tasks, workers=_WRITERS, ahead=_MOST_UNWRITTEN, prompt=True)


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

    def file_for(self, row: Explanation, rank: int) -> tuple[Path, dict[str, str]]:
        """Return the file for an explanation, and what it shows.

        Args:
            row: the explanation.
            rank: its place among those of its picture, from 1.

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
        return free_file(self.out, self.names[picture], words, shows, overwrite=self.overwrite), shows


def _drawing_tasks(
    rows: Iterator[Explanation | Failure], files: _DrawingFiles, drawing: Drawing, pictures: set[str]
) -> Iterator[Task[Written | Failure]]:
    """Return for each row the task that draws it, to be run in another thread; a failure is passed on."""
    rank, source = 0, ""
    for row in rows:
        rank, source = rank + 1 if row.source == source else 1, row.source
        if isinstance(row, Failure):
            yield functools.partial(_unchanged, row), True
        else:
            yield functools.partial(_write, row, rank, files, drawing, pictures), True


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
    return Written(explanation, file)
