"""The result of explaining one picture for one target, and how it is made from what a pass captured."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from camkit.drawing import overlay
from camkit.drawing.encode import encode, shrink
from camkit.engine import heatmap as heat
from camkit.engine.features import Capture, Features
from camkit.errors import InputError, OutputError, TargetError
from camkit.images.files import write_file
from camkit.images.prepare import Prepared, as_pixels
from camkit.methods import Method, check_weights, find_method
from camkit.targets.scores import Scores
from camkit.types import Box, Extent, Failure, Fusion, Pixels, Status, Style, TargetLayer

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
        return np.asarray(heat.fuse_heatmaps(raws, self.size, self.fuse, self.extents)[0].numpy())

    def has_evidence(self) -> bool:
        """Tell whether the heatmap has a positive value."""
        if len(self.raws) == 1 and not self.extents[0]:
            return bool(self.raws[0].numpy().max() > 0)
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
        score: the target's value; for a class, its logit, or its probability if the model returns probabilities.
        probability: softmax of the logits (sigmoid for a single logit), or what the model returns if that is a
            probability already; None for a target function.
        layer: the layer's name; several names are joined by "+".
        layer_reason: why this layer was chosen.
        method: the method's name.
        status: "ok", or the reason why the heatmap is zero everywhere: "no_positive_evidence" if no cell supports the
            target, "no_influence" if the target's gradient at the layer is zero (it does not depend on the layer, or is
            a saturated probability), "non_finite" if the map contains NaN or infinity.
        box: the part of the original picture that the model saw, in pixels of that picture; None if the preprocessing
            rotates or warps, or if its crop depends on the picture's content, such as trimmed borders. ``picture`` is
            then the model's input.
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


def explanations(
    captured: Capture,
    pictures: Sequence[Prepared],
    shown: Sequence[Pixels | Tensor | None],
    layers: Sequence[TargetLayer],
    method: Method | None,
    fuse: Fusion,
    labels: tuple[str, ...] | None,
) -> list[list[Explanation | Failure]]:
    """Turn what one pass captured into an Explanation for each picture and target.

    Args:
        captured: the feature maps, gradients and scores of the pass.
        pictures: the N pictures.
        shown: the pictures to draw on, each shared by all its targets; see ``shown_pictures``.
        layers: the layers that the feature maps come from.
        method: how the maps are weighted; None for the target's own default.
        fuse: how the maps of several layers are combined.
        labels: the names of the classes, if they are known.

    Returns:
        For each picture, an explanation for each target; a Failure for one that does not exist in the picture.
    """
    size = tuple(pictures[0].tensor.shape[1:])
    extents = tuple(maps.extent for maps in captured.features)
    names = "+".join(map(str, layers))
    reason = max((layer.reason for layer in layers), key=len)
    by_target = [
        _weigh(captured.features, number, scores, method or _default_method(scores), fuse)
        for number, scores in enumerate(captured.scores)
    ]
    rows: list[list[Explanation | Failure]] = []
    for place, picture in enumerate(pictures):
        of_picture: list[Explanation | Failure] = []
        rows.append(of_picture)
        for scores, weighed in zip(captured.scores, by_target, strict=True):
            if scores.present is not None and not scores.present[place]:
                of_picture.append(Failure(picture.source, TargetError(f"{picture.source}: {scores.absence}")))
                continue
            index = None if scores.indices is None else scores.indices[place]
            _check_labels(labels, scores, index)
            raw = weighed.fused[place].copy()
            maps = LayerMaps(tuple(part[place].clone() for part in weighed.raws), extents, fuse, size)
            explanation = Explanation(
                maps=maps,
                raw=raw,
                target=index,
                label=scores.description if index is None else _label_of(index, labels),
                score=weighed.scores[place],
                probability=None if scores.probabilities is None else scores.probabilities[place],
                layer=names,
                layer_reason=reason,
                method=weighed.method,
                status=_status(maps, raw, influenced=weighed.influenced[place]),
                box=picture.box,
                shown=shown[place],
                source=picture.source,
                detection=_detection(scores, place, picture, size),
                extent=extents[0] if len(extents) == 1 else (),
            )
            of_picture.append(explanation)
    return rows


def _default_method(scores: Scores) -> Method:
    """Return Grad-CAM; for a detector's boxes HiResCAM, since Grad-CAM weights whole channels, which boxes share."""
    return find_method("gradcam" if scores.boxes is None else "hirescam")


@dataclass(frozen=True)
class _Weighed:
    """The signed maps of a batch for one target.

    Attributes:
        method: the name of the method that weighted them.
        raws: (N, h, w) for each layer.
        fused: (N, h, w), the maps of all layers.
        influenced: for each picture, whether the target depends on any of the layers.
        scores: the target's value for each picture.
    """

    method: str
    raws: tuple[Tensor, ...]
    fused: np.ndarray
    influenced: list[bool]
    scores: list[float]


def _weigh(features: Sequence[Features], number: int, scores: Scores, method: Method, fuse: Fusion) -> _Weighed:
    """Weight and sum the feature maps of each layer for the target with this number."""
    raws = []
    for maps in features:
        weights = method.weights(maps.activations, maps.by_target[number])
        check_weights(method, weights, maps.activations)
        raws.append(heat.weighted_sum(weights, maps.activations))
    influences = (maps.by_target[number].flatten(1).any(1) for maps in features)
    influenced = functools.reduce(torch.logical_or, influences).tolist()
    fused = heat.fuse(raws, fuse).cpu().numpy()
    return _Weighed(method.name, tuple(raw.cpu() for raw in raws), fused, influenced, scores.values.tolist())


def existing(rows: Sequence[Explanation | Failure], scores: Sequence[Scores]) -> list[Explanation | Failure]:
    """Return a picture's explanations, and a Failure for each target that does not exist in it.

    Targets that one target expanded to give no Failure if any of them exists.
    """
    pairs = zip(rows, scores, strict=True)
    return [row for row, scored in pairs if isinstance(row, Explanation) or not scored.fewer] or [rows[0]]


def _check_labels(labels: tuple[str, ...] | None, scores: Scores, index: int | None) -> None:
    if labels is None:
        return
    if scores.classes not in (None, len(labels)):
        raise InputError(f"{len(labels)} labels were given, but the model has {scores.classes} classes")
    if index is not None and index >= len(labels):
        raise InputError(f"{len(labels)} labels were given, but the model found class {index}")


def _label_of(index: int, labels: tuple[str, ...] | None) -> str | None:
    return labels[index] if labels and 0 <= index < len(labels) else None


def shown_pictures(pictures: Sequence[Prepared], inputs: Float[Tensor, "n c *size"]) -> list[Pixels | Tensor | None]:
    """Return the pictures to draw on: the originals or, if these are not shown, copies of the model's inputs."""
    return [
        picture.pixels if picture.pixels is not None or tensor.dim() != 3 else tensor.detach().to("cpu", copy=True)
        for picture, tensor in zip(pictures, inputs, strict=True)
    ]


def _detection(scores: Scores, number: int, item: Prepared, size: tuple[int, ...]) -> Box | None:
    """Return a detection's box in pixels of the picture that is shown."""
    corners = None if scores.boxes is None else scores.boxes[number]
    if corners is None or len(size) != 2:
        return None
    shown = item.box if item.pixels is not None and item.box is not None else Box(0, 0, size[1], size[0])
    across, down = (shown.right - shown.left) / size[1], (shown.bottom - shown.top) / size[0]
    left, top, right, bottom = corners
    return Box(
        shown.left + left * across, shown.top + top * down, shown.left + right * across, shown.top + bottom * down
    )


def _status(maps: LayerMaps, raw: np.ndarray, *, influenced: bool) -> Status:
    if not np.isfinite(raw).all():
        return "non_finite"
    if not influenced:
        return "no_influence"
    return "ok" if maps.has_evidence() else "no_positive_evidence"
