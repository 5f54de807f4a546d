"""The model as a function from changed versions of one picture to their scores, for a target that stays the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.interrupts import interruptible
from camkit.engine.passes import faster_format, is_out_of_memory, quiet_pass
from camkit.engine.record import ModelRecord
from camkit.errors import TargetError
from camkit.targets.confidence import ConfidenceTarget, fixed_target
from camkit.targets.scores import Scores, Target
from camkit.types import Precision


class PictureScores:
    """Returns the scores of changed versions of one picture.

    The target is fixed by the picture itself: if it is the best class, it stays the class that is best for the
    unchanged picture. The model is left as it was after each call.

    Args:
        model: the model.
        picture: the model's input (C, *size), on the model's device and in its type.
        target: a target for one picture.
        precision: as for ``Explainer``.
        at_once: pictures per pass; halved if memory runs out.
        current: returns the model's record, and for each precision whether the model answers alike in both memory
            formats.

    Raises:
        TargetError: the target does not exist in the picture, or is a box, which a changed picture would move.

    Attributes:
        picture: the model's input.
        target: the target, fixed.
        answer: the target's score of the unchanged picture, with its class and probability.
        confidence: its probability, or the score itself if the target has no probability.
        quantity: what the confidence is: "probability", or the target's own phrase.
        passes: how many pictures have been run through the model so far.
    """

    def __init__(
        self,
        model: nn.Module,
        picture: Float[Tensor, "c *size"],
        target: Target,
        precision: Precision,
        at_once: int,
        current: Callable[[], tuple[ModelRecord, dict[Precision, bool]]],
    ) -> None:
        self.picture, self.at_once, self.passes = picture, at_once, 1
        self._model, self._precision, self._current = model, precision, current
        with quiet_pass(model, picture.device, precision, current()[0]), interruptible():
            output = model(picture[None].clone())
            self.answer: Scores = target(output, 1)
            _check(self.answer)
            self.target = fixed_target(target, self.answer, output)
            self._confidence = ConfidenceTarget(self.target)
            first = self._confidence(output, 1)
        self.confidence = float(first.values[0])
        self.quantity = first.quantity if isinstance(first.quantity, str) else first.quantity[0]

    def __call__(self, pictures: Float[Tensor, "m c *size"]) -> Float[Tensor, " m"]:
        """Return the confidence of each picture, as float32 on the CPU.

        The pictures may have any floating-point type and lie on any device; one pass takes ``at_once`` of them.
        """
        record, alike = self._current()
        scores: list[Tensor] = []
        done = 0
        while done < len(pictures):
            part = pictures[done : done + self.at_once].to(self.picture.device, self.picture.dtype)
            memory_format = faster_format(self._model, part, self._precision, alike)
            try:
                with quiet_pass(self._model, part.device, self._precision, record), interruptible():
                    output = self._model(part.clone(memory_format=memory_format))
                    scores.append(self._confidence(output, len(part)).values.cpu())
            except RuntimeError as error:
                if len(part) == 1 or not is_out_of_memory(error):
                    raise
                self.at_once = len(part) // 2
                continue
            done += len(part)
        self.passes += len(pictures)
        return torch.cat(scores) if scores else torch.zeros(0)


def _check(answer: Scores) -> None:
    if answer.boxes is not None:
        raise TargetError("a detector's box moves when the picture changes; pass a target function that scores a class")
    if answer.present is not None and not all(answer.present):
        raise TargetError(answer.absence)
