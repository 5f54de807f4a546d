"""Reads mask pictures: says what their values mean, and which pixels are the object.

The same value means different things in different data: 255 may be the object, or the border around it. So camkit
examines the masks of a folder together, recognises the usual conventions, and refuses all other masks.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from jaxtyping import Bool, Integer, UInt8
from PIL import Image

from camkit.errors import ImageError, InputError, as_error, brief
from camkit.images.files import PICTURE_SUFFIXES, is_regular
from camkit.images.read import open_picture, opened, turned

VIVID = 1 << 24
"""Added to 0xRRGGBB, the number of a colour. The number of a grey is its level."""

_WORD = r"(ground[ _-]?truth|gt|mask|segmentation|seg|trimap|matte|alpha|label|annotation|anno)s?"
_MASK_NAME = re.compile(rf"(?<=.)([ ._-]+\(?{_WORD}([ _-]?{_WORD})*\)?)([ _-]?\d+)?$", re.IGNORECASE)
_FOLDER_NAME = re.compile(rf"{_WORD}([ _-]?({_WORD}|class|object|images?|png|raw))*", re.IGNORECASE)
"""How data sets name masks and the folders of masks: ``dog_mask_2.png``, ``bird0-gt.png``; ``SegmentationClass``."""

MASK_SUFFIXES = (".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
"""The suffixes of files that may be masks. JPEG changes the values."""

_FEW_VALUES = 16

MOST_COLOURS = 1024
"""A mask has at most this many colours: one for each class or object. Photographs have tens of thousands."""


_WHITE, _NEAR_WHITE = 1 / 4, 15 / 16
"""In a mask with a soft edge, at least the first share of what is not black is nearly white: above the second share of
the largest value. In indices of classes, 255 as a class measured 0.18."""

_BORDERS = {255, 65535, VIVID | 0xE0E0C0}
"""Values of the border around objects: the highest of 8 and of 16 bits, white, and Pascal VOC's (224, 224, 192)."""

_LISTED = 4
"""A sentence lists at most this many values."""


@dataclass(frozen=True)
class MaskReading:
    """What the values of masks mean.

    Attributes:
        words: the meaning, as a sentence for the user.
        others: the values of the background and of borders; every other value is the object.
        above: the object is every value above this; None if ``others`` say what it is.
    """

    words: str
    others: frozenset[int] = frozenset({0})
    above: float | None = None

    def is_object(self, values: Integer[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
        """Return where values belong to the object."""
        return np.asarray(~np.isin(values, [*self.others]) if self.above is None else values > self.above)


@dataclass(frozen=True, eq=False)
class MaskFile:
    """A mask picture and what its values mean."""

    path: Path
    reading: MaskReading

    def region(self, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
        """Return the object's pixels on a picture of ``size`` (width, height).

        Raises:
            ImageError: the mask cannot be read, or has another size.
        """
        return self.reading.is_object(read_mask(self.path, size))


def understand_masks(
    files: Sequence[Any], read: Callable[[Any], Integer[np.ndarray, "h w"]] | None = None
) -> MaskReading:
    """Find out what the values of masks mean, from a sample of them. ``read`` reads each; None reads files.

    Raises:
        InputError: no mask can be read, or it is not clear which values are the object.
    """
    refused = None
    pixels, beside, exposed = (Counter[int]() for _ in range(3))
    alike, cross = 0, cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    # 200 masks are enough to contain every class, and are read within seconds.
    for file in random.Random(0).sample(files, min(len(files), 200)):
        try:
            values = (read or read_mask)(file)
        except ImageError as error:  # if other masks can be read, this one is an error of its own picture
            refused = refused or error
            continue
        pixels.update(dict(zip(*(each.tolist() for each in np.unique(values, return_counts=True)), strict=True)))
        alike += int(np.count_nonzero(values[:, 1:] == values[:, :-1]))
        for border in _BORDERS & set(np.unique(values).tolist()):
            around = cv2.dilate(((values != 0) & (values != border)).astype(np.uint8), cross) > 0
            beside[border] += int(np.count_nonzero(around & (values == border)))
            exposed[border] += int(np.count_nonzero(around & (values == 0)))
        # So many pixels take about a minute.
        if pixels.total() > 1 << 28:
            break
    if not pixels and refused is not None:
        raise InputError(str(refused)) from refused
    # A border encloses the objects: 90 % of the pixels next to them are part of it, not of the background.
    borders = {value for value in beside if 0 < beside[value] >= 0.9 * (beside[value] + exposed[value])}
    reading = _convention(pixels, borders, alike / pixels.total())
    objects = np.zeros(1, bool) if reading is None else reading.is_object(np.array(sorted(pixels)))
    if reading is None or not objects.any() or (len(files) > 1 and objects.all()):
        shown = _listed(pixels) + " everywhere" * (len(pixels) == 1)
        raise InputError(
            f"the masks, such as {brief(files[0])}, hold {shown}, and it is not clear what is the object; save them "
            "with 0 for the background and 255 for the object"
        )
    return reading


def _convention(pixels: Counter[int], borders: set[int], alike: float) -> MaskReading | None:
    """Return what values mean; None if they fit no convention.

    Args:
        pixels: how many pixels have each value.
        borders: the values that enclose the objects.
        alike: the share of the pixels that have the value of the pixel to the left.
    """
    objects, low, high = pixels.keys() - {0}, min(pixels), max(pixels)
    if pixels.keys() == {1, 2, 3}:
        words = "trimaps as in Oxford-IIIT Pets: 1 is the object, 2 the background, 3 the border"
        return MaskReading(words, frozenset({0, 2, 3}))
    if len(objects) <= 1:
        return MaskReading(f"value {_listed(objects)} is the object" + ", 0 the background" * (0 in pixels))
    white = sum(pixels[value] for value in objects if value > _NEAR_WHITE * high)
    if high < VIVID and len(pixels) > _FEW_VALUES and not borders and white >= _WHITE * (pixels.total() - pixels[0]):
        middle = (low + high) / 2
        words = f"the levels between {low} and {high} are a soft edge: the object is above {middle:g}"
        return MaskReading(words, above=middle)
    # In a mask, half of the pixels have the value of the pixel to the left; in photographs, few have.
    if 0 not in pixels or alike < 1 / 2:
        return None
    words = f"every value but 0 is an object ({_listed(objects - borders)})"
    around = f"; {_listed(borders)} is a border, neither object nor background" if borders else ""
    return MaskReading(words + around, frozenset({0, *borders}))


def _listed(values: Iterable[int]) -> str:
    """Return the first values in words."""
    names = [f"#{value - VIVID:06x}" if value >= VIVID else str(value) for value in sorted(values)]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def read_mask(file: Path, size: tuple[int, int] | None = None) -> Integer[np.ndarray, "h w"]:
    """Decode a mask picture, turned upright, into one number for each pixel.

    It is the opacity if that varies, the index of a palette whose first colour is black or that has no black, a grey
    level, or the number of a colour.

    Raises:
        ImageError: it cannot be read, is not of ``size`` (width, height), or its numbers cannot be those of a mask.
    """
    name = f"the mask {brief(file)}"
    with as_error(ImageError, lambda error: f"{name} cannot be read: {brief(error)}"), opened(file) as picture:
        upright = turned(picture)
        if size is not None and upright.size != size:
            raise ImageError(
                f"{name} has {upright.width}x{upright.height} pixels, but its picture has {size[0]}x{size[1]}"
            )
        numbers = mask_numbers(upright)
        if not (numbers >= 0).all():
            raise ImageError(f"{name} holds numbers below 0 or NaN; save it with 0 for the background")
        return numbers


def mask_numbers(picture: Image.Image) -> Integer[np.ndarray, "h w"]:
    """Return one number for each pixel of a mask, as ``read_mask`` does."""
    if picture.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        opacity: UInt8[np.ndarray, "h w"] = np.asarray(picture.convert("RGBA").getchannel("A"))
        if opacity.min() < opacity.max():
            return opacity
    if picture.mode == "P":
        colours, first = _colours(picture), (picture.getpalette() or [])[:3]
        return colours if first != [0, 0, 0] and 0 in colours else np.asarray(picture)
    levels = np.asarray(picture)
    if picture.mode == "F":  # shares from 0 to 1
        return np.where(levels >= 0, np.rint(levels * 255), -1).astype(int)
    if levels.ndim == 2:
        return levels.astype(np.uint8 if levels.dtype == bool else levels.dtype.newbyteorder("="))
    return _colours(picture)


def _colours(picture: Image.Image) -> Integer[np.ndarray, "h w"]:
    """Return the number of each pixel's colour: the level of a grey, or ``VIVID`` and 0xRRGGBB."""
    red, green, blue = (np.asarray(band, np.int32) for band in picture.convert("RGB").split())
    is_grey = (red == green) & (green == blue)
    return np.where(is_grey, red, VIVID | red << 16 | green << 8 | blue)


def names_masks(folder: str) -> bool:
    """Return whether a folder with this name usually holds masks or other annotations."""
    return _FOLDER_NAME.fullmatch(folder) is not None


def picture_of(mask: Path) -> Path:
    """Return the place of a mask's picture without its extension: ``cat/a`` for ``cat/gt/a_mask.png``.

    The first folder stays: it is that of a class, which may be named "mask".
    """
    folders = [part for part in mask.parts[1:-1] if not names_masks(part)]
    return Path(*mask.parts[:-1][:1], *folders, _MASK_NAME.sub("", mask.stem))


def is_mask(file: Path, root: Path) -> bool:
    """Return whether a file below ``root`` is the mask of a picture: ``a_seg.png`` beside ``a.jpg``, or ``gt/a.png``.

    A photograph is never a mask: it may show somebody who wears one.
    """
    stem = _MASK_NAME.sub("", file.stem)
    if stem != file.stem:
        endings = (ending for suffix in PICTURE_SUFFIXES for ending in (suffix, suffix.upper()))
        if any(is_regular(file.with_name(stem + ending)) for ending in endings):
            return not is_photograph(file)
    is_inside = any(map(names_masks, file.relative_to(root).parts[:-1]))
    return is_inside and file.suffix.lower() in MASK_SUFFIXES and not is_photograph(file)


def has_few_values(file: Path) -> bool:
    """Return whether a picture has at least two colours, but few, like a mask; False if it cannot be read."""
    try:
        colours = open_picture(file).getcolors(_FEW_VALUES)
    except ImageError:
        return False
    return colours is not None and len(colours) > 1


def is_photograph(file: Path) -> bool:
    """Return whether a file is a picture with more colours than a mask could have; a grey picture does not count."""
    try:
        numbers = read_mask(file)
    except ImageError:
        return False
    colours = np.unique(numbers[numbers >= VIVID])
    return len(colours) > min(MOST_COLOURS, numbers.size // 4)  # a small picture has few pixels to colour
