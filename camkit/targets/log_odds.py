"""The log-odds of a class: its logit against those of all other classes together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from camkit.targets.fixed import SameClassTarget
from camkit.targets.names import check_index
from camkit.targets.outputs import logits_of
from camkit.targets.probabilities import ScoreReading
from camkit.targets.scores import Scores, Target
from camkit.types import Activation


def against_rivals(target: Target, scored: Scores) -> Target:
    """Return the log-odds of a class; for any other target, its score as the model returns it.

    Args:
        target: a target that scores one class or something else, as ``fixed_target`` returns it.
        scored: its scores of a picture, with their graph.
    """
    if not isinstance(target, SameClassTarget) or target.cells is not None:
        return AsReturned(target)
    return LogOddsTarget(
        target.indices[0], target.activation, "" if scored.activation is None else scored.activation.name()
    )


@dataclass(frozen=True)
class LogOddsTarget(Target):
    """The logit of one class minus the logarithm of the summed exponentials of all others: log p / (1 - p).

    If the classes do not exclude each other (sigmoid), or if there is one, these are the logit itself.

    Attributes:
        index: the class.
        activation: what gives the probabilities; None for a softmax, or a sigmoid if there is one class.
        final: the softmax or sigmoid in which the model ends, by the name of its node in the autograd graph.
    """

    for_threads = True

    index: int
    activation: Activation | None = None
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

    of: Target

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the score for each image."""
        return replace(self.of(output, batch), activation=None)
