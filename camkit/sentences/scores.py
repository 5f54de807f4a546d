"""How probable each word is with this picture, and with others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.sentences.inputs import Text
from camkit.sentences.sentence import Span


def log_probabilities(logits: Float[Tensor, "m k v"], text: Text, words: Sequence[Span]) -> Float[Tensor, "m w"]:
    """Return the log-probability of each word after those before it: that of its tokens, added.

    Args:
        logits: after each of the last k tokens of the text.
        text: the text.
        words: its words.
    """
    if not words:
        return logits.new_zeros(len(logits), 0)
    places = [text.places[token] for word in words for token in word.tokens]
    earlier = len(text.ids) - logits.shape[1]
    before = logits[:, [place - 1 - earlier for place in places]].float().log_softmax(-1)
    each = before.gather(-1, text.ids[places].expand(len(logits), -1)[..., None])[..., 0]
    return torch.stack([part.sum(1) for part in each.split([len(word.tokens) for word in words], dim=1)], 1)
