"""Metrics that remove pixels in the order of the map: insertion, deletion, SRG, ROAD, and one step of deletion.

H(a) is the hot set of share a (``curves.py``), K(a) the score of the picture with only H(a) kept, R(a) its score with
H(a) removed. The picture itself has the score R(0) = K(1), the filled picture R(1) = K(0).
"""

from __future__ import annotations

import numpy as np

from camkit.metrics.evaluator import Evaluator
from camkit.metrics.heat import Heat
from camkit.metrics.registry import register_metric

_HOTTEST = 0.2
"""The share of the picture that ``top_loss`` removes: a fifth, about the size of the main object in a photo."""

ROAD_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the pixels that ROAD keeps and removes. They lie symmetrically, so that the pictures without the coldest
pixels are those that keep the hottest: 10 passes. The authors take 7 shares from 0.1 to 0.9."""


@register_metric(
    "insertion",
    title="Insertion",
    summary="area under the score while the hottest pixels come back into a blurred picture",
    paper="Petsiuk et al. 2018, RISE, arXiv:1806.07421, 3.3",
    better="higher",
    space="input",
    cost="one for each step",
    faithful=True,
    fill="blur",
)
def insertion(evaluator: Evaluator, heat: Heat) -> float:
    """Return the area under K(a) from a = 0 to 1: between 0 and 1 for probabilities.

    Higher is better. Petsiuk et al. 2018, 3.3.

    Raises:
        UndefinedError: all cells of the map are equal, or a score is not finite.
    """
    return evaluator.curve(heat, "blur", kept=True).area


@register_metric(
    "deletion",
    title="Deletion",
    summary="area under the score while the hottest pixels are removed",
    paper="Petsiuk et al. 2018, RISE, arXiv:1806.07421, 3.3",
    better="lower",
    space="input",
    cost="one for each step",
    faithful=True,
    fill="mean",
)
def deletion(evaluator: Evaluator, heat: Heat) -> float:
    """Return the area under R(a) from a = 0 to 1: between 0 and 1 for probabilities.

    Lower is better. Petsiuk et al. 2018, 3.3.

    Raises:
        UndefinedError: all cells of the map are equal, or a score is not finite.
    """
    return evaluator.curve(heat, "mean", kept=False).area


@register_metric(
    "srg",
    title="SRG",
    summary="symmetric relevance gain: area while the coldest pixels go first, minus area while the hottest go first",
    paper="Bluecher et al. 2024, Decoupling Pixel Flipping and Occlusion Strategy, TMLR, arXiv:2401.06654",
    better="higher",
    space="input",
    cost="two for each step",
    faithful=True,
    fill="blur",
)
def srg(evaluator: Evaluator, heat: Heat) -> float:
    """Return the area under K(a) - R(a): between -1 and 1 for probabilities; a map without meaning has about 0.

    Higher is better. What the fill does to the network cancels out, since both curves use it. Bluecher et al. 2024.

    Raises:
        UndefinedError: all cells of the map are equal, or a score is not finite.
    """
    return evaluator.curve(heat, "blur", kept=True).area - evaluator.curve(heat, "blur", kept=False).area


@register_metric(
    "road",
    title="ROAD",
    summary="score without the coldest minus score without the hottest pixels, which are imputed from their neighbours",
    paper="Rong et al. 2022, A Consistent and Efficient Evaluation Strategy for Attribution Methods, arXiv:2202.00449",
    better="higher",
    space="input",
    cost="10, and the time of the imputation",
    faithful=True,
    fill="linear",
)
def road(evaluator: Evaluator, heat: Heat) -> float:
    """Return the mean of K(a) - R(a) over a in ROAD_SHARES, with ROAD's noisy linear imputation.

    Between -1 and 1 for probabilities; higher is better, and a map without meaning has about 0. K(a) is the picture
    without its coldest 1 - a, so this is LeRF - MoRF over removed shares that lie symmetrically. Rong et al. 2022.

    Raises:
        UndefinedError: all cells of the map are equal, or a score is not finite.
    """
    kept, removed = (evaluator.scores_at(heat, ROAD_SHARES, "linear", kept=kept) for kept in (True, False))
    return float(np.mean(kept - removed))


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
