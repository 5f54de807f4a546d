"""The confidence of a model: the probability of a target's class, as a score."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from camkit.targets.classes import FinerTarget
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
