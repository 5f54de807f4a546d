"""A sentence's tokens as words: a word of several tokens is one word, and punctuation stands alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from camkit.errors import InputError, did_you_mean

_PARTS = re.compile(r"\w+(?:['\u2019\-]\w+)*|[^\w\s]+")
"""A word with its apostrophes and hyphens, or punctuation."""


@dataclass(frozen=True)
class Span:
    """A word, and the range of its tokens among those of the sentence."""

    text: str
    tokens: range

    @property
    def is_punctuation(self) -> bool:
        """True if the word has neither letters nor digits."""
        return not any(letter.isalnum() for letter in self.text)


def spans(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Span]:
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
    letters = [next((place for place in range(start, end) if not text[place].isspace()), end - 1)
               for start, end in zip(starts, ends, strict=True)]  # fmt: skip
    words: list[Span] = []
    for match in _PARTS.finditer(text):
        inside = [number for number, letter in enumerate(letters) if match.start() <= letter < match.end()]
        if inside:
            words.append(Span(match[0], range(inside[0], inside[-1] + 1)))
    return words


def numbers_of(text: str, words: Sequence[str], sentence: str) -> list[int]:
    """Return the numbers of the words of a sentence that have a text, in upper or lower case.

    Raises:
        InputError: the sentence has no such word.
    """
    found = [number for number, word in enumerate(words) if word.lower() == text.lower()]
    if not found:
        raise InputError(f"the sentence {sentence!r} has no word {text!r}{did_you_mean(text, words)}")
    return found
