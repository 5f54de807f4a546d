"""Draw the experiment's pictures: a stratified random sample that is the same for the same seed."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

from camkit.background.values import Item


def stratified(items: Sequence[Item], per_class: int, most: int, seed: int) -> list[Item]:
    """Draw at most ``per_class`` pictures of each class and about ``most`` in total, with equal shares.

    Each class keeps at least one picture, even if the total then exceeds ``most``. A picture's rank depends only on its
    name and the seed, so adding pictures does not reshuffle the others.
    """
    by_class: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_class[item.label].append(item)
    if not by_class:
        return []
    share = max(1, min(per_class, most // len(by_class)))
    sample = [
        item for members in by_class.values() for item in sorted(members, key=lambda item: _rank(item, seed))[:share]
    ]
    return sorted(sample, key=lambda item: (item.label, item.name))


def _rank(item: Item, seed: int) -> tuple[int, str]:
    return zlib.crc32(f"{seed} {item.name}".encode(errors="surrogateescape")), item.name
