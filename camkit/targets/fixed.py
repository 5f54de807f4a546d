"""Targets that score the same thing in another version of a picture, and their scores as probability or log-odds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from camkit.errors import TargetError, advice
from camkit.targets.boxes import SameBoxTarget
from camkit.targets.classes import ClassTarget, FinerTarget
from camkit.targets.maps import SegmentTarget
from camkit.targets.names import check_index
from camkit.targets.outputs import logits_of
from camkit.targets.probabilities import ScoreReading
from camkit.targets.regions import RegionTarget
from camkit.targets.scores import OfClasses, OnPicture, Scores, Target


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
    return ClassTarget(scored.indices, cells=scored.cells, activation=getattr(target, "activation", None))


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
    if isinstance(target, ClassTarget) and target.cells is not None:
        return replace(target, cells=target.cells.flip(-1))
    return target


Given: TypeAlias = Literal["probabilities", "logarithms"] | None
"""What a model returns instead of logits."""


@dataclass(frozen=True)
class ConfidenceTarget(Target):
    """The probability of a target's class; for a target without probabilities, its own score. It has no gradients.

    A class that is compared with its nearest ones has no probability.

    Attributes:
        of: the target.
        given: what the target's scores are already, as ``given_by`` found in a pass with a graph; without one, the
            results of a sigmoid look like logits.
    """

    for_threads = False

    of: Target
    given: Given = None

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the probability for each image."""
        scored = self.of(output, batch)
        if isinstance(self.of, FinerTarget):
            scored = replace(scored, probabilities=None)
        values = scored.values.detach().float()
        if scored.probabilities is not None and self.given is not None:
            values = values.exp() if self.given == "logarithms" else values
        elif scored.probabilities is not None:
            values = torch.tensor(scored.probabilities, dtype=torch.float32, device=values.device)
        quantity = scored.quantity if scored.probabilities is None else "probability"
        return replace(scored, values=values, indices=None, probabilities=None, quantity=quantity, activation=None)


def class_alone(target: Target) -> Target:
    """Return the class of a target that compares it with its nearest ones; any other target itself."""
    return target.of if isinstance(target, FinerTarget) else target


def given_by(scored: Scores) -> Given:
    """Return whether a target's scores are probabilities or their logarithms, as their graph shows.

    None also stands for the results of a softmax: their sum shows in every pass what they are.
    """
    name = "" if scored.activation is None else scored.activation.name()
    if name.startswith("Log"):
        return "logarithms"
    return "probabilities" if name.startswith("Sigmoid") else None


def against_rivals(target: Target, scored: Scores) -> Target:
    """Return the log-odds of a class; for any other target, its score as the model returns it.

    Args:
        target: a target that scores one class or something else, as ``fixed_target`` returns it.
        scored: its scores of a picture, with their graph.
    """
    if not isinstance(target, ClassTarget) or not isinstance(target.index, tuple) or target.cells is not None:
        return AsReturned(target)
    final = "" if scored.activation is None else scored.activation.name()
    return LogOddsTarget(target.index[0], final, activation=target.activation)


@dataclass(frozen=True)
class LogOddsTarget(OfClasses):
    """The logit of one class minus the logarithm of the summed exponentials of all others: log p / (1 - p).

    If the classes do not exclude each other (sigmoid), or if there is one, these are the logit itself.

    Attributes:
        index: the class.
        final: the softmax or sigmoid in which the model ends, by the name of its node in the autograd graph.
    """

    index: int
    final: str = ""

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the log-odds for each image.

        The gradient is that of logits, to which the gradients of probabilities are passed through unchanged
        (``passing_through``): log p / (1 - p) has no gradient where rounding made p 1.
        """
        scores = logits_of(output, batch)
        check_index(self.index, scores.shape[1])
        reading = ScoreReading.of(scores, self.final)
        logits = reading.logits
        rows = scores.to(logits.dtype) / (100 if reading.kind == "percentage" else 1)
        if not self.final and reading.whole is not None:  # probabilities, by operations of the model's own
            rows = rows.clamp(min=torch.finfo(rows.dtype).tiny).log()
        value, slope = logits[:, self.index], rows[:, self.index]
        if logits.shape[1] > 1 and self.activation not in ("sigmoid", "none") and "Sigmoid" not in self.final:
            others = logits.clone()
            others[:, self.index] = -torch.inf
            value = value - others.logsumexp(1)
            slope = slope - (others.softmax(1) * rows).sum(1)
        return Scores(value + (slope - slope.detach()), quantity="log-odds", activation=reading.activation)


@dataclass(frozen=True)
class AsReturned(Target):
    """The score of a target, with its own gradient: gradients do not pass through a final softmax unchanged."""

    for_threads = False

    of: Target

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score for each image."""
        return replace(self.of(output, batch), activation=None)
