"""The passes of methods that take one picture, and run the model, or the part of it after a layer, many times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.attach import precise, with_tensors
from camkit.engine.cut import cut
from camkit.engine.guard import ModelRecord, interruptible
from camkit.engine.head import Head, recording
from camkit.engine.heatmap import enlarge, upsample
from camkit.engine.passes import (
    Capture,
    Features,
    Pass,
    ReferenceMaps,
    detached,
    faster_format,
    in_parts,
    is_absent,
    kept_reference_maps,
    to_grid,
)
from camkit.errors import MethodError, TargetError
from camkit.methods.registry import Method
from camkit.models.modules import usual_batch_size
from camkit.targets.classes import ConfidenceTarget, FinerTarget, TopTarget, against_rivals, fixed_target
from camkit.targets.scores import Scores, Target, maps_of
from camkit.types import Activation, LayerRef, PicturesOf, Placement, Precision, ReferenceScores

_AT_ONCE_CPU, _AT_ONCE = 16, 64
"""Changed pictures per pass on a CPU and elsewhere; halved if memory runs out. On two cores, MobileNetV2 and ResNet-18
are fastest with 8 to 16 pictures, whose feature maps stay in the cache."""


def at_once(device: torch.device) -> int:
    """Return how many changed pictures one pass takes."""
    return _AT_ONCE_CPU if device.type == "cpu" else _AT_ONCE


def refuse_boxes(scores: Sequence[Scores], does: str) -> None:
    """Refuse a detector's boxes, for methods that do what is said.

    Raises:
        MethodError: a target is a box.
    """
    if any(scored.boxes is not None for scored in scores):
        raise MethodError(f"methods that {does} explain scores, not boxes; use 'gradcam' or 'hirescam'")


def only_layer(options: Pass, does: str) -> LayerRef:
    """Return the layer of a pass, for methods that do what is said.

    Raises:
        MethodError: several layers are fused.
    """
    if len(options.modules) > 1:
        raise MethodError(
            f"methods that {does} explain one layer; name one, or use 'gradcam' or 'hirescam', which fuse several"
        )
    return next(iter(options.modules))


def of_pictures(options: Pass, method: Method) -> Capture:
    """Run the model once for one picture, and then on the changed pictures that the method makes.

    Without layers, the method gets the picture in place of feature maps.

    Raises:
        MethodError: a target is a part of a box.
    """
    image = options.inputs
    with options.forward(gradients=False, leaf=True) as run, interruptible():
        scores = run.scores()
        existing = [pair for pair in zip(run.targets, scores, strict=True) if not is_absent(pair[1])]
        if any(scored.boxes is not None and getattr(target, "part", None) is not None for target, scored in existing):
            raise MethodError(
                "methods that run the model on changed pictures explain the score of a box, not a part of it; use "
                "'hirescam'"
            )
        fixed = [
            ConfidenceTarget(fixed_target(target, scored), "" if scored.boxes is not None else run.score(target).final)
            for target, scored in existing
        ]
        captured = run.captured(run.features(), scores)
    del run  # frees the graph
    features: list[Features] = []
    for explained in captured.features or [Features(image, ())]:
        # The papers spread a map evenly to mask the picture, wherever its cells are drawn.
        pictures = ChangedPictures(options, fixed, Placement(explained.placement.extent))
        by_target = method.weigh(explained.activations, pictures).split(1) if fixed else ()
        rows = iter(by_target)
        none = torch.zeros_like(explained.activations)
        weights = tuple(none if is_absent(scored) else next(rows) for scored in scores)
        features.append(replace(explained, by_target=weights))
    return replace(captured, features=tuple(features))


class ChangedPictures:
    """Returns the scores of changed pictures; ``camkit.types.ScoresOfPictures`` says what methods may use.

    Args:
        options: the pass of the picture; each later pass finds the model as this one did.
        targets: what to score; each has one score, and one confidence, per picture.
        placement: where the cells of the layer's grid lie when maps are enlarged.
    """

    def __init__(self, options: Pass, targets: Sequence[ConfidenceTarget], placement: Placement) -> None:
        self.image = options.inputs.detach()
        self._options, self._targets, self._placement = options, targets, placement
        self._at_once = at_once(self.image.device) if options.apart else 1
        batch = self.image.expand(at_once(self.image.device), *self.image.shape[1:])
        self._memory_format = faster_format(options.model, batch, options.precision, options.record)

    def enlarge(self, maps: Float[Tensor, "m *grid"], size: tuple[int, ...] | None = None) -> Float[Tensor, "m *size"]:
        """Interpolate maps to another size; None stands for the picture's."""
        return enlarge(maps, tuple(self.image.shape[2:]), self._placement) if size is None else upsample(maps, size)

    def __call__(self, count: int, pictures: PicturesOf, *, probabilities: bool = False) -> Float[Tensor, "t m"]:
        """Return the scores of changed pictures, or their probabilities where the targets have any."""
        scores = [self.image.new_zeros(len(self._targets), 0, dtype=torch.float32)]
        tell = self._options.progress or (lambda *_: None)

        targets = self._targets if probabilities else [target.of for target in self._targets]

        def run(part: range) -> None:
            tell(part.start, count)
            changed = pictures(part)
            with self._options.quiet(), interruptible():
                inputs = changed.to(self.image.dtype, memory_format=self._memory_format)
                # Tensors of the caller's inference mode cannot be written to in this pass, and the model may do so.
                output = self._options.model(inputs.clone() if inputs.is_inference() else inputs)
                rows = [target(output, len(part)).values.detach().float() for target in targets]
            for row in rows:
                if row.shape != (len(part),):
                    raise MethodError(f"the model returned scores of shape {tuple(row.shape)} for {len(part)} pictures")
            scores.append(torch.stack(rows))

        self._at_once = in_parts(count, self._at_once, run)
        tell(count, count)
        return torch.cat(scores, 1)


def of_scores(options: Pass, method: Method) -> Capture:
    """Run the model once for one picture, and then its head for what the method asks for.

    The method gets the feature maps of the picture (1, C, *grid), and a ``Head``.

    All passes run in fp32, whatever the precision: the scores of changed feature maps differ by less than the steps of
    16 bits. On MobileNetV2, Ablation-CAM in bf16 correlated with itself in fp32 by as little as 0.70.

    Raises:
        MethodError: the head cannot be run alone, or a target is not a score of the model's classes.
    """
    options = replace(options, precision="fp32")
    recordings = [recording(options.model, ref) for ref in options.modules]
    with options.forward(*recordings, whole=True) as run, interruptible():
        layouts, recorded = run.layouts, run.entered
        captured = run.captured(run.features(), run.scores())
        fixed = _same_classes(run.targets, captured.scores)
    del run  # frees the graph
    features: list[Features] = []
    for ref, record, maps in zip(layouts, recorded, captured.features, strict=True):
        weights: list[Tensor] = []
        for target, scored in zip(fixed, captured.scores, strict=True):
            weight = _missing(maps, scored)
            if weight is None:
                value = functools.partial(_values, [target])
                head = Head(options, ref, layouts[ref], record, value, float(scored.values[0]))
                weight = method.weigh(head.activations, head)
            weights.append(weight)
        features.append(replace(maps, by_target=tuple(weights)))
    return replace(captured, features=tuple(features))


def _same_classes(targets: Sequence[Target], scores: Sequence[Scores]) -> list[Target]:
    """Return the targets that score the same classes, whatever the changed feature maps do to the others."""
    refuse_boxes(scores, "run the model's head on changed feature maps")
    return [fixed_target(*pair) if not is_absent(pair[1]) else pair[0] for pair in zip(targets, scores, strict=True)]


def _missing(maps: Features, scored: Scores) -> Tensor | None:
    """Return the map of a target that does not exist, or whose score or maps are not finite; else None."""
    if is_absent(scored):
        return torch.zeros_like(maps.activations)
    is_finite = bool(scored.values.isfinite().all() and maps.activations.isfinite().all())
    return None if is_finite else torch.full_like(maps.activations, torch.nan)


def of_references(options: Pass, method: Method) -> Capture:
    """Run the model once for one picture, and its head with gradients between the references' maps and the picture's.

    The method gets the activations (1, C, *grid), those of the M references and the gradients (M, C, *grid).
    The layer's whole output moves from a reference to the picture, with tokens that are not cells. Everything beside it
    stays as the picture gave it. All passes run in fp32, as for ``of_scores``.

    Raises:
        MethodError: several layers are fused, the head cannot be run alone, or a target is not a score.
    """
    options, ref = replace(options, precision="fp32"), only_layer(options, "compare a picture with references")
    with options.forward(recording(options.model, ref), whole=True) as run, interruptible():
        (recorded,), (layout,), (maps,) = run.entered, run.layouts.values(), run.features()
        captured = run.captured([maps], run.scores())
        all_fixed = _same_classes(run.targets, captured.scores)
        weights = [_missing(maps, scored) for scored in captured.scores]
        numbers = [number for number, missing in enumerate(weights) if missing is None]
        fixed = [all_fixed[number] for number in numbers]
        compared = [against_rivals(target, run.score(target)) for target in fixed]
        own = [detached(run.score(target)) for target in compared]
    del run  # frees the graph
    scores: list[ReferenceScores | None] = [None] * len(weights)
    if numbers:
        values = torch.cat([captured.scores[number].values for number in numbers])
        head = Head(options, ref, layout, recorded, functools.partial(_values, fixed), values)
        words, references = _references(options, ref, head)
        steps = head.output.float() - references.outputs.float()
        shares = torch.movedim(_shares(len(references)).to(steps).reshape(-1, *[1] * (steps.dim() - 1)), 0, head.images)
        points = (references.outputs.float() + shares * steps).to(head.output.dtype)
        gradients = head.gradients(points, compared)
        of_references = to_grid(references.outputs, layout)
        for number, target, scored, gradient in zip(numbers, compared, own, gradients, strict=True):
            weights[number] = method.weigh(maps.activations, of_references, to_grid(gradient, layout))
            products = steps * gradient.float()
            elsewhere = float(products.sum() - to_grid(products, layout).sum()) / len(references)
            mean = float(references.scores(target).mean())
            quantity = scored.quantity if isinstance(scored.quantity, str) else scored.quantity[0]
            scores[number] = ReferenceScores(words, quantity, float(scored.values), mean, elsewhere)
    by_target = tuple(weight for weight in weights if weight is not None)
    return replace(captured, features=(replace(maps, by_target=by_target),), references=tuple(scores))


def _values(targets: Sequence[Target], output: Any, batch: int) -> Float[Tensor, "n *k"]:
    """Return the scores of several targets (N, K), or of one (N,)."""
    return torch.stack([precise(target(output, batch).values) for target in targets], 1).squeeze(1)


def _references(options: Pass, ref: LayerRef, head: Head) -> tuple[str, ReferenceMaps]:
    """Return what the reference pictures are, in words, and what the model and the layer return for them."""
    assert options.references is not None
    pictures = options.references(options.inputs)
    record = options.record or ModelRecord.of_model(options.model)
    of_references = replace(options, inputs=pictures.inputs.to(options.inputs))
    run = functools.partial(_run_references, of_references, ref, head.images)
    references = kept_reference_maps(record, (ref, pictures.key), run)
    expected = list(head.output.shape)
    expected[head.images] = len(references)
    if list(references.outputs.shape) != expected:
        raise MethodError(
            f"layer {str(ref)!r} returns outputs of another shape for the reference pictures than for the picture; "
            "choose another layer, or use 'gradcam'"
        )
    return pictures.words, references


def _run_references(options: Pass, ref: LayerRef, axis: int) -> ReferenceMaps:
    """Run the model on reference pictures, which lie along an axis of the layer's output."""
    outputs: list[Tensor] = []
    answers: list[tuple[Any, int]] = []

    def run(part: range) -> None:
        modules = {ref: options.model.get_submodule(ref.name)}
        with options.quiet(), cut(modules, gradients=False) as tape, interruptible():
            output = options.model(options.inputs[part.start : part.stop].clone())
            outputs.append(tape.layers[ref].output)
            answers.append((with_tensors(output, Tensor.detach), len(part)))

    in_parts(len(options.inputs), usual_batch_size(options.inputs.device) if options.apart else 1, run)
    return ReferenceMaps(torch.cat(outputs, axis), tuple(answers))


def _shares(count: int) -> Float[Tensor, " count"]:
    """Return how far on the way from each reference to the picture the gradient is taken: one in each equal part.

    They are in random order, so that they do not follow an order of the references; and the same in every run.
    """
    generator = torch.Generator().manual_seed(0)
    parts = torch.randperm(count, generator=generator)
    return (parts + torch.rand(count, generator=generator)) / count


class PictureScores:
    """Returns the scores of changed versions of one picture.

    The target is fixed by the picture itself: if it is the best class, it stays the class that is best for the
    unchanged picture. The model is left as it was after each call.

    Args:
        model: the model.
        picture: the model's input (C, *size), on the model's device and in its type.
        target: a target for one picture.
        activation: what turns the model's scores into probabilities.
        precision: as for ``Explainer``.
        at_once: pictures per pass; halved if memory runs out.
        current: returns the model's record.

    Raises:
        TargetError: the target does not exist in the picture, or is a box, which a changed picture would move.

    Attributes:
        picture: the model's input.
        target: the target, fixed.
        confidence_target: the target whose scores are returned.
        answer: the target's score of the unchanged picture, with its class and probability.
        confidence: its probability, or the score itself if the target has no probability.
        best: the class that the model itself answers, and its probability (None if it has none). ``best`` is None if
            the output is no list of class scores.
        quantity: what the confidence is: "probability", or the target's own phrase.
        passes: how many pictures have been run through the model so far.
    """

    def __init__(
        self,
        model: nn.Module,
        picture: Float[Tensor, "c *size"],
        target: Target,
        activation: Activation | None,
        precision: Precision,
        at_once: int,
        current: Callable[[], ModelRecord],
    ) -> None:
        self.picture, self.at_once, self.passes = picture, at_once, 1
        self._options, self._current = Pass(model, picture[None], (), precision=precision), current
        # The graph of this pass shows whether the model returns probabilities.
        with replace(self._options, record=current()).forward(leaf=True) as run:
            output = run.output
            answer = target(output, 1)
            if answer.boxes is not None:
                raise TargetError(
                    "a detector's box moves when the picture changes; pass a target function that scores a class"
                )
            if is_absent(answer):
                raise TargetError(answer.absence)
            self.target = fixed_target(target, answer)
            of_class = self.target.of if isinstance(self.target, FinerTarget) else self.target
            self.confidence_target = ConfidenceTarget(of_class, answer.final)
            first = self.confidence_target(output, 1)
            self.best = _best_class(output, activation)
        self.answer = detached(answer)
        self.confidence = float(first.values[0])
        self.quantity = first.quantity if isinstance(first.quantity, str) else first.quantity[0]

    def __call__(self, pictures: Float[Tensor, "m c *size"]) -> Float[Tensor, " m"]:
        """Return the confidence of each picture, as float32 on the CPU.

        The pictures may have any floating-point type and lie on any device; one pass takes ``at_once`` of them.
        """
        options = replace(self._options, record=self._current())
        scores: list[Tensor] = []

        def run(numbers: range) -> None:
            part = pictures[numbers.start : numbers.stop].to(self.picture.device, self.picture.dtype)
            memory_format = faster_format(options.model, part, options.precision, options.record)
            with options.quiet(), interruptible():
                output = options.model(part.clone(memory_format=memory_format))
                scores.append(self.confidence_target(output, len(part)).values.cpu())

        self.at_once = in_parts(len(pictures), self.at_once, run)
        self.passes += len(pictures)
        return torch.cat(scores) if scores else torch.zeros(0)


def _best_class(output: Any, activation: Activation | None) -> tuple[int, float | None] | None:
    """Return the best class of an output for one picture, and its probability."""
    target = TopTarget(activation=activation)
    with suppress(TargetError):
        top = target(output, 1) if maps_of(output, 1) is None else None
        # A single score says yes or no to the same class.
        if top is not None and top.indices is not None and top.classes != 1:
            sure = None if top.probabilities is None else ConfidenceTarget(target, top.final)(output, 1).values[0]
            return top.indices[0], None if sure is None else float(sure)
    return None
