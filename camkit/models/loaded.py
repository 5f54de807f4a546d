"""A model with what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from camkit.types import Activation, Preprocess


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with what belongs to it: how its pictures are prepared and what its classes are called.

    ``activation`` makes probabilities of its logits; None means the softmax of several and the sigmoid of one.
    """

    module: torch.nn.Module
    name: str
    preprocess: Preprocess | None = None
    labels: tuple[str, ...] | None = None
    note: str | None = None
    activation: Activation | None = None
