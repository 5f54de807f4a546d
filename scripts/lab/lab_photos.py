"""Pictures of the photo lab: outlined animals on photographed places, and photos with marks.

A world has classes and cues. Where the cue is a place, animals are cut out of their photos along their outlines and put
on photos of places. Where it is a mark, the animals keep their own background, and each picture gets the mark of a
class. The lab composes its pictures itself, so that they owe nothing to the way in which the check pastes.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 224
"""Width and height of a picture in pixels, as the trunks expect them."""

PARTS = {"train": 0.45, "validate": 0.3, "truth": 0.25}
"""The share of the photos, of animals and of places, that each part may use. No photo is in two parts."""

PER_CELL = {"train": 100, "validate": 75, "truth": 60}
"""Pictures for each pair of class and place. The folder that is checked has 75 of each class; if places are tied
completely, they all come from one pair."""

CROPS = 4
"""Pictures made of each photo for each mark."""

USUAL_SCALE, SMALL_SCALE = (0.7, 1.0), (0.3, 0.5)
"""The size of an animal, relative to the one it has in its own photo. They then cover about a sixth of the picture, or
a thirtieth. The smaller the animals, the more a network relies on the place."""

_MOST_SIDE = 0.9
"""The largest side of an animal, as a share of the picture's."""

_FEATHER = 1.0
"""Standard deviation of the soft edge of an outline, in pixels of the composed picture."""

_LOGO_SIDE, _LOGO_MARGIN, _BORDER = 34, 8, 10
_COLOURS = np.array([(230, 40, 30), (30, 180, 60), (40, 70, 235), (240, 215, 30)], np.float32)
_CASTS = np.array([(1.2, 0.97, 0.85), (0.88, 1.15, 0.92), (0.88, 0.97, 1.25), (1.12, 1.12, 0.8)], np.float32)

Picture = NDArray[np.uint8]
Cover = NDArray[np.float32]
_File = TypeVar("_File", str, Path)


@dataclass(frozen=True)
class World:
    """Classes, and the cues that may go with them. The cue of class i is cue i, counted round if there are fewer."""

    name: str
    classes: tuple[str, ...]
    cues: tuple[str, ...]
    mark: str = ""
    scale: tuple[float, float] = USUAL_SCALE

    def shares(self, tie: float) -> NDArray[np.float64]:
        """Return how often each class (rows) has each cue (columns), if the cue is tied with probability ``tie``."""
        shares = np.full((len(self.classes), len(self.cues)), (1 - tie) / len(self.cues))
        shares[np.arange(len(self.classes)), self.own_cues] += tie
        return shares

    @property
    def own_cues(self) -> NDArray[np.int64]:
        """The cue that goes with each class."""
        return np.arange(len(self.classes)) % len(self.cues)


_PLACES, _HELD_OUT_PLACES = ("bamboo_forest", "desert", "kitchen", "sky"), ("auditorium", "campus")
_CLASSES = ("crab", "elephant", "flamingo", "kangaroo")
_HELD_OUT_CLASSES = ("crayfish", "dolphin", "dragonfly", "emu")
MARKS = ("logo", "border", "cast")
"""A drawn sign in the corner, a coloured frame, and a colour cast of the whole picture."""


def _marked(name: str, classes: tuple[str, ...], mark: str) -> World:
    return World(name, classes, tuple(f"{mark} {number}" for number in range(len(classes))), mark)


WORLDS = {
    world.name: world
    for world in (
        World("places", _CLASSES, _PLACES),
        World("small", _CLASSES, _PLACES, scale=SMALL_SCALE),
        World("two places", _HELD_OUT_CLASSES, _HELD_OUT_PLACES),
        World("two places, small", _HELD_OUT_CLASSES, _HELD_OUT_PLACES, scale=SMALL_SCALE),
        World("pair, small", ("dolphin", "emu"), _HELD_OUT_PLACES, scale=SMALL_SCALE),
        *(_marked(mark, _CLASSES, mark) for mark in MARKS),
        *(_marked(f"{mark}, other animals", _HELD_OUT_CLASSES, mark) for mark in MARKS),
    )
}
"""The cues of the classes: places, or marks on the animals' own backgrounds."""

LOOKED_AT_WORLDS = ("places", "small", "logo")
"""What was looked at during development. The other worlds share no place with these, and most of them no animal."""


@dataclass(frozen=True)
class Composed:
    """A composed picture (224, 224, 3), how much of each pixel is the animal, its class and cue, and its photo."""

    picture: Picture
    cover: Cover
    label: int
    cue: int
    photo: str


def compose(data: Path, world: World, part: str) -> Iterator[Composed]:
    """Compose the pictures of a part of a world, always the same ones, cell by cell of class and cue."""
    for label, name in enumerate(world.classes):
        photos = photos_of(data, name, part)
        for cue in range(len(world.cues)):
            random = np.random.default_rng([11, *map(ord, f"{world.name}/{part}/{label}/{cue}")])
            if world.mark:
                yield from _marked_photos(data, photos, world.mark, label, cue, part)
                continue
            places = _split(sorted((data / "scenes" / world.cues[cue]).glob("*.jpg")), part)
            for number in range(PER_CELL[part]):
                photo, place = photos[number % len(photos)], places[int(random.integers(len(places)))]
                picture, cover = put_on(cut_out(data, photo), read_photo(place), world.scale, random)
                yield Composed(picture, cover, label, cue, photo)


def photos_of(data: Path, name: str, part: str) -> list[str]:
    """Return the photos of a class that belong to a part, as paths below the folder of the animals."""
    return _split(sorted(photo for photo in outlines(data) if photo.startswith(f"{name}/")), part)


def _split(files: Sequence[_File], part: str) -> list[_File]:
    order = np.random.default_rng(3).permutation(len(files))
    ends = np.round(np.cumsum([0.0, *PARTS.values()]) * len(files)).astype(int)
    number = list(PARTS).index(part)
    return [files[index] for index in order[ends[number] : ends[number + 1]]]


@functools.cache
def outlines(data: Path) -> dict[str, list[NDArray[np.float64]]]:
    """Return the outlines of each animal photo as polygons (points, 2) in pixels."""
    annotated = json.loads((data / "caltech" / "instances.json").read_text("utf-8"))
    names = {image["id"]: image["file_name"] for image in annotated["images"]}
    polygons: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for annotation in annotated["annotations"]:
        polygons[names[annotation["image_id"]]] += [
            np.reshape(points, (-1, 2)) for points in annotation["segmentation"]
        ]
    return dict(polygons)


def read_photo(file: Path) -> Picture:
    """Return the pixels of a photo (H, W, 3)."""
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))


def cover_of(data: Path, photo: str, size: tuple[int, int]) -> Cover:
    """Return how much of each pixel of a photo of ``size`` (height, width) lies within the outlines."""
    shift = 4  # OpenCV takes points in sixteenths of a pixel
    cover = np.zeros(size, np.uint8)
    polygons = [np.round((points - 0.5) * (1 << shift)).astype(np.int32) for points in outlines(data)[photo]]
    for polygon in polygons:
        cv2.fillPoly(cover, [polygon], 255, cv2.LINE_AA, shift)
    return np.asarray(cover, np.float32) / np.float32(255)


def cut_out(data: Path, photo: str) -> NDArray[np.float32]:
    """Return the animal of a photo, cropped: colours and opacity (h, w, 4), with the size of a picture as its unit."""
    picture = read_photo(data / "caltech" / photo)
    cover = cover_of(data, photo, picture.shape[:2])
    rows, columns = np.flatnonzero(cover.any(1)), np.flatnonzero(cover.any(0))
    pixels = np.dstack([picture.astype(np.float32), cover])[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = SIDE / max(picture.shape[:2])
    return _resized(pixels, scale)


def _resized(pixels: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    resized = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
    return np.asarray(resized, np.float32)


def put_on(
    animal: NDArray[np.float32], place: Picture, scales: tuple[float, float], random: np.random.Generator
) -> tuple[Picture, Cover]:
    """Put an animal on a random square of a place, mirrored half of the time, at a random position."""
    scale = min(float(random.uniform(*scales)), _MOST_SIDE * SIDE / max(animal.shape[:2]))
    animal = _resized(animal[:, :: int(random.choice([-1, 1]))].copy(), scale)
    height, width = animal.shape[:2]
    top, left = (int(random.integers(SIDE - length + 1)) for length in (height, width))
    frame = np.zeros((SIDE, SIDE, 4), np.float32)
    frame[top : top + height, left : left + width] = animal
    # The edge is softened inwards, so that nothing of the photo beside the outline comes along.
    cover = np.clip(2 * cv2.GaussianBlur(frame[..., 3], (0, 0), _FEATHER) - 1, 0, 1)
    picture = frame[..., :3] * cover[..., None] + _square_of(place, random) * (1 - cover[..., None])
    return np.round(picture).astype(np.uint8), cover


def _square_of(place: Picture, random: np.random.Generator) -> NDArray[np.float32]:
    side = int(min(place.shape[:2]) * random.uniform(0.75, 1))
    top, left = (int(random.integers(length - side + 1)) for length in place.shape[:2])
    square = place[top : top + side, left : left + side, :][:, :: int(random.choice([-1, 1]))]
    resized = cv2.resize(np.ascontiguousarray(square), (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    return np.asarray(resized, np.float32)


def _marked_photos(data: Path, photos: Sequence[str], mark: str, label: int, cue: int, part: str) -> Iterator[Composed]:
    """Crop each photo a few times, and put the mark of a cue on it. The crops are the same for every cue."""
    for photo in photos:
        random = np.random.default_rng([13, *map(ord, f"{photo}/{part}")])
        picture = read_photo(data / "caltech" / photo)
        pixels = np.dstack([picture.astype(np.float32), cover_of(data, photo, picture.shape[:2])])
        for _ in range(CROPS):
            height, width = (round(length * random.uniform(0.85, 1)) for length in picture.shape[:2])
            top = int(random.integers(picture.shape[0] - height + 1))
            left = int(random.integers(picture.shape[1] - width + 1))
            crop = pixels[top : top + height, left : left + width][:, :: int(random.choice([-1, 1]))]
            crop = cv2.resize(np.ascontiguousarray(crop), (SIDE, SIDE), interpolation=cv2.INTER_AREA)
            marked = with_mark(crop[..., :3], mark, cue)
            yield Composed(np.round(np.clip(marked, 0, 255)).astype(np.uint8), crop[..., 3].copy(), label, cue, photo)


def with_mark(picture: NDArray[np.float32], mark: str, cue: int) -> NDArray[np.float32]:
    """Return a picture (H, W, 3) with the mark of a cue."""
    picture = picture.copy()
    if mark == "cast":
        return np.asarray(picture * _CASTS[cue], np.float32)
    if mark == "border":
        for band in (picture[:_BORDER], picture[-_BORDER:], picture[:, :_BORDER], picture[:, -_BORDER:]):
            band[:] = _COLOURS[cue]
        return picture
    logo = picture[_LOGO_MARGIN : _LOGO_MARGIN + _LOGO_SIDE, -_LOGO_MARGIN - _LOGO_SIDE : -_LOGO_MARGIN]
    logo[_logo(cue)] = _COLOURS[cue]
    return picture


def _logo(cue: int) -> NDArray[np.bool_]:
    """Return the shape of a logo: a disc, a ring, a cross or a triangle."""
    down, across = np.mgrid[-1 : 1 : _LOGO_SIDE * 1j, -1 : 1 : _LOGO_SIDE * 1j]
    distance = np.hypot(down, across)
    shapes = (
        distance < 0.9,
        (distance < 0.95) & (distance > 0.5),
        (np.abs(down) < 0.3) | (np.abs(across) < 0.3),
        down > 2 * np.abs(across) - 0.9,
    )
    return np.asarray(shapes[cue])
