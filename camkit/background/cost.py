"""How long a check will take, from a few of its own pictures: said before it is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from camkit.background.heat import heat_rows
from camkit.background.plan import Plan
from camkit.background.sanity import SANITY_PICTURES
from camkit.background.statistics import bootstrap_sums
from camkit.background.trial import answer_edits
from camkit.models import device_of

_HEAT_PICTURES = 8
_TRIAL_PICTURES = 4
_STRIPS = 12


@dataclass(frozen=True)
class Cost:
    """Seconds, by stage."""

    heat: float
    sanity: float
    experiment: float
    measures: float

    @property
    def seconds(self) -> float:
        """All together."""
        return self.heat + self.sanity + self.experiment + self.measures

    @property
    def words(self) -> str:
        """The time as a person says it: ``"about 40 s"``."""
        if self.seconds < 100:
            return f"about {max(1, round(self.seconds))} s"
        minutes = self.seconds / 60
        return f"about {minutes:.0f} min" if minutes < 100 else f"about {minutes / 60:.1f} h"


def estimate(plan: Plan, done: Mapping[str, int] | None = None) -> Cost:
    """Run a few pictures through each stage, twice where the first time is slower, and scale up.

    Their rows are not kept. ``done`` counts, by kind, rows that an earlier run finished.
    """
    finished = done or {}
    items, sample = plan.data.items, plan.sample
    few = plan.settings.check.batch_size if device_of(plan.model.module).type == "cuda" else _HEAT_PICTURES
    first = _seconds(lambda: list(heat_rows(plan, items[:few])))
    a_heat = _seconds(lambda: list(heat_rows(plan, items[:few]))) / max(1, len(items[:few]))
    some = sample[:: max(1, len(sample) // _TRIAL_PICTURES)][:_TRIAL_PICTURES]
    a_trial = 0.0
    if some:
        list(answer_edits(plan, some[:1]))
        a_trial = _seconds(lambda: list(answer_edits(plan, some))) / len(some)
    rows = max(1, len(items))
    draw = _seconds(lambda: bootstrap_sums(np.ones((rows, 3)), np.arange(rows), [0]))
    return Cost(
        heat=a_heat * max(0, len(items) - finished.get("heat", 0)),
        sanity=3 * a_heat * min(SANITY_PICTURES, len(items)) + max(0.0, first - few * a_heat),
        experiment=a_trial * max(0, len(sample) - finished.get("edits", 0)),
        measures=6 * draw + _STRIPS * (a_heat + a_trial / 2) + 1,
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
