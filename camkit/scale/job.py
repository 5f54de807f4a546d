"""A job: which pictures are explained and how, how they are drawn, and where the results go, under which names."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from camkit.drawing.encode import JPEG_SUFFIXES
from camkit.drawing.figure import ColourScale
from camkit.errors import OutputError, advice, refuse
from camkit.explaining.explanation import Explanation
from camkit.images.files import check_folder, is_drawing, names_file, refuse_input, refuse_other_file
from camkit.images.listing import FoundPicture, Pictures
from camkit.images.prepare import chosen_references
from camkit.images.read import is_video
from camkit.kit.picture_names import drawing_names, picture_name
from camkit.kit.store import Fingerprint, Row, digest, fingerprint
from camkit.methods import AUTO, find_method
from camkit.models.loaded import LoadedModel
from camkit.options import Explain, Results
from camkit.targets.scores import Expands
from camkit.types import Progress


@dataclass(frozen=True, eq=False)
class Written:
    """What was written of a picture and target, or of a video.

    Attributes:
        explanation: the explanation; of a video, that of its first frame with the target.
        file: the file with the drawing; None if nothing was drawn.
        scale: what the strongest colour stands for; None if nothing is coloured, or if each frame of a video
            has its own scale.
        name: its place below the folder of all drawings; if nothing was drawn, where its drawing would be.
        drawing: how it was drawn, as the arguments of ``Explanation.overlay``.
        row: its row in the table; None if there is no table.
        video: of a video, what JSON has of it: its file as "source", "frames", "every", "rate", "labels" and "status",
            and "sheet" and "error" if there are any.
    """

    explanation: Explanation
    file: Path | None
    scale: ColourScale | None
    name: Path = Path()
    drawing: Mapping[str, Any] = field(default_factory=dict)
    row: Row | None = None
    video: Mapping[str, Any] | None = None

    @property
    def source(self) -> str:
        """The picture or the video."""
        return self.explanation.source if self.video is None else self.video["source"]

    @property
    def status(self) -> str:
        """The status of the map; of a video, "ok" if any frame has evidence."""
        return self.explanation.status if self.video is None else self.video["status"]

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values; "scale" has the value of the strongest colour for each layer."""
        drawn = {
            "scale": None if self.scale is None else list(self.scale.limits),
            "file": None if self.file is None else str(self.file),
        }
        if self.video is None:
            return {**self.explanation.to_dict(), **drawn}
        of_layer = {name: getattr(self.explanation, name) for name in ("layer", "layer_reason", "method")}
        return {**self.video, **of_layer, **drawn, "status": "error" if "error" in self.video else self.status}


@dataclass(frozen=True)
class Job:
    """Pictures to explain, and where the results go.

    Attributes:
        pictures: the files.
        how: how they are explained and drawn. ``out`` is a folder, which is created if it does not exist, or a file
            such as "heat.png" for one picture with one target. With ``scale`` "shared", all pictures, and all frames of
            a video, share a scale; each is explained twice then: the first time to find the largest value.
        results: where the results go besides. A drawing that cannot be written leaves no row in the table, so that a
            resumed run draws it again.
        target: what is explained, as a list; None for each picture's best class.
        progress: as for ``camkit.explain``.

    Raises:
        InputError: the settings contradict each other.
        OutputError: the folder cannot be created or written to.
    """

    pictures: Pictures
    how: Explain
    results: Results
    target: Sequence[Any] | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        how, several = self.how, self.has_several_targets
        named = () if self.results.table else self.pictures.named()  # with a table, videos are not explained
        video = next((found.path for found in named if is_video(found.path)), None)
        refuse(
            (how.every < 1, f"every must be a number of frames, at least 1, not {how.every}"),
            (
                video is not None and several,
                f"{video} is a video, and a video shows one target; explain the targets one by one",
            ),
        )
        if self.out is None:
            return
        refuse_other_file(self.out)
        if names_file(self.out):  # then there is one drawing, of another file, and the file has its type
            first, suffix = self.pictures.first(2), self.out.suffix.lower()
            what = "several targets" if several else f"{self.pictures.count()} pictures" if len(first) != 1 else ""
            slide = "; or draw one slide with --style slide" if several else ""
            of_format = {"png": (".png",), "jpg": JPEG_SUFFIXES}.get(how.format or "", (suffix,))
            refuse(
                (what, f"{self.out} is one file, but there are {what}; name a folder{slide}"),
                (
                    (suffix == ".mp4") != (video is not None),
                    f"{self.out} must end in .mp4 for a video, and in a type of picture such as .png for a picture",
                ),
                (
                    video is None and suffix not in of_format,
                    f"{self.out} does not end in .{how.format}, the format of the drawing; choose another name or "
                    "format",
                ),
            )
            refuse_input(self.out, first)
        check_folder(self.folder)

    @property
    def out(self) -> Path | None:
        """The folder or the file for the drawings; None to draw nothing."""
        return None if self.results.no_pictures else self.how.out

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``camkit.explain_many``."""
        values = self.how.of_maps()
        layer = values.pop("layer")
        others = {"target": self.target, "batch_size": self.how.batch_size, "progress": self.progress}
        return {**values, "target_layer": layer, **others}

    def drawing(self, scale: ColourScale | None = None) -> dict[str, Any]:
        """Return the arguments of ``Explanation.overlay``, with another scale if one is given."""
        how = self.how
        chosen = {"scale": scale or how.scale or "shared", "max_side": how.max_side or None}
        return {"style": how.style, "colormap": how.colormap, "alpha": how.alpha, "opacity": how.opacity, **chosen}

    def suffix_for(self, picture: str) -> str:
        """Return the suffix of the drawing of a picture: overlays of a JPEG are written as JPEG.

        Everything else becomes PNG, which keeps the edges of text and colours sharp.
        """
        is_jpeg = os.path.splitext(picture)[1].lower() in JPEG_SUFFIXES  # noqa: PTH122 - a source may be no path
        is_photo = is_jpeg and self.how.style in ("overlay", "side-by-side")  # at the picture's own size
        return f".{self.how.format or ('jpg' if is_photo else 'png')}"

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
        if self.how.layer:
            words.append(slug(row.layer))
        if self.target:
            words.append(f"{rank}-{slug(row.name)}" if self.has_several_targets else slug(row.name))
        name = self._names.get(found.path) or found.place.with_name(picture_name(found.place))
        name = name.with_suffix("") if name.suffix == suffix == ".mp4" else name
        if self.out is None:
            return free_file(Path(), name, words, suffix, overwrite=True)
        file = free_file(self.out, name, words, suffix, overwrite=self.how.overwrite)
        if os.path.lexists(file) and file in self.pictures:
            raise OutputError(f"{file} is itself a picture or video to explain; choose another folder")
        return file

    @property
    def has_several_targets(self) -> bool:
        """Whether a picture may have several explanations."""
        targets = self.target or ()
        return len(targets) > 1 or any(isinstance(target, Expands) for target in targets)

    def fingerprint(self, model: LoadedModel) -> Fingerprint:
        """Return what decides the rows of the table; the size of the batches changes only the last digits."""
        settings = self.how.of_maps()
        method, references = settings["method"] or AUTO.name, settings.pop("references")
        settings |= {"method": method, "layers": settings.pop("layer"), "targets": self.target}
        settings["fuse"] = self.how.fuse or find_method(method).fuse
        if references is not None:
            files = [Path(str(file)) for file in chosen_references(references)[0]]
            settings["references"] = digest(file.read_bytes() for file in files if file.is_file())
        others = {"format": self.how.format, "one scale": self.how.scale == "shared"}
        return fingerprint(model, **settings, drawings=None if self.out is None else {**self.drawing(), **others})


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
    is_foreign = not overwrite and os.path.lexists(file) and not is_drawing(file)
    if is_foreign:
        instead = "name another file or folder, or pass " + advice("overwrite=True", "--overwrite")
        raise OutputError(f"{file} exists already, and camkit did not draw it; {instead}")
    return file


def slug(text: str) -> str:
    """Return text as a part of a file's name: letters, digits, dots and hyphens; long text ends in a checksum."""
    text = re.sub(r"^- ", "minus ", text)  # the sign of a direction
    plain = re.sub(r"[^\w.-]+", "-", text).strip("-.") or "target"
    return plain if len(plain) <= 30 else f"{plain[:30]}-{digest(text)[:8]}"
