"""The two passes of a check over its pictures: in this process, or in pieces that other processes compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from camkit.background.heat import Heat
from camkit.background.journal import EDITS, HEAT, Row
from camkit.background.plan import Plan
from camkit.background.trial import Trial
from camkit.background.values import Item, RowsOf
from camkit.models.loaded import LoadedModel

_SLICES_PER_WORKER = 8
"""The number of slices of a pass for each worker. While the last worker finishes, the others are idle for at most an
eighth of the time."""

_MOST_BATCHES = 8
"""The number of batches in a slice. A lost worker costs one slice; with fewer batches, reading pictures could not
overlap computing."""


@dataclass(frozen=True)
class Passes:
    """How the passes of a check are computed.

    Attributes:
        heat, edits: compute the rows of the heat, and those of the experiment.
    """

    heat: RowsOf
    edits: RowsOf


Spread: TypeAlias = Callable[[Callable[[LoadedModel], Any], Sequence[str], int], Iterator[list[Row]]]
"""Lets other processes compute the rows of pieces.

It gets what makes, from such a process's model, the function from names to rows; the names of the pictures; and how
many of them fill a pass. It yields the rows of each piece when they are finished.
"""


def spread(plan: Plan, spread_pieces: Spread) -> Passes:
    """Return passes that other processes compute."""
    with_model = functools.partial(
        Plan,
        data=plan.data,
        matched=plan.matched,
        settings=plan.settings,
        sample=plan.sample,
        backgrounds=plan.backgrounds,
        with_regions=plan.with_regions,
        today=plan.today,
    )

    def rows(kind: str, items: Sequence[Item]) -> Iterator[Row]:
        per_pass = plan.batch_size if kind == HEAT else max(1, plan.batch_size // plan.most_edits)
        names = [item.name for item in items]
        for of_piece in spread_pieces(functools.partial(_Worker, kind, with_model), names, per_pass):
            yield from of_piece

    return Passes(heat=functools.partial(rows, HEAT), edits=functools.partial(rows, EDITS))


class _Worker:
    """Computes rows with a model of its own, and keeps loaded pictures from one piece to the next."""

    def __init__(self, kind: str, with_model: Callable[[LoadedModel], Plan], model: LoadedModel) -> None:
        plan = with_model(model)
        self._items = {item.name: item for item in plan.data.items}
        heat = Heat(plan)
        list(heat.rows(plan.data.items[:1]))  # all of them choose the layer by the same picture
        self._rows_of = heat.rows if kind == HEAT else Trial(plan).rows

    def __call__(self, names: Sequence[str]) -> list[Row]:
        """Return the rows of pictures, in their order."""
        return list(self._rows_of([self._items[name] for name in names]))
