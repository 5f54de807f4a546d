"""Metrics that remove pixels, or cells of a layer, in the order of the map: insertion, deletion, SRG, ROAD, top-loss.

H(a) is the hot set of share a (``heat.py``), K(a) the score of the picture with only H(a) kept, R(a) its score with
H(a) removed. The picture itself has the score R(0) = K(1), the filled picture R(1) = K(0).

In feature space, the layer is that of the Evaluator. A removed cell takes the values that it has if all pixels of the
picture are removed, by the same fills as pixels. The mean of the cells would not do: a network that averages them would
notice nothing. Values of these metrics cannot be compared with those of metrics that change pixels, so they have names
of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from camkit.errors import LayerError, MethodError
from camkit.methods import Method, WeightFunction
from camkit.methods.activations import KeptMaps
from camkit.methods.registry import Needs
from camkit.metrics.evaluator import Evaluator
from camkit.metrics.heat import Curve, Heat, curve_sets, even_shares, pooled, shares_of
from camkit.metrics.registry import UndefinedError, register_metric

if TYPE_CHECKING:
    from camkit.explaining.explainer import Explainer
    from camkit.types import ScoresOfMaps


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
        for key, curve in zip(keys, _measured(evaluator, heat, fill), strict=True):
            heat.curves[key] = curve
    kept, removed = (heat.curves[key] for key in keys)
    return kept, removed


def _measured(evaluator: Evaluator, heat: Heat, fill: str) -> tuple[Curve, Curve]:
    try:
        if fill not in evaluator.emptied_features:
            evaluator.emptied_features[fill] = _features(evaluator, evaluator.emptied_picture(fill))
        changing = _Changing(heat, evaluator.steps, evaluator.emptied_features[fill])
        run = _explainer(evaluator, "scores", changing)
        explanation = run(evaluator.scores.picture, evaluator.scores.confidence_target)
    except (MethodError, LayerError) as error:
        raise UndefinedError("undefined", str(error)) from error
    if explanation.placement.extent:
        raise UndefinedError("undefined", f"layer {explanation.layer!r} also covers what lies beside the picture")
    return changing.curves[0]


def _explainer(evaluator: Evaluator, needs: Needs, weights: WeightFunction) -> Explainer:
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


@dataclass(eq=False)
class _Changing:
    """Runs the head on changed feature maps, where a method would compute its weights, and keeps the scores."""

    heat: Heat
    steps: int
    emptied: Tensor
    curves: list[tuple[Curve, Curve]] = field(default_factory=list)

    def __call__(self, activations: Float[Tensor, "1 c *grid"], head: ScoresOfMaps) -> Float[Tensor, "1 *grid"]:
        """Measure the curves of a layer; the map that is returned has no meaning."""
        cells = self._cells(tuple(activations.shape[2:]))
        sets = curve_sets(cells, even_shares(self.steps))
        empty = torch.zeros(1, *cells.shape, dtype=torch.bool)
        shares = np.concatenate([[0.0], shares_of(sets), [1.0]])
        scores = self._scores(activations, head, torch.cat([empty, sets, ~empty, ~sets]).to(activations.device))
        middle = len(sets)
        nothing, kept, everything, without = (
            scores[:1], scores[1 : middle + 1], scores[middle + 1 : middle + 2], scores[middle + 2 :],
        )  # fmt: skip
        self.curves.append(
            (
                Curve(shares, np.concatenate([nothing, kept, everything])),
                Curve(shares, np.concatenate([everything, without, nothing])),
            )
        )
        return torch.zeros_like(activations[:, 0])

    def _cells(self, grid: tuple[int, ...]) -> Float[Tensor, "*grid"]:
        """Return the map on the layer's grid: its own cells if it was made on such a grid, else means of its pixels."""
        cells = self.heat.cells
        if cells is None or tuple(cells.shape) != grid:
            cells = pooled(self.heat.values, grid)
        if bool((cells == cells.flatten()[0]).all()):
            raise UndefinedError("constant_map", f"the map is the same in all {cells.numel()} cells of the layer")
        return cells

    def _scores(
        self, activations: Float[Tensor, "1 c *grid"], head: ScoresOfMaps, kept: Bool[Tensor, "m *grid"]
    ) -> Float[np.ndarray, " m"]:
        """Return the scores with only the cells of each mask kept, the others as in the filled picture."""
        if self.emptied.shape != activations.shape:
            raise UndefinedError("undefined", "the layer has another grid for the filled picture")
        emptied = self.emptied.to(activations.device)
        parts = [head(torch.where(part[:, None], activations, emptied)) for part in kept.split(head.at_once)]
        scores = torch.cat(parts).double().cpu().numpy()
        if not np.isfinite(scores).all():
            raise UndefinedError("non_finite", "the model's score of changed feature maps is NaN or infinite")
        return np.asarray(scores)
