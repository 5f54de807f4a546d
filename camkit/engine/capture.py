"""Runs the model once and brings back feature maps, gradients and scores."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.attach import ForwardHook, forward_hooks, ordinary_gradients
from camkit.engine.cut import EntangledError, Saved, Tape, cut
from camkit.engine.features import Capture, Features
from camkit.engine.grid import to_grid
from camkit.engine.nested import tensors_in
from camkit.engine.resizing import resizing
from camkit.engine.restore import eagerly, evaluating, same_randomness
from camkit.errors import LayerError, MethodError, TargetError
from camkit.layers.layouts import infer_layout
from camkit.targets.scores import Expands, Scores, Target
from camkit.types import Extent, LayerRef, Layout, Precision

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def quiet_pass(model: nn.Module, device: torch.device, precision: Precision) -> Iterator[None]:
    """Set the stage for one pass: evaluation mode, no graph, the precision asked for; all of it undone at the end.

    Works inside a caller's ``no_grad``, ``inference_mode`` and ``autocast``, whose cache of weights is not shared.
    """
    with (
        eagerly(),
        same_randomness(model),
        evaluating(model),
        torch.inference_mode(mode=False),
        torch.no_grad(),
        torch.autocast(device.type, dtype=_DTYPES.get(precision), enabled=precision in _DTYPES, cache_enabled=False),
    ):
        yield


def capture(
    model: nn.Module,
    inputs: Float[Tensor, "n c *size"],
    layers: Mapping[LayerRef, nn.Module],
    targets: Sequence[Target],
    *,
    precision: Precision = "fp32",
    layouts: Mapping[LayerRef, Layout | None] | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Capture:
    """Run the model once and differentiate its head once per target.

    Args:
        model: left exactly as it was found, also after an exception.
        inputs: a batch of N images on the model's device.
        layers: where to save feature maps and gradients.
        targets: each gives one score per image.
        precision: of the pass; "bf16" and "fp16" run under autocast.
        layouts: of the layers' outputs, where a probe saw them, None for an output that it saw to have no grid. Without
            any they are read from the shapes alone, which is not certain for tokens.
        memory_format: of the copy of the inputs that the model gets.

    Raises:
        LayerError: a layer did not run, ran several times, has no spatial extent, or the score does not depend on it.
        TargetError: the output does not have what a target asks for.
    """
    result = None
    with suppress(EntangledError):
        result = _capture(model, inputs, layers, targets, precision, layouts, memory_format, trunk_graph=False)
    if result is None:
        # The layer lies inside a no_grad block of the model's own forward, which switched gradients off again when it
        # ended: with gradients on outside the block, that is the mode it returns to. Or it returned several tensors, of
        # which another may have been computed from the maps: with the whole graph, the maps lead to that one.
        result = _capture(model, inputs, layers, targets, precision, layouts, memory_format, trunk_graph=True)
    if result is None:
        names = " and ".join(repr(str(ref)) for ref in layers)
        raise LayerError(
            f"the score does not depend on layer {names} in a way that can be differentiated; choose another layer, "
            "or remove inference_mode, detach() or argmax from the model's forward after it"
        )
    return result


def _capture(
    model: nn.Module,
    inputs: Tensor,
    layers: Mapping[LayerRef, nn.Module],
    targets: Sequence[Target],
    precision: Precision,
    layouts: Mapping[LayerRef, Layout | None] | None,
    memory_format: torch.memory_format,
    *,
    trunk_graph: bool,
) -> Capture | None:
    scores: list[Scores] = []
    reached = False
    with (
        quiet_pass(model, inputs.device, precision),
        torch.set_grad_enabled(trunk_graph),
        cut(layers, whole=trunk_graph) as tape,
        resizing(model) as resized,
        ordinary_gradients(model) if len(inputs) == 1 and inputs.device.type == "cpu" else nullcontext(),
    ):
        images = inputs.clone().requires_grad_() if trunk_graph else inputs  # where every parameter is frozen
        output = model(images.clone(memory_format=memory_format))
        _check_all_ran(tape, layers)
        size = resized.padded or tuple(inputs.shape[2:])
        found = {ref: _layout(ref, tape.layers[ref], len(inputs), size, layouts) for ref in layers}
        for ref, layout in found.items():
            tape.layers[ref].images = int(layout.kind == "sequence_first")
        asked = _expanded(targets, output, len(inputs))
        for number, target in enumerate(asked, start=1):
            scored = target(output, len(inputs))
            if not (scored.values.requires_grad or _absent(scored)):
                return None
            again = number < len(asked)
            reached |= tape.backward(scored.values.float(), keep_graph=again, lifted=precision == "fp16")
            reached |= _absent(scored)
            scores.append(replace(scored, values=scored.values.detach().float()))
        if not reached:
            return None
        features = tuple(_features(tape.layers[ref], layout, resized.extent) for ref, layout in found.items())
    return Capture(features, tuple(scores))


def _expanded(targets: Sequence[Target], output: Any, batch: int) -> list[Target]:
    """Return the targets, one that stands for several, as many as the output has, taken apart."""
    return [
        single
        for target in targets
        for single in (target.expand(output, batch) if isinstance(target, Expands) else [target])
    ]


def _absent(scores: Scores) -> bool:
    return scores.present is not None and not any(scores.present)


def _check_all_ran(tape: Tape, layers: Mapping[LayerRef, nn.Module]) -> None:
    missing = [str(ref) for ref in layers if ref not in tape.layers]
    if missing:
        raise LayerError(f"layer {missing[0]!r} did not run in this pass; camkit layers --model NAME lists what runs")


def _layout(
    ref: LayerRef, saved: Saved, batch: int, size: tuple[int, ...], layouts: Mapping[LayerRef, Layout | None] | None
) -> Layout:
    shape = tuple(saved.output.shape)
    layout = infer_layout(shape, batch, size) if layouts is None else layouts.get(ref)
    if layout is None:
        raise LayerError(
            f"layer {str(ref)!r} returned shape {shape}, which has no spatial extent in proportion to the input's "
            f"{'x'.join(map(str, size))}; choose another (camkit layers --model NAME lists them)"
        )
    return layout


def _features(saved: Saved, layout: Layout, extent: Extent = ()) -> Features:
    gradients = tuple(to_grid(gradient, layout) for gradient in saved.gradients)
    return Features(to_grid(saved.output.detach(), layout), gradients, extent or layout.extent)


def capture_for_cam(
    model: nn.Module,
    inputs: Float[Tensor, "n c *size"],
    layers: Mapping[LayerRef, nn.Module],
    targets: Sequence[Target],
    *,
    precision: Precision = "fp32",
    layouts: Mapping[LayerRef, Layout | None] | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Capture:
    """Run the model once, without any gradient, and find the class weights of its linear layer.

    That the head is global average pooling of the layer followed by that linear layer is not guessed from names: the
    linear layer's input is compared with the mean of the feature maps (or of their positive part, where a ReLU stands
    between them, as in DenseNet).

    Raises:
        MethodError: the head is of another form; the message names methods that work.
        TargetError: a target is not a class.
    """
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def note(module: nn.Module, arguments: list[Tensor], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        calls.append((module, arguments[0].detach(), output))

    linears: dict[nn.Module, ForwardHook] = {
        module: note for module in model.modules() if isinstance(module, nn.Linear)
    }
    with quiet_pass(model, inputs.device, precision), cut(layers, gradients=False) as tape, forward_hooks(linears):
        output = model(inputs.clone(memory_format=memory_format))
        _check_all_ran(tape, layers)
        scores = tuple(target(output, len(inputs)) for target in _expanded(targets, output, len(inputs)))
        heads = [call for call in calls if all(_gives(call[2], scored) for scored in scores)]
        size = tuple(inputs.shape[2:])
        found = {ref: _layout(ref, tape.layers[ref], len(inputs), size, layouts) for ref in layers}
        features = tuple(
            _cam_features(ref, _features(tape.layers[ref], layout), heads, scores) for ref, layout in found.items()
        )
    return Capture(features, tuple(replace(scored, values=scored.values.float()) for scored in scores))


def _cam_features(
    ref: LayerRef,
    features: Features,
    heads: Sequence[tuple[nn.Linear, Tensor, Tensor]],
    scores: Sequence[Scores],
) -> Features:
    maps = features.activations
    cells = tuple(range(2, maps.dim()))
    if heads:
        linear, pooled, _ = heads[-1]
        for positive_part in (maps, maps.relu()):
            if _same(pooled, positive_part.mean(cells)):
                weights = tuple(_class_weights(linear, scored) for scored in scores)
                return Features(positive_part, weights, features.extent)
    raise MethodError(
        "cam needs a head of global average pooling and one linear layer, and this model's is not one after layer "
        f"{str(ref)!r}; use 'gradcam' or 'hirescam', which work with any head"
    )


def _gives(logits: Tensor, scored: Scores) -> bool:
    """Tell whether a linear layer's output holds the classes' scores."""
    if scored.indices is None:
        raise TargetError("cam explains classes; for a target function use 'gradcam'")
    if logits.dim() != 2 or len(logits) != len(scored.indices) or max(scored.indices) >= logits.shape[1]:
        return False
    return torch.equal(logits[range(len(logits)), scored.indices], scored.values)


def _same(pooled: Tensor, mean: Tensor) -> bool:
    tolerance = 1e-4 if pooled.dtype == mean.dtype == torch.float32 else 2e-2
    if pooled.shape != mean.shape:
        return False
    difference = (pooled.float() - mean.float()).abs().amax()
    return bool(difference <= tolerance * mean.float().abs().amax())


def _class_weights(linear: nn.Linear, scored: Scores) -> Float[Tensor, "n c"]:
    return linear.weight.detach()[list(scored.indices or ())].float()


def faster_format(model: nn.Module, inputs: Float[Tensor, "n c *size"], precision: Precision) -> torch.memory_format:
    """Return the memory format in which a batch is given to a model.

    Convolutions on a CPU are faster with the channels last, without any change to the model; ``docs/benchmarks.md`` has
    the figures. Few images gain little. A model that answers differently in that format, since it relies on the
    ordinary one, gets the ordinary one: that is tried once, with one image, and remembered while the model lives.
    """
    if inputs.dim() != 4 or inputs.device.type != "cpu" or len(inputs) < _FEW_IMAGES:
        return torch.preserve_format
    if model not in _takes_channels_last:
        convolves = any(isinstance(part, nn.Conv2d) for part in model.modules())
        _takes_channels_last[model] = convolves and _same_in_both_formats(model, inputs[:1], precision)
    return torch.channels_last if _takes_channels_last[model] else torch.preserve_format


_FEW_IMAGES = 4
_takes_channels_last: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _same_in_both_formats(model: nn.Module, image: Tensor, precision: Precision) -> bool:
    tolerance = 1e-3 if precision == "fp32" else 5e-2
    with quiet_pass(model, image.device, precision):
        try:
            plain = [tensor.double() for tensor in tensors_in(model(image.clone()))]
            other = list(tensors_in(model(image.clone(memory_format=torch.channels_last))))
        except Exception:  # whatever a model does that finds its input in another order than it expects
            return False
        return len(plain) == len(other) and all(
            one.shape == two.shape
            and torch.allclose(one, two.double(), rtol=0, atol=tolerance * _largest(one), equal_nan=True)
            for one, two in zip(plain, other, strict=True)
            if one.numel()
        )


def _largest(tensor: Tensor) -> float:
    return float(tensor.nan_to_num(0, 0, 0).abs().amax())


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that the batch was too large for the device."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
