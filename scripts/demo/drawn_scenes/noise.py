"""Smooth random fields and colour mixing for the backgrounds.

Random numbers are drawn on a grid whose size does not depend on the picture's, so that a seed gives the same scene at
every size. Pictures are planar here, (3, H, W): numpy is several times faster on whole planes than on pixels of three
numbers.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from scripts.demo.drawn_scenes.shapes import Colour

Field = NDArray[np.float32]


def coordinates(size: int) -> tuple[Field, Field]:
    """Return x and y of every pixel centre in [0, 1], as two fields (size, size)."""
    ticks = ((np.arange(size) + 0.5) / size).astype(np.float32)
    x, y = np.meshgrid(ticks, ticks)
    return x, y


def smooth_noise(rng: np.random.Generator, size: int, columns: int, rows: int) -> Field:
    """Return noise in [0, 1] with about ``columns`` x ``rows`` bumps, (size, size)."""
    grid = rng.random((rows, columns), dtype=np.float32)
    return _enlarged(grid, size)


def _enlarged(grid: Field, size: int) -> Field:
    return np.asarray(cv2.resize(grid, (size, size), interpolation=cv2.INTER_CUBIC), np.float32)


def cloud_noise(rng: np.random.Generator, size: int, columns: int, rows: int) -> Field:
    """Return five octaves of smooth noise, stretched to [0, 1], (size, size)."""
    half = (size + 1) // 2
    total = np.zeros((half, half), np.float32)
    for octave in range(5):
        scale = 2**octave
        total += smooth_noise(rng, half, columns * scale, rows * scale) / scale**0.9
    total -= total.min()
    return _enlarged(total / total.max(), size)


def step(field: Field, low: float, high: float) -> Field:
    """Return 0 below ``low``, 1 above ``high``, and a smooth step between (Hermite)."""
    t: Field = np.clip((field - low) / (high - low), 0, 1).astype(np.float32)
    return t * t * (3 - 2 * t)


def paint(colour: Colour, size: int) -> Field:
    """Return a canvas (3, size, size) of one colour."""
    return np.broadcast_to(_plane(colour), (3, size, size)).copy()


def mix(canvas: Field, colour: Colour | Field, amount: Field) -> Field:
    """Return the canvas with a colour or picture laid over it; ``amount`` is (H, W) in [0, 1]."""
    over = colour if isinstance(colour, np.ndarray) else _plane(colour)
    return canvas + (over - canvas) * amount


def ramp(first: Colour, second: Colour, share: Field) -> Field:
    """Return colours (3, H, W) from ``first`` (share 0) to ``second`` (share 1)."""
    return _plane(first) + (_plane(second) - _plane(first)) * share


def _plane(colour: Colour) -> Field:
    """Return a colour as (3, 1, 1), ready to broadcast."""
    return np.asarray(colour, np.float32)[:, None, None]


def varied(rng: np.random.Generator, colour: Colour, by: float) -> Colour:
    """Return the colour, changed by at most ``by`` in each channel."""
    moved = np.clip(np.asarray(colour) + rng.uniform(-by, by, 3), 0, 1)
    red, green, blue = (float(value) for value in moved)
    return (red, green, blue)
