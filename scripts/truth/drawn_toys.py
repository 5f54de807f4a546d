"""Scenes for small detectors: two to four toys of two shapes, so that most toys have another one of their class.

A toy's shape is its class. Its colour and the ground say nothing about it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scripts.words.word_scenes import COLOURS, GROUNDS, SHAPES, SIDE, Toy, covered, painted

TRAINING, JUDGED = 1, 2
"""The first number of the scenes' seeds."""
MOST_TOYS = 4


@dataclass(frozen=True, eq=False)
class Scene:
    """A picture (64, 64, 3), its toys, and the visible pixels of each: (K, 64, 64)."""

    picture: NDArray[np.uint8]
    toys: tuple[Toy, ...]
    masks: NDArray[np.bool_]

    @property
    def labels(self) -> tuple[int, ...]:
        """The toys' classes."""
        return tuple(SHAPES.index(toy.shape) for toy in self.toys)

    @property
    def boxes(self) -> NDArray[np.float32]:
        """The toys' boxes: left, top, right, bottom in pixels (K, 4)."""
        places = [np.nonzero(mask) for mask in self.masks]
        return np.array([(x.min(), y.min(), x.max() + 1, y.max() + 1) for y, x in places], np.float32)

    @property
    def turned_boxes(self) -> NDArray[np.float32]:
        """The corners (K, 4, 2) of the toys' boxes, turned as the toys are."""
        return np.stack([_turned_box(toy, mask) for toy, mask in zip(self.toys, self.masks, strict=True)])


def _turned_box(toy: Toy, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    along = np.array([math.cos(toy.angle), math.sin(toy.angle)])
    axes = np.stack([along, [-along[1], along[0]]])
    places = (np.argwhere(mask)[:, ::-1] - toy.middle) @ axes.T
    (left, top), (right, bottom) = places.min(0) - 0.5, places.max(0) + 0.5
    corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)])
    turned: NDArray[np.float32] = (corners @ axes + toy.middle + 0.5).astype(np.float32)
    return turned


def draw(seed: tuple[int, ...]) -> Scene:
    """Draw one scene: each toy lies in a quarter of its own."""
    rng = np.random.default_rng(seed)
    picture = painted(rng, str(rng.choice(list(GROUNDS))))
    two = rng.choice(len(SHAPES), 2, replace=False)
    toys, masks = [], []
    for place in rng.permutation(4)[: rng.integers(2, MOST_TOYS + 1)]:
        middle = (np.array([place % 2, place // 2]) + 0.5) * SIDE / 2 + rng.uniform(-4, 4, 2)
        label, colour = int(rng.choice(two)), str(rng.choice(list(COLOURS)))
        radius, angle = float(rng.uniform(8, 11)), float(rng.uniform(-0.25, 0.25))
        toy = Toy(SHAPES[label], colour, (float(middle[0]), float(middle[1])), radius, angle)
        mask = covered(toy)
        picture[mask] = np.asarray(COLOURS[colour]) + rng.normal(0, 8, 3)
        toys.append(toy)
        masks.append(mask)
    picture = np.clip(picture * rng.uniform(0.85, 1.1) + rng.normal(0, 6, picture.shape), 0, 255)
    return Scene(picture.astype(np.uint8), tuple(toys), np.stack(masks))
