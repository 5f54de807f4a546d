"""What a model says about a picture, and what its words score with this picture and with others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from camkit.errors import InputError, ModelError
from camkit.sentences.cut import Cut
from camkit.sentences.find import find_cut, reads_in_order
from camkit.sentences.inputs import Inputs, Text
from camkit.sentences.loading import processor_beside
from camkit.sentences.places import Places, places_of
from camkit.sentences.references import reference_pictures
from camkit.sentences.sentence import Span, spans
from camkit.types import ReferencesLike


@dataclass(frozen=True, eq=False)
class Reading:
    """What the model was asked and answered, and what the words score with each picture.

    Attributes:
        inputs: makes the model's arguments.
        picture: the picture.
        cut: where the picture's tokens are taken.
        places: where they look.
        text: the prompt's tokens and the sentence's.
        sentence: the sentence.
        spans: its words.
        tokens: the references' tokens (M, n, C).
        pictures: what the references are, as a phrase.
        own, others, grey, hidden: the log-probabilities of the words with this picture (W,), with the references
            (M, W), with a grey picture (W,), and with the picture hidden (W,).
    """

    inputs: Inputs
    picture: Image.Image
    cut: Cut
    places: Places
    text: Text
    sentence: str
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

    def predicting(self, word: int) -> list[int]:
        """Return the positions of the text from which a word's tokens are predicted."""
        return [self.text.places[token] - 1 for token in self.spans[word].tokens]

    def score(self, tokens: Float[Tensor, "m n c"], words: Sequence[int]) -> Float[Tensor, "m w"]:
        """Return the log-probabilities of words for M versions of the picture's tokens."""
        return _scores(self.cut, self.text, [self.spans[word] for word in words], tokens)


class SentenceReader:
    """Lets a model read pictures with one prompt, and keeps where its tokens look in pictures of one size.

    Args:
        model: the model.
        processor: its processor; by default that of the folder from which the model was loaded.
        prompt: the prompt as the user writes it; None for none.

    Raises:
        ModelError: there is no processor beside the model.
    """

    def __init__(self, model: nn.Module, processor: Any, prompt: str | None) -> None:
        self.model, self._prompt = model, prompt
        self._processor = processor_beside(model) if processor is None else processor
        self._looks: dict[tuple[str, int, tuple[int, int]], Places | None] = {}

    def read(
        self,
        picture: Image.Image,
        given: str | None,
        references: ReferencesLike | None,
        most: int,
        before: Sequence[Image.Image] = (),
        after: Sequence[Image.Image] = (),
    ) -> Reading:
        """Let the model write a sentence about a picture, or take the given one, and score its words.

        Args:
            picture: the picture.
            given: the given sentence.
            references: other pictures.
            most: the most tokens that the model writes.
            before, after: the prompt's other pictures before and after this one; they never change.

        Raises:
            InputError, ImageError, ModelError: as for ``words``.
        """
        inputs = Inputs(self.model, self._processor, self._prompt, before, after)
        prepared = inputs.of(picture)
        text = inputs.written(prepared, most) if given is None else inputs.given(prepared, given)
        ids = text.ids[text.places].tolist()
        decode: Callable[[Sequence[int]], str] = inputs.tokenizer.decode
        found = spans(ids, decode)
        if not found:
            raise InputError("the model writes no word about this picture; pass words='a sentence' to explain one")
        text = _in_order(self.model, inputs, prepared, text)
        mine = inputs.with_text(prepared, text)
        grey = inputs.with_text(inputs.of(Image.new("RGB", picture.size, (128, 128, 128))), text)
        locate = functools.partial(self._places, inputs, picture)
        cut, places = find_cut(self.model, mine, grey, inputs.with_text(prepared, _shorter(text)), locate)
        others, pictures = reference_pictures(references, picture)
        with torch.no_grad():
            score = functools.partial(_scores, cut, text, found)
            tokens = torch.stack([cut.tokens_of(inputs.with_text(inputs.of(each), text)) for each in others])
            return Reading(
                inputs,
                picture,
                cut,
                places,
                text,
                decode(ids).strip(),
                found,
                tokens,
                pictures,
                own=score(cut.tokens[None])[0],
                others=torch.cat([score(each[None]) for each in tokens]),
                grey=score(cut.tokens_of(grey)[None])[0],
                hidden=score(cut.tokens[None], attend=False)[0],
            )

    def _places(self, inputs: Inputs, picture: Image.Image, cut: Cut) -> Places | None:
        of_cut = cut.name, len(cut.tokens), picture.size
        if of_cut not in self._looks:
            self._looks[of_cut] = places_of(cut, inputs, picture)
        return self._looks[of_cut]


def _in_order(model: nn.Module, inputs: Inputs, prepared: dict[str, Any], text: Text) -> Text:
    """Return the text with the kind of the sentence's tokens with which no word sees the ones after it.

    PaliGemma calls what it writes 1 and everything before it 0, and Gemma 3 calls all text 0.
    """
    for kind in (0, 1):
        tried = replace(text, kind=kind)
        if reads_in_order(model, *(inputs.with_text(prepared, each) for each in (tried, _shorter(tried)))):
            return tried
    raise ModelError(
        f"{type(model).__name__} lets a word see the words after it, so camkit cannot score a sentence; pass a "
        "model that continues a text"
    )


def _shorter(text: Text) -> Text:
    return replace(text, ids=text.ids[:-1])


def _scores(cut: Cut, text: Text, words: Sequence[Span], tokens: Tensor, *, attend: bool = True) -> Tensor:
    keep = len(text.ids) - text.places[0] + 1
    return log_probabilities(cut.logits(tokens, attend=attend, keep=keep), text, words)


def log_probabilities(logits: Float[Tensor, "m k v"], text: Text, words: Sequence[Span]) -> Float[Tensor, "m w"]:
    """Return the log-probability of each word after those before it: that of its tokens, added.

    Args:
        logits: after each of the last k tokens of the text.
        text: the text.
        words: its words, one or more.
    """
    places = [text.places[token] for word in words for token in word.tokens]
    earlier = len(text.ids) - logits.shape[1]
    before = logits[:, [place - 1 - earlier for place in places]].float().log_softmax(-1)
    each = before.gather(-1, text.ids[places].expand(len(logits), -1)[..., None])[..., 0]
    return torch.stack([part.sum(1) for part in each.split([len(word.tokens) for word in words], dim=1)], 1)
