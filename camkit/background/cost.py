"""Estimate how long a check will take, by running a few of its own pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from camkit.background.heat import Heat
from camkit.background.journal import EDITS, HEAT
from camkit.background.plan import Plan
from camkit.background.sanity import SANITY_PICTURES
from camkit.background.trial import WORKERS, Trial
from camkit.kit.statistics import bootstrap_sums
from camkit.models import device_of

_HEAT_PICTURES = 8
"""Pictures timed for the heat on the CPU: enough for a stable mean, and cheap. A GPU needs a full batch."""

_TRIAL_PICTURES = 4
"""Pictures timed for the experiment: each already stands for a dozen edits."""

_STRIPS = 12
"""Pictures that the report shows in detail, each with its heat and about half of its edits."""

_SANITY_PASSES = 3
"""Heat passes over the sanity check's pictures: with the method, with HiResCAM, and with shuffled weights."""

_RESAMPLINGS = 6
"""Computing the measures, for all classes and for each class, takes about as long as this many bootstraps."""

_REPORT_SECONDS = 1.0
"""Time to write the reports."""


@dataclass(frozen=True)
class Cost:
    """The expected duration of each stage, in seconds."""

    heat: float
    sanity: float
    experiment: float
    measures: float

    @property
    def seconds(self) -> float:
        """The sum of all stages."""
        return self.heat + self.sanity + self.experiment + self.measures

    @property
    def words(self) -> str:
        """The sum as text, such as ``"about 40 s"``."""
        if self.seconds < 100:
            return f"about {max(1, round(self.seconds))} s"
        minutes = self.seconds / 60
        return f"about {minutes:.0f} min" if minutes < 100 else f"about {minutes / 60:.1f} h"


def estimate_cost(plan: Plan, done: Mapping[str, int] | None = None, workers: int = 1) -> Cost:
    """Time a few pictures in each stage and scale up to the whole check; their results are discarded.

    The heat and the experiment run once before they are timed, because the first pass is slower.

    Args:
        plan: the check.
        done: how many rows of each kind an earlier run finished, if this check resumes that run.
        workers: how many processes share the heat and the experiment; each is taken to be as fast as this one.
    """
    done = done or {}
    items, sample, heat = plan.data.items, plan.sample, Heat(plan)
    on_gpu = device_of(plan.model.module).type == "cuda"
    few = items[: plan.batch_size if on_gpu else _HEAT_PICTURES]
    first_pass = _seconds(lambda: list(heat.rows(few)))
    per_heat = _seconds(lambda: list(heat.rows(few))) / max(1, len(few))
    trials = sample[:: max(1, len(sample) // _TRIAL_PICTURES)][:_TRIAL_PICTURES]
    per_trial = 0.0
    if trials:
        trial, again = Trial(plan), Trial(plan)
        list(trial.rows(trials))  # loads the pictures' partners, which serve many others too
        loading = _seconds(lambda: [again.load(item) for item in trials]) / WORKERS
        per_trial = (_seconds(lambda: list(trial.rows(trials))) + loading) / len(trials)
    rows = max(1, len(items))
    resampling = _seconds(lambda: bootstrap_sums(np.ones((rows, 3)), np.arange(rows), [0]))
    return Cost(
        heat=per_heat * max(0, len(items) - done.get(HEAT, 0)) / workers,
        sanity=_SANITY_PASSES * per_heat * min(SANITY_PICTURES, len(items))
        + max(0.0, first_pass - len(few) * per_heat),
        experiment=per_trial * max(0, len(sample) - done.get(EDITS, 0)) / workers,
        measures=_RESAMPLINGS * resampling + _STRIPS * (per_heat + per_trial / 2) + _REPORT_SECONDS,
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
