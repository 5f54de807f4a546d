"""Drawn scenes with a sentence each, of whose words it is known what in the picture decides them.

A scene shows one or two toys on a ground. Its sentence has five kinds of words:

- one toy decides the words for its colour and its shape;
- the whole ground decides "grass", "sand", "sea", "snow" or "brick";
- both toys decide how many there are, and whether the first is "left" of the second or "above" it;
- earlier words decide "toys" after "two", "of" after "left", and "shining" after every star;
- nothing decides "near a tree": every sentence has it, and no scene has a tree. It is the planted hallucination.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

SIDE = 64
CELL = 8
"""Width of a picture, and of the patch that one image token stands for, in pixels."""

COLOURS = {
    "red": (220, 40, 35),
    "green": (30, 150, 60),
    "blue": (40, 80, 230),
    "yellow": (240, 215, 40),
    "purple": (165, 50, 190),
}
SHAPES = ("ball", "square", "triangle", "star", "cross")
GROUNDS = {
    "grass": (120, 165, 95),
    "sand": (215, 195, 150),
    "sea": (95, 150, 190),
    "snow": (232, 236, 240),
    "brick": (170, 115, 100),
}

Cause: TypeAlias = Literal["colour", "shape", "ground", "both", "grammar", "dictated", "planted"]
"""What decides a word; the last three are no part of the picture."""
IN_PICTURE: tuple[Cause, ...] = ("colour", "shape", "ground", "both")
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Toy:
    """One toy: its shape, its colour, and the middle and the radius of its drawing in pixels."""

    shape: str
    colour: str
    middle: tuple[float, float]
    radius: float
    angle: float


@dataclass(frozen=True, eq=False)
class SceneWord:
    """A word of the sentence, what decides it, and where that lies: (64, 64), None if it is not in the picture.

    ``rival`` is where the toy lies that does not decide it, if there is another toy.
    """

    text: str
    cause: Cause
    truth: Mask | None = None
    rival: Mask | None = None


@dataclass(frozen=True, eq=False)
class Scene:
    """A picture (64, 64, 3), its sentence word by word, and what each patch shows (8 x 8 each).

    ``patch_labels`` (64, 3) has the shape, the colour and the ground of
    each patch; -1 for a patch without a toy.
    """

    picture: NDArray[np.uint8]
    words: tuple[SceneWord, ...]
    patch_labels: NDArray[np.int64]

    @property
    def sentence(self) -> str:
        """The sentence."""
        return " ".join(word.text for word in self.words)


def draw(seed: tuple[int, ...], *, toys: int | None = None) -> Scene:
    """Draw one scene; the seed decides everything but the number of toys, if that is given."""
    rng = np.random.default_rng(seed)
    count = toys or int(rng.integers(1, 3))
    ground = str(rng.choice(list(GROUNDS)))
    relation = "left of" if rng.random() < 0.5 else "above"
    placed = [_toy(rng, middle) for middle in _middles(rng, count, relation)]
    picture, masks = painted(rng, ground), []
    for toy in placed:
        mask = covered(toy)
        masks.append(mask)
        shade = np.asarray(COLOURS[toy.colour]) + rng.normal(0, 8, 3)
        picture[mask] = shade
    light, noise = rng.uniform(0.85, 1.1), rng.normal(0, 6, picture.shape)
    seen = np.clip(picture * light + noise, 0, 255).astype(np.uint8)
    visible = [mask & ~np.any(masks[number + 1 :], axis=0) for number, mask in enumerate(masks)]
    words = _sentence(placed, visible, ground, relation)
    return Scene(seen, words, _patch_labels(placed, visible, ground))


def _middles(rng: np.random.Generator, count: int, relation: str) -> list[tuple[float, float]]:
    """Return (x, y) of each toy: two lie side by side or one above the other, 30 pixels apart and more."""
    if count == 1:
        return [(float(rng.uniform(14, 50)), float(rng.uniform(14, 50)))]
    low, high = float(rng.uniform(13, 18)), float(rng.uniform(46, 51))
    middle = rng.uniform(15, 49)
    across = np.clip([middle, middle + rng.uniform(-7, 7)], 14, 50)
    if relation == "left of":
        return [(low, float(across[0])), (high, float(across[1]))]
    return [(float(across[0]), low), (float(across[1]), high)]


def _toy(rng: np.random.Generator, middle: tuple[float, float]) -> Toy:
    shape, colour = str(rng.choice(SHAPES)), str(rng.choice(list(COLOURS)))
    return Toy(shape, colour, middle, float(rng.uniform(9.5, 12.5)), float(rng.uniform(-0.25, 0.25)))


def painted(rng: np.random.Generator, name: str) -> NDArray[np.float64]:
    """Return the picture of a ground: a colour, and a texture that runs over all of it."""
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float64)
    phase = rng.uniform(0, 2 * math.pi, 2)
    texture = {
        "grass": 14 * np.sin(1.9 * x + 0.5 * np.sin(0.4 * y + phase[0]) + phase[1]),
        "sand": rng.normal(0, 11, (SIDE, SIDE)),
        "sea": 16 * np.sin(0.9 * y + 0.8 * np.sin(0.3 * x + phase[0]) + phase[1]),
        "snow": 7 * np.sin(0.25 * x + phase[0]) * np.sin(0.25 * y + phase[1]),
        "brick": -34.0 * ((y % 8 < 1.5) | ((x + 6 * (y // 8 % 2) + 6 * phase[0]) % 12 < 1.5)),
    }[name]
    painted: NDArray[np.float64] = np.asarray(GROUNDS[name], float) + texture[..., None] + rng.normal(0, 5, 3)
    return painted


def covered(toy: Toy) -> Mask:
    """Return which pixels a toy covers."""
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float64)
    dx, dy = x - toy.middle[0], y - toy.middle[1]
    turned, upright = math.cos(toy.angle), math.sin(toy.angle)
    u, v = (turned * dx + upright * dy) / toy.radius, (-upright * dx + turned * dy) / toy.radius
    if toy.shape == "ball":
        return np.asarray(u**2 + v**2 < 0.85)
    if toy.shape == "square":
        return np.asarray(np.maximum(abs(u), abs(v)) < 0.8)
    if toy.shape == "triangle":
        return np.asarray((v < 0.75) & (v > 2 * abs(u) - 0.95))
    if toy.shape == "cross":
        return np.asarray((np.minimum(abs(u), abs(v)) < 0.3) & (np.maximum(abs(u), abs(v)) < 0.95))
    angles = np.arctan2(u, -v)
    tip = np.mod(angles + math.pi / 5, 2 * math.pi / 5) - math.pi / 5
    return np.asarray(np.hypot(u, v) < 0.45 / np.cos(2 * math.pi / 5 * (1 - abs(tip) / (math.pi / 5)) * 0.72))


def _sentence(toys: list[Toy], masks: list[Mask], ground: str, relation: str) -> tuple[SceneWord, ...]:
    everything = np.any(masks, axis=0)
    words = [SceneWord("two" if len(toys) == 2 else "one", "both", everything if len(toys) == 2 else None)]
    words.append(SceneWord("toys" if len(toys) == 2 else "toy", "dictated"))
    words.append(SceneWord(",", "grammar"))
    for number, (toy, mask) in enumerate(zip(toys, masks, strict=True)):
        rival = masks[1 - number] if len(toys) == 2 else None
        words += [
            SceneWord("a", "grammar"),
            SceneWord(toy.colour, "colour", mask, rival),
            SceneWord(toy.shape, "shape", mask, rival),
        ]
        if toy.shape == "star":
            words.append(SceneWord("shining", "dictated"))
        if number == 0 and len(toys) == 2:
            first, *rest = relation.split()
            words += [SceneWord(first, "both", everything), *(SceneWord(word, "dictated") for word in rest)]
    words += [SceneWord("on", "grammar"), SceneWord("the", "grammar"), SceneWord(ground, "ground", ~everything)]
    words += [SceneWord("near", "planted"), SceneWord("a", "planted"), SceneWord("tree", "planted")]
    return (*words, SceneWord(".", "grammar"))


def _patch_labels(toys: list[Toy], masks: list[Mask], ground: str) -> NDArray[np.int64]:
    cells = SIDE // CELL
    labels = np.full((cells, cells, 3), -1)
    labels[..., 2] = list(GROUNDS).index(ground)
    for toy, mask in zip(toys, masks, strict=True):
        share = mask.reshape(cells, CELL, cells, CELL).mean((1, 3))
        labels[share > 0.2, 0] = SHAPES.index(toy.shape)
        labels[share > 0.2, 1] = list(COLOURS).index(toy.colour)
    return labels.reshape(-1, 3)
