"""Draws small scenes with one object on one background, and the mask of the object."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import cv2
import numpy as np
from numpy.typing import NDArray

from camkit.models.scene_net import LABELS
from scripts.demo.drawn_scenes.backgrounds import BACKDROPS
from scripts.demo.drawn_scenes.birds import bird
from scripts.demo.drawn_scenes.noise import Field, coordinates, smooth_noise
from scripts.demo.drawn_scenes.shapes import Points, Shape
from scripts.demo.drawn_scenes.vehicles import car, plane, ship

THINGS = LABELS
BACKGROUNDS = ("sky", "sea", "road", "wood")
HOME = MappingProxyType(dict(zip(THINGS, BACKGROUNDS, strict=True)))

_MAKERS = MappingProxyType({"plane": plane, "ship": ship, "car": car, "bird": bird})
_MOST_TILT = MappingProxyType({"plane": 20.0, "ship": 7.0, "car": 7.0, "bird": 15.0})
"""How far an object may be tilted, in degrees."""
_OVERSAMPLING = 3
_BACKDROP_OVERSAMPLING = 2
"""How many times larger objects and backgrounds are painted before they are averaged down, so that edges are smooth."""


@dataclass(frozen=True)
class Scene:
    """A picture with its ground truth.

    ``image`` is uint8 RGB (H, W, 3). ``mask`` is bool (H, W) and holds every pixel that the object covers, even in
    part; outside it the picture equals the bare background.
    """

    image: NDArray[np.uint8]
    mask: NDArray[np.bool_]
    thing: str
    background: str


def draw(rng: np.random.Generator, thing: str, background: str, size: int = 128) -> Scene:
    """Draw a scene of ``size`` x ``size`` pixels; a seed gives the same scene at every size.

    Raises:
        ValueError: ``thing`` is not in ``THINGS`` or ``background`` is not in ``BACKGROUNDS``.

    >>> scene = draw(np.random.default_rng(0), "plane", "sky")
    >>> scene.image.shape, scene.mask.shape
    ((128, 128, 3), (128, 128))
    """
    backdrop_rng, light_rng, thing_rng = _split(rng)
    front, cover = paint_thing(thing_rng, thing, size)
    picture = paint_backdrop(backdrop_rng, background, size) * (1 - cover[..., None]) + front
    return Scene(_develop(light_rng, picture), cover > 0, thing, background)


def draw_background(rng: np.random.Generator, background: str, size: int = 128) -> NDArray[np.uint8]:
    """Draw the background that ``draw`` shows for the same seed, without an object, (H, W, 3)."""
    backdrop_rng, light_rng, _ = _split(rng)
    return _develop(light_rng, paint_backdrop(backdrop_rng, background, size))


def paint_backdrop(rng: np.random.Generator, background: str, size: int) -> Field:
    """Paint a background before exposure and grain, RGB in [0, 1], (H, W, 3).

    Raises:
        ValueError: ``background`` is not in ``BACKGROUNDS``.
    """
    if background not in BACKDROPS:
        names = ", ".join(BACKGROUNDS)
        raise ValueError(f"unknown background {background!r}: use one of {names}")
    planes = BACKDROPS[background](rng, size * _BACKDROP_OVERSAMPLING)
    canvas = cv2.merge(list(planes[:, :, ::-1] if rng.random() < 0.5 else planes))
    return _shrink(canvas, size)


def paint_thing(rng: np.random.Generator, thing: str, size: int) -> tuple[Field, Field]:
    """Paint an object somewhere in an empty frame, before exposure and grain.

    Returns:
        Its colours times its cover, RGB in [0, 1], (H, W, 3); and its cover, the share of each pixel that it hides,
        (H, W).

    Raises:
        ValueError: ``thing`` is not in ``THINGS``.
    """
    if thing not in THINGS:
        raise ValueError(f"unknown object {thing!r}: use one of {', '.join(THINGS)}")
    colour, cover = _paint(_positioned_shapes(rng, thing), size * _OVERSAMPLING)
    return _shrink(colour, size), _shrink(cover.astype(np.float32), size)


def _split(rng: np.random.Generator) -> list[np.random.Generator]:
    """Return a generator each for background, light and object, so that a change to one leaves the others alone."""
    return [np.random.default_rng(seed) for seed in rng.integers(2**62, size=3)]


def _shrink(field: Field, size: int) -> Field:
    """Average blocks of pixels down to (size, size) or (size, size, C)."""
    return np.asarray(cv2.resize(field, (size, size), interpolation=cv2.INTER_AREA), np.float32)


def _positioned_shapes(rng: np.random.Generator, thing: str) -> list[Shape]:
    """Return an object's shapes in the unit square: tilted, perhaps mirrored, scaled, and moved at random."""
    shapes = _MAKERS[thing](rng)
    angle = np.deg2rad(rng.uniform(-1, 1) * _MOST_TILT[thing])
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    if rng.random() < 0.5:
        turn = turn @ np.diag([-1.0, 1.0])
    turned = [shape.points @ turn.T for shape in shapes]
    low, high = _bounds(turned)
    scale = rng.uniform(0.20, 0.55) / float((high - low).max())
    free = 0.98 - (high - low) * scale
    corner = 0.01 + rng.random(2) * free
    return [Shape((points - low) * scale + corner, shape.colour) for points, shape in zip(turned, shapes, strict=True)]


def _bounds(outlines: list[Points]) -> tuple[Points, Points]:
    points = np.concatenate(outlines)
    return points.min(axis=0), points.max(axis=0)


def _paint(shapes: list[Shape], size: int) -> tuple[Field, NDArray[np.uint8]]:
    """Return colours (size, size, 3), shaded to look round, and the cover (size, size) of 0 and 1."""
    colour = np.zeros((size, size, 3), np.float32)
    cover = np.zeros((size, size), np.uint8)
    for shape in shapes:
        points = [np.round(shape.points * size * 16 - 8).astype(np.int32)]
        cv2.fillPoly(colour, points, shape.colour, cv2.LINE_8, 4)
        cv2.fillPoly(cover, points, 1, cv2.LINE_8, 4)
    low, high = _bounds([shape.points for shape in shapes])
    _, y = coordinates(size)
    height = np.clip((y - low[1]) / (high[1] - low[1]), 0, 1)
    inward = cv2.distanceTransform(cover, cv2.DIST_L2, 3) / (size * float((high - low).max()))
    rim = np.clip(inward / 0.03, 0, 1)
    light = (0.72 + 0.28 * rim) * (1.12 - 0.34 * height)
    return colour * cv2.merge([light.astype(np.float32)] * 3), cover


def _develop(rng: np.random.Generator, picture: Field) -> NDArray[np.uint8]:
    """Apply exposure, a tint, contrast and grain to each pixel on its own; returns uint8 RGB."""
    size = picture.shape[0]
    gain = rng.uniform(0.82, 1.15) * rng.uniform(0.96, 1.04, 3).astype(np.float32)
    grain = 0.025 * (smooth_noise(rng, size, 256, 256) - 0.5)[..., None]
    exposed = np.clip(picture * gain, 0, 1) ** float(rng.uniform(0.88, 1.14))
    return np.asarray(np.round(np.clip(exposed + grain, 0, 1) * 255), np.uint8)
