"""A model with its preprocessing and its labels, and the request for one by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias, get_args

import torch
from torch import nn
from torch.export import ExportedProgram
from torchvision.transforms._presets import ImageClassification

from camkit.errors import InputError, ModelError, advice, as_error, refuse_pipe
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


Loadable: TypeAlias = nn.Module | str | LoadedModel | ExportedProgram
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
    names = list(labels)
    wrong = [name for name in names if not isinstance(name, (str, int))]
    if wrong:
        raise InputError(f"labels must be a list of class names, as in ['cat', 'dog']; {wrong[0]!r} is not a name")
    return tuple(map(str, names)) or None


def read_labels(path: Path) -> tuple[str, ...]:
    """Read the names of the classes from a file: one per line, or JSON (a list, or an object from index to name).

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    refuse_pipe(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the labels in {path} cannot be read: {error}") from error
    if path.suffix.lower() != ".json":
        names = [line.strip() for line in text.splitlines()]
        while names and not names[-1]:
            names.pop()
        if not names or not all(names):
            raise InputError(
                f"{path} must hold one class name per line, in the order of the indices, without empty lines"
            )
        return tuple(names)
    with as_error(InputError, lambda error: f"{path} is not JSON: {error}"):
        labels = as_labels(json.loads(text))
    if labels is None:
        raise InputError(f"{path} holds no class names")
    return labels


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

    def __post_init__(self) -> None:
        size = self.size
        is_pair = isinstance(size, tuple) and len(size) == 2
        if size is not None and not (is_pair and all(isinstance(side, int) and side > 0 for side in size)):
            raise InputError(f"size must be the height and width of the model's input in pixels, not {size!r}")
        for name, kinds, values, least in (
            ("mean", "numbers", self.mean, -math.inf),
            ("std", "positive numbers", self.std, 0),
        ):
            if values is not None and not all(isinstance(value, Real) and least < value <= 1 for value in values):
                raise InputError(
                    f"{name} must be {kinds} for values from 0 to 1, not {values}; divide those up to 255 by 255"
                )
            if values is not None and len(values) not in (1, 3):
                raise InputError(f"{name} must be one number, or one each for red, green and blue, not {values}")

    @property
    def changes(self) -> dict[str, Any]:
        """The parts of the preprocessing that the request replaces."""
        parts = {"size": self.size, "mean": self.mean, "std": self.std}
        return {name: value for name, value in parts.items() if value is not None}

    def prepared(self, usual: Preprocess | None = None, **known: Any) -> Preprocess | None:
        """Return the preprocessing of the parts that are known and those that the request replaces.

        Args:
            usual: the preprocessing if the request replaces nothing, and not all parts are known.
            **known: size, mean and std, as far as something says them.

        Raises:
            ModelError: the request replaces a part, and another is unknown.
        """
        parts: dict[str, Any] = {**known, **self.changes}
        missing = [name for name in ("size", "mean", "std") if name not in parts]
        if not missing:
            completed: Preprocess = preset(parts["size"], parts["mean"], parts["std"])
            return completed
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

    def refuse_weights(self) -> None:
        """Refuse weights for a model that comes with its own.

        Raises:
            ModelError: the request names weights.
        """
        if self.weights is not None:
            raise ModelError(f"{self.name} loads its weights from its own folder; leave out weights")

    def refuse_text(self) -> None:
        """Refuse text for a model that takes pictures only.

        Raises:
            ModelError: the request has text.
        """
        if self.text:
            raise ModelError(
                f"{self.name} takes pictures only; text is for models that compare pictures with texts, such as "
                "hf:openai/clip-vit-base-patch32"
            )


def is_file(path: Path) -> bool:
    """Return whether a path is a file.

    Raises:
        ModelError: this is unknown, for example because the folder is unreadable or the name is too long.
    """
    try:
        return path.is_file()
    except OSError as error:
        raise ModelError(f"{str(path)[:_LONGEST_NAME]!r} cannot be read: {error.strerror}") from error


_LONGEST_NAME = 120
"""An error quotes at most this many characters of a file's name."""


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


def changed_preset(usual: ImageClassification, request: Request) -> ImageClassification:
    """Return a torchvision preset with the parts that the request replaces."""
    side = usual.crop_size[0]
    return preset(request.size or (side, side), request.mean or usual.mean, request.std or usual.std, usual)
