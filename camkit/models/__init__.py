"""Where models come from: torchvision, timm and Hugging Face by name, the demo networks, or the caller's own module."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from camkit.errors import InputError, ModelError, did_you_mean
from camkit.models import from_torchvision
from camkit.models.labels import Labels, as_labels, read_labels
from camkit.models.loaded import LoadedModel
from camkit.models.modules import about_channels, device_of, dtype_of, refuse_exported, spatial_rank, unwrapped
from camkit.models.request import Request
from camkit.models.scene_net import LABELS as SCENE_LABELS
from camkit.models.scene_net import SceneNet, load_scene_net
from camkit.models.scene_net import preprocess as scene_preprocess
from camkit.models.weights import fill, read_state_dict
from camkit.types import Preprocess

__all__ = [
    "DEMO_MODELS",
    "Labels",
    "about_channels",
    "as_model",
    "changed_at",
    "check_preprocess",
    "device_of",
    "dtype_of",
    "load_model",
    "model_names",
    "pick_device",
    "read_labels",
    "spatial_rank",
]

DEMO_MODELS = ("demo-biased", "demo-fair")

_PACKAGES = {"from_timm": "timm", "from_huggingface": "transformers"}


def model_names() -> list[str]:
    """List the names a model can be asked for by without a prefix: torchvision's and the demo networks."""
    return [*from_torchvision.names(), *DEMO_MODELS]


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the device asked for, or the best one there is: CUDA, MPS, CPU.

    Raises:
        ModelError: there is no such device on this machine.
    """
    if device is None:
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        )
    try:
        picked = torch.device(device)
        torch.empty(0, device=picked)
    except (RuntimeError, AssertionError, TypeError) as error:
        here = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        here += ["mps"] if torch.backends.mps.is_available() else []
        raise ModelError(f"device {str(device)!r} cannot be used here; there is {', '.join(here)}") from error
    return picked


def load_model(
    name: str,
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    *,
    pretrained: bool = True,
    size: int | tuple[int, int] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    labels: Labels | None = None,
    text: str | Sequence[str] | None = None,
    trainable: bool = False,
) -> LoadedModel:
    """Build a model by name, with weights, preprocessing and labels.

    Args:
        name: a torchvision network, ``demo-biased`` or ``demo-fair``; ``timm:NAME``; ``hf:NAME`` or the folder of a
            Hugging Face model; ``package.module:factory`` or ``file.py:factory``, which returns a module, or a module
            and the function that prepares a picture for it.
        weights: a state dict (``.pth``, ``.pt`` or ``.safetensors``), or the name of one of torchvision's weights, for
            example ``IMAGENET1K_V1``; None loads the published weights, downloading them once.
        device: where to put the model; the best there is when None.
        pretrained: False leaves the weights as they are initialised.
        size, mean, std: replace what the model's configuration says about its pictures: one side or (height, width) in
            pixels; the mean and standard deviation of values 0..1, for all channels or each.
        labels: replace the names of the classes.
        text: the classes of a CLIP-like model: one score for each text.
        trainable: leave the parameters that require gradients as they were made; explaining needs none.

    Raises:
        ModelError: no such model, weights that cannot be had or do not fit, a package that is missing, or no such
            device.
        InputError: a size, mean, deviation or label that is none.
    """
    if not isinstance(name, str):
        raise ModelError(f"a model is loaded by its name, not by a {type(name).__name__}")
    request = Request(
        name,
        weights,
        pretrained,
        (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list) else size,
        None if mean is None else _each(mean),
        None if std is None else _each(std),
        (text,) if isinstance(text, str) else tuple(text or ()),
    )
    names = as_labels(labels)
    with torch.inference_mode(mode=False):
        loaded = _load(request)
        module = unwrapped(loaded.module).eval().to(pick_device(device))
        module = module if trainable else module.requires_grad_(requires_grad=False)
    return replace(loaded, module=module, labels=names or loaded.labels)


def _each(values: float | Sequence[float]) -> tuple[float, ...]:
    return tuple(values) if isinstance(values, Iterable) else (values,)


def _load(request: Request) -> LoadedModel:
    name = request.name
    if name in DEMO_MODELS:
        return _demo_model(request)
    if name in from_torchvision.names():
        return from_torchvision.load(request)
    source = _source(name)
    if source is None:
        hint = did_you_mean(name, model_names()) or (
            "; choose a network of torchvision, timm:NAME, hf:NAME, file.py:factory, demo-biased or demo-fair"
        )
        raise ModelError(f"unknown model {name!r}{hint}")
    try:
        room = importlib.import_module(f"camkit.models.{source}")
    except ModuleNotFoundError as error:
        package = _PACKAGES.get(source)
        if package is None or error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModelError(f"{name} needs the package {package}: pip install 'camkit[{package}]'") from error
    loaded: LoadedModel = room.load(request)
    return loaded


def _source(name: str) -> str | None:
    """Return the room that loads a model of such a name."""
    if name.startswith("timm:"):
        return "from_timm"
    if name.startswith("hf:") or (Path(name) / "config.json").is_file():
        return "from_huggingface"
    return "from_python" if name.partition(":")[2] else None


def _demo_model(request: Request) -> LoadedModel:
    request.refuse_text()
    if request.changes:
        raise ModelError(f"{request.name} was trained on one kind of picture: size, mean and std are not for it")
    if request.weights is None:
        return LoadedModel(load_scene_net(request.name), request.name, scene_preprocess, tuple(SCENE_LABELS))
    module, path = SceneNet(), Path(request.weights)
    fill(module, read_state_dict(path), request.name, path)
    return LoadedModel(module, request.name, scene_preprocess, tuple(SCENE_LABELS))


def changed_at(name: str) -> int:
    """Return when the file of a model of the caller's own was changed."""
    file = Path(name.rpartition(":")[0])
    return file.stat().st_mtime_ns if file.suffix == ".py" and file.is_file() else 0


def as_model(
    model: nn.Module | str | LoadedModel,
    *,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
) -> LoadedModel:
    """Return a model, given as a module or by name, together with its preprocessing and labels.

    The caller's own module is used where it is: it is never moved to another device.

    Raises:
        ModelError: an unknown name, a module that cannot carry hooks, or one on another device than asked for.
        InputError: ``preprocess`` or ``labels`` is of another kind.
    """
    names = as_labels(labels)
    check_preprocess(preprocess)
    if isinstance(model, str):
        model = load_model(model, device=device)
    if isinstance(model, LoadedModel):
        _check_place(model.module, device)
        return replace(model, preprocess=preprocess or model.preprocess, labels=names or model.labels)
    refuse_exported(model)
    if not isinstance(model, nn.Module):
        raise ModelError(f"a model is a torch.nn.Module or a name, not a {type(model).__name__}")
    module = unwrapped(model)
    _check_place(module, device)
    if any(is_lazy(tensor) for tensor in itertools.chain(module.parameters(), module.buffers())):
        raise ModelError("the model has lazy layers that have not seen an input yet; run it once, then explain it")
    if any(tensor.is_inference() for tensor in itertools.chain(module.parameters(), module.buffers())):
        raise ModelError(
            "the model was built inside torch.inference_mode(), which rules gradients out for good; build it outside"
        )
    return LoadedModel(module, type(module).__name__, preprocess, names)


def check_preprocess(preprocess: Any) -> None:
    """Check that a preprocessing is a function, and not the class that makes one.

    Raises:
        InputError: it is not.
    """
    made_by = preprocess.func if isinstance(preprocess, functools.partial) else preprocess
    if isinstance(made_by, type):
        raise InputError(
            f"preprocess is {made_by.__name__} itself, which makes a preprocessing; call it, as in weights.transforms()"
        )
    if preprocess is not None and not callable(preprocess):
        raise InputError(f"preprocess is a function from a PIL picture to a tensor, not {preprocess!r}")


def _check_place(module: nn.Module, device: str | torch.device | None) -> None:
    here = device_of(module)
    if device is None:
        return
    asked = pick_device(device)
    if asked.type != here.type or asked.index not in (None, here.index):
        raise ModelError(
            f"the model is on {here} and {str(device)!r} was asked for; camkit does not move your model: call "
            f"model.to({str(device)!r}) first"
        )
