"""From annotated objects to regions of what the model sees: the same resize and crop as the picture's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image
from pycocotools import mask as rle

from camkit.background.regions.coco import decoded
from camkit.background.regions.table import placed
from camkit.background.values import ObjectAnnotation
from camkit.errors import ImageError
from camkit.images.read import open_picture
from camkit.types import Box

_MARGIN = 0.08
"""How much wider than its object a removed box is on each side, as a share of it: shadows, soft edges, loose boxes."""

_LEAST_MARGIN = 2
_FAR = 10
"""Sides of the picture that a polygon may reach out of it; pycocotools walks along every pixel of its edge."""


def outline(
    objects: Sequence[ObjectAnnotation], size: tuple[int, int], *, round_boxes: bool = False
) -> Bool[np.ndarray, "h w"]:
    """Return the union of the objects' regions on a picture of ``size`` (width, height): outlines, or else boxes.

    ``round_boxes`` takes of a box the ellipse within it: an object hardly ever reaches into its box's corners.

    Raises:
        ImageError: a mask of another size than the picture, or an outline that cannot be read.
    """
    width, height = size
    region = np.zeros((height, width), bool)
    for annotation in objects:
        if isinstance(annotation.outline, Path):
            region |= _mask(annotation.outline, size)
        elif annotation.outline is not None:
            region |= _decoded(annotation.outline, size)
        elif annotation.box is not None:
            region |= _ellipse(annotation.box, size) if round_boxes else _filled(annotation.box, size)
    return region


def boxes(objects: Sequence[ObjectAnnotation], size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the union of the objects' boxes on a picture, each a little wider than its object.

    A mask may show several objects: each of its parts has a box of its own. Of an object with both, a box and an
    outline that reaches out of it, all is taken.
    """
    region = np.zeros((size[1], size[0]), bool)
    for annotation in objects:
        drawn = [] if annotation.outline is None else _around_parts(outline([annotation], size))
        for box in [*([] if annotation.box is None else [annotation.box]), *drawn]:
            across, down = (max(_LEAST_MARGIN, _MARGIN * side) for side in (box.right - box.left, box.bottom - box.top))
            region |= _filled(Box(box.left - across, box.top - down, box.right + across, box.bottom + down), size)
    return region


def _filled(box: Box, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    region = np.zeros((size[1], size[0]), bool)
    within = placed(box, size)
    if within is not None:
        left, top = (min(max(0, round(low)), side - 1) for low, side in zip(within[:2], size, strict=True))
        region[top : max(top + 1, round(within.bottom)), left : max(left + 1, round(within.right))] = True
    return region


def _ellipse(box: Box, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the pixels whose middle lies in the ellipse within a box."""
    across, down = (np.arange(side) + 0.5 for side in size)
    width, height = max(1e-9, box.right - box.left), max(1e-9, box.bottom - box.top)
    from_middle = ((2 * across - box.left - box.right) / width, (2 * down - box.top - box.bottom) / height)
    inside = np.asarray(from_middle[0] ** 2 + from_middle[1][:, None] ** 2 <= 1)
    return inside if inside.any() else _filled(box, size)


def _around_parts(region: Bool[np.ndarray, "h w"]) -> list[Box]:
    _, _, parts, _ = cv2.connectedComponentsWithStats(region.astype(np.uint8))
    return [Box(left, top, left + width, top + height) for left, top, width, height, _ in parts[1:].tolist()]


def _mask(file: Path, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    try:
        with Image.open(file) as picture:
            numbers = np.asarray(picture) if picture.mode == "P" else None
            if picture.mode[0] == "I":  # 16 bits; Pillow's versions differ in how they make 8 of them
                colours = np.asarray(picture).clip(0, 255).astype(np.uint8)
            else:
                form = "RGB" if numbers is not None or picture.mode[:3] == "RGB" else "L"
                colours = np.asarray(picture.convert(form))
    except Exception as error:  # a damaged file can make its decoder fail in any way
        raise ImageError(f"the mask {file} cannot be read: {error}") from error
    if colours.shape[:2] != size[::-1]:
        made_for = f"{colours.shape[1]}x{colours.shape[0]}"
        raise ImageError(f"the mask {file} is {made_for} pixels and its picture {size[0]}x{size[1]}")
    if numbers is not None:
        return _of_numbers(numbers, colours)
    if colours.ndim == 3:
        if (colours != colours[..., :1]).any():
            return np.asarray(colours.any(2))
        colours = colours[..., 0]
    low, high = (colours > 0) & (colours <= 127), colours > 127
    # Numbers of objects and the seam between them may be kept as brightness too; at a soft edge there is all between.
    if low.sum() > high.sum() and bool((colours[high] == 255).all()):
        return low
    return high if high.any() else low


def _of_numbers(numbers: UInt8[np.ndarray, "h w"], colours: UInt8[np.ndarray, "h w 3"]) -> Bool[np.ndarray, "h w"]:
    """Return where a picture with a palette has objects: by number, unless a number other than 0 is what is black.

    255 is the seam between objects (Pascal VOC), unless there is no other number.
    """
    black = ~colours.any(2)
    region = ~black if black.any() and not black.all() else numbers > 0
    inside = region & (numbers < 255)
    return np.asarray(inside if inside.any() else region)


def _decoded(found: Any, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    width, height = size
    try:
        if isinstance(found, list):
            if not all(abs(side) <= _FAR * max(size) for part in found for side in part):
                raise ValueError("a polygon reaches far out of its picture")  # noqa: TRY301
            merged: Any = rle.merge(rle.frPyObjects(found, height, width))
            region = decoded({**merged, "counts": merged["counts"].decode()})
        else:
            region = decoded(found)
    except Exception as error:  # the library refuses what it cannot read in many ways
        raise ImageError(f"an outline cannot be read: {type(error).__name__}: {error}") from error
    if region.shape != (height, width):
        raise ImageError(
            f"an outline is for {region.shape[1]}x{region.shape[0]} pixels, the picture has {width}x{height}"
        )
    return np.asarray(region)


def picture_size(path: Path) -> tuple[int, int]:
    """Return a picture's width and height, turned upright as the model sees it.

    Raises:
        ImageError: the file cannot be read.
    """
    return open_picture(path).size
