"""Which pictures the experiment is made with: a stratified random sample, the same for the same seed."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

from camkit.background.values import Item


def stratified(items: Sequence[Item], per_class: int, most: int, seed: int) -> list[Item]:
    """Draw up to so many pictures of each class, and at most so many in all, in equal shares, of each at least one.

    A picture's place in the draw depends on its name and the seed alone: adding others does not exchange it.
    """
    by_class: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_class[item.label].append(item)
    if not by_class:
        return []
    share = max(1, min(per_class, most // len(by_class)))
    chosen = [
        one for of_class in by_class.values() for one in sorted(of_class, key=lambda one: _lot(one, seed))[:share]
    ]
    return sorted(chosen, key=lambda item: (item.label, item.name))


def _lot(item: Item, seed: int) -> tuple[int, str]:
    return zlib.crc32(f"{seed} {item.name}".encode(errors="surrogateescape")), item.name
