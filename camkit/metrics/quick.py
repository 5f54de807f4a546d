"""A metric of one pass, for comparisons of many maps."""

from __future__ import annotations

from camkit.metrics.evaluator import Evaluator
from camkit.metrics.heat import Heat
from camkit.metrics.registry import register_metric

_HOTTEST = 0.2
"""The share of the picture that is removed: a fifth, about the size of the main object in a photo."""


@register_metric(
    "top-loss",
    title="Loss without the hottest fifth",
    summary="share of the score that is lost if the hottest fifth of the picture is removed",
    paper="one step of deletion: Petsiuk et al. 2018, RISE, arXiv:1806.07421",
    better="higher",
    space="input",
    cost="1",
    faithful=True,
    fill="blur",
)
def top_loss(evaluator: Evaluator, heat: Heat) -> float:
    """Return (Y - Y') / Y, where Y' is the score without the hottest fifth: at most 1 for probabilities.

    Higher is better; it is negative if Y' is higher than Y. One step says less than a whole curve: compare it over
    several pictures only. One step of deletion, Petsiuk et al. 2018.

    Raises:
        UndefinedError: the score of the picture is not positive, all cells of the map are equal, or a score is not
            finite.
    """
    before = evaluator.positive_confidence
    return float(1 - evaluator.scores_at(heat, [_HOTTEST], "blur", kept=False)[0] / before)
