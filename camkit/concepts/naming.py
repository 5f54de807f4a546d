"""Which class the part of a model after a layer gives to one feature vector."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.capture import whole_graph
from camkit.engine.head import Head, recording
from camkit.engine.interrupts import interruptible
from camkit.engine.passes import quiet_pass
from camkit.errors import MethodError, TargetError
from camkit.targets.classes import probabilities
from camkit.targets.outputs import logits_of
from camkit.targets.probabilities import ScoreReading
from camkit.types import Activation, TargetLayer


def class_probabilities(
    model: nn.Module,
    layer: TargetLayer,
    image: Float[Tensor, "1 c *size"],
    vectors: Float[Tensor, "k channels"],
    activation: Activation | None,
) -> Float[Tensor, "k classes"] | None:
    """Return the probability of each class if every cell of the layer's feature maps is one of the vectors.

    Args:
        model: the model; it is restored exactly.
        layer: the layer.
        image: a picture, whose own feature maps the vectors replace.
        vectors: the vectors.
        activation: what turns the model's scores into probabilities.

    Returns:
        None if the model is no classifier, or its part after the layer cannot be run alone.
    """
    if layer.layout is None:
        return None
    each_pass = functools.partial(quiet_pass, model, image.device, "fp32")
    with each_pass(), recording(model, layer.ref) as recorded, whole_graph(image) as picture, interruptible():
        output = model(picture)
    try:
        own = ScoreReading.of(logits_of(output, 1))
        head = Head(model, layer.ref, layer.layout, image, recorded, logits_of, own.values[0].float(), each_pass)
    except (TargetError, MethodError):
        return None
    cells = [1] * len(layer.layout.grid)
    maps = vectors.to(head.activations).reshape(*vectors.shape, *cells).expand(-1, -1, *layer.layout.grid)
    with torch.no_grad():
        return probabilities(ScoreReading.of(head(maps.clone()), own.final), activation)
