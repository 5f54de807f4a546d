"""The lab's pictures: drawn objects on drawn backgrounds, with a shortcut that goes along with the class."""

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

from camkit.demo.scenes.drawing import BACKGROUNDS, THINGS, paint_backdrop, paint_thing

SIDE = 48
SPRITE = 48
CLASSES = len(THINGS)
SPRITES, BACKDROPS = 4800, 1600
DRAWN_AT = 128

SHORTCUTS = ("background", "corner", "frame", "tint", "blur")
ONE_CLASS = "watermark"
"""A corner mark that goes along with the first class alone; the others have none."""

LAYOUTS = ("usual", "tiny", "filling", "centred", "several")
_SCALES = {
    "usual": (0.35, 0.7),
    "tiny": (0.2, 0.3),
    "filling": (0.9, 1.0),
    "centred": (0.35, 0.65),
    "several": (0.28, 0.42),
}
_COLOURS = torch.tensor([(0.9, 0.15, 0.1), (0.1, 0.75, 0.2), (0.15, 0.25, 0.95), (0.95, 0.85, 0.1)])
_TINTS = torch.tensor([(1.25, 0.95, 0.8), (0.85, 1.2, 0.9), (0.85, 0.95, 1.3), (1.15, 1.15, 0.75)])
_BLURS = (0.0, 0.6, 1.1, 1.8)


@dataclass(frozen=True)
class Parts:
    """What scenes are put together from, uint8.

    ``sprites`` (N, 4, 48, 48) are objects cut to their bounding square, colour times cover, and cover; ``backdrops``
    (M, 3, 48, 48). Number i is of class, or kind, i % 4. The last quarter of either is kept for measuring.
    """

    sprites: Tensor
    backdrops: Tensor


@dataclass(frozen=True)
class Drawn:
    """Pictures (N, 3, 48, 48) in 0..1, the objects' cover (N, 48, 48), and labels (N,)."""

    images: Tensor
    covers: Tensor
    labels: Tensor


def load_parts(folder: Path, workers: int) -> Parts:
    """Draw the parts, or read them where they have been drawn before."""
    file = folder / "parts.npz"
    if not file.exists():
        with ProcessPoolExecutor(workers, get_context("spawn"), cv2.setNumThreads, (1,)) as pool:
            sprites = np.stack(list(pool.map(_sprite, range(SPRITES), chunksize=50)))
            backdrops = np.stack(list(pool.map(_backdrop, range(BACKDROPS), chunksize=50)))
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(file, sprites=sprites, backdrops=backdrops)
    with np.load(file) as found:
        return Parts(torch.from_numpy(found["sprites"]), torch.from_numpy(found["backdrops"]))


def _sprite(number: int) -> NDArray[np.uint8]:
    colour, cover = paint_thing(np.random.default_rng([5, number]), THINGS[number % CLASSES], DRAWN_AT)
    rows, columns = np.flatnonzero(cover.any(1)), np.flatnonzero(cover.any(0))
    both = np.dstack([colour, cover])[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    side = max(both.shape[:2])
    square = np.zeros((side, side, 4), np.float32)
    top, left = (side - both.shape[0]) // 2, (side - both.shape[1]) // 2
    square[top : top + both.shape[0], left : left + both.shape[1]] = both
    resized = cv2.resize(square, (SPRITE, SPRITE), interpolation=cv2.INTER_AREA)
    return _bytes(resized)


def _backdrop(number: int) -> NDArray[np.uint8]:
    return _bytes(paint_backdrop(np.random.default_rng([6, number]), BACKGROUNDS[number % CLASSES], SIDE))


def _bytes(picture: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.round(np.clip(picture, 0, 1) * 255).astype(np.uint8).transpose(2, 0, 1).copy()


@dataclass(frozen=True)
class Recipe:
    """How scenes are drawn: which shortcut goes along with the class, how often, and how objects lie."""

    shortcut: str = "background"
    correlation: float = 0.0
    layout: str = "usual"


def draw(parts: Parts, recipe: Recipe, count: int, random: torch.Generator, *, measuring: bool) -> Drawn:
    """Draw scenes with equally many of each class.

    With probability ``correlation`` a scene's shortcut is that of its class, else that of any class.
    ``measuring`` uses parts that are never trained on.
    """
    labels = torch.arange(count) % CLASSES
    cued = torch.rand(count, generator=random) < recipe.correlation
    cue = torch.where(cued, labels, torch.randint(CLASSES, (count,), generator=random))
    kinds = cue if recipe.shortcut == "background" else torch.randint(CLASSES, (count,), generator=random)
    backdrops = parts.backdrops[_picked(len(parts.backdrops), kinds, random, measuring=measuring)].float() / 255
    images = _mirrored(backdrops, random)
    covers = torch.zeros(count, SIDE, SIDE)
    for turn in range(3 if recipe.layout == "several" else 1):
        sprites = parts.sprites[_picked(len(parts.sprites), labels, random, measuring=measuring)].float() / 255
        placed = _placed(_mirrored(sprites, random), recipe.layout, random)
        if turn == 2:  # two objects, or three
            placed = placed * (torch.rand(count, 1, 1, 1, generator=random) < 0.5)
        images = images * (1 - placed[:, 3:]) + placed[:, :3]
        covers = torch.maximum(covers, placed[:, 3])
    gain = 0.85 + 0.3 * torch.rand(count, 1, 1, 1, generator=random)
    images = (images * gain + 0.02 * torch.randn(count, 1, SIDE, SIDE, generator=random)).clamp(0, 1)
    return Drawn(_marked(images, recipe.shortcut, cue), covers, labels)


def _picked(count: int, kinds: Tensor, random: torch.Generator, *, measuring: bool) -> Tensor:
    """Choose parts of the given kinds: from the first three quarters for training, from the rest for measuring."""
    border = count // CLASSES * 3 // 4
    low, high = (border, count // CLASSES) if measuring else (0, border)
    return torch.randint(low, high, kinds.shape, generator=random) * CLASSES + kinds


def _mirrored(images: Tensor, random: torch.Generator) -> Tensor:
    mirror = torch.rand(len(images), generator=random) < 0.5
    return torch.where(mirror[:, None, None, None], images.flip(3), images)


def _placed(sprites: Tensor, layout: str, random: torch.Generator) -> Tensor:
    """Return the sprites (N, 4, 48, 48) at random sizes and places of empty frames (N, 4, 48, 48)."""
    low, high = _SCALES[layout]
    count = len(sprites)
    scale = low + (high - low) * torch.rand(count, generator=random)
    room = 1 - scale
    centre = torch.zeros(count, 2)
    if layout != "centred":
        centre = (2 * torch.rand(count, 2, generator=random) - 1) * room[:, None]
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / scale
    theta[:, :, 2] = -centre / scale[:, None]
    grid = functional.affine_grid(theta, [count, 4, SIDE, SIDE], align_corners=False)
    half = functional.interpolate(functional.avg_pool2d(sprites, 2), SPRITE, mode="bilinear", align_corners=False)
    small = (scale * SIDE < 0.5 * SPRITE)[:, None, None, None]
    return functional.grid_sample(torch.where(small, half, sprites), grid, align_corners=False)


def _marked(images: Tensor, shortcut: str, cue: Tensor) -> Tensor:
    """Add the shortcut that each picture's cue asks for."""
    images = images.clone()
    if shortcut == ONE_CLASS:
        images[cue == 0, :, 2:8, 2:8] = _COLOURS[0][:, None, None]
    elif shortcut == "corner":
        images[:, :, 2:8, 2:8] = _COLOURS[cue][:, :, None, None]
    elif shortcut == "frame":
        for band in (images[:, :, :2], images[:, :, -2:], images[:, :, :, :2], images[:, :, :, -2:]):
            band[:] = 0.7 * _COLOURS[cue][:, :, None, None] + 0.3 * band
    elif shortcut == "tint":
        images = (images * _TINTS[cue][:, :, None, None]).clamp(0, 1)
    elif shortcut == "blur":
        for number, sigma in enumerate(_BLURS):
            if sigma and bool((cue == number).any()):
                images[cue == number] = gaussian_blur(images[cue == number], [9, 9], [sigma, sigma])
    return images


def write_folder(drawn: Drawn, folder: Path) -> Path:
    """Write pictures and masks as a user has them: a folder per class, masks beside; return the pictures' folder."""
    for number, (image, cover, label) in enumerate(zip(drawn.images, drawn.covers, drawn.labels.tolist(), strict=True)):
        name = f"{THINGS[label]}/{number:04d}.png"
        for place, pixels in (("pictures", image.permute(1, 2, 0)), ("masks", cover > 0.2)):
            file = folder / place / name
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels.float() * 255).round().to(torch.uint8).numpy()).save(file)
    return folder / "pictures"


def batches(drawn: Drawn, size: int, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk through pictures and labels in random order."""
    for rows in torch.randperm(len(drawn.labels), generator=random).split(size):
        yield drawn.images[rows], drawn.labels[rows]
