"""Says what the values in mask pictures mean, and which pixels are the object.

The same value means different things in different data: 255 may be the object, or the border around it. So camkit
examines the masks of a folder together, recognises the usual conventions, and refuses all other masks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import Bool, Integer

from camkit.errors import ImageError, InputError, brief
from camkit.images.mask_pictures import MOST_COLOURS, VIVID, read_mask

_SAMPLE = 200
"""At most this many masks are examined: enough to contain every class, and read within seconds."""

_MOST_PIXELS = 1 << 28
"""No further mask is examined when they have more pixels than this together, which take about a minute."""

_SLOPED = 0.3
"""A pixel lies on a slope if it has both a darker and a brighter neighbour. If more than this share of the pixels
between the extreme values do, the values are a soft edge: smoothed and resized masks measured 0.83 to 1.00, JPEG 0.73
to 0.81, lossy WebP 0.37 to 0.44; masks of classes or instances 0.00 to 0.03."""

_LEAST_CLEAR, _CLEAR = 0.4, 1 / 16
"""In a soft mask, at least the first share of the pixels is almost black or white: within the second share of the range
from either end. Soft masks measured 0.67 to 0.99; of 13 photographs, 12 measured less than 0.28."""

_ENCLOSED = 0.9
"""A border encloses the objects: at least this share of the pixels next to them is part of it, not of the
background."""

_BORDERS = {127, 128, 255, 65535, VIVID | 0xE0E0C0}
"""Values of the border around objects: that of trimaps for matting, the highest of 8 and of 16 bits, white, and Pascal
VOC's (224, 224, 192)."""

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
        for border in _BORDERS & set(np.unique(values).tolist()):
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
    if reading is None or pixels.keys() == {0}:
        raise InputError(
            f"the masks, such as {brief(files[0])}, hold {_listed(pixels)}, and it is not clear which of these are the "
            "object; save them with 0 for the background and 255 for the object"
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
    if high < VIVID and slope > _SLOPED:
        margin, middle = (high - low) * _CLEAR, (low + high) / 2
        clear = sum(count for value, count in pixels.items() if not low + margin < value < high - margin)
        words = f"the levels between {low} and {high} are a soft edge: the object is above {middle:g}"
        return MaskReading(words, above=middle) if clear >= _LEAST_CLEAR * pixels.total() else None
    if 0 not in pixels or (high >= VIVID and len(pixels) > MOST_COLOURS):
        return None
    words = f"every value but 0 is an object ({_listed(objects - borders)})"
    around = f"; {_listed(borders)} is a border, neither object nor background" if borders else ""
    return MaskReading(words + around, frozenset({0, *borders}))


def _listed(values: Iterable[int]) -> str:
    """Return the first values in words."""
    names = [f"#{value - VIVID:06x}" if value >= VIVID else str(value) for value in sorted(values)]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
