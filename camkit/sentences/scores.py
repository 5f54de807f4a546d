"""How probable each word is with this picture, and with others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from camkit.sentences.sentence import Span


def log_probabilities(
    logits: Float[Tensor, "m t v"], text: Int[Tensor, " t"], first: int, words: Sequence[Span]
) -> Float[Tensor, "m w"]:
    """Return the log-probability of each word after those before it: that of its tokens, added.

    Args:
        logits: after each token of the text.
        text: the tokens: the prompt, and the sentence from position ``first``.
        first: where the sentence starts.
        words: the words, with their tokens counted from ``first``.
    """
    if not words:
        return logits.new_zeros(len(logits), 0)
    places = [first + token for word in words for token in word.tokens]
    before = logits[:, [place - 1 for place in places]].float().log_softmax(-1)
    each = before.gather(-1, text[places].expand(len(logits), -1)[..., None])[..., 0]
    return torch.stack([part.sum(1) for part in each.split([len(word.tokens) for word in words], dim=1)], 1)
