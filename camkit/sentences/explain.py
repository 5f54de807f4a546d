"""From a picture and a prompt to the words that a model writes, each with its heat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from camkit.engine.guard import guarded
from camkit.engine.interrupts import interruptible
from camkit.errors import InputError, ModelError
from camkit.explaining.explanation import Explanation, LayerMaps, status_of
from camkit.images.prepare import source_of
from camkit.sentences.cut import Cut
from camkit.sentences.find import find_cut, reads_in_order
from camkit.sentences.heat import DEFAULT, Reading, find_word_method, scores
from camkit.sentences.inputs import Inputs, Text
from camkit.sentences.loading import load, processor_beside
from camkit.sentences.places import Places, places_of
from camkit.sentences.references import read, reference_pictures
from camkit.sentences.words import PREDICTABLE, Word, Words, numbers_of, spans
from camkit.types import ImageLike, Placement, ReferenceScores, ReferencesLike


class SentenceReader:
    """Lets a model read pictures with one prompt, and keeps where its tokens look in pictures of one size.

    Args:
        model: the model, or the name under which it is loaded.
        processor: its processor; by default that of the folder from which the model was loaded.
        prompt: the prompt as the user writes it; None for none.
        device: where a named model runs.
        words, method, max_new_tokens, only: as for ``camkit.words``.

    Raises:
        MethodError: there is no such method.
        InputError: the model may write no token.
        ModelError: the model cannot be loaded, or there is no processor beside it.
    """

    def __init__(
        self,
        model: nn.Module | str,
        processor: Any,
        prompt: str | None,
        device: str | None = None,
        words: str | None = None,
        method: str = DEFAULT,
        max_new_tokens: int = 64,
        only: str | None = None,
    ) -> None:
        self._method = find_word_method(method)
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        self._prompt, self._sentence, self._most, self._only = prompt, words, max_new_tokens, only
        self._model, beside = load(model, device) if isinstance(model, str) else (model, None)
        processor = beside if processor is None else processor
        self._processor = processor_beside(self._model) if processor is None else processor
        self._looks: dict[tuple[str, int, tuple[int, int]], Places | None] = {}

    def explain(
        self, image: ImageLike | Sequence[ImageLike], references: ReferencesLike | None, picture: int = 0
    ) -> Words:
        """Explain the words that the model writes about a picture, or about one of several in one prompt.

        Raises:
            InputError, ImageError, ModelError: as for ``camkit.words``.
        """
        images: list[ImageLike] = list(image) if isinstance(image, (list, tuple)) else [cast("ImageLike", image)]
        if not images:
            raise InputError("there is no picture; pass one or more")
        if not 0 <= picture < len(images):
            of_several = f"one of the {len(images)} pictures; their numbers start at 0"
            raise InputError(
                f"picture={picture} is not {of_several if images[1:] else '0, the number of the only picture'}"
            )
        sources = [source_of(each, number) for number, each in enumerate(images, start=1)]
        shown = [read(each, source) for each, source in zip(images, sources, strict=True)]
        with guarded(self._model), interruptible():
            self._model.requires_grad_(requires_grad=False)  # a pass then keeps nothing for the weights
            reading = self.read(shown, sources, references, picture)
            found, texts = reading.found, [word.text for word in reading.found]
            wanted = range(len(texts)) if self._only is None else numbers_of(self._only, texts, found.sentence)
            heat = self._method.heat(reading, wanted)
        explained = {number: self._explanation(reading, number, each) for number, each in heat.items()}
        words = (replace(word, explanation=explained.get(number)) for number, word in enumerate(found))
        return replace(found, words=tuple(words))

    def read(
        self, pictures: list[Image.Image], sources: list[str], references: ReferencesLike | None, number: int = 0
    ) -> Reading:
        """Let the model write a sentence about pictures, or take the given one, and score its words.

        Args:
            pictures: the prompt's pictures.
            sources: their names.
            references: other pictures.
            number: the one that is explained; the others never change.

        Raises:
            InputError, ImageError, ModelError: as for ``camkit.words``.
        """
        picture = pictures[number]
        inputs = Inputs(self._model, self._processor, self._prompt, pictures[:number], pictures[number + 1 :])
        prepared = inputs.of(picture)
        given = self._sentence
        text = inputs.written(prepared, self._most) if given is None else inputs.given(prepared, given)
        ids = text.ids[text.places].tolist()
        decode: Callable[[Sequence[int]], str] = inputs.tokenizer.decode
        parts = spans(ids, decode)
        if not parts:
            raise InputError("the model writes no word about this picture; pass words='a sentence' to explain one")
        text = self._in_order(inputs, prepared, text)
        mine = inputs.with_text(prepared, text)
        grey = inputs.with_text(inputs.of(Image.new("RGB", picture.size, (128, 128, 128))), text)
        locate = functools.partial(self._places, inputs, picture)
        cut, places = find_cut(self._model, mine, grey, inputs.with_text(prepared, _shorter(text)), locate)
        others, origin = reference_pictures(references, picture)
        with torch.no_grad():
            score = functools.partial(scores, cut, text, parts)
            tokens = torch.stack([cut.tokens_of(inputs.with_text(inputs.of(each), text)) for each in others])
            own, compared = score(cut.tokens[None])[0], torch.cat([score(each[None]) for each in tokens])
            above_grey, above_none = (
                [float(one) - float(other) for one, other in zip(own, less, strict=True)]
                for less in (score(cut.tokens_of(grey)[None])[0], score(cut.tokens[None], attend=False)[0])
            )
        mean, spread, least = compared.mean(0), compared.std(0, correction=0), compared.exp().amin(0)
        words = tuple(
            Word(
                part.text,
                part.tokens,
                probability=float(own[place].exp()),
                needs_picture=float(own[place]) - float(mean[place]),
                spread=float(spread[place]),
                above_grey=above_grey[place],
                above_none=above_none[place],
                is_dictated=bool(least[place] >= PREDICTABLE) and not part.is_punctuation,
            )
            for place, part in enumerate(parts)
        )
        found = Words(
            decode(ids).strip(),
            words,
            picture,
            sources[number],
            inputs.prompt,
            origin,
            written=given is None,
            beside=(*sources[:number], *sources[number + 1 :]),
        )
        return Reading(found, text, cut, places, tokens, own, mean)

    def _in_order(self, inputs: Inputs, prepared: dict[str, Any], text: Text) -> Text:
        """Return the text with the kind of the sentence's tokens with which no word sees the ones after it.

        PaliGemma calls what it writes 1 and everything before it 0, and Gemma 3 calls all text 0.
        """
        for kind in (0, 1):
            tried = replace(text, kind=kind)
            if reads_in_order(self._model, *(inputs.with_text(prepared, each) for each in (tried, _shorter(tried)))):
                return tried
        raise ModelError(
            f"{type(self._model).__name__} lets a word see the words after it, so camkit cannot score a sentence; pass "
            "a model that continues a text"
        )

    def _places(self, inputs: Inputs, picture: Image.Image, cut: Cut) -> Places | None:
        of_cut = cut.name, len(cut.tokens), picture.size
        if of_cut not in self._looks:
            self._looks[of_cut] = places_of(cut, inputs, picture)
        return self._looks[of_cut]

    def _explanation(self, reading: Reading, number: int, heat: Float[Tensor, "h w"]) -> Explanation:
        """Return the heat of a word as an Explanation, drawn on the part of the picture that the model sees."""
        raw, found = heat.detach().float().cpu(), reading.found
        box = reading.places.box
        size = max(round(box.bottom - box.top), 1), max(round(box.right - box.left), 1)
        axes = zip((reading.places.rows, reading.places.columns), size, strict=True)
        placement = Placement(positions=tuple(tuple(share * side - 0.5 for share in axis) for axis, side in axes))
        maps = LayerMaps((raw,), (placement,), "mean", size)
        own, mean = float(reading.own[number]), float(reading.mean[number])
        compared = ReferenceScores(found.references, "log-probability", own, mean)
        return Explanation(
            maps=maps,
            raw=np.asarray(raw.numpy()),
            target=None,
            label=found[number].text,
            score=own,
            probability=float(np.exp(own)),
            layer=reading.cut.name,
            layer_reason="the picture enters the decoder here",
            method=self._method.name,
            status=status_of(maps, raw.numpy(), influenced=bool(raw.any())),
            box=box,
            shown=found.picture,
            source=found.source,
            quantity="log-probability",
            references=compared if self._method.compares else None,
            unit=self._method.unit,
        )


def _shorter(text: Text) -> Text:
    return replace(text, ids=text.ids[:-1])
