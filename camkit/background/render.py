"""Draw annotated objects as regions of their picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image
from pycocotools import mask as rle

from camkit.background.regions.coco import decode_runs
from camkit.background.regions.table import clip_box
from camkit.background.values import ObjectAnnotation
from camkit.errors import ImageError
from camkit.images.read import open_picture
from camkit.types import Box

_MARGIN = 0.08
"""Margin around a removed box, as a share of its side: covers shadows, soft edges and boxes drawn too small."""

_LEAST_MARGIN = 2
"""Least margin in pixels: the soft edge of a small object is as wide as that of a large one."""

_FARTHEST = 10
"""How far a polygon may reach, in sides of its picture: pycocotools visits every pixel along the edge."""


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
        if isinstance(annotation.outline, Path):
            region |= _read_mask(annotation.outline, size)
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


def _read_mask(file: Path, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Read a mask: by palette index if the file has a palette, else by colour, else by brightness."""
    try:
        with Image.open(file) as picture:
            indices = np.asarray(picture) if picture.mode == "P" else None
            if picture.mode[0] == "I":  # 16 bits; versions of Pillow differ in how they convert these to 8 bits
                colours = np.asarray(picture).clip(0, 255).astype(np.uint8)
            else:
                mode = "RGB" if indices is not None or picture.mode[:3] == "RGB" else "L"
                colours = np.asarray(picture.convert(mode))
    except Exception as error:  # the decoder of a damaged file may raise anything
        raise ImageError(f"the mask {file} cannot be read: {error}") from error
    if colours.shape[:2] != size[::-1]:
        actual = f"{colours.shape[1]}x{colours.shape[0]}"
        raise ImageError(f"the mask {file} has {actual} pixels, but its picture has {size[0]}x{size[1]}")
    if indices is not None:
        return _from_palette(indices, colours)
    if colours.ndim == 3:
        if (colours != colours[..., :1]).any():
            return np.asarray(colours.any(2))
        colours = colours[..., 0]
    low, high = (colours > 0) & (colours <= 127), colours > 127
    # Dark values may be object indices with a bright seam (255) between objects. A soft edge has every value between.
    if low.sum() > high.sum() and bool((colours[high] == 255).all()):
        return low
    return high if high.any() else low


def _from_palette(indices: UInt8[np.ndarray, "h w"], colours: UInt8[np.ndarray, "h w 3"]) -> Bool[np.ndarray, "h w"]:
    """Return the objects of a picture with a palette: every colour but black, or every index but 0.

    The colour decides if the picture is black in some places and not in others. Index 255 is the seam between objects
    in Pascal VOC, so it does not count as object unless it is the only one.
    """
    black = ~colours.any(2)
    region = ~black if black.any() and not black.all() else indices > 0
    inside = region & (indices < 255)
    return np.asarray(inside if inside.any() else region)


def _decode_outline(outline: Any, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Draw COCO polygons or decode a run-length encoding."""
    width, height = size
    try:
        if isinstance(outline, list):
            if not all(abs(side) <= _FARTHEST * max(size) for polygon in outline for side in polygon):
                raise ValueError("a polygon reaches far out of its picture")  # noqa: TRY301
            encoding: Any = rle.merge(rle.frPyObjects(outline, height, width))
            region = decode_runs({**encoding, "counts": encoding["counts"].decode()})
        else:
            region = decode_runs(outline)
    except Exception as error:  # pycocotools raises many types for outlines it cannot read
        raise ImageError(f"an outline cannot be read: {type(error).__name__}: {error}") from error
    if region.shape != (height, width):
        raise ImageError(
            f"an outline is for {region.shape[1]}x{region.shape[0]} pixels, but the picture has {width}x{height}"
        )
    return np.asarray(region)


def picture_size(path: Path) -> tuple[int, int]:
    """Return the width and height of a picture after the rotation that its EXIF data asks for.

    Raises:
        ImageError: the file cannot be read.
    """
    return open_picture(path).size
