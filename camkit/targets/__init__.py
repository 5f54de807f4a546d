"""What is explained: a target turns the model's output into one score per image.

    >>> import camkit
    >>> [target.rank for target in camkit.targets.top(2)]
    [1, 2]

A class is its index or its label; the functions here make the other targets.
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
    """Return targets for the ``count`` best classes of each image: ``explain(..., target=top(5))``."""
    count = whole_number(count, "the number of best classes")
    if count < 1:
        raise TargetError(f"the number of best classes must be at least 1, not {count}")
    return [TopTarget(rank, of=count) for rank in range(1, count + 1)]


def above(threshold: float = 0.5) -> AboveTarget:
    """Return a target for every class whose probability (its logit's sigmoid) is above a threshold: multi-label."""
    if not isinstance(threshold, Real) or not 0 <= threshold < 1:
        raise TargetError(f"a threshold is a probability from 0 up to 1, not {threshold!r}")
    return AboveTarget(threshold)


def direction(sign: Literal["+", "-"], index: int = 0) -> DirectionTarget:
    """Return a target for one number of the output: what raises it ("+"), or what lowers it ("-").

    For regressions, and for classifiers with one logit, whose second class is "-".
    """
    if sign not in ("+", "-"):
        raise TargetError(f"a direction is '+' or '-', not {sign!r}")
    return DirectionTarget(1 if sign == "+" else -1, whole_number(index, "the index of an output"))


def each(classes: Iterable[int | str | Sequence[int | str]]) -> EachTarget:
    """Return a target that is another class for each picture of a call, say its own label.

    Args:
        classes: an index or a label for each picture, in their order; several in a list or tuple mean the same, and the
            best of them is explained.
    """
    named = tuple(tuple(one) if isinstance(one, (list, tuple)) else one for one in classes)
    if not named or any(one == () for one in named):
        raise TargetError("each() takes one class or more for each picture, and got none")
    return EachTarget(named)


def contrast(target: int | str, rather_than: int | str) -> ContrastTarget:
    """Return a target for one class rather than another: the difference of their logits (Prabhushankar et al. 2020)."""
    return ContrastTarget(target, rather_than)


def segment(target: int | str, mask: Any = None, *, everywhere: bool = False) -> SegmentTarget:
    """Return a target for a class of a segmentation network.

    Args:
        target: its index or label.
        mask: (H, W) over the model's input, true where the class is asked about; scaled to the output.
        everywhere: over the whole output. Without either, where the class is predicted.
    """
    if mask is not None and everywhere:
        raise TargetError("a segment is within the mask or everywhere, not both")
    return SegmentTarget(target, mask, everywhere)


def box(
    number: int | None = None,
    *,
    label: int | str | None = None,
    near: Sequence[float | int] | None = None,
) -> BoxTarget:
    """Return a target for one box of a detector: by number from 0, by label, or by overlap with a given box."""
    corners: Any = None
    if near is not None:
        with contextlib.suppress(TypeError, ValueError):
            corners = tuple(float(side) for side in near)
        if corners is None or len(corners) != 4:
            raise TargetError(f"a box is (left, top, right, bottom), not {near!r}")
    return BoxTarget(None if number is None else whole_number(number, "the number of a box"), label, corners)


def similar_to(reference: Any) -> SimilarTarget:
    """Return a target for the similarity to a reference: a picture as ``explain`` takes it, or an embedding (D,)."""
    return SimilarTarget(reference)


def as_targets(
    target: TargetLike | Sequence[TargetLike] | None, labels: Labels = None, activation: Activation | None = None
) -> list[Target]:
    """Turn what the caller passed as ``target`` into targets.

    Args:
        target: None (each image's best class), a class index, a label's text, a function ``output -> (N,)``, a target
            of this module, or a list of these.
        labels: the model's class names, to look a text up in.
        activation: what makes probabilities of the model's logits.

    Raises:
        TargetError: an unknown or ambiguous label, one class twice, or a value that is none of these.

    """
    bound = None if labels is None else tuple(labels)
    if isinstance(target, (list, tuple)):
        if not target:
            raise TargetError("the list of targets is empty; pass None for each picture's best class")
        found = [single for item in target for single in as_targets(item, labels, activation)]
        classes = [single.index for single in found if isinstance(single, ClassTarget)]
        twice = next((index for index in classes if classes.count(index) > 1), None)
        if twice is not None:
            name = f" ({bound[twice]})" if bound and 0 <= twice < len(bound) else ""
            raise TargetError(f"target {twice}{name} is in the list twice")
        return found
    single = _single(target, bound)
    bind = getattr(single, "bind", None)
    return [single if bind is None else bind(bound, activation)]


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
            f"target is {target.__name__} itself, which makes targets; call it, as in {target.__name__}(...)"
        )
    if callable(target):
        return FunctionTarget(target)
    raise TargetError(f"a target is None, an index, a label, a function or a list of these, not {describe(target)}")
