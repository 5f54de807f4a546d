"""TrainingWatch: what a network does while it trains, as events."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from camkit.capture import quiet_pass
from camkit.diagnosis.statistics import silent_channels, statistics
from camkit.diagnosis.values import TensorStatistics
from camkit.errors import CamkitError, InputError, LayerError
from camkit.features import feature_maps
from camkit.hooks import Call, Recording, parameter_gradients, record, starts
from camkit.hooks.selecting import Selector
from camkit.images import prepare
from camkit.models import Labels, as_model, device_of, dtype_of
from camkit.models.modules import unwrapped
from camkit.pipeline import TargetLayer, explain
from camkit.state import eagerly
from camkit.targets import TargetLike
from camkit.tensorboard.events import add_histogram, add_picture, grid, opened
from camkit.values import ImageLike, Preprocess

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.Threshold)
"""Modules whose channels can be dead: zero whatever comes."""

_CHANNELS = 1


class TrainingWatch:
    """Writes what a network does while it trains: where its heat lies, what its layers answer, which gradients flow.

    Call ``step()`` once after each step of the training, before or after ``optimizer.step()``, and before gradients are
    set to zero or after. Recorded are the first step, and then every ``every``-th. A step that is recorded runs with
    hooks, and compiled modules run as they are written then; any other costs the counting of it. A validation in
    between isn't taken for a step: what runs without gradients, or in evaluation mode while the model was in training.

    Written are, by step: ``heat`` (the pictures with the heat over them, in one grid), ``features/LAYER`` (feature maps
    of the first picture), histograms ``activations/LAYER``, ``gradients/LAYER`` (of what the layer returns),
    ``weights/NAME`` and ``weight_gradients/NAME``, scalars ``gradient_norm/all`` and ``gradient_norm/LAYER`` (of its
    parameters' gradients, as the backward pass left them) and ``dead_share/LAYER`` (of a ReLU's channels that are zero
    everywhere), and once the graph.

    Args:
        model: the network; it is left as it is found, also where it is in training.
        images: the pictures that are explained: tensors (N, C, H, W) as the model takes them, or whatever
            ``camkit.explain`` takes, with ``preprocess``.
        writer: a SummaryWriter, or the folder of the event files.
        every: how many steps lie between two that are recorded.
        pictures_every: the same for heat and feature maps; None is as often, 0 only when ``pictures()`` is called, as
            at the end of an epoch.
        layers: whose activations and gradients are recorded, chosen as in ``camkit.hooks.record``; None is every module
            without parts of its own.
        target_layer, method, target, preprocess, labels: as for ``camkit.explain``.
        graph: whether the network's graph is written.

    Raises:
        InputError: TensorBoard is not installed, or an argument is none.
        OutputError: the folder cannot be written.

    Example:
        >>> watch = TrainingWatch(model, images, "runs/first", every=100)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        images: ImageLike | Sequence[ImageLike],
        writer: SummaryWriter | str | Path,
        *,
        every: int = 100,
        pictures_every: int | None = None,
        layers: Selector | Sequence[Selector] | None = None,
        target_layer: TargetLayer = None,
        method: str | None = None,
        target: TargetLike | None = None,
        preprocess: Preprocess | None = None,
        labels: Labels | None = None,
        graph: bool = True,
    ) -> None:
        if every < 1 or (pictures_every is not None and pictures_every < 0):
            raise InputError("every is the number of steps between two that are recorded, from 1")
        self._model, self._every = unwrapped(model), every
        self._pictures_every = every if pictures_every is None else pictures_every
        self._images = list(images) if isinstance(images, (list, tuple, Tensor)) else [cast("ImageLike", images)]
        self._asked: dict[str, Any] = {"method": method, "target": target, "preprocess": preprocess, "labels": labels}
        self._layer = target_layer
        self._layers = _without_parts if layers is None else layers
        self._events = ExitStack()
        self._writer = self._events.enter_context(opened(writer))
        self._hooks: ExitStack | None = None
        self._recorded: tuple[Recording, dict[str, TensorStatistics]] | None = None
        self._due: int | None = None
        self.steps = 0
        if graph:
            self._write_graph()
        self._await()

    def step(self, number: int | None = None) -> None:
        """Take note of a finished step, and write it if it was recorded.

        Args:
            number: of the step in the events, if it is not how often this was called, from 1.
        """
        self.steps += 1
        step = self.steps if number is None else number
        recorded = self._recorded
        self._end()
        if recorded is not None:
            self._write(*recorded, step)
        if self._due is not None or (self._pictures_every and (self.steps - 1) % self._pictures_every == 0):
            self.pictures(step if self._due is None else self._due)
        if self.steps % self._every == 0:
            self._await()

    def pictures(self, number: int | None = None) -> None:
        """Write the heat over the pictures, in one grid, and the feature maps of the first.

        Between a step's forward pass and ``step()``, they are written by that.
        """
        step = self.steps if number is None else number
        self._due = step if self._recorded is not None else None
        if self._due is not None:
            return
        awaited = self._hooks is not None
        self._end()
        try:
            found = explain(self._model, list(self._images), self._layer, **self._asked)
            explained = found if isinstance(found, list) else [found]
            add_picture(self._writer, "heat", grid([one.overlay() for one in explained]), step)
            layer = explained[0].layer
            if "+" not in layer:
                shown = feature_maps(
                    self._model, self._images[0], layer, top=_MAPS, preprocess=self._asked["preprocess"]
                )
                add_picture(self._writer, f"features/{layer}", shown.sheet(), step)
        except CamkitError as error:  # a training is worth more than its pictures
            self._writer.add_text("heat", f"could not be drawn: {error}", step)
        finally:
            if awaited:
                self._await()

    def close(self) -> None:
        """Take the hooks off, and close the event file if this watch opened it."""
        self._end()
        self._events.close()

    def __enter__(self) -> TrainingWatch:
        """Return the watch itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _await(self) -> None:
        """Have the next step recorded, from the first module on that runs in it."""
        begin = WeakMethod(self._begin)  # a watch that is forgotten takes its hooks along

        def note(_: nn.Module) -> None:
            if (found := begin()) is not None:
                found()

        self._training = self._model.training
        with ExitStack() as stack:
            stack.enter_context(eagerly())
            stack.enter_context(starts(self._model.modules(), note))
            self._hooks = stack.pop_all()

    def _begin(self) -> None:
        if self._hooks is None or self._recorded is not None:
            return
        if torch.is_grad_enabled() and (self._model.training or not self._training):
            gradients = self._hooks.enter_context(parameter_gradients(self._model, statistics))
            recording = self._hooks.enter_context(record(self._model, self._layers, gradients=True, reduce=_Seen))
            self._recorded = recording, gradients

    def _end(self) -> None:
        """Take the hooks off."""
        hooks, self._hooks, self._recorded = self._hooks, None, None
        if hooks is not None:
            hooks.close()

    def _write(self, recording: Recording, gradients: dict[str, TensorStatistics], step: int) -> None:
        modules = dict(self._model.named_modules())
        for key, call in recording.items():
            for found in _flat(call.output):
                add_histogram(self._writer, f"activations/{key}", found.numbers, step)
                if isinstance(modules.get(call.name), _RECTIFIERS) and found.channels:
                    self._writer.add_scalar(f"dead_share/{key}", found.silent / found.channels, step)
            for found in _flat(_gradients(call)):
                add_histogram(self._writer, f"gradients/{key}", found.numbers, step)
        squares: dict[str, float] = defaultdict(float)
        for name, one in gradients.items():
            add_histogram(self._writer, f"weight_gradients/{name}", one, step)
            squares[name.rpartition(".")[0]] += one.norm**2
        for layer, square in squares.items():
            self._writer.add_scalar(f"gradient_norm/{layer}", math.sqrt(square), step)
        if squares:
            self._writer.add_scalar("gradient_norm/all", math.sqrt(sum(squares.values())), step)
        for name, parameter in self._model.named_parameters():
            add_histogram(self._writer, f"weights/{name}", statistics(parameter), step)

    def _write_graph(self) -> None:
        loaded = as_model(self._model, preprocess=self._asked["preprocess"])
        module = loaded.module
        try:
            first = prepare(self._images[0], loaded.preprocess, "the first picture").tensor[None]
            with quiet_pass(module, device_of(module), "fp32"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tracing is deprecated, and TensorBoard's only way to a graph
                self._writer.add_graph(module, first.to(device_of(module), dtype_of(module)))
        except Exception as error:  # noqa: BLE001 - tracing fails in many ways, and a training is worth more than its graph
            self._writer.add_text("graph", f"could not be drawn: {type(error).__name__}: {error}")


_MAPS = 16


class _Seen:
    """What is kept of a tensor: its statistics, and how many of its channels are zero everywhere."""

    def __init__(self, tensor: Tensor) -> None:
        self.numbers = statistics(tensor)
        self.channels = tensor.shape[_CHANNELS] if tensor.dim() > _CHANNELS else 0
        self.silent = len(silent_channels(tensor, _CHANNELS)) if self.channels else 0


def _flat(value: Any) -> list[_Seen]:
    """Return what was kept of a layer's tensors, out of the tuples and dictionaries it returned."""
    if isinstance(value, _Seen):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [seen for part in parts for seen in _flat(part)]


def _gradients(call: Call) -> Any:
    """Return the gradients of the last backward pass that reached a run; none where none did."""
    try:
        return call.gradients[-1:]
    except LayerError:
        return ()


def _without_parts(_: str, module: nn.Module) -> bool:
    return not any(True for _ in module.children())
