"""The heat of each word on the picture's tokens."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from camkit.engine.interrupts import interruptible, undisturbed
from camkit.errors import ModelError
from camkit.sentences.cut import Cut, DecoderCut

ScoreTokens: TypeAlias = Callable[[Tensor], Tensor]
"""``score(tokens)`` turns versions of the picture's tokens (M, n, C) into the log-probabilities (M, W) of the words."""

_ROOM = 0.5
"""The memory of a pass's activations, as a share of the weights': the total stays below 1.5 times the weights."""

_MOST_POINTS = 8
"""Points on the way from each reference, at most."""

_GOLDEN = (5**0.5 - 1) / 2

_CLOSE, _SMALL = 0.2, 0.1
"""How far the sum of a word's cells may be from how much it needs the picture: as a share of that, and in nats."""


def expected_gradients(
    cut: Cut, references: Float[Tensor, "m n c"], score: ScoreTokens, needs: Float[Tensor, " w"]
) -> Float[Tensor, "w n"]:
    """Give token i the mean over the references B of (A_i - B_i) dS/dA_i, taken at points B + a (A - B).

    S is a word's log-probability. The tokens sum to S minus its mean over the references, but for the error of so
    short a sum (Erion et al. 2021, arXiv:1906.10670). In each round, each reference has one a, and together they lie
    evenly in (0, 1). A word takes part in further rounds until its sum is close.

    The first pass takes one reference, and says how many more fit into a pass.

    Args:
        cut: where the picture enters.
        references: the tokens of other pictures.
        score: scores the words.
        needs: what each word's cells should sum to: how much it needs the picture, in nats.
    """
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
                scores = score(points).sum(0)
            for word in active:
                (slope,) = torch.autograd.grad(scores[word], points, retain_graph=word != active[-1])
                total[word] += (slope * steps).sum((0, 2)).detach() / len(references)
            done += at_once
            if number == 0 and done == 1:
                at_once = _fitting(cut.model, sum(taken.values()), len(references))
        rounds[active] += 1
    return total / rounds[:, None]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Ask for no gradients of the weights, so that a pass keeps nothing for them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


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


def attention_rows(cut: Cut, rows: Sequence[Sequence[int]]) -> Float[Tensor, "w n"]:
    """Return how much the tokens that predict each word attend to the picture's: mean over layers, heads and tokens.

    Only these rows are computed, from queries and keys; the attention itself runs as usual.

    Args:
        cut: where the picture enters.
        rows: for each word, the positions of the text from which its tokens are predicted.

    Raises:
        ModelError: the words do not attend to the picture's tokens, or not through an attention that camkit can read.
    """
    wanted = sorted({place for places in rows for place in places})
    layers: list[Tensor] = []
    own_text = "decoder_input_ids" not in cut.inputs or getattr(cut, "entry", "") == "encoder_hidden_states"
    if isinstance(cut, DecoderCut) and own_text:
        with torch.no_grad(), attending_by_sdpa(cut.decoder), _Recorder(wanted, cut.entering.shape[1]) as recorder:
            cut.output(cut.tokens[None])
        layers = [rows[:, cut.positions] for rows in recorder.layers]
    if not layers:
        raise ModelError(
            f"camkit cannot read how {type(cut.model).__name__} attends to the picture's tokens; use method='expected'"
        )
    mean = torch.stack(layers).mean(0)
    return torch.stack([mean[[wanted.index(place) for place in places]].mean(0) for places in rows])


@contextmanager
def attending_by_sdpa(model: nn.Module, *kept: str | None) -> Iterator[None]:
    """Let a function of PyTorch's compute all attention in the block; implementations in ``kept`` stay as they are.

    Threads that share a model share this setting; the last one to leave restores it.
    """
    configs: dict[int, Any] = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    with undisturbed():
        with _lock:
            used = [setting for setting in map(functools.partial(_replace, kept), configs.values()) if setting]
        try:
            with interruptible():
                yield
        finally:
            with _lock:
                for setting in used:
                    setting.users -= 1
                    if not setting.users:
                        setting.config._attn_implementation_internal = setting.name
                        del _replaced[id(setting.config)]


def _replace(kept: Sequence[str | None], config: Any) -> _Replaced | None:
    """Count one more user of a model's setting, which is replaced for the first one; None if it stays as it is."""
    name = getattr(config, "_attn_implementation_internal", "sdpa")
    setting = _replaced.get(id(config))
    if setting is None and name in ("sdpa", *kept):
        return None
    if setting is None:
        setting = _replaced[id(config)] = _Replaced(config, name)
        config._attn_implementation_internal = "sdpa"
    setting.users += 1
    return setting


@dataclass
class _Replaced:
    """A setting of a model's that is replaced for now: its object, its name, and how many threads need that."""

    config: Any
    name: str | None
    users: int = 0


_replaced: dict[int, _Replaced] = {}
_lock = threading.Lock()


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
