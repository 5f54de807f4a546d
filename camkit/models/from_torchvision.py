"""Loads torchvision's classifiers, segmentation and video networks, and detectors by the names of their builders."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torchvision
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.transforms._presets import ImageClassification, VideoClassification

from camkit.errors import ModelError, advice, as_error, brief, did_you_mean
from camkit.models.loaded import LoadedModel, Request, is_file, preset, read_weights
from camkit.models.modules import ClipPreprocess, refuse_short
from camkit.types import Pixels, Preprocess

_KINDS = (
    torchvision.models,
    torchvision.models.segmentation,
    torchvision.models.detection,
    torchvision.models.video,
)

_CLIPS = {"mvit": (16, 7.5), "s3d": (128, 15.0), "swin3d": (32, 15.0)}
"""By family of video networks: how many frames they take, and how many of them a second, as torchvision evaluates them;
its others take 16, and 15 a second."""


class PresetOfClips(ClipPreprocess):
    """Prepares clips with torchvision's preset: frames at the rate of its recipe, from the middle of the video."""

    def __init__(self, preset: Any, frames: int, rate: float) -> None:
        self.preset = preset
        self.frames = frames
        self.rate = rate

    def chosen(self, count: int, rate: float) -> list[int]:
        """Return the numbers of the frames, from 0."""
        step = rate / self.rate
        span = (self.frames - 1) * step
        refuse_short(count, round(span) + 1)
        first = (count - 1 - span) / 2
        return [round(first + number * step) for number in range(self.frames)]

    def of_frames(self, frames: Sequence[Pixels]) -> Float[Tensor, "c t h w"]:
        """Return the model's input for these frames."""
        return cast("Tensor", self.preset(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)))


@functools.cache
def names() -> tuple[str, ...]:
    """List the names of torchvision's networks for pictures."""
    return tuple(name for kind in _KINDS for name in torchvision.models.list_models(module=kind))


def load(request: Request) -> LoadedModel:
    """Build a network with published weights, with weights from a file, or with none."""
    name, weights = request.name, request.weights
    published = torchvision.models.get_model_weights(name)
    detects = name in torchvision.models.list_models(module=torchvision.models.detection)
    recipe = published.DEFAULT if weights is None else published.__members__.get(str(weights))
    if recipe is not None:
        plain = weights is None and not request.pretrained
        module = _build(name, None, {}) if plain else _downloaded(name, recipe)
        return LoadedModel(module, name, _prepared(recipe, request), tuple(recipe.meta["categories"]), detects=detects)
    path = Path(str(weights))
    if not is_file(path):
        raise ModelError(
            f"there is no weights file {path}{did_you_mean(str(weights), published.__members__)}; "
            f"{name} has the published weights {', '.join(published.__members__)}"
        )
    stored = read_weights(path)
    # torchvision's own files are recognised by name; any other is assumed to be trained with the first recipe.
    recipe = next((entry for entry in published if Path(entry.url).name == path.name), next(iter(published)))
    labels = tuple(recipe.meta["categories"])
    module, classes = stored.build(lambda classes: _build(name, classes, stored.state), name)
    prepared = (
        f"pictures are prepared as for torchvision's {recipe}; the same in Python: "
        f"preprocess=torchvision.models.get_weight('{recipe}').transforms()"
    )
    note = "; ".join(filter(None, (stored.note, "" if request.changes else prepared))) or None
    known = labels if classes in (None, len(labels)) else None
    return LoadedModel(module, name, _prepared(recipe, request), known, note, detects=detects)


def _prepared(recipe: Any, request: Request) -> Preprocess:
    usual = recipe.transforms()
    if not request.changes:
        if not isinstance(usual, VideoClassification):
            return cast("Preprocess", usual)
        family = next((name for name in _CLIPS if request.name.startswith(name)), "")
        return PresetOfClips(usual, *_CLIPS.get(family, (16, 15.0)))
    if not isinstance(usual, ImageClassification):
        request.refuse("size, mean and std", "is not a classifier, and resizes and normalises its pictures itself")
    size = request.size or (usual.crop_size[0], usual.crop_size[0])
    return cast("Preprocess", preset(size, request.mean or usual.mean, request.std or usual.std, usual))


def _build(name: str, classes: int | None, state: Mapping[str, Tensor]) -> nn.Module:
    """Build a network that the state dict fits: this number of classes, and auxiliary heads if it has any."""
    auxiliary = any(part.startswith("aux") for key in state for part in key.lower().split("."))
    options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        # Their published weights expect an input that the model rescales. Their slow initialisation is not needed.
        options |= {"init_weights": False, "transform_input": True, "aux_logits": auxiliary}
    if name in torchvision.models.list_models(module=_KINDS[1]) + torchvision.models.list_models(module=_KINDS[2]):
        options |= {"weights_backbone": None}
        if auxiliary:
            options |= {"aux_loss": True}
    return cast("nn.Module", torchvision.models.get_model(name, weights=None, **options))


def _downloaded(name: str, weights: Any) -> nn.Module:
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
    instead = (
        f"pass a local file with {advice('weights=...', '--weights FILE')}, try what needs no download: "
        f"{advice('the model demo-fair', 'camkit demo')}; if {file} is damaged, delete it"
    )
    with as_error(ModelError, lambda error: f"the weights of {name} cannot be downloaded ({brief(error)}); {instead}"):
        # torchvision itself loads the file as a pickle, which can run code. This line refuses such a file.
        weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
        return cast("nn.Module", torchvision.models.get_model(name, weights=weights))
