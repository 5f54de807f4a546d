"""The options that name a model, shared by all commands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from camkit.errors import InputError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from camkit.config.settings import Settings
    from camkit.models.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model's weights, and changes to its preprocessing.

    Attributes:
        weights: A local state dict (.pth, .pt, .safetensors), or a name such as IMAGENET1K_V1. Default: the published
            weights, downloaded the first time.
        device: cpu, cuda, cuda:1, mps. Default: the first available of cuda, mps and cpu.
        size: The side of the model's input in pixels, or height x width: 224, 224x336.
        mean: The mean of each channel, of values 0..1: 0.485,0.456,0.406.
        std: The standard deviation of each channel: 0.229,0.224,0.225.
        labels: A file with the names of the classes: one per line, or JSON.
        text: A class of a CLIP-like model, as text; repeat it for each class.
        trust_remote_code: Run the Python code that comes with a Hugging Face model. Default: refuse such a model.
    """

    weights: str | None = None
    device: str | None = None
    size: str | None = None
    mean: str | None = None
    std: str | None = None
    labels: Path | None = None
    text: Annotated[list[str] | None, Parameter(negative=())] = None
    trust_remote_code: Annotated[bool, Parameter(negative=())] = False

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
            trust_remote_code=self.trust_remote_code,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Source(ModelOptions):
    """The model to load, and changes to its preprocessing.

    Attributes:
        model: A torchvision network (resnet50, vit_b_16, ...), timm:NAME, hf:NAME or a Hugging Face folder,
            file.py:factory or package.module:factory, demo-biased or demo-fair.
    """

    model: str

    def load(self, *, pretrained: bool = True, trainable: bool = False) -> LoadedModel:
        """Load the model."""
        return self.load_named(self.model, pretrained=pretrained, trainable=trainable)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CheckedSource(ModelOptions):
    """The model to check; by default the one that the config names.

    Attributes:
        model: As for explaining pictures. Default: the model of the config.
    """

    model: str | None = None

    def settled(self, settings: Settings) -> LoadedModel:
        """Load the model; each option that is not given comes from the config, if that names the same model."""
        config = settings.model
        name = self.model or config.name
        if name is None:
            raise InputError("name the model: camkit check DATA --model resnet50, or [model] name in camkit.toml")
        if self.model is not None and self.model != config.name:
            return self.load_named(name)
        size = config.size if isinstance(config.size, int) or config.size is None else "x".join(map(str, config.size))
        options: dict[str, Any] = {
            "weights": config.weights,
            "device": config.device,
            "size": None if size is None else str(size),
            "mean": None if config.mean is None else ",".join(map(str, config.mean)),
            "std": None if config.std is None else ",".join(map(str, config.std)),
            "labels": config.labels,
            "text": config.text,
            "trust_remote_code": self.trust_remote_code,  # a config that came with somebody's model cannot set it
        }
        options |= {key: value for key, value in vars(self).items() if key in options and value is not None}
        return CheckedSource(**options).load_named(name)


@contextmanager
def events_into(folder: Path | None) -> Iterator[SummaryWriter | None]:
    """Open a writer of TensorBoard event files before anything is computed; yield None if there is no folder."""
    if folder is None:
        yield None
        return
    from camkit.tensorboard.events import opened

    usual_hook = threading.excepthook
    threading.excepthook = lambda failed: None if _is_writer(failed) else usual_hook(failed)
    try:
        with opened(folder) as events:
            yield events
    finally:
        threading.excepthook = usual_hook


def _is_writer(failed: threading.ExceptHookArgs) -> bool:
    """Return whether TensorBoard's own thread failed to write; closing the events reports that in one sentence."""
    return isinstance(failed.exc_value, OSError) and type(failed.thread).__module__.startswith("tensorboard.")


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Parse an option of numbers separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--{name} takes numbers separated by commas, not {text!r}") from error


def _size(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if not all(side.isdecimal() for side in sides) or len(sides) > 2:
        raise InputError(f"--size takes a side in pixels, or height x width as in 224x336, not {text!r}")
    return int(sides[0]), int(sides[-1])
