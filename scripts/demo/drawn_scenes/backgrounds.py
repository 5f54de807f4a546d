"""The four backgrounds: pure functions from a random generator to a planar RGB picture of floats.

Each fills the whole frame, so that an object fits anywhere on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from scripts.demo.drawn_scenes.forest import wood
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
from scripts.demo.drawn_scenes.shapes import Colour, one_of

SKIES: tuple[tuple[Colour, Colour], ...] = (
    ((0.16, 0.42, 0.80), (0.66, 0.84, 0.96)),
    ((0.25, 0.55, 0.90), (0.80, 0.91, 0.97)),
    ((0.10, 0.28, 0.62), (0.50, 0.72, 0.92)),
    ((0.38, 0.42, 0.68), (0.98, 0.74, 0.56)),
    ((0.46, 0.54, 0.64), (0.80, 0.84, 0.88)),
)
SEAS: tuple[tuple[Colour, Colour], ...] = (
    ((0.22, 0.56, 0.66), (0.03, 0.24, 0.40)),
    ((0.16, 0.46, 0.64), (0.03, 0.18, 0.38)),
    ((0.30, 0.66, 0.66), (0.02, 0.36, 0.46)),
    ((0.36, 0.46, 0.52), (0.12, 0.22, 0.30)),
)


def sky(rng: np.random.Generator, size: int) -> Field:
    """Return a clear or cloudy sky, (3, size, size) in [0, 1]."""
    x, y = coordinates(size)
    top, bottom = one_of(rng, SKIES)
    canvas = ramp(varied(rng, top, 0.05), varied(rng, bottom, 0.04), step(y, -0.1, 1.1))
    sun_x, sun_y = rng.uniform(-0.1, 1.1), rng.uniform(-0.3, 0.3)
    glow = np.exp(-((x - sun_x) ** 2 + (y - sun_y) ** 2) / 0.09).astype(np.float32)
    canvas = mix(canvas, (1.0, 0.96, 0.86), 0.45 * glow)
    for columns, rows, thin in ((2, 6, 0.35), (3, 4, 1.0)):
        canvas = _clouds(rng, canvas, cloud_noise(rng, size, columns, rows), thin)
    return canvas


def _clouds(rng: np.random.Generator, canvas: Field, noise: Field, strength: float) -> Field:
    """Add clouds where the noise is high, lit from above."""
    size = noise.shape[0]
    cover = float(rng.uniform(0.5, 0.64))
    amount = step(noise, cover, cover + 0.2) * strength
    lift = max(1, size // 24)
    slope = noise - np.roll(noise, -lift, axis=0)
    slope[-lift:] = slope[-2 * lift : -lift][::-1]
    lit = step(slope, -0.14, 0.12)
    return mix(canvas, ramp((1.0, 0.99, 0.97), (0.70, 0.74, 0.81), lit), amount)


def sea(rng: np.random.Generator, size: int) -> Field:
    """Return water seen from above the waves, (3, size, size) in [0, 1]."""
    x, y = coordinates(size)
    far, near = one_of(rng, SEAS)
    canvas = ramp(varied(rng, far, 0.04), varied(rng, near, 0.03), step(y, -0.2, 1.1))
    swell = cloud_noise(rng, size, 2, 5)
    canvas = mix(canvas, varied(rng, near, 0.03), 0.5 * step(swell, 0.4, 0.8))
    depth = np.log1p(y * float(rng.uniform(2.0, 4.0)))
    chop = cloud_noise(rng, size, 5, 12)
    for waves, bend in ((11, 5.0), (17, 7.0), (27, 9.0)):
        phase = bend * smooth_noise(rng, size, 4, 5) + rng.uniform(-1.5, 1.5) * x
        crest = np.sin(2 * np.pi * (waves * depth / depth[-1, 0]) + phase).astype(np.float32)
        canvas = mix(canvas, (0.02, 0.12, 0.24), 0.22 * step(-crest, 0.2, 1.0))
        light = step(crest, 0.45, 1.0) * step(chop, 0.3, 0.7)
        canvas = mix(canvas, (0.70, 0.88, 0.92), 0.34 * light)
        foam = step(crest, 0.8, 0.95) * step(smooth_noise(rng, size, 14, 30), 0.74, 0.92)
        canvas = mix(canvas, (0.96, 0.99, 1.0), 0.8 * foam)
    path = np.exp(-(((x - rng.uniform(0, 1)) / 0.16) ** 2)).astype(np.float32)
    glitter = path * step(smooth_noise(rng, size, 40, 90), 0.68, 0.9) * (1 - 0.6 * y)
    return mix(canvas, (1.0, 0.97, 0.86), 0.7 * glitter)


def road(rng: np.random.Generator, size: int) -> Field:
    """Return asphalt with lane markings and a grass verge, (3, size, size) in [0, 1]."""
    x, y = coordinates(size)
    tone = float(rng.uniform(0.26, 0.50))
    canvas = paint(varied(rng, (tone, tone, tone * 1.03), 0.012), size)
    canvas *= 0.90 + 0.25 * cloud_noise(rng, size, 3, 4)
    canvas += 0.10 * (smooth_noise(rng, size, 128, 128) - 0.5)
    slope = float(rng.uniform(-0.16, 0.16))
    across = y + slope * (x - 0.5)
    canvas = _tyre_tracks(rng, canvas, across)
    lines: Colour = (0.96, 0.95, 0.92) if rng.random() < 0.65 else (0.95, 0.76, 0.20)
    worn = 0.72 + 0.28 * step(smooth_noise(rng, size, 40, 40), 0.25, 0.5)
    lanes = int(rng.integers(2, 4))
    verge = float(rng.uniform(0.02, 0.16))
    edges = (np.linspace(verge + 0.05, 0.97, lanes + 1) ** 1.1).tolist()
    for index, edge in enumerate(edges):
        half = 0.008 + 0.009 * edge
        stripe = step(-np.abs(across - edge), -half - 0.004, -half)
        if 0 < index < lanes:
            period = 0.22 + 0.14 * edge
            beat = np.mod(x / period + rng.random(), 1.0).astype(np.float32)
            stripe = stripe * step(-np.abs(beat - 0.5), -0.32, -0.30)
        canvas = mix(canvas, lines, stripe * worn)
    return _verge(rng, canvas, across, verge)


def _tyre_tracks(rng: np.random.Generator, canvas: Field, across: Field) -> Field:
    for position in rng.uniform(0.15, 0.95, 4):
        track = np.exp(-(((across - position) / 0.035) ** 2)).astype(np.float32)
        canvas = mix(canvas, (0.12, 0.12, 0.13), 0.22 * track)
    return canvas


def _verge(rng: np.random.Generator, canvas: Field, across: Field, edge: float) -> Field:
    size = canvas.shape[-1]
    grass = varied(rng, (0.42, 0.56, 0.26), 0.06)
    lawn = paint(grass, size) * (0.65 + 0.6 * smooth_noise(rng, size, 90, 40))
    ragged = across + 0.012 * (smooth_noise(rng, size, 40, 6) - 0.5)
    canvas = mix(canvas, (0.74, 0.73, 0.70), step(-ragged, -edge - 0.018, -edge - 0.012))
    return mix(canvas, lawn, step(-ragged, -edge, -edge + 0.006))


BACKDROPS: Mapping[str, Callable[[np.random.Generator, int], Field]] = MappingProxyType(
    {"sky": sky, "sea": sea, "road": road, "wood": wood}
)
