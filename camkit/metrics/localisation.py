"""Metrics that compare the map with the region of an object. They say where the heat lies, not whether it is true."""

from __future__ import annotations

from jaxtyping import Bool
from torch import Tensor

from camkit.images.filling import POINTING_TOLERANCE, dilated
from camkit.metrics.evaluator import Evaluator
from camkit.metrics.heat import Heat
from camkit.metrics.metric_values import UndefinedError
from camkit.metrics.registry import register_metric


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
