"""The feature maps of a layer as a sheet, and the concepts that they are made of, as coloured regions."""

from __future__ import annotations

import colorsys
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.drawing import overlay
from camkit.drawing.encode import as_html
from camkit.drawing.figure import Tile, contact_sheet, percent, resized, scaled_box, sheet, shown_size
from camkit.drawing.text import GREY, INK, PAPER, Canvas, fitting, wrapped
from camkit.engine.head import Head, recording
from camkit.engine.heatmap import enlarge
from camkit.engine.passes import Pass
from camkit.errors import InputError, LayerError, MethodError, TargetError, advice, optional, whole_number
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation
from camkit.images.files import write_picture
from camkit.images.prepare import as_pixels, prepare, unbatched
from camkit.inspect.diagnosis import prepared_batch
from camkit.kit.wording import counted
from camkit.layers.names import Selector
from camkit.methods import Method
from camkit.methods.feature_maps import KeptMaps
from camkit.models import Labels, as_model, refuse_black_box, spatial_rank
from camkit.models.loaded import Loadable, LoadedModel
from camkit.targets.scores import ScoreReading, Scores, Target, logits_of, probabilities
from camkit.types import Activation, Box, ImageLike, Pixels, Preprocess, Spread, TargetLayer

MapScale: TypeAlias = Literal["each", "together"]


@dataclass(frozen=True, eq=False)
class OfLayer:
    """Base of the results about one layer: the names of the model and of the layer."""

    model: str
    layer: str


@dataclass(frozen=True, eq=False)
class FeatureMaps(OfLayer):
    """A layer's feature maps for one picture, the strongest first.

    Attributes:
        maps: (K, h, w) float32 on the layer's grid, as the layer returned them.
        channels: the index of each map's channel, from 0.
        strengths: the mean absolute value of each map.
        total: the number of channels of the layer.
        source: the name of the picture.
        picture: the model's input as H x W x 3 uint8 RGB, stretched to its full range; None if it is not RGB.
    """

    maps: Float[np.ndarray, "k h w"]
    channels: tuple[int, ...]
    strengths: tuple[float, ...]
    total: int
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
        # columns per row of tiles, since captions make a tile higher than wide
        columns = max(4, min(12, math.ceil(math.sqrt(len(tiles) * 1.3))))
        height, width = self.maps.shape[1:]
        title = f"{self.model}, layer {self.layer}: {len(self.maps)} of {self.total} maps, strongest first"
        scaled = "each scaled to its own range" if scale == "each" else "all scaled to one range"
        line = f"{height}x{width} cells, {scaled}\nbelow each map: channel and largest absolute value"
        # the longer side of a map on the sheet, in pixels
        return contact_sheet(tiles, columns, f"{title}\n{line}", side=128)

    def __repr__(self) -> str:
        """Return one line."""
        height, width = self.maps.shape[1:]
        maps = f"{len(self.maps)} of {self.total} maps, {height}x{width}"
        return f"<FeatureMaps of layer {self.layer!r} of {self.model} for {self.source}: {maps}>"

    def _repr_html_(self) -> str:
        """Show the sheet in a notebook, of the strongest maps if there are many."""
        first = replace(self, maps=self.maps[:64], channels=self.channels[:64])
        return as_html(first.sheet(), repr(self))

    def save(self, path: str | Path, *, scale: MapScale = "each") -> Path:
        """Write the sheet to a file, completely or not at all. The suffix decides the type; folders are created.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        return write_picture(path, self.sheet(scale=scale))


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
    if top is not None:
        top = whole_number(top, "top", 1)
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
        loaded.name,
        str(chosen),
        maps[order],
        tuple(order.tolist()),
        tuple(float(strengths[number]) for number in order),
        len(maps),
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


_COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
"""Okabe and Ito's colours, which people with any kind of colour vision can tell apart."""

_SIDE = 480
"""The longer side of each picture on a sheet, in pixels."""
_LINE, _SWATCH, _GAP = 22, 14, 10
"""The height of a line of the legend, the side of its colour, and the gap around them, in pixels."""


@dataclass(frozen=True, eq=False)
class Concepts(OfLayer):
    """The concepts of a layer's feature maps, the one that makes up most of them first.

    Attributes:
        maps: for each picture (k, h, w) float32, how strong each concept is in each cell; 1 is the concept's strongest
            cell of all pictures.
        vectors: (k, C) float32, each concept's feature vector where it is strongest, in units of the feature maps.
        classes: the class that the model gives to a picture whose every cell is one concept; None if the part of the
            model after the layer cannot be run alone, or the model is no classifier.
        probabilities: that class's probability.
        labels: that class's name; None if the names are not known.
        unexplained: the share of the feature maps' squares that the concepts leave out.
        pictures: for each picture its Explanation, without heat, which knows where the cells lie in it.
    """

    maps: tuple[Float[np.ndarray, "k *_"], ...]
    vectors: Float[np.ndarray, "k c"]
    classes: tuple[int, ...] | None
    probabilities: tuple[float, ...] | None
    labels: tuple[str, ...] | None
    unexplained: float
    pictures: tuple[Explanation, ...] = field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Each concept's number from 1, with the class and its probability if they are known."""
        numbers = range(len(self.vectors))
        if self.classes is None or self.probabilities is None:
            return tuple(f"concept {number + 1}" for number in numbers)
        labels = self.labels or [f"class {index}" for index in self.classes]
        return tuple(f"{number + 1}: {labels[number]} {percent(self.probabilities[number])}" for number in numbers)

    def heatmaps(self, picture: int = 0) -> Float[np.ndarray, "k *size"]:
        """Return a picture's maps at the size of the model's input (k, H, W).

        Raises:
            IndexError: there is no such picture.
        """
        row = self.pictures[picture]
        return np.asarray(enlarge(torch.from_numpy(self.maps[picture]), row.maps.size, row.maps.placements[0]).numpy())

    def overlay(self, picture: int = 0, *, alpha: float = 0.65) -> Pixels:
        """Draw a picture with the concepts as coloured regions, each with its number where it is strongest.

        A pixel has the colour of the concept that is strongest there, and the more of it the stronger the concept is.

        Args:
            picture: the number of the picture, from 0.
            alpha: the weight of the colours, 0..1.

        Returns:
            The picture, H x W x 3 uint8 RGB; its longer side is at most 480 pixels.

        Raises:
            InputError: the picture cannot be drawn, or alpha is out of range.
            IndexError: there is no such picture.
        """
        overlay.check("overlay", "turbo", alpha)
        row, heatmaps = self.pictures[picture], self.heatmaps(picture)
        if heatmaps.ndim != 3:
            raise InputError(f"only maps with two axes can be drawn, and these have {heatmaps.ndim - 1}; see .maps")
        height, width = heatmaps.shape[1:] if row.picture is None else row.picture.shape[:2]
        size = shown_size(height, width, _SIDE)
        white = np.full((*size, 3), 255, np.uint8)
        box = Box(0, 0, width, height) if row.box is None else row.box
        box = scaled_box(box, (height, width), size)
        placed = np.stack([np.nan_to_num(overlay.stretch(heatmap, box, size)) for heatmap in heatmaps])
        # Without heat, this darkens what the model did not see.
        shown = (
            white
            if row.picture is None
            else overlay.blend(resized(row.picture, size), np.zeros((1, 1), np.float32), box)
        )
        weight = alpha * placed.max(0)[..., None]
        colours = np.array(colours_of(len(heatmaps)), np.float32)[placed.argmax(0)]
        canvas = Canvas(size[1], size[0])
        canvas.picture(0, 0, np.rint(shown * (1 - weight) + colours * weight).astype(np.uint8))
        for number, strength in enumerate(placed):
            # A concept gets its number on a picture if its strength there reaches this share of its largest of all
            # pictures
            if strength.max() >= 0.25:
                _mark(canvas, strength, number)
        return canvas.pixels()

    def sheet(self, *, alpha: float = 0.65) -> Pixels:
        """Draw all pictures side by side, above a legend of the concepts.

        Raises:
            InputError: as for ``overlay``.
        """
        drawn = [self.overlay(number, alpha=alpha) for number in range(len(self.maps))]
        above = drawn[0] if len(drawn) == 1 else sheet(drawn)
        legend = self._legend(max(above.shape[1], _SIDE))
        canvas = Canvas(max(above.shape[1], legend.shape[1]), above.shape[0] + legend.shape[0])
        canvas.picture(0, 0, above)
        canvas.picture(0, above.shape[0], legend)
        return canvas.pixels()

    def _legend(self, width: int) -> Pixels:
        room = width - 2 * _GAP
        title = f"{self.model}, layer {self.layer}: {self._count()}"
        known = "The class is what the model says if every cell is this concept. " if self.classes else ""
        share = percent(1 - self.unexplained)
        notes = wrapped(f"{known}Together the concepts make up {share} of the feature maps.", room, 12)
        canvas = Canvas(width, (1 + len(self.vectors) + len(notes)) * _LINE + 2 * _GAP)
        middles = itertools.count(_GAP + _LINE // 2, _LINE)
        canvas.text(_GAP, next(middles), fitting(title, room, 15), size=15)
        for name, colour in zip(self.names, colours_of(len(self.vectors)), strict=True):
            middle = next(middles)
            canvas.box(_GAP, middle - _SWATCH // 2, _GAP + _SWATCH, middle + _SWATCH // 2, colour)
            canvas.text(2 * _GAP + _SWATCH, middle, fitting(name, room - _SWATCH - _GAP, 14), size=14)
        for note in notes:
            canvas.text(_GAP, next(middles), note, size=12, colour=GREY)
        return canvas.pixels()

    def save(self, path: str | Path, *, alpha: float = 0.65) -> Path:
        """Write the sheet to a file, completely or not at all. The suffix decides the type; folders are created.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        return write_picture(path, self.sheet(alpha=alpha))

    def _count(self) -> str:
        return f"{counted(len(self.vectors), 'concept')} in {counted(len(self.maps), 'picture')}"

    def __repr__(self) -> str:
        """Return one line."""
        names = ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        return f"<Concepts of layer {self.layer!r} of {self.model}: {self._count()} ({names})>"

    def _repr_html_(self) -> str | None:
        """Show the sheet in a notebook, of the first pictures if there are many; None if it cannot be drawn."""
        if self.maps[0].ndim != 3:
            return None
        first = replace(self, maps=self.maps[:12], pictures=self.pictures[:12])
        return as_html(first.sheet(), repr(self))


def colours_of(count: int) -> Sequence[tuple[int, int, int]]:
    """Return a colour for each concept; beyond seven, evenly spaced hues."""
    if count <= len(_COLOURS):
        return _COLOURS[:count]
    hues = (colorsys.hsv_to_rgb(number / count, 0.8, 0.6 + 0.4 * (number % 2)) for number in range(count))
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in hues]


def _mark(canvas: Canvas, strength: Float[np.ndarray, "h w"], number: int) -> None:
    """Write a concept's number where it is strongest, in a square of its own that stays inside the picture."""
    row, column = np.unravel_index(int(strength.argmax()), strength.shape)
    half = min(11, math.floor(min(strength.shape) / 2))  # half the side of the square, in pixels
    y, x = (min(max(int(place), half), side - half) for place, side in zip((row, column), strength.shape, strict=True))
    canvas.box(x - half, y - half, x + half, y + half, INK)
    canvas.text(x, y, str(number + 1), size=half + 4, colour=PAPER, anchor="middle")


def factorise(
    model: Loadable,
    images: ImageLike | Sequence[ImageLike],
    concepts: int = 5,
    target_layer: Selector | None = None,
    *,
    preprocess: Preprocess | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
    batch_size: int | None = None,
) -> Concepts:
    """Find the concepts that a layer's feature maps are made of: deep feature factorisation.

    The non-negative part of the feature vectors of all cells of all pictures is factorised: each cell becomes a sum of
    a few vectors, the concepts, with non-negative strengths. The strengths of one concept are its map. If the part of
    the model after the layer can be run alone, it says which class it would give to a picture whose every cell is one
    concept. (Collins, Achanta and Suesstrunk 2018, Deep Feature Factorization, arXiv:1806.10206)

    Args:
        model, target_layer, preprocess, labels, device, batch_size: as for ``camkit.explain``; one layer.
        images: one picture or several, as ``camkit.explain`` takes them.
        concepts: how many concepts.

    Returns:
        A ``Concepts``, with the concept that makes up most of the feature maps first.

    Raises:
        InputError: ``concepts`` is less than 1 or more than the cells or channels, there is no picture, several layers
            match, or as for ``camkit.explain``.

    Examples:
        >>> import camkit
        >>> found = camkit.factorise("demo-fair", camkit.scenes.scene_paths()["plane-sky"], concepts=3)
        >>> found.vectors.shape, found.maps[0].shape
        ((3, 64), (3, 16, 16))
    """
    concepts = whole_number(concepts, "concepts", 1)
    loaded = as_model(model, preprocess=preprocess, labels=labels, device=device)
    given = images if isinstance(images, (list, tuple)) else [images]
    pictures = list(unbatched(cast("Sequence[ImageLike]", given), spatial_rank(loaded.module)))
    image = prepared_batch(pictures[:1], loaded)
    explained, maps, layer = maps_of_one_layer(loaded, pictures, target_layer, batch_size)
    # The non-negative feature vectors of all cells of all pictures.
    cells = torch.cat([of_picture.float().flatten(1).mT for of_picture in maps]).relu()
    most = min(cells.shape)
    if concepts > most:
        raise InputError(
            f"{concepts} concepts are too many: layer {str(layer)!r} has {cells.shape[1]} channels, and "
            f"{cells.shape[0]} cells in all pictures, so at most {most} can be told apart"
        )
    if not bool(cells.isfinite().all()):
        raise LayerError(f"the feature maps of layer {str(layer)!r} hold NaN or infinite values")
    strengths, vectors = factorise_cells(cells, concepts)
    chances = class_probabilities(loaded.module, layer, image, vectors, loaded.activation)
    if chances is not None and loaded.labels is not None and len(loaded.labels) != chances.shape[1]:
        raise InputError(f"{len(loaded.labels)} labels were given, but the model has {chances.shape[1]} classes")
    classes = None if chances is None else tuple(chances.argmax(1).tolist())
    grids = [of_picture.shape[1:] for of_picture in maps]
    parts = strengths.split([grid.numel() for grid in grids], dim=1)
    total = float(cells.square().sum())
    left_out = float((cells - strengths.mT @ vectors).square().sum())
    return Concepts(
        maps=tuple(part.reshape(-1, *grid).numpy() for part, grid in zip(parts, grids, strict=True)),
        vectors=vectors.numpy(),
        classes=classes,
        probabilities=None if chances is None else tuple(chances.amax(1).tolist()),
        labels=None if classes is None or loaded.labels is None else tuple(loaded.labels[index] for index in classes),
        unexplained=left_out / total if total > 0 else 0.0,
        layer=str(layer),
        model=loaded.name,
        pictures=tuple(explained),
    )


def class_probabilities(
    model: nn.Module,
    layer: TargetLayer,
    image: Float[Tensor, "1 c *size"],
    vectors: Float[Tensor, "k channels"],
    activation: Activation | None,
) -> Float[Tensor, "k classes"] | None:
    """Return the probability of each class if every cell of the layer's feature maps is one of the vectors.

    Args:
        model: the model; it is restored exactly.
        layer: the layer.
        image: a picture, whose own feature maps the vectors replace.
        vectors: the vectors.
        activation: what turns the model's scores into probabilities.

    Returns:
        None if the model is no classifier, or its part after the layer cannot be run alone.
    """
    if layer.layout is None:
        return None
    options = Pass(model, image, ())
    with options.forward(recording(model, layer.ref), leaf=True) as run:
        output, (recorded,) = run.output, run.entered
    try:
        own = ScoreReading.of(logits_of(output, 1))
        head = Head(options, layer.ref, layer.layout, recorded, logits_of, own.values[0].float())
    except (TargetError, MethodError):
        return None
    cells = [1] * len(layer.layout.grid)
    maps = vectors.to(head.activations).reshape(*vectors.shape, *cells).expand(-1, -1, *layer.layout.grid)
    with torch.no_grad():
        return probabilities(ScoreReading.of(head(maps.clone()), own.final), activation)


def factorise_cells(
    cells: Float[Tensor, "cells c"], count: int
) -> tuple[Float[Tensor, "k cells"], Float[Tensor, "k c"]]:
    """Return non-negative H (k, cells) and W (k, C) for which H^T W is as near to the cells V as it gets.

    The largest value of each row of H is 1. The concept that makes up most of the cells comes first.

    Args:
        cells: V, not negative.
        count: k.
    """
    package = optional("sklearn.decomposition", "concepts need scikit-learn: pip install 'camkit[concepts]'")
    largest = float(cells.amax()) or 1.0
    # With a smaller tolerance than scikit-learn's, concepts that overlap are separated.
    factors = package.NMF(count, init="nndsvda", tol=1e-6, max_iter=2000, random_state=0)
    with warnings.catch_warnings(action="ignore"):  # of the last updates, which change little
        found = factors.fit_transform((cells.double() / largest).numpy())
    strengths, vectors = torch.from_numpy(found.T).float(), torch.from_numpy(factors.components_ * largest).float()
    peaks = strengths.amax(1, keepdim=True)
    peaks = torch.where(peaks > 0, peaks, 1)
    strengths, vectors = strengths / peaks, vectors * peaks
    order = (strengths.sum(1) * vectors.sum(1)).argsort(descending=True)
    return strengths[order], vectors[order]
