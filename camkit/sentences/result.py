"""The words of a sentence: how much each needs the picture, where its evidence lies, and the files about them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from PIL import Image

from camkit.drawing.encode import as_address
from camkit.errors import InputError, did_you_mean
from camkit.explaining.explanation import Explanation, Explanations, finite_or_none
from camkit.images.files import write_file
from camkit.kit.wording import VERSION
from camkit.tables import Rows, Tabular, flat
from camkit.types import Pixels

PREDICTABLE = 0.5
"""A word that is at least this probable with every reference picture is one that the earlier words dictate."""
NEEDS_NO_PICTURE = math.log(2)
"""Nats: a word needs the picture if it is less than half as probable with other pictures."""
NUMBERS = ("probability", "needs_picture", "spread", "above_grey", "above_none")
"""The attributes of a word that are measured."""


@dataclass(frozen=True, eq=False)
class Word:
    """One word of the sentence.

    Attributes:
        text: the word.
        tokens: the range of its tokens in the sentence.
        probability: its probability with this picture, after the words before it.
        needs_picture: the log-probability with this picture minus its mean over the reference pictures, with the same
            words before it, in nats.
        spread: the standard deviation of the log-probability over the reference pictures.
        above_grey, above_none: the same difference from a grey picture, and with the picture hidden. Read them with
            care: a model without a picture is outside of what it was trained on.
        is_dictated: the words before it dictate it: it is probable with every reference picture.
        explanation: the heat on the picture; None for words that were not asked for.
    """

    text: str
    tokens: range
    probability: float
    needs_picture: float
    spread: float
    above_grey: float
    above_none: float
    is_dictated: bool
    explanation: Explanation | None = field(default=None, repr=False)

    @property
    def is_punctuation(self) -> bool:
        """True if the word has neither letters nor digits."""
        return not any(map(str.isalnum, self.text))

    @property
    def needs_no_picture(self) -> bool:
        """Whether the word is about as probable with other pictures; its heat then explains almost nothing."""
        return self.is_punctuation or abs(self.needs_picture) < NEEDS_NO_PICTURE

    @property
    def verdict(self) -> str:
        """Whether the word needs the picture, as a phrase."""
        if self.is_punctuation:
            return "punctuation"
        if self.needs_picture >= NEEDS_NO_PICTURE:
            return "needs the picture"
        if self.needs_picture <= -NEEDS_NO_PICTURE:
            return "this picture speaks against it"
        if self.is_dictated:
            return "does not need the picture: the words before it dictate it"
        return "does not need the picture"

    def to_dict(self) -> dict[str, Any]:
        """Return the word as JSON values; non-finite numbers become None."""
        return {
            "text": self.text,
            "tokens": [self.tokens.start, self.tokens.stop],
            **{name: finite_or_none(getattr(self, name)) for name in NUMBERS},
            "is_punctuation": self.is_punctuation,
            "is_dictated": self.is_dictated,
            "needs_no_picture": self.needs_no_picture,
            "verdict": self.verdict,
            "explanation": None if self.explanation is None else self.explanation.to_dict(),
        }


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
        files: the files that camkit wrote: the page, the sheet of heatmaps and, for a picture file, the JSON.
    """

    sentence: str
    words: tuple[Word, ...]
    picture: Image.Image = field(repr=False)
    source: str
    prompt: str | None
    references: str
    written: bool
    beside: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

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
        return [self.words[number] for number in self.numbers_of(text)]

    def numbers_of(self, text: str) -> list[int]:
        """Return the numbers of the words with a text, in upper or lower case.

        Raises:
            InputError: the sentence has no such word.
        """
        found = [number for number, word in enumerate(self.words) if word.text.lower() == text.lower()]
        if not found:
            hint = did_you_mean(text, [word.text for word in self.words])
            raise InputError(f"the sentence {self.sentence!r} has no word {text!r}{hint}")
        return found

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


def spans(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[tuple[str, range]]:
    """Return the words of a sentence with their tokens.

    A token belongs to the word in which its first letter falls. It ends where the text of all tokens up to it ends. If
    that text stops inside a character, it ends in replacement signs that the sentence lacks; the token then ends where
    the next text that fits ends. This works for every tokenizer.
    """
    text = decode(ids)
    known = [decode(ids[: number + 1]) for number in range(len(ids))]
    finished = [each if text.startswith(each) else each.rstrip("\ufffd") for each in known]
    starts = [0, *accumulate(map(len, finished[:-1]), max)]
    ends = [next(len(each) for each in known[number:] if text.startswith(each)) for number in range(len(ids))]
    # A token that adds no text belongs to the last character, whose replacement sign its first token already added.
    # If there is no token, there is still a start.
    letters = [next((place for place in range(start, end) if not text[place].isspace()), end - 1)
               for start, end in zip(starts, ends, strict=False)]  # fmt: skip
    words: list[tuple[str, range]] = []
    # A word with its apostrophes and hyphens, or punctuation
    for match in re.finditer(r"\w+(?:['\u2019\-]\w+)*|[^\w\s]+", text):
        inside = [number for number, letter in enumerate(letters) if match.start() <= letter < match.end()]
        if inside:
            words.append((match[0], range(inside[0], inside[-1] + 1)))
    return words


def render(words: Sequence[Word], facts: Mapping[str, object], note: str = "") -> str:
    """Return the page of the words, the sentence's facts and a note. It loads nothing and runs no script.

    It opens on the word with the strongest cell among those that need the picture.
    """
    from camkit.kit.pages import templates  # noqa: PLC0415 - it needs jinja2, and the words do not

    shown = [_word(number, word) for number, word in enumerate(words)]
    drawn = [number for number, each in enumerate(shown) if each["heat"]]
    first = max(drawn, key=lambda number: (shown[number]["strong"], shown[number]["peak"]), default=None)
    return (
        templates("camkit.sentences")
        .get_template("words.html")
        .render(found=facts, words=shown, first=first, note=note, version=VERSION)
    )


def _word(number: int, word: Word) -> dict[str, Any]:
    # Nats at which a word has its strongest colour: it is then 400 times less probable with other pictures
    share = max(min(word.needs_picture / 6.0, 1), 0)
    drawn = peak = None
    if word.explanation is not None:
        alpha = 0.0 if word.needs_no_picture else 0.5
        drawn = word.explanation.overlay(max_side=640, alpha=alpha)  # the longest side of a picture on the page
        peak = float(word.explanation.raw.max())
    return {
        "number": number,
        "text": word.text,
        "word": word,
        "shade": 0 if word.is_punctuation else round(100 * share),
        "strong": not word.needs_no_picture and word.needs_picture > 0,
        "peak": peak,
        "unneeded": word.needs_no_picture and not word.is_punctuation,
        "heat": None if drawn is None else as_address(drawn, "webp"),
        "alt": f"{'the picture without heat, for' if word.needs_no_picture else 'heat of'} the word {word.text}",
        "note": "" if word.explanation is None or word.explanation.status == "ok" else "Nothing speaks for this word.",
        "probability": f"{word.probability:.1%}",
        "needs": f"{word.needs_picture:+z.2f}",
        "spread": f"{word.spread:.2f}",
        "grey": f"{word.above_grey:+z.2f}",
        "hidden": f"{word.above_none:+z.2f}",
    }
