"""TrainingWatch: write what happens inside a network during training as TensorBoard events."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from camkit.drawing.figure import percent
from camkit.engine.attach import backward_pass, starts
from camkit.engine.guard import eagerly
from camkit.engine.interrupts import interruptible
from camkit.engine.passes import quiet_pass
from camkit.errors import CamkitError, InputError, OutputError
from camkit.explaining.explanation import Explanation
from camkit.explaining.session import explain
from camkit.images.prepare import prepare
from camkit.inspect.feature_maps import feature_maps
from camkit.inspect.layer_statistics import RELUS, LayerPass
from camkit.inspect.tensor_statistics import TensorStatistics, statistics
from camkit.kit.tiles import Tile, contact_sheet
from camkit.layers.names import THE_MODEL, Layers, Selector, find_layers, modules_by_name, parameters_by_name
from camkit.methods import SHARPENED, MethodLike, find_method
from camkit.models import Labels, as_model, device_of, dtype_of
from camkit.models.loaded import as_labels
from camkit.models.modules import spatial_rank, unwrapped
from camkit.options import Options
from camkit.targets import TargetLike, as_targets
from camkit.tensorboard.events import add_histogram, add_picture, naming_the_folder, opened
from camkit.types import WHOLE_MODEL, ImageLike, Pixels, Preprocess

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TrainingWatch:
    """Writes what happens inside a network during training: heatmaps, feature maps, activations and gradients.

    Call ``step()`` once after each training step, before or after ``optimizer.step()`` and ``zero_grad()``. The first
    step is recorded, and then every ``every``-th. A recorded step runs with hooks, and compiled modules run uncompiled;
    every other step is only counted. Validation in between is not recorded: whatever runs without gradients, or in
    evaluation mode if the model was in training mode.

    At each recorded step the watch writes

    - ``heat``: the pictures with their heatmaps, in one image, each with its class and probability; a class that is
      not the one of the last image is in amber,
    - ``features/LAYER``: feature maps of the first picture,
    - histograms ``activations/LAYER``, ``gradients/LAYER`` (of the layer's output, in the last backward pass),
      ``weights/NAME`` and ``weight_gradients/NAME``,
    - scalars ``gradient_norm`` and ``gradient_norm/LAYER``, of the parameters' gradients as the backward pass left
      them, ``dead_share/LAYER`` (the share of a ReLU's channels that are zero everywhere) and ``nonfinite/NAME`` (how
      many numbers are NaN or infinite, if any are),

    and once the graph. If a step has several forward passes, the last is recorded. A pass begins with the model or,
    after a backward pass, with the part of it that the step called first. What runs inside ``torch.func`` transforms,
    such as ``vmap`` and ``grad``, is not recorded. If events can no longer be written, for example because the disk is
    full, a warning says so and the training goes on unwatched.

    Args:
        model: the network; it is left as it was, in training mode or not.
        images: the pictures to explain: tensors (N, C, H, W) as the model takes them, or anything that
            ``camkit.explain`` accepts, with ``preprocess``.
        writer: a SummaryWriter, or a folder for the event files.
        every: record every n-th step.
        pictures_every: draw heatmaps and feature maps every n-th step; None means as often as ``every``, and 0 only
            when you call ``pictures()``, for example at the end of an epoch.
        layers: the layers whose activations and gradients are recorded, chosen as in ``camkit.hooks.record``; None
            means every module without submodules.
        target_layer, method, target, preprocess, labels: as for ``camkit.explain``.
        scaler: the ``torch.amp.GradScaler`` of the training, if it has one; gradients are written without its scale.
        graph: whether to write the network's graph.

    Raises:
        InputError: TensorBoard is not installed, an argument is wrong, or the watch is closed.
        ImageError: a picture cannot be read, or needs ``preprocess``.
        LayerError: ``layers`` or ``target_layer`` matches no layer.
        TargetError: the target is an unknown label, or not a target at all.
        OutputError: the folder cannot be written.

    Examples:
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
        method: MethodLike | None = None,
        target: TargetLike | None = None,
        preprocess: Preprocess | None = None,
        labels: Labels | None = None,
        scaler: Any = None,
        graph: bool = True,
    ) -> None:
        if every < 1:
            raise InputError(f"every must be at least 1 step, not {every}")
        if pictures_every is not None and pictures_every < 0:
            raise InputError(f"pictures_every must be None, 0 or a number of steps, not {pictures_every}")
        self._model, self._every = unwrapped(model), every
        self._pictures_every = every if pictures_every is None else pictures_every
        self._images = _separate(images, spatial_rank(self._model) + 1)
        self._layer = target_layer
        self._explain_options: Options = {
            "method": method,
            "target": target,
            "preprocess": preprocess,
            "labels": labels,
            "spread": "even",  # the weights have changed at each step, and measuring places takes 32 passes
        }
        self._check_explaining()
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise InputError(f"scaler must be the GradScaler of the training, not a {type(scaler).__name__}")
        self._layers = _is_leaf if layers is None else layers
        find_layers(self._model, self._layers)
        self._scaler = scaler
        self._warned = self._closed = self._failed = False
        self._events = ExitStack()
        self._writer = self._events.enter_context(opened(writer))
        self._hooks: ExitStack | None = None
        self._recorded: LayerPass | None = None
        self._pictures_due: int | None = None
        self._last_sheet: tuple[int, list[str]] | None = None  # its step, and the class of each picture
        self.steps = 0
        if graph:
            self._write_graph()
        self._hook_next_step()

    def _check_explaining(self) -> None:
        """Check what will be explained before the training starts, rather than at the first recorded step."""
        options = self._explain_options
        if options["method"] is not None:
            find_method(options["method"])
        if not self._images:
            raise InputError("a watch needs at least one picture")
        as_targets(options["target"], as_labels(options["labels"]))
        if self._layer is not None:
            find_layers(self._model, self._layer)
        for number, image in enumerate(self._images, start=1):
            if not isinstance(image, Tensor):
                prepare(image, options["preprocess"], f"picture {number}")

    def step(self, number: int | None = None) -> None:
        """Count a finished step, and write it if it was recorded.

        Args:
            number: the step's number in the events; by default, ``step()`` calls are counted from 1.
        """
        if self._closed:
            raise InputError("the watch is closed")
        self.steps += 1
        if self._failed:
            return
        step = self.steps if number is None else number
        recorded = self._recorded
        self._remove_hooks()
        if recorded is not None:
            with self._writing():
                self._write_layers(recorded, step)
                self._write_parameters(step)
        if self._pictures_due is not None or (self._pictures_every and (self.steps - 1) % self._pictures_every == 0):
            self.pictures(step if self._pictures_due is None else self._pictures_due)
        if self.steps % self._every == 0 and not self._failed:
            self._hook_next_step()

    def pictures(self, number: int | None = None) -> None:
        """Write the pictures with their heatmaps, and the feature maps of the first picture.

        If you call it between a step's forward pass and ``step()``, then ``step()`` writes them.
        """
        if self._closed:
            raise InputError("the watch is closed")
        if self._failed:
            return
        step = self.steps if number is None else number
        self._pictures_due = step if self._recorded is not None else None
        if self._pictures_due is not None:
            return
        hooked = self._hooks is not None
        self._remove_hooks()
        try:
            drawn = self._draw_or_warn(step)
        finally:
            if hooked and not self._failed:
                self._hook_next_step()
        with self._writing():
            for tag, pixels in drawn.items():
                add_picture(self._writer, tag, pixels, step)

    def close(self) -> None:
        """Remove the hooks, and close the event file if this watch opened it."""
        self._remove_hooks()
        if self._pictures_due is not None:
            self.pictures(self._pictures_due)
        self._closed = True
        with self._writing():
            self._events.close()

    def __enter__(self) -> TrainingWatch:
        """Return the watch itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the watch."""
        self.close()

    def _draw_or_warn(self, step: int) -> dict[str, Pixels]:
        """Return the pictures by tag; if drawing fails, none, with a text in the events and one warning per watch."""
        try:
            return self._draw_pictures(step)
        except Exception as error:  # noqa: BLE001 - losing the pictures is better than stopping the training
            reason = str(error) if isinstance(error, CamkitError) else f"{type(error).__name__}: {error}"
        with self._writing():
            self._writer.add_text("heat", f"could not be drawn: {reason}", step)
        if not self._warned:
            warnings.warn(f"the heatmaps could not be drawn, and the training goes on: {reason}", stacklevel=3)
            self._warned = True
        return {}

    def _draw_pictures(self, step: int) -> dict[str, Pixels]:
        result = explain(self._model, list(self._images), self._layer, **self._explain_options)
        explanations = result if isinstance(result, list) else [result]
        drawn = {"heat": self._heat_sheet(explanations, step)}
        layer = explanations[0].layer
        if explanations[0].method == SHARPENED.name:
            layer = layer.rpartition("+")[2]  # the deepest one
        if "+" not in layer and layer != str(WHOLE_MODEL):
            first, preprocess = self._images[0], self._explain_options["preprocess"]
            maps = feature_maps(self._model, first, layer, top=_MOST_MAPS, preprocess=preprocess)
            drawn[f"features/{layer}"] = maps.sheet()
        return drawn

    def _heat_sheet(self, explanations: Sequence[Explanation], step: int) -> Pixels:
        """Draw the pictures with their classes and probabilities; what changed since the last sheet is in amber."""
        earlier, self._last_sheet = self._last_sheet, (step, [explanation.name for explanation in explanations])
        before, names = earlier or (step, [explanation.name for explanation in explanations])
        tiles = []
        for number, explanation in enumerate(explanations):
            share = "" if explanation.probability is None else f" {percent(explanation.probability)}"
            was = names[number] if number < len(names) else explanation.name
            change = f"was {was} at step {before}" if was != explanation.name else ""
            tiles.append(Tile(explanation.overlay(), explanation.name + share, change))
        changed = sum(bool(tile.note) for tile in tiles)
        title = f"step {step}" + (f": {changed} of {len(tiles)} changed since step {before}" if changed else "")
        return contact_sheet(tiles, title=title)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Stop watching if events cannot be written; the training goes on."""
        try:
            with naming_the_folder(self._writer):
                yield
        except OutputError as error:
            self._remove_hooks()
            if not self._failed:
                self._failed = True
                warnings.warn(f"{error}; the training goes on unwatched", stacklevel=4)

    def _hook_next_step(self) -> None:
        """Set hooks so that the next step is recorded from the first module that runs."""
        begin = WeakMethod(self._begin_pass)  # the hooks must not keep a forgotten watch alive

        def note(module: nn.Module) -> None:
            if (method := begin()) is not None:
                method(module)

        self._training = self._model.training
        with ExitStack() as stack:
            stack.enter_context(eagerly())
            stack.enter_context(starts(self._model.modules(), note))
            self._hooks = stack.pop_all()

    def _begin_pass(self, module: nn.Module) -> None:
        acts = partial(_is_training_pass, self._model, self._training)
        if self._hooks is None or not acts():
            return
        if self._recorded is None:
            self._scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
            self._gradients = self._hooks.enter_context(_parameter_gradients(self._model))
            follows = self._layers is _is_leaf  # otherwise the layer before may be missing
            self._recorded = LayerPass(self._model, self._layers, _statistics_or_none, acts, follows=follows)
            self._hooks.enter_context(self._recorded.hooked())
            self._begun_by, self._earlier = module, dict(self._gradients)
        elif module is self._model or (module is self._begun_by and self._had_backward_pass()):
            self._begun_by, self._earlier = module, dict(self._gradients)
            self._recorded.clear()

    def _had_backward_pass(self) -> bool:
        return any(numbers is not self._earlier.get(name) for name, numbers in self._gradients.items())

    def _remove_hooks(self) -> None:
        """Remove the hooks."""
        hooks, self._hooks, self._recorded = self._hooks, None, None
        if hooks is not None:
            hooks.close()

    def _write_layers(self, recorded: LayerPass, step: int) -> None:
        modules = modules_by_name(self._model)
        for key, call in recorded.calls.items():
            if call.name not in modules:  # it was removed from the model
                continue
            name = key or THE_MODEL
            tags = {number: f"{name}/{number}" if len(call.outputs) > 1 else name for number in call.outputs}
            for number, numbers in call.outputs.items():
                self._write_distribution(f"activations/{tags[number]}", numbers, step)
            if call.dead is not None and call.channels and isinstance(call.module, RELUS):
                self._writer.add_scalar(f"dead_share/{name}", len(call.dead) / call.channels, step)
            for number, numbers in call.gradients.items():
                self._write_distribution(f"gradients/{tags[number]}", numbers.scaled(1 / self._scale), step)

    def _write_parameters(self, step: int) -> None:
        squares: dict[str, float] = defaultdict(float)
        of_each: dict[int, float] = {}  # a parameter that two modules share has one summary under two names
        for name, numbers in self._gradients.items():
            if numbers is not None:
                self._write_distribution(f"weight_gradients/{name}", numbers.scaled(1 / self._scale), step)
                norm = numbers.norm_of_all / self._scale
                squares[name.rpartition(".")[0] or THE_MODEL] += norm * norm
                of_each[id(numbers)] = norm
        for layer, square in squares.items():
            self._writer.add_scalar(f"gradient_norm/{layer}", math.sqrt(square), step)
        if squares:
            self._writer.add_scalar("gradient_norm", math.hypot(*of_each.values()), step)
        for name, parameter in parameters_by_name(self._model).items():
            if not is_lazy(parameter):
                self._write_distribution(f"weights/{name}", statistics(parameter), step)

    def _write_distribution(self, tag: str, distribution: TensorStatistics, step: int) -> None:
        add_histogram(self._writer, tag, distribution, step)
        if distribution.nan or distribution.inf:
            self._writer.add_scalar(f"nonfinite/{tag}", distribution.nan + distribution.inf, step)

    def _write_graph(self) -> None:
        try:
            loaded = as_model(self._model, preprocess=self._explain_options["preprocess"])
            module = loaded.module
            first = prepare(self._images[0], loaded.preprocess, "the first picture", spatial_rank(module)).tensor[None]
            with (
                quiet_pass(module, device_of(module), "fp32"),
                warnings.catch_warnings(action="ignore"),  # of tracing: it is deprecated, but TensorBoard needs it
                contextlib.redirect_stdout(io.StringIO()),  # hides TensorBoard's message that tracing failed
                interruptible(),
            ):
                self._writer.add_graph(module, first.to(device_of(module), dtype_of(module)))
        except Exception as error:  # noqa: BLE001 - tracing fails in many ways, and must not stop the training
            self._writer.add_text("graph", f"could not be drawn: {type(error).__name__}: {error}")


_MOST_MAPS = 16
"""Feature maps on a sheet."""


def _is_training_pass(model: nn.Module, training: bool) -> bool:
    if torch._C._are_functorch_transforms_active() or backward_pass() >= 0:
        return False  # transformed tensors have no readable values, and checkpointing repeats recorded calls
    return torch.is_grad_enabled() and (model.training or not training)


def _separate(images: ImageLike | Sequence[ImageLike], rank: int) -> list[ImageLike]:
    """Return the pictures one by one; tensors are copied, since the caller may reuse their memory."""
    several = isinstance(images, (list, tuple)) or (isinstance(images, Tensor) and images.dim() != rank)
    parts = list(cast("Sequence[ImageLike]", images)) if several else [cast("ImageLike", images)]
    return [part.detach().clone() if isinstance(part, Tensor) else part for part in parts]


def _statistics_or_none(tensor: Tensor) -> TensorStatistics | None:
    """Return a tensor's statistics; None if that fails, as for nested tensors: it must not stop the training."""
    try:
        return statistics(tensor)
    except Exception:  # noqa: BLE001 - special tensors fail in many ways
        return None


@contextlib.contextmanager
def _parameter_gradients(model: nn.Module) -> Iterator[dict[str, TensorStatistics | None]]:
    """Keep the statistics of each parameter's ``.grad`` as the latest backward pass left it, before anything clips it.

    A parameter that two modules share has an entry under its name in each, with the same statistics.
    """
    gradients: dict[str, TensorStatistics | None] = {}
    names: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in parameters_by_name(model).items():
        names[parameter].append(name)

    def keep(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradients.update(dict.fromkeys(names[cast("nn.Parameter", parameter)], _statistics_or_none(parameter.grad)))

    with ExitStack() as stack:
        for parameter in names:
            if parameter.requires_grad and not is_lazy(parameter):
                stack.callback(parameter.register_post_accumulate_grad_hook(keep).remove)
        yield gradients


def _is_leaf(name: str, module: nn.Module) -> bool:
    """Return whether a layer has no inner layers; modules that compute its weights (parametrizations) don't count."""
    reserved = "parametrizations"
    return reserved not in name.split(".") and not any(part != reserved for part, _ in module.named_children())
