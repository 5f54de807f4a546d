"""The target that stays the same in changed versions of a picture, whatever the change does to other classes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from camkit.errors import TargetError, advice
from camkit.targets.boxes import SameBoxTarget
from camkit.targets.classes import FinerTarget, scores_of_class
from camkit.targets.maps import SegmentTarget
from camkit.targets.regions import RegionTarget
from camkit.targets.scores import OnPicture, Scores, Target
from camkit.types import Activation


@dataclass(frozen=True, eq=False)
class SameClassTarget(Target):
    """The class that each picture was explained for, in a changed version of the picture.

    Attributes:
        indices: the class of each picture of a pass, or one class for all.
        activation: as for the target of the pictures.
        cells: for a segmentation network, the cells of each picture over which the score is the mean, as many as there
            are indices; None means where the class is predicted.
    """

    for_threads = True

    indices: tuple[int, ...]
    activation: Activation | None = None
    cells: Bool[Tensor, "n h w"] | None = field(default=None, repr=False)

    def bind(self, labels: tuple[str, ...] | None, activation: Activation | None) -> SameClassTarget:  # noqa: ARG002
        """Return the target for a model with this activation, if it has none of its own."""
        return replace(self, activation=self.activation or activation)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score of each image's class."""
        return scores_of_class(output, batch, self.indices, self.activation, self.cells)


def fixed_target(target: Target, scored: Scores) -> Target:
    """Return the target that scores the class of each picture, whatever a change of the pictures does to other classes.

    A box may move in a changed picture; the box that matches it best is scored. On a map, the cells stay those where
    the class is predicted in the unchanged picture. The classes that a class is compared with stay the same too.

    Args:
        target: a target for one picture or several; for one if it is a box.
        scored: its scores of the pictures.
    """
    if scored.boxes is not None:
        (corners,) = scored.boxes
        assert corners is not None
        return SameBoxTarget(corners, None if scored.indices is None else scored.indices[0])
    if scored.indices is None or (isinstance(target, SegmentTarget) and (target.everywhere or target.mask is not None)):
        return target
    if scored.rivals is not None:
        finer = target if isinstance(target, FinerTarget) else FinerTarget(target)
        return replace(finer, of=fixed_target(finer.of, replace(scored, rivals=None)), rivals=scored.rivals)
    return SameClassTarget(scored.indices, getattr(target, "activation", None), scored.cells)


def of_changed_picture(target: Target, scored: Scores, *, mirrored: bool) -> Target:
    """Return the target that explains, in changed versions of the pictures, the class explained in the pictures.

    Args:
        target: the target of the pictures.
        scored: its scores for them.
        mirrored: whether the pictures are mirrored along their last axis.

    Raises:
        TargetError: the target is a box, which another picture need not have, or what lies at a point or in a box.
    """
    used, instead = advice("smooth='augment'", "--smooth augment"), advice("smooth='eigen'", "--smooth eigen")
    if scored.boxes is not None:
        raise TargetError(
            f"a detector finds other boxes in a changed picture, so {used} explains no boxes; use {instead}"
        )
    if mirrored and isinstance(target, OnPicture) and not isinstance(target, RegionTarget):
        raise TargetError(f"{used} cannot mirror the place that the target names; use {instead}")
    fixed = fixed_target(target, scored)
    return _mirrored(fixed) if mirrored else fixed


def _mirrored(target: Target) -> Target:
    """Return a fixed target for pictures that are mirrored along their last axis."""
    if isinstance(target, FinerTarget):
        return replace(target, of=_mirrored(target.of))
    if isinstance(target, RegionTarget):
        return replace(target, mirrored=True)
    if isinstance(target, SegmentTarget) and target.mask is not None:
        return replace(target, mask=target.mask.flip(-1))
    if isinstance(target, SameClassTarget) and target.cells is not None:
        return replace(target, cells=target.cells.flip(-1))
    return target
