"""Targets say what to explain: each turns the model's output into one score per image.

    >>> import camkit
    >>> [target.rank for target in camkit.targets.top(2)]
    [1, 2]

To explain a class, pass its index or its label. The functions here make all other targets. For a target of your
own, subclass ``Target`` or pass a function ``output -> (N,)``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from inspect import isfunction
from typing import Any, SupportsIndex, TypeAlias, cast

import torch
from torch import Tensor

from camkit.errors import TargetError
from camkit.targets.classes import (
    AboveTarget,
    BoxesTarget,
    ClassTarget,
    ContrastTarget,
    DirectionTarget,
    EachTarget,
    FinerTarget,
    FunctionTarget,
    SegmentTarget,
    SimilarTarget,
    TargetFunction,
    TopTarget,
    above,
    boxes,
    contrast,
    direction,
    each,
    finer,
    segment,
    similar_to,
    top,
)
from camkit.targets.places import (
    BoxAtTarget,
    BoxTarget,
    MaskTarget,
    RegionTarget,
    best_box,
    box,
    box_at,
    mask_at,
    mask_in,
    region,
)
from camkit.targets.scores import Scores, Target, describe, logits_of
from camkit.types import Activation

__all__ = [
    "AboveTarget",
    "BoxAtTarget",
    "BoxTarget",
    "BoxesTarget",
    "ClassTarget",
    "ContrastTarget",
    "DirectionTarget",
    "EachTarget",
    "FinerTarget",
    "FunctionTarget",
    "MaskTarget",
    "RegionTarget",
    "Scores",
    "SegmentTarget",
    "SimilarTarget",
    "Target",
    "TopTarget",
    "above",
    "as_targets",
    "best_box",
    "box",
    "box_at",
    "boxes",
    "contrast",
    "describe",
    "direction",
    "each",
    "finer",
    "logits_of",
    "mask_at",
    "mask_in",
    "region",
    "segment",
    "similar_to",
    "top",
]

TargetLike: TypeAlias = "int | str | Target | TargetFunction"


def as_targets(
    target: TargetLike | Sequence[TargetLike] | None,
    labels: Sequence[str] | None = None,
    activation: Activation | None = None,
) -> list[Target]:
    """Turn the ``target`` argument of ``explain`` into a list of targets.

    Args:
        target: None (each image's best class), a class index, a label, a function ``output -> (N,)``, a ``Target``, or
            a list of these.
        labels: the model's class names.
        activation: turns the model's logits into probabilities.

    Raises:
        TargetError: a label is unknown or ambiguous, or a value is none of the above.
    """
    names = None if labels is None else tuple(labels)
    if isinstance(target, (list, tuple)):
        if not target:
            raise TargetError("the list of targets is empty; pass None for each picture's best class")
        return [single for item in target for single in as_targets(item, labels, activation)]
    return [_single(target).bind(names, activation)]


def _single(target: Any) -> Target:
    if target is None:
        return TopTarget()
    if isinstance(target, str):
        return ClassTarget(target)
    if isinstance(target, Target):
        return target
    is_one_number = not isinstance(target, Tensor) or (target.dim() == 0 and target.dtype is not torch.bool)
    if not isinstance(target, bool) and is_one_number:
        with contextlib.suppress(TypeError):
            return ClassTarget(operator.index(cast("SupportsIndex", target)))
    name = getattr(target, "__name__", "")
    if isfunction(target) and target is globals().get(name):  # a common mistake
        raise TargetError(f"target is the function {name}; call it to get a target, as in {name}(...)")
    if callable(target):
        return FunctionTarget(target)
    raise TargetError(f"target must be None, an index, a label, a function or a list of these, not {describe(target)}")
