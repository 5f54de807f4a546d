"""Says what the values in mask pictures mean, and which pixels are the object.

The same value means different things in different data: 255 may be the object, or the border around it. So camkit
examines the masks of a folder together, recognises the usual conventions, and refuses all other masks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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

_SLOPED, _FLAT = 0.7, 0.25
"""A pixel lies on a slope if it has both a darker and a brighter neighbour. These are shares of the
pixels between the extreme values that lie on slopes. From the first share on, the values are a soft edge: smoothed and
resized masks measured 0.83 to 1.00, JPEG 0.73 to 0.81. Up to the second share, they are separate objects: masks of
classes or instances measured 0.00 to 0.03. Lossy WebP (0.37 to 0.44) and instances that were resized smoothly (0.09 to
0.38) lie between."""

_LEAST_CLEAR, _CLEAR = 0.4, 1 / 16
"""In a soft mask, at least the first share of the pixels is almost black or white: within the second share of the range
from either end. Soft masks measured 0.67 to 0.99; of 13 photographs, 12 measured less than 0.28."""

_MOST_LEAKS = 0.1
"""A border encloses the objects: at most this share of the pixels next to them is background."""

_BORDERS = {255, 65535, VIVID | 0xE0E0C0}
"""Values of the border around objects: the highest of 8 and of 16 bits, white, and Pascal VOC's (224, 224, 192)."""

_MATTING = ({0, 127, 255}, {0, 128, 255})
"""The values of a trimap for matting: background, unknown and object."""

_PETS = {1, 2, 3}
"""The values of a trimap of Oxford-IIIT Pets: object, background and border."""

_LISTED = 4
"""A sentence lists at most this many values."""

_ADVICE = "save them with 0 for the background and 255 for the object"


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


@dataclass
class _Tally:
    """What some masks hold.

    Attributes:
        pixels: how many pixels have each value.
        sloped: how many of these lie on a slope.
        at_edge: the values at the edges of the pictures.
        beside: for values that may be a border, how many of their pixels are next to an object.
        exposed: for the same values, how many pixels of the background are, in masks that hold them.
    """

    pixels: Counter[int] = field(default_factory=Counter)
    sloped: Counter[int] = field(default_factory=Counter)
    at_edge: set[int] = field(default_factory=set)
    beside: Counter[int] = field(default_factory=Counter)
    exposed: Counter[int] = field(default_factory=Counter)

    def add(self, values: Integer[np.ndarray, "h w"]) -> None:
        """Count one mask."""
        exact, kernel = values.astype(np.float64), np.ones((3, 3), np.uint8)  # OpenCV's filters take no 32-bit numbers
        sloped = (cv2.erode(exact, kernel) < exact) & (exact < cv2.dilate(exact, kernel))
        for counter, counted in ((self.pixels, values), (self.sloped, values[sloped])):
            present, counts = np.unique(counted, return_counts=True)
            counter.update(dict(zip(present.tolist(), counts.tolist(), strict=True)))
        self.at_edge.update(*(line.tolist() for line in (values[0], values[-1], values[:, 0], values[:, -1])))
        for border in (_BORDERS | {127, 128}) & set(np.unique(values).tolist()):
            objects = (values != 0) & (values != border)
            around = cv2.dilate(objects.astype(np.uint8), cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))) > 0
            self.beside[border] += int(np.count_nonzero(around & (values == border)))
            self.exposed[border] += int(np.count_nonzero(around & (values == 0)))

    def encloses(self, border: int) -> bool:
        """Tell whether a value lies between the other objects and the background."""
        return 0 < self.beside[border] >= (1 - _MOST_LEAKS) * (self.beside[border] + self.exposed[border])


def understand_masks(files: Sequence[Path]) -> MaskReading:
    """Find out what the values of masks mean, from a sample of them.

    Raises:
        InputError: no mask can be read, or it is not clear which values are the object.
    """
    tally, refused = _Tally(), None
    for file in random.Random(0).sample(files, min(len(files), _SAMPLE)):
        try:
            tally.add(read_mask(file))
        except ImageError as error:  # if other masks can be read, this one is an error of its own picture
            refused = refused or error
        if tally.pixels.total() > _MOST_PIXELS:
            break
    if not tally.pixels and refused is not None:
        raise InputError(str(refused)) from refused
    reading = _convention(tally)
    everything, edge = (np.array(sorted(values)) for values in (tally.pixels, tally.at_edge))
    if reading is None:
        fault = (
            f"hold {_listed(tally.pixels)}, and it is not clear which of these are the object: they fit no convention "
            "that camkit knows"
        )
    elif not reading.is_object(everything).any():
        fault = f"show no object: every pixel is {_listed(tally.pixels)}"
    elif len(files) > 1 and reading.is_object(everything).all():
        fault = f"show no background: every pixel is {_listed(tally.pixels)}"
    elif len(files) > 1 and reading.is_object(edge).all():
        fault = "look inverted: the object touches every edge of every picture"
    else:
        return reading
    raise InputError(f"the masks, such as {brief(files[0])}, {fault}; {_ADVICE}")


def _convention(tally: _Tally) -> MaskReading | None:
    """Return the meaning of the values; None if they fit no convention."""
    values = set(tally.pixels)
    objects, low, high = values - {0}, min(values), max(values)
    if values == _PETS:
        words = "trimaps as in Oxford-IIIT Pets: 1 is the object, 2 the background, 3 the border"
        return MaskReading(words, frozenset({0, 2, 3}))
    if len(objects) <= 1:
        return MaskReading(f"value {_listed(objects)} is the object" + ", 0 the background" * (0 in values))
    between = values - {low, high}
    slope = sum(tally.sloped[value] for value in between) / max(1, sum(tally.pixels[value] for value in between))
    margin = (high - low) * _CLEAR
    clear = sum(count for value, count in tally.pixels.items() if not low + margin < value < high - margin)
    if high < VIVID and slope >= _SLOPED and clear >= _LEAST_CLEAR * tally.pixels.total():
        middle = (low + high) / 2
        words = f"the levels between {low} and {high} are a soft edge: the object is above {middle:g}"
        return MaskReading(words, above=middle)
    borders = {value for value in (127, 128) if tally.encloses(value)} if values in _MATTING else set()
    are_smooth = slope > _FLAT if high < VIVID else len(values) > MOST_COLOURS
    if 0 not in values or (are_smooth and not borders):
        return None
    borders = borders or {value for value in objects & _BORDERS if tally.encloses(value)}
    words = f"every value but 0 is an object ({_listed(objects - borders)})"
    around = f"; {_listed(borders)} is a border, neither object nor background" if borders else ""
    return MaskReading(words + around, frozenset({0, *borders}))


def _listed(values: Iterable[int]) -> str:
    """Return the first values in words."""
    names = [f"#{value - VIVID:06x}" if value >= VIVID else str(value) for value in sorted(values)]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
