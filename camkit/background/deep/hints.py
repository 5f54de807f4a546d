"""Hints from the heat alone, for data without regions. A hint warns and never fails a model.

There are three: most of the heat lies in the outer ring; in many pictures the same cell is the hottest and the pixels
behind it are the same, as behind a watermark; or the heat stays in place when the picture is mirrored left to right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from jaxtyping import Float

from camkit.background import edits
from camkit.background.deep.analysis import Finding, Material, MirrorTest
from camkit.background.journal import Row, packed, unpacked
from camkit.background.measures import OVERALL
from camkit.background.reasons import Reason
from camkit.background.values import Item
from camkit.explanation import Explanation
from camkit.kit.statistics import bootstrap_sums, group_numbers, interval
from camkit.types import Box

MIN_PICTURES = 10
"""Pictures that a hint needs."""

SAME_CELL = 0.5
"""Share of a class's pictures that must have the same hottest cell before the pixels behind it are compared."""

ALIKE = 0.05
"""Mean difference of brightness (0..1) from the mean patch up to which the pixels behind a cell count as the same."""

_PATCH = 8
"""Rows and columns to which the pixels behind a cell are resized before they are compared."""

_SYMMETRICAL = 0.8
"""A map that correlates more than this with its own mirror image cannot show whether it followed the picture."""

_MIN_MIRRORED = 5
"""Maps that the comparison with mirrored pictures needs."""


@dataclass(frozen=True)
class Hints(Finding):
    """The hints that the heat gives, as sentences."""

    found: tuple[str, ...]

    @property
    def warnings(self) -> dict[str, list[Reason]]:
        """Each hint, as a warning of all classes together."""
        return {OVERALL: [Reason(hint, hint) for hint in self.found]}

    def as_json(self) -> list[str]:
        """Return the hints."""
        return list(self.found)


def find(material: Material) -> Hints | None:
    """Find the hints that the heat gives; None if it is compared with regions."""
    plan = material.plan
    if plan.with_regions:
        return None
    return Hints(tuple(hints(plan.data.items, material.heat, material.mirrored, plan.settings.check.seed)))


def row_of(explanation: Explanation, share: float) -> Row:
    """Return what the hints need from a map: the heat in the outer ring, and the pixels behind the hottest cell.

    ``share`` is the width of the ring as a share of each side.
    """
    if explanation.status != "ok" or explanation.heatmap.ndim != 2 or explanation.picture is None:
        return {}
    heatmap = explanation.heatmap
    outer = edits.outer_ring((heatmap.shape[0], heatmap.shape[1]), share).numpy()
    row, column = np.unravel_index(int(explanation.raw.argmax()), explanation.raw.shape)
    return {
        "ring": float(heatmap[outer].sum() / heatmap.sum()),
        "ring_area": float(outer.mean()),
        "hottest": [int(row), int(column)],
        "patch": packed(_patch_behind(explanation, int(row), int(column))),
    }


def _patch_behind(explanation: Explanation, row: int, column: int) -> Float[np.ndarray, " pixels"]:
    """Return the picture's brightness (0..1) behind a cell of the map, resized to _PATCH x _PATCH."""
    picture = explanation.picture
    assert picture is not None
    box = explanation.box or Box(0, 0, picture.shape[1], picture.shape[0])
    sides = ((box.top, box.bottom), (box.left, box.right))
    slices = []
    for axis, cell in enumerate((row, column)):
        (first, last), length, side = sides[axis], picture.shape[axis], explanation.maps.size[axis]
        places = explanation.positions[axis]
        step = (places[-1] - places[0]) / (len(places) - 1) if len(places) > 1 else side
        edges = (places[cell] + 0.5 - step / 2, places[cell] + 0.5 + step / 2)
        low, high = (first + (last - first) * edge / side for edge in edges)
        begin = min(max(0, round(low)), length - 1)
        slices.append(slice(begin, min(length, max(begin + 1, round(high)))))
    patch = picture[slices[0], slices[1]].astype(np.float32) / 255
    return np.asarray(cv2.resize(patch, (_PATCH, _PATCH), interpolation=cv2.INTER_AREA)).ravel()


def hints(items: Sequence[Item], rows: Mapping[str, Row], mirrored: MirrorTest | None, seed: int) -> list[str]:
    """Return the hints that the heat gives, as sentences."""
    pairs = [(item, rows[item.name]) for item in items if "ring" in rows.get(item.name, {})]
    sentences = [*_ring_hints(pairs, seed), *_watermark_hints(pairs)]
    if mirrored is not None and mirrored.stayed > mirrored.followed:
        sentences.append(
            "a hint: the heat stays put when pictures are mirrored left to right (the new maps correlate "
            f"{mirrored.stayed:.2f} with the first maps and {mirrored.followed:.2f} with the first maps mirrored)"
        )
    return sentences


def _ring_hints(pairs: Sequence[tuple[Item, Row]], seed: int) -> list[str]:
    """Compare the ring's share of the heat with its share of the picture."""
    if len(pairs) < MIN_PICTURES:
        return []
    columns = np.array([(row["ring"] - row["ring_area"], row["ring"], row["ring_area"]) for _, row in pairs])
    draws = bootstrap_sums(columns, group_numbers([item.group for item, _ in pairs]), [seed, 3])[:, 0] / len(pairs)
    groups = len({item.group for item, _ in pairs})
    if not interval(draws, float(columns[:, 0].mean()), groups).low > 0:
        return []
    _, heat, area = columns.mean(0)
    return [f"a hint: {heat:.0%} of the heat lies in the outer ring, which is {area:.0%} of the picture"]


def _watermark_hints(pairs: Sequence[tuple[Item, Row]]) -> list[str]:
    """Find classes with the same hottest cell, and the same pixels behind it, in many pictures."""
    by_class: dict[str, list[Row]] = defaultdict(list)
    for item, row in pairs:
        by_class[item.label].append(row)
    sentences = []
    for label, rows in sorted(by_class.items()):
        cell, count = Counter(tuple(row["hottest"]) for row in rows).most_common(1)[0]
        if count < MIN_PICTURES or count < SAME_CELL * len(rows):
            continue
        patches = np.stack([unpacked(row["patch"]) for row in rows if tuple(row["hottest"]) == cell])
        if float(np.abs(patches - patches.mean(0)).mean()) <= ALIKE:
            sentences.append(
                f"a hint: {label}: in {count} of {len(rows)} pictures the hottest cell is the same (row {cell[0] + 1}, "
                f"column {cell[1] + 1} of the map) and shows the same pixels, as a watermark would"
            )
    return sentences


def compare_mirrored(before: Sequence[np.ndarray | None], after: Sequence[np.ndarray | None]) -> MirrorTest | None:
    """Compare maps with the maps of the same pictures mirrored left to right; None if too few maps can tell.

    A map that is nearly its own mirror image cannot tell.
    """
    followed, stayed = [], []
    for first, second in zip(before, after, strict=True):
        if first is None or second is None or first.ndim != 2 or first.shape != second.shape:
            continue
        flipped = first[:, ::-1]
        if min(first.std(), second.std()) == 0 or correlation(first, flipped) > _SYMMETRICAL:
            continue
        followed.append(correlation(second, flipped))
        stayed.append(correlation(second, first))
    if len(followed) < _MIN_MIRRORED:
        return None
    return MirrorTest(float(np.median(followed)), float(np.median(stayed)))


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return the correlation of two maps of one grid, cell by cell."""
    return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])
