"""The two passes of a check over its pictures: in this process, or in slices that workers elsewhere compute."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from camkit.background.heat import Heat
from camkit.background.journal import EDITS, HEAT, Row
from camkit.background.plan import Plan
from camkit.background.trial import Trial
from camkit.background.values import Item, ObjectAnnotation, RowsOf
from camkit.images.masks import MaskFile
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


class Slice(NamedTuple):
    """Pictures of one pass, which one worker computes.

    Attributes:
        kind: the kind of its rows.
        names: the pictures.
    """

    kind: str
    names: tuple[str, ...]


MapSlices: TypeAlias = Callable[[Iterable[Slice]], Iterator[list[Row]]]
"""Lets workers compute the rows of slices, and yields those of each slice when it is finished."""


def spread(plan: Plan, map_slices: MapSlices, workers: int) -> Passes:
    """Return passes that workers compute.

    Args:
        plan: the check.
        map_slices: computes slices with a function such as ``worker_of`` returns.
        workers: the number of workers.
    """

    def rows(kind: str, items: Sequence[Item]) -> Iterator[Row]:
        for of_slice in map_slices(slices(plan, kind, items, workers)):
            yield from of_slice

    return Passes(heat=functools.partial(rows, HEAT), edits=functools.partial(rows, EDITS))


def slices(plan: Plan, kind: str, items: Sequence[Item], workers: int) -> list[Slice]:
    """Divide pictures into slices of whole batches, enough of them to keep all workers busy until the end."""
    batch = plan.batch_size
    pictures_per_batch = batch if kind == HEAT else max(1, batch // plan.most_edits)
    wanted = math.ceil(len(items) / (workers * _SLICES_PER_WORKER * pictures_per_batch))
    size = min(max(1, wanted), _MOST_BATCHES) * pictures_per_batch
    names = [item.name for item in items]
    return [Slice(kind, tuple(names[start : start + size])) for start in range(0, len(names), size)]


def worker_of(plan: Plan) -> Callable[[LoadedModel], Callable[[Slice], list[Row]]]:
    """Return a function that makes a worker from the worker's own model.

    It has the plan without the model, so it can be sent elsewhere.
    """
    moved = {item: _with_absolute_paths(item) for item in (*plan.data.items, *plan.backgrounds)}
    return functools.partial(
        _Worker,
        functools.partial(
            Plan,
            data=replace(plan.data, items=tuple(moved[item] for item in plan.data.items)),
            matched=plan.matched,
            settings=plan.settings,
            sample=tuple(moved[item] for item in plan.sample),
            backgrounds=tuple(moved[item] for item in plan.backgrounds),
            with_regions=plan.with_regions,
            today=plan.today,
        ),
    )


class _Worker:
    """Computes the rows of slices with a model of its own, and keeps loaded pictures from one slice to the next."""

    def __init__(self, plan_with: Callable[[LoadedModel], Plan], model: LoadedModel) -> None:
        self._plan = plan_with(model)
        self._items = {item.name: item for item in self._plan.data.items}
        self._heat = Heat(self._plan)
        list(self._heat.rows(self._plan.data.items[:1]))  # all workers choose the layer by the same picture

    def __call__(self, work: Slice) -> list[Row]:
        """Return the rows of a slice, in the order of its pictures."""
        rows_of = self._heat.rows if work.kind == HEAT else self._trial.rows
        return list(rows_of([self._items[name] for name in work.names]))

    @functools.cached_property
    def _trial(self) -> Trial:
        return Trial(self._plan)


def _with_absolute_paths(item: Item) -> Item:
    """Return an item that can be read by a process that works in another folder."""
    objects, others = (tuple(map(_absolute_outline, annotations)) for annotations in (item.objects, item.others))
    return replace(item, path=_absolute(item.path), objects=objects, others=others)


def _absolute_outline(annotation: ObjectAnnotation) -> ObjectAnnotation:
    if not isinstance(annotation.outline, MaskFile):
        return annotation
    return replace(annotation, outline=replace(annotation.outline, path=_absolute(annotation.outline.path)))


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - links stay as the other processes know them
