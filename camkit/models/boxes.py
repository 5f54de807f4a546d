"""Reads boxes out of the raw outputs of detectors, whose libraries decode them outside the network."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import cv2
import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchvision.ops import batched_nms, box_convert

from camkit.errors import InputError, ModelError, as_error, brief
from camkit.models.modules import Adapter
from camkit.options import Boxes
from camkit.types import Preprocess

MOST_BOXES = 300
"""The most boxes of a picture, as in ultralytics."""

Decoded: TypeAlias = tuple[Float[Tensor, "n a 4"], Float[Tensor, "n a k"], Float[Tensor, "n a 1"] | None]
"""The corners of all boxes in pixels of the input, the probabilities of their classes, and that of any object."""


def yolo(outputs: Sequence[Tensor], _: Sequence[int], classes: int | None) -> Decoded:
    """Decode ultralytics' ``output0``: (N, 4 + classes + more, A), or (N, A, 5 + classes) of YOLOv5 to v7.

    The rows are the middles, sides and probabilities. Networks without suppression (YOLOv10, YOLO26) return (N, A, 6):
    corners, the score and the number of the best class.
    """
    found = outputs[0]
    if found.shape[2] == 6 and not bool((found[..., 5] % 1).any()):
        labels = found[..., 5].long()
        known = nn.functional.one_hot(labels, classes or int(labels.amax()) + 1)
        return found[..., :4], known * found[..., 4:5], None
    is_across = found.shape[1] < found.shape[2]
    rows, first = (found.mT, 4) if is_across else (found, 5)
    last = None if classes is None else first + classes
    return box_convert(rows[..., :4], "cxcywh", "xyxy"), rows[..., first:last], None if is_across else rows[..., 4:5]


def yolox(outputs: Sequence[Tensor], size: Sequence[int], _: int | None) -> Decoded:
    """Decode YOLOX (``yolox/models/yolo_head.py``): (N, A, 5 + classes), with or without ``--decode_in_inference``.

    Without it, middles are counted in strides from their cell, and sides are logarithms of strides.
    """
    rows = outputs[0]
    cells, strides = _cells(size, rows.shape[1])
    middles, sides = rows[..., :2], rows[..., 2:4]
    moved = (cells + middles) * strides
    if (moved - cells * strides).abs().mean() < (middles - cells * strides).abs().mean():
        middles, sides = moved, sides.exp() * strides
    return box_convert(torch.cat([middles, sides], -1), "cxcywh", "xyxy"), rows[..., 5:], rows[..., 4:5]


def nanodet(outputs: Sequence[Tensor], size: Sequence[int], classes: int | None) -> Decoded:
    """Decode NanoDet (``nanodet/model/head/gfl_head.py``, and ``nanodet_plus_head.py`` with its fourth stride, 64).

    (N, A, classes + 4 bins), or for each stride (N, a, classes) and (N, a, 4 bins): how far each side is from the
    middle of the cell, in NanoDet-Plus from its corner, as a distribution over 0, 1, 2, ... strides.
    """
    rows, known = outputs[0], classes or outputs[0].shape[2] - 4 * 8  # the usual number of bins
    if len(outputs) > 1:
        known = rows.shape[2]
        levels = {len(part[0]): [other for other in outputs if len(other[0]) == len(part[0])] for part in outputs}
        rows = torch.cat([torch.cat(levels[count], 2) for count in sorted(levels, reverse=True)], 1)
    cells, strides = _cells(size, rows.shape[1])
    bins = rows[..., known:].unflatten(2, (4, -1)).softmax(-1)
    reach = (bins * torch.arange(bins.shape[3], device=rows.device)).sum(-1) * strides
    centres = (cells + (0 if strides.amax() == 64 else 0.5)) * strides
    return torch.cat([centres - reach[..., :2], centres + reach[..., 2:]], -1), rows[..., :known], None


def _cells(size: Sequence[int], count: int) -> tuple[Float[Tensor, "a 2"], Float[Tensor, "a 1"]]:
    """Return the column and row, and the stride, of each cell of the grids that have this many cells together."""
    for strides in ((8, 16, 32), (8, 16, 32, 64)):
        grids = [(stride, *(math.ceil(side / stride) for side in size)) for stride in strides]
        if sum(rows * columns for _, rows, columns in grids) == count:
            places = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for _, rows, columns in grids]
            steps = [torch.full((len(place), 1), stride) for place, (stride, *_) in zip(places, grids, strict=True)]
            return torch.cat(places).flip(1).float(), torch.cat(steps).float()
    raise ModelError(f"{count} boxes are not one for each cell of the strides 8, 16, 32 and perhaps 64")


DECODERS: dict[Boxes, tuple[Callable[[Sequence[Tensor], Sequence[int], int | None], Decoded], float]] = {
    "nanodet": (nanodet, 0.6),
    "yolo": (yolo, 0.7),
    "yolox": (yolox, 0.45),
}
"""How each kind is decoded, and how much boxes of one class may overlap, as its own code has it."""


def detecting(model: nn.Module, kind: Boxes, labels: Sequence[str] | None) -> Adapter:
    """Return a model with raw outputs of a kind as one that returns the boxes of each picture.

    Raises:
        InputError: the kind is unknown.
    """
    if kind not in DECODERS:
        raise InputError(f"boxes must be one of {', '.join(DECODERS)}, not {kind!r}")
    return Adapter(model, functools.partial(read, kind=kind, classes=None if labels is None else len(labels)))


def read(
    model: nn.Module, images: Float[Tensor, "n c h w"], *, kind: Boxes, classes: int | None
) -> list[dict[str, Tensor]]:
    """Return for each picture its ``boxes`` (K, 4) in pixels, their ``labels``, ``scores`` and ``logits`` (K,).

    ``all_boxes`` (A, 4), ``all_scores`` and ``all_logits`` (A, classes) are those before suppression.

    Raises:
        ModelError: (when it is called) the outputs are not of this kind.
    """
    outputs = [leaf for leaf in tree_leaves(model(images)) if isinstance(leaf, Tensor)]
    shapes = " and ".join(str(tuple(output.shape)) for output in outputs)
    decode, overlap = DECODERS[kind]
    with as_error(ModelError, lambda error: f"boxes={kind!r} cannot read outputs of shapes {shapes} ({brief(error)})"):
        corners, by_class, objectness = decode(outputs, images.shape[2:], classes)
    scores = by_class if objectness is None else by_class * objectness
    found = []
    for place, (own, logits) in enumerate(zip(corners, scores.logit(torch.finfo(scores.dtype).eps), strict=True)):
        best, labels = logits.max(1)  # each box's best class
        kept = batched_nms(own.detach(), best.detach(), labels, overlap)[:MOST_BOXES]
        chosen = {"boxes": own[kept], "scores": best[kept].sigmoid(), "labels": labels[kept], "logits": best[kept]}
        everything = {"all_boxes": own, "all_scores": scores[place], "all_logits": logits}
        if objectness is not None:
            everything["all_objectness"] = objectness[place, :, 0]
            chosen["objectness"] = everything["all_objectness"][kept]
        found.append(chosen | everything)
    return found


_PREPARED: dict[Boxes, dict[str, Any]] = {
    "nanodet": {"grey": 0, "blue_first": True, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    "yolo": {"mean": (0,), "std": (1,)},
    "yolox": {"centred": False, "blue_first": True, "mean": (0,), "std": (1 / 255,)},
}
"""How each kind's own code prepares pictures, with mean and standard deviation of values from 0 to 1."""


def preparing(kind: Boxes, **given: Any) -> Preprocess:
    """Return the function that prepares pictures for a detector of a kind; ``size``, ``mean`` and ``std`` replace it."""
    return functools.partial(prepared, **{**_PREPARED[kind], **given})


def prepared(
    picture: Image.Image,
    *,
    size: tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    blue_first: bool = False,
    **margins: Any,
) -> Float[Tensor, "c h w"]:
    """Return a picture that fills this size with margins, normalised; ``margins`` are those of ``letterboxed``."""
    values, each = letterboxed(picture, size, step=0, **margins), (-1, 1, 1)
    values = (values - torch.tensor(mean).view(each)) / torch.tensor(std).view(each)
    return values.flip(0) if blue_first else values


def letterboxed(
    picture: Image.Image, size: tuple[int, int], *, step: int = 32, grey: int = 114, centred: bool = True
) -> Float[Tensor, "c h w"]:
    """Fit a picture into a size, and add margins.

    Args:
        picture: the picture.
        size: the most rows and columns.
        step: the sides become the next multiples of this; with 0, the size.
        grey: the colour of the margins, from 0 to 255.
        centred: whether they are on all sides, or at the bottom and right.

    Returns:
        The model's input, from 0 to 1.
    """
    pixels = np.asarray(picture.convert("RGB"))
    height, width = pixels.shape[:2]
    scale = min(size[0] / height, size[1] / width)
    inner = round(height * scale), round(width * scale)
    if inner != (height, width):
        pixels = cv2.resize(pixels, inner[::-1], interpolation=cv2.INTER_LINEAR)
    down, across = ((most - side) % (step or most) for most, side in zip(size, inner, strict=True))
    # An odd margin has its extra row or column at the bottom or right.
    above, left = (down // 2, across // 2) if centred else (0, 0)
    sides = above, down - above, left, across - left
    padded = cv2.copyMakeBorder(pixels, *sides, cv2.BORDER_CONSTANT, value=(grey,) * 3)
    return torch.from_numpy(padded).permute(2, 0, 1).float() / 255
