"""Explains a list of files and writes the drawn pictures, as a stream."""

from __future__ import annotations

import functools
import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camkit.drawing import overlay
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, OutputError, RunError
from camkit.explainer import explain_many
from camkit.explanation import Explanation
from camkit.images.files import check_folder
from camkit.models.loaded import LoadedModel
from camkit.targets import TargetLike
from camkit.targets.scores import Expands
from camkit.types import Failure, Fusion, Precision

_LONGEST_SLUG = 30
_LONGEST_STEM = 120
"""Bytes of a picture's name that its output's name keeps; most file systems allow 255 in all."""


@dataclass(frozen=True)
class Drawing:
    """How pictures are drawn; checked when it is made.

    Raises:
        InputError: an unknown style or colormap, or alpha out of range.
    """

    style: str = "overlay"
    colormap: str = "turbo"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        overlay.check(self.style, self.colormap, self.alpha)


@dataclass(frozen=True, eq=False)
class Written:
    """An explanation and the file its picture was written to."""

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
    method: str | None = None,
    layers: Sequence[str] | None = None,
    targets: Sequence[TargetLike] | None = None,
    precision: Precision = "fp32",
    batch_size: int = 32,
    fuse: Fusion = "mean",
) -> Iterator[Written | Failure]:
    """Explain picture files and write one drawn picture per target into a folder.

    Reading, computing, and drawing and writing overlap. A picture that cannot be read, or a file that cannot be
    written, becomes a Failure in its place.

    Args:
        model: as ``camkit.load_model`` gives it.
        pictures: files; each must be listed once.
        out: the folder; it is made.
        drawing: style, colours and their weight.
        method, targets, precision, batch_size, fuse: as for ``camkit.explain``.
        layers: names of the layers to explain; chosen when None.

    Raises:
        InputError: something in the call is wrong, or the folder cannot be written to; nothing has been computed then.
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
    check_folder(out)
    names = output_names(pictures)
    sources = {path.resolve() for path in pictures}
    several = targets is not None and (len(targets) > 1 or any(isinstance(one, Expands) for one in targets))

    def write(row: Explanation | Failure, rank: int) -> Written | Failure:
        if isinstance(row, Failure):
            return row
        parts = [names[Path(row.source)], row.method]
        if layers:
            parts.append(_slug(row.layer))
        if targets:
            parts.append(f"{rank}-{_slug(row.name)}" if several else _slug(row.name))
        file = out / f"{'.'.join(parts)}.png"
        if file.resolve() in sources:
            return Failure(row.source, OutputError(f"{file} is itself a picture to explain; choose another folder"))
        try:
            return Written(row, row.save(file, **vars(drawing)))
        except CamkitError as error:
            return Failure(row.source, error)
        except Exception as error:
            return Failure(row.source, RunError(f"{file} could not be drawn: {type(error).__name__}: {error}"))

    def tasks() -> Iterator[Task[Written | Failure]]:
        rank, source = 0, ""
        for row in explained:
            rank, source = rank + 1 if row.source == source else 1, row.source
            yield functools.partial(write, row, rank), True

    return in_order(tasks(), workers=2, ahead=8, prompt=True)


def output_names(pictures: Sequence[Path]) -> dict[Path, str]:
    """Name each picture's output: its stem, its name, or its folder's and its name where unique; else a number.

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
        unique = (form(path) for form, known in zip(forms, counts, strict=True) if known[form(path).casefold()] == 1)
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
    text = re.sub(r"^- ", "minus ", text)  # the direction
    slug = re.sub(r"[^\w.-]+", "-", text).strip("-.") or "target"
    return (
        slug if len(slug) <= _LONGEST_SLUG else f"{slug[:_LONGEST_SLUG]}-{zlib.crc32(text.encode(errors='replace')):x}"
    )


def sheet_name(picture: Path, layer: str) -> str:
    """Return the name of the file for a sheet of feature maps.

    >>> sheet_name(Path("photos/cat.jpg"), "layer4.1.relu#2")
    'cat.features.layer4.1.relu-2.png'
    """
    return f"{_cut(picture.stem)}.features.{_slug(layer)}.png"
