"""The groups of options, and the options that several commands share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from cyclopts import App, Group, Parameter
from cyclopts.argument import ArgumentCollection

from camkit.cli.terminal import TALK, say, tell
from camkit.errors import InputError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from camkit.models.loaded import LoadedModel
    from camkit.scale.cluster import Cluster, Pool

MODEL = Group.create_ordered("Model")
DATA = Group.create_ordered("Data")
TARGET = Group.create_ordered("What to explain")
METHOD = Group.create_ordered("How to explain")
EXPERIMENT = Group.create_ordered("Experiment")
LIMITS = Group.create_ordered("Limits")
RUN = Group.create_ordered("How to run")
OUTPUT = Group.create_ordered("Output")
GENERAL = Group.create_ordered("General")
"""The groups in which the help lists the options, in this order."""

PrecisionName: TypeAlias = Literal["fp32", "bf16", "fp16", "bf16-forced"]

Ray: TypeAlias = Annotated[
    bool | str,
    Parameter(
        group=RUN,
        negative=(),
        metavar="[ADDRESS]",
        show_default=False,
        help="Compute on a Ray cluster (extra camkit[ray]): auto, host:port or ray://host:port. Without an address, "
        "the one in RAY_ADDRESS or on this machine; if there is none, one is started with all cores of this machine.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Required:
    """The model to load.

    Attributes:
        model: A torchvision network (resnet50, vit_b_16, ...), timm:NAME, hf:NAME or a Hugging Face folder,
            file.py:factory or package.module:factory, an exported file (.onnx, .pt2, .ts), demo-biased or demo-fair.
            Not needed if a config names it.
    """

    model: Annotated[str, Parameter(alias="-m", metavar="NAME")]


@dataclass(frozen=True, kw_only=True)
class _Optional:
    """The model that a config names.

    Attributes:
        model: The model that the config will name, as --model of the other commands takes it.
    """

    model: Annotated[str | None, Parameter(alias="-m", metavar="NAME")] = None


@dataclass(frozen=True, kw_only=True)
class _ModelOptions:
    """A model's weights, and changes to its preprocessing.

    Attributes:
        weights: A local state dict (.pth, .pt, .safetensors), or a name such as IMAGENET1K_V1. Default: the published
            weights, downloaded the first time.
        device: cpu, cuda, cuda:1, mps. Default: the first available of cuda, mps and cpu.
        size: The side of the model's input in pixels, or height x width: 224, 224x336.
        mean: The mean of each channel, for values from 0 to 1: 0.485,0.456,0.406.
        std: The standard deviation of each channel: 0.229,0.224,0.225.
        labels: A file with the names of the classes: one per line, or JSON.
        text: A class of a CLIP-like model, as text; repeat the option for each class.
        output: Which of several outputs holds the scores: its name, or its index, from 0.
        activation: What turns the scores into probabilities; sigmoid if classes do not exclude each other. Default:
            what the model says; otherwise softmax, or sigmoid for a single score.
        trust_remote_code: Run the code that comes with a model: in a Hugging Face folder, in TorchScript, or in an
            ultralytics file. By default, it is refused.
    """

    weights: Annotated[str | None, Parameter(alias="-w", metavar="FILE")] = None
    device: Annotated[str | None, Parameter(alias="-d", metavar="NAME")] = None
    size: Annotated[str | None, Parameter(metavar="PIXELS")] = None
    mean: Annotated[str | None, Parameter(metavar="R,G,B")] = None
    std: Annotated[str | None, Parameter(metavar="R,G,B")] = None
    labels: Annotated[Path | None, Parameter(metavar="FILE")] = None
    text: Annotated[list[str] | None, Parameter(negative=(), metavar="TEXT")] = None
    output: Annotated[str | None, Parameter(metavar="NAME")] = None
    activation: Literal["softmax", "sigmoid", "none"] | None = None
    trust_remote_code: Annotated[bool, Parameter(negative=(), show_default=False)] = False

    def files(self) -> list[Path | None]:
        """Return the files that the options name."""
        return [self.labels, None if self.weights is None else Path(self.weights)]

    def arguments(self) -> dict[str, Any]:
        """Return the options as ``camkit.load_model`` takes them, without the device."""
        from camkit.models import read_labels

        return {
            "weights": self.weights,
            "size": None if self.size is None else _size(self.size),
            "mean": None if self.mean is None else numbers("mean", self.mean),
            "std": None if self.std is None else numbers("std", self.std),
            "labels": None if self.labels is None else read_labels(self.labels),
            "text": self.text,
            "output": self.output,
            "activation": self.activation,
            "trust_remote_code": self.trust_remote_code,
        }

    def load_named(self, name: str, *, pretrained: bool = True, trainable: bool = False) -> LoadedModel:
        """Load a model, and say what the user should know about it."""
        from camkit.models import device_of, load_model

        loaded = load_model(name, device=self.device, pretrained=pretrained, trainable=trainable, **self.arguments())
        if loaded.note:
            say(loaded.note)
        parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
        tell(f"{loaded.name}: {parameters:,} parameters on {device_of(loaded.module)}")
        return loaded


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, kw_only=True)
class Source(_ModelOptions, _Required):
    """The model to load, and changes to its preprocessing."""

    def load(self, *, pretrained: bool = True, trainable: bool = False) -> LoadedModel:
        """Load the model."""
        return self.load_named(self.model, pretrained=pretrained, trainable=trainable)

    def on_cluster(self, pool: Pool, loaded: LoadedModel) -> Cluster:
        """Return actors that load the model; ``loaded`` is the same model in this process."""
        from camkit.kit.fingerprint import fingerprint
        from camkit.models import load_model
        from camkit.scale.cluster import Cluster

        make = functools.partial(load_model, self.model, **self.arguments())
        return Cluster(pool, make, fingerprint(loaded), self.device)


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, kw_only=True)
class OptionalSource(_ModelOptions, _Optional):
    """The model that a new config names, and changes to its preprocessing."""

    def as_settings(self) -> dict[str, Any]:
        """Return the values of the options as the config's table "model" holds them."""
        size = None if self.size is None else list(_size(self.size))
        return {
            "name": self.model,
            "weights": self.weights,
            "device": self.device,
            "size": size[0] if size and size[0] == size[1] else size,
            "mean": None if self.mean is None else list(numbers("mean", self.mean)),
            "std": None if self.std is None else list(numbers("std", self.std)),
            "labels": self.labels,
            "text": self.text,
            "output": self.output,
            "activation": self.activation,
        }


@Parameter(name="*", group=GENERAL)
@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command that loads a model takes.

    Attributes:
        config: A camkit.toml. Without it, camkit uses the camkit.toml in this folder, or [tool.camkit] in its
            pyproject.toml, but does not run Python code that they name.
        quiet: Print only errors and the results that you ask for: no notes, no progress, no summary.
        verbose: Print more about the model and the work, every error, and where the program failed.
    """

    config: Annotated[Path | None, Parameter(alias="-c", metavar="FILE")] = None
    quiet: Annotated[bool, Parameter(alias="-q", negative=(), show_default=False)] = False
    verbose: Annotated[bool, Parameter(alias="-v", negative=(), show_default=False)] = False

    def begin(self) -> None:
        """Set how much is printed.

        Raises:
            InputError: ``quiet`` and ``verbose`` are both given.
        """
        if self.quiet and self.verbose:
            raise InputError("--quiet and --verbose cannot be combined")
        TALK.set(quiet=self.quiet, verbose=self.verbose)


@contextmanager
def actors_of(ray: bool | str) -> Iterator[Pool | None]:
    """Connect to the cluster that ``--ray`` names, and yield the actors that it has room for; None without ``--ray``.

    Raises:
        InputError: Ray is not installed, no cluster answers, or it has no room.
    """
    if ray is False:
        yield None
        return
    from camkit.scale.cluster import Pool, connected

    with connected(None if ray is True else ray, quiet=not TALK.verbose):
        pool = Pool.of_cluster()
        say(str(pool))
        yield pool


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


def refuse_fractions(_: App, __: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse a fraction if the option takes a whole number. cyclopts calls this before it would round the fraction.

    Raises:
        InputError: an option for a whole number has a fraction.
    """
    for argument in arguments:
        if int not in (argument.hint, *get_args(argument.hint)):
            continue
        for token in argument.tokens:
            if _is_fraction(token.value):
                raise InputError(f"{token.keyword} takes a whole number, not {token.value}")


def _is_fraction(text: str) -> bool:
    try:
        return not float(text).is_integer()
    except ValueError:  # not a number; cyclopts refuses it
        return False


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
