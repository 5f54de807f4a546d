"""Several pictures: each is compared with some of the others, if there are no other references."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from camkit.errors import CamkitError, ImageError, InputError
from camkit.images.listing import FoundPicture
from camkit.images.references import MOST
from camkit.sentences.explain import explain
from camkit.sentences.reading import Known
from camkit.sentences.references import read
from camkit.sentences.result import Words
from camkit.types import ReferencesLike

COLUMNS = (
    "picture", "number", "word", "probability", "needs_picture", "spread", "above_grey", "above_none", "verdict",
)  # fmt: skip


def explain_files(
    model: nn.Module, files: Sequence[FoundPicture], references: ReferencesLike | None = None, **options: Any
) -> Iterator[tuple[FoundPicture, Words | CamkitError]]:
    """Yield the words about each picture, or why there are none.

    Args:
        model: the model.
        files: the pictures.
        references: what each is compared with; by default up to 16 of the others, or some that camkit makes if
            there are no others.
        options: the other arguments of ``explain``.
    """
    known: Known = {}
    pool = _readable(files, MOST + 1) if references is None and len(files) > 1 else []
    for file in files:
        others: ReferencesLike | None = [path for path in pool if path != file.path][:MOST] or references
        try:
            yield file, explain(model, file.path, references=others, known=known, **options)
        except (ImageError, InputError) as error:  # other pictures may be readable, or have the word
            yield file, error


def explain_together(
    model: nn.Module, files: Sequence[FoundPicture], references: ReferencesLike | None = None, **options: Any
) -> Iterator[tuple[FoundPicture, Words]]:
    """Yield the words about pictures in one prompt, once for each picture; arguments as in ``explain_files``."""
    known: Known = {}
    paths = [file.path for file in files]
    for number, file in enumerate(files):
        yield file, explain(model, paths, references=references, known=known, picture=number, **options)


def rows_of(file: FoundPicture, found: Words) -> Iterator[tuple[object, ...]]:
    """Yield a row for each word, with the values of ``COLUMNS``."""
    for number, word in enumerate(found):
        numbers = (word.probability, word.needs_picture, word.spread, word.above_grey, word.above_none)
        yield str(file.path), number, word.text, *(f"{value:.6g}" for value in numbers), word.verdict


def _readable(files: Sequence[FoundPicture], most: int) -> list[Path]:
    """Return some readable pictures at equal distances."""
    chosen = files[:: max(len(files) // most, 1)]
    found: list[Path] = []
    for file in chosen:
        if len(found) == most:
            break
        try:
            read(file.path, str(file.path))
        except ImageError:
            continue
        found.append(file.path)
    return found
