"""Maps that know nothing about the model. A map that is no better than these shows nothing about the model.

A single picture's value says little on its own: how high insertion can be depends on the picture, the fill and the
network. So every table has these rows.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from camkit.engine.heatmap import enlarge
from camkit.metrics.curves import hot_sets
from camkit.metrics.heat import Heat, pooled
from camkit.metrics.registry import UndefinedError

ScoresWithout: TypeAlias = Callable[[Bool[Tensor, "m *size"]], Float[np.ndarray, " m"]]
"""A function from masks, True where pixels are removed, to the scores of the picture without these pixels."""

GRID = 7
"""Cells along each axis of the reference maps: the grid of the usual networks at 224 pixels. Heat that is scattered
over single pixels would break any picture, and be a baseline that is too easy to beat."""

SIGMA = 0.25
"""Standard deviation of the centred blob as a share of each side."""


def grid_of(size: Sequence[int]) -> tuple[int, ...]:
    """Return the grid of the reference maps for an input of this size."""
    return tuple(min(GRID, side) for side in size)


def random_map(size: tuple[int, ...], seed: int | Sequence[int] = 0) -> Float[Tensor, "*size"]:
    """Return uniform random cells on a grid of 7 x 7, enlarged as heatmaps are; 0..1.

    >>> random_map((14, 14), seed=1).shape
    torch.Size([14, 14])
    """
    cells = np.random.default_rng(seed).uniform(size=grid_of(size)).astype(np.float32)
    return _scaled(enlarge(torch.from_numpy(cells)[None], size)[0])


def centred_map(size: tuple[int, ...]) -> Float[Tensor, "*size"]:
    """Return a Gaussian in the middle of the picture, SIGMA of each side wide; 0..1.

    Photographers put objects into the middle, so it is a strong baseline.
    """
    blob = torch.ones(())
    for side in size:
        places = (torch.arange(side) + 0.5) / side - 0.5
        blob = blob[..., None] * torch.exp(-((places / SIGMA) ** 2) / 2)
    return _scaled(blob)


def colours_of(picture: Float[Tensor, "c *size"]) -> Float[Tensor, "k c"]:
    """Return the single colours of a picture: each channel alone at its largest and at its smallest value, and all.

    Channels range from the smallest to the largest value of the picture. For RGB these are the 8 corners of the cube:
    black, white, red, green, blue, cyan, magenta and yellow; for grey pictures, black and white.
    """
    channels = len(picture)
    low, high = picture.flatten(1).amin(1), picture.flatten(1).amax(1)
    alone = torch.eye(channels, dtype=torch.bool)
    corners = torch.cat([torch.zeros(1, channels, dtype=torch.bool), alone])
    corners = torch.cat([corners, ~corners]).unique(dim=0)
    return torch.where(corners, high, low)


def colour_map(picture: Float[Tensor, "c *size"], colour: Float[Tensor, " c"]) -> Float[Tensor, "*size"]:
    """Return how near each cell of a 7 x 7 grid is to a colour: 1 at the nearest, 0 at the farthest; enlarged.

    The distance of a pixel is Euclidean, in the units of the model's input; a cell has the mean of its pixels.
    """
    distance = (picture - colour.reshape(-1, *[1] * (picture.dim() - 1))).norm(dim=0)
    size = tuple(distance.shape)
    cells = pooled(-distance, grid_of(size))
    return _scaled(enlarge((cells - cells.amin())[None], size)[0])


def reference_maps(
    picture: Float[Tensor, "c *size"], seed: int, without: ScoresWithout | None = None
) -> dict[str, Heat]:
    """Return the reference maps of a picture, as what an Evaluator judges.

    "random" differs between pictures and between seeds; "centre" is the blob. "colour" is the best single colour: of
    the maps of all colours, the one whose hotter half keeps the score highest and loses it most when it is removed
    (SRG in two steps, which takes two passes for each colour). If ``without`` is None, there is no "colour".
    """
    size = tuple(picture.shape[1:])

    def random(changed: Tensor) -> Tensor:
        # With one random map for all pictures, chance would not average out over a folder. The map would also be
        # coherent, since a changed picture would have the same one.
        return random_map(size, (seed, zlib.crc32(changed.contiguous().numpy().tobytes())))

    def centre(changed: Tensor) -> Tensor:  # noqa: ARG001 - every maker takes the picture
        return centred_map(size)

    makers: dict[str, Callable[[Tensor], Tensor]] = {"random": random, "centre": centre}
    problem = None
    if without is not None:
        colours = colours_of(picture)
        halves = torch.cat([hot_sets(colour_map(picture, colour), [0.5]) for colour in colours])
        try:
            best = int((without(~halves) - without(halves)).argmax())
        except UndefinedError as error:  # the model has no score for a changed picture
            problem, best = error, 0
        makers["colour"] = functools.partial(colour_map, colour=colours[best])
    return {
        name: Heat(
            make(picture),
            name,
            remake=functools.partial(_remade, make),
            problem=problem if name == "colour" else None,
        )
        for name, make in makers.items()
    }


def _remade(make: Callable[[Tensor], Tensor], pictures: Tensor, model: nn.Module | None) -> Sequence[Tensor]:  # noqa: ARG001
    """Return the reference maps of other pictures; they depend on no model."""
    return [make(picture.contiguous()) for picture in pictures]


def _scaled(values: Float[Tensor, "*size"]) -> Float[Tensor, "*size"]:
    """Divide a map without negative values by its maximum."""
    largest = values.max()
    return values / torch.where(largest > 0, largest, 1)
