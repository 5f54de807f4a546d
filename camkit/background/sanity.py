"""Whether the heat can be trusted: another method must agree, and a network of other weights must not."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from camkit.background.classes import ClassMatch
from camkit.background.config import Settings
from camkit.background.hints import Turned, compare_turned, correlation
from camkit.background.sampling import stratified
from camkit.background.values import Item
from camkit.explainer import explain_many
from camkit.explanation import Explanation
from camkit.models.loaded import LoadedModel
from camkit.targets import EachTarget

PICTURES = 16
"""How many are explained again."""

LEAST_AGREEMENT = 0.5
"""Median correlation with HiResCAM (Draelos and Carin 2020) below which the two tell different stories."""

MOST_ALIKE = 0.95
"""Median correlation with the maps of a network of random weights above which maps do not depend on the weights."""


@dataclass(frozen=True)
class Sanity:
    """How well the maps agree with HiResCAM's, how like they are to those of random weights, and what follows.

    ``turned`` says whether maps follow pictures that are turned left to right; None if that is not known.
    """

    agreement: float | None
    randomised: float | None
    problems: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    turned: Turned | None = None


def sane(
    model: LoadedModel, items: Sequence[Item], matched: ClassMatch, settings: Settings, *, turning: bool = False
) -> Sanity:
    """Explain a few pictures by another method, and with random weights (Adebayo et al. 2018, arXiv:1810.03292).

    ``turning`` also explains them turned left to right.
    """
    check = settings.check
    chosen = stratified(items, PICTURES, PICTURES, check.seed)[:PICTURES]
    first = _maps(model, chosen, matched, settings, check.method)
    second = _maps(model, chosen, matched, settings, "hirescam")
    remarks: list[str] = []
    try:
        random = _maps(_with_random_weights(model, check.seed), chosen, matched, settings, check.method)
    except Exception as error:  # noqa: BLE001 - some modules cannot be copied
        random = [None] * len(chosen)
        remarks.append(f"maps of random weights could not be made: {type(error).__name__}: {error}")
    agreement, randomised = _median_correlation(first, second), _median_correlation(first, random)
    problems: list[str] = []
    if agreement is not None and agreement < LEAST_AGREEMENT:
        remarks.append(f"{check.method} and hirescam disagree: their maps correlate by {agreement:.2f} (median)")
    if randomised is not None and randomised > MOST_ALIKE:
        problems.append(
            f"maps of random weights are like the model's own (correlation {randomised:.2f}), so the heat says little "
            "about what was learned"
        )
    after = _maps(_turning(model), chosen, matched, settings, check.method) if turning else []
    turned = compare_turned(first, after) if turning else None
    return Sanity(agreement, randomised, tuple(problems), tuple(remarks), turned)


def _turning(model: LoadedModel) -> LoadedModel:
    """Return the model with its pictures turned left to right."""
    straight = model.preprocess
    assert straight is not None
    return replace(model, preprocess=lambda picture: straight(picture).flip(-1))


def _maps(
    model: LoadedModel, items: Sequence[Item], matched: ClassMatch, settings: Settings, method: str
) -> list[np.ndarray | None]:
    rows = explain_many(
        model,
        [item.path for item in items],
        settings.check.layer,
        method=method,
        target=EachTarget(tuple(matched.indices[item.label] for item in items)),
        precision=settings.check.precision,
        batch_size=settings.check.batch_size,
        on_error="yield",
    )
    return [np.maximum(row.raw, 0) if isinstance(row, Explanation) and row.status == "ok" else None for row in rows]


def _median_correlation(first: Sequence[np.ndarray | None], second: Sequence[np.ndarray | None]) -> float | None:
    found = [
        correlation(one, other)
        for one, other in zip(first, second, strict=True)
        if one is not None and other is not None and one.shape == other.shape and one.std() > 0 and other.std() > 0
    ]
    return float(np.median(found)) if found else None


def _with_random_weights(model: LoadedModel, seed: int) -> LoadedModel:
    """Return a copy whose layers' weights are shuffled among themselves: as large as before, and without meaning."""
    module = copy.deepcopy(model.module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():  # also those that a parametrisation makes the weights of
            if weight.dim() > 1:
                order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                weight.copy_(weight.detach().flatten()[order].reshape(weight.shape))
    return LoadedModel(module, model.name, model.preprocess, model.labels, None, model.activation)
