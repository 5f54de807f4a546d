"""Birds, as lists of shapes in the order in which they are painted."""

from __future__ import annotations

import numpy as np

from scripts.demo.drawn_scenes.shapes import (
    Colour,
    Points,
    Shape,
    bar,
    blend,
    blob,
    darker,
    ellipse,
    one_of,
    pick,
    polygon,
)

INK: Colour = (0.08, 0.08, 0.10)


def bird(rng: np.random.Generator) -> list[Shape]:
    """Return a flying or a sitting bird."""
    return _flying(rng) if rng.random() < 0.6 else _sitting(rng)


def _beak(rng: np.random.Generator) -> Colour:
    beaks: tuple[Colour, ...] = ((0.98, 0.70, 0.15), (0.95, 0.45, 0.15), (0.25, 0.22, 0.22))
    return one_of(rng, beaks)


def _head(x: float, y: float, size: float, colour: Colour, beak: Colour) -> list[Shape]:
    s = size
    return [
        polygon([(x + 0.7 * s, y - 0.35 * s), (x + 1.85 * s, y + 0.15 * s),
                 (x + 0.7 * s, y + 0.45 * s)], beak),
        ellipse(x, y, s, s * 0.94, colour),
        ellipse(x + 0.35 * s, y - 0.2 * s, 0.27 * s, 0.27 * s, (0.98, 0.98, 0.96)),
        ellipse(x + 0.4 * s, y - 0.2 * s, 0.17 * s, 0.17 * s, INK),
    ]  # fmt: skip


_WING = np.array(
    [
        (0.34, 0.03), (0.36, -0.32), (0.22, -0.66), (-0.08, -1.0), (-0.34, -1.16), (-0.30, -0.98),
        (-0.46, -0.98), (-0.40, -0.80), (-0.54, -0.76), (-0.46, -0.58), (-0.58, -0.50),
        (-0.48, -0.34), (-0.56, -0.22), (-0.40, -0.02), (-0.1, 0.09),
    ]
)  # fmt: skip
_COVERT = np.array(
    [(0.31, 0.03), (0.33, -0.30), (0.18, -0.62), (-0.06, -0.8), (-0.22, -0.5), (-0.28, -0.2),
     (-0.22, 0.02), (0.0, 0.08)]
)  # fmt: skip
_QUILLS = (((-0.02, -0.66), (-0.36, -0.86)), ((-0.1, -0.46), (-0.45, -0.66)),
           ((-0.16, -0.28), (-0.48, -0.44)), ((-0.16, -0.12), (-0.46, -0.22)))  # fmt: skip


def _wing(bend: Points, colour: Colour, end: Colour) -> list[Shape]:
    """Return a wing with spread feathers; ``bend`` is the (2, 2) matrix that raises or lowers it."""
    quills = [
        bar(tuple(np.asarray(root) @ bend), tuple(np.asarray(tip) @ bend), 0.018, darker(end, 0.7))
        for root, tip in _QUILLS
    ]
    return [blob(_WING @ bend, end), *quills, blob(_COVERT @ bend, colour)]


def _bend(height: float, lean: float) -> Points:
    """Return the matrix that scales a wing's height and leans its tip forward by ``lean``."""
    return np.array([[1.0, 0.0], [-lean, height]])


def _flying(rng: np.random.Generator) -> list[Shape]:
    coat, belly, end = pick(rng), pick(rng), darker(pick(rng), 0.75)
    height = float(rng.uniform(0.7, 1.1)) * (1.0 if rng.random() < 0.7 else -0.85)
    lean = float(rng.uniform(-0.15, 0.3))
    far = _wing(_bend(0.92 * height, lean + 0.45), darker(coat, 0.75), darker(end, 0.75))
    return [
        *[Shape(shape.points + np.array([0.1, -0.04]), shape.colour) for shape in far],
        blob([(-0.4, -0.04), (-0.86, -0.2), (-1.0, -0.12), (-0.9, -0.03), (-1.04, 0.03),
              (-0.92, 0.09), (-0.98, 0.2), (-0.8, 0.2), (-0.36, 0.12)], end),
        blob([(0.66, -0.14), (0.3, -0.2), (-0.1, -0.17), (-0.48, -0.06), (-0.52, 0.06),
              (-0.1, 0.23), (0.35, 0.24), (0.66, 0.08)], coat),
        blob([(0.6, 0.07), (0.2, 0.08), (-0.42, 0.06), (-0.1, 0.21), (0.35, 0.22)], belly),
        *_head(0.68, -0.14, 0.2, coat, _beak(rng)),
        *_wing(_bend(height, lean), blend(coat, end, 0.2), end),
    ]  # fmt: skip


def _sitting(rng: np.random.Generator) -> list[Shape]:
    coat, belly, end = pick(rng), pick(rng), darker(pick(rng), 0.75)
    legs: Colour = (0.45, 0.30, 0.18)
    tail = float(rng.uniform(-0.15, 0.35))
    return [
        blob([(-0.45, 0.12), (-1.0, tail), (-1.12, tail + 0.08), (-1.0, tail + 0.17),
              (-0.4, 0.32)], end),
        bar((0.0, 0.4), (0.04, 0.72), 0.045, legs),
        bar((0.16, 0.4), (0.2, 0.72), 0.045, legs),
        bar((-0.02, 0.71), (0.14, 0.71), 0.04, legs),
        bar((0.14, 0.71), (0.3, 0.71), 0.04, legs),
        blob([(0.5, -0.34), (0.2, -0.4), (-0.3, -0.1), (-0.62, 0.14), (-0.5, 0.34), (-0.05, 0.47),
              (0.35, 0.4), (0.58, 0.1)], coat),
        blob([(0.54, -0.12), (0.3, 0.0), (0.05, 0.3), (-0.05, 0.46), (0.34, 0.39), (0.57, 0.12)],
             belly),
        *_head(0.42, -0.42, 0.27, coat, _beak(rng)),
        blob([(0.2, -0.16), (-0.1, -0.2), (-0.55, 0.1), (-0.82, 0.26), (-0.3, 0.3), (0.12, 0.2)],
             blend(coat, end, 0.6)),
        blob([(0.05, 0.02), (-0.3, 0.08), (-0.82, 0.26), (-0.3, 0.3), (0.05, 0.2)], end),
    ]  # fmt: skip
