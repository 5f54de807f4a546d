"""What a target is, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """One target's result for a batch: its score, and for a class its index, its probability and their number.

    ``present`` tells for which images there is such a thing at all, and ``absence`` what to say of the others, unless
    there may be fewer: of the second best box, or class above a threshold, nothing is said.
    ``boxes`` holds the detections (left, top, right, bottom) in pixels of the input.
    """

    values: Float[Tensor, " n"]
    indices: tuple[int, ...] | None = None
    probabilities: tuple[float, ...] | None = None
    classes: int | None = None
    description: str | None = None
    present: tuple[bool, ...] | None = None
    absence: str = ""
    fewer: bool = False
    boxes: tuple[tuple[float, ...] | None, ...] | None = None


Target: TypeAlias = Callable[[Any, int], Scores]
"""Scores a model's output for a batch of so many images; the values keep their graph, to be differentiated."""


@runtime_checkable
class Expands(Protocol):
    """A target that stands for as many others as a model's output asks for."""

    def expand(self, output: Any, batch: int) -> Sequence[Target]:
        """Return the targets for this output."""
        ...


@runtime_checkable
class OfPictures(Protocol):
    """A target that differs from picture to picture of a call."""

    def of_pictures(self, numbers: Sequence[int]) -> Target:
        """Return the target for a batch of the call's pictures, given by their numbers, from 1."""
        ...
