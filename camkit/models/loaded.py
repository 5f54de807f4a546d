"""A model with its preprocessing and its labels, the request for one by name, and weights from files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.transforms._presets import ImageClassification

from camkit.errors import InputError, ModelError, advice, as_error, brief, refuse_pipe
from camkit.types import Activation, Preprocess


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model together with its preprocessing and labels.

    Raises:
        InputError: the activation is unknown.

    Attributes:
        module: the network.
        name: the name it was loaded by, or its class.
        preprocess: turns a PIL picture into the model's input (C, H, W); None if it is unknown.
        labels: the names of the classes in the order of their indices; None if they are unknown.
        note: what the user should know about how the model was loaded.
        activation: turns logits into probabilities; None means softmax for several logits and sigmoid for one, and
            becomes "sigmoid" if the model's configuration says that a picture may have several labels.
        weights: the file or the name of the weights, if they were named.
        detects: True if it is known to be a detector, which returns boxes.
    """

    module: torch.nn.Module
    name: str
    preprocess: Preprocess | None = None
    labels: tuple[str, ...] | None = None
    note: str | None = None
    activation: Activation | None = None
    weights: str | None = None
    detects: bool = False

    def __post_init__(self) -> None:
        problem = getattr(getattr(self.module, "config", None), "problem_type", None)
        if self.activation is None and problem == "multi_label_classification":  # as Hugging Face's models say
            object.__setattr__(self, "activation", "sigmoid")
        if self.activation not in (None, *get_args(Activation)):
            raise InputError(f"activation must be one of {', '.join(get_args(Activation))}, not {self.activation!r}")

    def __repr__(self) -> str:
        """Return one line; the module's own text has a line for each layer."""
        classes = "" if self.labels is None else f", {len(self.labels)} labels"
        return f"<LoadedModel {self.name!r}: {type(self.module).__name__}{classes}>"


Loadable: TypeAlias = nn.Module | str | LoadedModel | torch.export.ExportedProgram
"""What ``model=`` takes: a module, a name as ``camkit.load_model`` takes it, what that returned, or a program."""


Labels: TypeAlias = "Sequence[str] | Mapping[int, str]"


def as_labels(labels: Labels | None) -> tuple[str, ...] | None:
    """Return the names of the classes in the order of their indices.

    Args:
        labels: the names in that order, or a mapping from index to name.

    Raises:
        InputError: labels is a single text, a mapping without every index from 0, or a name is neither text nor number.
    """
    if labels is None:
        return None
    if isinstance(labels, Mapping):
        by_index = {str(index): name for index, name in labels.items()}
        if set(by_index) != {str(index) for index in range(len(by_index))}:
            raise InputError("a dictionary of labels needs every index from 0, as in {0: 'cat', 1: 'dog'}")
        labels = [by_index[str(index)] for index in range(len(by_index))]
    if isinstance(labels, (str, Set)) or not isinstance(labels, Iterable):
        raise InputError(f"labels must be a list of class names, as in ['cat', 'dog'], not {labels!r}")
    return tuple(map(str, labels)) or None


def read_labels(path: Path) -> tuple[str, ...]:
    """Read the names of the classes from a file: one per line, or JSON (a list, or an object from index to name).

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    refuse_pipe(path)
    with as_error(InputError, lambda error: f"the labels in {path} cannot be read: {brief(error)}"):
        text = path.read_text(encoding="utf-8-sig")
        is_json = path.suffix.lower() == ".json"
        names = as_labels(json.loads(text) if is_json else [line.strip() for line in text.rstrip().splitlines()])
    if not names or not all(names):
        raise InputError(f"{path} must hold one class name per line, in the order of the indices, without empty lines")
    return names


@dataclass(frozen=True)
class Request:
    """A request for a model by name.

    Attributes:
        name: as ``camkit.load_model`` takes it.
        weights: a file or the name of published weights; None for the default ones.
        pretrained: False for no weights at all, which is enough to list the layers.
        size: height and width that replace those of the model's own preprocessing.
        mean, std: one number or one per channel, which replace those of the model's own preprocessing.
        text: the classes of a model that compares pictures with texts.
        trust_remote_code: True to run the code that comes with a model.
        labels: names of the classes that replace the model's own.
        boxes: the kind of detector whose raw output the model returns.

    Raises:
        InputError: size, mean or std is invalid.
    """

    name: str
    weights: str | Path | None = None
    pretrained: bool = True
    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    text: tuple[str, ...] = ()
    trust_remote_code: bool = False
    labels: tuple[str, ...] | None = None
    boxes: str | None = None

    def __post_init__(self) -> None:
        size = self.size
        is_pair = isinstance(size, tuple) and len(size) == 2
        if size is not None and not (is_pair and all(isinstance(side, int) and side > 0 for side in size)):
            raise InputError(f"size must be the height and width of the model's input in pixels, not {size!r}")
        for name, kinds, values, least in (
            ("mean", "numbers", self.mean, -math.inf),
            ("std", "positive numbers", self.std, 0),
        ):
            if values is not None and not are_shares(values, least):
                raise InputError(
                    f"{name} must be one number, or one each for red, green and blue: {kinds} for values from 0 to 1, "
                    f"not {values}; divide those up to 255 by 255"
                )

    @property
    def changes(self) -> dict[str, Any]:
        """The parts of the preprocessing that the request replaces."""
        parts = {"size": self.size, "mean": self.mean, "std": self.std}
        return {name: value for name, value in parts.items() if value is not None}

    def prepared(self, usual: Preprocess | None = None, **known: Any) -> Preprocess | None:
        """Return the preprocessing of the parts that are known and those that the request replaces.

        Args:
            usual: the preprocessing if the request replaces nothing, and not all parts are known.
            **known: size, mean and std, if known, and "resize", torchvision's ``resize_size``.

        Raises:
            ModelError: the request replaces a part, and another is unknown.
        """
        parts: dict[str, Any] = {**known, **self.changes}
        missing = [name for name in ("size", "mean", "std") if name not in parts]
        if not missing:
            made = preset(parts["size"], parts["mean"], parts["std"])
            made.resize_size = list(parts.get("resize", made.resize_size))
            return cast("Preprocess", made)
        if self.changes:
            raise ModelError(
                f"{self.name} does not say how its pictures are prepared; name {' and '.join(missing)} too (if it was "
                "trained as ImageNet models are: "
                + advice(
                    "size=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))",
                    "--size 224 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225)",
                )
            )
        return usual

    def fill(self, module: nn.Module) -> str | None:
        """Load the weights that the request names, if any, into a module; return what the user should know of them.

        Raises:
            ModelError: the file cannot be read, or its weights do not fit.
        """
        if self.weights is None:
            return None
        weights = read_weights(self.weights)
        weights.fill(module, self.name)
        return weights.note

    def refuse(self, option: Literal["size, mean and std", "weights", "text"], why: str) -> None:
        """Refuse an option that a model does not have.

        Raises:
            ModelError: the request has it.
        """
        if {"size, mean and std": self.changes, "weights": self.weights, "text": self.text}[option]:
            raise ModelError(f"{self.name} {why}; leave out {option}")


ONLY_PICTURES = "takes pictures only, and no texts to compare them with, as hf:openai/clip-vit-base-patch32 does"


def are_shares(values: Any, least: float) -> bool:
    """Return whether values are one number above ``least`` and up to 1, or one each for red, green and blue."""
    is_list = isinstance(values, (list, tuple)) and len(values) in (1, 3)
    return is_list and all(isinstance(each, Real) and least < float(each) <= 1 for each in values)


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False for names that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113 - pathlib's raises for names that are too long


def preset(
    size: tuple[int, int], mean: Sequence[float], std: Sequence[float], usual: ImageClassification | None = None
) -> ImageClassification:
    """Return torchvision's preprocessing for classifiers with this size, mean and standard deviation.

    For a square size, the shorter side is resized and the middle is cropped, in the proportion of the ``usual`` preset.
    For any other size, the whole picture is resized.
    """
    changed = ImageClassification(crop_size=min(size), resize_size=min(size), mean=tuple(mean), std=tuple(std))
    if usual is not None:
        changed.interpolation, changed.antialias = usual.interpolation, usual.antialias
        changed.resize_size = [round(min(size) * usual.resize_size[0] / usual.crop_size[0])]
    if size[0] != size[1]:
        changed.resize_size = changed.crop_size = list(size)
    return changed


_EMA_KEYS = ("model_ema", "state_dict_ema", "ema_state_dict", "model_ema_state_dict", "ema")
_KEYS = ("state_dict", "model_state_dict", "model", *_EMA_KEYS)
"""Keys under which checkpoints usually hold the state dict, and its moving average over the training (EMA)."""


@dataclass(frozen=True)
class Weights:
    """A state dict that was read from a file.

    Attributes:
        state: the tensors by name.
        path: the file.
        note: which weights were taken, if the file holds several; else None.
    """

    state: Mapping[str, Tensor]
    path: Path
    note: str | None = None

    def build(self, make: Callable[[int | None], nn.Module], name: str) -> tuple[nn.Module, int | None]:
        """Return a network with these weights, and its number of classes if that is not the usual one.

        It is the length of the last tensor whose shape differs in the first dimension only.

        Args:
            make: makes the network with this number of classes; None for the usual one.
            name: the network's name, for the error.
        """
        try:
            with torch.device("meta"):
                usual = make(None).state_dict()
        except NotImplementedError:  # RegNet computes its widths from tensors, which have no values on the meta device
            usual = make(None).state_dict()
        state = _without_prefix(self.state, usual)
        differ = [key for key, value in usual.items() if key in state and state[key].shape != value.shape]
        heads = (key for key in reversed(differ) if state[key].dim() and state[key].shape[1:] == usual[key].shape[1:])
        classes = next((len(state[key]) for key in heads), None)
        module = make(classes)
        self.fill(module, name)
        return module, classes

    def fill(self, module: nn.Module, name: str) -> None:
        """Load the weights into a module.

        Raises:
            ModelError: the weights do not fit, or are not floating-point numbers where the model has such.
        """
        own = module.state_dict()
        state = _without_prefix(self.state, own)
        for key in filter(state.__contains__, own):
            floats = isinstance(own[key], Tensor) and own[key].is_floating_point()  # not a module's extra state
            if floats and not (state[key].is_floating_point() and state[key].itemsize > 1):
                raise ModelError(
                    f"{self.path} holds {state[key].dtype} for {key!r}, where {name} has {own[key].dtype}; pass the "
                    "floating-point weights of the model (quantised values mean nothing without their scales)"
                )
        with as_error(ModelError, lambda error: f"{self.path} does not fit {name} ({brief(error)})"):
            module.load_state_dict(dict(state))


def read_weights(path: str | Path) -> Weights:
    """Read weights without running any code from the file (``weights_only=True``, or safetensors).

    The content decides the format, not the file's suffix. ``*.index.json`` names the files of a state dict in
    several parts (shards). A checkpoint may hold the state dict under a usual key.

    Raises:
        ModelError: the file is missing, is not a state dict, or would have to run code.
    """
    path, note = Path(path), None
    state = _shards(path) if path.name.endswith(".index.json") else _content(path)
    for _ in range(3):  # dictionaries under such keys may hold one another
        held = [key for key in _KEYS if isinstance(state, dict) and isinstance(state.get(key), dict) and state[key]]
        if not held:
            break
        if len(held) > 1 or held[0] in _EMA_KEYS:
            ema = ", a moving average (EMA)" if held[0] in _EMA_KEYS else ""
            others = f", not those under {' and '.join(map(repr, held[1:]))}" if held[1:] else ""
            note = note or f"{path}: using the weights under {held[0]!r}{ema}{others}"
        state = state[held[0]]
    entries = state.items() if isinstance(state, dict) else ()
    if not entries or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in entries):
        raise ModelError(f"{path} is not a state dict; save one with torch.save(model.state_dict(), ...)")
    return Weights(state, path, note)


def _content(path: Path) -> Any:
    """Return what a file holds; its first bytes tell the format."""

    def said(error: Exception) -> str:
        if isinstance(error, FileNotFoundError):
            return f"there is no weights file {path}"
        # PyTorch's words advise to run the code.
        reason = brief(error) if isinstance(error, OSError) else "it holds Python objects or is damaged"
        return (
            f"{path} cannot be read as weights ({reason}); save a state dict with torch.save(model.state_dict(), ...)"
        )

    refuse_pipe(path, ModelError)
    with as_error(ModelError, said), path.open("rb") as file:
        if file.read(9)[8:] == b"{":
            return load_file(path)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def _shards(path: Path) -> dict[str, Tensor]:
    """Return the tensors of all the files that an index names."""
    refuse_pipe(path, ModelError)
    with as_error(ModelError, lambda error: f"{path} cannot be read as an index of weights ({brief(error)})"):
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{path} names weights in other folders; its shards must lie beside it")
        return {key: value for name in names for key, value in dict(_content(path.parent / name)).items()}


def _without_prefix(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Remove the name of a module that held the model from all tensors' names, such as Lightning's ``model.``.

    It is removed only if all names begin with it and none fits the model already.
    """
    while own.keys().isdisjoint(state):
        # The counter that torch.optim.swa_utils.AveragedModel adds to the weights that it averages.
        state = {key: value for key, value in state.items() if key != "n_averaged"}
        if len({key.partition(".")[0] for key in state}) > 1 or not all(key.partition(".")[2] for key in state):
            break
        state = {key.partition(".")[2]: value for key, value in state.items()}
    return state
