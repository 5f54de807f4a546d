"""Draw annotated objects as regions of their picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from pycocotools import mask as rle
from torch import Tensor

from camkit.background.regions.annotations import ObjectAnnotation, clip_box
from camkit.background.regions.coco import packed_runs
from camkit.errors import ImageError, brief
from camkit.images.masks import MaskFile
from camkit.images.regions import Shades, extent, preprocess_region
from camkit.types import Box, Preprocess

_MARGIN = 0.08
"""Margin around a removed box, as a share of its side: covers shadows, soft edges and boxes drawn too small."""

_LEAST_MARGIN = 2
"""Least margin in pixels: the soft edge of a small object is as wide as that of a large one."""


_FARTHEST = 10
"""How far a polygon may reach, as a multiple of its picture's longer side: pycocotools visits every pixel of the
edge."""


def in_pixels(annotation: ObjectAnnotation, size: tuple[int, int]) -> ObjectAnnotation:
    """Return an object with its coordinates in pixels of a picture of ``size`` (width, height).

    Raises:
        ImageError: the object was drawn on a picture of another size.
    """
    if annotation.size is not None and annotation.size != size:
        rotated = " (shown rotated, as its EXIF data says)" if annotation.size == size[::-1] else ""
        raise ImageError(
            f"its objects were drawn on {annotation.size[0]}x{annotation.size[1]} pixels, but the picture has "
            f"{size[0]}x{size[1]}{rotated}"
        )
    if not annotation.shares:
        return annotation
    width, height = size
    box = annotation.box and Box(
        annotation.box.left * width,
        annotation.box.top * height,
        annotation.box.right * width,
        annotation.box.bottom * height,
    )
    outline = annotation.outline
    if isinstance(outline, list):
        outline = [[side * (width, height)[number % 2] for number, side in enumerate(part)] for part in outline]
    return ObjectAnnotation(annotation.category, box, outline, crowd=annotation.crowd)


def object_region(
    objects: Sequence[ObjectAnnotation], size: tuple[int, int], *, round_boxes: bool = False
) -> Bool[np.ndarray, "h w"]:
    """Return the union of the objects on a picture of ``size`` (width, height): their outlines, or else their boxes.

    ``round_boxes`` draws the ellipse in a box instead of the box, because an object rarely reaches into the corners.

    Raises:
        ImageError: a mask has another size than the picture, or an outline cannot be read.
    """
    width, height = size
    region = np.zeros((height, width), bool)
    for annotation in objects:
        if isinstance(annotation.outline, MaskFile):
            region |= annotation.outline.region(size)
        elif annotation.outline is not None:
            region |= _decode_outline(annotation.outline, size)
        elif annotation.box is not None:
            region |= _fill_ellipse(annotation.box, size) if round_boxes else _fill_box(annotation.box, size)
    return region


def widened_boxes(objects: Sequence[ObjectAnnotation], size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the union of the objects' boxes on a picture of ``size`` (width, height), with a margin around each.

    A mask may show several objects, so each connected part gets its own box. An object with a box and an outline is
    covered by both, since the outline may reach out of the box.
    """
    region = np.zeros((size[1], size[0]), bool)
    for annotation in objects:
        boxes = [] if annotation.outline is None else _boxes_of_parts(object_region([annotation], size))
        for box in [*([] if annotation.box is None else [annotation.box]), *boxes]:
            across, down = (max(_LEAST_MARGIN, _MARGIN * side) for side in (box.right - box.left, box.bottom - box.top))
            region |= _fill_box(Box(box.left - across, box.top - down, box.right + across, box.bottom + down), size)
    return region


def boxes_on_input(
    objects: Sequence[ObjectAnnotation], size: tuple[int, int], preprocess: Preprocess, shades: Shades
) -> Float[Tensor, "k 4"]:
    """Return the boxes (left, top, right, bottom) of objects in pixels of the model's input, as far as it shows them.

    An object without a box has one around each connected part of its outline.

    Args:
        objects: the objects, in pixels of a picture of ``size`` (width, height).
        size: the size of the picture.
        preprocess: makes the model's input of the picture.
        shades: what it makes of black and white pictures of this size.
    """
    boxes = [
        box
        for annotation in objects
        for box in (_boxes_of_parts(object_region([annotation], size)) if annotation.box is None else [annotation.box])
    ]
    seen = [preprocess_region(_fill_box(box, size), preprocess, shades) > 0.5 for box in boxes]
    corners = [extent(region) for region in seen if bool(region.any())]
    return torch.tensor(corners, dtype=torch.float32).reshape(-1, 4)


def _fill_box(box: Box, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the pixels of a box: at least one in each direction, none if the box lies outside the picture."""
    region = np.zeros((size[1], size[0]), bool)
    clipped = clip_box(box, size)
    if clipped is not None:
        left, top = (min(max(0, round(low)), side - 1) for low, side in zip(clipped[:2], size, strict=True))
        region[top : max(top + 1, round(clipped.bottom)), left : max(left + 1, round(clipped.right))] = True
    return region


def _fill_ellipse(box: Box, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the pixels whose centre lies in the ellipse inscribed in a box."""
    across, down = (np.arange(side) + 0.5 for side in size)
    width, height = max(1e-9, box.right - box.left), max(1e-9, box.bottom - box.top)
    x, y = (2 * across - box.left - box.right) / width, (2 * down - box.top - box.bottom) / height
    inside = np.asarray(x**2 + y[:, None] ** 2 <= 1)
    return inside if inside.any() else _fill_box(box, size)


def _boxes_of_parts(region: Bool[np.ndarray, "h w"]) -> list[Box]:
    """Return the bounding box of each connected part of a region."""
    _, _, parts, _ = cv2.connectedComponentsWithStats(region.astype(np.uint8))
    return [Box(left, top, left + width, top + height) for left, top, width, height, _ in parts[1:].tolist()]


def _decode_outline(outline: Any, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Draw COCO polygons or decode a run-length encoding."""
    width, height = size
    try:
        are_polygons = isinstance(outline, list)
        if are_polygons and not all(abs(side) <= _FARTHEST * max(size) for polygon in outline for side in polygon):
            raise ValueError("a polygon reaches far out of its picture")  # noqa: TRY301
        encoding: Any = rle.merge(rle.frPyObjects(outline, height, width)) if are_polygons else packed_runs(outline)
        stated = tuple(map(int, encoding["size"]))
        region = np.asarray(rle.decode(encoding)) == 1 if stated == (height, width) else None
    except Exception as error:  # pycocotools raises many types for outlines it cannot read
        raise ImageError(f"an outline cannot be read: {type(error).__name__}: {brief(error)}") from error
    if region is None:
        raise ImageError(f"an outline is for {stated[1]}x{stated[0]} pixels, but the picture has {width}x{height}")
    if np.count_nonzero(region) != rle.area(encoding):  # pycocotools leaves the rest of the memory as it was
        raise ImageError("an outline cannot be read: the runs of its encoding do not fill the picture")
    return np.asarray(region)
