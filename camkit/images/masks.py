"""Reads mask pictures: what the values in them mean, and which pixels are the object.

The same value means different things in different data: 255 may be the object, or the border around it. So camkit
examines the masks of a folder together, and refuses them if their values fit none of the known conventions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import cv2
import numpy as np
from jaxtyping import Bool, Integer
from PIL import Image

from camkit.errors import ImageError, InputError, brief
from camkit.images.read import opened, shortened, turned

Storage: TypeAlias = Literal["alpha", "palette", "colour", "grey"]
"""How a file stores its pixels: with transparency, with a palette, in colour or in grey."""

Channel: TypeAlias = Literal["alpha", "index", "colour", "grey"]
"""The part of a file that shows the object: its opacity, its palette's indices, its colours or its grey levels."""

_SAMPLE = 200
"""At most this many masks are examined: enough to contain every class, and read within seconds."""

_MOST_PIXELS = 1 << 28
"""Fewer masks are examined if together they would have more pixels than this, which take about a minute."""

_MOST_COLOURS = 1024
"""A mask has at most this many colours: one for each class or object. Photographs have tens of thousands."""

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

_INDEX_255 = 1 << 24
"""Marks palette index 255, Pascal VOC's border, in place of the colour that the palette gives it."""

_BORDER_LEVELS = {255, 65535}
"""Levels and indices that data sets use for the border around objects: the highest of 8 and of 16 bits."""

_BORDER_COLOURS = {_INDEX_255, 0xE0E0C0, 0xFFFFFF}
"""Colours that data sets use for the border: index 255, Pascal VOC's (224, 224, 192), and white."""

_UNKNOWN = ({0, 127, 255}, {0, 128, 255})
"""The values of a trimap for matting: background, unknown and object."""

_TRIMAP = {1, 2, 3}
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
        above: the object is every value above this; None if it is every value but the background and borders.
        background: the value of the background.
        borders: values that are neither object nor background.
        known: the only values that may occur; None if any may.
    """

    channel: Channel
    words: str
    above: float | None = None
    background: int = 0
    borders: frozenset[int] = frozenset()
    known: frozenset[int] | None = None

    def is_object(self, values: Integer[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
        """Return where values belong to the object."""
        if self.above is not None:
            return np.asarray(values > self.above)
        return np.asarray(~np.isin(values, [self.background, *self.borders]))


Readings: TypeAlias = Mapping[Storage, MaskReading]
"""What the values mean in the masks of each storage that occurs."""


@dataclass(frozen=True, eq=False)
class MaskFile:
    """A mask picture and what its values mean."""

    path: Path
    readings: Readings

    def region(self, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
        """Return the object's pixels on a picture of ``size`` (width, height).

        Raises:
            ImageError: the mask cannot be read, has another size, or holds values that no other mask holds.
        """
        stored = _Stored(self.path, size)
        reading = self.readings.get(stored.storage)
        if reading is None:
            raise ImageError(f"the mask {self.path} is stored differently from the masks that camkit examined")
        values = stored.values(reading.channel)
        unknown = set() if reading.known is None else set(np.unique(values).tolist()) - reading.known
        if unknown:
            raise ImageError(
                f"the mask {self.path} holds {_listed(unknown)}, but the masks that camkit examined hold only "
                f"{_listed(reading.known or ())}"
            )
        return reading.is_object(values)


class _Stored:
    """One mask picture, decoded."""

    def __init__(self, file: Path, size: tuple[int, int] | None = None) -> None:
        self._name = f"the mask {shortened(file)}"
        try:
            with opened(file) as picture:
                self._decode(picture, size)
        except ImageError:
            raise
        except Exception as error:  # the decoder of a damaged file may raise anything
            raise ImageError(f"{self._name} cannot be read: {brief(error)}") from error

    def _decode(self, picture: Image.Image, size: tuple[int, int] | None) -> None:
        if getattr(picture, "n_frames", 1) > 1:
            raise ImageError(f"{self._name} holds several pictures; save the mask as a single picture")
        rawmode = _rawmode(picture)
        if ";16" in rawmode and picture.mode[:2] != "I;":
            raise ImageError(f"{self._name} has 16 bits per colour; save it with 8 bits, or in grey")
        if size is not None and sorted(picture.size) != sorted(size):  # before decoding, which may cost much memory
            raise ImageError(_wrong_size(self._name, picture.size, size))
        picture.load()
        upright = turned(picture)
        if size is not None and upright.size != size:
            raise ImageError(_wrong_size(self._name, upright.size, size))
        # Pillow stretches grey levels of 2 and 4 bits to 0..255: the ids 0, 1, 2, 3 become 0, 85, 170, 255.
        self._step = {"L;2": 85, "L;4": 17}.get(rawmode[:3], 1)
        self._picture = upright
        if upright.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
            self.storage: Storage = "alpha"
            self._picture = upright.convert("RGBA")
        elif upright.mode == "P":
            self.storage = "palette"
        elif upright.mode in ("1", "L", "F") or upright.mode[0] == "I":
            self.storage = "grey"
        else:
            self.storage = "colour"
            self._picture = upright.convert("RGB")

    def values(self, channel: Channel) -> Integer[np.ndarray, "h w"]:
        """Return one number for each pixel: its opacity, palette index or grey level, or its colour as 0xRRGGBB."""
        if channel == "alpha":
            return np.asarray(self._picture.getchannel("A"))
        if channel == "index":
            return np.asarray(self._picture)
        if channel == "grey":
            return self._grey()
        colours = np.zeros(self._picture.size[::-1], np.int32)
        for band in self._picture.convert("RGB").split():
            colours <<= 8
            colours |= np.asarray(band)
        if self.storage == "palette":
            is_last = (np.asarray(self._picture) == 255) & (colours > 0) & (colours < 0xFFFFFF)
            colours[is_last] = _INDEX_255
        return colours

    def _grey(self) -> Integer[np.ndarray, "h w"]:
        levels = np.asarray(self._picture)
        if levels.dtype == bool:
            return levels.astype(np.uint8)
        if self._picture.mode == "F":
            if not (np.isfinite(levels).all() and levels.min() >= 0 and levels.max() <= 1):
                raise ImageError(f"{self._name} holds floating-point values outside 0 to 1; save it as whole numbers")
            return np.asarray(np.rint(levels * 255), np.uint8)
        if levels.dtype.kind == "i" and levels.min() < 0:
            raise ImageError(f"{self._name} holds negative values; save it with 0 for the background")
        native = levels.astype(levels.dtype.newbyteorder("="))
        return native // self._step if self._step > 1 else native


def _rawmode(picture: Image.Image) -> str:
    """Return how the file stores a pixel, in Pillow's words; it is known only before the file is decoded."""
    tiles: Any = getattr(picture, "tile", None)
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def _wrong_size(name: str, size: tuple[int, int], wanted: tuple[int, int]) -> str:
    rotated = " (shown rotated, as its EXIF data says)" if size == wanted[::-1] and size != wanted else ""
    return f"{name} has {size[0]}x{size[1]} pixels, but its picture has {wanted[0]}x{wanted[1]}{rotated}"


@dataclass
class _Tally:
    """What some masks hold.

    Attributes:
        pixels: how many pixels have each value.
        sloped: how many of these lie on a slope.
        at_edge: how many of these lie at the edge of the picture.
        touching: how often each two values lie side by side.
        exposed: for each value, how often other values lie beside 0 in the masks that hold it.
    """

    pixels: Counter[int] = field(default_factory=Counter)
    sloped: Counter[int] = field(default_factory=Counter)
    at_edge: Counter[int] = field(default_factory=Counter)
    touching: Counter[tuple[int, int]] = field(default_factory=Counter)
    exposed: Counter[int] = field(default_factory=Counter)

    def add(self, values: Integer[np.ndarray, "h w"]) -> None:
        """Count one mask."""
        pixels: Counter[int] = Counter()
        touching: Counter[tuple[int, int]] = Counter()
        for strip in np.array_split(values, min(len(values), math.ceil(values.size / _STRIP))):
            pixels.update(_counts(strip))
            self.sloped.update(_counts(strip[_is_sloped(strip)]))
            touching.update(_pairs(strip[1:], strip[:-1]) + _pairs(strip[:, 1:], strip[:, :-1]))
        for line in (values[0], values[-1], values[:, 0], values[:, -1]):
            self.at_edge.update(_counts(line))
        beside_0 = sum(count for (low, _), count in touching.items() if low == 0)
        self.pixels.update(pixels)
        self.touching.update(touching)
        self.exposed.update({value: beside_0 - touching[0, value] for value in pixels})

    def renamed(self, name: Callable[[int], int]) -> _Tally:
        """Return the same counts with other values."""
        pixels, sloped, at_edge, exposed = (
            Counter({name(value): count for value, count in counts.items()})
            for counts in (self.pixels, self.sloped, self.at_edge, self.exposed)
        )
        touching = Counter({(name(low), name(high)): count for (low, high), count in self.touching.items()})
        return _Tally(pixels, sloped, at_edge, touching, exposed)


def _is_sloped(values: Integer[np.ndarray, "h w"]) -> Bool[np.ndarray, "h w"]:
    """Return which pixels have both a darker and a brighter neighbour."""
    exact, kernel = values.astype(np.float64), np.ones((3, 3), np.uint8)  # OpenCV's filters take no 32-bit numbers
    return np.asarray((cv2.erode(exact, kernel) < exact) & (exact < cv2.dilate(exact, kernel)))


def _pairs(first: Integer[np.ndarray, "h w"], second: Integer[np.ndarray, "h w"]) -> Counter[tuple[int, int]]:
    """Count how often two values meet, the lower first.

    ``np.unique`` is not asked for unique rows: that is slow, and it can turn a Ctrl-C into a ``TypeError``.
    """
    differ = first != second
    pairs = np.sort(np.stack([first[differ], second[differ]], 1).astype(np.int64), 1)
    values, ranks = np.unique(pairs, return_inverse=True)
    low, high = ranks.reshape(-1, 2).T
    met, counts = np.unique(low * len(values) + high, return_counts=True)
    low, high = values[met // len(values)], values[met % len(values)]
    return Counter(dict(zip(zip(low.tolist(), high.tolist(), strict=True), counts.tolist(), strict=True)))


def _counts(values: Integer[np.ndarray, "..."]) -> Counter[int]:
    unique, counts = np.unique(values, return_counts=True)
    return Counter(dict(zip(unique.tolist(), counts.tolist(), strict=True)))


def understand_masks(files: Sequence[Path]) -> Readings:
    """Find out what the values of masks mean, from a sample of them.

    Raises:
        InputError: no mask can be read, or it is not clear which values are the object.
    """
    sample = files[:: math.ceil(len(files) / _SAMPLE) or 1]
    sample = sample[:: math.ceil(sum(map(_pixels_of, sample)) / _MOST_PIXELS) or 1]
    readings = {}
    for storage, masks in _examine(sample).items():
        example = f"the masks, such as {shortened(masks.example)},"
        readings[storage] = reading = _decide(storage, masks.tallies, masks.opaque, example)
        if len(sample) > 1:
            _refuse_inverted(reading, masks.tallies[reading.channel], example)
    return readings


def _pixels_of(file: Path) -> int:
    """Return the number of pixels of a mask without decoding it; 0 if it cannot be opened."""
    try:
        with opened(file) as picture:
            return picture.width * picture.height
    except Exception:  # decoding it reports the error
        return 0


@dataclass
class _Examined:
    """What the masks of one storage hold.

    Attributes:
        example: the first of the masks.
        tallies: what each channel holds.
        opaque: the colours that are not fully transparent, if the masks have transparency.
    """

    example: Path
    tallies: dict[Channel, _Tally]
    opaque: set[int] = field(default_factory=set)


def _examine(files: Sequence[Path]) -> dict[Storage, _Examined]:
    """Count the values in masks, separately for each storage.

    Raises:
        InputError: there are masks, but none can be read.
    """
    by_storage: dict[Storage, _Examined] = {}
    refused: ImageError | None = None
    for file in files:
        try:
            stored = _Stored(file)
            values = {channel: stored.values(channel) for channel in _CHANNELS[stored.storage]}
            _check_colours(file, stored.storage, values)
        except ImageError as error:  # if other masks can be read, this one is an error of its own picture
            refused = refused or error
            continue
        masks = by_storage.setdefault(stored.storage, _Examined(file, {channel: _Tally() for channel in values}))
        for channel, numbers in values.items():
            masks.tallies[channel].add(numbers)
        if stored.storage == "alpha":
            masks.opaque.update(np.unique(values["colour"][values["alpha"] > 0]).tolist())
    if not by_storage and refused is not None:
        raise InputError(str(refused)) from refused
    return by_storage


def _refuse_inverted(reading: MaskReading, tally: _Tally, example: str) -> None:
    edge, everything = np.array(sorted(tally.at_edge)), np.array(sorted(tally.pixels))
    if reading.is_object(edge).all() and not reading.is_object(everything).all():
        raise InputError(f"{example} look inverted: the object touches every edge of every picture; {_ADVICE}")


_CHANNELS: dict[Storage, tuple[Channel, ...]] = {
    "alpha": ("alpha", "colour"),
    "palette": ("colour", "index"),
    "colour": ("colour",),
    "grey": ("grey",),
}
"""The parts of a file that may show the object, by how the file is stored."""


def _check_colours(file: Path, storage: Storage, values: Mapping[Channel, Integer[np.ndarray, "h w"]]) -> None:
    """Refuse a photograph: a mask has few colours, except under its transparency."""
    if storage == "colour":
        colours = _count_colours(values["colour"])
        if colours > _MOST_COLOURS:
            raise ImageError(f"the mask {shortened(file)} holds {colours} colours, so it is a picture and not a mask")


def _count_colours(values: Integer[np.ndarray, "h w"]) -> int:
    return len(np.unique(values))


def is_photograph(file: Path) -> bool:
    """Return whether a file is a picture with more colours than a mask could have; a grey picture does not count."""
    try:
        stored = _Stored(file)
    except ImageError:
        return False
    is_shape = stored.storage == "alpha" and _count_colours(stored.values("alpha")) > 1  # a cut-out is a mask
    if stored.storage not in ("colour", "alpha") or is_shape:
        return False
    colours = stored.values("colour")
    return _count_colours(colours) > min(_MOST_COLOURS, colours.size // 4)  # a small picture has few pixels to colour


def _decide(storage: Storage, counted: Mapping[Channel, _Tally], opaque: set[int], example: str) -> MaskReading:
    """Choose the channel that shows the object, and return what its values mean."""
    if storage == "grey":
        return _of_levels("grey", counted["grey"], example)
    if storage == "alpha" and len(counted["alpha"].pixels) > 1:
        if 0 in opaque and len(opaque) == 2:
            raise InputError(f"{example} show one shape in their colours and another in their transparency; {_ADVICE}")
        return _of_levels("alpha", counted["alpha"], example)
    if storage == "palette" and (
        set(counted["index"].pixels) == _TRIMAP
        or not (0 in counted["colour"].pixels and len(counted["colour"].pixels) > 1)
    ):
        return _of_levels("index", counted["index"], example)
    return _of_colours(counted["colour"], example)


def _of_colours(tally: _Tally, example: str) -> MaskReading:
    if all(value >> 16 == value >> 8 & 255 == value & 255 for value in tally.pixels):
        tally = tally.renamed(lambda value: value & 255)
        reading = _of_levels("colour", tally, example)
        return MaskReading("colour", reading.words, *_in_colour(reading))
    if 0 not in tally.pixels:
        raise InputError(f"{example} have colours but no black, so it is not clear what the background is; {_ADVICE}")
    borders = _borders(tally, _BORDER_COLOURS, example)
    objects = len(tally.pixels) - 1 - len(borders)
    around = "; the border around objects is neither object nor background" if borders else ""
    return MaskReading(
        "colour",
        f"every colour but black is an object ({objects} colour{'s' * (objects > 1)}){around}",
        borders=borders,
    )


def _in_colour(reading: MaskReading) -> tuple[float | None, int, frozenset[int], frozenset[int] | None]:
    """Return the values of a reading of grey levels as colours 0xRRGGBB."""
    grey = 0x010101
    return (
        None if reading.above is None else math.floor(reading.above) * grey,
        reading.background * grey,
        frozenset(value * grey for value in reading.borders),
        None if reading.known is None else frozenset(value * grey for value in reading.known),
    )


def _of_levels(channel: Channel, tally: _Tally, example: str) -> MaskReading:
    """Return what grey levels, opacities or palette indices mean."""
    values = set(tally.pixels)
    what = {"alpha": "opacity", "index": "palette index"}.get(channel, "value")
    if values == _TRIMAP:
        words = "trimaps as in Oxford-IIIT Pets: 1 is the object, 2 the background, 3 the border"
        return MaskReading(channel, words, None, 2, frozenset({3}), frozenset(_TRIMAP))
    low, high = min(values), max(values)
    if not high:
        raise InputError(f"{example} show no object: every pixel is 0; {_ADVICE}")
    if len(values - {0}) == 1:
        words = f"{what} {high} is the object" + (f", {low} the background" if 0 in values else "")
        return MaskReading(channel, words, known=frozenset(values | {0}))
    between = values - {low, high}
    share = _sloped_share(tally, between)
    if between and share >= _SLOPED and channel != "index":
        return _of_soft_edge(channel, tally, example)
    if 0 not in values:
        raise InputError(
            f"{example} hold {_listed(values)} and no 0, so it is not clear what the background is; {_ADVICE}"
        )
    if share > _FLAT and values not in _UNKNOWN:
        raise InputError(
            f"{example} hold {len(values)} values that are neither a soft edge nor separate objects; {_ADVICE}"
        )
    borders = _borders(tally, _BORDER_LEVELS | ({127, 128} if values in _UNKNOWN else set()), example)
    objects = values - {0} - borders
    words = f"every {what} but 0 is an object ({_listed(objects)})"
    around = f"; {_listed(borders)} is a border, neither object nor background" if borders else ""
    return MaskReading(channel, words + around, borders=borders)


def _sloped_share(tally: _Tally, values: set[int]) -> float:
    """Return the share of the pixels with these values that lie on a slope."""
    return sum(tally.sloped[value] for value in values) / max(1, sum(tally.pixels[value] for value in values))


def _of_soft_edge(channel: Channel, tally: _Tally, example: str) -> MaskReading:
    low, high = min(tally.pixels), max(tally.pixels)
    margin = (high - low) * _CLEAR
    clear = sum(count for value, count in tally.pixels.items() if not low + margin < value < high - margin)
    if clear < _LEAST_CLEAR * tally.pixels.total():
        raise InputError(f"{example} hold every level between {low} and {high} like a photograph; {_ADVICE}")
    middle = (low + high) / 2
    return MaskReading(
        channel, f"the levels between {low} and {high} are a soft edge: the object is above {middle:g}", middle
    )


def _borders(tally: _Tally, usual: set[int], example: str) -> frozenset[int]:
    """Return the values that are a border around objects; ``usual`` are those that data sets use for it.

    Raises:
        InputError: a value lies around the others like a border, but no convention says that it is one.
    """
    objects = set(tally.pixels) - {0}
    enclosing = {value for value in objects if _encloses(tally, value, objects - {value})}
    borders = enclosing & usual
    if enclosing - borders and len(objects) == 2:
        raise InputError(
            f"{example} hold {_listed(tally.pixels)}, and {_listed(enclosing)} lies between the others like the border "
            f"of a trimap, so it is not clear what is the object; {_ADVICE}"
        )
    return frozenset(borders)


def _encloses(tally: _Tally, border: int, others: set[int]) -> bool:
    """Tell whether a value lies between the other objects and the background, and is smaller than they are.

    The unknown part of a trimap for matting may be larger than a small object.
    """
    enclosed = sum(tally.touching[min(border, other), max(border, other)] for other in others)
    area = sum(tally.pixels[other] for other in others)
    is_smaller = tally.pixels[border] < area or set(tally.pixels) in _UNKNOWN
    return is_smaller and enclosed > 0 and tally.exposed[border] <= _MOST_LEAKS * (tally.exposed[border] + enclosed)


def _listed(values: Iterable[int]) -> str:
    """Return the first values in words."""
    ordered = sorted(values)
    shown = ", ".join(map(str, ordered[:_LISTED]))
    return shown if len(ordered) <= _LISTED else f"{shown} and {len(ordered) - _LISTED} more"
