"""Evidence 2: what the model does when the picture changes.

For each picture of the sample a handful of edits is made, each is shown to the model, and what it answers is a row.
With regions: the object pasted on backgrounds of its own class and of others, the object removed, noise on either.
Without: the outer ring exchanged for that of its own class and of others, the middle made grey.

Edits are named ``same.FILL.NUMBER.NAME`` and ``other.FILL.NUMBER.NAME``, NAME being that of the picture whose
background it is; ``removed.FILL``; ``edited.WHAT``; and ``noise.WHAT``.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from camkit.background import edits
from camkit.background.statistics import LEAST_GROUPS
from camkit.background.values import Item
from camkit.engine.streams import Task, in_order
from camkit.images.regions import Shades

NOISE = 0.25
"""Standard deviation of the noise, as a share of the brightness from black to white (Moayeri et al. 2022)."""

_BLOCKS = 14
"""Blocks along a side, of which as many are edited as the object has pixels."""


@dataclass(frozen=True, eq=False)
class Seen:
    """One picture of the sample as the model sees it.

    Attributes:
        tensor: the model's input (C, H, W).
        shades: what the preprocessing makes of black and white.
        region: how much of each pixel the picture's own objects cover, 0..1; None without regions.
        hole: the boxes of all objects of the classes that are checked, a little widened; None without regions.
    """

    tensor: Float[Tensor, "c h w"]
    shades: Shades
    region: Float[Tensor, "h w"] | None = None
    hole: Bool[Tensor, "h w"] | None = None

    def without(self, fill: str) -> Float[Tensor, "c h w"]:
        """Return the picture with its objects' boxes filled; where there is no texture to take, smoothly."""
        return self._filled[fill]

    @functools.cached_property
    def _filled(self) -> dict[str, Float[Tensor, "c h w"]]:
        """The picture without its objects, for each fill: it is a background of several others."""
        assert self.hole is not None
        unknown = self.hole | ~self.shades.view
        smooth = edits.blurred(self.tensor, unknown)
        filled = {fill: function(self.tensor, unknown) for fill, function in edits.FILLS.items()}
        removed = self.hole & self.shades.view
        return {
            fill: torch.where(removed, smooth if made is None else made, self.tensor) for fill, made in filled.items()
        }

    @functools.cached_property
    def has_rest(self) -> bool:
        """Whether enough of the picture lies beside its objects to be called a background."""
        return self.hole is not None and edits.largest_rectangle(self.hole | ~self.shades.view) is not None


@dataclass(frozen=True)
class Partners:
    """On whose background a picture is shown: of its own class, and of others; the first that serve are taken."""

    same: tuple[Item, ...] = ()
    other: tuple[Item, ...] = ()


SPARE = 4
"""Partners drawn for each that is wanted, at most: some cannot be read, or have nothing beside their object."""


def draw_partners(sample: Sequence[Item], backgrounds: Sequence[Item], wanted: int, seed: int) -> dict[Item, Partners]:
    """Draw each picture's partners from the backgrounds: of another group, and for the second kind of another class.

    The pictures of a class are shown on backgrounds of the other classes in turn, and on each class's in a random order
    without repeating one before all have served; classes with pictures of a few groups serve only where there are no
    others. None are drawn where a kind has no candidate.
    """
    by_class: dict[str, list[Item]] = defaultdict(list)
    for one in backgrounds:
        by_class[one.label].append(one)
    enough = [name for name, of_class in by_class.items() if len({one.group for one in of_class}) >= LEAST_GROUPS]
    shuffled: dict[tuple[str, str], list[Item]] = {}
    served, turns = Counter[tuple[str, str]](), Counter[str]()

    def next_one(item: Item, label: str) -> Item | None:
        pair = (item.label, label)
        if pair not in shuffled:
            order = own_generator(f"{item.label}\0{label}", seed).permutation(len(by_class[label]))
            shuffled[pair] = [by_class[label][number] for number in order.tolist()]
        for _ in shuffled[pair]:
            served[pair] += 1
            found = shuffled[pair][served[pair] % len(shuffled[pair])]
            if found.group != item.group:
                return found
        return None

    drawn: dict[Item, Partners] = {}
    for item in sample:
        others = sorted(set(enough) - {item.label}) or sorted(by_class.keys() - {item.label})
        start, turns[item.label] = turns[item.label], turns[item.label] + wanted
        in_turn = [others[(start + step) % len(others)] for step in range(wanted)] if others else []
        same = [next_one(item, item.label) for _ in range(wanted)]
        other = [next_one(item, label) for label in in_turn]
        spare = own_generator(item.name, seed)
        same += [_any_of(by_class[item.label], spare) for _ in range((SPARE - 1) * wanted)]
        other += [_any_of(by_class[others[int(spare.integers(len(others)))]], spare) for _ in same[wanted:] if others]
        own, foreign = ([one for one in kind if one is not None and one.group != item.group] for kind in (same, other))
        drawn[item] = Partners(tuple(own), tuple(foreign)) if own and foreign else Partners()
    return drawn


def _any_of(candidates: Sequence[Item], rng: np.random.Generator) -> Item | None:
    return candidates[int(rng.integers(len(candidates)))] if candidates else None


def own_generator(name: str, seed: int) -> np.random.Generator:
    """Return a picture's own generator of random numbers."""
    return np.random.default_rng([seed, zlib.crc32(name.encode(errors="surrogateescape"))])


Edit = tuple[str, Callable[[], Float[Tensor, "c h w"] | None]]
"""The name of an edit, and what makes it; None where it cannot be made."""


Background = tuple[str, Seen]
"""A partner: its name, and its picture."""


def region_edits(picture: Seen, same: Sequence[Background], other: Sequence[Background], seed: int) -> list[Edit]:
    """List the edits of a picture whose object's region is known; ``seed`` is the picture's own."""
    assert picture.region is not None
    found: list[Edit] = []
    for fill in edits.FILLS:
        for arm, backgrounds in (("same", same), ("other", other)):
            for number, (who, background) in enumerate(backgrounds):
                name = f"{arm}.{fill}.{number}.{who}"
                found.append((name, functools.partial(_on, picture, background, fill)))
        found.append((f"removed.{fill}", functools.partial(picture.without, fill)))
    inside = picture.region > 0.5
    view = picture.shades.view
    found.append(("edited.object", functools.partial(edits.blurred, picture.tensor, inside)))
    found.append(
        ("edited.background", functools.partial(_background_smoothed, picture, view & (picture.region == 0), seed))
    )
    found.append(("noise.object", functools.partial(_noisy, picture, inside, seed)))
    found.append(("noise.background", functools.partial(_noisy, picture, view & ~inside, seed)))
    return found


def ring_edits(picture: Seen, same: Sequence[Background], other: Sequence[Background], share: float) -> list[Edit]:
    """List the edits of a picture of which nothing is known: its middle in the rings of others, its ring alone."""
    outer = edits.ring((picture.tensor.shape[1], picture.tensor.shape[2]), share)
    found: list[Edit] = []
    for arm, rings in (("same", same), ("other", other)):
        for number, (who, around) in enumerate(rings):
            found.append((f"{arm}.ring.{number}.{who}", functools.partial(_ringed, picture, around, outer)))
    found.append(("removed.ring", functools.partial(_grey_middle, picture, outer)))
    return found


def _on(picture: Seen, background: Seen, fill: str) -> Float[Tensor, "c h w"]:
    assert picture.region is not None
    return edits.pasted(picture.tensor, picture.region, background.without(fill))


def _ringed(picture: Seen, around: Seen, outer: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
    return torch.where(outer, around.tensor, picture.tensor)


def _grey_middle(picture: Seen, outer: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
    grey = (picture.shades.black + picture.shades.white) / 2
    return torch.where(outer, picture.tensor, grey)


def _background_smoothed(picture: Seen, allowed: Bool[Tensor, "h w"], seed: int) -> Float[Tensor, "c h w"] | None:
    assert picture.region is not None
    step = max(1, min(allowed.shape) // _BLOCKS)
    chosen = edits.blocks(allowed, float((picture.region > 0.5).sum()), seed, step)
    return None if chosen is None else edits.blurred(picture.tensor, chosen)


def _noisy(picture: Seen, region: Bool[Tensor, "h w"], seed: int) -> Float[Tensor, "c h w"]:
    draws = np.random.default_rng([seed, 1]).standard_normal(picture.tensor.shape, dtype=np.float32)
    strength = NOISE * (picture.shades.white - picture.shades.black)
    return picture.tensor + region * strength * torch.from_numpy(draws)


Answer = dict[str, float | int]
"""What the model said to one edit: the output it named ("answer"), the probability of the picture's own class
("share"), and by how much that class's best logit is above the best of the others ("margin")."""


def run(
    numbers: Sequence[int],
    make: Callable[[int], list[tuple[str, Tensor]]],
    ask: Callable[[Tensor, list[int]], list[Answer]],
    batch_size: int,
    workers: int,
) -> Iterator[tuple[int, dict[str, Answer]]]:
    """Make the edits of each picture, show them to the model in full batches, and give the answers picture by picture.

    Args:
        numbers: the pictures, in order.
        make: from a picture's number to its edits, in another thread.
        ask: from a batch of edits (N, C, H, W), and the numbers of the pictures they are of, to the answers.
        batch_size: edits per pass.
        workers: threads that make edits.
    """

    def tasks() -> Iterator[Task[tuple[int, list[tuple[str, Tensor]]]]]:
        for number in numbers:
            yield functools.partial(_made, number, make), True

    waiting: list[tuple[int, str, Tensor]] = []
    answers: dict[int, dict[str, Answer]] = {}
    sizes: dict[int, int] = {}

    def flush() -> None:
        found = ask(torch.stack([tensor for _, _, tensor in waiting]), [number for number, _, _ in waiting])
        for (number, name, _), answer in zip(waiting, found, strict=True):
            answers[number][name] = answer
        waiting.clear()

    for number, made in in_order(tasks(), workers=workers, ahead=workers + 1):
        sizes[number], answers[number] = len(made), {}
        for name, tensor in made:
            if waiting and (len(waiting) == batch_size or waiting[0][2].shape != tensor.shape):
                flush()
            waiting.append((number, name, tensor))
        yield from _complete(answers, sizes)
    if waiting:
        flush()
    yield from _complete(answers, sizes)


def _made(number: int, make: Callable[[int], list[tuple[str, Tensor]]]) -> tuple[int, list[tuple[str, Tensor]]]:
    return number, make(number)


def _complete(
    answers: dict[int, dict[str, Answer]], sizes: Mapping[int, int]
) -> Iterator[tuple[int, dict[str, Answer]]]:
    for number in [one for one, found in answers.items() if len(found) == sizes[one]]:
        yield number, answers.pop(number)
