"""What a model says about a picture, and what its words score with other tokens of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.sentences.cut import Cut
from camkit.sentences.inputs import Text
from camkit.sentences.places import Places
from camkit.sentences.words import Span, Words


@dataclass(frozen=True, eq=False)
class Reading:
    """What the model was asked and answered, and what the words score.

    Attributes:
        found: the words, without heat.
        text: the prompt's tokens and the sentence's.
        cut: where the picture's tokens are taken.
        places: where they look.
        references: the tokens of the reference pictures (M, n, C).
        own, mean: the log-probabilities of the words (W,) with this picture, and their means over the references.
    """

    found: Words
    text: Text
    cut: Cut
    places: Places
    references: Float[Tensor, "m n c"]
    own: Float[Tensor, " w"]
    mean: Float[Tensor, " w"]

    def predicting(self, word: int) -> list[int]:
        """Return the positions of the text from which a word's tokens are predicted."""
        return [self.text.places[token] - 1 for token in self.found[word].tokens]

    def score(self, tokens: Float[Tensor, "m n c"], words: Sequence[int]) -> Float[Tensor, "m w"]:
        """Return the log-probabilities of words for M versions of the picture's tokens."""
        return scores(self.cut, self.text, [self.found[word] for word in words], tokens)


def scores(
    cut: Cut, text: Text, words: Sequence[Span], tokens: Float[Tensor, "m n c"], *, attend: bool = True
) -> Float[Tensor, "m w"]:
    """Return the log-probability of each word after those before it: that of its tokens, added.

    Args:
        cut: where the picture's tokens are replaced.
        text: the text.
        words: its words, one or more.
        tokens: M versions of the picture's tokens.
        attend: False hides the picture from the text.
    """
    logits = cut.logits(tokens, attend=attend, keep=len(text.ids) - text.places[0] + 1)
    places = [text.places[token] for word in words for token in word.tokens]
    earlier = len(text.ids) - logits.shape[1]
    before = logits[:, [place - 1 - earlier for place in places]].float().log_softmax(-1)
    each = before.gather(-1, text.ids[places].expand(len(logits), -1)[..., None])[..., 0]
    return torch.stack([part.sum(1) for part in each.split([len(word.tokens) for word in words], dim=1)], 1)
