"""Metrics that multiply the picture by the map: average drop, increase, and ADCC with its parts.

M is the map scaled to 0..1 at the size of the input, x the model's input, Y its score of x and O its score of x M.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from torch import Tensor

from camkit.metrics.evaluator import Evaluator
from camkit.metrics.heat import Heat
from camkit.metrics.metric_values import UndefinedError
from camkit.metrics.registry import register_metric

_POPPI = "Poppi et al. 2021, Revisiting the Evaluation of Class Activation Mapping, arXiv:2104.10252"
_CHATTOPADHAY = "Chattopadhay et al. 2018, Grad-CAM++, arXiv:1710.11063, 4.1"


def masked_score(evaluator: Evaluator, heat: Heat) -> float:
    """Return O, the score of the picture times its map."""
    return float(evaluator.scored((evaluator.picture * heat.unit)[None])[0])


@register_metric(
    "average-drop",
    title="Average drop",
    summary="share of the score that is lost if the picture is multiplied by its map",
    paper=_CHATTOPADHAY,
    better="lower",
    space="input",
    cost="1",
    faithful=True,
)
def average_drop(evaluator: Evaluator, heat: Heat) -> float:
    """Return max(0, Y - O) / Y, a share: 0 is best, and 1 is worst for probabilities.

    Lower is better. A map that is 1 everywhere has 0 as well; see ``adcc``. It is the value of one picture; the average
    over pictures is the metric of the paper, Chattopadhay et al. 2018, which gives it in per cent.

    Raises:
        UndefinedError: the map is empty, the score of the picture is not positive, or a score is not finite.
    """
    before = evaluator.positive_confidence
    return max(0.0, before - masked_score(evaluator, heat)) / before


@register_metric(
    "increase",
    title="Increase in confidence",
    summary="whether the score rises if the picture is multiplied by its map; the mean over pictures is a rate",
    paper=_CHATTOPADHAY,
    better="higher",
    space="input",
    cost="1",
    faithful=True,
)
def increase(evaluator: Evaluator, heat: Heat) -> float:
    """Return 1 if O > Y, else 0.

    Higher is better. The mean over pictures is the metric of the paper, Chattopadhay et al. 2018, which gives it in per
    cent.

    Raises:
        UndefinedError: the map is empty, or a score is not finite.
    """
    return float(masked_score(evaluator, heat) > evaluator.confidence)


@register_metric(
    "complexity",
    title="Complexity",
    summary="mean of the map: how much of the picture it marks",
    paper=_POPPI,
    better="lower",
    space="map",
    cost="0",
)
def complexity(evaluator: Evaluator, heat: Heat) -> float:  # noqa: ARG001 - the map says it all
    """Return mean(M), the L1 norm as a share of the largest possible one: above 0, and 1 for a map of ones.

    Lower is better. Poppi et al. 2021.

    Raises:
        UndefinedError: the map is empty.
    """
    return float(heat.unit.double().mean())


@register_metric(
    "coherency",
    title="Coherency",
    summary="whether the picture times its map has the same map",
    paper=_POPPI,
    better="higher",
    space="input",
    cost="one map",
)
def coherency(evaluator: Evaluator, heat: Heat) -> float:
    """Return (1 + r) / 2, where r is the correlation of the maps of x and of x M, pixel by pixel: 0 to 1.

    Higher is better. Poppi et al. 2021.

    Raises:
        UndefinedError: the map is empty, one of the two is the same everywhere, or it is not known how it was made.
    """
    again = heat.made_anew((evaluator.picture * heat.unit)[None])[0]
    return (1 + correlation(heat.unit, again)) / 2


@register_metric(
    "adcc",
    title="ADCC",
    summary="harmonic mean of coherency, 1 - complexity and 1 - average drop",
    paper=_POPPI,
    better="higher",
    space="input",
    cost="1, and one map",
    faithful=True,
)
def adcc(evaluator: Evaluator, heat: Heat) -> float:
    """Return 3 / (1 / coherency + 1 / (1 - complexity) + 1 / (1 - average drop)): 0 to 1; 0 if any part is 0.

    Higher is better. Poppi et al. 2021.

    Raises:
        UndefinedError: as for its three parts.
    """
    parts = (coherency(evaluator, heat), 1 - complexity(evaluator, heat), 1 - average_drop(evaluator, heat))
    return 0.0 if min(parts) <= 0 else 3 / sum(1 / part for part in parts)


def correlation(first: Float[Tensor, "*size"], second: Float[Tensor, "*size"]) -> float:
    """Return Pearson's correlation of two maps.

    Raises:
        UndefinedError: one of them is the same everywhere.
    """
    one, other = (values.double().flatten().numpy() for values in (first, second))
    if one.min() == one.max() or other.min() == other.max():
        raise UndefinedError("undefined", "a map that is the same everywhere has no correlation with another")
    return float(np.corrcoef(one, other)[0, 1])
