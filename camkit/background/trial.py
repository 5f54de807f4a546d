"""The experiment over the sample: threads make edits, the model sees full batches, each picture's row is saved."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from camkit.background import experiment
from camkit.background.answers import answer_batch
from camkit.background.experiment import Answer, Background, Partners, PreparedPicture
from camkit.background.journal import EDITS, Journal, Row
from camkit.background.plan import Plan, load_prepared
from camkit.background.values import Item, Progress
from camkit.engine.passes import passes_at_once
from camkit.errors import CamkitError

_WORKERS = min(4, os.cpu_count() or 1)
"""Threads that make edits while the model answers earlier ones."""

_CACHE_BYTES, _MIN_CACHED = 1 << 30, 16
"""Memory for loaded pictures, each of which is a background of several others, and the least number kept."""

_COPIES = 3
"""Tensors kept of each picture: itself, and one as a background for each fill."""

_PROBED = 20
"""Pictures of the sample that are tried when the size of a loaded picture is measured: the first may be unreadable."""

LoadPicture = Callable[[Item], PreparedPicture | None]
"""Returns a picture as the model sees it; None if it cannot be read."""


def run_experiment(
    plan: Plan,
    journal: Journal,
    progress: Progress,
    usable: Callable[[Item], bool],
    rows_of: Callable[[Plan, Sequence[Item], LoadPicture], Iterator[Row]],
    load: LoadPicture,
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


def edit_rows(plan: Plan, items: Sequence[Item], load: LoadPicture) -> Iterator[Row]:
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
    for number, answers in experiment.run(range(len(items)), make, answer, plan.batch_size, _WORKERS, at_once):
        yield {"kind": EDITS, "name": items[number].name, "answers": answers}


def partners_of(plan: Plan) -> dict[Item, Partners]:
    """Draw the partners of the sample's pictures."""
    check = plan.settings.check
    return experiment.draw_partners(plan.sample, plan.backgrounds, check.pastes, check.seed)


def cached_loader(plan: Plan) -> LoadPicture:
    """Return a function that loads a picture as the model sees it, and keeps the last ones in memory."""

    def load(item: Item) -> PreparedPicture | None:
        try:
            return load_prepared(plan, item)
        except CamkitError:
            return None

    loaded = (load(item) for item in plan.sample[:_PROBED])
    size = next((picture.tensor.nbytes for picture in loaded if picture is not None), _CACHE_BYTES)
    return functools.lru_cache(maxsize=max(_MIN_CACHED, _CACHE_BYTES // (_COPIES * size)))(load)


def list_edits(plan: Plan, item: Item, partners: Partners, wanted: int, load: LoadPicture) -> list[experiment.Edit]:
    """List a picture's edits, with up to ``wanted`` backgrounds of either kind.

    The list is empty if the picture cannot be read, or has regions but no object or no background beside it.
    """
    picture = load(item)
    if picture is None or (plan.with_regions and not _has_object_and_background(picture)):
        return []
    same = _first_usable(plan, picture, partners.same, wanted, load)
    other = _first_usable(plan, picture, partners.other, wanted, load)
    check = plan.settings.check
    exchanges = experiment.cue_edits(picture, same, other, plan.cues)
    if not plan.with_regions:
        return [*experiment.ring_edits(picture, same, other, check.ring), *exchanges]
    own_seed = int(experiment.own_generator(item.name, check.seed).integers(1 << 62))
    return [*experiment.region_edits(picture, same, other, own_seed), *exchanges]


def _first_usable(
    plan: Plan, picture: PreparedPicture, candidates: Sequence[Item], wanted: int, load: LoadPicture
) -> list[Background]:
    """Return the first candidates that can be read, have the picture's size and, with regions, a background."""
    backgrounds: list[Background] = []
    for candidate in candidates:
        if len(backgrounds) == wanted:
            break
        background = load(candidate)
        if background is None or background.tensor.shape != picture.tensor.shape:
            continue
        if not plan.with_regions or background.has_background:
            backgrounds.append((candidate.name, background))
    return backgrounds


def _has_object_and_background(picture: PreparedPicture) -> bool:
    return picture.region is not None and picture.has_background and bool((picture.region > 0.5).any())
