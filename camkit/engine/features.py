"""The results of one pass through a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from camkit.targets.scores import Scores
from camkit.types import EVEN, Layout, Placement, ReferenceScores


@dataclass(frozen=True, eq=False)
class Features:
    r"""One layer's feature maps (N, C, \*grid), and for each target the tensor that weights them.

    ``by_target`` holds the gradients (N, C, \*grid), the class weights (N, C) of a linear head, or the finished weights
    of a method that was called during the pass. ``placement`` says where the cells lie on the input.
    """

    activations: Float[Tensor, "n c *grid"]
    by_target: tuple[Tensor, ...]
    placement: Placement = EVEN


@dataclass(frozen=True, eq=False)
class Capture:
    """The result of one pass: features and layouts per layer, in the order given, and scores per target.

    ``resized`` is True if the model resized and padded its input itself. ``references`` has, for each target, what the
    picture was compared with; it is empty if it was not, and None stands for a target that does not exist.
    """

    features: tuple[Features, ...]
    scores: tuple[Scores, ...]
    layouts: tuple[Layout, ...] = ()
    resized: bool = False
    references: tuple[ReferenceScores | None, ...] = ()


@runtime_checkable
class Weigh(Protocol):
    """A method that a pass calls, with what it has for it; the docstring of each pass says what that is."""

    @property
    def name(self) -> str:
        """The method's name."""

    def __call__(self, *given: Any) -> Tensor:
        """Return the weights."""
