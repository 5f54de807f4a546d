"""The table itself and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from camkit.errors import MethodError, did_you_mean

WeightFunction = Callable[[Tensor, Tensor], Tensor]
Needs = Literal["gradients", "head"]


@dataclass(frozen=True)
class Method:
    """One way to weight feature maps.

    ``weights(activations, second)`` returns a tensor that broadcasts against the activations (N, C, *grid); ``second``
    is the gradients of the same shape, or, for a method that ``needs`` the head, the class weights (N, C).
    """

    name: str
    title: str
    summary: str
    paper: str
    needs: Needs
    weights: WeightFunction


METHODS: dict[str, Method] = {}


def register(
    name: str, *, title: str, summary: str, paper: str, needs: Needs = "gradients"
) -> Callable[[WeightFunction], WeightFunction]:
    """Enter a weight function into the table under a name."""

    def enter(function: WeightFunction) -> WeightFunction:
        METHODS[name] = Method(name, title, summary, paper, needs, function)
        return function

    return enter


def find_method(name: str) -> Method:
    """Return the method of this name.

    Raises:
        MethodError: there is none; the message names the nearest.

    """
    if not isinstance(name, str):
        raise MethodError(f"a method is one name, for example 'gradcam', not {name!r}")
    if name in METHODS:
        return METHODS[name]
    raise MethodError(f"unknown method {name!r}{did_you_mean(name, METHODS) or '; choose from ' + ', '.join(METHODS)}")
