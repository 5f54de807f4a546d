"""Decodes the raw outputs of detectors whose libraries do this outside the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchvision.ops import batched_nms, box_convert

from camkit.errors import ModelError, as_error, brief


def yolo(outputs: Sequence[Tensor], _: Sequence[int], classes: int | None) -> dict[str, Tensor]:
    """Decode ultralytics' ``output0``: (N, 4 + classes + more, A), or (N, A, 5 + classes) of YOLOv5 to v7.

    A row is a box's middle, its sides and the probability of each class; in YOLOv5 to v7, that of any object comes
    before these. Networks without suppression (YOLOv10, YOLO26) return (N, A, 6): corners, the score and the number of
    the best class.
    """
    rows = outputs[0]
    if _is_final(rows):
        best = nn.functional.one_hot(rows[..., 5].long(), classes or -1)
        return {"all_boxes": rows[..., :4], "all_scores": best * rows[..., 4:5]}
    has_objectness = rows.shape[1] > rows.shape[2]
    rows = rows if has_objectness else rows.mT
    scores, rest = rows[..., 4 + has_objectness :].tensor_split([rows.shape[2] if classes is None else classes], -1)
    # What may follow the classes, such as the weights of masks, are not probabilities
    if rest.numel() and bool((rest >= 0).all()) and bool((rest <= 1).all()):
        raise ModelError(
            f"the network has {scores.shape[2] + rest.shape[2]} classes, but the number of labels is {classes}; "
            "pass a label for each class"
        )
    found = {"all_boxes": box_convert(rows[..., :4], "cxcywh", "xyxy"), "all_scores": scores}
    if has_objectness:
        found |= {"all_scores": rows[..., 4:5] * scores, "all_objectness": rows[..., 4]}
    return found


def _is_final(rows: Float[Tensor, "n a k"]) -> bool:
    return rows.shape[2] == 6 and not bool((rows[..., 5] % 1).any())


def yolox(outputs: Sequence[Tensor], size: Sequence[int], classes: int | None) -> dict[str, Tensor]:
    """Decode YOLOX (``yolox/models/yolo_head.py``): (N, A, 5 + classes), as YOLOv5's if it was exported decoded.

    Without ``--decode_in_inference``, middles are counted in strides from their cell, and sides are logarithms of
    strides.
    """
    rows = outputs[0]
    cells, strides = _cells(rows, size)
    middles, sides = rows[..., :2], rows[..., 2:4]
    if (middles * strides).abs().mean() < (middles - cells * strides).abs().mean():
        middles, sides = (cells + middles) * strides, sides.exp() * strides
    return yolo([torch.cat([middles, sides, rows[..., 4:]], -1)], size, classes)


def nanodet(outputs: Sequence[Tensor], size: Sequence[int], classes: int | None) -> dict[str, Tensor]:
    """Decode NanoDet (``nanodet/model/head/gfl_head.py``, and ``nanodet_plus_head.py`` with its fourth stride, 64).

    (N, A, classes + 4 bins), or for each stride (N, a, classes) and (N, a, 4 bins): how far each side is from the
    middle of the cell, in NanoDet-Plus from its corner, as a distribution over 0, 1, 2, ... strides.
    """
    levels = sorted(outputs, key=lambda output: -output.shape[1])
    rows = torch.cat([torch.cat(levels[place : place + 2], 2) for place in range(0, len(levels), 2)], 1)
    known = outputs[0].shape[2] if len(outputs) > 1 else classes or rows.shape[2] - 4 * 8  # the usual number of bins
    cells, strides = _cells(rows, size)
    bins = rows[..., known:].unflatten(2, (4, -1)).softmax(-1)
    reach = (bins * torch.arange(bins.shape[3]).to(bins)).sum(-1) * strides
    middles = (cells + 0.5 * bool(strides.amax() < 64)) * strides
    return {
        "all_boxes": torch.cat([middles - reach[..., :2], middles + reach[..., 2:]], -1),
        "all_scores": rows[..., :known],
    }


def _cells(rows: Float[Tensor, "n a k"], size: Sequence[int]) -> tuple[Float[Tensor, "a 2"], Float[Tensor, "a 1"]]:
    """Return the column and row, and the stride, of the cell of each row."""
    for strides in ((8, 16, 32), (8, 16, 32, 64)):
        axes = ([*(torch.arange(-(-side // step)) for side in size), torch.tensor([step])] for step in strides)
        cells = torch.cat([torch.cartesian_prod(*each) for each in axes]).to(rows)
        if len(cells) == rows.shape[1]:
            return cells[:, :2].flip(1), cells[:, 2:]
    raise ModelError(f"expected a box for each cell of the strides 8, 16, 32 and perhaps 64, not {rows.shape[1]} boxes")


DETECTORS: dict[str, tuple[Callable[..., dict[str, Tensor]], float, dict[str, Any]]] = {
    "nanodet": (
        nanodet,
        0.6,
        {"size": (416, 416), "grey": 0, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    ),
    "yolo": (yolo, 0.7, {"size": (640, 640), "mean": (0,), "std": (1,), "blue_first": False}),
    "yolox": (yolox, 0.45, {"size": (640, 640), "mean": (0,), "std": (1 / 255,), "centred": False}),
}
"""What decodes each kind's outputs, how much boxes of a class may overlap, and how its own code prepares pictures.

A decoder takes the outputs, the height and width of the input, and the number of classes. It returns for each picture
``all_boxes`` (N, A, 4), the corners in pixels, ``all_scores`` (N, A, classes), and perhaps ``all_objectness`` (N, A).
Mean and standard deviation are of values from 0 to 1.
"""


def read(
    model: nn.Module, images: Float[Tensor, "n c h w"], *, kind: str, classes: int | None
) -> list[dict[str, Tensor]]:
    """Return for each picture its ``boxes`` (K, 4) in pixels, their ``labels``, ``scores`` and ``logits`` (K,).

    Beside them are those before suppression: ``all_boxes`` (A, 4), ``all_scores`` and ``all_logits`` (A, classes), and
    ``dense`` if each cell has boxes.

    Raises:
        ModelError: the outputs are not of this kind.
    """
    outputs = [leaf for leaf in tree_leaves(model(images)) if isinstance(leaf, Tensor)]
    (decode, overlap, _), shapes = DETECTORS[kind], [tuple(output.shape) for output in outputs]
    with as_error(ModelError, lambda error: f"boxes={kind!r} cannot read outputs of shapes {shapes} ({brief(error)})"):
        found = decode(outputs, images.shape[2:], classes)
        if kind == "yolo" and _is_final(outputs[0]):
            overlap = 1.0  # the network itself chose these boxes
        else:
            found["dense"] = torch.ones(len(images), dtype=torch.bool)
        found["all_logits"] = found["all_scores"].logit(torch.finfo(images.dtype).eps)
        return [_remaining({name: found[name][place] for name in found}, overlap) for place in range(len(images))]


def _remaining(found: dict[str, Tensor], overlap: float) -> dict[str, Tensor]:
    """Return the boxes of a picture that remain after suppression, beside all its boxes."""
    best, labels = found["all_scores"].max(1)  # each box's best class
    corners = found["all_boxes"].detach()  # moved, since batched_nms mixes up the classes of negative ones
    kept = batched_nms(corners - corners.amin(), best.detach(), labels, overlap)[:300]  # ultralytics' limit
    chosen = {name: found[f"all_{name}"][kept] for name in ("boxes", "objectness") if f"all_{name}" in found}
    chosen["logits"] = found["all_logits"][kept, labels[kept]]
    return {**found, **chosen, "scores": best[kept], "labels": labels[kept]}


def prepared(
    picture: Image.Image,
    *,
    size: tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    blue_first: bool = True,
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
        size: the largest height and width.
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
