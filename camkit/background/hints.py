"""Without regions: what the heat alone hints at. Hints warn and never fail a model.

Where most of the heat lies in the outer ring; where one cell is the hottest of picture after picture with the same
pixels behind it, as a watermark is; and where the heat stays put when the picture is turned left to right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from jaxtyping import Float

from camkit.background import edits
from camkit.background.journal import Row, packed, unpacked
from camkit.background.statistics import interval, numbered, resampled
from camkit.background.values import Item
from camkit.explanation import Explanation
from camkit.types import Box

LEAST = 10
"""Pictures that a hint rests on at least."""

SAME_PLACE = 0.5
"""Share of a class's pictures whose hottest cell is one and the same, above which it is looked at what lies there."""

ALIKE = 0.05
"""Mean difference of brightness (0..1) from their mean up to which pixels behind a cell are the same."""

_PATCH = 8


@dataclass(frozen=True)
class Turned:
    """How the maps of pictures turned left to right are like the first ones, median correlations.

    ``followed`` with the first map turned too, ``stayed`` with the first map as it was.
    """

    followed: float
    stayed: float


def row_of(found: Explanation, share: float) -> Row:
    """Return what is kept of a map for the hints: heat in the ring, and the pixels behind the hottest cell."""
    if found.status != "ok" or found.heatmap.ndim != 2 or found.picture is None:
        return {}
    outer = edits.ring((found.heatmap.shape[0], found.heatmap.shape[1]), share).numpy()
    row, column = np.unravel_index(int(found.raw.argmax()), found.raw.shape)
    return {
        "ring": float(found.heatmap[outer].sum() / found.heatmap.sum()),
        "ring_area": float(outer.mean()),
        "hottest": [int(row), int(column)],
        "patch": packed(_behind(found, int(row), int(column))),
    }


def _behind(found: Explanation, row: int, column: int) -> Float[np.ndarray, " pixels"]:
    """Return the picture's brightness behind a cell of the map, a few pixels by a few, 0..1."""
    assert found.picture is not None
    spans = []
    for number, (cell, cells) in enumerate(zip((row, column), found.raw.shape, strict=True)):
        start, end = found.extent[number] if found.extent else (0.0, 1.0)
        length = found.picture.shape[number]
        box = found.box or Box(0, 0, found.picture.shape[1], found.picture.shape[0])
        first, last = ((box.top, box.bottom), (box.left, box.right))[number]
        low, high = (first + (last - first) * (at / cells - start) / (end - start) for at in (cell, cell + 1))
        begin = min(max(0, round(low)), length - 1)
        spans.append(slice(begin, min(length, max(begin + 1, round(high)))))
    patch = found.picture[spans[0], spans[1]].astype(np.float32) / 255
    return np.asarray(cv2.resize(patch, (_PATCH, _PATCH), interpolation=cv2.INTER_AREA)).ravel()


def hints(items: Sequence[Item], rows: Mapping[str, Row], turned: Turned | None, seed: int) -> list[str]:
    """Return what the heat hints at, in words."""
    known = [(item, rows[item.name]) for item in items if "ring" in rows.get(item.name, {})]
    found = [*_at_the_border(known, seed), *_on_one_place(known)]
    if turned is not None and turned.stayed > turned.followed:
        found.append(
            "a hint: the heat stays put when pictures are turned left to right (maps correlate by "
            f"{turned.stayed:.2f} with the first ones, by {turned.followed:.2f} with those turned as well)"
        )
    return found


def _at_the_border(known: Sequence[tuple[Item, Row]], seed: int) -> list[str]:
    if len(known) < LEAST:
        return []
    parts = np.array([(row["ring"] - row["ring_area"], row["ring"], row["ring_area"]) for _, row in known])
    sums = resampled(parts, numbered([item.group for item, _ in known]), [seed, 3]) / len(known)
    groups = len({item.group for item, _ in known})
    if not interval(sums[:, 0], float(parts[:, 0].mean()), groups).low > 0:
        return []
    _, heat, area = parts.mean(0)
    return [f"a hint: {heat:.0%} of the heat lies in the outer ring, which is {area:.0%} of the picture"]


def _on_one_place(known: Sequence[tuple[Item, Row]]) -> list[str]:
    by_class: dict[str, list[Row]] = defaultdict(list)
    for item, row in known:
        by_class[item.label].append(row)
    found = []
    for label, rows in sorted(by_class.items()):
        place, count = Counter(tuple(row["hottest"]) for row in rows).most_common(1)[0]
        if count < LEAST or count < SAME_PLACE * len(rows):
            continue
        patches = np.stack([unpacked(row["patch"]) for row in rows if tuple(row["hottest"]) == place])
        if float(np.abs(patches - patches.mean(0)).mean()) <= ALIKE:
            found.append(
                f"a hint: {label}: in {count} of {len(rows)} pictures the heat is greatest at one place (row "
                f"{place[0] + 1}, column {place[1] + 1} of the map), with the same pixels behind it, as of a watermark"
            )
    return found


def compare_turned(first: Sequence[np.ndarray | None], after: Sequence[np.ndarray | None]) -> Turned | None:
    """Compare maps with those of the same pictures turned left to right; None where they cannot tell.

    A map that is like its own mirror image says nothing.
    """
    followed, stayed = [], []
    for one, other in zip(first, after, strict=True):
        if one is None or other is None or one.ndim != 2 or one.shape != other.shape:
            continue
        mirrored = one[:, ::-1]
        if min(one.std(), other.std()) == 0 or correlation(one, mirrored) > _SYMMETRICAL:
            continue
        followed.append(correlation(other, mirrored))
        stayed.append(correlation(other, one))
    return Turned(float(np.median(followed)), float(np.median(stayed))) if len(followed) >= _LEAST_TURNED else None


_SYMMETRICAL, _LEAST_TURNED = 0.8, 5


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return how two maps of one grid correlate, cell by cell."""
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])
