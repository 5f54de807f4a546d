"""Scenes of the planted-truth lab: small drawn pictures of which it is known what makes the class.

Everything is drawn by tensor operations on the device, thousands of pictures at once. Each object has a slot of a 3 x 3
grid for itself, so that no object covers another, and its pixels are known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 64
"""Width and height of a picture in pixels."""

CAUSES = {"colour": 5, "texture": 5, "mark": 5, "background": 5, "relation": 4}
"""What makes the class, with the number of classes.

colour: the colour of the one ball among other shapes; these have the colours of the other classes.
texture: the texture of the one object that is not plain.
mark: the colour of a mark of about 20 pixels, anywhere in the picture, among objects in dull colours.
background: the tint or the texture of what lies behind the objects.
relation: where the ball (red) lies, seen from the square (green): left, right, above, below.
"""

PALETTE = ((0.9, 0.15, 0.1), (0.1, 0.75, 0.2), (0.15, 0.3, 0.95), (0.95, 0.85, 0.1), (0.85, 0.2, 0.85))
SHAPES = ("ball", "square", "triangle", "plus", "bar")
TEXTURES = ("rows", "columns", "slanting stripes", "checks", "dots")
MEAN, STD = 0.45, 0.25
"""The normalisation of the pictures, the same for all colours."""

_GRID = 3
_HALF_SLOT = SIDE / _GRID / 2
_RADII = (6.5, 9.5)
_MARK_RADII = (2.8, 3.6)
_NOISE = 0.04
_AT_ONCE = {"cuda": 4096, "cpu": 256}
"""Scenes that are drawn together: as many as the memory of a device takes without strain."""


@dataclass(frozen=True)
class Scenes:
    """Pictures and what makes their class.

    Attributes:
        images: (N, 3, 64, 64) uint8.
        labels: (N, P) classes. P is 1; in pictures that show two classes, it is 2.
        truths: (N, P, 64, 64), the pixels that make the class.
    """

    images: Tensor
    labels: Tensor
    truths: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def rows(self, chosen: Tensor) -> Scenes:
        """Return some of the scenes, by their numbers or by a mask (N,)."""
        return Scenes(self.images[chosen], self.labels[chosen], self.truths[chosen])


@dataclass(frozen=True)
class _Objects:
    """K objects of each of N scenes, all (N, K); ``texture`` is -1 for a plain object."""

    shape: Tensor
    colour: Tensor
    texture: Tensor
    small: Tensor
    present: Tensor


def normalised(images: Tensor) -> Tensor:
    """Return pictures (N, 3, 64, 64) of uint8 as a network's input."""
    return (images.float() / 255 - MEAN) / STD


def has_pairs(cause: str) -> bool:
    """Tell whether a picture can show two classes of this cause."""
    return cause != "relation"


def draw(cause: str, count: int, random: torch.Generator, *, pair: bool = False) -> Scenes:
    """Draw scenes on the generator's device.

    Args:
        cause: a key of ``CAUSES``.
        count: how many.
        random: decides everything.
        pair: show two different classes in each picture: two balls, two textured objects, two marks, or two halves of a
            background.
    """
    if pair and not has_pairs(cause):
        raise ValueError(f"a picture cannot show two classes of the cause {cause!r}")
    sizes = [_AT_ONCE[random.device.type]] * (count // _AT_ONCE[random.device.type])
    rest = count - sum(sizes)
    parts = [_draw(cause, size, random, 1 + pair) for size in (*sizes, *[rest] * (rest > 0))]
    fields = zip(*((part.images, part.labels, part.truths) for part in parts), strict=True)
    images, labels, truths = (torch.cat(field) for field in fields)
    return Scenes(images, labels, truths)


def _draw(cause: str, count: int, random: torch.Generator, shown: int) -> Scenes:
    labels = _labels(CAUSES[cause], count, shown, random)
    objects = _objects(cause, labels, random)
    centres = _centres(cause, labels, objects, random)
    halves = _halves(count, shown, random)
    images = _background(cause, labels, halves, random)
    owner = torch.full((count, SIDE, SIDE), -1, dtype=torch.int8, device=random.device)
    for number in range(objects.shape.shape[1]):
        mask, inside = _painted(objects, centres, number, random)
        images = torch.where(mask[:, None], inside, images)
        owner = owner.masked_fill(mask, number)
    if cause == "background":
        truths = halves & (owner < 0)[:, None]
    elif cause == "relation":
        truths = ((owner == 0) | (owner == 1))[:, None]
    else:
        truths = torch.stack([owner == number for number in range(shown)], 1)
    gain = 0.8 + 0.35 * _uniform(random, count, 1, 1, 1)
    noise = torch.randn(images.shape, generator=random, device=random.device)
    pixels = ((images * gain + _NOISE * noise).clamp(0, 1) * 255).round().to(torch.uint8)
    return Scenes(pixels, labels, truths)


def _uniform(random: torch.Generator, *size: int) -> Tensor:
    return torch.rand(size, generator=random, device=random.device)


def _whole(random: torch.Generator, below: int, *size: int) -> Tensor:
    return torch.randint(below, size, generator=random, device=random.device)


def _labels(classes: int, count: int, shown: int, random: torch.Generator) -> Tensor:
    """Return (N, P) different classes."""
    return _uniform(random, count, classes).argsort(1)[:, :shown]


def _halves(count: int, shown: int, random: torch.Generator) -> Tensor:
    """Return (N, P, 64, 64): the whole picture, or its parts on either side of an upright or level border."""
    if shown == 1:
        return torch.ones(count, 1, SIDE, SIDE, dtype=torch.bool, device=random.device)
    border = 24 + _whole(random, 17, count, 1, 1)
    along = torch.arange(SIDE, device=random.device).expand(count, SIDE, SIDE)
    upright = _uniform(random, count, 1, 1) < 0.5
    first = torch.where(upright, along, along.mT) < border
    return torch.stack([first, ~first], 1)


def _objects(cause: str, labels: Tensor, random: torch.Generator) -> _Objects:
    """Return the objects of the scenes, those that make the class first; the last one is in half of the scenes."""
    count, shown = labels.shape
    classes = CAUSES[cause]
    telling = {"background": 0, "relation": 2}.get(cause, shown)
    number = telling + 4 - (cause == "relation")
    palette = torch.tensor(PALETTE, device=random.device)
    shape = _whole(random, len(SHAPES), count, number)
    colours = _whole(random, len(PALETTE), count, number)
    texture = torch.full((count, number), -1, device=random.device)
    small = torch.zeros(count, number, dtype=torch.bool, device=random.device)
    if cause == "colour":
        others = _uniform(random, count, number, classes)
        others = others.scatter(2, labels[:, None].expand(count, number, shown), -1.0).argmax(2)
        colours = torch.cat([labels, others[:, shown:]], 1)
        shape = 1 + shape % (len(SHAPES) - 1)
        shape[:, :shown] = 0
    elif cause == "relation":
        shape = 2 + shape % (len(SHAPES) - 2)
        shape[:, 0], shape[:, 1] = 0, 1
        # Ball and square have colours of their own. With any colours, a small ViT takes too long to learn the relation.
        colours = 2 + colours % (len(PALETTE) - 2)
        colours[:, 0], colours[:, 1] = 0, 1
    elif cause == "texture":
        texture[:, :shown] = labels
    elif cause == "mark":
        colours[:, :shown] = labels
        shape[:, :shown] = SHAPES.index("plus")
        small[:, :shown] = True
    colour = palette[colours] + 0.06 * (2 * _uniform(random, count, number, 3) - 1)
    if cause == "mark":
        dull = 0.5 + 0.2 * (2 * _uniform(random, count, number, 1) - 1) + 0.06 * _uniform(random, count, number, 3)
        colour = torch.where(small[..., None], colour, dull)
    present = torch.ones(count, number, dtype=torch.bool, device=random.device)
    present[:, -1] = _uniform(random, count) < 0.5
    return _Objects(shape, colour.clamp(0, 1), texture, small, present)


def _centres(cause: str, labels: Tensor, objects: _Objects, random: torch.Generator) -> Tensor:
    """Return (N, K, 4): the column and row of each object's centre, its radius, and its angle."""
    count, number = objects.shape.shape
    order = _uniform(random, count, _GRID * _GRID)
    if cause == "relation":
        ball, square = _related_slots(labels[:, 0], random)
        order = order.scatter(1, square[:, None], -1.0).scatter(1, ball[:, None], -2.0)
    slots = order.argsort(1)[:, :number]
    low = torch.where(objects.small, _MARK_RADII[0], _RADII[0])
    high = torch.where(objects.small, _MARK_RADII[1], _RADII[1])
    radius = low + (high - low) * _uniform(random, count, number)
    free = (_HALF_SLOT - radius)[..., None] * (2 * _uniform(random, count, number, 2) - 1)
    places = torch.stack([slots % _GRID, slots // _GRID], 2)
    centre = (places + 0.5) * 2 * _HALF_SLOT - 0.5 + free
    angle = 0.35 * (2 * _uniform(random, count, number, 1) - 1)
    return torch.cat([centre, radius[..., None], angle], 2)


def _related_slots(labels: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the slots of ball and square: in one row for left and right, in one column for above and below."""
    count = len(labels)
    firsts, seconds = torch.tensor([(0, 1), (0, 2), (1, 2)], device=random.device)[_whole(random, 3, count)].unbind(1)
    ball_first = labels % 2 == 0
    ball, square = torch.where(ball_first, firsts, seconds), torch.where(ball_first, seconds, firsts)
    line = _whole(random, _GRID, count)
    level = labels < 2
    return tuple(torch.where(level, _GRID * line + place, _GRID * place + line) for place in (ball, square))  # type: ignore[return-value]


def _background(cause: str, labels: Tensor, halves: Tensor, random: torch.Generator) -> Tensor:
    """Return (N, 3, 64, 64): grey with a little tint and a slope, and for the cause "background" what makes a class."""
    count = len(labels)
    along = torch.linspace(-1, 1, SIDE, device=random.device)
    slope = 0.08 * (2 * _uniform(random, count, 2, 1, 1) - 1)
    grey = 0.4 + 0.2 * _uniform(random, count, 1, 1, 1)
    images = grey + 0.03 * (2 * _uniform(random, count, 3, 1, 1) - 1)
    images = images + (slope[:, 0] * along + slope[:, 1] * along[:, None])[:, None]
    if cause != "background":
        return images
    tints = torch.zeros(CAUSES[cause], 3, device=random.device)
    tints[:3] = torch.tensor([(0.1, -0.05, -0.05), (-0.05, 0.1, -0.05), (-0.05, -0.05, 0.1)])
    shift = _whole(random, 12, count, 2, 1, 1)
    rows, columns = _pixels(random.device)
    stripes = _texture(2, rows + shift[:, 0], columns + shift[:, 1], 2)
    dots = _texture(4, rows + shift[:, 0], columns + shift[:, 1], 2)
    for number in range(labels.shape[1]):
        label = labels[:, number, None, None]
        pattern = torch.where(label == 3, stripes, dots) * (label >= 3)
        change = tints[labels[:, number]][:, :, None, None] - 0.15 * pattern[:, None]
        images = images + change * halves[:, number, None]
    return images


def _pixels(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each pixel, (64, 1) and (64,)."""
    along = torch.arange(SIDE, device=device)
    return along[:, None], along


def _painted(objects: _Objects, centres: Tensor, number: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return an object's pixels (N, 64, 64) in each scene, and the colours (N, 3, 64, 64) that it has there."""
    across, down, radius, angle = centres[:, number, :, None, None].unbind(1)
    rows, columns = _pixels(random.device)
    right, below = (columns - across) / radius, (rows - down) / radius
    cosine, sine = angle.cos(), angle.sin()
    mask = _inside(objects.shape[:, number], cosine * right + sine * below, cosine * below - sine * right)
    mask = mask & objects.present[:, number, None, None]
    colour = objects.colour[:, number, :, None, None]
    shift = _whole(random, 12, len(mask), 2, 1, 1)
    texture = objects.texture[:, number]
    dark = torch.zeros(len(mask), SIDE, SIDE, dtype=torch.bool, device=random.device)
    for kind in range(len(TEXTURES)):
        pattern = _texture(kind, rows + shift[:, 0], columns + shift[:, 1], 1)
        dark = dark | (pattern & (texture == kind)[:, None, None])
    return mask, torch.where(dark[:, None], 0.3 * colour, colour)


def _inside(shape: Tensor, right: Tensor, below: Tensor) -> Tensor:
    """Tell which pixels (N, 64, 64) lie inside shapes of radius 1 whose numbers are (N,)."""
    inside = (
        right.square() + below.square() < 1,
        torch.maximum(right.abs(), below.abs()) < 0.78,
        (below < 0.7) & (right.abs() < 0.5 * (below + 0.95)),
        torch.minimum(right.abs(), below.abs()).lt(0.3) & (torch.maximum(right.abs(), below.abs()) < 0.95),
        (right.abs() < 0.95) & (below.abs() < 0.38),
    )
    kinds = [pixels & (shape == number)[:, None, None] for number, pixels in enumerate(inside)]
    return torch.stack(kinds).any(0)


def _texture(kind: int, rows: Tensor, columns: Tensor, scale: int) -> Tensor:
    """Return the dark pixels of a texture; ``scale`` 1 has stripes of 2 pixels."""
    if kind == 0:
        dark = (rows // (2 * scale)) % 2 + 0 * columns
    elif kind == 1:
        dark = (columns // (2 * scale)) % 2 + 0 * rows
    elif kind == 2:
        dark = ((rows + columns) // (3 * scale)) % 2
    elif kind == 3:
        dark = (rows // (3 * scale) + columns // (3 * scale)) % 2
    else:
        dark = ((rows % (5 * scale) < 2 * scale) & (columns % (5 * scale) < 2 * scale)).long()
    return dark == 1
