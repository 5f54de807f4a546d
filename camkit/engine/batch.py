"""One batch: the one file that joins the steps, layers, capture, methods, heatmap, and what leaves."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from camkit.engine import heatmap as heat
from camkit.engine.capture import capture, capture_for_cam, faster_format, is_out_of_memory
from camkit.engine.features import Capture
from camkit.errors import ImageError, InputError, TargetError
from camkit.explanation import Explanation
from camkit.images.prepare import Prepared, as_pixels, extremes, stacked
from camkit.layers.choose import looked_at, modules_of, resolve
from camkit.methods import Method, find_method
from camkit.models import about_channels, device_of, dtype_of
from camkit.models.loaded import LoadedModel
from camkit.targets.scores import OfPictures, Scores, Target
from camkit.types import Box, Failure, Fusion, LayerChoice, LayerRef, Layout, Precision, Status


@dataclass(frozen=True, eq=False)
class Plan:
    """A call's arguments, checked."""

    model: LoadedModel
    layers: LayerChoice | None
    method: Method | None
    targets: tuple[Target, ...]
    precision: Precision
    batch_size: int
    fuse: Fusion = "mean"


def explain_batch(plan: Plan, batch: list[Prepared]) -> list[Explanation | Failure]:
    """Explain a batch of pictures of one size, in halves where the device has too little memory for all.

    Returns:
        An explanation, or a failure, for each target of each picture, picture by picture.
    """
    try:
        with torch.autocast(device_of(plan.model.module).type, enabled=False):
            return _explain_at_once(plan, batch)
    except RuntimeError as error:
        if len(batch) == 1 or not is_out_of_memory(error):
            raise
    middle = len(batch) // 2
    return explain_batch(plan, batch[:middle]) + explain_batch(plan, batch[middle:])


def _explain_at_once(plan: Plan, batch: list[Prepared]) -> list[Explanation | Failure]:
    module = plan.model.module
    inputs = stacked([item.tensor for item in batch]).to(device_of(module), dtype_of(module))
    low, high = extremes(inputs)
    finite = torch.isfinite(torch.stack([low, high])).all(0).tolist()
    if not all(finite):
        return _without(plan, batch, finite)
    try:
        choice, layouts = looked_at(module, inputs[:1], plan.layers or resolve(module, inputs[:1]))
        captured = _captured(plan, inputs, _targets(plan, batch), choice, layouts)
    except RuntimeError as error:
        sentence = about_channels(module, inputs)
        if sentence is None or is_out_of_memory(error):
            raise
        return [Failure(item.source, _caused(ImageError(sentence), error)) for item in batch]
    size = inputs.shape[2:]
    undrawn = inputs.dim() == 4 and any(item.pixels is None for item in batch)
    drawn = as_pixels(inputs, low, high) if undrawn else None
    explained = []
    for number, scores in enumerate(captured.scores):
        method = plan.method or find_method("gradcam" if scores.boxes is None else "hirescam")
        raws = [
            heat.weighted_sum(method.weights(maps.activations, maps.by_target[number]), maps.activations)
            for maps in captured.features
        ]
        influenced = torch.stack([maps.by_target[number].flatten(1).any(1) for maps in captured.features]).any(0)
        raw, heatmap = heat.fuse(raws, size, plan.fuse, [maps.extent for maps in captured.features])
        rows = _explanations(plan, batch, drawn, choice, method.name, scores, raw, heatmap, influenced.tolist())
        extent = captured.features[0].extent if len(captured.features) == 1 else ()
        explained.append([row if isinstance(row, Failure) else replace(row, extent=extent) for row in rows])
    return [row for rows in zip(*explained, strict=True) for row in _of_one_picture(rows, captured.scores)]


def _of_one_picture(rows: Sequence[Explanation | Failure], asked: Sequence[Scores]) -> list[Explanation | Failure]:
    """Return a picture's explanations, and what is missing of what was asked for."""
    found = zip(rows, asked, strict=True)
    return [row for row, scores in found if isinstance(row, Explanation) or not scores.fewer] or [rows[0]]


def _targets(plan: Plan, batch: Sequence[Prepared]) -> tuple[Target, ...]:
    numbers = [item.number for item in batch]
    return tuple(one.of_pictures(numbers) if isinstance(one, OfPictures) else one for one in plan.targets)


def _captured(
    plan: Plan,
    inputs: Tensor,
    targets: tuple[Target, ...],
    choice: LayerChoice,
    layouts: Mapping[LayerRef, Layout | None] | None,
) -> Capture:
    """Run the model; a probe that is remembered told how the layers' outputs are laid out."""
    module = plan.model.module
    run = functools.partial(
        capture_for_cam if plan.method is not None and plan.method.needs == "head" else capture, module, inputs
    )
    run = functools.partial(run, modules_of(module, choice), targets, precision=plan.precision)
    run = functools.partial(run, memory_format=faster_format(module, inputs, plan.precision))
    return run(layouts=layouts)


def _without(plan: Plan, batch: list[Prepared], finite: list[bool]) -> list[Explanation | Failure]:
    """Explain the pictures of a batch that hold numbers; failures take the places of the others."""
    rows: list[Explanation | Failure] = []
    good: list[Prepared] = []
    for item, usable in zip(batch, finite, strict=True):
        if usable:
            good.append(item)
            continue
        rows += explain_batch(plan, good) if good else []
        good = []
        error = ImageError(f"{item.source} holds NaN or infinite values where the model would see it")
        rows.append(Failure(item.source, error))
    return rows + (explain_batch(plan, good) if good else [])


def _caused(error: ImageError, cause: Exception) -> ImageError:
    error.__cause__ = cause
    return error


def _explanations(
    plan: Plan,
    batch: list[Prepared],
    drawn: np.ndarray | None,
    choice: LayerChoice,
    method: str,
    scores: Scores,
    raw: Tensor,
    heatmap: Tensor,
    influenced: list[bool],
) -> list[Explanation | Failure]:
    """Take one target's maps to the CPU and wrap each with what is known of its picture."""
    heatmaps, raws, values = heatmap.cpu().numpy(), raw.cpu().numpy(), scores.values.tolist()
    labels = plan.model.labels
    if labels is not None and scores.classes not in (None, len(labels)):
        raise InputError(f"{len(labels)} labels were given, but the model has {scores.classes} classes")
    explained: list[Explanation | Failure] = []
    for number, item in enumerate(batch):
        if scores.present is not None and not scores.present[number]:
            explained.append(Failure(item.source, TargetError(f"{item.source}: {scores.absence}")))
            continue
        index = None if scores.indices is None else scores.indices[number]
        if labels is not None and index is not None and index >= len(labels):
            raise InputError(f"{len(labels)} labels were given, but the model found class {index}")
        explained.append(
            Explanation(
                heatmap=heatmaps[number].copy(),
                raw=raws[number].copy(),
                target=index,
                label=scores.description if index is None else _name_of(index, labels),
                score=values[number],
                probability=None if scores.probabilities is None else scores.probabilities[number],
                layer=str(choice),
                layer_reason=choice.reason,
                method=method,
                status=_status(heatmaps[number], raws[number], influenced=influenced[number]),
                box=item.box,
                picture=drawn[number] if item.pixels is None and drawn is not None else item.pixels,
                source=item.source,
                detection=_on_picture(scores, number, item, heatmaps[number].shape),
            )
        )
    return explained


def _name_of(index: int, labels: tuple[str, ...] | None) -> str | None:
    return labels[index] if labels and 0 <= index < len(labels) else None


def _on_picture(scores: Scores, number: int, item: Prepared, size: tuple[int, ...]) -> Box | None:
    """Return a detection's box, given on the model's input, on the picture that is shown."""
    found = None if scores.boxes is None else scores.boxes[number]
    if found is None or len(size) != 2:
        return None
    shown = item.box if item.pixels is not None and item.box is not None else Box(0, 0, size[1], size[0])
    across, down = (shown.right - shown.left) / size[1], (shown.bottom - shown.top) / size[0]
    left, top, right, bottom = found
    return Box(
        shown.left + left * across, shown.top + top * down, shown.left + right * across, shown.top + bottom * down
    )


def _status(heatmap: np.ndarray, raw: np.ndarray, *, influenced: bool) -> Status:
    if not np.isfinite(raw).all():
        return "non_finite"
    if not influenced:
        return "no_influence"
    return "ok" if heatmap.any() else "no_positive_evidence"
