"""``factorise()``: run the model, collect the feature maps of all pictures, and factorise them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.capture import Pass
from camkit.engine.head import Head, recording
from camkit.errors import ImageError, InputError, LayerError, MethodError, TargetError
from camkit.images.prepare import prepare, unbatched
from camkit.inspect.concepts import Concepts
from camkit.inspect.feature_maps import maps_of_one_layer
from camkit.inspect.nmf import factorise_cells
from camkit.layers.names import Selector
from camkit.models import Labels, as_model, device_of, dtype_of, spatial_rank
from camkit.models.loaded import Loadable
from camkit.targets.outputs import logits_of
from camkit.targets.probabilities import ScoreReading, probabilities
from camkit.types import Activation, ImageLike, Preprocess, TargetLayer


def factorise(
    model: Loadable,
    images: ImageLike | Sequence[ImageLike],
    concepts: int = 5,
    target_layer: Selector | None = None,
    *,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
    batch_size: int | None = None,
) -> Concepts:
    """Find the concepts that a layer's feature maps are made of: deep feature factorisation.

    The non-negative part of the feature vectors of all cells of all pictures is factorised: each cell becomes a sum of
    a few vectors, the concepts, with non-negative strengths. The strengths of one concept are its map. If the part of
    the model after the layer can be run alone, it says which class it would give to a picture whose every cell is one
    concept. (Collins, Achanta and Suesstrunk 2018, Deep Feature Factorization, arXiv:1806.10206)

    Args:
        model, target_layer, preprocess, labels, device, batch_size: as for ``camkit.explain``; one layer.
        images: one picture or several, as ``camkit.explain`` takes them.
        concepts: how many concepts.

    Returns:
        A ``Concepts``, with the concept that makes up most of the feature maps first.

    Raises:
        InputError: ``concepts`` is less than 1 or more than the cells or channels, there is no picture, several layers
            match, or as for ``camkit.explain``.

    Examples:
        >>> import camkit
        >>> found = camkit.factorise("demo-fair", camkit.scenes.scene_paths()["plane-sky"], concepts=3)
        >>> found.vectors.shape, found.maps[0].shape
        ((3, 64), (3, 16, 16))
    """
    if isinstance(concepts, bool) or not isinstance(concepts, int) or concepts < 1:
        raise InputError(f"concepts must be a whole number from 1, not {concepts!r}")
    loaded = as_model(model, preprocess=preprocess, labels=labels, device=device)
    rank = spatial_rank(loaded.module)
    given = images if isinstance(images, (list, tuple)) else [images]
    pictures = list(unbatched(cast("Sequence[ImageLike]", given), rank))
    if not pictures:
        raise ImageError("there is no picture to factorise; pass at least one")
    explained, maps, layer = maps_of_one_layer(loaded, pictures, target_layer, batch_size)
    for place, of_picture in enumerate(maps):
        maps[place] = of_picture.float()
    strengths, vectors = _factors(maps, concepts, str(layer))
    image = prepare(pictures[0], loaded.preprocess, explained[0].source, rank).tensor[None].detach()
    image = image.to(device_of(loaded.module), dtype_of(loaded.module))
    chances = class_probabilities(loaded.module, layer, image, vectors, loaded.activation)
    if chances is not None and loaded.labels is not None and len(loaded.labels) != chances.shape[1]:
        raise InputError(f"{len(loaded.labels)} labels were given, but the model has {chances.shape[1]} classes")
    classes = None if chances is None else tuple(chances.argmax(1).tolist())
    grids = [of_picture.shape[1:] for of_picture in maps]
    parts = strengths.split([grid.numel() for grid in grids], dim=1)
    cells = _cells(maps)
    total = float(cells.square().sum())
    left_out = float((cells - strengths.mT @ vectors).square().sum())
    return Concepts(
        maps=tuple(part.reshape(-1, *grid).numpy() for part, grid in zip(parts, grids, strict=True)),
        vectors=vectors.numpy(),
        classes=classes,
        probabilities=None if chances is None else tuple(chances.amax(1).tolist()),
        labels=None if classes is None or loaded.labels is None else tuple(loaded.labels[index] for index in classes),
        unexplained=left_out / total if total > 0 else 0.0,
        layer=str(layer),
        model=loaded.name,
        pictures=tuple(explained),
    )


def _cells(maps: Sequence[Float[Tensor, "c *_"]]) -> Float[Tensor, "cells c"]:
    """Return the non-negative feature vectors of all cells of all pictures."""
    return torch.cat([of_picture.flatten(1).mT for of_picture in maps]).relu()


def _factors(
    maps: Sequence[Float[Tensor, "c *_"]], count: int, layer: str
) -> tuple[Float[Tensor, "k cells"], Float[Tensor, "k c"]]:
    """Return the strengths, whose largest is 1 for each concept, and the vectors; the concept with most evidence first.

    Raises:
        InputError: more concepts than the feature maps can have.
        LayerError: the feature maps are not finite.
    """
    cells = _cells(maps)
    most = min(cells.shape)
    if count > most:
        raise InputError(
            f"{count} concepts are too many: layer {layer!r} has {cells.shape[1]} channels, and {cells.shape[0]} cells "
            f"in all pictures, so at most {most} can be told apart"
        )
    if not bool(cells.isfinite().all()):
        raise LayerError(f"the feature maps of layer {layer!r} hold NaN or infinite values")
    strengths, vectors = factorise_cells(cells, count)
    largest = strengths.amax(1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1)
    strengths, vectors = strengths / largest, vectors * largest
    order = (strengths.sum(1) * vectors.sum(1)).argsort(descending=True)
    return strengths[order], vectors[order]


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
    options = Pass(model, image, ())
    with options.forward(recording(model, layer.ref), leaf=True) as run:
        output, (recorded,) = run.output, run.entered
    try:
        own = ScoreReading.of(logits_of(output, 1))
        head = Head(options, layer.ref, layer.layout, recorded, logits_of, own.values[0].float())
    except (TargetError, MethodError):
        return None
    cells = [1] * len(layer.layout.grid)
    maps = vectors.to(head.activations).reshape(*vectors.shape, *cells).expand(-1, -1, *layer.layout.grid)
    with torch.no_grad():
        return probabilities(ScoreReading.of(head(maps.clone()), own.final), activation)
