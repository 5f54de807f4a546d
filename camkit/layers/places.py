"""Where the cells of a convolutional network look: drawn objects are put into drawn scenes, and the change is located.

A cell looks where an object changes it. Neither the middle of its stride nor the centre of its kernels says where that
is: training moves it, and so does a padding that differs from that of the training (``scripts/results/placement.md``).

The features of a scene are compared with those of the same scene with an object in it. The squared change of a cell
falls with its distance from the object, as a normal distribution does, and the edges of the grid cut the distribution
off. Of all places that the grid may have, its cells a stride apart, the one that foretells the changes best is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from camkit.engine.attach import feature_tensor, forward_hooks
from camkit.engine.guard import ModelRecord, interruptible
from camkit.engine.passes import ignoring_errors, in_parts, quiet_pass
from camkit.layers.layouts import MOST_CELLS_LOST
from camkit.types import CellPositions, LayerRef, Layout, Spread, TargetLayer

SCENES = Path(__file__).parents[1] / "demo" / "files" / "labelled"
"""The drawn scenes that camkit ships, with the masks of their objects."""

_PLACES = 3
"""Objects that are put into a scene of each of the four classes. Each picture is also turned by 180 degrees, so that
what the scenes show above and below cancels. On 17 small networks and three real ones, at sides that strides fill and
others, this misses by 0.12 cells (root mean square), and by at most 0.33; twice as many scenes of 160 pixels by 0.11
and 0.28, at more than twice the time."""

_MEAN, _STD = 0.45, 0.25
"""Mean and standard deviation of the scenes."""

_WHOLE, _LARGEST = 32, 128
"""Larger pictures are measured at this size and what is left over of whole strides: where a cell looks, counted from
the middle of the grid, depends on no more of a picture's size. At 96 pixels, many cells see the whole picture."""

_BESIDE, _WIDTHS = np.linspace(-2, 2, 201)[:, None, None, None], np.geomspace(0.5, 3, 11)[:, None, None]
"""What is tried, in cells: how far the grid's middle lies beside the picture's, and how far an object reaches."""

_MOST = 0.5
"""The share of the centres' variance that the objects' places must explain. In real networks, it is 0.76 to 0.99."""

WithModule = tuple[TargetLayer, nn.Module]
"""A layer and its module."""


class _ReachedError(Exception):
    """All layers have run; the rest of the model is not needed."""


def with_places(
    model: nn.Module,
    image: Float[Tensor, "1 c *size"],
    layers: Sequence[WithModule],
    spread: Spread,
    record: ModelRecord,
) -> dict[LayerRef, Layout | None]:
    """Return the layouts of layers, with the places of their cells if these can be measured.

    Cells of other layers are spread evenly: patches that a transformer cuts out lie where they were cut.
    """
    layouts = {layer.ref: layer.layout for layer, _ in layers}
    size = tuple(min(side, side % _WHOLE + _LARGEST) for side in image.shape[2:])
    wanted = [pair for pair in layers if spread == "measured" and _is_convolutional(model, pair[0], image)]
    if not wanted:
        return layouts
    middles: dict[LayerRef, tuple[float, ...]] = {}
    for at_once in (1 + _PLACES, 1):  # some models take one picture, or reorder those of a batch
        with ignoring_errors():  # a model may take one size
            middles = middles or _measure(model, image, size, wanted, record, at_once)
    for ref, middle in middles.items():
        layout = layouts[ref]
        assert layout is not None
        layouts[ref] = replace(layout, positions=_positions(layout.grid, tuple(image.shape[2:]), middle))
    return layouts


def _is_convolutional(model: nn.Module, layer: TargetLayer, image: Tensor) -> bool:
    """Tell whether a layer returns a grid whose cells lie a stride apart, and not patches as they were cut."""
    layout, size = layer.layout, image.shape[2:]
    if layout is None or layout.kind != "channels_first" or layout.extent or len(size) != 2 or min(layout.grid) < 2:
        return False
    strides = tuple(_stride(side, cells) for side, cells in zip(size, layout.grid, strict=True))
    cuts = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    return all(strides) and not any(module.kernel_size == module.stride == strides for module in cuts)


def _stride(side: int, cells: int) -> int:
    """Return the pixels from cell to cell; 0 if no stride leads to this many cells."""
    stride: int = 2 ** round(math.log2(max(1, side / cells)))
    if side / stride - MOST_CELLS_LOST <= cells <= math.ceil(side / stride):
        return stride
    return 0 if side % cells else side // cells


def _positions(grid: Sequence[int], size: Sequence[int], middle: Sequence[float]) -> CellPositions:
    """Return the places of cells a stride apart; the grid's middle lies this many cells beside the picture's."""
    axes = zip(grid, size, middle, strict=True)
    return tuple(
        tuple((side - 1) / 2 + (beside + cell - (cells - 1) / 2) * _stride(side, cells) for cell in range(cells))
        for cells, side, beside in axes
    )


def _measure(
    model: nn.Module,
    image: Tensor,
    size: tuple[int, ...],
    layers: Sequence[WithModule],
    record: ModelRecord,
    at_once: int,
) -> dict[LayerRef, tuple[float, ...]]:
    """Return how far the middle of each layer's grid looks beside the picture's middle, in cells along each axis."""
    pictures, centres = _pictures(size)
    inputs = _like(pictures, image)
    parts: list[dict[LayerRef, Tensor]] = []
    with quiet_pass(model, image.device, "fp32", record):
        in_parts(
            len(inputs),
            at_once,
            lambda part: parts.append(_features(model, inputs[part.start : part.stop], layers)),
        )
    middles = {}
    for layer, _ in layers:
        maps = torch.cat([part[layer.ref] for part in parts]).float().unflatten(0, (-1, 1 + _PLACES))
        changes = (maps[:, 1:] - maps[:, :1]).square().sum(2).flatten(0, 1).double().cpu().numpy()
        middle = tuple(_middle(changes.sum(2 - axis), centres[:, axis], size[axis]) for axis in (0, 1))
        if np.isfinite(middle).all():
            middles[layer.ref] = middle
    return middles


def _middle(changes: np.ndarray, places: np.ndarray, side: int) -> float:
    """Return how far the middle of a row of cells looks beside the picture's, in cells; not finite if nothing shows it.

    Args:
        changes: how much each object changed each cell, (objects, cells).
        places: the place of each object, in pixels.
        side: the picture's.
    """
    cells = changes.shape[1]
    totals = changes.sum(1)
    shown = totals > 0
    stride = _stride(side, cells)
    if shown.sum() < 3 or cells < 3 or not stride:  # two cells, as SelecSLS has, do not show where a third one looks
        return math.nan
    shares = changes[shown] / totals[shown, None]
    if not np.corrcoef(places[shown], shares @ np.arange(cells))[0, 1] ** 2 > _MOST:
        return math.nan  # each cell sees about the whole picture
    objects = (places[shown, None] - (side - 1) / 2) / stride + (cells - 1) / 2  # in cells, if the middles are one
    expected = np.exp(-(((objects - _BESIDE - np.arange(cells)) / _WIDTHS) ** 2) / 2) + np.finfo(float).tiny
    expected /= expected.sum(-1, keepdims=True)
    misses = np.abs(shares - expected).sum((-2, -1)).min(1)
    return float(_BESIDE.flat[misses.argmin()])


def _features(model: nn.Module, pictures: Tensor, layers: Sequence[WithModule]) -> dict[LayerRef, Tensor]:
    """Run a model until all layers have returned, and return their maps."""
    found: dict[LayerRef, Tensor] = {}
    calls = dict.fromkeys((module for _, module in layers), 0)

    def end(module: nn.Module, _: list[Tensor], output: object) -> None:
        calls[module] += 1
        for layer, own in layers:
            maps = feature_tensor(output) if own is module and calls[module] == (layer.call or 1) else None
            if maps is not None:
                found[layer.ref] = maps[1].clone()  # the model may go on and change it
        if len(found) == len(layers):
            raise _ReachedError

    try:
        with forward_hooks(dict.fromkeys(calls, end)), interruptible():
            model(pictures)
    except _ReachedError:
        pass
    return found


def _like(pictures: Float[Tensor, "n 3 *size"], image: Float[Tensor, "1 c *size"]) -> Float[Tensor, "n c *size"]:
    """Bring pictures with values from 0 to 1 to the scale, the channels and the type of a model's input."""
    low, high = (float(value) for value in image.aminmax())
    if image.shape[1] != 3:
        pictures = pictures.mean(1, keepdim=True).expand(-1, image.shape[1], -1, -1)
    if high > 10:
        pictures = pictures * 255
    elif low < 0 or high > 1:
        pictures = (pictures - _MEAN) / _STD
    return pictures.to(image)


def _pictures(size: tuple[int, ...]) -> tuple[Float[Tensor, "n 3 *size"], Float[np.ndarray, "m 2"]]:
    """Return scenes, each followed by the same scene with objects in it, and the objects' centres in pixels."""
    files = [min(folder.glob("*.jpg")) for folder in sorted((SCENES / "pictures").iterdir())]
    scenes = [_opened(file, size) for file in files]
    pictures: list[Tensor] = []
    centres: list[tuple[float, ...]] = []
    for index, (scene, _) in enumerate(scenes):
        numbers = range(index * _PLACES, (index + 1) * _PLACES)
        spots = [[0.2 + 0.6 * ((0.5 + number * step) % 1) for step in _STEPS] for number in numbers]
        others = [scenes[(number + 3) % len(scenes)] for number in numbers]
        with_objects = [_with_object(scene, *other, spot) for other, spot in zip(others, spots, strict=True)]
        for turned in ((), (-2, -1)):
            pictures += [each.flip(turned) for each in (scene, *(picture for picture, _ in with_objects))]
            centres += [_centre(cover.flip(turned)) for _, cover in with_objects]
    return torch.stack(pictures), np.array(centres)


_STEPS = (0.6180339887, 0.7548776662)
"""Steps that spread places evenly over a square, whatever their number."""


def _opened(file: Path, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a scene and the mask of its object at a size, both from 0 to 1."""
    mask = SCENES / "masks" / file.parent.name / f"{file.stem}.png"
    with Image.open(file) as picture, Image.open(mask) as cover:
        parts = [
            np.asarray(part.convert(mode).resize((size[1], size[0]))) for part, mode in ((picture, "RGB"), (cover, "L"))
        ]
    scene, object_ = (torch.from_numpy(part.copy()).float() / 255 for part in parts)
    return scene.movedim(-1, 0), object_


def _with_object(scene: Tensor, other: Tensor, mask: Tensor, spot: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return a scene with the object of another one at a place, a share of each side, and the object's mask (H, W).

    The object's longer side is 0.4 of the picture's.
    """
    rows, columns = (torch.nonzero(mask.amax(axis) > 0.5)[:, 0] for axis in (1, 0))
    box: Any = (..., slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
    own = torch.cat([other[box], mask[box][None]])
    scale = 0.4 * min(whole / side for whole, side in zip(scene.shape[1:], own.shape[1:], strict=True))
    size = [max(1, round(scale * side)) for side in own.shape[1:]]
    own = functional.interpolate(own[None], size, mode="bilinear", antialias=True)[0]
    place: list[Any] = [...]
    for share, whole, side in zip(spot, scene.shape[1:], size, strict=True):
        start = min(max(0, round(share * (whole - 1) - (side - 1) / 2)), whole - side)
        place.append(slice(start, start + side))
    picture, cover = scene.clone(), torch.zeros_like(mask)
    at = tuple(place)
    cover[at] = own[3]
    picture[at] = torch.lerp(scene[at], own[:3], own[3])
    return picture, cover


def _centre(cover: Tensor) -> tuple[float, ...]:
    """Return the centre of an object's mask (H, W), down and to the right, in pixels."""
    return tuple(
        float((cover.sum(1 - axis) @ torch.arange(side, dtype=torch.float32)) / cover.sum())
        for axis, side in enumerate(cover.shape)
    )
