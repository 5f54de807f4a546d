"""The experiment over the sample: threads make edits, the model sees full batches, each picture's row is saved."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from camkit.background import experiment
from camkit.background.answers import answer_batch
from camkit.background.experiment import Answer, Background, Partners, PreparedPicture
from camkit.background.journal import EDITS, Journal, Row
from camkit.background.plan import Plan, load_prepared
from camkit.background.values import Item, Progress
from camkit.engine.passes import passes_at_once
from camkit.errors import CamkitError

WORKERS = min(4, os.cpu_count() or 1)
"""Threads that make edits while the model answers earlier ones."""

_CACHE_BYTES, _MIN_CACHED = 1 << 30, 16
"""The memory for loaded pictures, each of which is a background for several others, and the least number to keep."""

_COPIES = 3
"""Tensors kept of each picture: itself, and one as a background for each fill."""

_PROBED = 20
"""Pictures of the sample that are tried when the size of a loaded picture is measured: the first may be unreadable."""


EditRows: TypeAlias = Callable[[Plan, Sequence[Item], "Loader"], Iterator[Row]]
"""Computes the rows of pictures of the sample, given a function that loads pictures, and yields each when it is
finished."""


def run_experiment(
    plan: Plan,
    journal: Journal,
    progress: Progress,
    usable: Callable[[Item], bool],
    rows_of: EditRows,
    load: Loader,
) -> None:
    """Run the experiment on every usable picture of the sample that has no row in the journal yet.

    ``rows_of`` computes the rows, as ``edit_rows`` does, and ``load`` loads pictures.
    """
    done = journal.rows(EDITS)
    sample = [item for item in plan.sample if usable(item)]
    todo = [item for item in sample if item.name not in done]
    progress("experiment", len(sample) - len(todo), len(sample))
    for count, row in enumerate(rows_of(plan, todo, load), start=len(sample) - len(todo) + 1):
        journal.append([row])
        progress("experiment", count, len(sample))


def edit_rows(plan: Plan, items: Sequence[Item], load: Loader) -> Iterator[Row]:
    """Show the edits of some pictures of the sample to the model, and yield a row with the answers for each picture."""
    check = plan.settings.check
    partners = partners_of(plan)

    def make(number: int) -> list[tuple[str, Tensor]]:
        edits = list_edits(plan, items[number], partners[items[number]], check.pastes, load)
        made = ((name, make_edit()) for name, make_edit in edits)
        return [(name, tensor) for name, tensor in made if tensor is not None]

    def answer(batch: Tensor, numbers: list[int]) -> list[Answer]:
        return answer_batch(plan, batch, [plan.matched.indices[items[number].label] for number in numbers])

    at_once = passes_at_once(plan.memory.record)
    for number, answers in experiment.run(range(len(items)), make, answer, plan.batch_size, WORKERS, at_once):
        yield {"kind": EDITS, "name": items[number].name, "answers": answers}


def partners_of(plan: Plan) -> dict[Item, Partners]:
    """Draw the partners of the sample's pictures."""
    check = plan.settings.check
    return experiment.draw_partners(plan.sample, plan.backgrounds, check.pastes, check.seed)


_ROOM_CELLS = 32
"""Cells along each side of the grid that stores how much room is beside a picture's objects."""


LITTLE_MORE = 0.05
"""A background may be filled by this share of the picture more than the background with the most room, and is still
used. Otherwise the same few backgrounds would serve again and again, for a gain that nobody sees."""


class Loader:
    """Loads pictures as the model sees them, and keeps the last ones in memory.

    Args:
        plan: the check.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        loaded = (self._load(item) for item in plan.sample[:_PROBED])
        size = next((picture.tensor.nbytes for picture in loaded if picture is not None), _CACHE_BYTES)
        kept = max(_MIN_CACHED, _CACHE_BYTES // (_COPIES * size))
        self._cached = functools.lru_cache(maxsize=kept)(self._load)
        self._filled: dict[str, Float[Tensor, "r c"] | None] = {}

    def __call__(self, item: Item) -> PreparedPicture | None:
        """Return a picture; None if it cannot be read."""
        return self._cached(item)

    def _load(self, item: Item) -> PreparedPicture | None:
        try:
            return load_prepared(self._plan, item)
        except CamkitError:
            return None

    def filled(self, item: Item) -> Float[Tensor, "r c"] | None:
        """Return how much of each cell of a coarse grid is filled if a picture lends its background.

        None if it cannot lend one: it cannot be read, or its objects leave no room.
        """
        if item.name not in self._filled:
            self._filled[item.name] = self._measure(self(item))
        return self._filled[item.name]

    def _measure(self, picture: PreparedPicture | None) -> Float[Tensor, "r c"] | None:
        if picture is None:
            return None
        if not self._plan.with_regions:
            return torch.zeros(_ROOM_CELLS, _ROOM_CELLS)
        if not picture.has_background:
            return None
        assert picture.silhouettes is not None
        return coarse(picture.silhouettes)


def coarse(region: Shaped[Tensor, "h w"]) -> Float[Tensor, "r c"]:
    """Return the share of each cell of a coarse grid that a region covers."""
    return functional.adaptive_avg_pool2d(region[None].float(), _ROOM_CELLS)[0]


def list_edits(plan: Plan, item: Item, partners: Partners, wanted: int, load: Loader) -> list[experiment.Edit]:
    """List a picture's edits, with up to ``wanted`` backgrounds of either kind.

    The list is empty if the picture cannot be read, or has regions but no object or no background beside it.
    """
    picture = load(item)
    if picture is None or (plan.with_regions and not _has_object_and_background(picture)):
        return []
    same = _with_most_room(picture, partners.same, wanted, load)
    other = _with_most_room(picture, partners.other, wanted, load)
    check = plan.settings.check
    exchanges = experiment.cue_edits(picture, same, other, plan.cues)
    if not plan.with_regions:
        return [*experiment.ring_edits(picture, same, other, check.ring), *exchanges]
    own_seed = int(experiment.own_generator(item.name, check.seed).integers(1 << 62))
    return [*experiment.region_edits(picture, same, other, own_seed), *exchanges]


def _with_most_room(
    picture: PreparedPicture, entries: Sequence[Sequence[Item]], wanted: int, load: Loader
) -> list[Background]:
    """Return a background for each of the first entries that have a usable candidate, ``wanted`` at most.

    From each entry, this takes the first candidate in which nearly the least remains filled beside the pasted object,
    because filling destroys the background. No background is used twice.
    """
    covered = 0.0 if picture.region is None else coarse(picture.region)
    backgrounds: list[Background] = []
    for candidates in entries:
        used = {name for name, _ in backgrounds}
        filled = {item: load.filled(item) for item in candidates if item.name not in used}
        in_sight = {item: float((grid * (1 - covered)).mean()) for item, grid in filled.items() if grid is not None}
        while in_sight:
            least = min(in_sight.values())
            item = next(item for item, share in in_sight.items() if share <= least + LITTLE_MORE)
            background = load(item)
            if background is not None and background.tensor.shape == picture.tensor.shape:
                backgrounds.append((item.name, background))
                break
            del in_sight[item]
        if len(backgrounds) == wanted:
            break
    return backgrounds


def _has_object_and_background(picture: PreparedPicture) -> bool:
    return picture.region is not None and picture.has_background and bool((picture.region > 0.5).any())
