"""Metrics of stability: how much the map changes if the picture hardly changes."""

from __future__ import annotations

import numpy as np
import torch

from camkit.metrics.evaluator import Evaluator
from camkit.metrics.heat import Heat
from camkit.metrics.metric_values import UndefinedError
from camkit.metrics.registry import register_metric

RADIUS = 0.1
"""The largest change of a value of the picture, as a share of the picture's standard deviation: about 6 of 256 levels
of a photo, which nobody sees."""

SAMPLES = 8
"""Changed pictures: the largest of 8 draws lies above the median of all with probability 0.996."""


@register_metric(
    "max-sensitivity",
    title="Max-sensitivity",
    summary="largest relative change of the map among small random changes of the picture",
    paper="Yeh et al. 2019, On the (In)fidelity and Sensitivity of Explanations, arXiv:1901.09392, Eq. 3",
    better="lower",
    space="input",
    cost=f"{SAMPLES} maps",
)
def max_sensitivity(evaluator: Evaluator, heat: Heat) -> float:
    """Return max over y of |M(y) - M(x)| / |M(x)|, where y is uniform in x +- RADIUS: 0 is best, and it has no bound.

    Lower is better. The norms are Euclidean. The paper, Yeh et al. 2019, has no denominator; with it, maps that mark
    much and little can be compared. A map that does not depend on the picture has 0, so low values alone say nothing
    about a map's truth.

    Raises:
        UndefinedError: the map is empty, it is not known how it was made, or the map of a changed picture is not
            finite.
    """
    picture, base = evaluator.picture, heat.unit.double()
    radius = RADIUS * float(picture.std(unbiased=False))
    draws = np.random.default_rng(evaluator.seed).uniform(-radius, radius, (SAMPLES, *picture.shape))
    maps = heat.made_anew(picture + torch.from_numpy(draws.astype(np.float32)))
    moved = max(float((made.double() - base).norm()) for made in maps)
    if not np.isfinite(moved):
        raise UndefinedError("non_finite", "the map of a changed picture contains NaN or infinity")
    return moved / float(base.norm())
