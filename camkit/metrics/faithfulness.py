"""The metrics: those that remove pixels, or cells of a layer, in the order of the map, and those of the whole map.

H(a) is the hot set of share a (``evaluator.py``), K(a) the score of the picture with only H(a) kept, R(a) its score
with H(a) removed. The picture itself has the score R(0) = K(1), the filled picture R(1) = K(0).

In feature space, the layer is that of the Evaluator. A removed cell takes the values that it has if all pixels of the
picture are removed, by the same fills as pixels. The mean of the cells would not do: a network that averages them would
notice nothing. Values of these metrics cannot be compared with those of metrics that change pixels, so they have names
of their own.

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

from camkit.engine.heatmap import cell_means
from camkit.errors import LayerError, MethodError
from camkit.explaining.explainer import Explainer
from camkit.images.filling import POINTING_TOLERANCE, dilated
from camkit.methods import Method, WeightFunction
from camkit.methods.feature_maps import KeptMaps
from camkit.metrics.evaluator import (
    Curve,
    Evaluator,
    Heat,
    UndefinedError,
    curve_sets,
    even_shares,
    register_metric,
)
from camkit.models.modules import shuffle_weights
from camkit.types import ScoresOfMaps

HOTTEST = 0.2
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
    return float(1 - evaluator.scores_at(heat, [HOTTEST], "blur", kept=False)[0] / before)


_COST = "2, and the head {} for each step"

FILL = "blur"
"""What the removed pixels of the picture are filled with, unless the Evaluator has another fill."""


@register_metric(
    "feature-insertion",
    title="Insertion of feature cells",
    summary="area under the score while the hottest cells of the layer come back",
    paper="after Petsiuk et al. 2018, RISE, arXiv:1806.07421, which inserts pixels",
    better="higher",
    space="features",
    cost=_COST.format("once"),
    faithful=True,
    fill=FILL,
)
def feature_insertion(evaluator: Evaluator, heat: Heat) -> float:
    """Return the area under the score with only the hottest cells kept: 0 to 1 for probabilities.

    Higher is better. After Petsiuk et al. 2018.

    Raises:
        UndefinedError: as for ``feature_curves``.
    """
    return feature_curves(evaluator, heat)[0].area


@register_metric(
    "feature-deletion",
    title="Deletion of feature cells",
    summary="area under the score while the hottest cells of the layer are removed",
    paper="after Petsiuk et al. 2018, RISE, arXiv:1806.07421, which removes pixels",
    better="lower",
    space="features",
    cost=_COST.format("once"),
    faithful=True,
    fill=FILL,
)
def feature_deletion(evaluator: Evaluator, heat: Heat) -> float:
    """Return the area under the score with the hottest cells removed: 0 to 1 for probabilities.

    Lower is better. After Petsiuk et al. 2018.

    Raises:
        UndefinedError: as for ``feature_curves``.
    """
    return feature_curves(evaluator, heat)[1].area


@register_metric(
    "feature-srg",
    title="SRG of feature cells",
    summary="symmetric relevance gain on the cells of the layer instead of pixels",
    paper="after Bluecher et al. 2024, arXiv:2401.06654, which removes pixels",
    better="higher",
    space="features",
    cost=_COST.format("twice"),
    faithful=True,
    fill=FILL,
)
def feature_srg(evaluator: Evaluator, heat: Heat) -> float:
    """Return feature-insertion minus feature-deletion: -1 to 1 for probabilities, about 0 without meaning.

    Higher is better. After Bluecher et al. 2024.

    Raises:
        UndefinedError: as for ``feature_curves``.
    """
    kept, removed = feature_curves(evaluator, heat)
    return kept.area - removed.area


def feature_curves(evaluator: Evaluator, heat: Heat) -> tuple[Curve, Curve]:
    """Return the scores along the hot sets of the layer's cells: with only these kept, and without them.

    Raises:
        UndefinedError: the layer's head cannot be run alone, the map's cells have no order, or a score is not finite.
    """
    fill = evaluator.fill or FILL
    keys = [(evaluator.scores, "features", fill, kept) for kept in (True, False)]
    if keys[0] not in heat.curves:
        try:
            if fill not in evaluator.emptied_features:
                evaluator.emptied_features[fill] = _features(evaluator, evaluator.emptied_picture(fill))
            heat.curves.update(zip(keys, _measured(evaluator, heat, evaluator.emptied_features[fill]), strict=True))
        except (MethodError, LayerError) as error:
            raise UndefinedError("undefined", str(error)) from error
    return heat.curves[keys[0]], heat.curves[keys[1]]


def _measured(evaluator: Evaluator, heat: Heat, emptied: Float[Tensor, "1 c *grid"]) -> list[Curve]:
    """Run the head on changed feature maps, where a method would compute its weights, and return the curves."""
    curves: list[Curve] = []

    def weigh(activations: Float[Tensor, "1 c *grid"], head: ScoresOfMaps) -> Float[Tensor, "1 *grid"]:
        grid = tuple(activations.shape[2:])
        cells = heat.cells
        if cells is None or tuple(cells.shape) != grid:  # the map was not made on such a grid
            cells = cell_means(heat.values[None], grid)[0]
        if bool((cells == cells.flatten()[0]).all()):
            raise UndefinedError("constant_map", f"the map is the same in all {cells.numel()} cells of the layer")
        sets = curve_sets(cells, even_shares(evaluator.steps))
        empty = torch.zeros(1, *grid, dtype=torch.bool)
        kept = torch.cat([empty, sets, ~empty, ~sets]).to(activations.device)
        of_filled = emptied.to(activations.device)
        parts = [head(torch.where(part[:, None], activations, of_filled)) for part in kept.split(head.at_once)]
        scores = torch.cat(parts).double().cpu().numpy()
        if not np.isfinite(scores).all():
            raise UndefinedError("non_finite", "the model's score of changed feature maps is NaN or infinite")
        with_sets, without = np.split(scores, [len(sets) + 2])
        removed = np.concatenate([with_sets[-1:], without, with_sets[:1]])
        curves.extend(Curve(sets, along) for along in (with_sets, removed))
        return torch.zeros_like(activations[:, 0])  # this map has no meaning

    explanation = _explainer(evaluator, "scores", weigh)(evaluator.scores.picture, evaluator.scores.confidence_target)
    if explanation.placement.extent:
        raise UndefinedError("undefined", f"layer {explanation.layer!r} also covers what lies beside the picture")
    return curves


def _explainer(evaluator: Evaluator, needs: str, weights: WeightFunction) -> Explainer:
    """Return an Explainer that calls a function with the layer's feature maps, once: it smooths no map."""
    run = evaluator.explainer.using(Method("feature curves", "", "", "", needs, weights), evaluator.layer)
    return run.choosing(run.choices.but(smooth=None))


def _features(evaluator: Evaluator, picture: Float[Tensor, "c *size"]) -> Float[Tensor, "1 k *grid"]:
    """Return the layer's feature maps of a picture.

    Raises:
        UndefinedError: several layers are fused.
    """
    kept = KeptMaps()
    run = _explainer(evaluator, "activations", kept)
    run(picture, evaluator.scores.confidence_target)
    if len(kept.maps) != 1:
        raise UndefinedError("undefined", f"{len(kept.maps)} layers are fused; pass layer to choose one")
    evaluator.cells_of = str(run.layer)
    return kept.maps[0][None]


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
    again = correlation(heat.unit, heat.made_anew((evaluator.picture * heat.unit)[None])[0])
    if again is None:
        raise UndefinedError("undefined", "a map that is the same everywhere has no correlation with another")
    return (1 + again) / 2


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


def correlation(
    first: Float[Tensor, "*size"], second: Float[Tensor, "*size"], *, of_ranks: bool = False
) -> float | None:
    """Return Pearson's correlation of two maps, or Spearman's, with equal values at their mean rank.

    None if one of them is the same everywhere.
    """
    one, other = (values.double().flatten().numpy() for values in (first, second))
    if one.min() == one.max() or other.min() == other.max():
        return None
    if of_ranks:
        from scipy.stats import rankdata  # noqa: PLC0415 - it takes a second to import, and few metrics need it

        one, other = rankdata(one), rankdata(other)
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
        UndefinedError: the map is empty, or it is not known how it was made.
    """
    picture, base = evaluator.picture, heat.unit.double()
    radius = RADIUS * float(picture.std(unbiased=False))
    draws = np.random.default_rng(evaluator.seed).uniform(-radius, radius, (SAMPLES, *picture.shape))
    maps = heat.made_anew(picture + torch.from_numpy(draws.astype(np.float32)))
    return float(np.max([float((made.double() - base).norm()) for made in maps])) / float(base.norm())


STEPS = 8
"""Steps of the cascade. The paper makes one for each layer; with 8, a ResNet-18 needs 8
maps and not 21."""

SMOOTH_SAMPLES = 8
"""Noisy pictures whose maps are averaged by the smooth form."""


BINS = 100
"""Bins of the histogram whose entropy is a map's complexity: fine enough for 256 levels of heat, and few enough for the
smallest inputs."""

_HEDSTROEM = "Hedström et al. 2024, A Fresh Look at Sanity Checks for Saliency Maps, arXiv:2405.02383"


@register_metric(
    "mprt",
    title="MPRT",
    summary="rank correlation with the maps of weights that are shuffled from the output to the input",
    paper="Adebayo et al. 2018, Sanity Checks for Saliency Maps, arXiv:1810.03292",
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
    return _over_the_cascade(evaluator, heat, heat.values, evaluator.picture[None])


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
    # Standard deviation of that noise, as a share of the picture's: SmoothGrad recommends 0.1 to 0.2 of the range of
    # values, which is 4 to 5 standard deviations, but maps of CAM methods are smooth already
    noisy = picture + 0.1 * picture.std(unbiased=False) * torch.from_numpy(draws)
    return _over_the_cascade(evaluator, heat, torch.stack(heat.made_anew(noisy)).mean(0), noisy)


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
    model = next(_cascade(evaluator, 1))
    after = heat.made_anew(evaluator.picture[None], model)[0]
    if not bool(after.any()):
        raise UndefinedError("undefined", "the map of the shuffled weights is empty")
    return (entropy(after) - before) / before


def entropy(heat: Float[Tensor, "*size"]) -> float:
    """Return the entropy of the histogram of a map's values, in nats: 0 to log(BINS)."""
    counts, _ = np.histogram(heat.double().numpy(), BINS)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _over_the_cascade(evaluator: Evaluator, heat: Heat, base: Tensor, pictures: Float[Tensor, "n c *size"]) -> float:
    """Return the mean rank correlation of a map with the mean maps of some pictures, after each step of the cascade."""
    models = _cascade(evaluator, STEPS)
    maps = (torch.stack(heat.made_anew(pictures, model)).mean(0) for model in models)
    defined = [found for made in maps if (found := correlation(base, made, of_ranks=True)) is not None]
    if not defined:
        raise UndefinedError("undefined", "the maps of the shuffled weights are all empty, or the map is constant")
    return float(np.mean(defined))


def _cascade(evaluator: Evaluator, steps: int) -> Iterator[nn.Module]:
    """Yield a copy of the model after each step; the copy is changed further when the next one is asked for."""
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
