"""Metrics of the whole map: multiplied with the picture, made again, with shuffled weights, and beside a region.

In the metrics that multiply, M is the map scaled to 0..1 at the size of the input, x the model's input, Y its score of
x and O its score of x M. Those that shuffle weights never touch the user's model: the weights of a copy are shuffled,
which takes the memory of a second model. Those with a region say where the heat lies, not whether it is true.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from camkit.images.filling import POINTING_TOLERANCE, dilated
from camkit.metrics.evaluator import Evaluator
from camkit.metrics.heat import Heat
from camkit.metrics.registry import UndefinedError, register_metric
from camkit.models.modules import shuffle_weights

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


@register_metric(
    "pointing",
    title="Pointing game",
    summary="whether the hottest pixel lies in the object's region; the mean over pictures is a rate",
    paper="Zhang et al. 2016, Top-down Neural Attention by Excitation Backprop, arXiv:1608.00507",
    better="higher",
    space="map",
    cost="0",
    needs_region=True,
)
def pointing(evaluator: Evaluator, heat: Heat) -> float:
    """Return the share of the hottest pixels that lie in the region widened by 15 pixels: 1 or 0 unless several tie.

    Higher is better. Zhang et al. 2016.

    Raises:
        UndefinedError: there is no region, or all cells of the map are equal.
    """
    near = dilated(region_of(evaluator), POINTING_TOLERANCE)
    heat.check_order()
    return float(near[heat.values == heat.values.max()].double().mean())


@register_metric(
    "energy",
    title="Energy-based pointing game",
    summary="share of the heat that lies in the object's region",
    paper="Wang et al. 2020, Score-CAM, arXiv:1910.01279, 4.3",
    better="higher",
    space="map",
    cost="0",
    needs_region=True,
)
def energy(evaluator: Evaluator, heat: Heat) -> float:
    """Return the sum of the map within the region divided by its sum: 0 to 1.

    Higher is better; a map without meaning has the region's share of the picture. Wang et al. 2020, 4.3.

    Raises:
        UndefinedError: there is no region, or the map is empty.
    """
    region, unit = region_of(evaluator), heat.unit.double()
    return float(unit[region].sum() / unit.sum())


def region_of(evaluator: Evaluator) -> Bool[Tensor, "*size"]:
    """Return the region.

    Raises:
        UndefinedError: there is none.
    """
    if evaluator.region is None or not bool(evaluator.region.any()):
        raise UndefinedError("needs_region", "there is no region to compare the map with; pass region")
    return evaluator.region
