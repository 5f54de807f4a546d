"""The confidence of a model: the probability of a target's class, as a score."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from camkit.targets.boxes import SameBoxTarget
from camkit.targets.classes import ClassTarget, FinerTarget
from camkit.targets.maps import SegmentTarget, predicted_cells
from camkit.targets.outputs import maps_of
from camkit.targets.scores import Scores, Target

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


def fixed_target(target: Target, scored: Scores, output: Any) -> Target:
    """Return the target that scores the class of a picture, whatever a change of this picture does to other classes.

    A box may move in a changed picture; the box that matches it best is scored. On a map, the cells stay those where
    the class is predicted in the unchanged picture. The classes that a class is compared with stay the same too.

    Args:
        target: a target for one picture.
        scored: its score of the picture.
        output: the model's output for the picture.
    """
    if scored.boxes is not None:
        (corners,) = scored.boxes
        assert corners is not None
        return SameBoxTarget(corners, None if scored.indices is None else scored.indices[0])
    if scored.indices is None or (isinstance(target, SegmentTarget) and (target.everywhere or target.mask is not None)):
        return target
    if isinstance(target, FinerTarget):
        return target.fixed(fixed_target(target.of, scored, output), output, 1)
    maps = maps_of(output, 1)
    if maps is None:
        return ClassTarget(scored.indices[0], getattr(target, "activation", None))
    return SegmentTarget(scored.indices[0], predicted_cells(maps, torch.tensor(scored.indices, device=maps.device))[0])
