"""Metrics in feature space: cells of a layer's feature maps are removed, and the head alone is run.

The layer is the Evaluator's. A removed cell takes the values that it has if all pixels of the picture are removed, by
the same fills as pixels. The mean of the cells would not do: a network that averages them would notice nothing. Values
of these metrics cannot be compared with those of metrics that change pixels, so they have names of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from camkit.errors import LayerError, MethodError
from camkit.methods import Method, WeightFunction
from camkit.methods.activations import KeptMaps
from camkit.methods.registry import Needs
from camkit.metrics.curves import Curve, curve_sets, even_shares, shares_of
from camkit.metrics.evaluator import Evaluator
from camkit.metrics.heat import Heat, pooled
from camkit.metrics.registry import UndefinedError, register_metric

if TYPE_CHECKING:
    from camkit.explainer import Explainer
    from camkit.types import ScoresOfMaps

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
    return run.choosing(replace(run.choices, smooth=None))


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
