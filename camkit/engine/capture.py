"""Run the model once and return feature maps, gradients and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.attach import ForwardHook, contiguous_gradients, forward_hooks
from camkit.engine.cut import EntangledError, Saved, Tape, cut, not_reached
from camkit.engine.features import Capture, Features, to_grid
from camkit.engine.interrupts import interruptible
from camkit.engine.nested import precise
from camkit.engine.passes import quiet_pass
from camkit.engine.record import ModelRecord
from camkit.engine.references import KeptReferences, ReferencesFor
from camkit.errors import LayerError, MethodError, TargetError, listing_layers
from camkit.targets.scores import Expands, Scores, Target
from camkit.types import Extent, LayerRef, Layout, Placement, Precision, Progress

_SAME_FP32, _SAME_AUTOCAST = 1e-4, 2e-2
"""How far a linear layer's input may differ from the mean of the feature maps, as a share of the largest mean: several
times the rounding of a sum over the cells in fp32, and in bf16, the coarsest type of autocast."""

ReadLayout: TypeAlias = Callable[[tuple[int, ...], int, tuple[int, ...]], "Layout | None"]
"""``read(shape, batch, size)`` returns the layout of an output of this shape, or None if it has no grid."""


@dataclass
class Resized:
    """How a model resized its input itself, as detectors do: the padded size, and the part of it that is the input."""

    padded: tuple[int, ...] = ()
    extent: Extent = ()


@contextmanager
def _resizing(model: nn.Module) -> Iterator[Resized]:
    resized = Resized()

    def note(_: nn.Module, __: list[Tensor], output: Any) -> None:
        size_and_extent = _resized_input(output)
        if size_and_extent is not None:
            resized.padded, resized.extent = size_and_extent

    with forward_hooks(dict.fromkeys(model.children(), note)):
        yield resized


def _resized_input(output: Any) -> tuple[tuple[int, ...], Extent] | None:
    """Return a resized batch's padded size, and the part that the first image covers; None for any other output."""
    batch = output[0] if isinstance(output, tuple) and output else output
    if isinstance(batch, dict):  # some return a key's value for any attribute, or raise a KeyError
        return None
    sizes, tensors = getattr(batch, "image_sizes", None), getattr(batch, "tensors", None)
    if not sizes or not isinstance(tensors, Tensor):
        return None
    padded = tuple(tensors.shape[2:])
    return padded, tuple((0.0, side / whole) for side, whole in zip(sizes[0], padded, strict=True))


@dataclass(frozen=True)
class Pass:
    """How one pass is run.

    Attributes:
        modules: the module of each layer to save.
        layouts: the layouts of the layers' outputs, None for an output without a grid. ``read_layout`` reads the layout
            of any other layer from the shape of its output.
        read_layout: reads a layout from a shape.
        precision: "bf16" and "fp16" run under autocast.
        memory_format: the memory format in which the model receives the inputs.
        record: the model's record, if it is already prepared.
        users_code: True if functions of the user run in the pass, besides the model.
        progress: told how many pictures the model has seen, for methods that need many.
        may_resize: True if the model may resize and pad its input itself, as detectors do.
        apart: False if the model mixes the pictures of a batch, so that a pass takes one at a time.
        references: returns the reference pictures for an input, for methods that need them.
        kept_references: keeps what the model returned for them.
        afresh: True if a layer's gradient has no part that passes through another layer.
    """

    modules: Mapping[LayerRef, nn.Module]
    layouts: Mapping[LayerRef, Layout | None] = field(default_factory=dict)
    read_layout: ReadLayout | None = None
    precision: Precision = "fp32"
    memory_format: torch.memory_format = torch.preserve_format
    record: ModelRecord | None = None
    may_resize: bool = True
    users_code: bool = True
    progress: Progress | None = None
    apart: bool = True
    references: ReferencesFor | None = None
    kept_references: KeptReferences = field(default_factory=KeptReferences)
    afresh: bool = False

    def quiet(
        self, model: nn.Module, device: torch.device, precision: Precision | None = None
    ) -> AbstractContextManager[None]:
        """Prepare one pass that leaves the model as it was; ``quiet_pass`` explains it."""
        return quiet_pass(model, device, precision or self.precision, self.record, users_code=self.users_code)

    def resizing(self, model: nn.Module) -> AbstractContextManager[Resized]:
        """Detect a submodule that resizes and pads images into a batch, and returns an image list as torchvision's."""
        return _resizing(model) if self.may_resize else nullcontext(Resized())


def capture(model: nn.Module, inputs: Float[Tensor, "n c *size"], targets: Sequence[Target], options: Pass) -> Capture:
    """Run the model once and differentiate its head once per target.

    Args:
        model: the model; it is restored exactly, also after an exception.
        inputs: a batch of N images on the model's device.
        targets: each returns one score per image.
        options: the layers to save, and how the pass is run.

    Raises:
        LayerError: a layer did not run, ran several times, has no spatial extent, or the score does not depend on it.
        TargetError: a target does not fit the model's output.
    """
    with suppress(EntangledError, _UnreachedError):
        return _capture(model, inputs, targets, options, trunk_graph=False)
    # There are two possible reasons. The model's own forward may run a layer inside a no_grad block, whose end turned
    # gradients off again; if gradients are on from the start, the end of the block turns them on. Or a layer returned
    # several tensors, and one of them may have been computed from the maps; the whole graph connects them.
    try:
        return _capture(model, inputs, targets, options, trunk_graph=True)
    except _UnreachedError as error:
        raise not_reached(error.layers) from None


class NotRunError(LayerError):
    """A layer did not run in the pass."""


class _UnreachedError(Exception):
    """No score has a gradient at some layers."""

    def __init__(self, layers: Sequence[LayerRef]) -> None:
        super().__init__()
        self.layers = layers


def _capture(
    model: nn.Module, inputs: Tensor, targets: Sequence[Target], options: Pass, *, trunk_graph: bool
) -> Capture:
    """Run one pass.

    Raises:
        EntangledError: a layer returned several tensors, and one may have been computed from another.
        _UnreachedError: no score has a gradient at some layer.
    """
    scores: list[Scores] = []
    with (
        options.quiet(model, inputs.device),
        torch.set_grad_enabled(trunk_graph),
        cut(options.modules, whole=trunk_graph, afresh=options.afresh) as tape,
        options.resizing(model) as resized,
        interruptible(),
    ):
        images = (
            inputs.clone().requires_grad_() if trunk_graph else inputs
        )  # the input needs a gradient in case all parameters are frozen
        output = model(images.clone(memory_format=options.memory_format))
        layouts = layouts_of(tape, options, len(inputs), resized.padded or tuple(inputs.shape[2:]))
        for ref, layout in layouts.items():
            tape.layers[ref].images = int(layout.kind == "sequence_first")
        expanded = expand(targets, output, len(inputs))
        for number, target in enumerate(expanded, start=1):
            scored = target(output, len(inputs))
            if not (scored.values.requires_grad or is_absent(scored)):
                raise _UnreachedError(tuple(options.modules))
            if len(inputs) == 1 and inputs.device.type == "cpu" and number == 1:
                contiguous_gradients(scored.values)
            tape.differentiate(scored, keep_graph=number < len(expanded), fp16=options.precision == "fp16")
            scores.append(detached(scored))
        unreached = [ref for ref in options.modules if not tape.layers[ref].reached]
        if unreached and not any(is_absent(scored) for scored in scores):
            raise _UnreachedError(unreached)
        features = tuple(features_of(tape.layers[ref], layout, resized.extent) for ref, layout in layouts.items())
    return Capture(features, tuple(scores), tuple(layouts.values()), bool(resized.padded))


def is_absent(scored: Scores) -> bool:
    """Tell whether the target exists in no image."""
    return scored.present is not None and not any(scored.present)


def expand(targets: Sequence[Target], output: Any, batch: int) -> list[Target]:
    """Return the targets, each target that stands for several replaced with those that fit the output."""
    return [
        single
        for target in targets
        for single in (target.expand(output, batch) if isinstance(target, Expands) else [target])
    ]


def layouts_of(tape: Tape, options: Pass, batch: int, size: tuple[int, ...]) -> dict[LayerRef, Layout]:
    """Return the layout of each layer's output.

    Raises:
        LayerError: a layer did not run, or its output has no spatial extent.
    """
    missing = [str(ref) for ref in options.modules if ref not in tape.layers]
    if missing:
        raise NotRunError(f"layer {missing[0]!r} did not run in this pass; choose another ({listing_layers()})")
    layouts: dict[LayerRef, Layout] = {}
    for ref in options.modules:
        shape = tuple(tape.layers[ref].output.shape)
        layout = options.layouts.get(ref)
        if ref not in options.layouts and options.read_layout is not None:
            layout = options.read_layout(shape, batch, size)
        if layout is None:
            raise LayerError(
                f"layer {str(ref)!r} returned shape {shape}, which has no spatial extent that fits the input's "
                f"{'x'.join(map(str, size))}, or is computed from another input of the model; choose another layer "
                f"({listing_layers()}), or name that input with 'picture'"
            )
        layouts[ref] = layout
    return layouts


def features_of(saved: Saved, layout: Layout, extent: Extent = ()) -> Features:
    """Return a layer's saved maps and gradients as grids."""
    gradients = tuple(to_grid(gradient, layout) for gradient in saved.gradients)
    placement = Placement(extent or layout.extent, layout.positions)
    return Features(to_grid(saved.output.detach(), layout), gradients, placement)


def capture_for_cam(
    model: nn.Module, inputs: Float[Tensor, "n c *size"], targets: Sequence[Target], options: Pass
) -> Capture:
    """Run the model once without gradients, and return the class weights of its linear layer.

    The head must be global average pooling of the layer followed by that linear layer. This is not guessed from names:
    the linear layer's input must equal the mean of the feature maps (or of their positive part, if a ReLU comes between
    them, as in DenseNet).

    Raises:
        MethodError: the head has another form; the message names methods that work.
        TargetError: a target is not a class.
    """
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def note(module: nn.Module, arguments: list[Tensor], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        calls.append((module, arguments[0].detach(), output))

    linears: dict[nn.Module, ForwardHook] = {
        module: note for module in model.modules() if isinstance(module, nn.Linear)
    }
    with (
        options.quiet(model, inputs.device),
        cut(options.modules, gradients=False) as tape,
        forward_hooks(linears),
        interruptible(),
    ):
        output = model(inputs.clone(memory_format=options.memory_format))
        scores = tuple(target(output, len(inputs)) for target in expand(targets, output, len(inputs)))
        heads = [call for call in calls if all(_gives(call[2], scored) for scored in scores)]
        layouts = layouts_of(tape, options, len(inputs), tuple(inputs.shape[2:]))
        features = tuple(
            _cam_features(ref, features_of(tape.layers[ref], layout), heads, scores) for ref, layout in layouts.items()
        )
    scores = tuple(replace(scored, values=precise(scored.values)) for scored in scores)
    return Capture(features, scores, tuple(layouts.values()))


def capture_activations(
    model: nn.Module, inputs: Float[Tensor, "n c *size"], targets: Sequence[Target], options: Pass
) -> Capture:
    """Run the model once, and return feature maps and scores alone.

    The head has a graph if it can have one: it shows whether the model ends in a softmax or sigmoid.

    Raises:
        LayerError, TargetError: as for ``capture``.
    """
    with suppress(EntangledError):
        return _capture_activations(model, inputs, targets, options, graph=True)
    return _capture_activations(model, inputs, targets, options, graph=False)


def _capture_activations(
    model: nn.Module, inputs: Tensor, targets: Sequence[Target], options: Pass, *, graph: bool
) -> Capture:
    with (
        options.quiet(model, inputs.device),
        cut(options.modules, gradients=graph) as tape,
        options.resizing(model) as resized,
        interruptible(),
    ):
        output = model(inputs.clone(memory_format=options.memory_format))
        layouts = layouts_of(tape, options, len(inputs), resized.padded or tuple(inputs.shape[2:]))
        scores = plain_scores(expand(targets, output, len(inputs)), output, len(inputs))
        features = tuple(features_of(tape.layers[ref], layout, resized.extent) for ref, layout in layouts.items())
    return Capture(features, scores, tuple(layouts.values()), bool(resized.padded))


@contextmanager
def whole_graph(image: Float[Tensor, "1 c *size"]) -> Iterator[Tensor]:
    """Keep the graph of one pass; yield a copy of the picture that all operations depend on.

    The graph of the output shows whether the model ends in a softmax or sigmoid. It takes the memory of a training step
    on one picture, until the output is dropped.
    """
    with torch.enable_grad():
        yield image.clone().requires_grad_().clone()


def plain_scores(targets: Sequence[Target], output: Any, batch: int) -> tuple[Scores, ...]:
    """Return the targets' scores without a graph."""
    return tuple(detached(target(output, batch)) for target in targets)


def detached(scored: Scores) -> Scores:
    """Return a target's scores without their graph."""
    return replace(scored, values=precise(scored.values.detach()), activation=None)


def _cam_features(
    ref: LayerRef,
    features: Features,
    heads: Sequence[tuple[nn.Linear, Tensor, Tensor]],
    scores: Sequence[Scores],
) -> Features:
    """Return a layer's maps with the class weights of the linear layer that reads their mean."""
    maps = features.activations
    cells = tuple(range(2, maps.dim()))
    if heads:
        linear, pooled, _ = heads[-1]
        for positive_part in (maps, maps.relu()):
            if _same(pooled, positive_part.mean(cells)):
                weights = tuple(_class_weights(linear, scored) for scored in scores)
                return Features(positive_part, weights, features.placement)
    raise MethodError(
        "cam needs a head of global average pooling and one linear layer, and this model has no such head after layer "
        f"{str(ref)!r}; use 'gradcam' or 'hirescam', which work with any head"
    )


def _gives(logits: Tensor, scored: Scores) -> bool:
    """Tell whether a linear layer's output contains the scores of the classes."""
    if scored.indices is None:
        raise TargetError("cam explains classes only; use 'gradcam' for a target function")
    if logits.dim() != 2 or len(logits) != len(scored.indices) or max(scored.indices) >= logits.shape[1]:
        return False
    return torch.equal(logits[range(len(logits)), scored.indices], scored.values)


def _same(pooled: Tensor, mean: Tensor) -> bool:
    """Tell whether two tensors are equal up to rounding."""
    tolerance = _SAME_FP32 if pooled.dtype == mean.dtype == torch.float32 else _SAME_AUTOCAST
    if pooled.shape != mean.shape:
        return False
    difference = (pooled.float() - mean.float()).abs().amax()
    return bool(difference <= tolerance * mean.float().abs().amax())


def _class_weights(linear: nn.Linear, scored: Scores) -> Float[Tensor, "n c"]:
    return linear.weight.detach()[list(scored.indices or ())].float()
