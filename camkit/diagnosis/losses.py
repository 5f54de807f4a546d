"""The usual loss for labels of a certain shape and certain values, if the caller of a diagnosis passed no loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from camkit.errors import TargetError
from camkit.targets.outputs import describe, main_tensor
from camkit.targets.probabilities import final_activation, rows_that_sum_to

_IGNORED = -100
"""The label that PyTorch's cross entropy leaves out."""


def usual_loss(output: Any, labels: Any) -> tuple[Tensor, str]:
    """Return the loss of a model's output, and its name.

    Labels that are class indices (N, *cells), or shares of the classes that sum to 1 (N, K, *cells), give the cross
    entropy. Labels of a single output, and other labels from 0 to 1 (N, K, *cells), give the binary cross entropy. The
    labels may have an axis of length 1 for the classes. The output of a softmax or sigmoid is read as probabilities.

    Raises:
        TargetError: no loss fits the output and the labels.
    """
    scores = main_tensor(output)
    if not (isinstance(scores, Tensor) and scores.is_floating_point() and scores.dim() and isinstance(labels, Tensor)):
        raise TargetError(
            f"camkit has no usual loss for a model that returns {describe(output)} and labels of the type "
            f"{type(labels).__name__}; pass loss=, a function of output and labels"
        )
    logits = _logits(scores if scores.dim() > 1 else scores[:, None])
    if logits.dim() > 2 and logits.shape[2:].numel() == 1:
        logits = logits.flatten(1)
    one_class = (len(logits), *logits.shape[2:])
    if labels.shape == (len(logits), 1, *logits.shape[2:]):
        labels = labels.squeeze(1)
    if labels.shape == one_class and logits.shape[1] == 1:
        return _binary(logits.squeeze(1), labels, scores)
    if labels.shape == one_class and not labels.is_floating_point():
        return _of_classes(logits, labels.long(), scores), "cross entropy"
    if labels.shape == logits.shape:
        if bool(rows_that_sum_to(1, labels.float().movedim(1, -1).flatten(0, -2)).all()):
            return functional.cross_entropy(logits, labels.float()), "cross entropy"
        return _binary(logits, labels, scores)
    raise _unfit(scores, labels, "")


def _logits(scores: Tensor) -> Tensor:
    """Return the logits behind probabilities, and other scores as they are, in float32 at least."""
    node = final_activation(scores)
    scores = scores.float() if scores.dtype != torch.float64 else scores
    if node is None or node.name().startswith("Log"):
        return scores  # logarithms of probabilities are logits too
    if node.name().startswith("Sigmoid"):
        return scores.logit(torch.finfo(scores.dtype).eps)
    return scores.clamp(min=torch.finfo(scores.dtype).tiny).log()


def _binary(logits: Tensor, labels: Tensor, scores: Tensor) -> tuple[Tensor, str]:
    labels = labels.to(logits.dtype)
    if not bool(((labels >= 0) & (labels <= 1)).all()):
        raise _unfit(scores, labels, f" (they range from {float(labels.min()):g} to {float(labels.max()):g})")
    return functional.binary_cross_entropy_with_logits(logits, labels), "binary cross entropy"


def _of_classes(logits: Tensor, labels: Tensor, scores: Tensor) -> Tensor:
    wrong = labels[(labels != _IGNORED) & ((labels < 0) | (labels >= logits.shape[1]))]
    if len(wrong):
        raise _unfit(scores, labels, f" (one is class {int(wrong[0])})")
    if bool((labels == _IGNORED).all()):
        raise _unfit(scores, labels, f" (all are {_IGNORED}, so they are ignored)")
    return functional.cross_entropy(logits, labels)


def _unfit(scores: Tensor, labels: Tensor, values: str) -> TargetError:
    example = ", such as torch.nn.MSELoss()" if labels.is_floating_point() else ""
    return TargetError(
        f"neither the cross entropy nor the binary cross entropy fits an output of shape {tuple(scores.shape)} and "
        f"{str(labels.dtype).removeprefix('torch.')} labels of shape {tuple(labels.shape)}{values}; pass loss=, a "
        f"function of output and labels{example}"
    )
