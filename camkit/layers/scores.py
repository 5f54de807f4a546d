"""The score of a model's output that the stages differentiate, when no target is known yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from camkit.engine.nested import tensors_in
from camkit.targets.outputs import main_tensor, rivals


def detections_in(output: Any) -> bool:
    """Tell whether a model returned boxes: a list with one dictionary per image."""
    boxes = output[0] if isinstance(output, tuple) and output else output
    return isinstance(boxes, list) and bool(boxes) and all(isinstance(item, dict) and "boxes" in item for item in boxes)


def scores_of_boxes(output: Any) -> Tensor | None:
    """Return the logits, or else the scores, of the first picture's boxes; the tensor may be empty."""
    found = (output[0] if isinstance(output, tuple) else output)[0]
    scores = found.get("logits", found.get("scores"))
    return scores if isinstance(scores, Tensor) else None


def scored_tensor(output: Any) -> Tensor | None:
    """Return the tensor that holds an output's scores, else its first tensor; None if none has a gradient.

    If several tensors could hold the scores, they are concatenated. In a pass without gradients, tensors need none.
    """

    def counts(value: Any) -> bool:
        has_graph = isinstance(value, Tensor) and (value.requires_grad or not torch.is_grad_enabled())
        return has_graph and value.is_floating_point() and value.numel() > 0

    several = list(filter(counts, rivals(output)))
    if len(several) > 1:
        return torch.cat([tensor.float().flatten(1) for tensor in several], dim=1)
    return next(filter(counts, (main_tensor(output), *tensors_in(output))), None)


def score_of(output: Any, scored: Tensor, classes: int | None) -> Tensor:
    """Return a classifier's largest logit; for maps of scores, the sum of each cell's largest score.

    For features, if there are no ``classes``, it is a mixture of all values. The caller's own target is not used, since
    it may work for one batch only.
    """
    if classes is None or len(rivals(output)) > 1:
        return mixture(scored)
    return scored.max(1).values.sum() if scored.dim() > 1 else scored.max()


def mixture(features: Tensor) -> Tensor:
    """Return a fixed random projection of features."""
    directions = torch.arange(1, features.numel() + 1, device=features.device, dtype=torch.float32).mul(12.9898)
    return (features.float().flatten() * directions.sin()).sum()
