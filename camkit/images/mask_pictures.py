"""Decodes mask pictures: one number for each pixel, whatever way the file stores it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from jaxtyping import Integer, UInt8
from PIL import Image

from camkit.errors import ImageError, as_error, brief
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
