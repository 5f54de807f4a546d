"""The experiment over a sample: edits made ahead, shown to the model in full batches, rows kept as they come."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from camkit.background import experiment
from camkit.background.answers import ask
from camkit.background.experiment import Answer, Seen
from camkit.background.journal import Journal
from camkit.background.plan import Plan, load_seen
from camkit.background.values import Item, Progress
from camkit.errors import CamkitError

_WORKERS = min(4, os.cpu_count() or 1)
_KEPT = 128
"""Pictures of the sample kept in memory: each is a background of others."""


def run_trial(plan: Plan, journal: Journal, progress: Progress, sample: Sequence[Item]) -> None:
    """Show the edits of every picture of the sample that has no row yet."""
    done = journal.rows("edits")
    todo = [number for number, item in enumerate(sample) if item.name not in done]
    progress("experiment", len(sample) - len(todo), len(sample))
    for count, (number, answers) in enumerate(answered(plan, sample, todo), start=len(sample) - len(todo) + 1):
        journal.append([{"kind": "edits", "name": sample[number].name, "answers": answers}])
        progress("experiment", count, len(sample))


def answered(plan: Plan, sample: Sequence[Item], numbers: Sequence[int]) -> Iterator[tuple[int, dict[str, Answer]]]:
    """Show the edits of some pictures of the sample; give the answers picture by picture."""
    check = plan.settings.check
    partners = experiment.draw_partners(sample, check.pastes, check.seed)
    load = functools.lru_cache(maxsize=_KEPT)(functools.partial(load_seen, plan))

    def make(number: int) -> list[tuple[str, Tensor]]:
        chosen = partners[number]
        if chosen is None:
            return []
        same, other = ([sample[one] for one in ones] for ones in (chosen.same, chosen.other))
        made = ((name, edit()) for name, edit in edits_of(plan, sample[number], same, other, load))
        return [(name, tensor) for name, tensor in made if tensor is not None]

    def answer(batch: Tensor, of: list[int]) -> list[Answer]:
        return ask(plan, batch, [plan.matched.indices[sample[number].label] for number in of])

    return experiment.run(numbers, make, answer, check.batch_size, _WORKERS)


def edits_of(
    plan: Plan, item: Item, same: Sequence[Item], other: Sequence[Item], load: Callable[[Item], Seen]
) -> list[experiment.Edit]:
    """List a picture's edits; none where a picture cannot be read, or has nothing beside its object."""
    try:
        picture = load(item)
        own, others = ([load(one) for one in ones] for ones in (same, other))
    except CamkitError:
        return []
    if not plan.with_regions:
        return experiment.ring_edits(picture, own, others, plan.settings.check.ring)
    if picture.region is None or not picture.has_rest or not bool((picture.region > 0.5).any()):
        return []
    return experiment.region_edits(picture, own, others, plan.settings.check.seed)
