"""Reads mask pictures: says what their values mean, and which pixels are the object.

The same value means different things in different data: 255 may be the object, or the border around it. So camkit
examines the masks of a folder together, recognises the usual conventions, and refuses all other masks.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


_SAMPLE = 200
"""At most this many masks are examined: enough to contain every class, and read within seconds."""

_MOST_PIXELS = 1 << 28
"""No further mask is examined when they have more pixels than this together, which take about a minute."""

_SLOPED, _FLAT = 0.7, 0.25
"""A pixel lies on a slope if it has both a darker and a brighter neighbour. These are shares of the pixels between the
extreme values. From the first share on, the values are a soft edge: smoothed and resized masks measured 0.83 to 1.00,
JPEG 0.73 to 0.81. Up to the second share, they are separate objects: masks of classes or instances measured 0.00 to
0.03. Lossy WebP (0.37 to 0.44) and instances that were resized smoothly (0.09 to 0.38) may be either."""

_LEAST_CLEAR, _CLEAR = 0.4, 1 / 16
"""In a soft mask, at least the first share of the pixels is almost black or white: within the second share of the range
from either end. Soft masks measured 0.67 to 0.99; of 13 photographs, 12 measured less than 0.28."""

_ENCLOSED = 0.9
"""A border encloses the objects: at least this share of the pixels next to them is part of it, not of the
background."""

_BORDERS = {255, 65535, VIVID | 0xE0E0C0}
"""Values of the border around objects: the highest of 8 and of 16 bits, white, and Pascal VOC's (224, 224, 192)."""

_MATTING = ({0, 127, 255}, {0, 128, 255})
"""The values of a trimap for matting: background, unknown and object."""

_PETS = {1, 2, 3}
"""The values of a trimap of Oxford-IIIT Pets: object, background and border."""

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


def understand_masks(files: Sequence[Path]) -> MaskReading:
    """Find out what the values of masks mean, from a sample of them.

    Raises:
        InputError: no mask can be read, or it is not clear which values are the object.
    """
    refused = None
    pixels, sloped, beside, exposed = (Counter[int]() for _ in range(4))
    square, cross = np.ones((3, 3), np.uint8), cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    for file in random.Random(0).sample(files, min(len(files), _SAMPLE)):
        try:
            values = read_mask(file)
        except ImageError as error:  # if other masks can be read, this one is an error of its own picture
            refused = refused or error
            continue
        exact = values.astype(np.float64)  # OpenCV's filters take no 32-bit numbers
        on_slope = (cv2.erode(exact, square) < exact) & (exact < cv2.dilate(exact, square))
        for counter, counted in ((pixels, values), (sloped, values[on_slope])):
            counter.update(dict(zip(*(each.tolist() for each in np.unique(counted, return_counts=True)), strict=True)))
        for border in (_BORDERS | {127, 128}) & set(np.unique(values).tolist()):
            objects = (values != 0) & (values != border)
            around = cv2.dilate(objects.astype(np.uint8), cross) > 0
            beside[border] += int(np.count_nonzero(around & (values == border)))
            exposed[border] += int(np.count_nonzero(around & (values == 0)))
        if pixels.total() > _MOST_PIXELS:
            break
    if not pixels and refused is not None:
        raise InputError(str(refused)) from refused
    borders = {value for value in beside if 0 < beside[value] >= _ENCLOSED * (beside[value] + exposed[value])}
    reading = _convention(pixels, sloped, borders)
    objects = np.zeros(1, bool) if reading is None else reading.is_object(np.array(sorted(pixels)))
    if reading is None or not objects.any() or (len(files) > 1 and objects.all()):
        shown = _listed(pixels) + " everywhere" * (len(pixels) == 1)
        raise InputError(
            f"the masks, such as {brief(files[0])}, hold {shown}, and it is not clear what is the object; save them "
            "with 0 for the background and 255 for the object"
        )
    return reading


def _convention(pixels: Counter[int], sloped: Counter[int], borders: set[int]) -> MaskReading | None:
    """Return what values mean; None if they fit no convention.

    Args:
        pixels: how many pixels have each value.
        sloped: how many of these lie on a slope.
        borders: the values that enclose the objects.
    """
    objects, low, high = pixels.keys() - {0}, min(pixels), max(pixels)
    if pixels.keys() == _PETS:
        words = "trimaps as in Oxford-IIIT Pets: 1 is the object, 2 the background, 3 the border"
        return MaskReading(words, frozenset({0, 2, 3}))
    if len(objects) <= 1:
        return MaskReading(f"value {_listed(objects)} is the object" + ", 0 the background" * (0 in pixels))
    between = pixels.keys() - {low, high}
    slope = sum(sloped[value] for value in between) / max(1, sum(pixels[value] for value in between))
    margin, middle = (high - low) * _CLEAR, (low + high) / 2
    clear = sum(count for value, count in pixels.items() if not low + margin < value < high - margin)
    if high < VIVID and slope >= _SLOPED and clear >= _LEAST_CLEAR * pixels.total():
        words = f"the levels between {low} and {high} are a soft edge: the object is above {middle:g}"
        return MaskReading(words, above=middle)
    unknown = borders & {127, 128} if pixels.keys() in _MATTING else set()
    are_smooth = slope > _FLAT if high < VIVID else len(pixels) > MOST_COLOURS
    if 0 not in pixels or (are_smooth and not unknown):
        return None
    borders = unknown or borders & _BORDERS
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
        numbers = _numbers(upright)
        if not (numbers >= 0).all():
            raise ImageError(f"{name} holds numbers below 0 or NaN; save it with 0 for the background")
        return numbers


def _numbers(picture: Image.Image) -> Integer[np.ndarray, "h w"]:
    opacity = _opacity(picture)
    if opacity is not None and opacity.min() < opacity.max():
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


def _opacity(picture: Image.Image) -> UInt8[np.ndarray, "h w"] | None:
    """Return the opacity of each pixel; None if the picture stores none."""
    is_transparent = picture.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info
    return np.asarray(picture.convert("RGBA").getchannel("A")) if is_transparent else None


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
