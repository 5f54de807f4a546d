"""From a picture and a prompt to the words, each with its heat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.guard import guarded
from camkit.engine.interrupts import interruptible
from camkit.errors import InputError
from camkit.explanation import Explanation, LayerMaps, status_of
from camkit.images.prepare import source_of
from camkit.sentences.reading import Reading, SentenceReader
from camkit.sentences.references import read
from camkit.sentences.result import Words
from camkit.sentences.sentence import numbers_of
from camkit.sentences.word import PREDICTABLE, Word
from camkit.sentences.word_methods import DEFAULT, WordMethod, find_word_method
from camkit.types import ImageLike, Placement, ReferenceScores, ReferencesLike


class WordSettings:
    """Which words are explained, and how; ``camkit.words`` describes the arguments.

    Raises:
        MethodError: there is no such method.
        InputError: the model may write no token.
    """

    def __init__(
        self, words: str | None = None, method: str = DEFAULT, max_new_tokens: int = 64, only: str | None = None
    ) -> None:
        self.method = find_word_method(method)
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        self.words, self.max_new_tokens, self.only = words, max_new_tokens, only


def explain(
    reader: SentenceReader,
    image: ImageLike | Sequence[ImageLike],
    references: ReferencesLike | None,
    settings: WordSettings,
    picture: int = 0,
) -> Words:
    """Explain the words that a model writes about a picture, as ``words``."""
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
    before, after = shown[:picture], shown[picture + 1 :]
    with guarded(reader.model), _frozen(reader.model), interruptible():
        reading = reader.read(
            shown[picture], settings.words, references, settings.max_new_tokens, before=before, after=after
        )
        texts = [span.text for span in reading.spans]
        wanted = range(len(texts)) if settings.only is None else numbers_of(settings.only, texts, reading.sentence)
        heat = settings.method.heat(reading, wanted)
    source = sources.pop(picture)
    explained = {word: explanation_of(reading, word, each, settings.method, source) for word, each in heat.items()}
    return Words(
        reading.sentence,
        tuple(_words(reading, explained)),
        reading.picture,
        source,
        reading.inputs.prompt,
        reading.pictures,
        written=settings.words is None,
        beside=tuple(sources),
    )


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Ask for no gradients of the weights, so that a pass keeps nothing for them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _words(reading: Reading, explained: Mapping[int, Explanation]) -> Iterator[Word]:
    mean, spread = reading.others.mean(0), reading.others.std(0, correction=0)
    likely = reading.others.exp().amin(0) >= PREDICTABLE
    for number, span in enumerate(reading.spans):
        own = float(reading.own[number])
        yield Word(
            text=span.text,
            tokens=span.tokens,
            probability=float(reading.own[number].exp()),
            needs_picture=own - float(mean[number]),
            spread=float(spread[number]),
            above_grey=own - float(reading.grey[number]),
            above_none=own - float(reading.hidden[number]),
            is_punctuation=span.is_punctuation,
            is_dictated=bool(likely[number]) and not span.is_punctuation,
            explanation=explained.get(number),
        )


def explanation_of(
    reading: Reading, word: int, heat: Float[Tensor, "h w"], method: WordMethod, source: str
) -> Explanation:
    """Return the heat of a word as an Explanation, drawn on the part of the picture that the model sees."""
    raw = heat.detach().float().cpu()
    box = reading.places.box
    size = max(round(box.bottom - box.top), 1), max(round(box.right - box.left), 1)
    axes = zip((reading.places.rows, reading.places.columns), size, strict=True)
    placement = Placement(positions=tuple(tuple(share * side - 0.5 for share in axis) for axis, side in axes))
    maps = LayerMaps((raw,), (placement,), "mean", size)
    own, mean = float(reading.own[word]), float(reading.others.mean(0)[word])
    return Explanation(
        maps=maps,
        raw=np.asarray(raw.numpy()),
        target=None,
        label=reading.spans[word].text,
        score=own,
        probability=float(np.exp(own)),
        layer=reading.cut.name,
        layer_reason="the picture enters the decoder here",
        method=method.name,
        status=status_of(maps, raw.numpy(), influenced=bool(raw.any())),
        box=box,
        shown=reading.picture,
        source=source,
        quantity="log-probability",
        references=ReferenceScores(reading.pictures, "log-probability", own, mean) if method.compares else None,
        unit=method.unit,
    )
