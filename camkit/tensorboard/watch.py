"""TrainingWatch: what a network does while it trains, as events."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from camkit.diagnosis.feature_maps import feature_maps
from camkit.diagnosis.measuring import RELUS, Measured, measured
from camkit.diagnosis.rows import channel_axis, leaves
from camkit.diagnosis.statistics import statistics
from camkit.diagnosis.values import TensorStatistics
from camkit.engine.attach import backward_pass, starts
from camkit.engine.passes import quiet_pass
from camkit.engine.restore import eagerly
from camkit.errors import CamkitError, InputError, LayerError, OutputError
from camkit.explainer import Layers, explain
from camkit.hooks import Call, Recording, record
from camkit.hooks.parameters import parameter_gradients
from camkit.images.prepare import prepare
from camkit.layers.names import WHOLE_MODEL, Selector, find_layers, modules_by_name, plain_name
from camkit.methods import find_method
from camkit.models import Labels, as_model, device_of, dtype_of
from camkit.models.labels import as_labels
from camkit.models.modules import spatial_rank, unwrapped
from camkit.targets import TargetLike, as_targets
from camkit.tensorboard.events import add_histogram, add_picture, grid, opened, told
from camkit.types import ImageLike, Pixels, Preprocess

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TrainingWatch:
    """Writes what a network does while it trains: where its heat lies, what its layers answer, which gradients flow.

    Call ``step()`` once after each step of the training, before or after ``optimizer.step()``, and before gradients are
    set to zero or after. Recorded are the first step, and then every ``every``-th. A step that is recorded runs with
    hooks, and compiled modules run as they are written then; any other costs the counting of it. A validation in
    between isn't taken for a step: what runs without gradients, or in evaluation mode while the model was in training.

    Written are, by step: ``heat`` (the pictures with the heat over them, in one grid), ``features/LAYER`` (feature maps
    of the first picture), histograms ``activations/LAYER``, ``gradients/LAYER`` (of what the layer returns, in the last
    backward pass), ``weights/NAME`` and ``weight_gradients/NAME``, scalars ``gradient_norm``, of all
    parameters' gradients as the backward pass left them, and ``gradient_norm/LAYER``, ``dead_share/LAYER`` (of a ReLU's
    channels that are zero everywhere) and ``nonfinite/NAME`` (how many numbers are NaN or infinite, where any
    are), and once the graph. Of a step of several forward passes the last is recorded, which begins with the model, or,
    after a backward pass, with that part of it which the step called first; what runs inside ``torch.func`` transforms,
    such as ``vmap`` and ``grad``, is not. Where events can't be written any more, as on a full disk, a warning says so
    and the training goes on unwatched.

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
        scaler: the ``torch.amp.GradScaler`` of the training, if it has one; gradients are written without its scale.
        graph: whether the network's graph is written.

    Raises:
        InputError: TensorBoard is not installed, or an argument is none; a call of a closed watch.
        ImageError: a picture can't be read, or needs ``preprocess``.
        LayerError: no layer is meant, or no target layer.
        TargetError: an unknown label, or what is no target.
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
        target_layer: Layers | None = None,
        method: str | None = None,
        target: TargetLike | None = None,
        preprocess: Preprocess | None = None,
        labels: Labels | None = None,
        scaler: Any = None,
        graph: bool = True,
    ) -> None:
        if every < 1 or (pictures_every is not None and pictures_every < 0):
            raise InputError("every is the number of steps between two that are recorded, from 1")
        self._model, self._every = unwrapped(model), every
        self._pictures_every = every if pictures_every is None else pictures_every
        if method is not None:
            find_method(method)
        self._images = _each(images, spatial_rank(self._model) + 1)
        if not self._images:
            raise InputError("a watch needs at least one picture")
        self._asked: dict[str, Any] = {"method": method, "target": target, "preprocess": preprocess, "labels": labels}
        as_targets(target, as_labels(labels))
        if target_layer is not None:
            find_layers(self._model, target_layer)
        for number, one in enumerate(self._images, start=1):
            if not isinstance(one, Tensor):
                prepare(one, preprocess, f"picture {number}")
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise InputError(f"scaler is the GradScaler of the training, not a {type(scaler).__name__}")
        self._layer = target_layer
        self._layers = _without_parts if layers is None else layers
        find_layers(self._model, self._layers)
        self._scaler, self._scale = scaler, 1.0
        self._told = self._closed = self._lost = False
        self._events = ExitStack()
        self._writer = self._events.enter_context(opened(writer))
        self._hooks: ExitStack | None = None
        self._recorded: tuple[Recording, dict[str, Measured | None]] | None = None
        self._first: nn.Module | None = None  # to run in the step: when it does after a backward pass, another begins
        self._before: dict[str, Measured | None] = {}
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
        if self._closed:
            raise InputError("the watch is closed")
        self.steps += 1
        if self._lost:
            return
        step = self.steps if number is None else number
        recorded = self._recorded
        self._end()
        if recorded is not None:
            with self._writing():
                self._write(*recorded, step)
        if self._due is not None or (self._pictures_every and (self.steps - 1) % self._pictures_every == 0):
            self.pictures(step if self._due is None else self._due)
        if self.steps % self._every == 0 and not self._lost:
            self._await()

    def pictures(self, number: int | None = None) -> None:
        """Write the heat over the pictures, in one grid, and the feature maps of the first.

        Between a step's forward pass and ``step()``, they are written by that.
        """
        if self._closed:
            raise InputError("the watch is closed")
        if self._lost:
            return
        step = self.steps if number is None else number
        self._due = step if self._recorded is not None else None
        if self._due is not None:
            return
        awaited = self._hooks is not None
        self._end()
        try:
            drawn = self._drawn()
        except Exception as error:  # noqa: BLE001 - a training is worth more than its pictures
            drawn = {}
            why = str(error) if isinstance(error, CamkitError) else f"{type(error).__name__}: {error}"
            with self._writing():
                self._writer.add_text("heat", f"could not be drawn: {why}", step)
            if not self._told:
                warnings.warn(f"the heat could not be drawn, and the training goes on: {why}", stacklevel=2)
                self._told = True
        finally:
            if awaited and not self._lost:
                self._await()
        with self._writing():
            for tag, pixels in drawn.items():
                add_picture(self._writer, tag, pixels, step)

    def close(self) -> None:
        """Take the hooks off, and close the event file if this watch opened it."""
        self._end()
        if self._due is not None:
            self.pictures(self._due)
        self._closed = True
        with self._writing():
            self._events.close()

    def __enter__(self) -> TrainingWatch:
        """Return the watch itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _drawn(self) -> dict[str, Pixels]:
        found = explain(self._model, list(self._images), self._layer, **self._asked)
        explained = found if isinstance(found, list) else [found]
        drawn = {"heat": grid([one.overlay() for one in explained])}
        layer = explained[0].layer
        if "+" not in layer:
            first, preprocess = self._images[0], self._asked["preprocess"]
            shown = feature_maps(self._model, first, layer, top=_MAPS, preprocess=preprocess)
            drawn[f"features/{layer}"] = shown.sheet()
        return drawn

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Give the watch up where events can't be written: a training is worth more."""
        try:
            with told(self._writer):
                yield
        except OutputError as error:
            self._end()
            if not self._lost:
                self._lost = True
                warnings.warn(f"{error}; the training goes on unwatched", stacklevel=4)

    def _await(self) -> None:
        """Have the next step recorded, from the first module on that runs in it."""
        begin = WeakMethod(self._begin)  # a watch that is forgotten takes its hooks along

        def note(module: nn.Module) -> None:
            if (found := begin()) is not None:
                found(module)

        self._training = self._model.training
        with ExitStack() as stack:
            stack.enter_context(eagerly())
            stack.enter_context(starts(self._model.modules(), note))
            self._hooks = stack.pop_all()

    def _begin(self, module: nn.Module) -> None:
        acts = partial(_trains, self._model, self._training)
        if self._hooks is None or not acts():
            return
        if self._recorded is None:
            self._scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
            gradients = self._hooks.enter_context(parameter_gradients(self._model, _kept))
            recording = self._hooks.enter_context(record(self._model, self._layers, gradients=True, reduce=_kept))
            recording.only_while(acts)
            self._recorded, self._first = (recording, gradients), module
        elif module is self._model or (module is self._first and self._differentiated()):
            self._first, self._before = module, dict(self._recorded[1])
            self._recorded[0].clear()

    def _differentiated(self) -> bool:
        """Tell whether a backward pass has been since the forward pass began."""
        gradients = {} if self._recorded is None else self._recorded[1]
        return any(one is not self._before.get(name) for name, one in gradients.items())

    def _end(self) -> None:
        """Take the hooks off."""
        hooks, self._hooks, self._recorded = self._hooks, None, None
        self._before = {}
        if hooks is not None:
            hooks.close()

    def _write(self, recording: Recording, gradients: dict[str, Measured | None], step: int) -> None:
        modules = modules_by_name(self._model)
        axes, axis = _channel_axes(modules), 0
        whole = self._layers is _without_parts  # or the layer before may not be recorded
        for key, call in recording.items():
            name, module = key or WHOLE_MODEL, modules.get(call.name)
            if module is None:  # it has been taken out of the model
                continue
            axis = channel_axis(module, axis)
            channels = (whole and axis) or axes[call.name]
            for tag, found in _numbered(f"activations/{name}", call.output, call.output):
                self._distribution(tag, found.numbers, step)
            for tag, found in _numbered(f"dead_share/{name}", call.output, call.output):
                if isinstance(module, RELUS) and len(found.shape) > 1 and found.shape[channels]:
                    silent = found.silent[0 if channels == 1 else 1]
                    self._writer.add_scalar(tag, len(silent) / found.shape[channels], step)
            for tag, found in _numbered(f"gradients/{name}", _gradient(call), call.output):
                self._distribution(tag, found.numbers.scaled(1 / self._scale), step)
        squares: dict[str, float] = defaultdict(float)
        for name, one in gradients.items():
            if one is not None:
                self._distribution(f"weight_gradients/{name}", one.numbers.scaled(1 / self._scale), step)
                norm = one.numbers.norm_of_all / self._scale
                squares[name.rpartition(".")[0] or WHOLE_MODEL] += norm * norm
        for layer, square in squares.items():
            self._writer.add_scalar(f"gradient_norm/{layer}", math.sqrt(square), step)
        if squares:
            self._writer.add_scalar("gradient_norm", math.sqrt(sum(squares.values())), step)
        for name, parameter in self._model.named_parameters():
            if not is_lazy(parameter):
                self._distribution(f"weights/{plain_name(name)}", statistics(parameter), step)

    def _distribution(self, tag: str, found: TensorStatistics, step: int) -> None:
        add_histogram(self._writer, tag, found, step)
        if found.nan or found.inf:
            self._writer.add_scalar(f"nonfinite/{tag}", found.nan + found.inf, step)

    def _write_graph(self) -> None:
        try:
            loaded = as_model(self._model, preprocess=self._asked["preprocess"])
            module = loaded.module
            first = prepare(self._images[0], loaded.preprocess, "the first picture", spatial_rank(module)).tensor[None]
            with (
                quiet_pass(module, device_of(module), "fp32"),
                warnings.catch_warnings(
                    action="ignore"
                ),  # tracing is deprecated, and TensorBoard's only way to a graph
                contextlib.redirect_stdout(io.StringIO()),  # where it says that tracing failed
            ):
                self._writer.add_graph(module, first.to(device_of(module), dtype_of(module)))
        except Exception as error:  # noqa: BLE001 - tracing fails in many ways, and a training is worth more than its graph
            self._writer.add_text("graph", f"could not be drawn: {type(error).__name__}: {error}")


_MAPS = 16


def _trains(model: nn.Module, training: bool) -> bool:
    if torch._C._are_functorch_transforms_active() or backward_pass() >= 0:
        return False  # nothing can be read off a tensor; checkpointing runs again what has been recorded
    return torch.is_grad_enabled() and (model.training or not training)


def _each(images: ImageLike | Sequence[ImageLike], rank: int) -> list[ImageLike]:
    """Return pictures one by one, tensors as copies: whose memory they are in may be used for others."""
    several = isinstance(images, (list, tuple)) or (isinstance(images, Tensor) and images.dim() != rank)
    parts = list(cast("Sequence[ImageLike]", images)) if several else [cast("ImageLike", images)]
    return [one.detach().clone() if isinstance(one, Tensor) else one for one in parts]


def _kept(tensor: Tensor) -> Measured | None:
    """Measure a tensor; nothing of one that can't be, such as a nested one: a training is worth more."""
    try:
        return measured(tensor)
    except Exception:  # noqa: BLE001 - kinds of tensors refuse in many ways
        return None


def _channel_axes(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return which axis of each layer's output are its channels, as the layers before it in the model tell."""
    axes, axis = {}, 1
    for name, module in modules.items():
        axes[name] = axis = channel_axis(module, axis)
    return axes


def _numbered(tag: str, value: Any, output: Any) -> list[tuple[str, Measured]]:
    """Return what was kept of tensors, each with its tag: with its number in the output where that has several."""
    places = [place for place, one in enumerate(leaves(output)) if isinstance(one, Measured)]
    found = {place: one for place, one in enumerate(leaves(value)) if isinstance(one, Measured) and place in places}
    return [(f"{tag}/{places.index(place)}" if len(places) > 1 else tag, one) for place, one in found.items()]


def _gradient(call: Call) -> Any:
    """Return the gradient of the last backward pass that reached a run; None where none did."""
    try:
        return next(reversed(call.gradients), None)
    except LayerError:
        return None


def _without_parts(name: str, module: nn.Module) -> bool:
    """Whether a layer has no layers within it; what computes its weights from others is none."""
    computing = "parametrizations"
    return computing not in name.split(".") and not any(part != computing for part, _ in module.named_children())
