"""The results of one pass through a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from camkit.engine.nested import mapped
from camkit.methods.registry import Method
from camkit.targets.scores import Scores
from camkit.types import Extent, Layout


@dataclass(frozen=True, eq=False)
class Features:
    r"""One layer's feature maps (N, C, \*grid), and for each target the tensor that weights them.

    ``by_target`` holds the gradients (N, C, \*grid), the class weights (N, C) of a linear head, or the finished weights
    of a method that was called during the pass. ``extent`` is the part of the grid that lies on the input.
    """

    activations: Float[Tensor, "n c *grid"]
    by_target: tuple[Tensor, ...]
    extent: Extent = ()


@dataclass(frozen=True, eq=False)
class Capture:
    """The result of one pass: features and layouts per layer, in the order given, and scores per target.

    ``resized`` is True if the model resized and padded its input itself.
    """

    features: tuple[Features, ...]
    scores: tuple[Scores, ...]
    layouts: tuple[Layout, ...] = ()
    resized: bool = False


def weigh(method: Method, *given: Any) -> Tensor:
    """Return the weights of a method. A function of the user's gets copies, since it may work in place."""
    if method.users:
        given = mapped(given, lambda value: value.clone() if isinstance(value, Tensor) else value)
    return method.weights(*given)
