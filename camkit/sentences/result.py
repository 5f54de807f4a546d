"""The words of a sentence, how much each needs the picture, and where its evidence lies."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from camkit.errors import InputError, did_you_mean
from camkit.explanation import Explanation, Explanations, LayerMaps, finite_or_none
from camkit.images.files import write_file
from camkit.types import EVEN, Box, Pixels, ReferenceScores, Status

PREDICTABLE = 0.5
"""A word that is at least this probable with every reference picture is one that the earlier words dictate."""
NEEDS_NO_PICTURE = math.log(2)
"""Nats: a word needs the picture if it is less than half as probable with other pictures."""


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
        is_punctuation: the word has neither letters nor digits.
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
    is_punctuation: bool
    is_dictated: bool
    explanation: Explanation | None = field(repr=False)

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
        numbers = ("probability", "needs_picture", "spread", "above_grey", "above_none")
        return {
            "text": self.text,
            "tokens": [self.tokens.start, self.tokens.stop],
            **{name: finite_or_none(getattr(self, name)) for name in numbers},
            "is_punctuation": self.is_punctuation,
            "is_dictated": self.is_dictated,
            "verdict": self.verdict,
            "explanation": None if self.explanation is None else self.explanation.to_dict(),
        }


@dataclass(frozen=True, eq=False)
class Words(Sequence[Word]):
    """The words that a model wrote about a picture.

    Attributes:
        sentence: the sentence.
        words: its words.
        picture: the picture.
        source: its file's name.
        prompt: the prompt, as the model got it.
        references: what the reference pictures are, as a phrase.
        written: True if the model wrote the sentence; False if the caller gave it.
    """

    sentence: str
    words: tuple[Word, ...]
    picture: Image.Image = field(repr=False)
    source: str
    prompt: str | None
    references: str
    written: bool

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
        found = [word for word in self.words if word.text.lower() == text.lower()]
        if not found:
            hint = did_you_mean(text, dict.fromkeys(word.text for word in self.words))
            raise InputError(f"the sentence {self.sentence!r} has no word {text!r}{hint}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the picture as JSON values."""
        names = ("source", "prompt", "sentence", "written", "references")
        return {**{name: getattr(self, name) for name in names}, "words": [word.to_dict() for word in self.words]}

    def sheet(self) -> Pixels:
        """Draw the heat of all explained words side by side, each on its own scale."""
        return Explanations(word.explanation for word in self.words if word.explanation is not None).sheet()

    def save(self, path: str | Path) -> Path:
        """Write the page (.html), the words as JSON (.json), or the sheet of heatmaps (any picture type).

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        from camkit.sentences.page import render  # noqa: PLC0415 - the page needs jinja2, and the words do not

        file = Path(path)
        if file.suffix == ".html":
            write_file(file, render(self).encode())
        elif file.suffix == ".json":
            write_file(file, json.dumps(self.to_dict(), indent=1).encode())
        else:
            Explanations(word.explanation for word in self.words if word.explanation is not None).save(file)
        return file

    def __repr__(self) -> str:
        """Return a line with the words and how much each needs the picture."""
        return f"<Words: {' '.join(f'{word.text} {word.needs_picture:+.1f}' for word in self.words)}>"


def explanation_of(
    text: str,
    heat: Float[Tensor, "h w"],
    log_probability: float,
    compared: ReferenceScores | None,
    picture: Image.Image,
    box: Box | None,
    *,
    layer: str,
    method: str,
    source: str,
) -> Explanation:
    """Return the heat of a word as an Explanation, drawn on the part of the picture that the model sees."""
    raw = heat.detach().float().cpu()
    seen = Box(0, 0, *picture.size) if box is None else box
    size = round(seen.bottom - seen.top), round(seen.right - seen.left)
    maps = LayerMaps((raw,), (EVEN,), "mean", (max(size[0], 1), max(size[1], 1)))
    cells = np.asarray(raw.numpy())
    status: Status = "ok"
    if not np.isfinite(cells).all():
        status = "non_finite"
    elif not cells.any():
        status = "no_influence"
    elif cells.max() <= 0:
        status = "no_positive_evidence"
    return Explanation(
        maps=maps,
        raw=cells,
        target=None,
        label=text,
        score=log_probability,
        probability=float(np.exp(log_probability)),
        layer=layer,
        layer_reason="the picture enters the decoder here",
        method=method,
        status=status,
        box=seen,
        shown=picture,
        source=source,
        quantity="log-probability",
        references=compared,
    )
