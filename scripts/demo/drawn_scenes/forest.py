"""The wood: trunks in the mist, leaves above, undergrowth below."""

from __future__ import annotations

import cv2
import numpy as np

from scripts.demo.drawn_scenes.noise import (
    Field,
    cloud_noise,
    coordinates,
    mix,
    paint,
    ramp,
    smooth_noise,
    step,
    varied,
)
from scripts.demo.drawn_scenes.shapes import Colour, Points, blend, darker, one_of

# The colours of the mist, of leaves in the light and of leaves in the shade.
SEASONS: tuple[tuple[Colour, Colour, Colour], ...] = (
    ((0.80, 0.88, 0.66), (0.50, 0.68, 0.22), (0.08, 0.24, 0.10)),
    ((0.74, 0.84, 0.70), (0.34, 0.58, 0.26), (0.04, 0.18, 0.12)),
    ((0.92, 0.84, 0.60), (0.86, 0.58, 0.16), (0.28, 0.20, 0.08)),
    ((0.70, 0.82, 0.78), (0.24, 0.50, 0.34), (0.03, 0.15, 0.13)),
)
BARKS: tuple[Colour, ...] = ((0.24, 0.16, 0.11), (0.18, 0.14, 0.12), (0.30, 0.22, 0.15))


def wood(rng: np.random.Generator, size: int) -> Field:
    """Return the inside of a wood, (3, size, size) in [0, 1]."""
    x, y = coordinates(size)
    mist, lit, shade = (varied(rng, c, 0.04) for c in one_of(rng, SEASONS))
    bark = varied(rng, one_of(rng, BARKS), 0.03)
    light = np.exp(-(((x - rng.uniform(0.2, 0.8)) / 0.5) ** 2) - ((y - 0.45) / 0.4) ** 2)
    canvas = ramp(blend(shade, lit, 0.35), mist, light.astype(np.float32))
    for depth in (0.2, 0.6, 1.0):
        colour = blend(mist, bark, 0.25 + 0.7 * depth)
        canvas = _trunks(rng, canvas, depth, colour)
        top, bottom = blend(mist, lit, 0.3 + 0.7 * depth), blend(mist, shade, 0.2 + 0.75 * depth)
        canvas = _leaves(rng, canvas, depth, top, bottom)
    return _undergrowth(rng, canvas, lit, shade)


def _trunks(rng: np.random.Generator, canvas: Field, depth: float, bark: Colour) -> Field:
    """Add trunks and branches at one distance; ``depth`` is 0 far away and 1 near."""
    size = canvas.shape[-1]
    cover = np.zeros((size, size), np.float32)
    count = int(9 - 5 * depth)
    for foot_x in (np.arange(count) + rng.uniform(0.1, 0.9, count)) / count:
        half = (0.008 + 0.026 * depth) * rng.uniform(0.7, 1.3)
        lean = rng.uniform(-0.05, 0.05)
        foot = 0.80 + 0.18 * depth
        top = foot_x + lean
        outline = [(foot_x - half * 1.9, foot), (foot_x - half, foot - 0.12), (top - half * 0.7, 0),
                   (top + half * 0.7, 0), (foot_x + half, foot - 0.12),
                   (foot_x + half * 1.9, foot)]  # fmt: skip
        _fill(cover, np.array(outline), 1.0)
        for _ in range(2):
            _branch(rng, cover, foot_x + lean / 2, half, int(rng.choice([-1, 1])))
    grain = 0.75 + 0.5 * smooth_noise(rng, size, 90, 12)
    return mix(canvas, paint(bark, size) * grain, cover)


def _branch(rng: np.random.Generator, cover: Field, x: float, half: float, side: int) -> None:
    y = rng.uniform(0.1, 0.6)
    reach = side * rng.uniform(0.08, 0.2)
    rise = rng.uniform(0.06, 0.16)
    _fill(cover, np.array([(x, y), (x + reach, y - rise), (x, y + half * 1.1)]), 1.0)


def _leaves(rng: np.random.Generator, canvas: Field, depth: float, top: Colour, bottom: Colour) -> Field:
    """Add a canopy that hangs from the upper edge and has a ragged lower end."""
    size = canvas.shape[-1]
    _, y = coordinates(size)
    clumps = cloud_noise(rng, size, 4, 4)
    hanging = step(clumps + (0.34 - 0.1 * depth - y) * 1.5, 0.44, 0.6)
    return _dabs(rng, canvas, hanging, clumps, (0.006 + 0.012 * depth, top, bottom))


def _undergrowth(rng: np.random.Generator, canvas: Field, lit: Colour, shade: Colour) -> Field:
    """Add bushes along the lower edge; the near ones are darker."""
    size = canvas.shape[-1]
    _, y = coordinates(size)
    for line, leaf in ((0.76, 0.011), (0.88, 0.017)):
        clumps = cloud_noise(rng, size, 5, 4)
        growing = step((y - line) * 4 + 0.8 * (clumps - 0.5), 0.0, 0.16)
        top = blend(lit, shade, (line - 0.76) * 3)
        canvas = _dabs(rng, canvas, growing, clumps, (leaf, top, darker(shade)))
    return canvas


def _dabs(
    rng: np.random.Generator,
    canvas: Field,
    where: Field,
    light: Field,
    leaf: tuple[float, Colour, Colour],
) -> Field:
    """Add foliage: a soft mass, and leaves of one size where ``where`` is high."""
    size = where.shape[0]
    length, top, bottom = leaf
    tone = (0.55 * step(light, 0.3, 0.8)).astype(np.float32)
    cover = where * step(where, 0.35, 0.65)
    count = 420
    places, angles, shades = rng.random((count, 2)), rng.uniform(0, np.pi, count), rng.random(count)
    cells = np.minimum((places * size).astype(int), size - 1)
    chance = where[cells[:, 1], cells[:, 0]]
    lit = light[cells[:, 1], cells[:, 0]]
    for index in np.flatnonzero(chance > 0.3):
        outline = places[index] + _leaf_outline(float(angles[index]), length)
        _fill(tone, outline, float(0.6 * lit[index] + 0.5 * shades[index]))
        _fill(cover, outline, 1.0)
    return mix(canvas, ramp(bottom, top, np.clip(tone, 0, 1)), cover)


def _leaf_outline(angle: float, length: float) -> Points:
    """Return a pointed oval around (0, 0), (n, 2)."""
    along = np.array([np.cos(angle), np.sin(angle)]) * length
    across = np.array([-along[1], along[0]]) * 0.5
    return np.stack([along, along * 0.3 + across, -along * 0.4 + across, -along,
                     -along * 0.4 - across, along * 0.3 - across])  # fmt: skip


def _fill(plane: Field, outline: Points, value: float) -> None:
    """Set a polygon, given in [0, 1] coordinates, to a value."""
    points = np.round(outline * plane.shape[0] * 16).astype(np.int32)
    cv2.fillPoly(plane, [points], value, cv2.LINE_8, 4)
