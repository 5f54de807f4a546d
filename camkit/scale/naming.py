"""The names of drawings. The same call gives the same names, and no drawing replaces one that shows something else."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from camkit.drawing.encode import encode, read_note, with_note
from camkit.errors import OutputError, advice, without_control
from camkit.explanation import Explanation
from camkit.images.files import has_picture_suffix, names_file, write_file
from camkit.images.listing import FoundPicture
from camkit.kit.fingerprint import digest
from camkit.scale.job import Job
from camkit.types import Pixels

_LONGEST_SLUG = 30
"""The most characters of a layer's or a target's name in the name of a drawing."""
_LONGEST_STEM = 120
"""The most bytes of a picture's name in the name of its drawing; most file systems allow 255 bytes in all."""
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
        self._words = {"model": model, **job.words()}

    def file_for_video(self, video: FoundPicture, row: Explanation) -> tuple[Path, str]:
        """Return the file for a video, given one of its explanations, and a note on what it shows."""
        file, shows = self.file_for(replace(row, source=str(video.path)), video, 1, ".mp4")
        return file, note_of(shows)

    def file_for(self, row: Explanation, found: FoundPicture, rank: int, suffix: str) -> tuple[Path, dict[str, str]]:
        """Return the file for an explanation, and what it shows.

        Args:
            row: the explanation.
            found: its picture.
            rank: its place among the explanations of its picture, from 1.
            suffix: the type of the drawing.

        Raises:
            OutputError: as ``free_file``, or the file is one of the pictures to explain.
        """
        job, how = self._job, self._job.how
        assert job.out is not None
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
    return json.dumps(shows)


def _is_free(file: Path, shows: Mapping[str, str]) -> bool:
    return not os.path.lexists(file) or _shown_in(file) == shows


def _shown_in(file: Path) -> dict[str, str]:
    """Return what a drawing's own file says that it shows; an empty dictionary if it says nothing."""
    try:
        shown = json.loads(read_note(file) or "{}")
    except ValueError:
        return {}
    return shown if isinstance(shown, dict) else {}


def drawing_names(places: Mapping[Path, Path]) -> dict[Path, Path]:
    """Return for each picture the path of its drawings below the output folder, without the method.

    It is the picture's place. The suffix belongs to the name, so that the drawings of cat.jpg and cat.png differ even
    if they are explained one after the other; only ``.jpg`` is left out. If named files have the same name, as many of
    their folders are added as it takes to tell them apart.

    >>> pictures = {Path("in/cat.jpg"): Path("cat.jpg"), Path("in/b/cat.png"): Path("b/cat.png")}
    >>> [name.as_posix() for name in drawing_names(pictures).values()]
    ['cat', 'b/cat.png']
    >>> pictures = {Path("a/x.jpg"): Path("x.jpg"), Path("b/x.jpg"): Path("x.jpg")}
    >>> [name.as_posix() for name in drawing_names(pictures).values()]
    ['a/x', 'b/x']
    """
    names = {picture: place.with_name(picture_name(place)) for picture, place in places.items()}
    by_name: defaultdict[str, list[Path]] = defaultdict(list)
    for picture, name in names.items():
        by_name[str(name).casefold()].append(picture)
    for pictures in by_name.values():
        if len(pictures) > 1:
            names.update(_told_apart(pictures))
    return names


def _told_apart(pictures: Sequence[Path]) -> dict[Path, Path]:
    """Return names for pictures that have the same name, with as many of their folders as it takes."""
    folders = {picture: Path(os.path.abspath(picture)).parent.parts[1:] for picture in pictures}  # noqa: PTH100
    names: dict[Path, Path] = {}
    for count in range(1, max(map(len, folders.values())) + 1):
        names = {picture: Path(*folders[picture][-count:], picture_name(picture)) for picture in pictures}
        if len({str(name).casefold() for name in names.values()}) == len(pictures):
            break
    return names


def picture_name(path: Path) -> str:
    r"""Return the name of a picture without ``.jpg``, cut if the name of the drawing might be too long.

    A picture such as ``cat.png.jpg`` keeps its suffix, since it may lie beside ``cat.png``.

    Control characters, which could change a terminal or forge a line of a log, become hyphens. A name that was changed
    ends in a checksum, so that two pictures never have the same name.

    >>> picture_name(Path("cat.jpg")), picture_name(Path("cat.png.jpg")), picture_name(Path("a\nb.jpg"))
    ('cat', 'cat.png.jpg', 'a-b-7e18f737')
    """
    name = path.name.removesuffix(".jpg") or path.name
    name = path.name if has_picture_suffix(name) else name
    safe = _cut(without_control(name))
    return safe if safe == name else f"{safe}-{digest(name)[:8]}"


def _cut(name: str) -> str:
    while len(os.fsencode(name)) > _LONGEST_STEM:
        name = name[:-1]
    return name


def slug(text: str) -> str:
    """Return text as a part of a file's name: letters, digits, dots and hyphens; long text ends in a checksum."""
    text = re.sub(r"^- ", "minus ", text)  # the sign of a direction
    plain = re.sub(r"[^\w.-]+", "-", text).strip("-.") or "target"
    return plain if len(plain) <= _LONGEST_SLUG else f"{plain[:_LONGEST_SLUG]}-{digest(text)[:8]}"
