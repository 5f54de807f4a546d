"""The model as a function from changed versions of one picture to their scores, for a target that stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.capture import Pass, detached
from camkit.engine.interrupts import interruptible
from camkit.engine.passes import faster_format, in_parts, quiet_pass
from camkit.engine.record import ModelRecord
from camkit.errors import TargetError
from camkit.targets.classes import TopTarget
from camkit.targets.fixed import ConfidenceTarget, class_alone, fixed_target, given_by
from camkit.targets.outputs import maps_of
from camkit.targets.scores import Scores, Target
from camkit.types import Activation, Precision


class PictureScores:
    """Returns the scores of changed versions of one picture.

    The target is fixed by the picture itself: if it is the best class, it stays the class that is best for the
    unchanged picture. The model is left as it was after each call.

    Args:
        model: the model.
        picture: the model's input (C, *size), on the model's device and in its type.
        target: a target for one picture.
        activation: what turns the model's scores into probabilities.
        precision: as for ``Explainer``.
        at_once: pictures per pass; halved if memory runs out.
        current: returns the model's record, and for each precision whether the model answers alike in both memory
            formats.

    Raises:
        TargetError: the target does not exist in the picture, or is a box, which a changed picture would move.

    Attributes:
        picture: the model's input.
        target: the target, fixed.
        confidence_target: the target whose scores are returned.
        answer: the target's score of the unchanged picture, with its class and probability.
        confidence: its probability, or the score itself if the target has no probability.
        best: the class that the model itself answers, and its probability (None if it has none). ``best`` is None if
            the output is no list of class scores.
        quantity: what the confidence is: "probability", or the target's own phrase.
        passes: how many pictures have been run through the model so far.
    """

    def __init__(
        self,
        model: nn.Module,
        picture: Float[Tensor, "c *size"],
        target: Target,
        activation: Activation | None,
        precision: Precision,
        at_once: int,
        current: Callable[[], tuple[ModelRecord, dict[Precision, bool]]],
    ) -> None:
        self.picture, self.at_once, self.passes = picture, at_once, 1
        self._model, self._precision, self._current = model, precision, current
        # The graph of this pass shows whether the model returns probabilities.
        with Pass(model, picture[None], (), precision=precision, record=current()[0]).forward(leaf=True) as run:
            output = run.output
            answer = target(output, 1)
            _check(answer)
            self.target = fixed_target(target, answer)
            self.confidence_target = ConfidenceTarget(class_alone(self.target), given_by(answer))
            first = self.confidence_target(output, 1)
            self.best = _best_class(output, activation)
        self.answer = detached(answer)
        self.confidence = float(first.values[0])
        self.quantity = first.quantity if isinstance(first.quantity, str) else first.quantity[0]

    def __call__(self, pictures: Float[Tensor, "m c *size"]) -> Float[Tensor, " m"]:
        """Return the confidence of each picture, as float32 on the CPU.

        The pictures may have any floating-point type and lie on any device; one pass takes ``at_once`` of them.
        """
        record, alike = self._current()
        scores: list[Tensor] = []

        def run(numbers: range) -> None:
            part = pictures[numbers.start : numbers.stop].to(self.picture.device, self.picture.dtype)
            memory_format = faster_format(self._model, part, self._precision, alike)
            with quiet_pass(self._model, part.device, self._precision, record), interruptible():
                output = self._model(part.clone(memory_format=memory_format))
                scores.append(self.confidence_target(output, len(part)).values.cpu())

        self.at_once = in_parts(len(pictures), self.at_once, run)
        self.passes += len(pictures)
        return torch.cat(scores) if scores else torch.zeros(0)


def _best_class(output: Any, activation: Activation | None) -> tuple[int, float | None] | None:
    """Return the best class of an output for one picture, and its probability."""
    target = TopTarget(activation=activation)
    try:
        if maps_of(output, 1) is not None:
            return None
        top = target(output, 1)
    except TargetError:
        return None
    if top.indices is None or top.classes == 1:  # a single score says yes or no to the same class
        return None
    if top.probabilities is None:
        return top.indices[0], None
    return top.indices[0], float(ConfidenceTarget(target, given_by(top))(output, 1).values[0])


def _check(answer: Scores) -> None:
    if answer.boxes is not None:
        raise TargetError("a detector's box moves when the picture changes; pass a target function that scores a class")
    if answer.present is not None and not all(answer.present):
        raise TargetError(answer.absence)
