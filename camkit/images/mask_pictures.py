"""Decodes mask pictures: one number for each pixel, whatever way the file stores it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Integer
from PIL import Image

from camkit.errors import ImageError, as_error, brief
from camkit.images.files import PICTURE_SUFFIXES, is_regular
from camkit.images.read import open_picture, opened, turned

Storage: TypeAlias = Literal["alpha", "palette", "colour", "grey"]
"""How a file stores its pixels: with transparency, with a palette, in colour or in grey."""

Channel: TypeAlias = Literal["alpha", "index", "colour", "grey"]
"""The part of a file that shows the object: its opacity, its palette's indices, its colours or its grey levels."""

CHANNELS: dict[Storage, tuple[Channel, ...]] = {
    "alpha": ("alpha", "colour"),
    "palette": ("index", "colour"),
    "colour": ("colour",),
    "grey": ("grey",),
}
"""The parts of a file that may show the object, by how the file is stored."""

VIVID = 1 << 24
"""Added to 0xRRGGBB, the number of a colour. The number of a grey is its level."""

_WORD = r"(ground[ _-]?truth|gt|mask|segmentation|seg|trimap|matte|alpha|label|annotation|anno)s?"
_MASK_NAME = re.compile(rf"(?<=.)([ ._-]+\(?{_WORD}([ _-]?{_WORD})*\)?)([ _-]?\d+)?$", re.IGNORECASE)
_FOLDER_NAME = re.compile(rf"{_WORD}([ _-]?({_WORD}|class|object|images?|png|raw))*", re.IGNORECASE)
"""How data sets name masks and the folders of masks: ``dog_mask_2.png``, ``bird0-gt.png``; ``SegmentationClass``."""

MASK_SUFFIXES = (".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
"""The suffixes of files that may be masks. JPEG changes the values."""

_FEW_VALUES = 16
"""Pictures of at most this many colours are masks or drawings: even a photograph of 28 x 28 pixels has over 100."""

MOST_COLOURS = 1024
"""A mask has at most this many colours: one for each class or object. Photographs have tens of thousands."""


@dataclass(frozen=True, eq=False)
class MaskPicture:
    """A mask picture in memory, upright."""

    name: str
    storage: Storage
    picture: Image.Image

    def values(self, channel: Channel) -> Integer[np.ndarray, "h w"]:
        """Return the opacity, palette index, grey level or colour of each pixel.

        Raises:
            ImageError: the values cannot be those of a mask.
        """
        if channel == "alpha":
            return self._opacities()
        if channel == "index":
            return np.asarray(self.picture)
        return self._levels() if channel == "grey" else self._colours()

    def _opacities(self) -> Integer[np.ndarray, "h w"]:
        opacities = np.asarray(self.picture.getchannel("A"))
        visible = np.unique(self._colours()[opacities > 0])
        if 0 in visible and len(visible) == 2 and len(np.unique(opacities)) > 1:
            raise ImageError(f"{self.name} shows one shape in its colours and another in its transparency")
        return opacities

    def _colours(self) -> Integer[np.ndarray, "h w"]:
        red, green, blue = (np.asarray(band, np.int32) for band in self.picture.convert("RGB").split())
        is_grey = (red == green) & (green == blue)
        colours = np.where(is_grey, red, VIVID | red << 16 | green << 8 | blue)
        if self.storage == "palette":  # Pascal VOC's border is index 255, whatever its colour
            colours[(np.asarray(self.picture) == 255) & (colours > 0)] = 255
        return colours

    def _levels(self) -> Integer[np.ndarray, "h w"]:
        levels = np.asarray(self.picture)
        if levels.dtype == bool:
            return levels.astype(np.uint8)
        if self.picture.mode == "F":
            if not (np.isfinite(levels).all() and levels.min() >= 0 and levels.max() <= 1):
                raise ImageError(f"{self.name} holds floating-point values outside 0 to 1; save it as whole numbers")
            return np.asarray(np.rint(levels * 255), np.uint8)
        if levels.dtype.kind == "i" and levels.min() < 0:
            raise ImageError(f"{self.name} holds negative values; save it with 0 for the background")
        return levels.astype(levels.dtype.newbyteorder("="))


def read_mask(file: Path, size: tuple[int, int] | None = None) -> MaskPicture:
    """Decode a mask picture.

    Raises:
        ImageError: it cannot be read, or is not of ``size`` (width, height).
    """
    name = f"the mask {brief(file)}"
    with as_error(ImageError, lambda error: f"{name} cannot be read: {brief(error)}"), opened(file) as picture:
        return _decoded(name, picture, size)


def _decoded(name: str, picture: Image.Image, size: tuple[int, int] | None) -> MaskPicture:
    if getattr(picture, "n_frames", 1) > 1:
        raise ImageError(f"{name} holds several pictures; save the mask as a single picture")
    if ";16" in _rawmode(picture) and picture.mode[:2] != "I;":  # Pillow would drop the lower half of each colour
        raise ImageError(f"{name} has 16 bits per colour; save it with 8 bits, or in grey")
    picture.load()
    upright = turned(picture)
    if size is not None and upright.size != size:
        why = "; its EXIF data turns it" if picture.size == size else ""
        raise ImageError(
            f"{name} has {upright.width}x{upright.height} pixels, but its picture has {size[0]}x{size[1]}{why}"
        )
    if upright.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        return MaskPicture(name, "alpha", upright.convert("RGBA"))
    if upright.mode == "P":
        return MaskPicture(name, "palette", upright)
    is_grey = upright.mode in ("1", "L", "F") or upright.mode[0] == "I"
    return MaskPicture(name, "grey" if is_grey else "colour", upright)


def _rawmode(picture: Image.Image) -> str:
    """Return how the file stores a pixel, in Pillow's words; it is known only before the file is decoded."""
    tiles: Any = getattr(picture, "tile", None)
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


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
        mask = read_mask(file)
    except ImageError:
        return False
    is_cut_out = mask.storage == "alpha" and len(np.unique(np.asarray(mask.picture.getchannel("A")))) > 1
    if mask.storage not in ("colour", "alpha") or is_cut_out:
        return False
    colours = mask.values("colour")
    return len(np.unique(colours)) > min(MOST_COLOURS, colours.size // 4)  # a small picture has few pixels to colour
