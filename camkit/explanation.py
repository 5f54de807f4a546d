"""What leaves camkit: one picture, one target, one map."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from camkit.drawing import overlay
from camkit.drawing.encode import encode, shrink
from camkit.engine.heatmap import fuse_heatmaps
from camkit.errors import InputError, OutputError
from camkit.images.files import write_file
from camkit.images.prepare import as_pixels
from camkit.types import Box, Extent, Fusion, Pixels, Status, Style

_NOTEBOOK_SIDE = 480


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """What a heatmap is made from: for each layer the signed map on its grid, and how they become one.

    Attributes:
        raws: (h, w) for each layer.
        extents: of the layers' grids.
        fuse: how several layers become one map.
        size: of the model's input.
    """

    raws: tuple[Tensor, ...]
    extents: tuple[Extent, ...]
    fuse: Fusion
    size: tuple[int, ...]

    def heatmap(self) -> Float[np.ndarray, "*size"]:
        """Return the heatmap, at the size of the model's input."""
        raws = [raw[None] for raw in self.raws]
        return np.asarray(fuse_heatmaps(raws, self.size, self.fuse, self.extents)[0].numpy())

    def has_evidence(self) -> bool:
        """Tell whether the heatmap is not zero everywhere."""
        if len(self.raws) == 1 and not self.extents[0]:
            return bool((self.raws[0] > 0).any())
        return bool(self.heatmap().any())


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why a model gave one score to one picture.

    Attributes:
        maps: what the heatmap is made from.
        raw: (h, w) float32, the signed map on the layer's grid, in the units of the score: comparable between pictures.
            Of several layers, their maps fused, each divided by its largest absolute value. Where the model pads its
            input, the grid is that of the padded input.
        target: the class index, or None for a target function.
        label: the class's name, or the target function's; None where no name is known.
        score: the target's value, for a class its logit.
        probability: softmax of the logits (sigmoid for a single logit); None for a target function.
        layer: the layer's name; several are joined by "+".
        layer_reason: why this layer was chosen.
        method: the method's name.
        status: "ok"; or, with a heatmap that is all zero: "no_positive_evidence" when no cell speaks for the target,
            "no_influence" when the target does not change with the layer at all, "non_finite" when the map holds NaN or
            infinity.
        box: the part of the original picture the model saw, in its pixels; None when the preprocessing could not be
            followed, and then ``picture`` is the model's input.
        shown: the original picture, H x W x 3 uint8 RGB, or the model's input (C, H, W); ``picture`` draws it.
        source: the file's name, or where there is none "picture 3" for the third of the call.
        detection: of a detector, the box that was explained, in pixels of ``picture``.
        extent: where the input begins and ends along each axis of ``raw``, as shares of it; empty where it is all.
    """

    maps: LayerMaps = field(repr=False)
    raw: Float[np.ndarray, "..."]
    target: int | None
    label: str | None
    score: float
    probability: float | None
    layer: str
    layer_reason: str
    method: str
    status: Status
    box: Box | None
    shown: Pixels | Tensor | None = field(repr=False)
    source: str
    detection: Box | None = None
    extent: Extent = ()

    @functools.cached_property
    def heatmap(self) -> Float[np.ndarray, "*size"]:
        """(H, W) float32 at the size of the model's input, 0..1; 0 always means no evidence.

        (L,) for a signal, (D, H, W) for a volume. It is drawn from ``raw`` when it is first asked for.
        """
        return self.maps.heatmap()

    @functools.cached_property
    def picture(self) -> Pixels | None:
        """The original picture, H x W x 3 uint8 RGB, or what the model saw; None if that is neither grey nor RGB."""
        if not isinstance(self.shown, Tensor):
            return self.shown
        drawn = as_pixels(self.shown[None])
        return None if drawn is None else drawn[0]

    def overlay(self, *, style: Style = "overlay", colormap: str = "turbo", alpha: float = 0.5) -> Pixels:
        """Draw the heat onto the original picture.

        Args:
            style: "overlay", "side-by-side" or "heatmap".
            colormap: one of OpenCV's, by name.
            alpha: weight of the colours, 0..1.

        Returns:
            A picture, height x width x 3, uint8 RGB.

        Raises:
            InputError: an unknown style or colormap, alpha out of range, or a map that isn't of two axes.
        """
        if self.heatmap.ndim != 2:
            raise InputError(f"a map with {self.heatmap.ndim} axes is no picture; draw its heatmap yourself")
        return overlay.render(
            self.picture,
            self.heatmap,
            self.box,
            style=style,
            colormap=colormap,
            alpha=alpha,
            detection=self.detection,
        )

    def save(self, path: str | Path, *, style: Style = "overlay", colormap: str = "turbo", alpha: float = 0.5) -> Path:
        """Write the drawn picture to a file, whole or not at all; the ending decides the type. Folders are made.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        path = Path(path)
        if not path.name:
            raise OutputError(f"{str(path)!r} is no name for a file")
        drawn = self.overlay(style=style, colormap=colormap, alpha=alpha)
        write_file(path, encode(drawn, path.suffix or ".png"))
        return path

    @property
    def peak(self) -> tuple[float, float] | None:
        """Where the map is largest, as (x, y) on the original picture (or the input); None for an empty map."""
        if self.status != "ok" or self.heatmap.ndim != 2:
            return None
        row, column = np.unravel_index(int(self.heatmap.argmax()), self.heatmap.shape)
        height, width = self.heatmap.shape
        box = self.box or Box(0, 0, width, height)
        return (
            float(box.left + (column + 0.5) * (box.right - box.left) / width),
            float(box.top + (row + 0.5) * (box.bottom - box.top) / height),
        )

    @property
    def name(self) -> str:
        """What was explained, in words: the label, else the class's number."""
        return self.label if self.label is not None else f"class {self.target}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pictures as plain JSON values; ``raw`` as nested lists; None where not finite."""
        cells = self.raw.astype(object)
        cells[~np.isfinite(self.raw)] = None
        return {
            "source": self.source,
            "target": self.target,
            "label": self.label,
            "score": _or_none(self.score),
            "probability": None if self.probability is None else _or_none(self.probability),
            "layer": self.layer,
            "layer_reason": self.layer_reason,
            "method": self.method,
            "status": self.status,
            "box": None if self.box is None else list(self.box),
            "detection": None if self.detection is None else list(self.detection),
            "peak": None if self.peak is None else list(self.peak),
            "raw": cells.tolist(),
        }

    def __repr__(self) -> str:
        """Return one line that says what was explained, and how."""
        share = "" if self.probability is None else f" {self.probability:.1%}"
        return f"<Explanation of {self.name!r}{share} by {self.method} at {self.layer!r}: {self.status}>"

    def _repr_png_(self) -> bytes:
        """Show the overlay in a notebook."""
        drawn = self.overlay()
        longest = max(drawn.shape[:2])
        return encode(shrink(drawn, _NOTEBOOK_SIDE) if longest > _NOTEBOOK_SIDE else drawn)
