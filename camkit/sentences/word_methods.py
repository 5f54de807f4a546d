"""The methods for words: each is a value that makes the heat of some of a sentence's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from camkit.errors import MethodError
from camkit.methods import METHODS
from camkit.sentences.heat import attention_rows, expected_gradients
from camkit.sentences.reading import Reading
from camkit.sentences.tam import activation_maps, filtered

TokenMaps: TypeAlias = Callable[[Reading, Sequence[int]], Float[Tensor, "w n"]]
"""``maps(reading, words)`` returns the heat of words, named by their numbers, at each of the picture's tokens."""


def _attention_expected(reading: Reading, words: Sequence[int]) -> Float[Tensor, "w n"]:
    return attention_rows(reading, words) * expected_gradients(reading, words).clamp(min=0)


def _unchanged(heat: Float[Tensor, "h w"]) -> Float[Tensor, "h w"]:
    return heat


@dataclass(frozen=True)
class WordMethod:
    """One way to make the heat of words.

    Attributes:
        name: what ``method=`` and ``--method`` take.
        maps: makes the heat at the picture's tokens; it refuses a model that lacks what the method needs.
        unit: what the values are, as the first words of a caption.
        compares: True if the cells sum to how much the word needs the picture, compared with the references.
        finish: makes what is drawn of a word's heat on the grid.
    """

    name: str
    maps: TokenMaps
    unit: str
    compares: bool = False
    finish: Callable[[Float[Tensor, "h w"]], Float[Tensor, "h w"]] = _unchanged

    def heat(self, reading: Reading, words: Sequence[int]) -> dict[int, Float[Tensor, "h w"]]:
        """Return the heat of words on the picture's grid, by their numbers.

        Raises:
            ModelError: the model does not have what the method needs.
        """
        maps = self.maps(reading, words)
        return {word: self.finish(reading.places.drawn(each)) for word, each in zip(words, maps, strict=True)}


DEFAULT = "expected"
"""The method for words unless the caller names one."""

_OF_ATTENTION = "Share of attention"
_OF_LOGITS = "Logit at the picture's token, less what earlier words explain"

WORD_METHODS = {
    method.name: method
    for method in (
        WordMethod("expected", expected_gradients, METHODS["expected"].unit, compares=True),
        WordMethod("attention", attention_rows, _OF_ATTENTION),
        WordMethod("attention-expected", _attention_expected, f"{_OF_ATTENTION} times expected gradients"),
        WordMethod("tam", activation_maps, _OF_LOGITS, finish=filtered),
    )
}
"""Every method for words by its name."""


def find_word_method(name: str) -> WordMethod:
    """Return a method for words from its name.

    Raises:
        MethodError: there is none.
    """
    if name not in (names := tuple(WORD_METHODS)):
        raise MethodError(f"{name!r} is not a method for words; use one of {', '.join(names)}")
    return WORD_METHODS[name]
