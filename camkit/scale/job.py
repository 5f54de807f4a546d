"""A job: which pictures are explained and how, how they are drawn, and where the results go, under which names."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from camkit.drawing import overlay
from camkit.drawing.encode import JPEG_SUFFIXES, encode
from camkit.drawing.figure import ColourScale
from camkit.errors import InputError, OutputError, advice
from camkit.explanation import Explanation
from camkit.images.files import check_folder, is_drawing, names_file, refuse_input, refuse_other_file, write_file
from camkit.images.listing import FoundPicture, Pictures
from camkit.images.references import chosen
from camkit.images.video import is_video
from camkit.kit.fingerprint import Fingerprint, digest, fingerprint
from camkit.kit.picture_names import drawing_names, picture_name
from camkit.methods import AUTO, find_method
from camkit.models.loaded import LoadedModel
from camkit.targets.scores import Expands
from camkit.types import Failure, Pixels, Progress, Scale, Style

Format: TypeAlias = Literal["jpg", "png"]

_LONGEST_SLUG = 30
"""The most characters of a layer's or a target's name in the name of a drawing."""

_PHOTOGRAPHIC = ("overlay", "side-by-side")
"""The styles whose drawings are mainly the picture itself, at its own size."""


@dataclass(frozen=True)
class Drawing:
    """How to draw the heat.

    Attributes:
        style, colormap, alpha, scale, max_side: as for ``Explanation.overlay``.
        format: "jpg" or "png"; None writes overlays of a JPEG as JPEG, and everything else as PNG, which keeps the
            edges of text and colours sharp.
        one_scale: draw all pictures on one scale, and all frames of a video on one. Each is explained twice then: the
            first time to find the largest value.

    Raises:
        InputError: the style, the colormap or the format is unknown, or alpha or max_side is out of range.
    """

    style: Style = "overlay"
    colormap: str = "turbo"
    alpha: float = 0.5
    scale: Scale | ColourScale = "shared"
    max_side: int | None = None
    format: Format | None = None
    one_scale: bool = False

    def __post_init__(self) -> None:
        overlay.check(self.style, self.colormap, self.alpha, self.max_side)
        if self.format is not None and self.format not in get_args(Format):
            raise InputError(f"format must be {' or '.join(get_args(Format))}, not {self.format!r}")

    def options(self, scale: Scale | ColourScale | None = None) -> dict[str, Any]:
        """Return the arguments for ``Explanation.overlay``, with another scale if one is given."""
        names = ("style", "colormap", "alpha", "scale", "max_side")
        return {name: getattr(self, name) for name in names} | ({} if scale is None else {"scale": scale})

    def settings(self) -> dict[str, Any]:
        """Return what decides the drawings, for a fingerprint."""
        return {**self.options(), "format": self.format, "one scale": self.one_scale}

    def suffix_for(self, picture: str) -> str:
        """Return the suffix of the drawing of a picture."""
        is_jpeg = os.path.splitext(picture)[1].lower() in JPEG_SUFFIXES  # noqa: PTH122 - a source may be no path
        return f".{self.format or ('jpg' if is_jpeg and self.style in _PHOTOGRAPHIC else 'png')}"

    def reduces(self, explanation: Explanation) -> bool:
        """Tell whether the drawing of an explanation is smaller than its picture."""
        size = explanation.picture_size
        is_larger = self.max_side is not None and size is not None and max(size) > self.max_side
        return is_larger and self.style in _PHOTOGRAPHIC


class Scales:
    """The scales that reach to the largest value of all maps: one for each layer and method, whose units differ."""

    def __init__(self, rows: Iterable[Explanation | Failure] = ()) -> None:
        self._scales: dict[tuple[str, str], ColourScale] = {}
        for row in rows:
            if isinstance(row, Explanation):
                key = row.layer, row.method
                self._scales[key] = row.colour_scale("each").with_more(self._scales.get(key))

    def of(self, layer: str, method: str) -> ColourScale | None:
        """Return the scale of a layer and a method; None if there is none."""
        return self._scales.get((layer, method))


@dataclass(frozen=True)
class Job:
    """Pictures to explain, and where the results go.

    Attributes:
        pictures: the files.
        out: the folder for the drawings, which is created if it does not exist; or a file such as "heat.png" for one
            picture with one target; or None to draw nothing.
        how: how the pictures are explained: the arguments of ``camkit.explain_many``, in which targets are a list.
        drawing: how they are drawn.
        overwrite: replace files that camkit did not draw, and the table.
        every: draw one of this many frames of a video.
        table: a file ending in .parquet or .csv for the results; see ``camkit.scale.table``. A drawing that cannot be
            written leaves no row, so that a resumed run draws it again.
        bundle: a folder for the evidence; see ``camkit.scale.bundle``.
        resume: continue the table if it exists: pictures that have their rows in it are left out.
        progress: as for ``camkit.explain``.

    Raises:
        InputError: the settings contradict each other.
        OutputError: the folder cannot be created or written to.
    """

    pictures: Pictures
    out: Path | None = None
    how: Mapping[str, Any] = field(default_factory=dict)
    drawing: Drawing = Drawing()
    overwrite: bool = False
    every: int = 1
    table: Path | None = None
    bundle: Path | None = None
    resume: bool = False
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"every must be a number of frames, at least 1, not {self.every}")
        if self._video is not None and self.has_several_targets:
            raise InputError(f"{self._video} is a video, and a video shows one target; explain the targets one by one")
        if self.out is not None:
            refuse_other_file(self.out)
            if names_file(self.out):
                self._check_one_file(self.out)
            check_folder(self.folder)

    @functools.cached_property
    def _video(self) -> Path | None:
        """The first video that was named; with a table, videos are not explained."""
        named = () if self.table else self.pictures.named()
        return next((found.path for found in named if is_video(found.path)), None)

    def _check_one_file(self, out: Path) -> None:
        """Refuse a file for the drawings unless there is one drawing, of another file, and the file has its type."""
        chosen, is_video = self.drawing.format, self._video is not None
        if self.has_several_targets or len(self.pictures.first(2)) != 1:
            what = "several targets" if self.has_several_targets else f"{self.pictures.count()} pictures"
            slide = "; or draw one slide with --style slide" if self.has_several_targets else ""
            raise InputError(f"{out} is one file, but there are {what}; name a folder{slide}")
        suffix = out.suffix.lower()
        if (suffix == ".mp4") != is_video:
            raise InputError(f"{out} must end in .mp4 for a video, and in a type of picture such as .png for a picture")
        refuse_input(out, self.pictures.first(1))
        if chosen is not None and not is_video and suffix not in (JPEG_SUFFIXES if chosen == "jpg" else (".png",)):
            raise InputError(
                f"{out} does not end in .{chosen}, the format of the drawing; choose another name or format"
            )

    @property
    def folder(self) -> Path:
        """The folder of all drawings."""
        assert self.out is not None
        return self.out.parent if names_file(self.out) else self.out

    @functools.cached_property
    def _names(self) -> Mapping[Path, Path]:
        return drawing_names({found.path: found.place for found in self.pictures.named()})

    def file_for(self, row: Explanation, found: FoundPicture, rank: int, suffix: str) -> Path:
        """Return the file for an explanation; if nothing is drawn, its name. The same call gives the same names.

        Args:
            row: the explanation.
            found: its picture.
            rank: its place among the explanations of its picture, from 1.
            suffix: the type of the drawing.

        Raises:
            OutputError: as ``free_file``, or the file is one of the pictures to explain.
        """
        words = [re.sub(r"[^\w+.-]", "", row.method)]  # a function may be called "<lambda>"
        if self.how.get("target_layer"):
            words.append(slug(row.layer))
        if self.how.get("target"):
            words.append(f"{rank}-{slug(row.name)}" if self.has_several_targets else slug(row.name))
        name = self._names.get(found.path) or found.place.with_name(picture_name(found.place))
        name = name.with_suffix("") if name.suffix == suffix == ".mp4" else name
        if self.out is None:
            return free_file(Path(), name, words, suffix, overwrite=True)
        file = free_file(self.out, name, words, suffix, overwrite=self.overwrite)
        if os.path.lexists(file) and file in self.pictures:
            raise OutputError(f"{file} is itself a picture or video to explain; choose another folder")
        return file

    @property
    def has_several_targets(self) -> bool:
        """Whether a picture may have several explanations."""
        targets = self.how.get("target") or ()
        return len(targets) > 1 or any(isinstance(target, Expands) for target in targets)

    def fingerprint(self, model: LoadedModel) -> Fingerprint:
        """Return what decides the rows of the table; the size of the batches changes only the last digits."""
        how = {name: value for name, value in self.how.items() if value is not None}
        settings = {
            "method": how.get("method", AUTO.name),
            "layers": how.get("target_layer"),
            "targets": how.get("target"),
            "precision": how.get("precision", "fp32"),
            "fuse": how.get("fuse") or find_method(how.get("method", AUTO)).fuse,
            "smooth": how.get("smooth"),
            "draft": how.get("draft", False),
        }
        if "references" in how:
            files = [Path(str(file)) for file in chosen(how["references"])[0]]
            settings["references"] = digest(file.read_bytes() for file in files if file.is_file())
        return fingerprint(model, **settings, drawings=None if self.out is None else self.drawing.settings())


def free_file(out: Path, name: Path, words: Sequence[str], suffix: str = ".png", *, overwrite: bool) -> Path:
    """Return the file for a drawing.

    Args:
        out: the folder of all drawings, or one file for this drawing.
        name: the picture's path below the folder, as ``drawing_names`` returns it.
        words: what follows in the file's name, such as the method.
        suffix: the type of the file.
        overwrite: whether the drawing may replace a file that camkit did not draw.

    Raises:
        OutputError: there is such a file, and the drawing may not replace it.
    """
    file = out if names_file(out) else out / name.parent / f"{'.'.join([name.name, *words])}{suffix}"
    if not overwrite and os.path.lexists(file) and not is_drawing(file):
        raise OutputError(
            f"{file} exists already, and camkit did not draw it; name another file or folder, or pass "
            + advice("overwrite=True", "--overwrite")
        )
    return file


def write_drawing(file: Path, pixels: Pixels) -> None:
    """Write a drawing, whose pixels may be changed.

    Raises:
        OutputError: the file cannot be written, or its type is unknown.
    """
    write_file(file, encode(pixels, file.suffix, overwrite=True))


def slug(text: str) -> str:
    """Return text as a part of a file's name: letters, digits, dots and hyphens; long text ends in a checksum."""
    text = re.sub(r"^- ", "minus ", text)  # the sign of a direction
    plain = re.sub(r"[^\w.-]+", "-", text).strip("-.") or "target"
    return plain if len(plain) <= _LONGEST_SLUG else f"{plain[:_LONGEST_SLUG]}-{digest(text)[:8]}"
