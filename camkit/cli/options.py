"""The options that name a model, shared by the commands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from camkit.errors import InputError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from camkit.background.config import Settings
    from camkit.models.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """Where a model's weights are, and what to change in how its pictures are prepared.

    Attributes:
        weights: A local state dict (.pth, .pt, .safetensors), or a name such as IMAGENET1K_V1. Without it the published
            weights are used, and downloaded the first time.
        device: cpu, cuda, cuda:1, mps; the best there is if not given.
        size: Side of the model's input in pixels, or height x width: 224, 224x336.
        mean: Mean of each channel, of values 0..1: 0.485,0.456,0.406.
        std: Standard deviation of each channel: 0.229,0.224,0.225.
        labels: A file with the names of the classes: one a line, or JSON.
        text: A class of a CLIP-like model, as text; given once for each.
    """

    weights: str | None = None
    device: str | None = None
    size: str | None = None
    mean: str | None = None
    std: str | None = None
    labels: Path | None = None
    text: Annotated[list[str] | None, Parameter(negative=())] = None

    def load_named(self, name: str, *, pretrained: bool = True, trainable: bool = False) -> LoadedModel:
        """Load a model."""
        from camkit.models import load_model, read_labels

        return load_model(
            name,
            self.weights,
            self.device,
            pretrained=pretrained,
            size=None if self.size is None else _size(self.size),
            mean=None if self.mean is None else numbers("mean", self.mean),
            std=None if self.std is None else numbers("std", self.std),
            labels=None if self.labels is None else read_labels(self.labels),
            text=self.text,
            trainable=trainable,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Source(Preparing):
    """Which model, and what to change in how its pictures are prepared.

    Attributes:
        model: A network of torchvision (resnet50, vit_b_16, ...), timm:NAME, hf:NAME or a Hugging Face folder,
            file.py:factory or package.module:factory, demo-biased or demo-fair.
    """

    model: str

    def load(self, *, pretrained: bool = True, trainable: bool = False) -> LoadedModel:
        """Load the model."""
        return self.load_named(self.model, pretrained=pretrained, trainable=trainable)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CheckedSource(Preparing):
    """Which model is checked; the config's where none is named.

    Attributes:
        model: As for explaining pictures; the config's if not given.
    """

    model: str | None = None

    def settled(self, settings: Settings) -> LoadedModel:
        """Load the model that is named here or, option by option, in the config."""
        part = settings.model
        name = self.model or part.name
        if name is None:
            raise InputError("name the model: camkit check DATA --model resnet50, or [model] name in camkit.toml")
        if self.model is not None and self.model != part.name:
            return self.load_named(name)
        size = part.size if isinstance(part.size, int) or part.size is None else "x".join(map(str, part.size))
        there = {
            "weights": part.weights,
            "device": part.device,
            "size": None if size is None else str(size),
            "mean": None if part.mean is None else ",".join(map(str, part.mean)),
            "std": None if part.std is None else ",".join(map(str, part.std)),
            "labels": part.labels,
            "text": part.text,
        }
        given = {key: value for key, value in vars(self).items() if key in there and value is not None}
        settled = CheckedSource(**{**there, **given})
        return settled.load_named(name)


@contextmanager
def events_into(folder: Path | None) -> Iterator[SummaryWriter | None]:
    """Open a writer of TensorBoard's event files, before anything is computed for it; None where none is asked for."""
    if folder is None:
        yield None
        return
    from camkit.tensorboard.events import opened

    printed = threading.excepthook
    threading.excepthook = lambda failed: None if _is_writer(failed) else printed(failed)
    try:
        with opened(folder) as events:
            yield events
    finally:
        threading.excepthook = printed


def _is_writer(failed: threading.ExceptHookArgs) -> bool:
    """Tell whether TensorBoard's own thread couldn't write, which is said in one sentence when events are closed."""
    return isinstance(failed.exc_value, OSError) and type(failed.thread).__module__.startswith("tensorboard.")


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Read an option of numbers separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--{name} takes numbers separated by commas, not {text!r}") from error


def _size(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if not all(side.isdecimal() for side in sides) or len(sides) > 2:
        raise InputError(f"--size takes a side in pixels, or height x width as in 224x336, not {text!r}")
    return int(sides[0]), int(sides[-1])
