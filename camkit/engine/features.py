"""What one pass through a model brings back."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from camkit.targets.scores import Scores
from camkit.types import Extent, Layout


@dataclass(frozen=True, eq=False)
class Features:
    r"""What the hooks saved of one layer: feature maps (N, C, \*grid), and for each target what weights them.

    ``by_target`` holds the gradients (N, C, \*grid), or the class weights (N, C) of a linear head. ``extent`` is the
    part of the grid that lies on the input.
    """

    activations: Float[Tensor, "n c *grid"]
    by_target: tuple[Tensor, ...]
    extent: Extent = ()


@dataclass(frozen=True, eq=False)
class Capture:
    """The result of running the model once: features and layouts per layer in the order given, scores per target.

    ``resized`` is set if the model resized and padded its input itself.
    """

    features: tuple[Features, ...]
    scores: tuple[Scores, ...]
    layouts: tuple[Layout, ...] = ()
    resized: bool = False
