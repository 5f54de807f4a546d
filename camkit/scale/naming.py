"""The names of drawings. The same call gives the same names. A drawing replaces only camkit's own drawings."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from camkit.drawing.encode import encode
from camkit.errors import OutputError, advice
from camkit.explanation import Explanation
from camkit.images.files import is_drawing, names_file, write_file
from camkit.images.listing import FoundPicture
from camkit.kit.fingerprint import digest
from camkit.kit.picture_names import drawing_names, picture_name
from camkit.scale.job import Job
from camkit.types import Pixels

_LONGEST_SLUG = 30
"""The most characters of a layer's or a target's name in the name of a drawing."""


class DrawingFiles:
    """Names the file of each drawing of a job.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._names = drawing_names({found.path: found.place for found in job.pictures.named()})

    def file_for(self, row: Explanation, found: FoundPicture, rank: int, suffix: str) -> Path:
        """Return the file for an explanation; if nothing is drawn, its name.

        Args:
            row: the explanation.
            found: its picture.
            rank: its place among the explanations of its picture, from 1.
            suffix: the type of the drawing.

        Raises:
            OutputError: as ``free_file``, or the file is one of the pictures to explain.
        """
        job, how = self._job, self._job.how
        words = [re.sub(r"[^\w+.-]", "", row.method)]  # a function may be called "<lambda>"
        if how.layers:
            words.append(slug(row.layer))
        if how.targets:
            words.append(f"{rank}-{slug(row.name)}" if how.has_several_targets else slug(row.name))
        name = self._names.get(found.path) or found.place.with_name(picture_name(found.place))
        name = name.with_suffix("") if name.suffix == suffix == ".mp4" else name
        if job.out is None:
            return free_file(Path(), name, words, suffix, overwrite=True)
        file = free_file(job.out, name, words, suffix, overwrite=job.overwrite)
        if os.path.lexists(file) and file in job.pictures:
            raise OutputError(f"{file} is itself a picture or video to explain; choose another folder")
        return file


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
