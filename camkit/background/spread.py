"""Let other processes compute the rows of a check, such as those of a Ray cluster."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from camkit.background.data import Item
from camkit.background.experiment import EDITS, Experiment
from camkit.background.heat import HEAT, CheckHeat
from camkit.background.journal import PictureRow, RowsOf
from camkit.background.plan import Plan
from camkit.models.loaded import LoadedModel

SpreadPieces: TypeAlias = Callable[[Callable[[LoadedModel], Any], Sequence[str], int], Iterator[list[Any]]]
"""Lets other processes compute the rows of pieces.

It gets what makes, from such a process's model, the function from names to rows; the names of the pictures; and how
many of them fill a pass. It yields the rows of each piece when they are finished.
"""


def spread(plan: Plan, spread_pieces: SpreadPieces) -> Mapping[str, RowsOf[Any]]:
    """Return, for each kind of rows, a function that lets other processes compute them."""
    parts = {part.name: getattr(plan, part.name) for part in dataclasses.fields(plan) if part.name != "model"}
    with_model = functools.partial(Plan, **parts)

    def rows(kind: str, items: Sequence[Item]) -> Iterator[Any]:
        per_pass = plan.batch_size if kind == HEAT.name else max(1, plan.batch_size // plan.most_edits)
        names = [item.name for item in items]
        for of_piece in spread_pieces(functools.partial(_Worker, kind, with_model), names, per_pass):
            yield from of_piece

    return {kind: functools.partial(rows, kind) for kind in (HEAT.name, EDITS.name)}


class _Worker:
    """Computes rows with a model of its own, and keeps loaded pictures from one piece to the next."""

    def __init__(self, kind: str, with_model: Callable[[LoadedModel], Plan], model: LoadedModel) -> None:
        plan = with_model(model)
        self._items = {item.name: item for item in plan.data.items}
        heat = CheckHeat(plan)
        list(heat.rows(plan.data.items[:1]))  # all of them choose the layer by the same picture
        self._rows_of = heat.rows if kind == HEAT.name else Experiment(plan).rows

    def __call__(self, names: Sequence[str]) -> list[PictureRow]:
        """Return the rows of pictures, in their order."""
        return list(self._rows_of([self._items[name] for name in names]))
