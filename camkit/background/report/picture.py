"""A check as one picture for a pull request's comment: the verdict, and three pictures with their edits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from camkit.background.report import words
from camkit.background.result import CheckResult
from camkit.background.showcase import Showcase
from camkit.drawing.encode import encode
from camkit.drawing.text import GREY, Colour, wrapped
from camkit.kit.tiles import Tile, contact_sheet

_COLUMNS, _SIDE, _SIZE = 3, 260, 14
"""Three pictures are about as wide as a comment on GitHub, so that nothing is reduced there."""

_MOST_LINES = 5

_COLOURS: Mapping[str, Colour] = MappingProxyType({"FAIL": (179, 38, 30), "PASS": (27, 107, 58), "": GREY})

_NOTHING = Tile(np.full((1, 1, 3), 255, np.uint8))
"""Fills a row whose picture has fewer edits."""


def render(result: CheckResult, showcase: Showcase | None = None) -> bytes:
    """Return the picture as a PNG: the verdict, and up to three triptychs, on white.

    Args:
        result: the check.
        showcase: its pictures; None draws them.
    """
    texts = [
        f"{result.verdict}: {words.sentence(result)}",
        words.why_undecided(result),
        *result.regressed,
        f"camkit check of {result.plan.model.name} on {result.plan.data.root.name}",
    ]
    title = [line for text in texts for line in wrapped(text, _COLUMNS * _SIDE, _SIZE + 1, _MOST_LINES)]
    tiles: list[Tile] = []
    for strip in (showcase or Showcase(result)).triptychs:
        for panel in strip.triptych:
            answer, verdict = panel.comment
            line = f"{strip.row.label}: {panel.title.partition(' (')[0]}"
            tiles.append(Tile(panel.pixels, line, answer, _COLOURS[verdict]))
        tiles += [_NOTHING] * (_COLUMNS - len(strip.triptych))
    return encode(contact_sheet(tiles, _COLUMNS, "\n".join(title), side=_SIDE, size=_SIZE))
