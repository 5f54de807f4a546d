"""From a picture and a prompt to the words, each with its heat."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast, get_args

from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from camkit.engine.guard import guarded
from camkit.engine.interrupts import interruptible
from camkit.errors import InputError, MethodError, ModelError, did_you_mean
from camkit.images.prepare import source_of
from camkit.sentences.heat import attention_rows, combined, expected_gradients, frozen
from camkit.sentences.inputs import Inputs
from camkit.sentences.loading import processor_of
from camkit.sentences.reading import Known, Reading, read_sentence
from camkit.sentences.references import read
from camkit.sentences.result import Words
from camkit.sentences.sentence import Span
from camkit.sentences.tam import activation_maps, filtered
from camkit.sentences.word import PREDICTABLE, Word, explanation_of
from camkit.types import ImageLike, ReferenceScores, ReferencesLike

Method: TypeAlias = Literal["expected", "attention", "attention-expected", "tam"]
METHODS: tuple[str, ...] = get_args(Method)
DEFAULT: Method = "expected"


def explain(
    model: nn.Module,
    image: ImageLike | Sequence[ImageLike],
    prompt: str | None,
    *,
    processor: Any,
    words: str | None,
    references: ReferencesLike | None,
    method: str,
    max_new_tokens: int,
    only: str | None,
    known: Known,
    picture: int = 0,
) -> Words:
    """Explain the words about a picture, as ``words``; ``known`` has what was measured for earlier pictures."""
    if method not in METHODS:
        raise MethodError(f"{method!r} is not a method for words; use one of {', '.join(METHODS)}")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
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
    processor = _processor_of(model) if processor is None else processor
    with guarded(model), frozen(model), interruptible():
        inputs = Inputs(model, processor, prompt, shown[:picture], shown[picture + 1 :])
        reading = read_sentence(model, inputs, shown[picture], words, references, max_new_tokens, known)
        wanted = _wanted(reading.spans, only, reading.decoded)
        heat = _heat(reading, wanted, method)
    found = _result(reading, heat, shown[picture], method, sources[picture], inputs.prompt, written=words is None)
    return replace(found, beside=tuple(sources[:picture] + sources[picture + 1 :]))


def _wanted(found: Sequence[Span], only: str | None, sentence: str) -> list[int]:
    """Return the numbers of the words whose heat is drawn."""
    chosen = [number for number, span in enumerate(found) if only is None or span.text.lower() == only.lower()]
    if not chosen:
        hint = did_you_mean(only or "", [span.text for span in found])
        raise InputError(f"the sentence {sentence.strip()!r} has no word {only!r}{hint}")
    return chosen


def _heat(reading: Reading, wanted: Sequence[int], method: str) -> dict[int, Float[Tensor, "h w"]]:
    """Return the heat of the chosen words on the picture's grid."""
    chosen = [reading.spans[number] for number in wanted]
    if method == "tam":
        activated = activation_maps(reading.cut, reading.text, chosen)
        return {number: filtered(reading.places.drawn(each)) for number, each in zip(wanted, activated, strict=True)}
    maps: Tensor | None = None
    if method != "attention":
        score = functools.partial(reading.score, chosen=chosen)
        maps = expected_gradients(reading.cut, reading.tokens, score, reading.needs[list(wanted)])
    if method != "expected":
        rows = [[reading.text.places[token] - 1 for token in span.tokens] for span in chosen]
        attention = attention_rows(reading.cut, rows)
        maps = attention if maps is None else combined(attention, maps)
    assert maps is not None
    return {number: reading.places.drawn(each) for number, each in zip(wanted, maps, strict=True)}


def _result(
    reading: Reading,
    heat: dict[int, Tensor],
    picture: Image.Image,
    method: str,
    source: str,
    prompt: str | None,
    *,
    written: bool,
) -> Words:
    mean, spread = reading.others.mean(0), reading.others.std(0, correction=0)
    likely = reading.others.exp().amin(0) >= PREDICTABLE
    made = []
    for number, span in enumerate(reading.spans):
        own = float(reading.own[number])
        compared = ReferenceScores(reading.pictures, "log-probability", own, float(mean[number]))
        explained = None
        if number in heat:
            explained = explanation_of(
                span.text,
                heat[number],
                own,
                compared if method == "expected" else None,
                picture,
                reading.places,
                layer=reading.cut.name,
                method=method,
                source=source,
            )
        made.append(
            Word(
                text=span.text,
                tokens=span.tokens,
                probability=float(reading.own[number].exp()),
                needs_picture=own - float(mean[number]),
                spread=float(spread[number]),
                above_grey=own - float(reading.grey[number]),
                above_none=own - float(reading.hidden[number]),
                is_punctuation=span.is_punctuation,
                is_dictated=bool(likely[number]) and not span.is_punctuation,
                explanation=explained,
            )
        )
    return Words(reading.decoded.strip(), tuple(made), picture, source, prompt, reading.pictures, written)


def _processor_of(model: Any) -> Any:
    """Return the processor of the folder that a model was loaded from."""
    name = getattr(model, "name_or_path", "")
    try:
        return processor_of(name)
    except Exception as error:
        raise ModelError(f"no processor found beside the model ({name or 'no folder'}); pass processor=...") from error
