"""The words of a sentence, as a sequence that writes itself to files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

from PIL import Image

from camkit.explanation import Explanations
from camkit.images.files import write_file
from camkit.sentences.sentence import numbers_of
from camkit.sentences.word import Word
from camkit.tables import Rows, Tabular, flat
from camkit.types import Pixels


@dataclass(frozen=True, eq=False)
class Words(Tabular, Sequence[Word]):
    """The words that a model wrote about a picture.

    Attributes:
        sentence: the sentence.
        words: its words.
        picture: the picture.
        source: its file's name.
        prompt: the prompt, as the model got it.
        references: what the reference pictures are, as a phrase.
        written: True if the model wrote the sentence; False if the caller gave it.
        beside: the names of the prompt's other pictures, which stayed as they are.
    """

    sentence: str
    words: tuple[Word, ...]
    picture: Image.Image = field(repr=False)
    source: str
    prompt: str | None
    references: str
    written: bool
    beside: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.words)

    @overload
    def __getitem__(self, place: int) -> Word: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Word]: ...

    def __getitem__(self, place: int | slice) -> Word | Sequence[Word]:
        """Return a word by its number, or some."""
        return self.words[place]

    def named(self, text: str) -> list[Word]:
        """Return the words with a text, in upper or lower case.

        Raises:
            InputError: the sentence has no such word.
        """
        return [self.words[number] for number in numbers_of(text, [word.text for word in self.words], self.sentence)]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the picture as JSON values."""
        names = ("source", "prompt", "sentence", "written", "references")
        facts = {name: getattr(self, name) for name in names}
        return {**facts, "beside": list(self.beside), "words": [word.to_dict() for word in self.words]}

    def table(self) -> Rows:
        """Return a row for each word, without its heat."""
        return [
            flat({name: value for name, value in row.items() if name != "explanation"})
            for row in self.to_dict()["words"]
        ]

    def sheet(self) -> Pixels:
        """Draw the heat of the words that need the picture side by side, each on its own scale."""
        return self._drawn().sheet()

    def _drawn(self) -> Explanations:
        """Return what a sheet shows: words that need no picture only if there are no others, and marked."""
        explained = [(word, word.explanation) for word in self.words if word.explanation is not None]
        chosen = [explanation for word, explanation in explained if not word.needs_no_picture]
        unneeded = [replace(each, label=f"{word.text} (does not need the picture)") for word, each in explained]
        return Explanations(chosen or unneeded)

    def save(self, path: str | Path) -> Path:
        """Write the page (.html), the words as JSON (.json), or the sheet of heatmaps (any picture type).

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        from camkit.sentences.page import render  # noqa: PLC0415 - the page needs jinja2, and the words do not

        file = Path(path)
        if file.suffix == ".html":
            write_file(file, render(self.words, self.to_dict()).encode())
        elif file.suffix == ".json":
            write_file(file, json.dumps(self.to_dict(), indent=1).encode())
        else:
            self._drawn().save(file)
        return file

    def __repr__(self) -> str:
        """Return a line with the words and how much each needs the picture."""
        return f"<Words: {' '.join(f'{word.text} {word.needs_picture:+z.1f}' for word in self.words)}>"
