"""The words as one HTML page: hover or tap a word to see its heat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from camkit.drawing.encode import as_address
from camkit.kit.pages import templates
from camkit.kit.wording import VERSION
from camkit.sentences.word import Word

_SIDE = 640
"""The longest side of a picture on the page, in pixels."""
_FULL = 6.0
"""Nats at which a word has its strongest colour: it is then 400 times less probable with other pictures."""


def render(words: Sequence[Word], facts: Mapping[str, object], note: str = "") -> str:
    """Return the page of the words, the sentence's facts and a note. It loads nothing and runs no script.

    It opens on the word with the strongest cell among those that need the picture.
    """
    shown = [_word(number, word) for number, word in enumerate(words)]
    drawn = [number for number, each in enumerate(shown) if each["heat"]]
    first = max(drawn, key=lambda number: (shown[number]["strong"], shown[number]["peak"]), default=None)
    return (
        templates("camkit.sentences")
        .get_template("words.html")
        .render(found=facts, words=shown, first=first, note=note, version=VERSION)
    )


def _word(number: int, word: Word) -> dict[str, Any]:
    share = max(min(word.needs_picture / _FULL, 1), 0)
    drawn = peak = None
    if word.explanation is not None:
        alpha = 0.0 if word.needs_no_picture else 0.5
        drawn = word.explanation.overlay(max_side=_SIDE, alpha=alpha)
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
