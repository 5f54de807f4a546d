"""What is known before a check runs: how many pictures the experiment needs, and how long the check will take."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from scipy import stats

from camkit.background.data import Item
from camkit.background.experiment import EDITS, Experiment
from camkit.background.heat import HEAT, CheckHeat
from camkit.background.plan import Plan
from camkit.background.sanity import SANITY_PICTURES
from camkit.background.showcase import OFFENDERS
from camkit.models import device_of
from camkit.options import Limits

SPREAD = 0.35
"""Standard deviation of one picture's share in a gap or a sufficiency, with two backgrounds of either kind. It is the
median for the gap of all classes together over 40 clean networks of the lab (scripts/results/validation.md); the
largest value was 0.5, in networks with an accuracy near 40%."""

CHANCE_TO_EXCLUDE = 0.8
"""How often the check should tell a model without any effect from a model at the limit: a usual value for planning."""

_CONFIDENCE = 0.95

_MOST_NAMED = 3
"""The most classes with too few pictures that the sentence names."""


def pictures_needed(limit: float) -> int | None:
    """Return how many pictures exclude an effect above a limit, if the model has none; None if the limit is 0.

    The interval of the estimate reaches 1.96 standard errors up, and the estimate itself may lie 0.84 above 0, so
    n = ((1.96 + 0.84) * SPREAD / limit)^2. There must be enough groups as well for Wilson's interval of no change to
    end below the limit.

    >>> pictures_needed(0.1), pictures_needed(0.05), pictures_needed(0.0)
    (97, 385, None)
    """
    if limit <= 0:
        return None
    reach = float(stats.norm.ppf((1 + _CONFIDENCE) / 2))
    chance = float(stats.norm.ppf(CHANCE_TO_EXCLUDE))
    without_change = reach**2 * (1 - limit) / limit
    return math.ceil(max(((reach + chance) * SPREAD / limit) ** 2, without_change))


def notice(sample: Sequence[Item], limits: Limits) -> str:
    """Say whether the sample of the experiment is large enough to exclude effects above the limits."""
    if not sample:
        return "the experiment has no pictures"
    limit = min(limits.gap, limits.sufficiency, limits.attraction)
    needed = pictures_needed(limit)
    if needed is None:
        return "with a limit of 0, no number of pictures is enough"
    counts = Counter(item.label for item in sample)
    untestable = _fewer(counts, limits.least_pictures)
    text = (
        f"the experiment needs about {needed} pictures to exclude an effect above {limit:g} if the model has none; it "
        f"has {len(sample)}{'' if len(sample) >= needed and not untestable else ', so the verdict may be INCONCLUSIVE'}"
    )
    if untestable:
        return f"{text}; the check tests only classes with at least {limits.least_pictures} pictures, and {untestable}"
    small = _fewer(counts, needed)
    if small:
        return f"{text}; --strict needs about {needed} of each class; {small}"
    return f"{text}, and at least {needed} of each class, as --strict needs" if len(counts) > 1 else text


def _fewer(counts: Mapping[str, int], needed: int) -> str:
    """Name the classes with too few pictures, such as "every class has fewer (cat 10)"; "" if none has."""
    small = sorted((name for name in counts if counts[name] < needed), key=lambda name: counts[name])
    if not small:
        return ""
    named = ", ".join(f"{name} {counts[name]}" for name in small[:_MOST_NAMED])
    which = "every class has" if len(small) == len(counts) else f"{len(small)} of {len(counts)} classes have"
    return f"{which} fewer ({named}{', ...' * (len(small) > _MOST_NAMED)})"


_HEAT_PICTURES = 8
"""Pictures timed for the heat on the CPU: enough for a stable mean, and cheap. A GPU needs a full batch."""

_EDITED_PICTURES = 4
"""Pictures timed for the experiment: each already stands for a dozen edits."""

_FURTHER_MAPS = 3 * SANITY_PICTURES + OFFENDERS
"""Maps besides one for each picture: three of each picture of the sanity check, and those that the report shows."""


def estimate_seconds(plan: Plan, done: Mapping[str, int] | None = None, workers: int = 1) -> float:
    """Time a few pictures of the heat and of the experiment, and scale up to the whole check.

    Both run once before they are timed, because the first pass is slower. The results are discarded.

    Args:
        plan: the check.
        done: how many rows of each kind an earlier run finished, if this check resumes that run.
        workers: how many processes share the heat and the experiment; each is taken to be as fast as this one.
    """
    items, sample, done = plan.data.items, plan.sample, done or {}
    few = items[: plan.batch_size if device_of(plan.model.module).type == "cuda" else _HEAT_PICTURES]
    heat = CheckHeat(plan)
    first_pass = _seconds(lambda: list(heat.rows(few)))
    per_map = _seconds(lambda: list(heat.rows(few))) / max(1, len(few))
    edited = sample[:: max(1, len(sample) // _EDITED_PICTURES)][:_EDITED_PICTURES]
    experiment = Experiment(plan)
    list(experiment.rows(edited))  # loads the pictures' partners, which serve many others too
    per_edited = _seconds(lambda: list(experiment.rows(edited))) / max(1, len(edited))
    return (
        first_pass
        + per_map * (len(items) - done.get(HEAT.name, 0)) / workers
        + per_map * min(_FURTHER_MAPS, len(items))
        + per_edited * (len(sample) - done.get(EDITS.name, 0)) / workers
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
