"""What a model says about a picture, and what its words score with this picture and with others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from camkit.errors import InputError
from camkit.sentences.decoder import Call, find_call, tokens_of
from camkit.sentences.inputs import Inputs, grid_of
from camkit.sentences.references import reference_pictures
from camkit.sentences.scores import log_probabilities
from camkit.sentences.sentence import Span, spans
from camkit.types import ReferencesLike


@dataclass(frozen=True, eq=False)
class Reading:
    """What the model was asked and answered, and what the words score with each picture.

    Attributes:
        call: the decoder's call.
        grid: the rows and columns of the picture's tokens, and how many tokens come before them.
        text: the prompt's tokens and the sentence's (T,).
        first: where the sentence starts in it.
        sentence: the sentence's tokens.
        decoded: the sentence.
        spans: its words.
        tokens: the references' tokens (M, n, C).
        pictures: what the references are, as a phrase.
        own, others, grey, hidden: the log-probabilities of the words with this picture (W,), with the references
            (M, W), with a grey picture (W,), and with the picture hidden (W,).
    """

    call: Call
    grid: tuple[int, int, int]
    text: Tensor
    first: int
    sentence: list[int]
    decoded: str
    spans: list[Span]
    tokens: Tensor
    pictures: str
    own: Tensor
    others: Tensor
    grey: Tensor
    hidden: Tensor

    def score(self, logits: Tensor, chosen: Sequence[Span] | None = None) -> Tensor:
        """Return the log-probabilities (M, W) of the words."""
        return log_probabilities(logits, self.text, self.first, self.spans if chosen is None else chosen)


def read_sentence(
    model: nn.Module,
    inputs: Inputs,
    picture: Image.Image,
    given: str | None,
    references: ReferencesLike | None,
    most: int,
) -> Reading:
    """Let the model write a sentence about a picture, or take the given one, and score its words.

    Raises:
        InputError, ImageError, ModelError: as for ``words``.
    """
    prepared = inputs.of(picture)
    start = inputs.start(prepared)
    sentence = _sentence(inputs, prepared, start, given, most)
    decode: Callable[[Sequence[int]], str] = inputs.tokenizer.decode
    found = spans(sentence, decode)
    if not found:
        raise InputError("the model writes no word about this picture; pass words='a sentence' to explain one")
    text = torch.cat([start, torch.tensor(sentence, device=start.device, dtype=start.dtype)])
    grey = inputs.of(Image.new("RGB", picture.size, (128, 128, 128)))
    arguments = functools.partial(inputs.with_text, text=text)
    call, _ = find_call(model, arguments(prepared), arguments(grey))
    others, pictures = reference_pictures(references, picture.size)
    tokens = torch.stack([tokens_of(model, call, arguments(inputs.of(each))) for each in others])
    grey_tokens = tokens_of(model, call, arguments(grey))

    def scored(versions: Tensor, **options: bool) -> Tensor:
        parts = versions.split(1)
        return torch.cat([log_probabilities(call.logits(part, **options), text, len(start), found) for part in parts])

    with torch.no_grad():
        return Reading(
            call,
            grid_of(prepared, call.positions.tolist()),
            text,
            len(start),
            sentence,
            decode(sentence),
            found,
            tokens,
            pictures,
            scored(call.tokens[None])[0],
            scored(tokens),
            scored(grey_tokens[None])[0],
            scored(call.tokens[None], attend=False)[0],
        )


def _sentence(inputs: Inputs, prepared: dict[str, Any], start: Tensor, given: str | None, most: int) -> list[int]:
    """Return the tokens of the sentence, without those that only mark its start or end."""
    special = set(inputs.tokenizer.all_special_ids)
    if given is not None:
        ids = inputs.tokenizer(given, add_special_tokens=False)["input_ids"]
    else:
        written = inputs.generated(prepared, most)
        begins = bool(len(written) >= len(start) and torch.equal(written[: len(start)], start))
        ids = written[len(start) if begins else 0 :].tolist()
    return [token for token in ids if token not in special]
