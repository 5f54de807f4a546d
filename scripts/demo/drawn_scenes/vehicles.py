"""Planes, ships and cars, as lists of shapes in the order in which they are painted."""

from __future__ import annotations

import numpy as np

from scripts.demo.drawn_scenes.shapes import (
    Colour,
    Outline,
    Shape,
    bar,
    blend,
    blob,
    box,
    darker,
    ellipse,
    one_of,
    pick,
    polygon,
)

WHITE: Colour = (0.97, 0.97, 0.95)
GLASS: Colour = (0.22, 0.31, 0.40)
DARK: Colour = (0.11, 0.12, 0.14)
STEEL: Colour = (0.66, 0.69, 0.72)


def plane(rng: np.random.Generator) -> list[Shape]:
    """Return an airliner or, less often, a propeller plane."""
    return _jet(rng) if rng.random() < 0.7 else _propeller_plane(rng)


def ship(rng: np.random.Generator) -> list[Shape]:
    """Return a liner, a container ship or a sailing boat."""
    kinds = (_liner, _container_ship, _sailing_boat)
    return one_of(rng, kinds)(rng)


def car(rng: np.random.Generator) -> list[Shape]:
    """Return a saloon, a hatchback or a van."""
    kinds = (_saloon, _hatchback, _van)
    return one_of(rng, kinds)(rng)


def _jet(rng: np.random.Generator) -> list[Shape]:
    paint = WHITE if rng.random() < 0.4 else pick(rng)
    accent = pick(rng)
    wing = blend(paint, STEEL, 0.55)
    tip = float(rng.uniform(-0.62, -0.34))
    drop = float(rng.uniform(0.46, 0.66))
    fin = float(rng.uniform(0.42, 0.54))
    return [
        polygon([(0.22, -0.06), (tip + 0.12, -0.42), (tip, -0.42), (-0.2, -0.06)], darker(wing)),
        polygon([(-0.66, -0.06), (-0.98, -0.25), (-1.08, -0.25), (-0.92, -0.05)], darker(wing)),
        polygon([(-0.6, -0.09), (-0.9, -fin), (-1.09, -fin), (-0.99, -0.07)], accent),
        blob(_TUBE, paint),
        polygon([(-0.97, -0.02), (0.95, 0.02), (0.9, 0.06), (-0.8, 0.05)], accent),
        *[ellipse(x, -0.045, 0.019, 0.026, GLASS) for x in np.linspace(-0.62, 0.64, 16)],
        polygon([(0.76, -0.105), (0.88, -0.075), (0.93, -0.03), (0.77, -0.035)], GLASS),
        polygon([(-0.68, -0.01), (-1.0, 0.2), (-1.13, 0.2), (-0.95, -0.02)], wing),
        *_engine(0.06, 0.27, darker(accent, 0.9)),
        polygon([(0.3, 0.05), (tip + 0.16, drop), (tip, drop), (-0.2, 0.08)], wing),
        polygon([(tip + 0.16, drop), (tip, drop), (tip - 0.04, drop - 0.1)], accent),
    ]


_TUBE: Outline = (
    (1.02, 0.03), (0.93, -0.07), (0.76, -0.125), (0.3, -0.14), (-0.4, -0.135), (-0.8, -0.105),
    (-1.02, -0.075), (-1.0, -0.03), (-0.7, 0.07), (-0.4, 0.125), (0.3, 0.14), (0.76, 0.125),
    (0.94, 0.085),
)  # fmt: skip


def _engine(x: float, y: float, colour: Colour) -> list[Shape]:
    return [
        blob([(x - 0.2, y), (x - 0.1, y - 0.07), (x + 0.15, y - 0.08), (x + 0.15, y + 0.08),
              (x - 0.1, y + 0.07)], colour),
        ellipse(x + 0.16, y, 0.028, 0.07, DARK),
    ]  # fmt: skip


def _propeller_plane(rng: np.random.Generator) -> list[Shape]:
    paint, accent = pick(rng), pick(rng)
    wing = blend(accent, WHITE, 0.2)
    drop = float(rng.uniform(0.36, 0.5))
    blade = float(rng.uniform(0.28, 0.36))
    return [
        polygon([(0.45, -0.1), (0.3, -0.36), (0.02, -0.36), (0.05, -0.1)], darker(wing)),
        polygon([(-0.6, -0.06), (-0.82, -0.42), (-1.02, -0.42), (-0.98, -0.02)], accent),
        blob([(0.92, 0.0), (0.82, -0.13), (0.45, -0.17), (-0.3, -0.14), (-1.0, -0.05),
              (-1.0, 0.03), (-0.3, 0.14), (0.4, 0.19), (0.85, 0.13)], paint),
        blob([(0.46, -0.15), (0.28, -0.3), (-0.1, -0.29), (-0.3, -0.13)], GLASS),
        bar((0.12, -0.3), (0.14, -0.13), 0.04, paint),
        polygon([(-0.95, 0.0), (0.88, 0.0), (0.86, 0.05), (-0.92, 0.03)], accent),
        polygon([(-0.68, 0.0), (-0.86, 0.2), (-1.06, 0.2), (-0.96, 0.0)], wing),
        bar((0.5, 0.15), (0.56, 0.32), 0.03, DARK),
        ellipse(0.57, 0.33, 0.075, 0.075, DARK),
        polygon([(0.48, 0.04), (0.3, drop), (-0.06, drop), (-0.02, 0.06)], wing),
        polygon([(0.3, drop), (-0.06, drop), (-0.055, drop - 0.08), (0.335, drop - 0.08)], accent),
        ellipse(0.99, 0.0, 0.026, blade, (0.62, 0.62, 0.62)),
        blob([(1.08, 0.0), (0.98, -0.08), (0.9, 0.0), (0.98, 0.08)], accent),
    ]  # fmt: skip


def _hull(paint: Colour, keel: Colour, height: float) -> list[Shape]:
    """Return a hull with a raked bow; the deck is at y = 0."""
    h = height
    return [
        blob([(-1.0, -0.03), (-0.5, 0.0), (0.5, 0.0), (1.1, -0.13), (0.98, 0.2 * h), (0.82, 0.8 * h),
              (0.74, h), (0.3, h), (-0.5, h), (-0.84, h), (-0.93, 0.8 * h)], paint),
        polygon([(-0.92, 0.78 * h), (0.83, 0.78 * h), (0.74, h), (-0.84, h)], keel),
    ]  # fmt: skip


def _portholes(y: float, left: float, right: float, count: int) -> list[Shape]:
    return [ellipse(x, y, 0.022, 0.024, GLASS) for x in np.linspace(left, right, count)]


def _liner(rng: np.random.Generator) -> list[Shape]:
    paint, accent, keel = pick(rng), pick(rng), darker(pick(rng), 0.8)
    upper = blend(WHITE, pick(rng), float(rng.choice([0.0, 0.0, 0.5])))
    shapes: list[Shape] = []
    for x in (-0.42, -0.08, 0.26)[: int(rng.integers(1, 4))]:
        rake = x - 0.06
        shapes += [
            polygon([(x - 0.1, -0.4), (rake - 0.1, -0.78), (rake + 0.1, -0.78), (x + 0.1, -0.4)],
                    accent),
            polygon([(rake - 0.1, -0.78), (rake + 0.1, -0.78), (rake + 0.11, -0.68),
                     (rake - 0.09, -0.68)], DARK),
        ]  # fmt: skip
    shapes.append(bar((0.6, -0.2), (0.56, -0.8), 0.03, darker(upper)))
    for level, (left, right) in enumerate([(-0.84, 0.72), (-0.74, 0.6), (-0.6, 0.48)]):
        top = -0.17 * (level + 1)
        shapes.append(box(left, top, right - left, 0.19, darker(upper, 1 - 0.07 * (2 - level))))
        shapes.append(box(left + 0.05, top + 0.055, right - left - 0.1, 0.055, GLASS))
        posts = np.arange(left + 0.12, right - 0.06, 0.11)
        shapes += [box(x, top + 0.05, 0.03, 0.07, upper) for x in posts]
    return [*shapes, *_hull(paint, keel, 0.34), *_portholes(0.12, -0.75, 0.7, 13)]


def _container_ship(rng: np.random.Generator) -> list[Shape]:
    paint, keel = pick(rng), darker(pick(rng), 0.8)
    shapes = [
        box(-0.88, -0.66, 0.26, 0.7, WHITE),
        box(-0.92, -0.7, 0.34, 0.1, WHITE),
        box(-0.8, -0.64, 0.2, 0.06, GLASS),
        *[box(-0.84, y, 0.18, 0.045, GLASS) for y in (-0.5, -0.37, -0.24)],
        box(-0.82, -0.92, 0.13, 0.23, darker(paint)),
    ]
    for column, x in enumerate(np.arange(-0.56, 0.7, 0.21)):
        for row in range(int(rng.integers(1, 4)) if column else 3):
            colour = pick(rng)
            y = -0.15 * (row + 1)
            shapes.append(box(x, y, 0.2, 0.145, colour))
            ribs = (0.05, 0.1, 0.15)
            shapes += [box(x + rib, y, 0.012, 0.145, darker(colour)) for rib in ribs]
    return [*shapes, bar((0.86, 0.0), (0.86, -0.35), 0.03, STEEL), *_hull(paint, keel, 0.36)]


def _sailing_boat(rng: np.random.Generator) -> list[Shape]:
    paint, keel = pick(rng), darker(pick(rng), 0.8)
    sail = blend(WHITE, pick(rng), float(rng.choice([0.0, 0.15, 0.9])))
    stripe = pick(rng)
    height = float(rng.uniform(1.3, 1.7))
    return [
        bar((0.08, 0.05), (0.08, -height - 0.1), 0.045, (0.42, 0.30, 0.20)),
        blob([(0.0, -height), (-0.42, -0.75 * height), (-0.86, -0.16), (-0.4, -0.12),
              (0.02, -0.14), (0.03, -0.5 * height)], sail),
        polygon([(-0.68, -0.36 * height), (0.02, -0.36 * height), (0.02, -0.24 * height),
                 (-0.77, -0.24 * height)], stripe),
        blob([(0.13, -0.92 * height), (0.5, -0.5 * height), (0.98, -0.14), (0.5, -0.12),
              (0.16, -0.16), (0.15, -0.5 * height)], darker(sail, 0.88)),
        box(-0.4, -0.11, 0.5, 0.14, blend(paint, WHITE, 0.7)),
        *_hull(paint, keel, 0.3),
    ]  # fmt: skip


def _wheels(xs: tuple[float, float], y: float, radius: float) -> list[Shape]:
    shapes: list[Shape] = []
    for x in xs:
        shapes += [
            ellipse(x, y - 0.02, radius * 1.2, radius * 1.2, (0.07, 0.07, 0.08)),
            ellipse(x, y, radius, radius, DARK),
            ellipse(x, y, radius * 0.62, radius * 0.62, (0.78, 0.79, 0.81)),
            ellipse(x, y, radius * 0.2, radius * 0.2, (0.35, 0.36, 0.38)),
        ]
    return shapes


def _trim(paint: Colour, front: float, back: float, door: float) -> list[Shape]:
    """Return the lights, door line and handles of a car."""
    line = darker(paint, 0.6)
    return [
        blob([(front, -0.02), (front - 0.13, -0.06), (front - 0.12, 0.05), (front, 0.06)],
             (1.0, 0.96, 0.72)),
        box(back, -0.06, 0.08, 0.13, (0.80, 0.10, 0.10)),
        bar((door, -0.13), (door + 0.01, 0.24), 0.014, line),
        box(door + 0.05, -0.06, 0.1, 0.028, line),
        box(door - 0.5, -0.06, 0.1, 0.028, line),
    ]  # fmt: skip


def _saloon(rng: np.random.Generator) -> list[Shape]:
    paint = pick(rng)
    roof = float(rng.uniform(-0.5, -0.42))
    return [
        box(-0.9, 0.12, 1.8, 0.18, DARK),
        blob([(-0.76, -0.1), (-0.44, roof + 0.03), (-0.2, roof), (0.16, roof), (0.36, roof + 0.06),
              (0.66, -0.1), (0.2, -0.02), (-0.4, -0.02)], paint),
        blob([(-0.98, -0.04), (-0.9, -0.14), (-0.5, -0.17), (0.55, -0.16), (0.9, -0.08),
              (1.0, 0.04), (0.98, 0.22), (0.6, 0.27), (-0.6, 0.27), (-0.97, 0.22)], paint),
        polygon([(-0.62, -0.15), (-0.4, roof + 0.07), (-0.08, roof + 0.05), (-0.08, -0.15)], GLASS),
        polygon([(-0.03, -0.15), (-0.03, roof + 0.05), (0.2, roof + 0.06), (0.52, -0.15)], GLASS),
        *_trim(paint, 0.99, -0.99, -0.05),
        *_wheels((-0.56, 0.56), 0.26, 0.19),
    ]  # fmt: skip


def _hatchback(rng: np.random.Generator) -> list[Shape]:
    paint = pick(rng)
    top = pick(rng) if rng.random() < 0.3 else paint
    roof = float(rng.uniform(-0.66, -0.54))
    return [
        box(-0.8, 0.12, 1.6, 0.18, DARK),
        blob([(-0.86, -0.05), (-0.76, roof + 0.1), (-0.5, roof), (0.05, roof), (0.28, roof + 0.08),
              (0.6, -0.14), (0.2, -0.02), (-0.5, -0.02)], top),
        blob([(-0.9, -0.02), (-0.85, -0.14), (-0.5, -0.18), (0.5, -0.18), (0.78, -0.1), (0.9, 0.04),
              (0.88, 0.24), (0.5, 0.28), (-0.5, 0.28), (-0.88, 0.24)], paint),
        polygon([(-0.72, -0.16), (-0.66, roof + 0.12), (-0.16, roof + 0.06), (-0.16, -0.16)],
                GLASS),
        polygon([(-0.1, -0.16), (-0.1, roof + 0.06), (0.12, roof + 0.07), (0.46, -0.16)], GLASS),
        *_trim(paint, 0.89, -0.9, -0.13),
        *_wheels((-0.52, 0.52), 0.27, 0.2),
    ]  # fmt: skip


def _van(rng: np.random.Generator) -> list[Shape]:
    paint, accent = pick(rng), pick(rng)
    roof = float(rng.uniform(-0.74, -0.62))
    return [
        box(-0.9, 0.12, 1.8, 0.18, DARK),
        polygon([(-0.98, 0.26), (-1.0, roof + 0.08), (-0.93, roof), (0.4, roof), (0.52, roof + 0.06),
                 (0.82, -0.16), (0.98, -0.06), (1.0, 0.26)], paint),
        box(-0.985, -0.02, 1.96, 0.1, accent),
        polygon([(0.14, -0.18), (0.14, roof + 0.1), (0.4, roof + 0.1), (0.46, roof + 0.13),
                 (0.68, -0.18)], GLASS),
        *[box(x, roof + 0.12, 0.38, -roof - 0.36, GLASS) for x in (-0.86, -0.38)],
        *_trim(paint, 1.0, -1.0, 0.08),
        *_wheels((-0.55, 0.58), 0.26, 0.2),
    ]  # fmt: skip
