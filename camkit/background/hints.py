"""Hints from the heat alone, for data without regions. A hint warns and never fails a model.

There are three: most of the heat lies in the outer ring; in many pictures the same cell is the hottest and the pixels
behind it are the same, as behind a watermark; or the heat stays in place when the picture is mirrored left to right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from camkit.background.data import Item
from camkit.background.heat import HeatInRing, HeatRow
from camkit.background.sanity import MirrorTest
from camkit.kit.statistics import bootstrap_sums, group_numbers, interval

MIN_PICTURES = 10
"""Pictures that a hint needs."""

SAME_CELL = 0.5
"""Share of a class's pictures that must have the same hottest cell before the pixels behind it are compared."""

ALIKE = 0.05
"""Mean difference of brightness (0..1) from the mean patch up to which the pixels behind a cell count as the same."""


def hints(items: Sequence[Item], rows: Mapping[str, HeatRow], mirrored: MirrorTest | None, seed: int) -> list[str]:
    """Return the hints that the heat gives, as sentences."""
    pairs = [(item, ring) for item in items if item.name in rows and (ring := rows[item.name].in_ring) is not None]
    sentences = [*_ring_hints(pairs, seed), *_watermark_hints(pairs)]
    if mirrored is not None and mirrored.stayed > mirrored.followed:
        sentences.append(
            "a hint: the heat stays put when pictures are mirrored left to right (the new maps correlate "
            f"{mirrored.stayed:.2f} with the first maps and {mirrored.followed:.2f} with the first maps mirrored)"
        )
    return sentences


def _ring_hints(pairs: Sequence[tuple[Item, HeatInRing]], seed: int) -> list[str]:
    """Compare the ring's share of the heat with its share of the picture."""
    if len(pairs) < MIN_PICTURES:
        return []
    columns = np.array([(ring.share - ring.area, ring.share, ring.area) for _, ring in pairs])
    draws = bootstrap_sums(columns, group_numbers([item.group for item, _ in pairs]), [seed, 3])[:, 0] / len(pairs)
    groups = len({item.group for item, _ in pairs})
    if not interval(draws, float(columns[:, 0].mean()), groups).low > 0:
        return []
    _, heat, area = columns.mean(0)
    return [f"a hint: {heat:.0%} of the heat lies in the outer ring, which is {area:.0%} of the picture"]


def _watermark_hints(pairs: Sequence[tuple[Item, HeatInRing]]) -> list[str]:
    """Find classes with the same hottest cell, and the same pixels behind it, in many pictures."""
    by_class: dict[str, list[HeatInRing]] = defaultdict(list)
    for item, ring in pairs:
        by_class[item.label].append(ring)
    sentences = []
    for label, rings in sorted(by_class.items()):
        cell, count = Counter(ring.hottest for ring in rings).most_common(1)[0]
        if count < MIN_PICTURES or count < SAME_CELL * len(rings):
            continue
        patches = np.stack([ring.patch for ring in rings if ring.hottest == cell])
        if float(np.abs(patches - patches.mean(0)).mean()) <= ALIKE:
            sentences.append(
                f"a hint: {label}: in {count} of {len(rings)} pictures the hottest cell is the same "
                f"(row {cell[0] + 1}, column {cell[1] + 1} of the map) and shows the same pixels, as a watermark would"
            )
    return sentences
