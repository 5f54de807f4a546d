"""Turns the caller's arguments into a batch on the model's device and a function that computes the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from camkit.errors import InputError, TargetError
from camkit.images.prepare import prepare, stacked, unbatched
from camkit.inspect.measurement import NamedLoss
from camkit.layers.trace import scored_tensor
from camkit.models import device_of, dtype_of, spatial_rank
from camkit.models.loaded import LoadedModel
from camkit.targets.outputs import describe, main_tensor
from camkit.targets.probabilities import final_activation, rows_that_sum_to
from camkit.types import ImageLike

BatchLike: TypeAlias = "ImageLike | Sequence[ImageLike] | tuple[Any, Any]"
"""Pictures in any form that ``explain`` accepts, or a pair of such a batch and its labels."""

Loss: TypeAlias = Callable[..., Tensor]
"""``loss(output)``, or ``loss(output, labels)`` if there are labels; returns one number."""


def split_labels(batch: BatchLike, rank: int) -> tuple[Any, Any]:
    """Return a batch's pictures and its labels, None if it has none.

    A batch with labels is a pair, as a data loader gives it: first a whole batch, either a tensor (N, C, H, W) or a
    list, and second anything but pictures. Every other sequence is a sequence of pictures.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        first, second = batch
        is_batch = isinstance(first, (list, tuple)) or (isinstance(first, Tensor) and first.dim() == rank + 2)
        is_pictures = isinstance(second, (str, Path, Image.Image)) or (
            isinstance(second, Tensor)
            and second.dim() == rank + 2
            and second.shape[1:] == getattr(first, "shape", ())[1:]
        )
        if is_batch and not is_pictures:
            return first, second
    return batch, None


def prepared_batch(pictures: Any, model: LoadedModel) -> Float[Tensor, "n c *size"]:
    """Return pictures as one tensor on the model's device, with its number type.

    Raises:
        InputError: there is no picture, one cannot be read, or they have several sizes.
    """
    rank, device, dtype = spatial_rank(model.module), device_of(model.module), dtype_of(model.module)
    items = list(pictures) if isinstance(pictures, (list, tuple)) else [cast("ImageLike", pictures)]
    tensors: list[Tensor] = []
    for number, image in enumerate(unbatched(items, rank), start=1):
        name = str(image) if isinstance(image, (str, Path)) else f"picture {number}"
        tensors.append(prepare(image, model.preprocess, name, rank).tensor.to(dtype))
    if not tensors:
        raise InputError("the batch is empty; pass at least one picture")
    sizes = list(dict.fromkeys(tuple(tensor.shape) for tensor in tensors))
    if len(sizes) > 1:
        listed = ", ".join("x".join(map(str, size)) for size in sizes[:3])
        raise InputError(
            f"the pictures of a batch must have one size after preprocessing, not {listed}; pass them one by one"
        )
    return stacked(tensors).to(device)


def score_for(loss: Loss | None, labels: Any, module: nn.Module) -> NamedLoss:
    """Return the function that turns the model's output into one number and its name.

    Without a loss, that is the usual loss if there are labels, and otherwise the mean of the best class's score; for
    maps of scores, the mean over their cells too.

    Raises:
        InputError: the loss is not a function, or the labels are not numbers.
    """
    if isinstance(loss, type):
        raise InputError(f"loss is the class {loss.__name__}; make a loss of it: {loss.__name__}()")
    if loss is not None and not callable(loss):
        raise InputError(f"loss must be a function of the output and the labels, not {loss!r}")
    if labels is not None and not isinstance(labels, (Tensor, dict)):
        try:
            labels = torch.as_tensor(np.asarray(labels))
        except (TypeError, ValueError) as error:
            raise InputError(
                "the labels of a batch must be numbers, such as the indices of the classes; pass others as loss=, a "
                "function of the output that knows them"
            ) from error
    device = device_of(module)
    labels = labels.to(device) if isinstance(labels, Tensor) else labels

    def score(output: Any) -> tuple[Tensor | None, str]:
        if loss is not None:
            value = loss(output) if labels is None else loss(output, labels)
            if not isinstance(value, Tensor) or value.numel() != 1:
                kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise InputError(f"loss must return one number, a tensor with one element, not {kind}; use .mean()")
            return value.reshape(()), "own loss"
        if labels is not None:
            return usual_loss(output, labels)
        scores = scored_tensor(output)
        mean = None if scores is None else (scores.amax(1) if scores.dim() > 1 else scores).float().mean()
        return mean, "mean score of the best class"

    return score


# --- the usual loss for labels of a certain shape and certain values


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
