"""Hints at shortcuts that nobody named: pictures of a class whose hottest place is the same, and is off the object.

SpRAy (Lapuschkin et al. 2019, arXiv:1902.10178) clusters the maps of a class, and a person looks at the clusters. Here,
pictures form a cluster if the hottest place of their maps is the same third of the frame and their objects are not in
it. A cluster is told only if it cannot be chance: it must be larger than the cluster at the place mirrored left to
right, or, for a place in the middle, more frequent than among the pictures of other classes. It changes no verdict.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import binomtest, fisher_exact
from torch import Tensor
from torch.nn import functional

from camkit.background.data import Item
from camkit.background.deep import DeepFinding, Material
from camkit.background.heat import HeatRow, MapInRegion, heat_in_cells
from camkit.types import Box, Placement

Side: TypeAlias = Literal["left", "middle", "right"]

MIN_PICTURES = 8
"""Pictures that a cluster needs."""

_ALPHA = 0.01
"""The probability of any hint, over all classes and places, if the heat prefers no place."""

_FINE, _WINDOW = 12, 4
"""A map is averaged to a square of this many cells. A place is a window of this many, a third of the frame; windows
overlap by half, so that a mark lies well inside one of them."""

_PLACES = (_FINE - _WINDOW) // (_WINDOW // 2) + 1
"""Places along each side."""

_COVERED = 0.01
"""An object that covers at most this share of a place is not in it."""

_MIRROR: Mapping[Side, Side] = {"left": "right", "right": "left", "middle": "middle"}
_SIDES: tuple[Side, ...] = ("left", "left", "middle", "right", "right")
_HEIGHTS = ("top", "top", "middle", "bottom", "bottom")


@dataclass(frozen=True)
class Spot:
    """A place off the objects that is the hottest one in many pictures of a class.

    Attributes:
        label: the class.
        place: where in the frame, such as "at the bottom left".
        box: the place, in shares of the frame's sides.
        pictures: the pictures whose hottest place it is.
        of: how many pictures of the class have a map.
        compared: how many would be expected, and of what.
        p: the p-value, after the correction for the number of classes and places.
    """

    label: str
    place: str
    box: Box
    pictures: tuple[str, ...]
    of: int
    compared: str
    p: float

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        return (
            f"A hint: {len(self.pictures)} of {self.of} pictures of {self.label} share a hot spot {self.place}, off the"
            f" object ({self.compared}); look there for a mark, such as in {self.pictures[0]}"
        )


@dataclass(frozen=True)
class Spots(DeepFinding):
    """The hot spots, at most one of each class."""

    found: tuple[Spot, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """Each hot spot in words."""
        return tuple(spot.sentence for spot in self.found)

    def as_json(self) -> list[dict[str, Any]]:
        """Return plain values for the report."""
        return [{**asdict(spot), "sentence": spot.sentence} for spot in self.found]


def find(material: Material) -> Spots | None:
    """Find the hot spots of each class; None without regions, or without maps."""
    if not any(row.in_region for row in material.heat.values()):
        return None
    return Spots(tuple(find_spots(material.plan.data.items, material.heat)))


def find_spots(items: Sequence[Item], heat: Mapping[str, HeatRow]) -> list[Spot]:
    """Return the most significant hot spot of each class that has one, the most significant first.

    One picture of each group counts, because pictures of a group may show the same place.
    """
    maps = {item: own for item in items if item.name in heat and (own := heat[item.name].in_region) is not None}
    one_of_each = {item.group: item for item in reversed(maps)}
    by_class: dict[str, dict[str, tuple[int, int] | None]] = defaultdict(dict)
    for item in reversed(one_of_each.values()):
        by_class[item.label][item.name] = hottest_off_object(maps[item])
    tests = len(by_class) * _PLACES * len(_MIRROR)
    spots = []
    for label, places in sorted(by_class.items()):
        others = [place for name, of_class in by_class.items() if name != label for place in of_class.values()]
        tested = (_spot(label, places, others, row, side, tests) for row in range(_PLACES) for side in _MIRROR)
        best = min((spot for spot in tested if spot is not None), key=lambda spot: spot.p, default=None)
        spots += [best] if best is not None and best.p <= _ALPHA else []
    return sorted(spots, key=lambda spot: spot.p)


def hottest_off_object(own: MapInRegion) -> tuple[int, int] | None:
    """Return the hottest place of a map, as row and column; None if a part of the object is in it."""
    everywhere = _everywhere(own.size, own.grid, own.placement)
    cells, within = own.cells.astype(float), own.within.astype(float)
    heat, object_, frame = (_windows(part, own.grid) for part in (cells * everywhere, within, everywhere))
    place = int(heat.argmax())
    if float(object_.flatten()[place]) > _COVERED * float(frame.flatten()[place]):
        return None
    return divmod(place, _PLACES)


@functools.lru_cache(8)
def _everywhere(size: tuple[int, ...], grid: tuple[int, int], placement: Placement) -> Float[np.ndarray, " cells"]:
    return heat_in_cells(torch.ones(size, dtype=torch.bool), grid, placement)


def _windows(cells: Float[np.ndarray, " cells"], grid: tuple[int, int]) -> Float[Tensor, "p p"]:
    fine = functional.adaptive_avg_pool2d(torch.from_numpy(cells).view(1, 1, *grid), _FINE)
    return functional.avg_pool2d(fine, _WINDOW, _WINDOW // 2)[0, 0]


def _spot(
    label: str,
    places: Mapping[str, tuple[int, int] | None],
    others: Sequence[tuple[int, int] | None],
    row: int,
    side: Side,
    tests: int,
) -> Spot | None:
    """Test a place, together with the places just above and below it; None if too few pictures share it."""

    def at(place: tuple[int, int] | None, on: Side) -> bool:
        return place is not None and abs(place[0] - row) <= 1 and _SIDES[place[1]] == on

    sharing = [name for name, place in places.items() if at(place, side)]
    if len(sharing) < MIN_PICTURES:
        return None
    count, total = len(sharing), len(places)
    if side == "middle":
        elsewhere = sum(at(place, side) for place in others)
        table = np.array([[count, total - count], [elsewhere, len(others) - elsewhere]])
        p = float(fisher_exact(table, alternative="greater").pvalue)
        compared = f"{elsewhere} of {len(others)} pictures of other classes do"
    else:
        mirrored = sum(at(place, _MIRROR[side]) for place in places.values())
        p = float(binomtest(count, count + mirrored, alternative="greater").pvalue)
        compared = f"{mirrored} have one on the other side"
    mean = round(float(np.mean([place[0] for name in sharing if (place := places[name]) is not None])))
    return Spot(label, _in_words(mean, side), _box(mean, side), tuple(sharing), total, compared, min(1.0, tests * p))


def _in_words(row: int, side: Side) -> str:
    """Name a place.

    >>> _in_words(4, "left"), _in_words(2, "middle"), _in_words(2, "right")
    ('at the bottom left', 'in the middle', 'at the right')
    """
    names = [name for name in (_HEIGHTS[row], side) if name != "middle"]
    return f"at the {' '.join(names)}" if names else "in the middle"


def _box(row: int, side: Side) -> Box:
    """Return the place in shares of the frame: a third of it, or half of it at the sides, where two columns count."""
    left, right = {"left": (0.0, 0.5), "middle": (1 / 3, 2 / 3), "right": (0.5, 1.0)}[side]
    top = row * _WINDOW / 2 / _FINE
    return Box(left, top, right, top + _WINDOW / _FINE)
