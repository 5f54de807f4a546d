"""The result of explaining one picture for one target."""

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
"""The longest side of a picture shown in a notebook, in pixels: it fits beside the code."""


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The signed maps of the layers on their grids, from which the heatmap is drawn.

    Attributes:
        raws: a map (h, w) for each layer.
        extents: the part of each layer's grid that lies on the input.
        fuse: how the maps of several layers are combined.
        size: the size of the model's input.
    """

    raws: tuple[Tensor, ...]
    extents: tuple[Extent, ...]
    fuse: Fusion
    size: tuple[int, ...]

    def heatmap(self) -> Float[np.ndarray, "*size"]:
        """Return the heatmap at the size of the model's input."""
        raws = [raw[None] for raw in self.raws]
        return np.asarray(fuse_heatmaps(raws, self.size, self.fuse, self.extents)[0].numpy())

    def has_evidence(self) -> bool:
        """Tell whether the heatmap has a positive value."""
        if len(self.raws) == 1 and not self.extents[0]:
            return bool((self.raws[0] > 0).any())
        return bool(self.heatmap().any())


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why a model gave a picture its score for one target.

    Attributes:
        maps: the layers' maps that the heatmap is drawn from.
        raw: (h, w) float32, the signed map on the layer's grid, in the units of the score, so that pictures can be
            compared. For several layers, their maps are each divided by their largest absolute value and then fused. If
            the model pads its input, the grid covers the padded input.
        target: the class index, or None for a target function.
        label: the name of the class or of the target function; None if it has no name.
        score: the target's value; for a class, its logit, or its probability if the model returns that.
        probability: softmax of the logits (sigmoid for a single logit), or what the model returns if that is a
            probability already; None for a target function.
        layer: the layer's name; several names are joined by "+".
        layer_reason: why this layer was chosen.
        method: the method's name.
        status: "ok", or the reason why the heatmap is zero everywhere: "no_positive_evidence" if no cell supports the
            target, "no_influence" if the target does not depend on the layer, "non_finite" if the map contains NaN or
            infinity.
        box: the part of the original picture that the model saw, in pixels of that picture; None if camkit could not
            follow the preprocessing, and then ``picture`` is the model's input. That is so if it rotates or warps, or
            if what it shows of this picture depends on the content, as with trimmed borders.
        shown: the original picture, H x W x 3 uint8 RGB, or the model's input (C, H, W); ``picture`` is drawn from it.
        source: the file's name; without one, for example "picture 3" for the third picture of the call.
        detection: for a detector, the explained box, in pixels of ``picture``.
        extent: where the input starts and ends along each axis of ``raw``, as shares of the axis; empty if the input
            covers the whole map.
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

        (L,) for a signal, (D, H, W) for a volume. It is drawn from ``maps`` on first use.
        """
        return self.maps.heatmap()

    @functools.cached_property
    def picture(self) -> Pixels | None:
        """The original picture or else the model's input, H x W x 3 uint8 RGB; None if it is neither grey nor RGB."""
        if not isinstance(self.shown, Tensor):
            return self.shown
        drawn = as_pixels(self.shown[None])
        return None if drawn is None else drawn[0]

    def overlay(self, *, style: Style = "overlay", colormap: str = "turbo", alpha: float = 0.5) -> Pixels:
        """Draw the heatmap on the original picture.

        Args:
            style: "overlay", "side-by-side" or "heatmap".
            colormap: the name of one of OpenCV's colormaps.
            alpha: the weight of the colours, 0..1.

        Returns:
            The picture, H x W x 3 uint8 RGB.

        Raises:
            InputError: the style or colormap is unknown, alpha is out of range, or the map does not have two axes.
        """
        if self.heatmap.ndim != 2:
            raise InputError(
                f"a map with {self.heatmap.ndim} axes cannot be drawn as a picture; plot its heatmap yourself"
            )
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
        """Write the overlay to a file; the suffix decides the type.

        Missing folders are created. If writing fails, no partial file is left.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        path = Path(path)
        if not path.name:
            raise OutputError(f"{str(path)!r} is not a file name; pass a path such as 'heatmap.png'")
        drawn = self.overlay(style=style, colormap=colormap, alpha=alpha)
        write_file(path, encode(drawn, path.suffix or ".png"))
        return path

    @property
    def peak(self) -> tuple[float, float] | None:
        """The largest value's position (x, y) on the original picture (or the input); None for an empty map."""
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
        """The label of the target; without one, "class" and its number."""
        return self.label if self.label is not None else f"class {self.target}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pictures as JSON values; ``raw`` becomes nested lists, non-finite numbers None."""
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
        """Return a line with the target, the method, the layer and the status."""
        share = "" if self.probability is None else f" {self.probability:.1%}"
        return f"<Explanation of {self.name!r}{share} by {self.method} at {self.layer!r}: {self.status}>"

    def _repr_png_(self) -> bytes:
        """Show the overlay in a notebook."""
        drawn = self.overlay()
        longest = max(drawn.shape[:2])
        return encode(shrink(drawn, _NOTEBOOK_SIDE) if longest > _NOTEBOOK_SIDE else drawn)
