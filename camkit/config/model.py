"""Load the model that a config describes."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import ExportedProgram

from camkit.config.settings import ModelSection
from camkit.errors import InputError, advice
from camkit.models import load_model, read_labels
from camkit.models.loaded import Loadable, LoadedModel


def configured_model(
    model: Loadable | None,
    section: ModelSection,
    *,
    device: str | torch.device | None = None,
    trainable: bool = False,
) -> nn.Module | LoadedModel | ExportedProgram:
    """Return a model, loaded as the config says if it is given by name; None stands for the config's own model.

    The config's other settings apply to the model that it names, and to every model if it names none.

    Raises:
        InputError: neither the call nor the config names a model, or the model cannot be loaded.
    """
    if isinstance(model, (nn.Module, LoadedModel, ExportedProgram)):
        return model
    name = section.name if model is None else model
    if name is None:
        raise InputError(
            f"no model is named; {advice('pass one', 'pass --model')}, or set name in the config's [model] table"
        )
    if not section.describes(name):
        return load_model(name, device=device, trainable=trainable)
    return load_model(
        name,
        section.weights,
        device or section.device,
        size=(section.size[0], section.size[1]) if isinstance(section.size, list) else section.size,
        mean=section.mean,
        std=section.std,
        labels=None if section.labels is None else read_labels(section.labels),
        text=section.text,
        output=section.output,
        trainable=trainable,
    )
