"""explain() and explain_many(): from arguments and pictures to batches and back.

picture -> images -> layers picks the layer -> capture runs the model -> methods weight -> heatmap -> an Explanation.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args, overload

import numpy as np
import torch
from torch import Tensor, nn

from camkit.engine.batch import Plan, explain_batch
from camkit.engine.capture import quiet_pass
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, InputError
from camkit.explanation import Explanation
from camkit.images.prepare import Prepared, located, prepare, unbatched
from camkit.layers.choose import named_layers
from camkit.methods import find_method
from camkit.models import Labels, as_model, device_of, dtype_of, spatial_rank
from camkit.models.loaded import LoadedModel
from camkit.targets import SimilarTarget, TargetLike, as_targets
from camkit.targets.scores import Expands, Target
from camkit.types import Failure, Fusion, ImageLike, Precision, Preprocess

TargetLayer: TypeAlias = "str | nn.Module | Sequence[str | nn.Module] | None"

_READERS = min(4, os.cpu_count() or 1)


def explain(
    model: nn.Module | str | LoadedModel,
    img: ImageLike | Sequence[ImageLike],
    target_layer: TargetLayer = None,
    *,
    method: str | None = None,
    target: TargetLike | Sequence[TargetLike] | None = None,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
    precision: Precision = "fp32",
    batch_size: int = 32,
    fuse: Fusion = "mean",
) -> Explanation | list[Explanation]:
    """Show which pixels a model used.

    Args:
        model: a module, or a name as ``camkit.load_model`` takes it (``resnet50``, ``timm:NAME``, ``hf:NAME``,
            ``file.py:factory``, ``demo-fair``). The module comes back exactly as it went in.
        img: a path, a PIL picture, an array (H, W, 3) of uint8 or 0..1, a normalised tensor (C, H, W) or (N, C, H, W),
            or a list of these. A model of 1-D or 3-D convolutions takes tensors (C, L) or (C, D, H, W).
        target_layer: None to have it chosen, a dotted name, a module, or several, which are fused.
        method: a name from ``camkit.METHODS``. None is "gradcam", and for the boxes of a detector "hirescam": Grad-CAM
            weights whole channels, which many boxes share.
        target: what to explain: None for each picture's best class, a class index, a label's text, a function
            ``output -> (N,)``, or a list of these, each of which is explained for every picture at the cost of one
            forward pass. ``camkit.targets`` makes others: the best classes, those above a threshold, a contrast, a
            region, a box, a similarity.
        preprocess: turns a PIL picture into the model's input (C, H, W); a model loaded by name brings its own.
        labels: the names of the classes, in the order of their indices or as a dictionary from index to name.
        device: where a model loaded by name runs; a module stays where it is.
        precision: "fp32", or "bf16" and "fp16" under autocast.
        batch_size: images per pass; halved by itself when memory runs out.
        fuse: how several layers become one map: their "mean", "max", or "product" after scaling.

    Returns:
        One Explanation for one picture and one target; otherwise a list, picture by picture, target by target within.
        A target that stands for as many as a picture has, such as ``above``, gives a list too.

    Raises:
        InputError: something in the call or a picture is wrong; see ``camkit.errors`` for the kinds.
        Exception: whatever the model, ``preprocess`` or a target function raises.

    Example:
        >>> import camkit, torch
        >>> model = camkit.load_model("demo-fair").module
        >>> camkit.explain(model, torch.zeros(3, 128, 128), target=2).heatmap.shape
        (128, 128)
    """
    rank = _rank(model)
    several = isinstance(img, (list, tuple)) or (isinstance(img, Tensor) and img.dim() == rank + 2 and len(img) != 1)
    images: Sequence[ImageLike] = img if isinstance(img, (list, tuple)) else [cast("ImageLike", img)]
    explained = list(
        explain_many(
            model,
            images,
            target_layer,
            method=method,
            target=target,
            preprocess=preprocess,
            labels=labels,
            device=device,
            precision=precision,
            batch_size=batch_size,
            fuse=fuse,
        )
    )
    if several or isinstance(target, (list, tuple)) or (isinstance(target, Expands) and not isinstance(target, Tensor)):
        return explained
    return explained[0]


@overload
def explain_many(
    model: nn.Module | str | LoadedModel,
    images: Iterable[ImageLike],
    target_layer: TargetLayer = None,
    *,
    method: str | None = None,
    target: TargetLike | Sequence[TargetLike] | None = None,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
    precision: Precision = "fp32",
    batch_size: int = 32,
    fuse: Fusion = "mean",
    on_error: Literal["raise"] = "raise",
) -> Iterator[Explanation]: ...


@overload
def explain_many(
    model: nn.Module | str | LoadedModel,
    images: Iterable[ImageLike],
    target_layer: TargetLayer = None,
    *,
    method: str | None = None,
    target: TargetLike | Sequence[TargetLike] | None = None,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
    precision: Precision = "fp32",
    batch_size: int = 32,
    fuse: Fusion = "mean",
    on_error: Literal["yield"],
) -> Iterator[Explanation | Failure]: ...


def explain_many(
    model: nn.Module | str | LoadedModel,
    images: Iterable[ImageLike],
    target_layer: TargetLayer = None,
    *,
    method: str | None = None,
    target: TargetLike | Sequence[TargetLike] | None = None,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
    precision: Precision = "fp32",
    batch_size: int = 32,
    fuse: Fusion = "mean",
    on_error: Literal["raise", "yield"] = "raise",
) -> Iterator[Explanation | Failure]:
    """Explain any number of pictures as a stream: memory holds a few batches, reading overlaps with computing.

    Args:
        model, target_layer, method, target, preprocess, labels, device, precision, batch_size, fuse: as for
            ``explain``.
        images: any iterable of what ``explain`` takes; read only as fast as the results are taken.
        on_error: what to do about a picture that cannot be read: "raise" its error in its place, or "yield" a
            ``Failure`` there and go on.

    Returns:
        An iterator over the Explanations, in the order of the pictures. The arguments are checked before it is
        returned; the pictures are read when it is walked through.

    Raises:
        InputError: as ``explain``.
    """
    if on_error not in ("raise", "yield"):
        raise InputError(f"on_error is 'raise' or 'yield', not {on_error!r}")
    plan = _plan(model, target_layer, method, target, preprocess, labels, device, precision, batch_size, fuse)
    return _stream(plan, images, on_error)


def _plan(
    model: nn.Module | str | LoadedModel,
    target_layer: TargetLayer,
    method: str | None,
    target: TargetLike | Sequence[TargetLike] | None,
    preprocess: Preprocess | None,
    labels: Labels | None,
    device: str | torch.device | None,
    precision: Precision,
    batch_size: int,
    fuse: Fusion,
) -> Plan:
    if fuse not in get_args(Fusion):
        raise InputError(f"layers are fused by their {', '.join(get_args(Fusion))}, not by {fuse!r}")
    if precision not in get_args(Precision):
        raise InputError(f"precision is one of {', '.join(get_args(Precision))}, not {precision!r}")
    if not isinstance(batch_size, (int, np.integer)) or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError(f"batch_size is a whole number from 1, not {batch_size!r}")
    found = None if method is None else find_method(method)
    loaded = as_model(model, preprocess=preprocess, labels=labels, device=device)
    return Plan(
        loaded,
        None if target_layer is None else named_layers(loaded.module, target_layer),
        found,
        tuple(_complete(single, loaded) for single in as_targets(target, loaded.labels, loaded.activation)),
        precision,
        batch_size,
        fuse,
    )


def _complete(target: Target, model: LoadedModel) -> Target:
    """Return a target whose reference picture, if it has one, has been run through the model."""
    if not isinstance(target, SimilarTarget) or target.embedding is not None:
        return target
    place = device_of(model.module)
    prepared = prepare(target.reference, model.preprocess, "the reference picture", spatial_rank(model.module))
    with quiet_pass(model.module, place, "fp32"):
        return target.embedded(model.module(prepared.tensor[None].to(place, dtype_of(model.module))))


def _stream(plan: Plan, images: Iterable[ImageLike], on_error: str) -> Iterator[Explanation | Failure]:
    batch: list[Prepared] = []
    prepared = _prepared(images, plan.model, plan.batch_size)
    failure: Exception | None = None
    while True:
        try:
            item = next(prepared, None)
        except Exception as error:  # the caller's iterable failed: what came before it is explained first
            item, failure = None, error
        if batch and not (isinstance(item, Prepared) and _joins(batch, item, plan.batch_size)):
            yield from _checked(explain_batch(plan, batch), on_error)
            batch = []
        if isinstance(item, Prepared):
            batch.append(located(item, plan.model.preprocess))
        elif isinstance(item, Failure):
            yield from _checked([item], on_error)
        elif failure is not None:
            raise failure
        else:
            return


def _joins(batch: list[Prepared], item: Prepared, most: int) -> bool:
    return len(batch) < most and item.tensor.shape == batch[0].tensor.shape


def _checked(rows: Iterable[Explanation | Failure], on_error: str) -> Iterator[Explanation | Failure]:
    for row in rows:
        if isinstance(row, Failure) and on_error == "raise":
            # A copy: an error whose traceback holds frames that hold the error would keep the pictures alive.
            raise copy.copy(row.error) from row.error.__cause__
        yield row


def _rank(model: nn.Module | str | LoadedModel) -> int:
    module = model.module if isinstance(model, LoadedModel) else model
    return spatial_rank(module) if isinstance(module, nn.Module) else 2


def _prepared(images: Iterable[ImageLike], model: LoadedModel, ahead: int) -> Iterator[Prepared | Failure]:
    """Prepare pictures in the order they come, files ahead in other threads."""
    rank = spatial_rank(model.module)

    def ready(image: ImageLike, number: int) -> Prepared | Failure:
        try:
            return replace(prepare(image, model.preprocess, _name(image, number), rank), number=number)
        except CamkitError as error:
            return Failure(_name(image, number), error)

    def tasks() -> Iterator[Task[Prepared | Failure]]:
        for number, image in enumerate(unbatched(images, rank), start=1):
            if isinstance(image, (str, Path)):
                yield functools.partial(ready, image, number), True
            else:  # the caller may close it, or write into it, as soon as the next one is asked for
                yield functools.partial(_same, ready(image, number)), False

    return in_order(tasks(), workers=_READERS, ahead=ahead)


def _same(item: Prepared | Failure) -> Prepared | Failure:
    return item


def _name(image: ImageLike, number: int) -> str:
    file = image if isinstance(image, (str, Path)) else getattr(image, "filename", None)
    return str(file) if file else f"picture {number}"
