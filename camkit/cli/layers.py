"""A model loaded by name, looked at with one drawn scene."""

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
    """Look at a model loaded by name with one picture, a drawn scene prepared as the model wants it."""
    inputs = _example(model)
    try:
        return decide(model.module, inputs)
    except RuntimeError as error:
        sentence = about_channels(model.module, inputs)
        if sentence is None:
            raise
        raise ModelError(sentence) from error


def model_costs(model: LoadedModel) -> Costs:
    """Return what the layers of a model loaded by name cost for that picture."""
    return costs(model.module, _example(model))


def _example(model: LoadedModel) -> torch.Tensor:
    if model.preprocess is None:
        raise ModelError(
            f"it is not known how pictures are prepared for {model.name}: give --size, --mean and --std, or a factory "
            "that returns the module and the function that prepares a PIL picture for it"
        )
    picture: Image.Image = open_picture(next(iter(scene_paths().values())))
    return model.preprocess(picture)[None].to(device_of(model.module))
