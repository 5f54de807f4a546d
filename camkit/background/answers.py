"""The model's answers: the output it names, the probability of the picture's own class, and its margin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.background.experiment import NO_ANSWER, Answer
from camkit.background.values import Item
from camkit.engine.interrupts import interruptible
from camkit.engine.passes import quiet_pass
from camkit.errors import CamkitError, InputError
from camkit.images.prepare import prepare
from camkit.models import device_of, dtype_of
from camkit.models.loaded import LoadedModel
from camkit.targets import logits_of
from camkit.targets.probabilities import WHOLES, rows_that_sum_to


def answers_of(logits: Float[Tensor, "n outputs"], classes: Sequence[tuple[int, ...]]) -> list[Answer]:
    """Turn logits (N, outputs) into answers; NO_ANSWER for a row with NaN or infinity.

    ``classes`` has, for each row, the outputs of its picture's class.
    """
    own = torch.zeros_like(logits, dtype=torch.bool)
    for row, indices in enumerate(classes):
        own[row, list(indices)] = True
    finite = logits.isfinite().all(1)
    named = logits.argmax(1).where(finite, NO_ANSWER)
    shares = (_probabilities(logits) * own).sum(1).where(finite, 0.0)
    best_own, best_other = (logits.masked_fill(~of, float("-inf")).amax(1) for of in (own, ~own))
    margins = (best_own - best_other).where(finite, 0.0)
    return [Answer(*values) for values in zip(named.tolist(), shares.tolist(), margins.tolist(), strict=True)]


def _probabilities(logits: Float[Tensor, "n outputs"]) -> Float[Tensor, "n outputs"]:
    """Return each row's probabilities: the softmax of logits, or the row itself if it already holds probabilities."""
    probabilities = logits.double().softmax(1)
    for whole in WHOLES:
        given = rows_that_sum_to(whole, logits)
        probabilities[given] = logits[given].double() / whole
    return probabilities


def count_outputs(model: LoadedModel, items: Sequence[Item]) -> int:
    """Return how many outputs a classifier has, by running it on the first readable picture.

    Raises:
        InputError: no picture can be read, or the model is not a classifier of two or more classes.
    """
    module, device = model.module, device_of(model.module)
    assert model.preprocess is not None
    failure: CamkitError | None = None
    for item in items:
        try:
            tensor = prepare(item.path, model.preprocess, item.name).tensor
        except CamkitError as error:
            failure = error
            continue
        with quiet_pass(module, device, "fp32"), interruptible():
            count = logits_of(module(tensor[None].to(device, dtype_of(module))), 1).shape[1]
        if count < 2:
            raise InputError("the check needs a classifier with two or more outputs; this model has one")
        return count
    raise InputError(f"no picture could be read: {failure}")
