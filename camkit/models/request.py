"""A request for a model by name, and the preprocessing that it changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from torchvision.transforms._presets import ImageClassification

from camkit.errors import InputError, ModelError


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
        for name, values, least in (("mean", self.mean, -math.inf), ("std", self.std, 0)):
            if values is not None and not all(isinstance(value, Real) and least < value <= 1 for value in values):
                raise InputError(
                    f"{name} must be numbers for values from 0 to 1, not {values}; divide those for 255 by 255"
                )
            if values is not None and len(values) not in (1, 3):
                raise InputError(f"{name} must be one number, or one each for red, green and blue, not {values}")

    @property
    def changes(self) -> dict[str, Any]:
        """The parts of the preprocessing that the request replaces."""
        parts = {"size": self.size, "mean": self.mean, "std": self.std}
        return {name: value for name, value in parts.items() if value is not None}

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
