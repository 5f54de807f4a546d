"""Token activation maps (TAM): where the model's output layer finds a word in the picture's tokens, without gradients.

Li et al. 2025, Token Activation Map to Visually Explain Multimodal LLMs, ICCV (arXiv:2506.23270). A token's map is the
positive part of its logit at each of the picture's tokens. The tokens before it leave their own maps there, so a
multiple of their mean is subtracted. Last, a filter over the ranks of 3 x 3 neighbours removes single outliers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from camkit.errors import ModelError
from camkit.sentences.cut import DecoderCut
from camkit.sentences.reading import Reading

_SIDE = 3
"""Width of the filter's window, in cells; as in the paper's code."""


@torch.no_grad()
def activation_maps(reading: Reading, words: Sequence[int]) -> Float[Tensor, "w n"]:
    """Return each word's map on the picture's tokens, before the filter: the mean over the word's tokens.

    Raises:
        ModelError: the picture's tokens are not among the text's, so they have no logits.
    """
    cut, text = reading.cut, reading.text
    if not isinstance(cut, DecoderCut) or cut.entry != "inputs_embeds" or cut.entering.shape[1] != len(text.ids):
        raise ModelError(
            f"{type(cut.model).__name__} has no logits at the picture's tokens, which method='tam' needs; "
            "use method='expected'"
        )
    columns, ids = text.ids.unique(return_inverse=True)  # a vocabulary has 100,000 columns and more
    logits = cut.logits(cut.tokens[None])[0][:, columns].clamp(min=0)
    maps = [
        [_own(logits, ids, cut.positions, text.places[token]) for token in reading.spans[word].tokens] for word in words
    ]
    return torch.stack([torch.stack(parts).mean(0) for parts in maps])


def _own(
    logits: Float[Tensor, "t v"], ids: Int[Tensor, " t"], picture: Int[Tensor, " n"], place: int
) -> Float[Tensor, " n"]:
    """Return the map of one token, less what the tokens between the picture and it explain; equal ones do not count.

    Each earlier token counts as much as its state predicts this token. Least squares fit the multiple of their mean.
    """
    wanted = ids[place]
    between = torch.arange(int(picture.max()) + 1, place, device=ids.device)
    earlier = between[ids[between] != wanted]
    own, asks = logits[picture, wanted], logits[earlier, wanted]
    others = logits[picture][:, ids[earlier]] @ asks
    length = others @ others
    return own if length == 0 else (own - (own @ others) / length * others).clamp(min=0)


def filtered(cells: Float[Tensor, "h w"]) -> Float[Tensor, "h w"]:
    """Return the rank Gaussian filter of a map that is nowhere negative.

    Each cell becomes a mean of its ranked neighbours; their weights fall with the distance from the middle rank, as a
    Gaussian whose width in ranks is the neighbours' standard deviation over their mean. Outside, the map is reflected;
    a single row or column is repeated.
    """
    around = cells[None, None]
    for axis, padding in ((2, (0, 0, 1, 1)), (3, (1, 1, 0, 0))):
        around = nn.functional.pad(around, padding, mode="reflect" if around.shape[axis] > 1 else "replicate")
    ranked = nn.functional.unfold(around, _SIDE)[0].sort(0).values
    mean = ranked.mean(0)
    width = (ranked.std(0, correction=0) / mean).nan_to_num().clamp(min=torch.finfo(torch.float32).tiny ** 0.25)
    ranks = torch.arange(len(ranked), device=cells.device)[:, None] - len(ranked) // 2
    weights = (-(ranks**2) / (2 * width**2)).exp()
    return ((ranked * weights).sum(0) / weights.sum(0)).reshape(cells.shape)
