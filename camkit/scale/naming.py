"""The names of drawings. The same call gives the same names, and no drawing replaces one that shows something else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from camkit.drawing.encode import encode, read_note, with_note
from camkit.errors import OutputError, advice
from camkit.explanation import Explanation
from camkit.images.files import names_file, shown_model, write_file
from camkit.images.listing import FoundPicture
from camkit.kit.fingerprint import digest
from camkit.kit.picture_names import drawing_names, picture_name
from camkit.scale.job import Job
from camkit.types import Pixels

_LONGEST_SLUG = 30
"""The most characters of a layer's or a target's name in the name of a drawing."""
_LONGEST_SHOWN = 1000
"""The most characters of a setting in a drawing's note, of which a JPEG holds 64 KiB."""
_NOT_IN_METHOD_NAMES = r"[^\w+.-]"
"""Characters that no registered method has in its name, but a function may: a lambda is called "<lambda>"."""


class DrawingFiles:
    """Names the file of each drawing of a job.

    Args:
        job: the job.
        model: the name of the model.
    """

    def __init__(self, job: Job, model: str) -> None:
        self._job = job
        self._names = drawing_names({found.path: found.place for found in job.pictures.named()})
        self._words = {"model": shown_model(model), **job.words()}

    def file_for_video(self, video: FoundPicture, row: Explanation) -> tuple[Path, str]:
        """Return the file for a video, given one of its explanations, and a note on what it shows."""
        file, shows = self.file_for(replace(row, source=str(video.path)), video, 1, ".mp4")
        return file, note_of(shows)

    def file_for(self, row: Explanation, found: FoundPicture, rank: int, suffix: str) -> tuple[Path, dict[str, str]]:
        """Return the file for an explanation, and what it shows; if nothing is drawn, its plain name.

        Args:
            row: the explanation.
            found: its picture.
            rank: its place among the explanations of its picture, from 1.
            suffix: the type of the drawing.

        Raises:
            OutputError: as ``free_file``, or the file is one of the pictures to explain.
        """
        job, how = self._job, self._job.how
        words = [re.sub(_NOT_IN_METHOD_NAMES, "", row.method)]
        if how.layers:
            words.append(slug(row.layer))
        if how.targets:
            words.append(f"{rank}-{slug(row.name)}" if how.has_several_targets else slug(row.name))
        shows = {"picture": str(found.path.absolute()), "name": ".".join(words), **self._words}
        if how.targets and row.target is not None:  # two classes may have the same label
            shows["class"] = str(row.target)
        name = self._names.get(found.path) or found.place.with_name(picture_name(found.place))
        name = name.with_suffix("") if name.suffix == suffix == ".mp4" else name
        if job.out is None:
            return free_file(Path(), name, words, shows, suffix, overwrite=True), shows
        file = free_file(job.out, name, words, shows, suffix, overwrite=job.overwrite)
        if os.path.lexists(file) and file in job.pictures:
            raise OutputError(f"{file} is itself a picture or video to explain; choose another folder")
        return file, shows


def free_file(
    out: Path, name: Path, words: Sequence[str], shows: Mapping[str, str], suffix: str = ".png", *, overwrite: bool
) -> Path:
    """Return the file for a drawing: a file that does not exist, or that shows the same.

    Args:
        out: the folder of all drawings, or one file for this drawing.
        name: the picture's path below the folder, as ``drawing_names`` returns it.
        words: what follows in the file's name, such as the method.
        shows: what decides the drawing, as words for its name; files are full paths, as is "picture". If the file of
            the plain name shows something else, the words for what differs are added to the name.
        suffix: the type of the file.
        overwrite: whether to return the plain name whatever its file shows.

    Raises:
        OutputError: the file exists, and nothing in its name could tell the two drawings apart.
    """
    shows = _noted(shows)
    if names_file(out):
        if overwrite or _is_free(out, shows):
            return out
        raise OutputError(f"{out} exists already; name another file, or pass {advice('overwrite=True', '--overwrite')}")
    words = list(words)
    while True:
        file = out / name.parent / f"{'.'.join([name.name, *words])}{suffix}"
        if overwrite or _is_free(file, shows):
            return file
        earlier = _shown_in(file)
        distinct = [key for key in (*shows, *earlier) if earlier.get(key, "") != shows.get(key, "")]
        more = dict.fromkeys(_word(key, shows.get(key, ""), words) for key in distinct)
        if not earlier or not more.keys() - set(words):
            raise OutputError(
                f"{file} exists and camkit cannot tell what it shows; choose another folder, or pass "
                + advice("overwrite=True", "--overwrite")
            )
        words = [*dict.fromkeys([*words, *more])]


def _word(key: str, text: str, taken: Sequence[str]) -> str:
    """Return a setting as a word for a name; of a file, its own name or the nearest folder that is not taken."""
    named, path = [text], Path(text)
    if path.is_absolute():
        named = [path.stem, *(folder.name for folder in path.parents)]
        named = named[1:] if key == "picture" else named  # the drawing's name begins with the picture's
    slugs = [slug(word) for word in named if word] or [slug(f"default-{key}")]
    return next((word for word in slugs if word not in taken), slugs[0])


def write_drawing(file: Path, pixels: Pixels, shows: Mapping[str, str]) -> None:
    """Write a drawing, whose pixels may be changed; a PNG or a JPEG also records what it shows.

    Raises:
        OutputError: the file cannot be written, or its type is unknown.
    """
    write_file(file, with_note(encode(pixels, file.suffix, overwrite=True), note_of(shows)))


def note_of(shows: Mapping[str, str]) -> str:
    """Return what a drawing shows as ASCII text, to be written into its file."""
    return json.dumps(_noted(shows))


def _noted(shows: Mapping[str, str]) -> dict[str, str]:
    """Return what a drawing shows as its note says it: of long texts, such as a list of pictures, the checksum."""
    return {key: text if len(text) <= _LONGEST_SHOWN else digest(text) for key, text in shows.items()}


def _is_free(file: Path, shows: Mapping[str, str]) -> bool:
    return not os.path.lexists(file) or _shown_in(file) == shows


def _shown_in(file: Path) -> dict[str, str]:
    """Return what a drawing's own file says that it shows; an empty dictionary if it says nothing."""
    try:
        shown = json.loads(read_note(file) or "{}")
    except ValueError:
        return {}
    return shown if isinstance(shown, dict) else {}


def slug(text: str) -> str:
    """Return text as a part of a file's name: letters, digits, dots and hyphens; long text ends in a checksum."""
    text = re.sub(r"^- ", "minus ", text)  # the sign of a direction
    plain = re.sub(r"[^\w.-]+", "-", text).strip("-.") or "target"
    return plain if len(plain) <= _LONGEST_SLUG else f"{plain[:_LONGEST_SLUG]}-{digest(text)[:8]}"
