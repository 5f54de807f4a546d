"""Says what the values in mask pictures mean, and which pixels are the object.

The same value means different things in different data: 255 may be the object, or the border around it. So camkit
examines the masks of a folder together and tries the conventions that it knows, in order. It refuses masks that fit
none of them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import cv2
import numpy as np
from jaxtyping import Bool, Integer

from camkit.errors import ImageError, InputError, brief
from camkit.images.mask_pictures import CHANNELS, MOST_COLOURS, VIVID, Channel, MaskPicture, Storage, read_mask

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
"""A border encloses the objects: at most this share of their contact with anything else is contact with the
background."""

_BORDERS = {255, 65535, VIVID | 0xE0E0C0}
"""Values of the border around objects: the highest of 8 and of 16 bits, white, and Pascal VOC's (224, 224, 192)."""

_MATTING = ({0, 127, 255}, {0, 128, 255})
"""The values of a trimap for matting: background, unknown and object."""

_PETS = {1, 2, 3}
"""The values of a trimap of Oxford-IIIT Pets: object, background and border."""

_LISTED = 4
"""A sentence lists at most this many values."""

_STRIP = 1 << 20
"""This many pixels are counted at once, which bounds the memory."""

_ADVICE = "save them with 0 for the background and 255 for the object"


@dataclass(frozen=True)
class MaskReading:
    """What the values of masks mean.

    Attributes:
        channel: the part of the file that shows the object.
        words: the meaning, as a sentence for the user.
        above: the object is every value above this; None if it is every value but ``others``.
        others: the values of the background and of borders.
        known: the only values that may occur; None if any may.
    """

    channel: Channel
    words: str
    above: float | None = None
    others: frozenset[int] = frozenset({0})
    known: frozenset[int] | None = None

    def is_object(self, values: Integer[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
        """Return where values belong to the object."""
        if self.above is not None:
            return np.asarray(values > self.above)
        return np.asarray(~np.isin(values, [*self.others]))


MaskReadings: TypeAlias = Mapping[Storage, MaskReading]
"""What the values mean in the masks of each storage that occurs."""


@dataclass(frozen=True, eq=False)
class MaskFile:
    """A mask picture and what its values mean."""

    path: Path
    readings: MaskReadings

    def region(self, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
        """Return the object's pixels on a picture of ``size`` (width, height).

        Raises:
            ImageError: the mask cannot be read, has another size, or holds values that no other mask holds.
        """
        mask = read_mask(self.path, size)
        reading = self.readings.get(mask.storage)
        if reading is None:
            raise ImageError(f"the mask {self.path} is stored differently from the masks that camkit examined")
        values = mask.values(reading.channel)
        unknown = set() if reading.known is None else set(np.unique(values).tolist()) - reading.known
        if unknown:
            raise ImageError(
                f"the mask {self.path} holds {_listed(unknown)}, but the masks that camkit examined hold only "
                f"{_listed(reading.known or ())}"
            )
        return reading.is_object(values)


@dataclass
class _Tally:
    """What one channel of some masks holds.

    Attributes:
        example: the first of the masks.
        pixels: how many pixels have each value.
        sloped: how many of these lie on a slope.
        at_edge: the values at the edges of the pictures.
        enclosed: for values that may be a border, how often they touch an object.
        exposed: for the same values, how often an object touches the background in masks that hold them.
    """

    channel: Channel
    example: Path
    pixels: Counter[int] = field(default_factory=Counter)
    sloped: Counter[int] = field(default_factory=Counter)
    at_edge: set[int] = field(default_factory=set)
    enclosed: Counter[int] = field(default_factory=Counter)
    exposed: Counter[int] = field(default_factory=Counter)

    def add(self, values: Integer[np.ndarray, "h w"]) -> None:
        """Count one mask."""
        present = set(np.unique(values).tolist()) - {0}
        candidates = present if len(present) == 2 else present & _BORDERS
        for strip in np.array_split(values, min(len(values), math.ceil(values.size / _STRIP))):
            self.pixels.update(_counts(strip))
            self.sloped.update(_counts(strip[_is_sloped(strip)]))
            for border in candidates:
                objects = (strip != 0) & (strip != border)
                self.enclosed[border] += _contacts(objects, strip == border)
                self.exposed[border] += _contacts(objects, strip == 0)
        for line in (values[0], values[-1], values[:, 0], values[:, -1]):
            self.at_edge.update(np.unique(line).tolist())

    @property
    def values(self) -> set[int]:
        """The values that occur."""
        return set(self.pixels)

    @property
    def slope(self) -> float:
        """The share of the pixels between the extreme values that lie on a slope."""
        between = self.values - {min(self.pixels), max(self.pixels)}
        return sum(self.sloped[value] for value in between) / max(1, sum(self.pixels[value] for value in between))

    def encloses(self, border: int) -> bool:
        """Tell whether a value lies between the other objects and the background, and is smaller than they are.

        The unknown part of a trimap for matting may be larger than a small object.
        """
        enclosed, exposed = self.enclosed[border], self.exposed[border]
        area = self.pixels.total() - self.pixels[0] - self.pixels[border]
        is_smaller = self.pixels[border] < area or self.values in _MATTING
        return is_smaller and enclosed > 0 and exposed <= _MOST_LEAKS * (exposed + enclosed)


def _counts(values: Integer[np.ndarray, "..."]) -> Counter[int]:
    unique, counts = np.unique(values, return_counts=True)
    return Counter(dict(zip(unique.tolist(), counts.tolist(), strict=True)))


def _is_sloped(values: Integer[np.ndarray, "h w"]) -> Bool[np.ndarray, "h w"]:
    """Return which pixels have both a darker and a brighter neighbour."""
    exact, kernel = values.astype(np.float64), np.ones((3, 3), np.uint8)  # OpenCV's filters take no 32-bit numbers
    return np.asarray((cv2.erode(exact, kernel) < exact) & (exact < cv2.dilate(exact, kernel)))


def _contacts(first: Bool[np.ndarray, "h w"], second: Bool[np.ndarray, "h w"]) -> int:
    """Count how often a pixel of one region is above, below or beside a pixel of the other."""
    pairs = [(first[1:], second[:-1]), (first[:-1], second[1:])]
    pairs += [(first[:, 1:], second[:, :-1]), (first[:, :-1], second[:, 1:])]
    return sum(int(np.count_nonzero(one & other)) for one, other in pairs)


def understand_masks(files: Sequence[Path]) -> MaskReadings:
    """Find out what the values of masks mean, from a sample of them.

    Raises:
        InputError: no mask can be read, or it is not clear which values are the object.
    """
    readings = {}
    for storage, tallies in _examine(files).items():
        tally = _shows_the_object(storage, tallies)
        readings[storage] = reading = _understand(tally)
        edge, everything = np.array(sorted(tally.at_edge)), np.array(sorted(tally.values))
        if len(files) > 1 and reading.is_object(edge).all():
            is_white = reading.is_object(everything).all()
            fault = (
                f"show no background: every pixel is {_listed(tally.values)}"
                if is_white
                else ("look inverted: the object touches every edge of every picture")
            )
            raise InputError(f"{_named(tally)} {fault}; {_ADVICE}")
    return readings


def _examine(files: Sequence[Path]) -> dict[Storage, dict[Channel, _Tally]]:
    """Count the values in masks, separately for each storage and channel."""
    by_storage: dict[Storage, dict[Channel, _Tally]] = {}
    refused: ImageError | None = None
    pixels = 0
    for file in random.Random(0).sample(files, min(len(files), _SAMPLE)):
        if pixels > _MOST_PIXELS:
            break
        try:
            mask = read_mask(file)
            pixels += mask.picture.width * mask.picture.height
            values = _values(mask)
        except ImageError as error:  # if other masks can be read, this one is an error of its own picture
            refused = refused or error
            continue
        tallies = by_storage.setdefault(mask.storage, {channel: _Tally(channel, file) for channel in values})
        for channel, numbers in values.items():
            tallies[channel].add(numbers)
    if not by_storage and refused is not None:
        raise InputError(str(refused)) from refused
    return by_storage


def _values(mask: MaskPicture) -> dict[Channel, Integer[np.ndarray, "h w"]]:
    values = {channel: mask.values(channel) for channel in CHANNELS[mask.storage]}
    if mask.storage == "colour" and (colours := len(np.unique(values["colour"]))) > MOST_COLOURS:
        raise ImageError(f"{mask.name} holds {colours} colours, so it is a picture and not a mask")
    return values


def _shows_the_object(storage: Storage, tallies: Mapping[Channel, _Tally]) -> _Tally:
    """Choose the channel: transparency if it varies, a palette's colours if one of them is black, else its indices."""
    if storage == "alpha":
        return tallies["alpha" if len(tallies["alpha"].values) > 1 else "colour"]
    if storage == "palette":
        colours = tallies["colour"].values
        return tallies["colour" if 0 in colours and len(colours) > 1 and tallies["index"].values != _PETS else "index"]
    return tallies[storage]


def _understand(tally: _Tally) -> MaskReading:
    """Return the reading of the first convention that the values fit."""
    if tally.values == {0}:
        raise InputError(f"{_named(tally)} show no object: every pixel is 0; {_ADVICE}")
    for convention in _CONVENTIONS:
        reading = convention(tally)
        if reading is not None:
            return reading
    raise InputError(
        f"{_named(tally)} hold {_listed(tally.values)}, and it is not clear which of these are the object: they fit no "
        f"convention that camkit knows; {_ADVICE}"
    )


def _pets(tally: _Tally) -> MaskReading | None:
    if tally.values != _PETS:
        return None
    words = "trimaps as in Oxford-IIIT Pets: 1 is the object, 2 the background, 3 the border"
    return MaskReading(tally.channel, words, others=frozenset({2, 3}), known=frozenset(_PETS))


def _one_object(tally: _Tally) -> MaskReading | None:
    objects = tally.values - {0}
    if len(objects) != 1 or _is_vivid(tally):
        return None
    (value,) = objects
    words = f"{_unit(tally)} {value} is the object" + (", 0 the background" if 0 in tally.values else "")
    return MaskReading(tally.channel, words, known=frozenset({0, value}))


def _soft_edge(tally: _Tally) -> MaskReading | None:
    low, high = min(tally.values), max(tally.values)
    if tally.channel == "index" or _is_vivid(tally) or tally.slope < _SLOPED:
        return None
    margin = (high - low) * _CLEAR
    clear = sum(count for value, count in tally.pixels.items() if not low + margin < value < high - margin)
    if clear < _LEAST_CLEAR * tally.pixels.total():
        return None
    middle = (low + high) / 2
    words = f"the levels between {low} and {high} are a soft edge: the object is above {middle:g}"
    return MaskReading(tally.channel, words, middle)


def _separate_objects(tally: _Tally) -> MaskReading | None:
    """Every value but 0 is an object, such as the ids of classes; a value that encloses the others may be a border."""
    is_matting, objects = tally.values in _MATTING, tally.values - {0}
    if 0 not in tally.values or (tally.slope > _FLAT and not is_matting and not _is_vivid(tally)):
        return None
    enclosing = {value for value in objects if tally.encloses(value)}
    borders = enclosing & (_BORDERS | {127, 128} if is_matting else _BORDERS)
    if enclosing - borders and len(objects) == 2:
        return None
    words = f"every {_unit(tally)} but {'black' if _is_vivid(tally) else 0} is an object ({_listed(objects - borders)})"
    around = f"; {_listed(borders)} is a border, neither object nor background" if borders else ""
    return MaskReading(tally.channel, words + around, others=frozenset({0, *borders}))


_CONVENTIONS: tuple[Callable[[_Tally], MaskReading | None], ...] = (_pets, _one_object, _soft_edge, _separate_objects)
"""Tried in this order."""


def _is_vivid(tally: _Tally) -> bool:
    return tally.channel == "colour" and max(tally.values) >= VIVID


def _named(tally: _Tally) -> str:
    return f"the masks, such as {brief(tally.example)},"


def _unit(tally: _Tally) -> str:
    if _is_vivid(tally):
        return "colour"
    return {"alpha": "opacity", "index": "palette index"}.get(tally.channel, "value")


def _listed(values: Iterable[int]) -> str:
    """Return the first values in words."""
    ordered = sorted(values)
    names = [f"#{value - VIVID:06x}" if VIVID <= value < 2 * VIVID else str(value) for value in ordered]
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
