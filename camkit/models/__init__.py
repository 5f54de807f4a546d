"""Loads models: torchvision, timm and Hugging Face by name, the demo networks, and the caller's own code."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from camkit.errors import InputError, ModelError, advice, as_error, did_you_mean
from camkit.models import from_torchvision
from camkit.models.boxes import DETECTORS, read
from camkit.models.from_file import KINDS, as_module
from camkit.models.from_ultralytics import holds_ultralytics
from camkit.models.loaded import ONLY_PICTURES, Labels, Loadable, LoadedModel, Request, as_labels, is_file, read_labels
from camkit.models.modules import (
    Adapter,
    adapted,
    black_box,
    black_box_in,
    device_of,
    dtype_of,
    refuse_black_box,
    refuse_lazy,
    spatial_rank,
    unwrapped,
    usual_batch_size,
)
from camkit.models.scene_net import DEMO_MODELS
from camkit.types import Activation, Preprocess

__all__ = [
    "DEMO_MODELS",
    "Labels",
    "as_model",
    "black_box",
    "black_box_in",
    "changed_at",
    "check_preprocess",
    "detecting",
    "device_of",
    "dtype_of",
    "load_model",
    "model_names",
    "pick_device",
    "read_labels",
    "refuse_black_box",
    "runs_code",
    "spatial_rank",
    "usual_batch_size",
]

_EXTRAS = {
    "timm": "timm",
    "transformers": "transformers",
    **dict.fromkeys(("onnx", "onnxruntime", "onnxslim", "onnx2pytorch"), "onnx"),
}
"""The extra of camkit that installs each optional package."""

_RUN_NO_CODE = (
    *("scene_net", "from_torchvision", "from_timm", "from_huggingface", "from_ultralytics", "from_file", "from_onnx"),
)
"""The modules of this package that run no Python code of the user's without ``trust_remote_code``."""


def model_names() -> list[str]:
    """List the names of models that need no prefix: torchvision's networks and the demo networks."""
    return [*from_torchvision.names(), *DEMO_MODELS]


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the given device; for None the first that is available of CUDA, MPS and CPU.

    Raises:
        ModelError: this machine has no such device.
    """
    if device is None:
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        )
    available = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    available += ["mps"] if torch.backends.mps.is_available() else []
    said = f"device {str(device)!r} cannot be used here; choose {' or '.join(available)}"
    with as_error(ModelError, lambda _: said):
        picked = torch.device(device)
        torch.empty(0, device=picked)
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
    output: str | int | None = None,
    boxes: str | None = None,
    activation: Activation | None = None,
    trainable: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model by name, with its weights, preprocessing and labels.

    Args:
        name: a torchvision network, ``demo-biased`` or ``demo-fair``; ``timm:NAME``; ``hf:NAME`` or the folder of a
            Hugging Face model; ``package.module:factory`` or ``file.py:factory``, which returns a module, or a module
            and the function that prepares a picture for it; or an exported file: torch.export (``.pt2``), ONNX
            (``.onnx``) or TorchScript (``.pt``, ``.ts``).
        weights: a state dict (``.pth``, ``.pt`` or ``.safetensors``), or the name of torchvision weights, for example
            ``IMAGENET1K_V1``; None loads the published weights and downloads them the first time.
        device: where to put the model; None picks CUDA, MPS or the CPU.
        pretrained: False leaves the weights as they are initialised.
        size, mean, std: replace the model's own preprocessing: one side or (height, width) in pixels; mean and standard
            deviation of values 0..1, one number for all channels or one per channel.
        labels: replace the names of the classes.
        text: the classes of a CLIP-like model, one text per class.
        output: which of several outputs holds the scores: its key, its attribute, or its index, from 0.
        boxes: for a detector that returns raw outputs, such as an ONNX file: "nanodet", "yolo" (v5 and later) or
            "yolox". It decides how camkit decodes them, and how it prepares pictures for a file.
        activation: what turns the scores into probabilities: "softmax", "sigmoid" for classes that do not exclude each
            other, or "none". None takes what the model's configuration says, else softmax, or sigmoid for one score.
        trainable: keep ``requires_grad`` as the model sets it. By default it is switched off, as explaining needs none.
        trust_remote_code: run the code that comes with a model: in the folder or the repository of a Hugging Face
            model, in TorchScript, or in an ultralytics file. By default, such a model is refused.

    Raises:
        ModelError: the model or the device does not exist, the weights cannot be loaded or do not fit, the model comes
            with code, or an optional package is missing.
        InputError: size, mean, std, labels, boxes or activation are invalid.

    Examples:
        >>> import camkit
        >>> camkit.load_model("demo-fair", device="cpu").labels
        ('plane', 'ship', 'car', 'bird')
    """
    if not isinstance(name, (str, Path)):
        raise ModelError(f"the name of a model must be a string, not {type(name).__name__}")
    names = as_labels(labels)
    request = Request(
        str(name),
        weights,
        pretrained,
        (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list) else size,
        None if mean is None else _each(mean),
        None if std is None else _each(std),
        (text,) if isinstance(text, str) else tuple(text or ()),
        trust_remote_code,
        names,
        boxes,
    )
    with torch.inference_mode(mode=False):
        loaded = _load(request)
        module = adapted(unwrapped(loaded.module), output=output)
        module = module if boxes is None else detecting(module, boxes, names or loaded.labels)
        refuse_lazy(module)
        module = module.eval().to(pick_device(device))
        module = module if trainable else module.requires_grad_(requires_grad=False)
    named = loaded.weights if weights is None else str(weights)  # a factory may say which weights it loaded
    return replace(
        loaded,
        module=module,
        labels=names or loaded.labels,
        weights=named,
        activation=activation or loaded.activation,
        detects=loaded.detects or boxes is not None,
    )


def detecting(model: nn.Module, kind: str, labels: Sequence[str] | None) -> Adapter:
    """Return a model with raw outputs of a kind as one that returns the boxes of each picture.

    Raises:
        InputError: the kind is unknown.
    """
    if kind not in DETECTORS:
        raise InputError(f"boxes must be one of {', '.join(DETECTORS)}, not {kind!r}")
    return Adapter(model, functools.partial(read, kind=kind, classes=None if labels is None else len(labels)))


def _each(values: float | Sequence[float]) -> tuple[float, ...]:
    return tuple(values) if isinstance(values, Iterable) else (values,)


def _load(request: Request) -> LoadedModel:
    name = request.name
    source = _source(name)
    if source != "from_huggingface":
        request.refuse("text", ONLY_PICTURES)
    if source is None and is_file(Path(name)):
        raise ModelError(
            f"camkit cannot load {name} as a model: exported files end in {', '.join(KINDS)}; for a state dict, "
            f"name the network: {advice(f'load_model(NETWORK, weights={name!r})', f'--model NETWORK --weights {name}')}"
            + "; convert any other file to ONNX, or pass a function that runs it: "
            + advice("camkit.black_box(function)", "--model file.py:factory, which returns a camkit.black_box")
        )
    if source is None:
        hint = did_you_mean(name, model_names()) or (
            "; choose a torchvision network, timm:NAME, hf:NAME, file.py:factory, an exported file such as model.onnx, "
            "demo-biased or demo-fair"
        )
        raise ModelError(f"unknown model {name!r}{hint}")
    try:
        loader = importlib.import_module(f"camkit.models.{source}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise ModelError(f"{name} needs the package {package}: pip install 'camkit[{_EXTRAS[package]}]'") from error
    return cast("LoadedModel", loader.load(request))


def _source(name: str) -> str | None:
    """Return the module of this package that loads a model of this name."""
    if name in model_names():
        return "scene_net" if name in DEMO_MODELS else "from_torchvision"
    if name.startswith("timm:"):
        return "from_timm"
    if name.startswith("hf:") or is_file(Path(name) / "config.json"):
        return "from_huggingface"
    suffix = Path(name).suffix.lower()
    if suffix == ".pt" and holds_ultralytics(Path(name)):
        return "from_ultralytics"
    return KINDS.get(suffix) or ("from_python" if name.partition(":")[2] or suffix == ".py" else None)


def runs_code(name: str) -> bool:
    """Return whether loading the model of this name runs Python code of the user's."""
    return _source(name) not in (None, *_RUN_NO_CODE)


def changed_at(name: str | Path | None) -> tuple[int, ...]:
    """Return when the file, or each file of a folder of Hugging Face, behind a name last changed, in nanoseconds.

    The name of a file of weights or labels will do, too. Empty for other names, and for None.
    """
    named = str(name or "").removeprefix("hf:")
    factory = Path(named.rpartition(":")[0])
    path = factory if factory.suffix == ".py" else Path(named)
    with contextlib.suppress(OSError):  # loading the model says what is wrong
        files = sorted(path.iterdir()) if (path / "config.json").is_file() else [path]
        return tuple(file.stat().st_mtime_ns for file in files if file.is_file())
    return ()


def as_model(
    model: Loadable | None,
    *,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
) -> LoadedModel:
    """Return a model, given as a module or by name, together with its preprocessing and labels.

    The caller's own module stays on its device.

    Raises:
        ModelError: the name is unknown, the module cannot carry hooks, or it is not on the given device.
        InputError: ``preprocess`` or ``labels`` has the wrong type.
    """
    names = as_labels(labels)
    check_preprocess(preprocess)
    if isinstance(model, str):
        model = load_model(model, device=device)
    if isinstance(model, LoadedModel):
        _check_device(model.module, device)
        return replace(model, preprocess=preprocess or model.preprocess, labels=names or model.labels)
    if isinstance(model, torch.export.ExportedProgram):
        model = as_module(model, "the program")
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module or a name, not {type(model).__name__}")
    if any(kind.__module__ == "ultralytics.engine.model" for kind in type(model).__mro__):
        raise ModelError(
            f"a {type(model).__name__} object of ultralytics returns results without gradients; pass its file, as in "
            "camkit.explain('yolo11n.pt', ...)"
        )
    module = unwrapped(model)
    _check_device(module, device)
    refuse_lazy(module)
    return LoadedModel(module, type(module).__name__, preprocess, names)


def check_preprocess(preprocess: Any) -> None:
    """Check that a preprocessing is a function, and not the class that makes one.

    Raises:
        InputError: it is not.
    """
    function = preprocess.func if isinstance(preprocess, functools.partial) else preprocess
    is_class = isinstance(function, type)
    if is_class or (preprocess is not None and not callable(preprocess)):
        way_out = "; call the class to get one, as in weights.transforms()" * is_class
        raise InputError(f"preprocess must be a function from a PIL picture to a tensor, not {preprocess!r}{way_out}")


def _check_device(module: nn.Module, device: str | torch.device | None) -> None:
    if device is None:
        return
    expected, actual = pick_device(device), device_of(module)
    if expected.type != actual.type or expected.index not in (None, actual.index):
        raise ModelError(
            f"the model is on {actual}, but device is {str(device)!r}; camkit does not move your model, so call "
            f"model.to({str(device)!r}) first"
        )
