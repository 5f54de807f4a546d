"""Targets say what to explain: each turns the model's output into one score per image.

    >>> import camkit
    >>> [target.rank for target in camkit.targets.top(2)]
    [1, 2]

To explain a class, pass its index or its label. The functions here make all other targets.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Literal, SupportsIndex, TypeAlias, cast

import torch
from torch import Tensor

from camkit.errors import TargetError
from camkit.targets.boxes import BoxTarget
from camkit.targets.classes import (
    AboveTarget,
    ClassTarget,
    ContrastTarget,
    DirectionTarget,
    EachTarget,
    FunctionTarget,
    TargetFunction,
    TopTarget,
)
from camkit.targets.embeddings import SimilarTarget
from camkit.targets.maps import SegmentTarget
from camkit.targets.names import index_of, whole_number
from camkit.targets.outputs import describe, logits_of
from camkit.targets.scores import OfPictures, Target
from camkit.types import Activation

__all__ = [
    "AboveTarget",
    "BoxTarget",
    "ClassTarget",
    "ContrastTarget",
    "DirectionTarget",
    "EachTarget",
    "FunctionTarget",
    "SegmentTarget",
    "SimilarTarget",
    "TopTarget",
    "above",
    "as_targets",
    "box",
    "contrast",
    "describe",
    "direction",
    "each",
    "logits_of",
    "segment",
    "similar_to",
    "top",
]

Labels: TypeAlias = "Sequence[str] | None"
TargetObject: TypeAlias = (
    "ClassTarget | TopTarget | AboveTarget | DirectionTarget | ContrastTarget | SegmentTarget | BoxTarget | "
    "SimilarTarget | EachTarget | FunctionTarget | OfPictures"
)
TargetLike: TypeAlias = "int | str | TargetObject | TargetFunction"

_OBJECTS = (
    ClassTarget,
    TopTarget,
    AboveTarget,
    DirectionTarget,
    ContrastTarget,
    SegmentTarget,
    BoxTarget,
    SimilarTarget,
    EachTarget,
    FunctionTarget,
)


def top(count: int) -> list[TopTarget]:
    """Return targets for the ``count`` best classes of each image, as in ``explain(..., target=top(5))``.

    Raises:
        TargetError: ``count`` is not a whole number of at least 1.
    """
    count = whole_number(count, "the number of best classes")
    if count < 1:
        raise TargetError(f"the number of best classes must be at least 1, not {count}")
    return [TopTarget(rank, of=count) for rank in range(1, count + 1)]


def above(threshold: float = 0.5) -> AboveTarget:
    """Return a target for every class whose probability is above a threshold, for multi-label models.

    The probability of a class is the sigmoid of its logit.

    Raises:
        TargetError: the threshold is not a probability below 1.
    """
    if not isinstance(threshold, Real) or not 0 <= threshold < 1:
        raise TargetError(f"the threshold must be a probability from 0 to below 1, not {threshold!r}")
    return AboveTarget(threshold)


def direction(sign: Literal["+", "-"], index: int = 0) -> DirectionTarget:
    """Return a target for what raises ("+") or lowers ("-") one number of the output.

    Use it for regressions, and for classifiers with one logit, where "-" is the second class.

    Raises:
        TargetError: the sign is neither "+" nor "-", or the index is not a whole number.
    """
    if sign not in ("+", "-"):
        raise TargetError(f"the direction must be '+' or '-', not {sign!r}")
    return DirectionTarget(1 if sign == "+" else -1, whole_number(index, "the index of an output"))


def each(classes: Iterable[int | str | Sequence[int | str]]) -> EachTarget:
    """Return a target with a class of its own for each picture of a call, for example the picture's label.

    Args:
        classes: an index or a label for each picture, in their order. In place of one class, a list or tuple may name
            several that mean the same; the one with the highest score is explained.

    Raises:
        TargetError: there are no classes, or none for one of the pictures. Whether there are as many classes as
            pictures shows when they are explained.
    """
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise TargetError(
            f"each() takes a list with a class for each picture, as in each(['cat', 'dog']), not {classes!r}"
        )
    by_picture = tuple(tuple(entry) if isinstance(entry, (list, tuple)) else entry for entry in classes)
    if not by_picture or any(entry == () for entry in by_picture):
        raise TargetError("each() needs at least one class for each picture")
    return EachTarget(by_picture)


def contrast(target: int | str, rather_than: int | str) -> ContrastTarget:
    """Return a target for one class rather than another: the difference of their logits (Prabhushankar et al. 2020)."""
    return ContrastTarget(target, rather_than)


def segment(target: int | str, mask: Any = None, *, everywhere: bool = False) -> SegmentTarget:
    """Return a target for a class of a segmentation network.

    Args:
        target: the index or the label of the class.
        mask: truth values (H, W) over the model's input; only the masked part of the output is explained.
        everywhere: explain the whole output. Without ``mask`` and ``everywhere``, the part where the class is predicted
            is explained.

    Raises:
        TargetError: both ``mask`` and ``everywhere`` are given.
    """
    if mask is not None and everywhere:
        raise TargetError("pass a mask or everywhere=True, not both")
    return SegmentTarget(target, mask, everywhere)


def box(
    number: int | None = None,
    *,
    label: int | str | None = None,
    near: Sequence[float | int] | None = None,
) -> BoxTarget:
    """Return a target for one box of a detector.

    Args:
        number: the position of the box in the model's output, from 0.
        label: the index or the label of a class; its box with the highest score is explained.
        near: (left, top, right, bottom) in pixels of the model's input; the box that overlaps it most is explained.

    Raises:
        TargetError: not exactly one of the three is given, or one is invalid.
    """
    corners: Any = None
    if near is not None:
        with contextlib.suppress(TypeError, ValueError):
            corners = tuple(float(side) for side in near)
        if corners is None or len(corners) != 4:
            raise TargetError(f"near must be (left, top, right, bottom), not {near!r}")
    return BoxTarget(None if number is None else whole_number(number, "the number of a box"), label, corners)


def similar_to(reference: Any) -> SimilarTarget:
    """Return a target for the similarity to a reference: a picture as ``explain`` takes it, or an embedding (D,)."""
    return SimilarTarget(reference)


def as_targets(
    target: TargetLike | Sequence[TargetLike] | None, labels: Labels = None, activation: Activation | None = None
) -> list[Target]:
    """Turn the ``target`` argument of ``explain`` into a list of targets.

    Args:
        target: None (each image's best class), a class index, a label, a function ``output -> (N,)``, a target of this
            module, or a list of these.
        labels: the model's class names.
        activation: turns the model's logits into probabilities.

    Raises:
        TargetError: a label is unknown or ambiguous, a class is listed twice, or a value is none of the above.
    """
    names = None if labels is None else tuple(labels)
    if isinstance(target, (list, tuple)):
        if not target:
            raise TargetError("the list of targets is empty; pass None for each picture's best class")
        targets = [single for item in target for single in as_targets(item, labels, activation)]
        classes = [single.index for single in targets if isinstance(single, ClassTarget)]
        twice = next((index for index in classes if classes.count(index) > 1), None)
        if twice is not None:
            name = f" ({names[twice]})" if names and 0 <= twice < len(names) else ""
            raise TargetError(f"target {twice}{name} is in the list twice")
        return targets
    single = _single(target, names)
    bind = getattr(single, "bind", None)
    return [single if bind is None else bind(names, activation)]


def _single(target: Any, labels: tuple[str, ...] | None) -> Target:
    if target is None:
        return TopTarget()
    if isinstance(target, str):
        return ClassTarget(index_of(target, labels))
    if isinstance(target, (*_OBJECTS, OfPictures)):
        return cast("Target", target)
    is_one_number = not isinstance(target, Tensor) or (target.dim() == 0 and target.dtype is not torch.bool)
    if not isinstance(target, bool) and is_one_number:
        with contextlib.suppress(TypeError):
            return ClassTarget(operator.index(cast("SupportsIndex", target)))
    if any(target is maker for maker in (top, above, direction, each, contrast, segment, box, similar_to)):
        raise TargetError(
            f"target is the function {target.__name__}; call it to get a target, as in {target.__name__}(...)"
        )
    if callable(target):
        return FunctionTarget(target)
    raise TargetError(f"target must be None, an index, a label, a function or a list of these, not {describe(target)}")
