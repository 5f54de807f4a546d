"""Frozen values that several packages share.

All docstrings write shapes the same way: N images, C channels, H x W pixels, h x w grid cells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from camkit.options import Activation, Fusion, Opacity, Precision, Scale, Smoothing, Spread

__all__ = ["Activation", "Fusion", "Opacity", "Precision", "Scale", "Smoothing", "Spread"]  # besides those below

Pixels: TypeAlias = UInt8[np.ndarray, "_ _ 3"]
"""A picture: height x width x RGB."""
ImageLike: TypeAlias = "str | Path | Image.Image | np.ndarray | Tensor"
ReferencesLike: TypeAlias = "str | Path | Tensor | Sequence[ImageLike]"
"""Reference pictures: a folder, a list of pictures, or a batch (N, C, H, W)."""
Preprocess: TypeAlias = Callable[[Image.Image], Tensor]
Status: TypeAlias = Literal["ok", "no_positive_evidence", "no_influence", "non_finite"]
Extent: TypeAlias = tuple[tuple[float, float], ...]
"""Where the input starts and ends along each axis of a grid, as shares of the axis; empty if it covers the whole
grid."""
CellPositions: TypeAlias = tuple[tuple[float, ...], ...]
"""For each axis of a grid, the place of each cell on the input, in pixels: 0 is the middle of the first pixel."""
Style: TypeAlias = Literal["overlay", "side-by-side", "heatmap", "figure"]


class Box(NamedTuple):
    """A rectangle on the original picture, in its pixels; right and bottom are exclusive."""

    left: float
    top: float
    right: float
    bottom: float


class ClipFrame(NamedTuple):
    """A frame that a model of clips saw: its number, from 1, and its time in seconds if that is known."""

    number: int
    time: float | None = None

    def __str__(self) -> str:
        """Return, for example, ``"frame 3, 0.17 s"``."""
        return f"frame {self.number}" + ("" if self.time is None else f", {self.time:.2f} s")


@dataclass(frozen=True)
class Placement:
    """Where the cells of a grid lie on the input.

    Attributes:
        extent: the part of the grid that lies on the input.
        positions: where each cell looks, along each axis; empty if that is not known, or not wanted. The cells are then
            spread evenly over the extent.
        stepped: whether cells are repeated along the first axis, and not interpolated: the frames of a clip.
    """

    extent: Extent = ()
    positions: CellPositions = ()
    stepped: bool = False

    def centres(self, grid: tuple[int, ...], size: tuple[int, ...]) -> CellPositions:
        """Return the place of each cell of a grid along each axis of an input, in pixels."""
        if self.positions:
            return self.positions
        extent = self.extent or ((0.0, 1.0),) * len(size)
        wholes = [side / (end - start) for side, (start, end) in zip(size, extent, strict=True)]
        return tuple(
            tuple(((cell + 0.5) / cells - start) * whole - 0.5 for cell in range(cells))
            for cells, whole, (start, _) in zip(grid, wholes, extent, strict=True)
        )


EVEN = Placement()


LayoutKind: TypeAlias = Literal["channels_first", "channels_last", "tokens", "tokens_last", "sequence_first"]
"""The meaning of the axes of a layer's output; see ``Layout``."""


@dataclass(frozen=True)
class Layout:
    r"""The meaning of the axes of a layer's output.

    ``kind`` is "channels_first" (N, C, \*grid), "channels_last" (N, \*grid, C), "tokens" (N, L, C), "tokens_last"
    (N, C, L) or "sequence_first" (L, N, C); ``prefix`` counts the tokens before the grid (class, distillation,
    registers). ``extent`` is the part of the grid that lies on the input, and ``positions`` say where each cell
    looks if that is known. ``order`` names the grid's axes in the order in which tokens run through them, the last
    fastest; empty if that is the order of the input's axes.
    """

    kind: LayoutKind
    grid: tuple[int, ...]
    prefix: int = 0
    extent: Extent = ()
    positions: CellPositions = field(default=(), compare=False, repr=False)
    order: tuple[int, ...] = ()

    @property
    def has_tokens(self) -> bool:
        """Whether all cells are along one axis."""
        return self.kind in ("tokens", "tokens_last", "sequence_first")

    def __str__(self) -> str:
        """Return, for example, ``"channels_first 7x7"`` or ``"tokens 14x14 after 1"``."""
        grid = "x".join(map(str, self.grid))
        part = "" if not self.extent else ", padding included"
        if any(start < 0 or end > 1 for start, end in self.extent):
            part = ", of a part of the input"
        return f"{self.kind} {grid}" + (f" after {self.prefix}" if self.prefix else "") + part


@dataclass(frozen=True)
class LayerRef:
    """One call of one module: its dotted name and, if it runs several times, the number of the call, starting at 1."""

    name: str
    call: int | None = None

    def __str__(self) -> str:
        """Return the layer as users type it: ``"layer4"`` or ``"layer4.2.relu#3"``."""
        return self.name if self.call is None else f"{self.name}#{self.call}"


@dataclass(frozen=True)
class TargetLayer:
    """The layer that a map is made from: one call of one module, how its output is laid out, and why it is used.

    Attributes:
        name: the module's dotted name.
        call: the number of the call, starting at 1, if the module runs several times.
        layout: how its output is laid out; None before the first input.
        size: the input size for which the layout holds: (H, W), (L,) or (D, H, W).
        reason: why this layer is used, as a phrase.
        runners_up: the next best layers.
        sure: False if camkit cannot tell where the layer's cells lie, or found that the score also depends on other
            layers. ``reason`` says which.
    """

    name: str
    call: int | None = None
    layout: Layout | None = None
    size: tuple[int, ...] = ()
    reason: str = ""
    runners_up: tuple[LayerRef, ...] = ()
    sure: bool = True

    @functools.cached_property
    def ref(self) -> LayerRef:
        """The name and the call, without the rest."""
        return LayerRef(self.name, self.call)

    @property
    def extent(self) -> Extent:
        """The part of the layer's grid that lies on the input; empty for the whole grid."""
        return () if self.layout is None else self.layout.extent

    def __str__(self) -> str:
        """Return the layer as users type it: ``"layer4"`` or ``"layer4.2.relu#3"``."""
        return str(self.ref)


WHOLE_MODEL = TargetLayer("whole model", reason="the method reads the whole model")
"""Replaces the layer if a method reads none."""


class ScoresOfMaps(Protocol):
    """The part of a model after a layer: a function from changed feature maps of one picture to its scores."""

    at_once: int
    """How many changed maps one pass takes."""

    def __call__(self, maps: Tensor) -> Tensor:
        """Return the scores (M,) for changed feature maps (M, C, *grid), which may be overwritten."""


class ScoresOfPictures(Protocol):
    """A model as a function from changed pictures to the scores of T targets, for one picture."""

    image: Tensor
    """The picture as the model receives it, (1, c, *size)."""

    def enlarge(self, maps: Tensor, size: tuple[int, ...] | None = None) -> Tensor:
        """Interpolate maps (M, *grid) to another size; None stands for the picture's."""

    def __call__(self, count: int, pictures: PicturesOf, *, probabilities: bool = False) -> Tensor:
        """Return the scores (T, count) of changed pictures, or their probabilities where the targets have any.

        ``pictures(part)`` makes those with the numbers in ``part``, (M, c, *size); the model may overwrite them.
        """


PicturesOf: TypeAlias = Callable[[range], Tensor]
"""``pictures(part)`` makes the changed pictures with the numbers in ``part``."""

Enlarge: TypeAlias = Callable[[Tensor], Tensor]
"""``enlarge(maps)`` interpolates maps (N, *grid) to the input's size (N, *size)."""

Progress: TypeAlias = Callable[[int, int], None]
"""``progress(done, of)`` is told how many of a method's many pictures the model has seen."""


@dataclass(frozen=True, eq=False)
class PartsOfScore:
    r"""The parts whose sum is the score, each (N, C, \*grid): gradient times input, and gradient times each bias.

    ``rest`` (N,) is the sum of the parts without a place, such as the last linear layer's. ``enlarge`` interpolates
    maps (N, \*grid) to the input's size.
    """

    parts: tuple[Tensor, ...]
    rest: Tensor
    enlarge: Enlarge


@dataclass(frozen=True, eq=False)
class GuidedGradients:
    r"""The guided gradients (N, c, \*size) at the input; if there is a layer, also its ordinary ones (N, C, \*grid).

    ``enlarge`` interpolates maps on the layer's grid (N, \*grid) to the input's size.
    """

    at_input: Tensor
    at_layer: Tensor | None
    enlarge: Enlarge


@dataclass(frozen=True)
class ReferenceScores:
    """The score that a map explains, and that of the reference pictures with which it compares the picture.

    Attributes:
        pictures: what the reference pictures are, as a phrase.
        quantity: what the score is, as a phrase: "log-odds" for a class.
        score: the picture's score.
        mean: the mean score of the reference pictures.
        elsewhere: how much of the difference is at tokens of the layer that are not cells, such as a class token.
    """

    pictures: str
    quantity: str
    score: float
    mean: float
    elsewhere: float = 0.0


@dataclass(frozen=True, eq=False)
class Failure:
    """Replaces an explanation in the results if a picture could not be explained."""

    source: str
    error: Exception

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return {"source": self.source, "status": "error", "error": str(self.error)}
