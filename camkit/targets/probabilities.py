"""Recognises class scores that are probabilities already, and differentiates the logits behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from camkit.types import Activation

_ACTIVATIONS = ("SoftmaxBackward0", "SigmoidBackward0", "LogSoftmaxBackward0", "LogSigmoidBackward0")
_RESHAPING = (
    "AliasBackward0",
    "ClampBackward0",
    "ClampBackward1",
    "ClampMaxBackward0",
    "ClampMinBackward0",
    "CloneBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
)
"""The operations in PyTorch's graph that give probabilities, and those that leave the values as they are.

Probabilities are often clamped to keep their logarithm finite."""

_ROUNDING, _ROUNDING_16_BITS = 1e-3, 2e-2
"""How far a sum of probabilities may differ from 1: more than the rounding errors of 1,000 classes add up to, in fp32
and in 16 bits."""


def final_activation(scores: Tensor) -> Any:
    """Return the softmax, sigmoid or logarithm of one of them that gave these scores, as a node of the autograd graph.

    It may be a module or a function, and its result may be multiplied by 100. None if the scores come from something
    else, or have no graph.
    """
    node: Any = scores.grad_fn
    while node is not None and (
        node.name() in _RESHAPING or (node.name() == "MulBackward0" and _whole_of(scores.detach()) == _PERCENT)
    ):
        node = node.next_functions[0][0]
    return node if node is not None and node.name() in _ACTIVATIONS else None


ScoreKind: TypeAlias = Literal["logit", "probability", "log-probability", "percentage"]
PLURAL: dict[ScoreKind, str] = {
    "logit": "logits",
    "probability": "probabilities",
    "log-probability": "log-probabilities",
    "percentage": "percentages",
}


@dataclass(frozen=True, eq=False)
class ScoreReading:
    r"""What kind of numbers class scores are.

    Attributes:
        values: the scores (N, K, \*cells), without a graph.
        activation: what ``final_activation`` finds.
        final: its name; empty if there is none.
        whole: what the scores of all classes sum to everywhere, 1 or 100, if none is negative; else None.
    """

    values: Float[Tensor, "n k *cells"]
    activation: Any
    final: str
    whole: int | None

    @classmethod
    def of(cls, scores: Float[Tensor, "n k *cells"], final: str = "") -> ScoreReading:
        """Read class scores: by what computed them, and by their sums over the classes.

        ``final`` is the name of the softmax or sigmoid in which the model ends, for scores without a graph.
        """
        values, node = scores.detach(), final_activation(scores)
        return cls(values, node, final if node is None else node.name(), _whole_of(values))

    @property
    def kind(self) -> ScoreKind:
        """The kind of number."""
        if self.whole == _PERCENT:
            return "percentage"
        if self.final.startswith("Log"):
            return "log-probability"
        return "probability" if self.final or self.whole is not None else "logit"

    @property
    def probabilities(self) -> Float[Tensor, "n k *cells"] | None:
        """The scores as probabilities if they are probabilities or their logarithms already; else None."""
        if self.whole is not None:
            return self.values.float() / self.whole
        if not self.final:
            return None
        return self.values.float().exp() if self.kind == "log-probability" else self.values.float()

    @property
    def logits(self) -> Float[Tensor, "n k *cells"]:
        """Logits that give these scores, without the constant that a softmax drops.

        Probabilities that rounding made 0 or 1 have the logits of the nearest numbers that are neither.
        """
        values = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        limits = torch.finfo(values.dtype)
        if self.final.startswith("LogSigmoid"):
            return values - (-values.clamp(max=-limits.tiny).expm1()).log()
        if self.final.startswith("Sigmoid"):
            return values.clamp(limits.tiny, 1 - limits.eps / 2).logit()
        if self.whole is not None and not self.final.startswith("Softmax"):
            values = self.values.float() / self.whole
        elif not self.final.startswith("Softmax"):
            return values
        return values.clamp(min=limits.tiny).log()


def probabilities(scores: ScoreReading, activation: Activation | None) -> Float[Tensor, "n k"] | None:
    """Return the probabilities of the classes; None if the activation is "none".

    Scores that are probabilities already are returned as they are.
    """
    function = activation or ("sigmoid" if scores.values.shape[1] == 1 else "softmax")
    if function == "none":
        return None
    given = scores.probabilities
    if given is not None:
        return given
    values = scores.values.float()
    return values.sigmoid() if function == "sigmoid" else values.softmax(dim=1)


_PERCENT = 100


def _whole_of(scores: Float[Tensor, "n k *cells"]) -> int | None:
    """Return 1 or 100 if no score is negative and the scores of all classes sum to it everywhere; else None.

    A picture with NaN or infinity does not count: it would change how the others are read.
    """
    if scores.shape[1] < 2 or not scores.numel():
        return None
    least = scores.amin()  # NaN if any score is
    if bool(least.isfinite()) and bool(least < 0):
        return None
    are_finite = scores.sum(1, dtype=torch.float32).isfinite().reshape(len(scores), -1).all(1)
    if not bool(are_finite.all()):
        if not bool(are_finite.any()):
            return None
        scores = scores[are_finite]
        least = scores.amin()
    if bool(least < 0):
        return None
    return next((whole for whole in (1, _PERCENT) if bool(_close_to(whole, scores).all())), None)


def rows_that_sum_to(whole: int, scores: Float[Tensor, "n k"]) -> Bool[Tensor, "n"]:
    """Tell for each row whether none of its scores is negative, and they sum to ``whole``."""
    return (scores >= 0).all(1) & _close_to(whole, scores)


def _close_to(whole: int, scores: Float[Tensor, "n k *cells"]) -> Bool[Tensor, "n *cells"]:
    tolerance = _ROUNDING_16_BITS if scores.dtype in (torch.float16, torch.bfloat16) else _ROUNDING
    return (scores.sum(1, dtype=torch.float32) / whole - 1).abs() <= tolerance


@contextmanager
def passing_through(node: Any) -> Iterator[None]:
    """Let gradients pass through a softmax or sigmoid unchanged in the block, as if the model returned the logits.

    So a class has the same map with and without this last step, also if its probability is so close to 1 that the
    gradient of the probability is zero. If ``node`` is None, nothing happens.
    """
    if node is None:
        yield
        return

    def unchanged(before: tuple[Tensor | None, ...], after: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return (None if before[0] is None else after[0].to(before[0].dtype), *before[1:])

    handle = node.register_hook(unchanged)
    try:
        yield
    finally:
        handle.remove()
