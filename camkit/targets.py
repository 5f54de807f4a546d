"""What is explained: a target turns the model's output into one score per image."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.errors import TargetError, did_you_mean
from camkit.values import Scores, Target

Labels: TypeAlias = "Sequence[str] | None"
TargetFunction: TypeAlias = Callable[[Any], Tensor]
TargetLike: TypeAlias = "int | str | ClassTarget | TopTarget | FunctionTarget | TargetFunction"


def describe(output: Any) -> str:
    """Say in a few words what a model returned.

    >>> describe({"out": torch.zeros(2, 21, 8, 8), "aux": None})
    "a dict with 'out': a tensor of shape (2, 21, 8, 8), 'aux': a NoneType"
    """
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, dict):
        return f"a {type(output).__name__} with " + ", ".join(f"{key!r}: {describe(v)}" for key, v in output.items())
    if isinstance(output, (tuple, list)):
        first = f", first {describe(output[0])}" if output else ""
        return f"a {type(output).__name__} of {len(output)} items{first}"
    return f"a {type(output).__name__}"


_SCORE_KEYS = ("logits", "out", "last_hidden_state")
"""Where dictionaries hold class scores; the last where it is (N, K), as one network of Hugging Face has it."""


def logits_of(output: Any, batch: int) -> Float[Tensor, "n k"]:
    """Find the class scores (N, K) in a model's output.

    Understands a tensor, a dictionary or object with ``logits`` (or ``out``), and a tuple or list that begins with one
    of these. An output (N,) counts as one logit.

    Raises:
        TargetError: there are no class scores; the message says what the model returned.

    """
    found = output
    while not isinstance(found, Tensor):
        key = next((key for key in _SCORE_KEYS if key in found), None) if isinstance(found, dict) else None
        if key is not None:
            found = found[key]
        elif isinstance(getattr(found, "logits", None), Tensor):
            found = found.logits
        elif isinstance(found, (tuple, list)) and found:
            found = found[0]
        else:
            break
    if isinstance(found, Tensor) and found.is_floating_point() and found.shape[:1] == (batch,):
        if found.dim() == 2 and found.shape[1] > 0:
            return found
        if found.dim() == 1:
            return found[:, None]
    raise TargetError(
        f"the model returned {describe(output)}, in which there are no class scores of shape ({batch}, classes); "
        "pass target=a function that takes this output and returns one score per image"
    )


def _class_scores(logits: Float[Tensor, "n k"], indices: Tensor) -> Scores:
    detached = logits.detach().float()
    shares = detached.sigmoid() if logits.shape[1] == 1 else detached.softmax(dim=1)
    return Scores(
        values=logits.gather(1, indices[:, None])[:, 0],
        indices=tuple(indices.tolist()),
        probabilities=tuple(shares.gather(1, indices[:, None])[:, 0].tolist()),
        classes=logits.shape[1],
    )


@dataclass(frozen=True)
class ClassTarget:
    """The logit of one class."""

    index: int

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the class's logit for each image; its probability is the softmax's, or the sigmoid's of one logit."""
        logits = logits_of(output, batch)
        if not 0 <= self.index < logits.shape[1]:
            raise TargetError(f"target {self.index} is out of range: the model has classes 0 to {logits.shape[1] - 1}")
        return _class_scores(logits, torch.full((batch,), self.index, device=logits.device))


@dataclass(frozen=True)
class TopTarget:
    """The logit of each image's own best class (rank 1), second best (rank 2), and so on."""

    rank: int = 1
    of: int | None = field(default=None, compare=False)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the logit of the class at this rank for each image."""
        logits = logits_of(output, batch)
        if self.rank > logits.shape[1]:
            raise TargetError(f"the model has {logits.shape[1]} classes, so there are no {self.of or self.rank} best")
        return _class_scores(logits, logits.detach().topk(self.rank, dim=1).indices[:, -1])


@dataclass(frozen=True)
class FunctionTarget:
    """Any score the caller computes from the model's output."""

    function: TargetFunction

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the function's scores, after checking that there is one per image."""
        values = self.function(output)
        if not isinstance(values, Tensor) or values.shape != (batch,) or not values.is_floating_point():
            raise TargetError(
                f"the target function returned {describe(values)}; it must return a floating-point tensor of shape "
                f"({batch},), one score per image"
            )
        return Scores(values=values, description=getattr(self.function, "__name__", None) or repr(self.function))


def top(count: int) -> list[TopTarget]:
    """Return targets for the ``count`` best classes of each image: ``explain(..., target=top(5))``."""
    if count < 1:
        raise TargetError(f"the number of best classes must be at least 1, not {count}")
    return [TopTarget(rank, of=count) for rank in range(1, count + 1)]


def _index_of(label: str, labels: Labels) -> int:
    if label.isdecimal() and (labels is None or label not in labels):
        return int(label)
    if labels is None:
        raise TargetError(
            f"target {label!r} is a label, but this model's labels are not known; pass labels=[...] or a class index"
        )
    folded = label.strip().casefold()
    found = [i for i, name in enumerate(labels) if name == label]
    found = found or [i for i, name in enumerate(labels) if name.strip().casefold() == folded]
    if len(found) == 1:
        return found[0]
    if found:
        raise TargetError(f"label {label!r} names classes {' and '.join(map(str, found))}; pass one of these indices")
    raise TargetError(f"the model has no label {label!r}{did_you_mean(label, labels)}")


def as_targets(target: TargetLike | Sequence[TargetLike] | None, labels: Labels = None) -> list[Target]:
    """Turn what the caller passed as ``target`` into targets.

    Args:
        target: None (each image's best class), a class index, a label's text, a function ``output -> (N,)``, a target
            of this module, or a list of these.
        labels: the model's class names, to look a text up in.

    Raises:
        TargetError: an unknown or ambiguous label, or a value that is none of these.

    """
    if target is None:
        return [TopTarget()]
    if isinstance(target, (list, tuple)):
        if not target:
            raise TargetError("the list of targets is empty; pass None for each picture's best class")
        return [single for item in target for single in as_targets(item, labels)]
    if isinstance(target, str):
        return [ClassTarget(_index_of(target, labels))]
    if isinstance(target, (ClassTarget, TopTarget, FunctionTarget)):
        return [target]
    is_one_number = not isinstance(target, Tensor) or (target.dim() == 0 and target.dtype is not torch.bool)
    if not isinstance(target, bool) and is_one_number:
        with contextlib.suppress(TypeError):
            return [ClassTarget(operator.index(cast("SupportsIndex", target)))]
    if callable(target):
        return [FunctionTarget(target)]
    raise TargetError(f"a target is None, an index, a label, a function or a list of these, not {describe(target)}")
