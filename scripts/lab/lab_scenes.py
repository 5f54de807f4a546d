"""The lab's pictures: drawn objects on drawn backgrounds, with a shortcut that correlates with the class."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2.functional import gaussian_blur

from scripts.demo.drawn_scenes.drawing import BACKGROUNDS, THINGS, paint_backdrop, paint_thing

SIDE = 48
"""Width and height of a picture in pixels: small enough to train a network in minutes on a CPU."""

SPRITE_SIDE = 48
CLASSES = len(THINGS)
SPRITES, BACKDROPS = 4800, 1600

DRAWING_SIDE = 128
"""Sprites are drawn at this size and then reduced, so that their edges are smooth."""

SHORTCUTS = ("background", "corner", "frame", "tint", "blur")
ONE_CLASS = "watermark"
"""A corner mark on pictures of the first class only."""

LAYOUTS = ("usual", "tiny", "filling", "centred", "several")

_SCALES = {
    "usual": (0.35, 0.7),
    "tiny": (0.2, 0.3),
    "filling": (0.9, 1.0),
    "centred": (0.35, 0.65),
    "several": (0.28, 0.42),
}
"""Least and largest side of an object, as a share of the picture's."""

_COLOURS = torch.tensor([(0.9, 0.15, 0.1), (0.1, 0.75, 0.2), (0.15, 0.25, 0.95), (0.95, 0.85, 0.1)])
_TINTS = torch.tensor([(1.25, 0.95, 0.8), (0.85, 1.2, 0.9), (0.85, 0.95, 1.3), (1.15, 1.15, 0.75)])
_BLURS = (0.0, 0.6, 1.1, 1.8)


@dataclass(frozen=True)
class Parts:
    """The parts that scenes are composed of, as uint8.

    ``sprites`` (N, 4, 48, 48) are objects cropped to their bounding square: colour multiplied by opacity, and opacity.
    ``backdrops`` are (M, 3, 48, 48). Sprite i shows class i % 4, and backdrop i has kind i % 4. The last quarter of
    both is never trained on.
    """

    sprites: Tensor
    backdrops: Tensor


@dataclass(frozen=True)
class Scenes:
    """Images (N, 3, 48, 48) from 0 to 1, the opacity of their objects (N, 48, 48), and labels (N,)."""

    images: Tensor
    opacities: Tensor
    labels: Tensor


def load_parts(folder: Path, workers: int) -> Parts:
    """Draw the parts with ``workers`` processes, or read them from the folder if an earlier run drew them."""
    file = folder / "parts.npz"
    if not file.exists():
        with ProcessPoolExecutor(workers, get_context("spawn"), cv2.setNumThreads, (1,)) as pool:
            sprites = np.stack(list(pool.map(_draw_sprite, range(SPRITES), chunksize=50)))
            backdrops = np.stack(list(pool.map(_draw_backdrop, range(BACKDROPS), chunksize=50)))
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(file, sprites=sprites, backdrops=backdrops)
    with np.load(file) as arrays:
        return Parts(torch.from_numpy(arrays["sprites"]), torch.from_numpy(arrays["backdrops"]))


def _draw_sprite(number: int) -> NDArray[np.uint8]:
    colour, opacity = paint_thing(np.random.default_rng([5, number]), THINGS[number % CLASSES], DRAWING_SIDE)
    rows, columns = np.flatnonzero(opacity.any(1)), np.flatnonzero(opacity.any(0))
    cropped = np.dstack([colour, opacity])[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    height, width = cropped.shape[:2]
    side = max(height, width)
    square = np.zeros((side, side, 4), np.float32)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = cropped
    return _as_bytes(cv2.resize(square, (SPRITE_SIDE, SPRITE_SIDE), interpolation=cv2.INTER_AREA))


def _draw_backdrop(number: int) -> NDArray[np.uint8]:
    return _as_bytes(paint_backdrop(np.random.default_rng([6, number]), BACKGROUNDS[number % CLASSES], SIDE))


def _as_bytes(picture: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.round(np.clip(picture, 0, 1) * 255).astype(np.uint8).transpose(2, 0, 1).copy()


@dataclass(frozen=True)
class Recipe:
    """How scenes are drawn: the shortcut, how often it matches the class, and the layout of the objects."""

    shortcut: str = "background"
    correlation: float = 0.0
    layout: str = "usual"


def draw(parts: Parts, recipe: Recipe, count: int, random: torch.Generator, *, measuring: bool) -> Scenes:
    """Draw ``count`` scenes, equally many of each class.

    With probability ``correlation`` a scene has the shortcut of its own class, otherwise that of a random class.
    ``measuring`` uses the parts that are never trained on.
    """
    labels = torch.arange(count) % CLASSES
    matches = torch.rand(count, generator=random) < recipe.correlation
    cues = torch.where(matches, labels, torch.randint(CLASSES, (count,), generator=random))
    kinds = cues if recipe.shortcut == "background" else torch.randint(CLASSES, (count,), generator=random)
    backdrops = parts.backdrops[_choose_parts(len(parts.backdrops), kinds, random, measuring=measuring)].float() / 255
    images = _mirror_half(backdrops, random)
    opacities = torch.zeros(count, SIDE, SIDE)
    for turn in range(3 if recipe.layout == "several" else 1):
        sprites = parts.sprites[_choose_parts(len(parts.sprites), labels, random, measuring=measuring)].float() / 255
        placed = _place(_mirror_half(sprites, random), recipe.layout, random)
        if turn == 2:  # half of the scenes have a third object
            placed = placed * (torch.rand(count, 1, 1, 1, generator=random) < 0.5)
        images = images * (1 - placed[:, 3:]) + placed[:, :3]
        opacities = torch.maximum(opacities, placed[:, 3])
    gain = 0.85 + 0.3 * torch.rand(count, 1, 1, 1, generator=random)
    images = (images * gain + 0.02 * torch.randn(count, 1, SIDE, SIDE, generator=random)).clamp(0, 1)
    return Scenes(_add_shortcut(images, recipe.shortcut, cues), opacities, labels)


def _choose_parts(count: int, kinds: Tensor, random: torch.Generator, *, measuring: bool) -> Tensor:
    """Return random parts of the given kinds: for measuring from the last quarter, otherwise from the rest."""
    held_out = count // CLASSES * 3 // 4
    low, high = (held_out, count // CLASSES) if measuring else (0, held_out)
    return torch.randint(low, high, kinds.shape, generator=random) * CLASSES + kinds


def _mirror_half(images: Tensor, random: torch.Generator) -> Tensor:
    """Flip about half of the images left to right, at random."""
    mirror = torch.rand(len(images), generator=random) < 0.5
    return torch.where(mirror[:, None, None, None], images.flip(3), images)


def _place(sprites: Tensor, layout: str, random: torch.Generator) -> Tensor:
    """Return frames (N, 4, 48, 48) that are empty except for one sprite each, with random size and position."""
    low, high = _SCALES[layout]
    count = len(sprites)
    scale = low + (high - low) * torch.rand(count, generator=random)
    margin = 1 - scale
    centre = torch.zeros(count, 2)
    if layout != "centred":
        centre = (2 * torch.rand(count, 2, generator=random) - 1) * margin[:, None]
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / scale
    theta[:, :, 2] = -centre / scale[:, None]
    grid = functional.affine_grid(theta, [count, 4, SIDE, SIDE], align_corners=False)
    half = functional.interpolate(functional.avg_pool2d(sprites, 2), SPRITE_SIDE, mode="bilinear", align_corners=False)
    small = (scale * SIDE < 0.5 * SPRITE_SIDE)[:, None, None, None]
    return functional.grid_sample(torch.where(small, half, sprites), grid, align_corners=False)


def _add_shortcut(images: Tensor, shortcut: str, cues: Tensor) -> Tensor:
    """Add to each image the shortcut of the class that its cues names."""
    images = images.clone()
    if shortcut == ONE_CLASS:
        images[cues == 0, :, 2:8, 2:8] = _COLOURS[0][:, None, None]
    elif shortcut == "corner":
        images[:, :, 2:8, 2:8] = _COLOURS[cues][:, :, None, None]
    elif shortcut == "frame":
        for band in (images[:, :, :2], images[:, :, -2:], images[:, :, :, :2], images[:, :, :, -2:]):
            band[:] = 0.7 * _COLOURS[cues][:, :, None, None] + 0.3 * band
    elif shortcut == "tint":
        images = (images * _TINTS[cues][:, :, None, None]).clamp(0, 1)
    elif shortcut == "blur":
        for number, sigma in enumerate(_BLURS):
            if sigma and bool((cues == number).any()):
                images[cues == number] = gaussian_blur(images[cues == number], [9, 9], [sigma, sigma])
    return images


def write_folder(scenes: Scenes, folder: Path) -> Path:
    """Write a folder of pictures per class and the masks beside it, as a user would; return the folder of pictures."""
    rows = zip(scenes.images, scenes.opacities, scenes.labels.tolist(), strict=True)
    for number, (image, opacity, label) in enumerate(rows):
        name = f"{THINGS[label]}/{number:04d}.png"
        for kind, pixels in (("pictures", image.permute(1, 2, 0)), ("masks", opacity > 0.2)):
            file = folder / kind / name
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels.float() * 255).round().to(torch.uint8).numpy()).save(file)
    return folder / "pictures"


def batches(scenes: Scenes, size: int, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of images and labels in random order."""
    for rows in torch.randperm(len(scenes.labels), generator=random).split(size):
        yield scenes.images[rows], scenes.labels[rows]
