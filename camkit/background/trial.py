"""The experiment over a sample: edits made ahead, shown to the model in full batches, rows kept as they come."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from camkit.background import experiment
from camkit.background.answers import answer_batch
from camkit.background.experiment import Answer, Background, Partners, Seen
from camkit.background.journal import Journal
from camkit.background.plan import Plan, load_seen
from camkit.background.values import Item, Progress
from camkit.errors import CamkitError

_WORKERS = min(4, os.cpu_count() or 1)
_KEPT_BYTES, _LEAST_KEPT = 1 << 29, 16
"""Pictures kept in memory, since each is a background of others: how much of it, and at least how many."""

_COPIES = 3
"""Of a picture: itself, and with its objects filled in either way."""

_TRIES = 20


def run_trial(plan: Plan, journal: Journal, progress: Progress, usable: Callable[[Item], bool]) -> None:
    """Show the edits of every picture of the sample that has no row yet, of those that could be used before."""
    done = journal.rows("edits")
    sample = [item for item in plan.sample if usable(item)]
    todo = [item for item in sample if item.name not in done]
    progress("experiment", len(sample) - len(todo), len(sample))
    for count, (item, answers) in enumerate(answered(plan, todo), start=len(sample) - len(todo) + 1):
        journal.append([{"kind": "edits", "name": item.name, "answers": answers}])
        progress("experiment", count, len(sample))


def answered(plan: Plan, items: Sequence[Item]) -> Iterator[tuple[Item, dict[str, Answer]]]:
    """Show the edits of some pictures of the sample; give the answers picture by picture."""
    check = plan.settings.check
    partners = partners_of(plan)
    load = loader(plan)

    def make(number: int) -> list[tuple[str, Tensor]]:
        made = (
            (name, edit()) for name, edit in edits_of(plan, items[number], partners[items[number]], check.pastes, load)
        )
        return [(name, tensor) for name, tensor in made if tensor is not None]

    def answer(batch: Tensor, of: list[int]) -> list[Answer]:
        return answer_batch(plan, batch, [plan.matched.indices[items[number].label] for number in of])

    for number, found in experiment.run(range(len(items)), make, answer, check.batch_size, _WORKERS):
        yield items[number], found


def partners_of(plan: Plan) -> dict[Item, Partners]:
    """Draw the partners of the sample's pictures."""
    check = plan.settings.check
    return experiment.draw_partners(plan.sample, plan.backgrounds, check.pastes, check.seed)


def loader(plan: Plan) -> Callable[[Item], Seen | None]:
    """Return what loads a picture as the model sees it, None where it cannot be read; the last ones are kept."""

    def load(item: Item) -> Seen | None:
        try:
            return load_seen(plan, item)
        except CamkitError:
            return None

    size = next((seen.tensor.nbytes for item in plan.sample[:_TRIES] if (seen := load(item)) is not None), _KEPT_BYTES)
    return functools.lru_cache(maxsize=max(_LEAST_KEPT, _KEPT_BYTES // (_COPIES * size)))(load)


def edits_of(
    plan: Plan, item: Item, partners: Partners, wanted: int, load: Callable[[Item], Seen | None]
) -> list[experiment.Edit]:
    """List a picture's edits; none where it cannot be read, has nothing beside its object, or no partner serves."""
    picture = load(item)
    if picture is None or (plan.with_regions and not _has_both(picture)):
        return []

    def chosen(candidates: Sequence[Item]) -> list[Background]:
        found: list[Background] = []
        for one in candidates:
            if len(found) == wanted:
                break
            seen = load(one)
            if (
                seen is not None
                and seen.tensor.shape == picture.tensor.shape
                and (not plan.with_regions or seen.has_rest)
            ):
                found.append((one.name, seen))
        return found

    same, other = chosen(partners.same), chosen(partners.other)
    check = plan.settings.check
    if not plan.with_regions:
        return experiment.ring_edits(picture, same, other, check.ring)
    own_seed = int(experiment.own_generator(item.name, check.seed).integers(1 << 62))
    return experiment.region_edits(picture, same, other, own_seed)


def _has_both(picture: Seen) -> bool:
    """Whether there is an object, and something beside it."""
    return picture.region is not None and picture.has_rest and bool((picture.region > 0.5).any())
