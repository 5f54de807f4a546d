"""The model's answers: the output it names, the probability of the picture's own class, and its margin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from camkit.background.experiment import Answer
from camkit.background.plan import Plan
from camkit.background.values import Item
from camkit.engine.interrupts import interruptible
from camkit.engine.passes import faster_format, quiet_pass
from camkit.errors import CamkitError, InputError
from camkit.images.prepare import prepare
from camkit.models import device_of, dtype_of
from camkit.models.loaded import LoadedModel
from camkit.targets import logits_of
from camkit.targets.probabilities import shares_of

NO_ANSWER = -1
"""The output named if the logits contain NaN or infinity."""


def answer_batch(plan: Plan, batch: Tensor, classes: Sequence[tuple[int, ...]]) -> list[Answer]:
    """Classify a batch of edits; ``classes`` are, for each edit, the outputs of its picture's class."""
    module = plan.model.module
    device = device_of(module)
    precision = plan.settings.check.precision
    inputs = batch.to(device, dtype_of(module))
    with quiet_pass(module, device, precision), interruptible():
        inputs = inputs.to(memory_format=faster_format(module, inputs, precision, plan.answers_alike))
        logits = logits_of(module(inputs), len(inputs)).float().cpu()
    return answers_of(logits, classes)


def answers_of(logits: Tensor, classes: Sequence[tuple[int, ...]]) -> list[Answer]:
    """Turn logits (N, outputs) into answers; NO_ANSWER for a row with NaN or infinity.

    ``classes`` are, for each row, the outputs of its picture's class.
    """
    answers: list[Answer] = []
    for row, shares, indices in zip(logits, logits.double().softmax(1), classes, strict=True):
        if not bool(torch.isfinite(row).all()):
            answers.append({"answer": NO_ANSWER, "share": 0.0, "margin": 0.0})
            continue
        given = shares_of(row[None])
        probabilities = shares if given is None else given[0]
        own = list(indices)
        others = row.clone()
        others[own] = float("-inf")
        margin = float(row[own].amax() - others.amax())
        answers.append({"answer": int(row.argmax()), "share": float(probabilities[own].sum()), "margin": margin})
    return answers


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
