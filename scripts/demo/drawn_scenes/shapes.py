"""Filled polygons in an object's own coordinates, from which every object is drawn.

The x axis points in the direction the object is heading, the y axis points down. The unit does not matter: the scene
scales an object by its bounding box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_T = TypeVar("_T")

Points = NDArray[np.float64]
Colour = tuple[float, float, float]
Outline = Sequence[tuple[float, float]] | Points

PAINTS: tuple[Colour, ...] = (
    (0.95, 0.95, 0.93),
    (0.80, 0.83, 0.86),
    (0.86, 0.22, 0.18),
    (0.96, 0.56, 0.14),
    (0.97, 0.82, 0.24),
    (0.24, 0.58, 0.34),
    (0.13, 0.56, 0.62),
    (0.16, 0.36, 0.72),
    (0.48, 0.30, 0.60),
    (0.36, 0.26, 0.22),
    (0.20, 0.22, 0.27),
)


@dataclass(frozen=True)
class Shape:
    """One filled polygon: ``points`` is (n, 2), ``colour`` is RGB in [0, 1]."""

    points: Points
    colour: Colour


def polygon(outline: Outline, colour: Colour) -> Shape:
    """Return a polygon with straight edges."""
    return Shape(np.asarray(outline, dtype=np.float64), colour)


def blob(outline: Outline, colour: Colour, steps: int = 8) -> Shape:
    """Return a closed smooth curve (Catmull-Rom) through the corners of ``outline``."""
    p1 = np.asarray(outline, dtype=np.float64)
    p0, p2, p3 = np.roll(p1, 1, 0), np.roll(p1, -1, 0), np.roll(p1, -2, 0)
    t = (np.arange(steps) / steps)[None, :, None]
    a, b, c, d = (p[:, None, :] for p in (p0, p1, p2, p3))
    curve = 0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
    return Shape(curve.reshape(-1, 2), colour)


def ellipse(x: float, y: float, rx: float, ry: float, colour: Colour) -> Shape:
    """Return an ellipse around (x, y) with radii rx and ry."""
    angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    return Shape(np.stack([x + rx * np.cos(angle), y + ry * np.sin(angle)], axis=1), colour)


def box(x: float, y: float, width: float, height: float, colour: Colour) -> Shape:
    """Return an upright rectangle whose upper left corner is (x, y)."""
    right, bottom = x + width, y + height
    return polygon([(x, y), (right, y), (right, bottom), (x, bottom)], colour)


def bar(start: tuple[float, float], end: tuple[float, float], width: float, colour: Colour) -> Shape:
    """Return a straight stroke of the given width from ``start`` to ``end``."""
    a, b = np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64)
    along = (b - a) / np.linalg.norm(b - a)
    side = np.array([-along[1], along[0]]) * width / 2
    return Shape(np.stack([a + side, b + side, b - side, a - side]), colour)


def darker(colour: Colour, by: float = 0.75) -> Colour:
    """Return the colour with its brightness scaled by ``by``."""
    red, green, blue = colour
    return (red * by, green * by, blue * by)


def blend(first: Colour, second: Colour, share: float) -> Colour:
    """Return a mix of two colours; ``share`` is the part of ``second`` in it."""
    red, green, blue = (a * (1 - share) + b * share for a, b in zip(first, second, strict=True))
    return (red, green, blue)


def one_of(rng: np.random.Generator, choices: Sequence[_T]) -> _T:
    """Return a random choice."""
    return choices[int(rng.integers(len(choices)))]


def pick(rng: np.random.Generator) -> Colour:
    """Return a random paint, slightly changed so that no two objects match exactly."""
    paint = np.asarray(one_of(rng, PAINTS)) + rng.uniform(-0.06, 0.06, 3)
    red, green, blue = (float(value) for value in np.clip(paint, 0.04, 1.0))
    return (red, green, blue)
