"""The heat of each word on the picture's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from camkit.errors import ModelError
from camkit.sentences.attending import attending_by_sdpa
from camkit.sentences.cut import DecoderCut
from camkit.sentences.reading import Reading

_ROOM = 0.5
"""The memory of a pass's activations, as a share of the weights': the total stays below 1.5 times the weights."""

_MOST_POINTS = 8
"""Points on the way from each reference, at most."""

_GOLDEN = (5**0.5 - 1) / 2

_CLOSE, _SMALL = 0.2, 0.1
"""How far the sum of a word's cells may be from how much it needs the picture: as a share of that, and in nats."""


def expected_gradients(reading: Reading, words: Sequence[int]) -> Float[Tensor, "w n"]:
    """Give token i the mean over the references B of (A_i - B_i) dS/dA_i, taken at points B + a (A - B).

    S is a word's log-probability. The tokens sum to S minus its mean over the references, but for the error of so
    short a sum (Erion et al. 2021, arXiv:1906.10670). In each round, each reference has one a, and together they lie
    evenly in (0, 1). A word takes part in further rounds until its sum is close.

    The first pass takes one reference, and says how many more fit into a pass.
    """
    cut, references, needs = reading.cut, reading.tokens, reading.needs[list(words)]
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
