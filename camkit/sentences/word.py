"""One word of a sentence: how much it needs the picture, and where its evidence lies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from camkit.explanation import Explanation, finite_or_none

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
