"""What the model says: the output it names, the probability of a picture's own class, and its margin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from camkit.background.experiment import Answer
from camkit.background.plan import Plan
from camkit.background.values import Item
from camkit.engine.passes import faster_format, quiet_pass
from camkit.errors import CamkitError, InputError
from camkit.images.prepare import prepare
from camkit.models import device_of, dtype_of
from camkit.models.loaded import LoadedModel
from camkit.targets import logits_of

NO_ANSWER = -1
"""The output named where the logits hold NaN or infinity."""


def ask(plan: Plan, batch: Tensor, classes: Sequence[tuple[int, ...]]) -> list[Answer]:
    """Return what the model answers to a batch of edits, each of a picture of these outputs."""
    module = plan.model.module
    place = device_of(module)
    precision = plan.settings.check.precision
    inputs = batch.to(place, dtype_of(module))
    with quiet_pass(module, place, precision):
        inputs = (
            inputs.contiguous(memory_format=faster_format(module, inputs, precision)) if len(inputs) > 3 else inputs
        )
        logits = logits_of(module(inputs), len(inputs)).float().cpu()
    return answers_of(logits, classes)


def answers_of(logits: Tensor, classes: Sequence[tuple[int, ...]]) -> list[Answer]:
    """Return what the model said to each picture, whose own class is these outputs; NO_ANSWER where it is no number."""
    found: list[Answer] = []
    for row, share, indices in zip(logits, logits.double().softmax(1), classes, strict=True):
        if not bool(torch.isfinite(row).all()):
            found.append({"answer": NO_ANSWER, "share": 0.0, "margin": 0.0})
            continue
        others = row.clone()
        others[list(indices)] = float("-inf")
        margin = float(row[list(indices)].amax() - others.amax())
        found.append({"answer": int(row.argmax()), "share": float(share[list(indices)].sum()), "margin": margin})
    return found


def outputs_of(model: LoadedModel, items: Sequence[Item]) -> int:
    """Return how many classes a model's output has, as its answer to the first readable picture shows.

    Raises:
        InputError: no picture can be read, or the output is no classifier's.
    """
    module, place = model.module, device_of(model.module)
    assert model.preprocess is not None
    failure: CamkitError | None = None
    for item in items:
        try:
            tensor = prepare(item.path, model.preprocess, item.name).tensor
        except CamkitError as error:
            failure = error
            continue
        with quiet_pass(module, place, "fp32"):
            count = logits_of(module(tensor[None].to(place, dtype_of(module))), 1).shape[1]
        if count < 2:
            raise InputError("the check is for classifiers of two classes and more; this model has one output")
        return count
    raise InputError(f"no picture could be read: {failure}")
