"""diagnose(): from a model and a batch to what is wrong with it."""

from __future__ import annotations

from typing import get_args

import torch
from torch import nn

from camkit.diagnosis.batch import Batch, Loss, prepared_batch, score_for, taken_apart
from camkit.diagnosis.findings import findings
from camkit.diagnosis.rows import rows_of, setting_of
from camkit.diagnosis.values import Diagnosis, Setting
from camkit.diagnosis.watching import Watched, watch
from camkit.errors import InputError, ModelError
from camkit.models import about_channels, as_model, load_model, spatial_rank
from camkit.models.loaded import LoadedModel
from camkit.types import Precision, Preprocess


def diagnose(
    model: nn.Module | str | LoadedModel,
    batch: Batch,
    loss: Loss | None = None,
    *,
    training: bool = False,
    precision: Precision = "fp32",
    preprocess: Preprocess | None = None,
    device: str | torch.device | None = None,
) -> Diagnosis:
    """Tell how each layer of a model fares with a batch of pictures, and what is wrong.

    The model is run once and differentiated once. Of what its layers return and of the gradients only statistics are
    kept. The model comes back exactly as it went in: flags, buffers, ``.grad``, random generators, hooks.

    Args:
        model: as for ``camkit.explain``.
        batch: a tensor (N, C, H, W), paths or other pictures, or a pair of such a batch and its labels (N,). Eight
            pictures or more tell a dead channel from one that has nothing to say of these pictures.
        loss: a function ``output -> number``, with labels ``(output, labels) -> number``, whose gradient is looked at.
            None is the cross entropy where there are labels, else the mean of the best class's logit.
        training: look at the model as in a training step, after ``model.train()``: dropout on, normalisation by the
            batch. Otherwise as in evaluation.
        precision: "fp32", or "bf16" and "fp16" under autocast, to find what a step in mixed precision overflows.
        preprocess: turns a PIL picture into the model's input (C, H, W); a model loaded by name brings its own.
        device: where a model loaded by name runs; a module stays where it is.

    Returns:
        A ``Diagnosis``: ``rows`` with statistics by layer, ``findings`` in words, ``to_dict()`` for JSON.

    Raises:
        InputError: something in the call or a picture is wrong.
        Exception: whatever the model or the loss raises.

    Example:
        >>> import camkit, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
        >>> _ = nn.init.constant_(net[0].bias, -100)
        >>> found = camkit.diagnose(net, torch.rand(16, 1, 8, 3))
        >>> [(one.kind, one.layer) for one in found.findings]
        [('dead', '1'), ('no gradient', '0')]
    """
    if precision not in get_args(Precision):
        raise InputError(f"precision is one of {', '.join(get_args(Precision))}, not {precision!r}")
    named = load_model(model, device=device, trainable=True) if isinstance(model, str) else model
    loaded = as_model(named, preprocess=preprocess, device=None if isinstance(model, str) else device)
    pictures, labels = taken_apart(batch, spatial_rank(loaded.module))
    inputs = prepared_batch(pictures, loaded)
    score = score_for(loss, labels, loaded.module)
    try:
        watched = watch(loaded.module, inputs, score, training=training, precision=precision)
    except RuntimeError as error:
        sentence = about_channels(loaded.module, inputs)
        if sentence is None:
            raise
        raise ModelError(sentence) from error
    except ValueError as error:
        if len(inputs) > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise InputError(
            "in training, batch normalisation needs more than one picture; pass a batch of them"
        ) from error
    rows = rows_of(loaded.module, watched)
    setting = setting_of(loaded.module, watched, len(inputs), to_train=training and not isinstance(model, LoadedModel))
    parameters = list(loaded.module.parameters())
    return Diagnosis(
        loaded.name,
        len(inputs),
        training,
        watched.loss,
        rows,
        tuple(findings(rows, setting)),
        tuple(_remarks(loaded.module, watched, setting)),
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    )


def _remarks(module: nn.Module, watched: Watched, setting: Setting) -> list[str]:
    """Return what should be known of the numbers, although nothing is wrong."""
    said = []
    if watched.loss is None:
        said.append("there are no gradients: the output depends on nothing that can be differentiated")
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        said.append("no parameter requires gradients, as in a model that is used and not trained")
    zero = setting.zero_weights
    if zero:
        named = ", ".join(map(repr, zero[:3])) + (", ..." if len(zero) > 3 else "")
        said.append(f"the weights of {named} are all zero, as some are initialised, and let no gradient through yet")
    if setting.unnormalised:
        said.append(
            "batch normalisation has seen too few batches to know what it normalises in evaluation mode, so whether "
            "gradients vanish or explode is not judged; training=True (--train) shows the model as it is trained"
        )
    return said
