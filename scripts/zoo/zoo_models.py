"""The models of the zoo, and the grid that each model's map must have by its own description.

The truth never comes from camkit. For torchvision it is the output of the last stage by the model's paper, for timm the
result of ``forward_features`` and ``feature_info``, and for Hugging Face the hidden states and the configuration.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import camkit

Size: TypeAlias = tuple[int, int]
Grid: TypeAlias = tuple[int, ...]

MOST_PREFIX = 16
"""The most tokens before a grid; more would let almost any number of tokens pass."""

STAGES = {
    "features": ("alexnet", "convnext", "densenet", "efficientnet", "mobilenet", "squeezenet", "swin", "vgg"),
    "layer4": ("resnet", "resnext", "wide"), "trunk_output": ("regnet",), "blocks.3": ("maxvit",),
    "inception5b": ("googlenet",), "Mixed_7c": ("inception",), "layers": ("mnasnet",), "conv5": ("shufflenet",),
    "encoder": ("vit",), "backbone": ("deeplabv3", "fcn", "lraspp"),
    "backbone.features": ("ssd300",), "backbone.features.0": ("ssdlite",),
    "backbone.body": ("fasterrcnn", "fcos_", "keypointrcnn", "maskrcnn", "retinanet"),
}  # fmt: skip
"""The module that returns the last stage of features, and the name prefixes of the torchvision models it holds for."""

SMALLER = {"deepseek_vit": 224, "gemma4_vit": 288, "qwen3_vit": 256}
"""The square side for timm families whose default side takes minutes."""

NO_PICTURES = {
    "dinat": "needs the natten package",
    "imagegpt": "takes colour indices, not a picture",
    "shieldgemma2": "takes text besides the picture",
}
"""Hugging Face architectures that cannot run on a picture alone, and why."""

PERCEIVERS: dict[str, dict[str, int]] = {
    "PerceiverForImageClassificationLearned": {},
    "PerceiverForImageClassificationFourier": {"d_model": 261, "num_cross_attention_heads": 1},
    "PerceiverForImageClassificationConvProcessing": {"d_model": 322, "num_cross_attention_heads": 1},
}
"""The settings that each Perceiver's configuration needs."""


class TruthError(Exception):
    """The model's own description does not determine its grid."""


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    ``build`` builds the model, for the size ``img_size`` if given. ``truth`` returns the grids that a map of the given
    images may have. ``target`` is the target of a model without classes. ``unusable`` is the reason why a model cannot
    be tested.
    """

    source: str
    model: str
    side: int
    build: Callable[..., nn.Module]
    truth: Callable[[Any, Tensor], list[Grid]]
    target: Any = None
    unusable: str = ""


def named(grid: Sequence[int]) -> str:
    """Return, for example, "7x10"."""
    return "x".join(map(str, grid))


def strided(images: Tensor, stride: int) -> Grid:
    """Return the grid of patches, or of strided layers with padding, over images (N, 3, H, W)."""
    return tuple(math.ceil(side / stride) for side in images.shape[2:])


def tokens(count: int, grid: Grid) -> list[Grid]:
    """Return the grid if this many tokens can be its cells after a few prefix tokens."""
    if not 0 <= count - math.prod(grid) <= MOST_PREFIX:
        raise TruthError(f"{count} tokens are not a grid of {named(grid)} cells after at most {MOST_PREFIX} others")
    return [grid]


def _torchvision() -> Iterator[Entry]:
    models, targets = import_module("torchvision.models"), camkit.targets
    stages = {begin: stage for stage, begins in STAGES.items() for begin in begins}
    parts = (
        (models, None),
        (models.segmentation, targets.segment(0, everywhere=True)),
        (models.detection, targets.box(0)),
    )
    for part, target in parts:
        for name in models.list_models(module=part):
            parameters = inspect.signature(models.get_model_builder(name)).parameters
            options: dict[str, Any] = {"weights_backbone": None} if "weights_backbone" in parameters else {}
            if name in ("googlenet", "inception_v3"):
                options["init_weights"] = False
            if part is models.detection and "ssd" not in name:  # SSD resizes its input to smaller pictures itself
                options |= {"min_size": 320, "max_size": 640}
            truth = partial(_torchvision_truth, next(stages[begin] for begin in stages if name.startswith(begin)))
            side = 299 if name == "inception_v3" else 224
            yield Entry("torchvision", name, side, partial(models.get_model, name, **options), truth, target)


def _torchvision_truth(stage: str, model: Any, images: Tensor) -> list[Grid]:
    outputs: list[Any] = []
    with model.get_submodule(stage).register_forward_hook(lambda _m, _a, output: outputs.append(output)):
        model(images)
    output = list(outputs[0].values())[-1] if isinstance(outputs[0], dict) else outputs[0]
    if output.dim() == 3:
        return tokens(output.shape[1], strided(images, model.patch_size))
    return [tuple(output.shape[1:3] if type(model).__name__ == "SwinTransformer" else output.shape[2:])]


def _smallest(family: str) -> str:
    timm = import_module("timm")
    counts = {}
    for name in timm.list_models(module=family):
        with torch.device("meta"):
            try:
                counts[name] = sum(parameter.numel() for parameter in timm.create_model(name).parameters())
            except Exception:  # noqa: BLE001 - some models can't be built on the meta device
                continue
    return min(counts, key=lambda name: counts[name]) if counts else str(timm.list_models(module=family)[0])


def timm_entry(name: str, side: int | None = None) -> Entry:
    """Return the entry of a timm model, at its default size if none is given."""
    timm = import_module("timm")
    config = timm.get_pretrained_cfg(name)
    side = side or (int(config.input_size[1]) if config else 224)
    return Entry("timm", name, side, partial(timm.create_model, name), _timm_truth)


def _timm(smallest: dict[str, str]) -> Iterator[Entry]:
    for family in import_module("timm").list_modules():
        name = smallest.get(family) or smallest.setdefault(family, _smallest(family))
        yield timm_entry(name, SMALLER.get(family))


def _timm_truth(model: Any, images: Tensor) -> list[Grid]:
    features = model.forward_features(images)
    if hasattr(model, "img_size_scaled"):  # CrossViT resizes its input for each branch; the patches of either are right
        pairs = zip(model.img_size_scaled, model.patch_embed, strict=True)
        return [tuple(s // p for s, p in zip(size, embed.patch_size, strict=True)) for size, embed in pairs]
    if isinstance(features, (list, dict)):  # stages; NaFlexViT's patches
        features = features["patches"] if isinstance(features, dict) else features[-1]
    shape = tuple(features.shape)
    if len(shape) == 4:
        width = model.num_features
        return [shape[2:] if shape[1] == width or shape[3] != width else shape[1:3]]
    if not hasattr(model, "feature_info"):
        raise TruthError(f"the model has no feature_info, and forward_features returned {shape}")
    grid = strided(images, list(model.feature_info)[-1]["reduction"])
    if shape[1] == 1 or shape[2] == math.prod(grid):  # the class token alone; tokens last
        return [grid]
    return tokens(shape[1], grid)


def _huggingface() -> Iterator[Entry]:
    families = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    for family, names in families.items():
        for name in (names,) if isinstance(names, str) else names:
            build, truth = partial(_build_huggingface, family, name), partial(_huggingface_truth, name)
            yield Entry("huggingface", name, 224, build, truth, unusable=NO_PICTURES.get(family, ""))


def _build_huggingface(family: str, name: str, img_size: Size | int = 224) -> nn.Module:
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    config = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING[family]()
    parts = (getattr(config, part, None) for part in ("vision_config", "text_config"))
    for part in filter(None, (config, *parts)):
        for key in ("num_hidden_layers", "num_layers"):
            if isinstance(getattr(part, key, None), int) and not hasattr(part, "depths"):
                setattr(part, key, min(getattr(part, key), 3))
        if hasattr(part, "depths"):
            part.depths = [min(depth, 2) for depth in part.depths]
        if getattr(part, "image_size", None):
            part.image_size = img_size
    for key, value in PERCEIVERS.get(name, {}).items():
        setattr(config, key, value)
    config.num_labels = 10
    built: nn.Module = getattr(transformers, name)(config)
    hugging_face = import_module("camkit.models.from_huggingface")
    return hugging_face.Adapter(built, hugging_face.from_patches) if hugging_face.takes_patches(built) else built


def _huggingface_truth(name: str, model: Any, images: Tensor) -> list[Grid]:
    if name in PERCEIVERS:  # it attends to pixels, or to the output of a small network
        outputs: list[Tensor] = []
        network = getattr(model.perceiver.input_preprocessor, "convnet", None)
        with (network or nn.Identity()).register_forward_hook(lambda _m, _a, output: outputs.append(output)):
            model(images)
        return [tuple((outputs or [images])[0].shape[2:])]
    if type(model).__name__ == "Adapter":  # camkit's adapter for models that take flattened patches
        return [strided(images, model.model.config.vision_config.patch_size)]
    output = model(images, output_hidden_states=True)
    last = output.hidden_states[-1]
    if "reshaped_hidden_states" in output:
        shape = tuple(output.reshaped_hidden_states[-1].shape)
        return [shape[2:] if shape[1] == last.shape[-1] else shape[1:3]]
    if last.dim() == 4:
        return [tuple(last.shape[2:])]
    config = getattr(model.config, "vision_config", model.config)
    later = [down[5] for down in getattr(config, "down_ops", ()) if len(down) > 5]
    strides = config.strides if hasattr(config, "strides") else [config.patch_size, *later]
    return tokens(last.shape[1], strided(images, math.prod(strides)))


SOURCES: dict[str, Callable[[dict[str, str]], Iterator[Entry]]] = {
    "torchvision": lambda _: _torchvision(),
    "timm": _timm,
    "huggingface": lambda _: _huggingface(),
}
"""For each source, a function that lists its models. It receives the smallest model of each timm family, and timm's
function adds the missing ones."""
