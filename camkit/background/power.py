"""How many pictures the experiment needs, as far as that is known before a check runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from scipy import stats

from camkit.background.values import Item
from camkit.config.settings import LimitsSection

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


def notice(sample: Sequence[Item], limits: LimitsSection) -> str:
    """Say whether the sample of the experiment is large enough to exclude effects above the limits."""
    if not sample:
        return "the experiment has no pictures"
    limit = min(limits.gap, limits.sufficiency, limits.attraction)
    needed = pictures_needed(limit)
    if needed is None:
        return "no number of pictures excludes an effect above a limit of 0"
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
        return f"{text}; --strict needs as many of each class, and {small}"
    return f"{text}, and as many of each class, as --strict needs" if len(counts) > 1 else text


def _fewer(counts: Mapping[str, int], needed: int) -> str:
    """Name the classes with too few pictures, such as "every class has fewer (cat 10)"; "" if none has."""
    small = sorted((name for name in counts if counts[name] < needed), key=lambda name: counts[name])
    if not small:
        return ""
    named = ", ".join(f"{name} {counts[name]}" for name in small[:_MOST_NAMED])
    which = "every class has" if len(small) == len(counts) else f"{len(small)} of {len(counts)} classes have"
    return f"{which} fewer ({named}{', ...' * (len(small) > _MOST_NAMED)})"
