"""What a model says about a picture, and what its words score with this picture and with others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from camkit.errors import InputError, ModelError
from camkit.sentences.cut import Cut
from camkit.sentences.find import find_cut, reads_in_order
from camkit.sentences.inputs import Inputs, Text
from camkit.sentences.places import Places, places_of
from camkit.sentences.references import reference_pictures
from camkit.sentences.scores import log_probabilities
from camkit.sentences.sentence import Span, spans
from camkit.types import ReferencesLike

Known: TypeAlias = dict[tuple[str, int, tuple[int, int]], Places | None]
"""Where the tokens of one model look: by the name of the cut, the number of tokens, and the picture's size."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What the model was asked and answered, and what the words score with each picture.

    Attributes:
        cut: where the picture's tokens are taken.
        places: where they look.
        text: the prompt's tokens and the sentence's.
        decoded: the sentence.
        spans: its words.
        tokens: the references' tokens (M, n, C).
        pictures: what the references are, as a phrase.
        own, others, grey, hidden: the log-probabilities of the words with this picture (W,), with the references
            (M, W), with a grey picture (W,), and with the picture hidden (W,).
    """

    cut: Cut
    places: Places
    text: Text
    decoded: str
    spans: list[Span]
    tokens: Float[Tensor, "m n c"]
    pictures: str
    own: Float[Tensor, " w"]
    others: Float[Tensor, "m w"]
    grey: Float[Tensor, " w"]
    hidden: Float[Tensor, " w"]

    @property
    def needs(self) -> Float[Tensor, " w"]:
        """How much more probable each word is than with the references, as logarithms, in nats."""
        return self.own - self.others.mean(0)

    def score(
        self, tokens: Float[Tensor, "m n c"], chosen: Sequence[Span] | None = None, *, attend: bool = True
    ) -> Float[Tensor, "m w"]:
        """Return the log-probabilities of the words for M versions of the picture's tokens."""
        return _scores(self.cut, self.text, self.spans if chosen is None else chosen, tokens, attend=attend)


def read_sentence(
    model: nn.Module,
    inputs: Inputs,
    picture: Image.Image,
    given: str | None,
    references: ReferencesLike | None,
    most: int,
    known: Known,
) -> Reading:
    """Let the model write a sentence about a picture, or take the given one, and score its words.

    Args:
        model: the model.
        inputs: makes its arguments.
        picture: the picture.
        given: the given sentence.
        references: other pictures.
        most: the most tokens that the model writes.
        known: where tokens look in pictures that were read before; what is measured is added.

    Raises:
        InputError, ImageError, ModelError: as for ``words``.
    """
    prepared = inputs.of(picture)
    text = inputs.written(prepared, most) if given is None else inputs.given(prepared, given)
    sentence = text.ids[text.places].tolist()
    decode: Callable[[Sequence[int]], str] = inputs.tokenizer.decode
    found = spans(sentence, decode)
    if not found:
        raise InputError("the model writes no word about this picture; pass words='a sentence' to explain one")
    grey = inputs.of(Image.new("RGB", picture.size, (128, 128, 128)))
    kind = _kind(model, inputs, prepared, text)
    whole = functools.partial(inputs.with_text, text=text.ids, kind=kind)
    shorter = inputs.with_text(prepared, text.ids[:-1], kind)

    def locate(cut: Cut) -> Places | None:
        of_cut = cut.name, len(cut.tokens), picture.size
        if of_cut not in known:
            known[of_cut] = places_of(cut, inputs, picture)
        return known[of_cut]

    cut, places = find_cut(model, whole(prepared), whole(grey), shorter, locate)
    others, pictures = reference_pictures(references, picture)
    with torch.no_grad():
        tokens = torch.stack([cut.tokens_of(whole(inputs.of(each))) for each in others])
        score = functools.partial(_scores, cut, text, found)
        return Reading(
            cut,
            places,
            text,
            decode(sentence),
            found,
            tokens,
            pictures,
            score(cut.tokens[None])[0],
            torch.cat([score(each[None]) for each in tokens]),
            score(cut.tokens_of(whole(grey))[None])[0],
            score(cut.tokens[None], attend=False)[0],
        )


def _scores(cut: Cut, text: Text, words: Sequence[Span], tokens: Tensor, *, attend: bool = True) -> Tensor:
    keep = len(text.ids) - text.places[0] + 1
    return log_probabilities(cut.logits(tokens, attend=attend, keep=keep), text, words)


def _kind(model: nn.Module, inputs: Inputs, prepared: dict[str, Any], text: Text) -> int:
    """Return the kind of the sentence's tokens with which no word sees the ones after it.

    PaliGemma calls what it writes 1 and everything before it 0, and Gemma 3 calls all text 0.
    """
    for kind in (0, 1):
        whole, shorter = (inputs.with_text(prepared, ids, kind) for ids in (text.ids, text.ids[:-1]))
        if reads_in_order(model, whole, shorter):
            return kind
    raise ModelError(
        f"{type(model).__name__} lets a word see the words after it, so camkit cannot score a sentence; pass a "
        "model that continues a text"
    )
