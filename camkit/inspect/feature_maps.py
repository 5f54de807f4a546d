"""``feature_maps()``: a layer's feature maps for one picture, and a sheet of them, strongest first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from camkit.drawing import overlay
from camkit.drawing.encode import as_html
from camkit.drawing.text import GREY
from camkit.errors import InputError, LayerError, advice
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation
from camkit.images.files import file_name, write_picture
from camkit.images.prepare import as_pixels, prepare
from camkit.kit.tiles import Tile, contact_sheet
from camkit.layers.names import Selector
from camkit.methods import Method
from camkit.methods.activations import KeptMaps
from camkit.models import as_model, refuse_black_box, spatial_rank
from camkit.models.loaded import Loadable, LoadedModel
from camkit.targets.scores import Scores, Target
from camkit.types import ImageLike, Pixels, Preprocess, Spread, TargetLayer

MapScale: TypeAlias = Literal["each", "together"]

_TILE = 128  # the longer side of a map on the sheet, in pixels
_MOST_COLUMNS = 12
_FEWEST_COLUMNS = 4
_WIDE = 1.3  # columns per row of tiles, since captions make a tile higher than wide
_MOST_IN_NOTEBOOK = 64  # maps on the sheet that a notebook shows


@dataclass(frozen=True, eq=False)
class FeatureMaps:
    """A layer's feature maps for one picture, the strongest first.

    Attributes:
        maps: (K, h, w) float32 on the layer's grid, as the layer returned them.
        channels: the index of each map's channel, from 0.
        strengths: the mean absolute value of each map.
        total: the number of channels of the layer.
        layer, model, source: the names of the layer, the model and the picture.
        picture: the model's input as H x W x 3 uint8 RGB, stretched to its full range; None if it is not RGB.
    """

    maps: Float[np.ndarray, "k h w"]
    channels: tuple[int, ...]
    strengths: tuple[float, ...]
    total: int
    layer: str
    model: str
    source: str
    picture: Pixels | None = None

    def sheet(self, *, scale: MapScale = "each") -> Pixels:
        """Draw the maps side by side, strongest first, each with its channel and its largest absolute value.

        If no map is negative anywhere, colours go from dark (zero) to yellow, otherwise from blue over white (zero) to
        red.

        Args:
            scale: "each" stretches every map to its own largest absolute value, which shows its form; "together"
                stretches all maps to the largest of all, so that they can be compared.

        Returns:
            A picture, height x width x 3, uint8 RGB.

        Raises:
            InputError: an unknown scale.
        """
        if scale not in get_args(MapScale):
            raise InputError(f"scale must be {' or '.join(map(repr, get_args(MapScale)))}, not {scale!r}")
        maps = np.nan_to_num(self.maps, nan=0.0, posinf=0.0, neginf=0.0)
        peaks = np.abs(maps).max(axis=(1, 2), initial=0.0)
        limits = peaks if scale == "each" else np.full_like(peaks, peaks.max(initial=0.0))
        signed = bool((maps < 0).any())
        tiles = [] if self.picture is None else [Tile(self.picture, "the picture")]
        for values, limit, channel, peak in zip(maps, limits, self.channels, peaks, strict=True):
            tiles.append(Tile(_coloured(values, float(limit), signed=signed), f"{channel}", f"{float(peak):.3g}", GREY))
        columns = max(_FEWEST_COLUMNS, min(_MOST_COLUMNS, math.ceil(math.sqrt(len(tiles) * _WIDE))))
        height, width = self.maps.shape[1:]
        title = f"{self.model}, layer {self.layer}: {len(self.maps)} of {self.total} maps, strongest first"
        scaled = "each scaled to its own range" if scale == "each" else "all scaled to one range"
        line = f"{height}x{width} cells, {scaled}\nbelow each map: channel and largest absolute value"
        return contact_sheet(tiles, columns, f"{title}\n{line}", side=_TILE)

    def __repr__(self) -> str:
        """Return one line."""
        height, width = self.maps.shape[1:]
        maps = f"{len(self.maps)} of {self.total} maps, {height}x{width}"
        return f"<FeatureMaps of layer {self.layer!r} of {self.model} for {self.source}: {maps}>"

    def _repr_html_(self) -> str:
        """Show the sheet in a notebook, of the strongest maps if there are many."""
        first = replace(self, maps=self.maps[:_MOST_IN_NOTEBOOK], channels=self.channels[:_MOST_IN_NOTEBOOK])
        return as_html(first.sheet(), repr(self))

    def save(self, path: str | Path, *, scale: MapScale = "each") -> Path:
        """Write the sheet to a file, completely or not at all. The suffix decides the type; folders are created.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        return write_picture(file_name(path, "maps.png"), self.sheet(scale=scale))


def feature_maps(
    model: Loadable,
    img: ImageLike,
    layer: Selector | None = None,
    *,
    top: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device | None = None,
) -> FeatureMaps:
    """Compute a layer's feature maps for one picture.

    Args:
        model, preprocess, device: as for ``camkit.explain``; the model comes back exactly as it went in.
        img: one picture: a path, a PIL picture, an array (H, W, 3) or a normalised tensor (C, H, W).
        layer: chosen as in ``camkit.hooks.record``, for example ``"layer4"`` or ``"relu#2"`` for its second call; None
            means the layer that ``explain`` would choose.
        top: return at most this many maps, the strongest; None means all.

    Returns:
        A ``FeatureMaps``, with the largest mean absolute value first.

    Raises:
        LayerError: there is no such layer, several layers match, or the layer's output has no grid of cells.
        InputError: ``top`` is not a whole number from 1, or the picture cannot be read.

    Examples:
        >>> import camkit
        >>> features = camkit.feature_maps("demo-fair", camkit.scenes.scene_paths()["plane-sky"], top=9)
        >>> features.maps.shape, features.total
        ((9, 16, 16), 64)
    """
    if top is not None and (not isinstance(top, (int, np.integer)) or isinstance(top, bool) or top < 1):
        raise InputError(f"top must be a whole number from 1, not {top!r}")
    loaded = as_model(model, preprocess=preprocess, device=device)
    rank = spatial_rank(loaded.module)
    source = str(img) if isinstance(img, (str, Path)) else "the picture"
    if isinstance(img, Tensor) and img.dim() == rank + 2 and len(img) == 1:
        img = img[0]
    tensor = prepare(img, loaded.preprocess, source, rank).tensor
    _, (kept,), chosen = maps_of_one_layer(loaded, [tensor], layer, spread="even")
    maps = kept.float().numpy()
    if maps.ndim != 3:
        raise LayerError(
            f"the maps of layer {str(chosen)!r} have {maps.ndim - 1} axes; only maps with two can be drawn"
        )
    strengths = np.nan_to_num(np.abs(maps).mean(axis=(1, 2)), nan=-1.0, posinf=float(np.finfo(np.float32).max))
    order = np.argsort(-strengths, kind="stable")[:top]
    pictures = as_pixels(tensor[None]) if tensor.dim() == 3 and bool(torch.isfinite(tensor).all()) else None
    return FeatureMaps(
        maps[order],
        tuple(order.tolist()),
        tuple(float(strengths[number]) for number in order),
        len(maps),
        str(chosen),
        loaded.name,
        source,
        None if pictures is None else pictures[0],
    )


class _NoTarget(Target):
    """Scores nothing: feature maps belong to no class."""

    def __call__(self, output: Any, batch: int) -> Scores:  # noqa: ARG002 - every target takes the output
        """Return zeros."""
        return Scores(values=torch.zeros(batch), description="all classes")


def maps_of_one_layer(
    model: LoadedModel,
    pictures: Sequence[ImageLike],
    layer: Selector | None,
    batch_size: int | None = None,
    spread: Spread | None = None,
) -> tuple[list[Explanation], list[Float[Tensor, "c *_"]], TargetLayer]:
    """Return an Explanation of each picture without heat, its feature maps on the CPU, and the layer.

    Raises:
        LayerError: the model is a black box, there is no such layer, several layers match, or its output has no grid.
    """
    refuse_black_box(model.module)
    kept = KeptMaps()
    method = Method("maps", "feature maps", "", "", needs="activations", weights=kept)
    explainer = Explainer(model, layer, method=method, spread=spread)
    rows = explainer.batch(pictures, _NoTarget(), batch_size=batch_size)
    names = sorted({str(each) for each in explainer.layers} | {row.layer for row in rows})
    if len(names) > 1:
        raise LayerError(
            f"feature maps are those of one layer, but these are several: {', '.join(names)}; name one with "
            f"{advice('target_layer=', '--layer')}"
        )
    return rows, kept.maps, explainer.layer


def _coloured(values: Float[np.ndarray, "h w"], limit: float, *, signed: bool) -> Pixels:
    share = values / limit if limit > 0 else np.zeros_like(values)
    if not signed:
        return overlay.colorize(share.astype(np.float32), "inferno")
    cold, middle, warm = (np.array(colour, np.float32) for colour in ((33, 102, 172), (247, 247, 247), (178, 24, 43)))
    towards = np.where(share[..., None] < 0, cold, warm)
    return np.rint(middle + np.abs(share[..., None]) * (towards - middle)).astype(np.uint8)
