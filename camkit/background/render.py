"""From annotated objects to regions of what the model sees: the same resize and crop as the picture's."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from pycocotools import mask as rle
from torch import Tensor

from camkit.background.regions.coco import decoded
from camkit.background.regions.table import placed
from camkit.background.values import Thing
from camkit.errors import ImageError, InputError
from camkit.images import open_picture
from camkit.state import generators
from camkit.values import Box, Preprocess

_MARGIN = 0.08
"""How much wider than its object a removed box is on each side, as a share of it: shadows, soft edges, loose boxes."""

_LEAST_MARGIN = 2
_FAR = 10
"""Sides of the picture that a polygon may reach out of it; pycocotools walks along every pixel of its edge."""

_LEAST_CONTRAST = 1e-12
_KEPT = 64
"""Sizes of pictures for which it is remembered what a preprocessing makes of black and white."""

_REPEATS = 8


def outline(things: Sequence[Thing], size: tuple[int, int], *, round_boxes: bool = False) -> Bool[np.ndarray, "h w"]:
    """Return the union of the objects' regions on a picture of ``size`` (width, height): outlines, or else boxes.

    ``round_boxes`` takes of a box the ellipse within it: an object hardly ever reaches into its box's corners.

    Raises:
        ImageError: a mask of another size than the picture, or an outline that cannot be read.
    """
    width, height = size
    region = np.zeros((height, width), bool)
    for thing in things:
        if isinstance(thing.outline, Path):
            region |= _mask(thing.outline, size)
        elif thing.outline is not None:
            region |= _decoded(thing.outline, size)
        elif thing.box is not None:
            region |= _ellipse(thing.box, size) if round_boxes else _filled(thing.box, size)
    return region


def boxes(things: Sequence[Thing], size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """Return the union of the objects' boxes on a picture, each a little wider than its object.

    A mask may show several objects: each of its parts has a box of its own. Of an object with both, a box and an
    outline that reaches out of it, all is taken.
    """
    region = np.zeros((size[1], size[0]), bool)
    for thing in things:
        drawn = [] if thing.outline is None else _around_parts(outline([thing], size))
        for box in [*([] if thing.box is None else [thing.box]), *drawn]:
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


@dataclass(frozen=True, eq=False)
class Shades:
    """What a preprocessing makes of black and of white: (C, H, W) each; every picture's pixel lies between the two."""

    black: Float[Tensor, "c h w"]
    white: Float[Tensor, "c h w"]

    @functools.cached_property
    def contrast(self) -> Float[Tensor, "c h w"]:
        """How far white is from black."""
        return self.white - self.black

    @functools.cached_property
    def view(self) -> Bool[Tensor, "h w"]:
        """Where the model sees the picture, and not padding."""
        contrast = self.contrast.abs().amax(0)
        return contrast > 0.5 * contrast.amax()

    @functools.cached_property
    def size_of_contrast(self) -> Float[Tensor, "h w"]:
        """The squares of the channels' contrasts, added up, and never zero."""
        return self.contrast.square().sum(0).clamp_min(_LEAST_CONTRAST)

    def pixels(self, tensor: Float[Tensor, "c h w"]) -> Float[Tensor, "c h w"]:
        """Return a model's input as brightness 0..1, padding black."""
        contrast = torch.where(self.contrast == 0, 1, self.contrast)
        return ((tensor - self.black) / contrast * self.view).clamp(0, 1)


_known: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], Shades]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def shades(preprocess: Preprocess, size: tuple[int, int]) -> Shades:
    """Return what a preprocessing makes of black and white pictures of ``size`` (width, height).

    Raises:
        InputError: it makes the same of both, or draws random numbers, so regions cannot be followed through it.
    """
    try:
        with _lock:
            known = _known.setdefault(preprocess, {})
    except TypeError:  # cannot be weakly referenced, so is not remembered
        known = {}
    found = known.get(size)
    if found is None:
        before = generators()
        black, white = (_made(preprocess, Image.new("RGB", size, shade)) for shade in ("black", "white"))
        finite = bool(torch.isfinite(black).all() and torch.isfinite(white).all())
        if black.shape != white.shape or not finite or not bool((black != white).any()):
            raise InputError(
                "regions cannot be followed through this preprocessing: it makes the same of black and of white"
            )
        if generators() != before and not _is_steady(preprocess, size):
            raise InputError(
                "regions cannot be followed through this preprocessing: it does another thing each time; pass the one "
                "for evaluation, without random changes"
            )
        found = Shades(black, white)
        with _lock:
            while len(known) >= _KEPT:
                known.pop(next(iter(known)))
            known[size] = found
    return found


def _is_steady(preprocess: Preprocess, size: tuple[int, int]) -> bool:
    """Whether a preprocessing makes the same of a picture without symmetry each time."""
    across, down = np.meshgrid(*(np.linspace(0, end, side) for end, side in zip((155, 100), size, strict=True)))
    picture = Image.fromarray((across + down).astype(np.uint8)).convert("RGB")
    first = _made(preprocess, picture)
    return all(torch.equal(first, _made(preprocess, picture)) for _ in range(_REPEATS))


def _made(preprocess: Preprocess, picture: Image.Image) -> Float[Tensor, "c h w"]:
    tensor: Tensor = preprocess(picture)
    return (tensor[0] if tensor.dim() == 4 else tensor).detach().float().cpu()


def seen(region: Bool[np.ndarray, "H W"], preprocess: Preprocess) -> Float[Tensor, "h w"]:
    """Return how much of each pixel of the model's input a region of the picture covers, 0..1.

    The region goes through the preprocessing itself, as a picture of black and white.

    Raises:
        InputError: the preprocessing does more than resize, crop, pad and change colours.
    """
    size = (region.shape[1], region.shape[0])
    known = shades(preprocess, size)
    shown = _made(preprocess, Image.fromarray(np.where(region, 255, 0).astype(np.uint8)).convert("RGB"))
    if shown.shape != known.black.shape:
        raise InputError("regions cannot be followed through this preprocessing: the size of its output varies")
    share = ((shown - known.black) * known.contrast).sum(0) / known.size_of_contrast
    if float(share.min()) < -0.5 or float(share.max()) > 1.5 or not bool(torch.isfinite(share).all()):
        raise InputError(
            "regions cannot be followed through this preprocessing: it does more than resize, crop and change colours"
        )
    return share.clamp(0, 1) * known.view


def picture_size(path: Path) -> tuple[int, int]:
    """Return a picture's width and height, turned upright as the model sees it.

    Raises:
        ImageError: the file cannot be read.
    """
    return open_picture(path).size
