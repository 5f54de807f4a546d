"""Run the model once for one picture, and then many times on changed pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.capture import (
    Pass,
    expand,
    features_of,
    is_absent,
    layouts_of,
    plain_scores,
    whole_graph,
)
from camkit.engine.cut import cut
from camkit.engine.features import Capture, Features, Weigh
from camkit.engine.heatmap import enlarge, upsample
from camkit.engine.interrupts import interruptible
from camkit.engine.passes import in_parts
from camkit.errors import MethodError
from camkit.targets.confidence import ConfidenceTarget, given_by
from camkit.targets.fixed import fixed_target
from camkit.targets.scores import Scores, Target
from camkit.types import PicturesOf, Placement

_AT_ONCE_CPU, _AT_ONCE = 16, 64
"""Changed pictures per pass on a CPU and elsewhere; halved if memory runs out. On two cores, MobileNetV2 and ResNet-18
are fastest with 8 to 16 pictures, whose feature maps stay in the cache."""


def at_once(device: torch.device) -> int:
    """Return how many changed pictures one pass takes."""
    return _AT_ONCE_CPU if device.type == "cpu" else _AT_ONCE


def capture_with_pictures(
    model: nn.Module, image: Float[Tensor, "1 c *size"], targets: Sequence[Target], options: Pass, weigh: Weigh
) -> Capture:
    """Run the model once for one picture, and then on the changed pictures that the method makes.

    Without layers, the method gets the picture in place of feature maps.

    Raises:
        LayerError, TargetError: as for ``capture``.
        MethodError: a target is a part of a box, or a row of weights is missing.
    """
    each_pass = functools.partial(options.quiet, model, image.device)
    with (
        each_pass(),
        cut(options.modules, gradients=False) as tape,
        options.resizing(model) as resized,
        whole_graph(image) as copy,
        interruptible(),
    ):
        output = model(copy)
        layouts = layouts_of(tape, options, 1, resized.padded or tuple(image.shape[2:]))
        single = expand(targets, output, 1)
        given = [given_by(target(output, 1)) for target in single]
        scores = plain_scores(single, output, 1)
        fixed = [
            ConfidenceTarget(_fixed(target, scored), None if scored.boxes is not None else already)
            for target, scored, already in zip(single, scores, given, strict=True)
            if not is_absent(scored)
        ]
        del output  # frees the graph
    maps = [features_of(tape.layers[ref], layout, resized.extent) for ref, layout in layouts.items()]
    features: list[Features] = []
    for explained in maps or [Features(image, ())]:
        # The papers spread a map evenly to mask the picture, wherever its cells are drawn.
        pictures = ChangedPictures(model, image, fixed, options, each_pass, Placement(explained.placement.extent))
        by_target = weigh(explained.activations, pictures).split(1) if fixed else ()
        if len(by_target) != len(fixed):
            raise MethodError(
                f"method {weigh.name!r} must return one row of weights for each target: {len(fixed)}, not "
                f"{len(by_target)}"
            )
        rows = iter(by_target)
        none = torch.zeros_like(explained.activations)
        weights = tuple(none if is_absent(scored) else next(rows) for scored in scores)
        features.append(replace(explained, by_target=weights))
    return Capture(tuple(features), scores, tuple(layouts.values()), bool(resized.padded))


def _fixed(target: Target, scored: Scores) -> Target:
    """Return the target that scores the same class or the same box, whatever the changed pictures show.

    Raises:
        MethodError: the target is a side of a box, or its objectness.
    """
    if scored.boxes is not None and getattr(target, "part", None) is not None:
        raise MethodError(
            "methods that run the model on changed pictures explain the score of a box, not a part of it; use "
            "'hirescam'"
        )
    return fixed_target(target, scored)


class ChangedPictures:
    """Returns the scores of changed pictures; ``camkit.types.ScoresOfPictures`` says what methods may use.

    Args:
        model: the model.
        image: the picture.
        targets: what to score; each has one score, and one confidence, per picture.
        options: how the passes are run.
        each_pass: returns the context in which one pass is run. Each pass has one of its own, so that each finds the
            model as the first one did.
        placement: where the cells of the layer's grid lie when maps are enlarged.
    """

    def __init__(
        self,
        model: nn.Module,
        image: Float[Tensor, "1 c *size"],
        targets: Sequence[ConfidenceTarget],
        options: Pass,
        each_pass: Callable[[], AbstractContextManager[None]],
        placement: Placement,
    ) -> None:
        self.image = image.detach()
        self._model, self._targets, self._options = model, targets, options
        self._each_pass, self._placement = each_pass, placement
        self._at_once = at_once(image.device) if options.apart else 1

    def enlarge(self, maps: Float[Tensor, "m *grid"], size: tuple[int, ...] | None = None) -> Float[Tensor, "m *size"]:
        """Interpolate maps to another size; None stands for the picture's."""
        return enlarge(maps, tuple(self.image.shape[2:]), self._placement) if size is None else upsample(maps, size)

    def __call__(self, count: int, pictures: PicturesOf, *, probabilities: bool = False) -> Float[Tensor, "t m"]:
        """Return the scores of changed pictures, or their probabilities where the targets have any."""
        scores = [self.image.new_zeros(len(self._targets), 0, dtype=torch.float32)]

        def run(part: range) -> None:
            self._tell(part.start, count)
            scores.append(self._run(pictures(part), probabilities=probabilities))

        self._at_once = in_parts(count, self._at_once, run)
        self._tell(count, count)
        return torch.cat(scores, 1)

    def _tell(self, done: int, count: int) -> None:
        if self._options.progress is not None:
            self._options.progress(done, count)

    def _run(self, pictures: Float[Tensor, "m c *size"], *, probabilities: bool) -> Float[Tensor, "t m"]:
        count = len(pictures)
        targets = self._targets if probabilities else [target.of for target in self._targets]
        with self._each_pass(), interruptible():
            inputs = pictures.to(self.image.dtype, memory_format=self._options.memory_format)
            # Tensors of the caller's inference mode cannot be written to in this pass, and the model may do so.
            output = self._model(inputs.clone() if inputs.is_inference() else inputs)
            rows = [target(output, count).values.detach().float() for target in targets]
        for row in rows:
            if row.shape != (count,):
                raise MethodError(f"the model returned scores of shape {tuple(row.shape)} for {count} changed pictures")
        return torch.stack(rows)
