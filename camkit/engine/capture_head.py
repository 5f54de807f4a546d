"""Run the model once for one picture, and then its head many times on changed feature maps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

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
)
from camkit.engine.cut import cut
from camkit.engine.features import Capture, Features, Weigh
from camkit.engine.head import Head, ScoreOutput, recording
from camkit.engine.interrupts import interruptible
from camkit.errors import MethodError
from camkit.targets.fixed import fixed_target
from camkit.targets.scores import Scores, Target
from camkit.types import LayerRef, Layout


def capture_with_head(
    model: nn.Module, image: Float[Tensor, "1 c *size"], targets: Sequence[Target], options: Pass, weigh: Weigh
) -> Capture:
    """Run the model once for one picture, and then its head for what the method asks for.

    The method gets the feature maps of the picture (1, C, *grid), and a ``Head``.

    All passes run in fp32, whatever the precision: the scores of changed feature maps differ by less than the steps of
    16 bits. On MobileNetV2, Ablation-CAM in bf16 correlated with itself in fp32 by as little as 0.70.

    Raises:
        LayerError, TargetError: as for ``capture``.
        MethodError: the head cannot be run alone, or a target is not a score of the model's classes.
    """
    with first_pass(model, image, targets, options) as (_, first):
        pass  # the output's graph is not needed
    features: list[Features] = []
    for ref, maps in first.features.items():
        weights: list[Tensor] = []
        for target, scored in zip(first.targets, first.scores, strict=True):
            missing = first.missing(maps, scored)
            if missing is None:
                head = first.head(ref, functools.partial(_values, target), float(scored.values[0]))
                weights.append(weigh(head.activations, head))
            else:
                weights.append(missing)
        features.append(replace(maps, by_target=tuple(weights)))
    return Capture(tuple(features), first.scores, first.layouts)


@dataclass(frozen=True, eq=False)
class FirstPass:
    """What a plain pass of one picture leaves for passes of the head alone.

    Attributes:
        head: ``head(ref, score, expected)`` returns the part of the model after a layer.
        targets: the targets; each stays the same whatever changed feature maps do to the other classes.
        scores: the scores of the picture.
        features: the layers' feature maps.
        layouts: their layouts.
    """

    head: Callable[[LayerRef, ScoreOutput, float | Tensor], Head]
    targets: tuple[Target, ...]
    scores: tuple[Scores, ...]
    features: Mapping[LayerRef, Features]
    layouts: tuple[Layout, ...]

    def missing(self, maps: Features, scored: Scores) -> Tensor | None:
        """Return the map of a target that does not exist, or whose score or maps are not finite; else None."""
        if is_absent(scored):
            return torch.zeros_like(maps.activations)
        is_finite = bool(scored.values.isfinite().all() and maps.activations.isfinite().all())
        return None if is_finite else torch.full_like(maps.activations, torch.nan)


@contextmanager
def first_pass(
    model: nn.Module, image: Float[Tensor, "1 c *size"], targets: Sequence[Target], options: Pass
) -> Iterator[tuple[Any, FirstPass]]:
    """Run the model once for one picture, and yield its output with what its head needs.

    The output has the graph of what comes after the layers. It shows whether the model ends in a softmax or sigmoid.

    Raises:
        LayerError, TargetError: as for ``capture``.
        MethodError: a target is not a score of the model's classes.
    """
    each_pass = each_pass_of(model, image, options)
    with each_pass(), ExitStack() as recordings:
        recorded = {ref: recordings.enter_context(recording(model, ref)) for ref in options.modules}
        with cut(options.modules, whole=True) as tape, interruptible():
            output = model(image.clone())
        layouts = layouts_of(tape, options, 1, tuple(image.shape[2:]))
        single = expand(targets, output, 1)
        scores = plain_scores(single, output, 1)
        fixed = tuple(_fixed(*pair) for pair in zip(single, scores, strict=True))

        def head(ref: LayerRef, score: ScoreOutput, expected: float | Tensor) -> Head:
            apart = options.apart
            return Head(model, ref, layouts[ref], image, recorded[ref], score, expected, each_pass, apart=apart)

        features = {ref: features_of(tape.layers[ref], layout) for ref, layout in layouts.items()}
        yield output, FirstPass(head, fixed, scores, features, tuple(layouts.values()))


def each_pass_of(
    model: nn.Module, image: Float[Tensor, "1 c *size"], options: Pass
) -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which one pass is run: in fp32, and each as if it were the first."""
    return functools.partial(options.quiet, model, image.device, "fp32")


def _fixed(target: Target, scored: Scores) -> Target:
    """Return the target that scores the same class, whatever the changed feature maps do to the others.

    Raises:
        MethodError: the target is a box, which changed feature maps would move.
    """
    if scored.boxes is not None:
        raise MethodError(
            "methods that run the model's head on changed feature maps explain scores, not boxes; use 'gradcam' or "
            "'hirescam'"
        )
    return fixed_target(target, scored) if not is_absent(scored) else target


def _values(target: Target, output: Any, batch: int) -> Tensor:
    return target(output, batch).values
