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
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from camkit import overlay
from camkit.background.render import seen
from camkit.costs import Costs, costs
from camkit.errors import CamkitError, InputError, ModelError, OutputError, RunError
from camkit.explanation import Explanation
from camkit.images import open_picture
from camkit.layers import Probe, probe
from camkit.models import about_channels, device_of
from camkit.pipeline import explain_many
from camkit.scenes import scene_paths
from camkit.streams import Task, in_order
from camkit.targets import TargetLike, above, box, contrast, direction, segment, similar_to, top
from camkit.values import Expands, Failure, Fusion, LoadedModel, Precision, Preprocess

_HALF = 127
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
    overlay.check_folder(out)
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


@dataclass(frozen=True)
class Asked:
    """What a command line asks to have explained; the best class where it asks for nothing."""

    target: Sequence[str] = ()
    top_k: int | None = None
    above: float | None = None
    versus: str | None = None
    direction: Literal["up", "down"] | None = None
    box: int | None = None
    near: tuple[float, float, float, float] | None = None
    mask: Path | None = None
    everywhere: bool = False
    similar_to: Path | None = None

    def check(self) -> None:
        """Check that the options go together.

        Raises:
            InputError: options that exclude each other, or one that needs another.
        """
        kinds = ("top_k", "above", "direction", "box", "near", "similar_to")
        given = [f"--{name.replace('_', '-')}" for name in kinds if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} exclude each other")
        if given and given != ["--direction"] and self.target:
            raise InputError(f"{given[0]} and --target exclude each other")
        of_one = {"--versus": self.versus, "--mask": self.mask, "--everywhere": self.everywhere or None}
        of_one = {name: value for name, value in of_one.items() if value is not None}
        if len(of_one) > 1 or (of_one and self.direction is not None):
            raise InputError(f"{' and '.join([*of_one, *given])} exclude each other")
        if of_one and len(self.target) != 1:
            raise InputError(f"{next(iter(of_one))} needs one --target")
        if self.direction is not None:
            self._number()

    def targets(self, pictures: Sequence[Path], preprocess: Preprocess | None) -> list[TargetLike] | None:
        """Return the targets.

        Args:
            pictures: that are explained; a mask is of one.
            preprocess: of the model, which the mask goes through as its picture does.

        Raises:
            InputError: as ``check``, or a mask that does not belong to the picture.
        """
        self.check()
        if self.direction is not None:
            return [self._number()]
        if self.target:
            return [self._class(one, pictures, preprocess) for one in self.target]
        makers: dict[str, Callable[[Any], Any]] = {
            "top_k": top,
            "above": above,
            "box": box,
            "near": lambda near: box(near=near),
            "similar_to": similar_to,
        }
        found = next(
            (make(getattr(self, name)) for name, make in makers.items() if getattr(self, name) is not None), None
        )
        return found if found is None or isinstance(found, list) else [found]

    def _number(self) -> TargetLike:
        """Return a target for one number of the output, the first if none is named."""
        if len(self.target) > 1 or not all(one.isdecimal() for one in self.target):
            raise InputError("--direction is of one number of the output: --target takes its index")
        return direction("+" if self.direction == "up" else "-", int(self.target[0]) if self.target else 0)

    def _mask(self, pictures: Sequence[Path], preprocess: Preprocess | None) -> Any:
        """Return the mask as the model's input shows it, resized and cropped as its picture is."""
        assert self.mask is not None
        mask = open_picture(self.mask).convert("L")
        if len(pictures) != 1 or preprocess is None:
            raise InputError("--mask is of one picture")
        size = open_picture(pictures[0]).size
        if mask.size != size:
            raise InputError(f"the mask is {mask.width}x{mask.height} pixels and the picture {size[0]}x{size[1]}")
        inside = seen(np.asarray(mask) > _HALF, preprocess) > 0.5
        if not bool(inside.any()):
            raise InputError(f"no white of {self.mask} is in the part of the picture that the model sees")
        return inside.numpy()

    def _class(self, name: str, pictures: Sequence[Path], preprocess: Preprocess | None) -> TargetLike:
        if self.versus is not None:
            return contrast(name, self.versus)
        if self.mask is not None:
            return segment(name, self._mask(pictures, preprocess))
        return segment(name, everywhere=True) if self.everywhere else name


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


def probe_model(model: LoadedModel) -> Probe:
    """Look at a model loaded by name with one picture, a drawn scene prepared as the model wants it."""
    inputs = _example(model)
    try:
        return probe(model.module, inputs)
    except RuntimeError as error:
        sentence = about_channels(model.module, inputs)
        if sentence is None:
            raise
        raise ModelError(sentence) from error


def model_costs(model: LoadedModel) -> Costs:
    """Return what the layers of a model loaded by name cost for that picture."""
    return costs(model.module, _example(model))


def _example(model: LoadedModel) -> torch.Tensor:
    if model.preprocess is None:
        raise ModelError(
            f"it is not known how pictures are prepared for {model.name}: give --size, --mean and --std, or a factory "
            "that returns the module and the function that prepares a PIL picture for it"
        )
    picture: Image.Image = open_picture(next(iter(scene_paths().values())))
    return model.preprocess(picture)[None].to(device_of(model.module))
