"""Run the model once for one picture, and then its head many times on changed feature maps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.capture import (
    Pass,
    check_all_ran,
    expand,
    features_of,
    is_absent,
    plain_scores,
    read_layouts,
)
from camkit.engine.cut import EntangledError, cut
from camkit.engine.features import Capture, Features
from camkit.engine.head import Head, recording
from camkit.engine.interrupts import interruptible
from camkit.engine.passes import quiet_pass
from camkit.errors import MethodError
from camkit.targets.confidence import fixed_target
from camkit.targets.scores import Scores, Target

Weigh: TypeAlias = Callable[[Tensor, Head], Tensor]
"""``weigh(activations, head)`` returns the weights of one picture's feature maps (1, C, *grid)."""


def capture_with_head(
    model: nn.Module, image: Float[Tensor, "1 c *size"], targets: Sequence[Target], options: Pass, weigh: Weigh
) -> Capture:
    """Run the model once for one picture, and then its head for what ``weigh`` asks for.

    All passes run in fp32, whatever the precision: the scores of changed feature maps differ by less than the steps of
    16 bits. On MobileNetV2, Ablation-CAM in bf16 correlated with itself in fp32 by as little as 0.70.

    Raises:
        LayerError, TargetError: as for ``capture``.
        MethodError: the head cannot be run alone, or a target is not a score of the model's classes.
    """
    with suppress(EntangledError):
        return _capture(model, image, targets, options, weigh, graph=True)
    return _capture(model, image, targets, options, weigh, graph=False)


def _capture(
    model: nn.Module, image: Tensor, targets: Sequence[Target], options: Pass, weigh: Weigh, *, graph: bool
) -> Capture:
    """Capture it. The head's graph shows whether the model ends in a softmax or sigmoid."""
    each_pass = functools.partial(
        quiet_pass, model, image.device, "fp32", options.record, users_code=options.users_code
    )
    with each_pass(), ExitStack() as recordings:
        recorded = {ref: recordings.enter_context(recording(model, ref)) for ref in options.modules}
        with cut(options.modules, gradients=graph) as tape, interruptible():
            output = model(image.clone())
        check_all_ran(tape, options.modules)
        layouts = read_layouts(tape, options, 1, tuple(image.shape[2:]))
        single = expand(targets, output, 1)
        scores = plain_scores(single, output, 1)
        fixed = [_fixed(*pair, output) for pair in zip(single, scores, strict=True)]
        del output  # frees the graph
    features: list[Features] = []
    for ref, layout in layouts.items():
        weights: list[Tensor] = []
        maps = features_of(tape.layers[ref], layout)
        for target, scored in zip(fixed, scores, strict=True):
            if is_absent(scored):
                weights.append(torch.zeros_like(maps.activations))
                continue
            if not bool(scored.values.isfinite().all() and maps.activations.isfinite().all()):
                weights.append(torch.full_like(maps.activations, torch.nan))
                continue
            score = functools.partial(_values, target)
            head = Head(
                model, ref, layout, image, recorded[ref], score, float(scored.values[0]), each_pass, apart=options.apart
            )
            weights.append(weigh(head.activations, head))
        features.append(replace(maps, by_target=tuple(weights)))
    return Capture(tuple(features), scores, tuple(layouts.values()))


def _fixed(target: Target, scored: Scores, output: Any) -> Target:
    """Return the target that scores the same class, whatever the changed feature maps do to the others.

    Raises:
        MethodError: the target is a box, which changed feature maps would move.
    """
    if scored.boxes is not None:
        raise MethodError(
            "methods that run the model's head on changed feature maps explain scores, not boxes; use 'gradcam' or "
            "'hirescam'"
        )
    return fixed_target(target, scored, output) if not is_absent(scored) else target


def _values(target: Target, output: Any, batch: int) -> Tensor:
    return target(output, batch).values
