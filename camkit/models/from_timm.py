"""Loads timm's networks, ``timm:NAME``, with preprocessing and labels from their own configuration."""

from __future__ import annotations

from typing import Any, cast

import timm
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset, resolve_model_data_config
from torch import nn

from camkit.errors import ModelError, advice, as_error, brief, did_you_mean
from camkit.models.loaded import LoadedModel, Request, read_weights
from camkit.types import Preprocess


def load(request: Request) -> LoadedModel:
    """Build a network with timm's published weights, with weights from a file, or with none."""
    name = request.name.removeprefix("timm:")
    architecture = name.partition(".")[0]
    if not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")) and not timm.is_model(architecture):
        raise ModelError(f"timm has no model {name!r}{did_you_mean(architecture, timm.list_models())}")
    if request.weights is None:
        return described(_built(name, pretrained=request.pretrained), request)
    weights = read_weights(request.weights)
    module, classes = weights.build(
        lambda classes: _built(name, **({} if classes is None else {"num_classes": classes})), request.name
    )
    labels = _labels(module) if classes is None else None
    return LoadedModel(module, request.name, _prepared(module, request), labels, weights.note)


def described(module: nn.Module, request: Request) -> LoadedModel:
    """Return a network of timm's with the preprocessing and labels of its configuration."""
    return LoadedModel(module, request.name, _prepared(module, request), _labels(module))


def _built(name: str, **options: Any) -> nn.Module:
    """Build a network; its configuration and weights may have to be read from a folder or downloaded."""
    instead = "pass a local file with " + advice("weights=...", "--weights FILE")
    with as_error(ModelError, lambda error: f"timm:{name} cannot be loaded ({brief(error)}); {instead}"):
        return cast("nn.Module", timm.create_model(name, **options))


def _prepared(module: nn.Module, request: Request) -> Preprocess:
    config: dict[str, Any] = resolve_model_data_config(module)
    if request.size is not None:
        config["input_size"] = (config["input_size"][0], *request.size)
    config |= {name: value for name, value in request.changes.items() if name != "size"}
    return cast("Preprocess", create_transform(**config, is_training=False))


def _labels(module: nn.Module) -> tuple[str, ...] | None:
    config = getattr(module, "pretrained_cfg", {})
    classes = getattr(module, "num_classes", 0)
    names = config.get("label_descriptions") or config.get("label_names")
    if names and len(names) == classes:
        return tuple(names.get(name, name) if isinstance(names, dict) else name for name in names)
    subset = infer_imagenet_subset(module)
    if subset is None:
        return None
    classes_of_subset = ImageNetInfo(subset)
    return tuple(classes_of_subset.index_to_description(index) for index in range(classes))
