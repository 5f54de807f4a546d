"""Whether the heat can be trusted: another method must give similar maps, and random weights must not."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from camkit.background.data import Item
from camkit.background.plan import Plan, stratified
from camkit.errors import advice
from camkit.explaining.explanation import Explanation
from camkit.models import black_box_in
from camkit.models.modules import shuffle_weights
from camkit.types import Failure

SANITY_PICTURES = 16
"""Pictures that are explained again."""

MIN_AGREEMENT = 0.5
"""Median correlation with HiResCAM (Draelos and Carin 2020) below which the two methods contradict each other."""

MAX_RANDOM_CORRELATION = 0.95
"""Median correlation with the maps of random weights above which the maps do not depend on the weights."""


@dataclass(frozen=True)
class Sanity:
    """How far the heat can be trusted.

    Attributes:
        agreement: median correlation of the maps with HiResCAM's; None if there were no maps to compare.
        randomised: median correlation of the maps with the maps of random weights; None if there were none.
        problems: why the heat cannot be trusted.
        remarks: what the reader should know, without consequence for the verdict.
    """

    agreement: float | None
    randomised: float | None
    problems: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def check_sanity(plan: Plan, items: Sequence[Item]) -> Sanity:
    """Explain a few pictures by another method, and with random weights (Adebayo et al. 2018, arXiv:1810.03292)."""
    check = plan.settings.check
    if plan.detects:
        return Sanity(None, None, (), ("a detector's heat is not measured; camkit explain draws the heat of each box",))
    box = black_box_in(plan.model.module)
    if box is not None:
        remark = "a black box has no weights and no gradients to compare its heat with"
        if not plan.draws_heat:
            drawn = advice("set check.method to 'occlusion' for heat without them", "pass --method occlusion")
            remark = f"no heat: {box.lacks(drawn)}"
        return Sanity(None, None, (), (remark,))
    chosen = stratified(items, SANITY_PICTURES, SANITY_PICTURES, check.seed)[:SANITY_PICTURES]
    maps = _maps(plan.explain(chosen))
    hirescam_maps = _maps(plan.explain(chosen, method="hirescam"))
    remarks: list[str] = []
    try:  # the entries of each weight tensor are shuffled: the same sizes as before, but no meaning
        module = copy.deepcopy(plan.model.module)
        shuffle_weights(module.modules(), torch.Generator().manual_seed(check.seed))
        shuffled = replace(plan.model, module=module, note=None, weights=None)
        random_maps = _maps(plan.explain(chosen, model=shuffled))
    except Exception as error:  # noqa: BLE001 - some modules cannot be copied
        random_maps = [None] * len(chosen)
        remarks.append(
            f"the maps could not be compared with the maps of random weights: {type(error).__name__}: {error}"
        )
    agreement, randomised = _median_correlation(maps, hirescam_maps), _median_correlation(maps, random_maps)
    problems: list[str] = []
    if agreement is not None and agreement < MIN_AGREEMENT:
        remarks.append(f"the maps and hirescam's disagree: their median correlation is {agreement:.2f}")
    if randomised is not None and randomised > MAX_RANDOM_CORRELATION:
        problems.append(
            f"with random weights the maps are nearly the same (correlation {randomised:.2f}), so the heat says little "
            "about what the model learned"
        )
    return Sanity(agreement, randomised, tuple(problems), tuple(remarks))


def _maps(explanations: Iterable[Explanation | Failure]) -> list[np.ndarray | None]:
    """Return each picture's map at its size, since methods may differ in their grids; None if there is no heat."""
    return [
        np.asarray(explanation.heatmap) if isinstance(explanation, Explanation) and explanation.status == "ok" else None
        for explanation in explanations
    ]


def _median_correlation(first: Sequence[np.ndarray | None], second: Sequence[np.ndarray | None]) -> float | None:
    correlations = [
        float(np.corrcoef(map_1.ravel(), map_2.ravel())[0, 1])
        for map_1, map_2 in zip(first, second, strict=True)
        if map_1 is not None
        and map_2 is not None
        and map_1.shape == map_2.shape
        and map_1.std() > 0
        and map_2.std() > 0
    ]
    return float(np.median(correlations)) if correlations else None
