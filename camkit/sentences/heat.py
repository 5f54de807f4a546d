"""The methods for words: each is a value that makes the heat of some of a sentence's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from camkit.errors import MethodError, ModelError
from camkit.methods import METHODS
from camkit.sentences.attending import attending_by_sdpa
from camkit.sentences.cut import Cut, DecoderCut
from camkit.sentences.inputs import Text
from camkit.sentences.places import Places
from camkit.sentences.words import Span, Words

_ROOM = 0.5
"""The memory of a pass's activations, as a share of the weights': the total stays below 1.5 times the weights."""

_MOST_POINTS = 8
"""Points on the way from each reference, at most."""

_GOLDEN = (5**0.5 - 1) / 2

_CLOSE, _SMALL = 0.2, 0.1
"""How far the sum of a word's cells may be from how much it needs the picture: as a share of that, and in nats."""


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


def expected_gradients(reading: Reading, words: Sequence[int]) -> Float[Tensor, "w n"]:
    """Give token i the mean over the references B of (A_i - B_i) dS/dA_i, taken at points B + a (A - B).

    S is a word's log-probability. The tokens sum to S minus its mean over the references, but for the error of so
    short a sum (Erion et al. 2021, arXiv:1906.10670). In each round, each reference has one a, and together they lie
    evenly in (0, 1). A word takes part in further rounds until its sum is close.

    The first pass takes one reference, and says how many more fit into a pass.
    """
    cut, references, needs = reading.cut, reading.references, (reading.own - reading.mean)[list(words)]
    total = torch.zeros(len(needs), len(cut.tokens), device=needs.device)
    rounds = torch.zeros(len(needs), device=needs.device)
    at_once = 1
    for number in range(_MOST_POINTS):
        missing = (total.sum(1) / rounds.clamp(min=1) - needs).abs()
        active = torch.nonzero((rounds == 0) | (missing > (_CLOSE * needs.abs()).clamp(min=_SMALL))).flatten().tolist()
        if not active:
            break
        shares = _shares(len(references), number).to(references.device)
        done = 0
        while done < len(references):
            part = slice(done, done + at_once)
            steps = cut.tokens.float() - references[part].float()
            points = (references[part].float() + shares[part, None, None] * steps).requires_grad_()
            with torch.enable_grad(), _counted(cut.model) as taken:
                scores = reading.score(points, words).sum(0)
            for word in active:
                (slope,) = torch.autograd.grad(scores[word], points, retain_graph=word != active[-1])
                total[word] += (slope * steps).sum((0, 2)).detach() / len(references)
            done += at_once
            if number == 0 and done == 1:
                at_once = _fitting(cut.model, sum(taken.values()), len(references))
        rounds[active] += 1
    return total / rounds[:, None]


@contextmanager
def _counted(model: nn.Module) -> Iterator[dict[int, int]]:
    """Count the bytes that a pass keeps for its gradients, without the model's weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    taken: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            taken[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield taken


def _fitting(model: nn.Module, bytes_each: int, most: int) -> int:
    """Return how many references fit into a pass."""
    weights = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    return max(min(int(_ROOM * weights / max(bytes_each, 1)), most), 1)


def _shares(count: int, number: int = 0) -> Float[Tensor, " count"]:
    """Return a point in each of ``count`` equal parts of (0, 1), in random order, the same in every run.

    Args:
        count: the number of parts.
        number: the number of the round. Each moves all points on by the golden ratio, so that those of one reference
            lie evenly too.
    """
    generator = torch.Generator().manual_seed(0)
    points = (torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)) / count
    return (points + number * _GOLDEN) % 1


def attention_rows(reading: Reading, words: Sequence[int]) -> Float[Tensor, "w n"]:
    """Return how much the tokens that predict each word attend to the picture's: mean over layers, heads and tokens.

    Only these rows are computed, from queries and keys; the attention itself runs as usual.

    Raises:
        ModelError: the words do not attend to the picture's tokens, or not through an attention that camkit can read.
    """
    cut, rows = reading.cut, [reading.predicting(word) for word in words]
    wanted = sorted({place for places in rows for place in places})
    layers: list[Tensor] = []
    if isinstance(cut, DecoderCut) and ("decoder_input_ids" not in cut.inputs or cut.entry == "encoder_hidden_states"):
        with torch.no_grad(), attending_by_sdpa(cut.decoder), _Recorder(wanted, cut.entering.shape[1]) as recorder:
            cut.output(cut.tokens[None])
        layers = [attended[:, cut.positions] for attended in recorder.layers]
    if not layers:
        raise ModelError(
            f"camkit cannot read how {type(cut.model).__name__} attends to the picture's tokens; use method='expected'"
        )
    mean = torch.stack(layers).mean(0)
    return torch.stack([mean[[wanted.index(place) for place in places]].mean(0) for places in rows])


class _Recorder(TorchFunctionMode):
    """Records rows of attention on a sequence of the given length, each (rows, length), in the current thread."""

    def __init__(self, wanted: list[int], length: int) -> None:
        super().__init__()
        self.layers: list[Tensor] = []
        self._wanted, self._length = wanted, length

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention:
            self._record(*args, **options)
        return function(*args, **options)

    def _record(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,  # noqa: ARG002 - these are the arguments of PyTorch's function
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> None:
        """Record rows of softmax(q k / sqrt(d)), the mean over the heads."""
        if query.dim() != 4 or key.shape[2] != self._length or query.shape[2] <= max(self._wanted):
            return
        rows = query[0, :, self._wanted].float()
        keys = key[0].float().repeat_interleave(query.shape[1] // key.shape[1], 0)
        scores = rows @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None:
            part = attn_mask.expand(*query.shape[:3], self._length)[0, :, self._wanted]
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype is torch.bool else scores + part
        elif is_causal:
            places = torch.arange(self._length, device=keys.device)
            scores = scores.masked_fill(places > places[self._wanted, None], -torch.inf)
        self.layers.append(scores.softmax(-1).mean(0))


@torch.no_grad()
def activation_maps(reading: Reading, words: Sequence[int]) -> Float[Tensor, "w n"]:
    """Return each word's token activation map (TAM), before the filter: the mean over the word's tokens.

    Li et al. 2025, Token Activation Map to Visually Explain Multimodal LLMs, ICCV (arXiv:2506.23270): where the model's
    output layer finds the word in the picture's tokens, without gradients. A token's map is the positive part of its
    logit at each of the picture's tokens. The tokens before it leave their own maps there, so a multiple of their mean
    is subtracted. Last, a filter over the ranks of 3 x 3 neighbours removes single outliers.

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
        [_own(logits, ids, cut.positions, text.places[token]) for token in reading.found[word].tokens] for word in words
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
    ranked = nn.functional.unfold(around, 3)[0].sort(0).values
    mean = ranked.mean(0)
    width = (ranked.std(0, correction=0) / mean).nan_to_num().clamp(min=torch.finfo(torch.float32).tiny ** 0.25)
    ranks = torch.arange(len(ranked), device=cells.device)[:, None] - len(ranked) // 2
    weights = (-(ranks**2) / (2 * width**2)).exp()
    return ((ranked * weights).sum(0) / weights.sum(0)).reshape(cells.shape)


TokenMaps: TypeAlias = Callable[[Reading, Sequence[int]], Float[Tensor, "w n"]]
"""``maps(reading, words)`` returns the heat of words, named by their numbers, at each of the picture's tokens."""


def _attention_expected(reading: Reading, words: Sequence[int]) -> Float[Tensor, "w n"]:
    return attention_rows(reading, words) * expected_gradients(reading, words).clamp(min=0)


@dataclass(frozen=True)
class WordMethod:
    """One way to make the heat of words.

    Attributes:
        name: what ``method=`` and ``--method`` take.
        maps: makes the heat at the picture's tokens; it refuses a model that lacks what the method needs.
        unit: what the values are, as the first words of a caption.
        compares: True if the cells sum to how much the word needs the picture, compared with the references.
        smooth: True if single outliers on the grid are removed.
    """

    name: str
    maps: TokenMaps
    unit: str
    compares: bool = False
    smooth: bool = False

    def heat(self, reading: Reading, words: Sequence[int]) -> dict[int, Float[Tensor, "h w"]]:
        """Return the heat of words on the picture's grid, by their numbers.

        Raises:
            ModelError: the model does not have what the method needs.
        """
        maps = self.maps(reading, words)
        drawn = {word: reading.places.drawn(each) for word, each in zip(words, maps, strict=True)}
        return {word: filtered(each) for word, each in drawn.items()} if self.smooth else drawn


DEFAULT = "expected"
"""The method for words unless the caller names one."""

_OF_ATTENTION = "Share of attention"

WORD_METHODS = {
    method.name: method
    for method in (
        WordMethod("expected", expected_gradients, METHODS["expected"].unit, compares=True),
        WordMethod("attention", attention_rows, _OF_ATTENTION),
        WordMethod("attention-expected", _attention_expected, f"{_OF_ATTENTION} times expected gradients"),
        WordMethod(
            "tam", activation_maps, "Logit at the picture's token, less what earlier words explain", smooth=True
        ),
    )
}
"""Every method for words by its name."""


def find_word_method(name: str) -> WordMethod:
    """Return a method for words from its name.

    Raises:
        MethodError: there is none.
    """
    if name not in (names := tuple(WORD_METHODS)):
        raise MethodError(f"{name!r} is not a method for words; use one of {', '.join(names)}")
    return WORD_METHODS[name]
