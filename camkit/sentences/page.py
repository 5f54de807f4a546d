"""The words as one HTML page: hover or tap a word to see its heat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from camkit.drawing.encode import as_address
from camkit.kit.pages import templates
from camkit.kit.wording import VERSION
from camkit.sentences.word import Word

_SIDE = 640
"""The longest side of a picture on the page, in pixels."""
_FULL = 6.0
"""Nats at which a word has its strongest colour: it is then 400 times less probable with other pictures."""


def render(words: Sequence[Word], facts: Mapping[str, object]) -> str:
    """Return the page of the words and the sentence's facts. It loads nothing and runs no script."""
    shown = [_word(number, word) for number, word in enumerate(words)]
    drawn = [number for number, each in enumerate(shown) if each["heat"]]
    first = min(drawn, key=lambda number: not shown[number]["strong"], default=None)
    page = templates("camkit.sentences").get_template("words.html")
    return page.render(found=facts, words=shown, first=first, version=VERSION)


def _word(number: int, word: Word) -> dict[str, object]:
    share = max(min(word.needs_picture / _FULL, 1), 0)
    drawn = None
    if word.explanation is not None:
        alpha = 0.0 if word.needs_no_picture else 0.5
        drawn = word.explanation.overlay(max_side=_SIDE, alpha=alpha)
    return {
        "number": number,
        "text": word.text,
        "word": word,
        "shade": 0 if word.is_punctuation else round(100 * share),
        "strong": not word.needs_no_picture and word.needs_picture > 0,
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
