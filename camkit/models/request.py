"""What a caller asks of a source of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from torchvision.transforms._presets import ImageClassification

from camkit.errors import InputError, ModelError


@dataclass(frozen=True)
class Request:
    """A model by name, where its weights come from, and what to change in how its pictures are prepared.

    ``weights`` None means the published ones, and with ``pretrained`` False none at all, which is enough to look at the
    layers. ``size`` (height, width), ``mean`` and ``std`` replace what the model's own configuration says. ``text``
    makes the classes of a model that compares pictures with texts.

    Raises:
        InputError: a size that is no size, a mean or a deviation that is not one number or one per channel.
    """

    name: str
    weights: str | Path | None = None
    pretrained: bool = True
    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    text: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        size = self.size
        whole = size is None or (isinstance(size, tuple) and all(isinstance(side, int) for side in size))
        if size is not None and (not whole or len(size) != 2 or min(size) < 1):
            raise InputError(f"size is the height and width of the model's input in pixels, not {size!r}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            numbers = values is None or all(isinstance(value, Real) for value in values)
            if values is not None and not (numbers and len(values) in (1, 3)):
                raise InputError(f"{name} is one number or one for red, green and blue, not {values}")
        if self.std is not None and not all(value > 0 for value in self.std):
            raise InputError(f"std holds one positive number per channel, not {self.std}")
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            raise InputError(f"mean has {len(self.mean)} numbers and std {len(self.std)}; both have one per channel")

    @property
    def changes(self) -> dict[str, Any]:
        """The parts of the preprocessing that were given."""
        parts = {"size": self.size, "mean": self.mean, "std": self.std}
        return {name: value for name, value in parts.items() if value is not None}

    def refuse_text(self) -> None:
        """Say that this source's models take pictures alone, where text was given.

        Raises:
            ModelError: text was given.
        """
        if self.text:
            raise ModelError(
                f"{self.name} takes pictures alone; text is for models that compare the two, "
                "such as hf:openai/clip-vit-base-patch32"
            )


def preset(
    size: tuple[int, int], mean: Sequence[float], std: Sequence[float], usual: ImageClassification | None = None
) -> ImageClassification:
    """Return torchvision's preprocessing for classifiers with the parts that were asked for.

    The shorter side is resized and the middle cropped, by the usual preset's share. A size that is not square has no
    such custom: the whole picture is resized to it.
    """
    made = ImageClassification(crop_size=min(size), resize_size=min(size), mean=tuple(mean), std=tuple(std))
    if usual is not None:
        made.interpolation, made.antialias = usual.interpolation, usual.antialias
        made.resize_size = [round(min(size) * usual.resize_size[0] / usual.crop_size[0])]
    if size[0] != size[1]:
        made.resize_size = made.crop_size = list(size)
    return made


def changed_preset(usual: ImageClassification, request: Request) -> ImageClassification:
    """Return a torchvision preset with the parts that were asked for."""
    side = usual.crop_size[0]
    return preset(request.size or (side, side), request.mean or usual.mean, request.std or usual.std, usual)
