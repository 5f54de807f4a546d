"""TensorBoard: follow a training step by step, and write results as events.

    >>> from camkit.tensorboard import TrainingWatch  # doctest: +SKIP
    >>> watch = TrainingWatch(model, images, "runs/first", every=100)  # doctest: +SKIP
    >>> for inputs, labels in loader:  # doctest: +SKIP
    ...     train_on(inputs, labels)
    ...     watch.step()

It needs the extra ``camkit[tensorboard]``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from camkit.drawing.figure import Tile, contact_sheet, percent
from camkit.engine.attach import backward_pass, starts
from camkit.engine.guard import eagerly, interruptible
from camkit.engine.passes import quiet_pass
from camkit.errors import CamkitError, InputError, OutputError, optional
from camkit.explaining.explainer import explain_many
from camkit.explaining.explanation import Explanation, ScaleLike
from camkit.images.prepare import prepare, unbatched
from camkit.inspect.diagnosis import Diagnosis, prepared_batch
from camkit.inspect.feature_maps import feature_maps
from camkit.inspect.layer_statistics import RELUS, LayerPass, TensorStatistics, statistics
from camkit.layers.names import THE_MODEL, Layers, Selector, find_layers, parameters_by_name
from camkit.methods import AUTO, SHARPENED, MethodLike, find_method
from camkit.models import Labels, as_model
from camkit.models.loaded import as_labels
from camkit.models.modules import spatial_rank, unwrapped
from camkit.options import Options
from camkit.targets import TargetLike, as_targets
from camkit.trackers import Log, add_picture, naming_the_folder, opened, plain_name, write_events
from camkit.types import WHOLE_MODEL, ImageLike, Opacity, Pixels, Preprocess, Style

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from camkit import CheckResult

__all__ = ["TrainingWatch", "lightning_watch", "write_check", "write_diagnosis", "write_explanation"]


class TrainingWatch(contextlib.AbstractContextManager["TrainingWatch"]):
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
        InputError: TensorBoard is not installed, or an argument is wrong.
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
        if every < 1 or (pictures_every or 0) < 0:
            raise InputError(
                f"every must be at least 1 step, and pictures_every at least 0, not {every} and {pictures_every}"
            )
        self._model, self._every = unwrapped(model), every
        self._pictures_every = every if pictures_every is None else pictures_every
        parts = cast("Sequence[ImageLike]", images if isinstance(images, (list, tuple)) else [images])
        # Tensors are copied, since the caller may reuse their memory.
        self._images = [
            part.detach().clone() if isinstance(part, Tensor) else part
            for part in unbatched(parts, spatial_rank(self._model))
        ]
        self._layer = target_layer
        self._explain_options: Options = {
            "method": method,
            "target": target,
            "preprocess": preprocess,
            "labels": labels,
            "spread": "even",  # the weights have changed at each step, and measuring places takes 32 passes
        }
        # Check what will be explained before the training starts, not at the first recorded step
        find_method(AUTO if method is None else method)
        if not self._images:
            raise InputError("a watch needs at least one picture")
        as_targets(target, as_labels(labels))
        if target_layer is not None:
            find_layers(self._model, target_layer)
        for number, image in enumerate(self._images, start=1):
            if not isinstance(image, Tensor):
                prepare(image, preprocess, f"picture {number}")
        self._layers = _is_leaf if layers is None else layers
        find_layers(self._model, self._layers)
        self._scaler = scaler
        self._warned = self._stopped = False
        self._events = contextlib.ExitStack()
        self._writer = self._events.enter_context(opened(writer))
        self._hooks: contextlib.ExitStack | None = None
        self._recorded: LayerPass | None = None
        self._drawing = threading.Event()
        self._last_sheet: tuple[int, list[str]] | None = None  # its step, and the class of each picture
        self.steps = 0
        if graph:
            self._write_graph()
        self._hook_next_step()

    def step(self, number: int | None = None) -> None:
        """Count a finished step, and write it if it was recorded.

        Args:
            number: the step's number in the events; by default, ``step()`` calls are counted from 1.
        """
        self.steps += 1
        if self._stopped:
            return
        step = self.steps if number is None else number
        recorded = self._recorded
        self._remove_hooks()
        if recorded is not None:
            with self._writing():
                self._write_layers(recorded, step)
                self._write_parameters(step)
        if self._pictures_every and (self.steps - 1) % self._pictures_every == 0:
            self.pictures(step)
        if self.steps % self._every == 0 and not self._stopped:
            self._hook_next_step()

    def pictures(self, number: int | None = None) -> None:
        """Write the pictures with their heatmaps, and the feature maps of the first picture.

        If they cannot be drawn, a text in the events and one warning say why.
        """
        if self._stopped:
            return
        step, reason = self.steps if number is None else number, ""
        drawn: dict[str, Pixels] = {}
        self._drawing.set()
        try:
            drawn = self._draw_pictures(step)
        except Exception as error:  # noqa: BLE001 - losing the pictures is better than stopping the training
            reason = str(error) if isinstance(error, CamkitError) else f"{type(error).__name__}: {error}"
        finally:
            self._drawing.clear()
        with self._writing():
            for tag, pixels in drawn.items():
                add_picture(self._writer, tag, pixels, step)
            if reason:
                self._writer.add_text("heat", f"could not be drawn: {reason}", step)
        if reason and not self._warned:
            warnings.warn(f"the heatmaps could not be drawn, and the training goes on: {reason}", stacklevel=2)
            self._warned = True

    def close(self) -> None:
        """Remove the hooks, and close the event file if this watch opened it; later steps are not recorded."""
        self._remove_hooks()
        with self._writing():
            self._events.close()
        self._stopped = True

    def __exit__(self, *_: object) -> None:
        """Close the watch."""
        self.close()

    def _draw_pictures(self, step: int) -> dict[str, Pixels]:
        explanations = list(explain_many(self._model, self._images, self._layer, **self._explain_options))
        drawn = {"heat": self._heat_sheet(explanations, step)}
        layer = explanations[0].layer
        if explanations[0].method == SHARPENED.name:
            layer = layer.rpartition("+")[2]  # the deepest one
        if "+" not in layer and layer != str(WHOLE_MODEL):
            first, preprocess = self._images[0], self._explain_options["preprocess"]
            # Feature maps on a sheet
            maps = feature_maps(self._model, first, layer, top=16, preprocess=preprocess)
            drawn[f"features/{layer}"] = maps.sheet()
        return drawn

    def _heat_sheet(self, explanations: Sequence[Explanation], step: int) -> Pixels:
        """Draw the pictures with their classes and probabilities; what changed since the last sheet is in amber."""
        names = [explanation.name for explanation in explanations]
        before, earlier = self._last_sheet or (step, names)
        self._last_sheet, tiles = (step, names), []
        # A target may stand for more classes than in the last sheet
        for explanation, was in itertools.zip_longest(explanations, earlier[: len(names)]):
            share = "" if explanation.probability is None else f" {percent(explanation.probability)}"
            change = f"was {was} at step {before}" if was not in (None, explanation.name) else ""
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
            if not self._stopped:
                self._stopped = True
                warnings.warn(f"{error}; the training goes on unwatched", stacklevel=4)

    def _hook_next_step(self) -> None:
        """Set hooks so that the next step is recorded from the first module that runs."""
        begin = WeakMethod(self._begin_pass)  # the hooks must not keep a forgotten watch alive

        def note(module: nn.Module) -> None:
            if (method := begin()) is not None:
                method(module)

        self._training = self._model.training
        with contextlib.ExitStack() as stack:
            stack.enter_context(eagerly())
            stack.enter_context(starts(self._model.modules(), note))
            self._hooks = stack.pop_all()

    def _begin_pass(self, module: nn.Module) -> None:
        acts = partial(_is_training_pass, self._model, self._training, self._drawing)
        if self._hooks is None or not acts():
            return
        if self._recorded is None:
            self._scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
            self._gradients = self._hooks.enter_context(_parameter_gradients(self._model))
            follows = self._layers is _is_leaf  # otherwise the layer before may be missing
            self._recorded = LayerPass(self._model, self._layers, _statistics_or_none, acts, follows=follows)
            self._hooks.enter_context(self._recorded.hooked())
        elif module is self._model or (
            module is self._begun_by  # after a backward pass, which left other gradients
            and any(numbers is not self._earlier.get(name) for name, numbers in self._gradients.items())
        ):
            self._recorded.clear()
        else:
            return
        self._begun_by: nn.Module = module
        self._earlier: dict[str, TensorStatistics | None] = dict(self._gradients)

    def _remove_hooks(self) -> None:
        """Remove the hooks."""
        hooks, self._hooks, self._recorded = self._hooks, None, None
        if hooks is not None:
            hooks.close()

    def _write_layers(self, recorded: LayerPass, step: int) -> None:
        for key, call in recorded.by_name().items():
            name, row = key or THE_MODEL, call.row
            for place, (number, numbers) in enumerate(call.outputs.items()):
                tag = f"{name}/{place}" if len(call.outputs) > 1 else name
                self._write_distribution(f"activations/{tag}", numbers, step)
                if number in call.gradients:
                    self._write_distribution(f"gradients/{tag}", call.gradients[number], step, 1 / self._scale)
            if row is not None and row.dead is not None and row.channels and isinstance(call.module, RELUS):
                self._writer.add_scalar(f"dead_share/{name}", len(row.dead) / row.channels, step)

    def _write_parameters(self, step: int) -> None:
        squares: dict[str, float] = defaultdict(float)
        of_each: dict[int, float] = {}  # a parameter that two modules share has one summary under two names
        for name, numbers in self._gradients.items():
            if numbers is not None:
                self._write_distribution(f"weight_gradients/{name}", numbers, step, 1 / self._scale)
                # NaN if a number is NaN, infinity if one is infinite
                norm = (math.nan if numbers.nan else math.inf if numbers.inf else numbers.norm) / self._scale
                squares[name.rpartition(".")[0] or THE_MODEL] += norm * norm
                of_each[id(numbers)] = norm
        for layer, square in squares.items():
            self._writer.add_scalar(f"gradient_norm/{layer}", math.sqrt(square), step)
        if squares:
            self._writer.add_scalar("gradient_norm", math.hypot(*of_each.values()), step)
        for name, parameter in parameters_by_name(self._model).items():
            if not is_lazy(parameter):
                self._write_distribution(f"weights/{name}", statistics(parameter), step)

    def _write_distribution(self, tag: str, distribution: TensorStatistics, step: int, factor: float = 1) -> None:
        add_histogram(self._writer, tag, distribution, step, factor)
        if distribution.nan or distribution.inf:
            self._writer.add_scalar(f"nonfinite/{tag}", distribution.nan + distribution.inf, step)

    def _write_graph(self) -> None:
        try:
            loaded = as_model(self._model, preprocess=self._explain_options["preprocess"])
            first = prepared_batch(self._images[:1], loaded)
            with (
                quiet_pass(loaded.module, first.device, "fp32"),
                warnings.catch_warnings(action="ignore"),  # of tracing: it is deprecated, but TensorBoard needs it
                contextlib.redirect_stdout(io.StringIO()),  # hides TensorBoard's message that tracing failed
                interruptible(),
            ):
                self._writer.add_graph(loaded.module, first)
        except Exception as error:  # noqa: BLE001 - tracing fails in many ways, and must not stop the training
            self._writer.add_text("graph", f"could not be drawn: {type(error).__name__}: {error}")


def _is_training_pass(model: nn.Module, training: bool, drawing: threading.Event) -> bool:
    if torch._C._are_functorch_transforms_active() or backward_pass() >= 0 or drawing.is_set():
        return False  # transformed tensors have no readable values, and checkpointing repeats recorded calls
    return torch.is_grad_enabled() and (model.training or not training)


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

    with contextlib.ExitStack() as stack:
        for parameter in names:
            if parameter.requires_grad and not is_lazy(parameter):
                stack.callback(parameter.register_post_accumulate_grad_hook(keep).remove)
        yield gradients


def _is_leaf(name: str, module: nn.Module) -> bool:
    """Return whether a layer has no inner layers; modules that compute its weights (parametrizations) don't count."""
    reserved = "parametrizations"
    return reserved not in name.split(".") and not any(part != reserved for part, _ in module.named_children())


def lightning_watch(
    images: ImageLike | Sequence[ImageLike],
    writer: Any | str | Path | None = None,
    *,
    pictures_every: int | None = 0,
    **settings: Any,
) -> Any:
    """Return a ``lightning.pytorch.Callback`` that watches a training.

    Heatmaps and feature maps are written at the end of each epoch, unless ``pictures_every`` says otherwise.

    Args:
        images: the pictures to explain, as for ``TrainingWatch``.
        writer: a SummaryWriter, or a folder; None means the trainer's TensorBoardLogger. If it has none, all its
            loggers get the scalars, and those of MLflow and Weights & Biases the pictures too.
        pictures_every, settings: as for ``TrainingWatch``.

    Raises:
        InputError: Lightning is not installed; or, when the training starts, the trainer has no logger.
    """
    package = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
    base = optional(package, "lightning_watch needs the package lightning: pip install lightning").Callback

    class LightningWatch(base):  # type: ignore[misc, valid-type] # from whichever package is installed
        """Calls a TrainingWatch at the end of each batch."""

        watch: TrainingWatch | None = None
        _last_step = 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            """Start watching; events go to the trainer's own file if there is no other."""
            own = (log.experiment for log in trainer.loggers if hasattr(log.experiment, "add_histogram_raw"))
            events: Any = writer or next(own, None) or _OfLoggers(trainer.loggers)
            if not (writer or trainer.loggers):
                raise InputError("the trainer has no logger; pass a writer or a folder to lightning_watch")
            self._last_step = trainer.global_step
            self.watch = TrainingWatch(module, images, events, pictures_every=pictures_every, **settings)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            """Count a step, once for all the batches whose gradients it accumulates."""
            if self.watch is not None and trainer.global_step != self._last_step:
                self._last_step = trainer.global_step
                self.watch.step(trainer.global_step)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002
            """Write the pictures."""
            if self.watch is not None and not pictures_every:
                self.watch.pictures(trainer.global_step)

        def on_train_end(self, trainer: Any, module: Any, *exception: BaseException) -> None:  # noqa: ARG002
            """Remove the hooks."""
            if self.watch is not None:
                self.watch.close()
            self.watch = None

        on_exception = on_train_end

    return LightningWatch()


class _OfLoggers:
    """Writes with Lightning's loggers, in place of a SummaryWriter: all take scalars, and some take pictures."""

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._loggers = loggers
        self._scalars: dict[str, float] = {}
        self._step = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Keep a number until those of its step are complete, since a CSV logger writes one row for each call."""
        if step != self._step:
            self.flush()
        self._step = step
        # MLflow keeps each value in a file, so gradient_norm must not be a folder of other values too
        self._scalars[plain_name(tag if "/" in tag else f"{tag}/all")] = value

    def add_image(self, tag: str, pixels: Pixels, step: int, **_: Any) -> None:
        """Write a picture, H x W x 3."""
        for logger in self._loggers:
            if hasattr(logger, "log_image"):
                logger.log_image(plain_name(tag), [pixels], step)
            elif hasattr(logger, "run_id"):
                logger.experiment.log_image(logger.run_id, pixels, key=plain_name(tag), step=step)

    def flush(self) -> None:
        """Write the numbers of a step."""
        for logger in self._loggers if self._scalars else ():
            logger.log_metrics(self._scalars, self._step)
        self._scalars = {}

    def add_histogram_raw(self, *_: Any, **__: Any) -> None:
        """Ignore what loggers cannot take."""

    add_text = add_graph = add_histogram_raw


def add_histogram(writer: Any, tag: str, distribution: TensorStatistics, step: int, factor: float = 1) -> None:
    """Write the distribution of a tensor's finite numbers times a factor; if there are none, write nothing."""
    count = sum(distribution.histogram.counts)
    if count:
        writer.add_histogram_raw(
            tag,
            min=distribution.low * factor,
            max=distribution.high * factor,
            num=count,
            sum=distribution.mean * factor * count,
            sum_squares=(distribution.norm * factor) ** 2,
            bucket_limits=[edge * factor for edge in distribution.histogram.edges[1:]],
            bucket_counts=list(distribution.histogram.counts),
            global_step=step,
        )


def write_explanation(
    found: Explanation,
    writer: SummaryWriter | str | Path,
    step: int = 0,
    *,
    tag: str | None = None,
    style: Style = "overlay",
    colormap: str = "turbo",
    alpha: float = 0.5,
    opacity: Opacity = "evidence",
    scale: ScaleLike = "shared",
    max_side: int | None = None,
) -> None:
    """Write an explanation's picture, and a table of all else as text.

    Args:
        found: the explanation; if its map has one axis, it has no picture.
        writer: a SummaryWriter, or a folder, in which each call creates a new file.
        step: the step in the events.
        tag: the tag of both in the events; None means ``explain/SOURCE/TARGET``.
        style, colormap, alpha, opacity, scale, max_side: as for ``Explanation.overlay``.

    Raises:
        InputError: TensorBoard is not installed, the style, colormap or opacity is unknown, or alpha is out of range.
        OutputError: the folder cannot be written.
    """
    tag = tag or f"explain/{found.source}/{found.name}"
    row = found.values()
    if found.heatmap.ndim > 1:
        row["heat"] = found.overlay(
            style=style, colormap=colormap, alpha=alpha, opacity=opacity, scale=scale, max_side=max_side
        )
    write_events(Log("explain", pictures=[(tag, row)]), writer, step)


def write_diagnosis(found: Diagnosis, writer: SummaryWriter | str | Path, step: int = 0) -> None:
    """Write a diagnosis: histograms and scalars of each layer, the picture, and the findings as text.

    Layers have the same tags as in ``TrainingWatch``. Arguments and errors are as for ``write_explanation``.
    """
    with opened(writer) as events, naming_the_folder(events):
        for row in found.rows:
            add_histogram(events, f"activations/{row.name}", row.activations, step)
            if row.gradients is not None:
                add_histogram(events, f"gradients/{row.name}", row.gradients, step)
            if row.parameter_gradient is not None and math.isfinite(row.parameter_gradient):
                events.add_scalar(f"gradient_norm/{row.name}", row.parameter_gradient, step)
            if row.dead is not None and row.channels:
                events.add_scalar(f"dead_share/{row.name}", len(row.dead) / row.channels, step)
        add_picture(events, "diagnosis", found.sheet(), step)
        sentences = [*(finding.text for finding in found.findings), *found.remarks]
        text = "\n".join(f"- {sentence}" for sentence in sentences)
        events.add_text("findings", text or "Nothing wrong was found.", step)


def write_check(result: CheckResult, writer: SummaryWriter | str | Path, step: int = 0) -> None:
    """Write a check: its summary as text, the measures of each class as scalars, the worst pictures with their edits.

    If an effect was measured with several fills, the scalar is the weakest. Arguments and errors are as
    for ``write_explanation``.
    """
    write_events(result.to_log(), writer, step)
