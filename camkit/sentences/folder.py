"""Picture files: their words go into pages, sheets and a table, each compared with some of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from camkit.errors import ImageError, InputError, as_cell
from camkit.images.files import check_folder, csv_line, write_file
from camkit.images.listing import FoundPicture, Pictures
from camkit.images.references import MOST
from camkit.kit.picture_names import drawing_names
from camkit.sentences.explain import SentenceReader
from camkit.sentences.references import read
from camkit.sentences.words import NUMBERS, Words
from camkit.types import Failure, ReferencesLike

TABLE = "words.csv"
"""The file with a row for each word of all pictures."""

_COLUMNS = ("picture", "number", "word", *NUMBERS, "verdict")


@dataclass(frozen=True, eq=False)
class WrittenWords:
    """The words about a picture, and the files with its page, its sheet of heatmaps and its figures."""

    words: Words
    files: tuple[Path, ...]


def words_of_files(
    model: nn.Module | str,
    pictures: Iterable[str | Path],
    out: str | Path,
    prompt: str | None = None,
    *,
    processor: Any = None,
    device: str | None = None,
    references: ReferencesLike | None = None,
    together: bool = False,
    **settings: Any,
) -> Iterator[WrittenWords | Failure]:
    """Explain the words about picture files, and write a page, a sheet and JSON for each, and a table of several.

    Args:
        model: a Hugging Face model that writes text about pictures, or its name: hf:NAME, or hf: and a folder.
        pictures: files, folders and glob patterns.
        out: the folder for what is written.
        prompt: the question.
        processor: the model's processor; by default that beside the model.
        device: where a named model runs; by default the first of CUDA, MPS and CPU.
        references: what each picture is compared with; by default up to 16 of the others, or some pictures that camkit
            makes if there are no others.
        together: put all pictures into one prompt, and explain each in turn. The default references are made then.
        **settings: the other arguments of ``words``: words, method, max_new_tokens and only.

    Returns:
        The words about each picture, one after the other, or why there are none. The table follows the last one.

    Raises:
        InputError: the call is wrong; nothing has been computed. While it runs: there is one picture, or all are
            together, and they cannot be explained.
        ModelError: the model cannot be loaded.
        OutputError: a file cannot be written.
    """
    out = Path(out)
    found = list(Pictures(pictures, skip=out))
    files = [file.path for file in found]
    if not files:
        raise InputError("name at least one picture or folder")
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise InputError(f"{missing} does not exist; name pictures or folders")
    check_folder(out)
    reader = SentenceReader(model, processor, prompt, device, **settings)
    if together:
        explained: Iterator[Words | Failure] = (
            reader.explain(files, references, number) for number in range(len(files))
        )
    else:
        explained = _one_by_one(reader, files, references)
    return _written(found, explained, out)


def _one_by_one(
    reader: SentenceReader, paths: list[Path], references: ReferencesLike | None
) -> Iterator[Words | Failure]:
    pool = _readable(paths, MOST + 1) if references is None and len(paths) > 1 else []
    for path in paths:
        others: ReferencesLike | None = [other for other in pool if other != path][:MOST] or references
        try:
            yield reader.explain(path, others)
        except InputError as error:  # other pictures may be readable, or have the word
            if len(paths) == 1:
                raise
            yield Failure(str(path), error)


def _written(
    files: Sequence[FoundPicture], found: Iterable[Words | Failure], out: Path
) -> Iterator[WrittenWords | Failure]:
    """Write what was found and pass it on; the table of several pictures is written last."""
    names = drawing_names({file.path: file.place for file in files})
    table = [csv_line(_COLUMNS)]
    for file, words in zip(files, found, strict=True):
        if isinstance(words, Failure):
            yield words
            continue
        path = out / names[file.path]
        saved = (words.save(path.with_name(f"{path.name}.words{suffix}")) for suffix in (".html", ".png", ".json"))
        written = WrittenWords(words, tuple(saved))
        for number, word in enumerate(words):
            numbers = [f"{getattr(word, name):.6g}" for name in NUMBERS]
            table.append(csv_line(map(as_cell, (words.source, str(number), word.text, *numbers, word.verdict))))
        yield written
    if len(files) > 1:
        write_file(out / TABLE, b"".join(table))


def _readable(paths: list[Path], most: int) -> list[Path]:
    """Return some readable pictures at equal distances."""
    found: list[Path] = []
    for path in paths[:: max(len(paths) // most, 1)]:
        if len(found) == most:
            break
        with suppress(ImageError):
            read(path, str(path))
            found.append(path)
    return found
