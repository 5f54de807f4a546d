"""Probes a model that was loaded by name, with a drawn scene as its input."""

from __future__ import annotations

import torch
from PIL import Image

from camkit.demo.scenes import scene_paths
from camkit.errors import ModelError
from camkit.images.read import open_picture
from camkit.layers.choose import Decision, decide
from camkit.layers.costs import Costs, costs
from camkit.models import about_channels, device_of
from camkit.models.loaded import LoadedModel


def decide_on(model: LoadedModel) -> Decision:
    """Choose the layer of a model that was loaded by name, with a drawn scene that its own preprocessing prepares."""
    inputs = _example(model)
    try:
        return decide(model.module, inputs, every=True)
    except RuntimeError as error:
        sentence = about_channels(model.module, inputs)
        if sentence is None:
            raise
        raise ModelError(sentence) from error


def model_costs(model: LoadedModel) -> Costs:
    """Return what the layers of a model cost for the same picture."""
    return costs(model.module, _example(model))


def _example(model: LoadedModel) -> torch.Tensor:
    if model.preprocess is None:
        raise ModelError(
            f"camkit does not know how to prepare pictures for {model.name}; pass --size, --mean and --std, or let the "
            "factory return the module and the function that prepares a PIL picture for it"
        )
    picture: Image.Image = open_picture(next(iter(scene_paths().values())))
    return model.preprocess(picture)[None].to(device_of(model.module))
