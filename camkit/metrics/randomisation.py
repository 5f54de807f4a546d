"""Metrics that shuffle the weights: a map that shows what a network learned must then change.

The user's model is never touched: the weights of a copy are shuffled, which takes the memory of a second model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.metrics.evaluator import Evaluator
from camkit.metrics.heat import Heat
from camkit.metrics.metric_values import UndefinedError
from camkit.metrics.registry import register_metric
from camkit.models.modules import shuffle_weights

STEPS = 8
"""Steps of the cascade. The paper makes one for each layer; with 8, a ResNet-18 needs 8
maps and not 21."""

SMOOTH_SAMPLES = 8
"""Noisy pictures whose maps are averaged by the smooth form."""

SMOOTH_NOISE = 0.1
"""Standard deviation of that noise, as a share of the picture's: SmoothGrad recommends 0.1 to 0.2 of the range of
values, which is 4 to 5 standard deviations, but maps of CAM methods are smooth already."""

BINS = 100
"""Bins of the histogram whose entropy is a map's complexity: fine enough for 256 levels of heat, and few enough for the
smallest inputs."""

_ADEBAYO = "Adebayo et al. 2018, Sanity Checks for Saliency Maps, arXiv:1810.03292"
_HEDSTROEM = "Hedström et al. 2024, A Fresh Look at Sanity Checks for Saliency Maps, arXiv:2405.02383"


@register_metric(
    "mprt",
    title="MPRT",
    summary="rank correlation with the maps of weights that are shuffled from the output to the input",
    paper=_ADEBAYO,
    better="lower",
    space="model",
    cost=f"{STEPS} maps, and a copy of the model",
)
def mprt(evaluator: Evaluator, heat: Heat) -> float:
    """Return the mean of Spearman's correlation over the steps of the cascade: -1 to 1; 0 means that nothing is left.

    Lower is better. Layers are shuffled in the reverse order of their definition, in STEPS groups of about equal
    numbers; each step adds a group to the ones before. A step whose map is empty is left out. Adebayo et al. 2018.

    Raises:
        UndefinedError: all maps are constant, it is not known how the map was made, or the model cannot be copied.
    """
    picture = evaluator.picture[None]
    return _mean_correlation(
        heat.values, (heat.made_anew(picture, model)[0] for model in _cascade(evaluator, heat, STEPS))
    )


@register_metric(
    "smooth-mprt",
    title="Smooth MPRT",
    summary="MPRT of maps that are averaged over noisy pictures",
    paper=_HEDSTROEM,
    better="lower",
    space="model",
    cost=f"{(STEPS + 1) * SMOOTH_SAMPLES} maps, and a copy of the model",
)
def smooth_mprt(evaluator: Evaluator, heat: Heat) -> float:
    """Return MPRT's value for the mean maps of SMOOTH_SAMPLES noisy pictures: -1 to 1; 0 means that nothing is left.

    Lower is better. Averaging takes the noise from the maps, which would lower their correlation whatever the weights
    do. Hedström et al. 2024.

    Raises:
        UndefinedError: as for ``mprt``.
    """
    picture = evaluator.picture
    draws = np.random.default_rng(evaluator.seed).standard_normal((SMOOTH_SAMPLES, *picture.shape), np.float32)
    noisy = picture + SMOOTH_NOISE * picture.std(unbiased=False) * torch.from_numpy(draws)
    base = _mean(heat.made_anew(noisy))
    return _mean_correlation(base, (_mean(heat.made_anew(noisy, model)) for model in _cascade(evaluator, heat, STEPS)))


@register_metric(
    "efficient-mprt",
    title="Efficient MPRT",
    summary="relative rise of the map's entropy if all weights are shuffled",
    paper=_HEDSTROEM,
    better="higher",
    space="model",
    cost="1 map, and a copy of the model",
)
def efficient_mprt(evaluator: Evaluator, heat: Heat) -> float:
    """Return (E' - E) / E, where E and E' are the entropies of the histograms of the maps before and after: from -1 up.

    Higher is better. Hedström et al. 2024.

    Raises:
        UndefinedError: E is 0, as for a map of one level; the map of the shuffled weights is empty; it is not known how
            the map was made; or the model cannot be copied.
    """
    before = entropy(heat.values)
    if not before > 0:
        raise UndefinedError("constant_map", "the map has one level only, so its entropy is zero")
    model = next(_cascade(evaluator, heat, 1))
    after = heat.made_anew(evaluator.picture[None], model)[0]
    if not bool(after.any()):
        raise UndefinedError("undefined", "the map of the shuffled weights is empty")
    return (entropy(after) - before) / before


def entropy(heat: Float[Tensor, "*size"]) -> float:
    """Return the entropy of the histogram of a map's values, in nats: 0 to log(BINS)."""
    counts, _ = np.histogram(heat.double().numpy(), BINS)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def rank_correlation(first: Float[Tensor, "*size"], second: Float[Tensor, "*size"]) -> float | None:
    """Return Spearman's correlation of two maps, equal values at their mean rank; None if one is constant."""
    from scipy.stats import rankdata  # noqa: PLC0415 - it takes a second to import, and few metrics need it

    if bool((first == first.flatten()[0]).all()) or bool((second == second.flatten()[0]).all()):
        return None
    one, other = (rankdata(values.flatten().numpy()) for values in (first, second))
    return float(np.corrcoef(one, other)[0, 1])


def _mean(maps: list[Tensor]) -> Float[Tensor, "*size"]:
    return torch.stack(maps).mean(0)


def _mean_correlation(base: Tensor, maps: Iterator[Tensor]) -> float:
    correlations = [rank_correlation(base, made) for made in maps]
    defined = [value for value in correlations if value is not None]
    if not defined:
        raise UndefinedError("undefined", "the maps of the shuffled weights are all empty, or the map is constant")
    return float(np.mean(defined))


def _cascade(evaluator: Evaluator, heat: Heat, steps: int) -> Iterator[nn.Module]:
    """Yield a copy of the model after each step; the copy is changed further when the next one is asked for."""
    if heat.remake is None:
        heat.made_anew(evaluator.picture[None])  # raises the reason
    try:
        model = copy.deepcopy(evaluator.explainer.model)
    except Exception as error:  # some modules cannot be copied
        raise UndefinedError("undefined", f"the model cannot be copied ({type(error).__name__}: {error})") from error
    layers = [module for module in model.modules() if any(weight.dim() > 1 for weight in module.parameters(False))]
    if not layers:
        raise UndefinedError("undefined", "the model has no weights that could be shuffled")
    generator = torch.Generator().manual_seed(evaluator.seed)
    for group in np.array_split(np.arange(len(layers))[::-1], min(steps, len(layers))):
        shuffle_weights([layers[number] for number in group], generator)
        yield model
