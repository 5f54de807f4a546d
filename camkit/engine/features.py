"""The results of one pass through a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from camkit.engine.nested import mapped
from camkit.errors import MethodError
from camkit.methods.registry import Method
from camkit.targets.outputs import describe
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


def weigh(method: Method, *given: Any) -> Tensor:
    """Return the weights of a method. A function of the user's gets copies, since it may work in place.

    Raises:
        MethodError: it does not return a dense floating-point tensor. Each pass checks the shape.
    """
    if not method.users:
        return method.weights(*given)
    weights = method.weights(*mapped(given, lambda value: value.clone() if isinstance(value, Tensor) else value))
    is_dense = isinstance(weights, Tensor) and weights.layout is torch.strided and not weights.is_nested
    if not is_dense or not weights.is_floating_point() or not weights.dim():
        kind = describe(weights) + (f" of {weights.dtype}" if isinstance(weights, Tensor) else "")
        raise MethodError(f"method {method.name!r} must return a dense floating-point tensor of weights, not {kind}")
    return weights.detach()
