"""What a preprocessing shows the model: which part of a picture, and which part of a region of it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor
from torchvision.transforms._presets import ImageClassification

from camkit.drawing.encode import pixels_of
from camkit.engine.guard import generators, interruptible, same_randomness, undisturbed
from camkit.engine.passes import keep_last
from camkit.errors import InputError, as_error
from camkit.types import Box, Preprocess


def check_crop(
    preprocess: Preprocess, picture: Image.Image, tensor: Float[Tensor, "c h w"], boxes: CropBoxes | None = None
) -> None:
    """Check that a preprocessing shows the same part of this picture as of any other picture of its size.

    Args:
        preprocess: turns a PIL picture into the model's input.
        picture: the picture.
        tensor: the picture after the preprocessing.
        boxes: boxes that were measured before, if several pictures are checked.

    Raises:
        InputError: the crop depends on the picture's content, so a region's mask would be cropped differently.
    """
    view = (boxes or CropBoxes()).view(preprocess, picture.size, (tensor.shape[2], tensor.shape[1]))
    if view is not None and not view.shows(picture, tensor):
        raise InputError(
            f"{_CANNOT_FOLLOW}: its crop depends on the picture's content; crop the pictures and their regions first"
        )


@dataclass(frozen=True, eq=False)
class View:
    """The part that a preprocessing shows of pictures of one size, unless the crop depends on their content.

    Attributes:
        box: the part of the picture.
        black, white: a black and a white picture after the preprocessing, as the mean of the channels in each cell of
            a coarse grid; None if the box need not be compared with the picture.
        weights: how much red, green and blue contribute to that mean, where black is 0 and white is 1.
    """

    box: Box
    black: Float[np.ndarray, "rows columns"] | None = None
    white: Float[np.ndarray, "rows columns"] | None = None
    weights: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def shows(self, picture: Image.Image, tensor: Float[Tensor, "c h w"]) -> bool:
        """Tell whether the model's input shows this box of this picture, and no other part of it.

        The box was measured on artificial pictures. A preprocessing that trims black borders or crops to the object
        shows these in full. So this compares the coarse brightness of the box with that of the input.
        """
        if self.black is None or self.white is None:
            return True
        rows, columns = self.black.shape
        across = np.linspace(self.box.left, self.box.right, columns + 1)
        down = np.linspace(self.box.top, self.box.bottom, rows + 1)
        width, height = picture.size
        used_columns = np.flatnonzero((across[:-1] >= -_EDGE) & (across[1:] <= width + _EDGE))
        used_rows = np.flatnonzero((down[:-1] >= -_EDGE) & (down[1:] <= height + _EDGE))
        if min(len(used_rows), len(used_columns)) < _FEWEST_CELLS:
            return True
        cells = np.ix_(used_rows, used_columns)
        inside = Box(
            max(across[used_columns[0]], 0),
            max(down[used_rows[0]], 0),
            min(across[used_columns[-1] + 1], width),
            min(down[used_rows[-1] + 1], height),
        )
        predicted = _coarse_colours(picture, inside, (len(used_columns), len(used_rows))) @ np.array(self.weights)
        black, contrast = self.black[cells], self.white[cells] - self.black[cells]
        levels = np.asarray(tensor.detach().float().mean(0).cpu())
        means, squares = (_coarse(values, self.black.shape)[cells] for values in (levels, np.square(levels)))
        error = np.mean(np.square((means - black) / contrast - predicted))
        # Resizing without a filter picks single pixels: the more they differ in a cell, the more their mean varies.
        spread = np.mean((squares - np.square(means)) / np.square(contrast)) * self.black.size / levels.size
        allowed = max(_LEAST_ERROR, _LARGEST_ERROR * predicted.std())
        # The mean of single pixels may differ by two standard errors in addition.
        return bool(error <= allowed**2 + 4 * max(spread, 0))


_CELLS = 16
"""Cells along each side of the grid on which a picture and the model's input are compared: few enough for noise and
rounding to average out, and enough to see a shift by a hundredth of the picture."""
_FEWEST_CELLS = 3
"""At least this many cells along each side must lie on the picture for a comparison."""
_EDGE = 0.5
"""A cell may extend this many pixels beyond the picture, because boxes are accurate to about a pixel."""
_LEAST_ERROR, _LARGEST_ERROR = 0.006, 0.1
"""How far the brightness of cells may differ (root mean square): 1.5 of 255 levels or a tenth of the picture's own
variation, whichever is larger."""


def _cells(shown: float, length: int, side: int) -> int:
    """Return the number of cells along a side of the input if it shows ``shown`` of the picture's ``length`` pixels."""
    # A cell has at least 8 pixels of the input along each side, because resizing mixes neighbouring pixels.
    return max(_FEWEST_CELLS, min(_CELLS, side // 8, round(_CELLS * shown / length)))


def _coarse(levels: Float[np.ndarray, "h w"], shape: tuple[int, int]) -> Float[np.ndarray, "rows columns"]:
    """Return the mean in each cell of a coarse grid."""
    single = levels.astype(np.float32)
    return np.asarray(Image.fromarray(single).resize(shape[::-1], Image.Resampling.BOX), np.float64)


def _coarse_colours(picture: Image.Image, box: Box, size: tuple[int, int]) -> Float[np.ndarray, "rows columns 3"]:
    """Return the mean colours 0..1 in a grid of ``size`` (columns, rows) over a box of a picture."""
    sides = box.right - box.left, box.bottom - box.top
    # 32 pixels along each side of a cell are enough for its mean.
    steps = [max(1, int(side / (count * 32))) for side, count in zip(sides, size, strict=True)]
    few = picture
    if steps != [1, 1]:
        few = Image.fromarray(np.ascontiguousarray(pixels_of(picture)[:: steps[1], :: steps[0]]))
    part = box.left / steps[0], box.top / steps[1], box.right / steps[0], box.bottom / steps[1]
    part = part[0], part[1], min(part[2], few.width), min(part[3], few.height)
    return np.asarray(few.resize(size, Image.Resampling.BOX, box=part)) / 255


class CropBoxes:
    """Crop boxes that were measured before; they are kept as long as their preprocessing lives."""

    def __init__(self) -> None:
        self._views: weakref.WeakKeyDictionary[Any, dict[Any, View | None]] = weakref.WeakKeyDictionary()

    def of(self, preprocess: Preprocess, picture: Image.Image, tensor: Float[Tensor, "c h w"]) -> Box | None:
        """Return the part of a picture that a preprocessing shows the model in a tensor.

        It is measured once for each size; None also if the tensor shows another part of this picture.
        """
        view = self.view(preprocess, picture.size, (tensor.shape[2], tensor.shape[1]))
        return view.box if view is not None and view.shows(picture, tensor) else None

    def view(self, preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int]) -> View | None:
        """Return the part that a preprocessing shows of pictures of a size, as measured the first time.

        torchvision's presets are read. Any other function is measured, with pictures whose brightness encodes the
        position. None if it does more than resize, crop, pad and change colours.

        Args:
            preprocess: turns a PIL picture into the model's input.
            size: width and height of the picture.
            output: width and height of the model's input.
        """
        # Python creates a bound method anew at each access, so the boxes are kept for the object it belongs to.
        owner, key = getattr(preprocess, "__self__", preprocess), (getattr(preprocess, "__name__", ""), size, output)
        try:
            views = self._views.setdefault(owner, {})
        except TypeError:  # it cannot be hashed or weakly referenced, so its boxes are not kept
            views = {}
        if key in views:
            return views[key]
        is_preset = isinstance(preprocess, ImageClassification)
        view = View(_preset_box(preprocess, size)) if is_preset else _measured_view(preprocess, size, output)
        # A folder of photos has fewer sizes; these boxes take some ten megabytes.
        return keep_last(views, key, view, 4096)


def _preset_box(preset: ImageClassification, size: tuple[int, int]) -> Box:
    crops = preset.crop_size[-1], preset.crop_size[0]
    shorter, resize = min(size), preset.resize_size[0]
    resized = [resize if side == shorter else int(resize * side / shorter) for side in size]
    if len(preset.resize_size) == 2:
        resized = [preset.resize_size[1], preset.resize_size[0]]
    # A picture smaller than the crop is padded evenly, with the odd pixel at the end.
    sides = zip(resized, crops, strict=True)
    starts = [-((crop - side) // 2) if side < crop else round((side - crop) / 2.0) for side, crop in sides]
    left, top = (start * side / small for start, side, small in zip(starts, size, resized, strict=True))
    return Box(left, top, left + crops[0] * size[0] / resized[0], top + crops[1] * size[1] / resized[1])


_POSITION_TOLERANCE = 0.006
"""How far positions may deviate from a straight line, as a share of the picture: 1.5 steps of an 8-bit ramp."""


def _measured_view(preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int]) -> View | None:
    """Measure the box with pictures whose brightness encodes the position; None if the result makes no sense."""
    # On fewer pixels, a ramp has too few levels to measure a position.
    if min(size) < 8:
        return None
    with undisturbed(), same_randomness(), interruptible(), contextlib.suppress(InputError):
        shades = measure_shades(preprocess, size)  # refuses a random one, which cropped the user's picture elsewhere

        def brightness(picture: Image.Image) -> Float[np.ndarray, "h w"]:
            return _mean_of_channels(_apply(preprocess, picture, output[::-1]))

        black, white = (_mean_of_channels(tensor) for tensor in (shades.black, shades.white))
        contrast = white - black
        # Cells with less contrast than 99 % of the largest are padding and blended edges.
        inside = np.abs(contrast) > 0.99 * np.abs(contrast).max()
        # Too small a share of the output shows the picture for its position to be measured.
        if inside.mean() < 0.02:
            return None
        contrast[~inside] = np.nan
        across, down = (_span(brightness, size, black, contrast, axis) for axis in (1, 0))
        if across is None or down is None:
            return None
        width, height = size
        box = Box(across[0] * width, down[0] * height, across[1] * width, down[1] * height)
        shape = _cells(box.bottom - box.top, height, output[1]), _cells(box.right - box.left, width, output[0])
        # How much red and blue add to the mean of the channels, from black 0 to white 1; green adds the rest.
        coloured = [brightness(Image.new("RGB", size, colour)) for colour in ("red", "blue")]
        red, blue = (float(np.mean((levels - black)[inside] / contrast[inside])) for levels in coloured)
        return View(box, _coarse(black, shape), _coarse(white, shape), (red, 1 - (red + blue), blue))
    return None


def _mean_of_channels(tensor: Float[Tensor, "c h w"]) -> Float[np.ndarray, "h w"]:
    return tensor.double().mean(0).numpy()


def _span(
    brightness: Callable[[Image.Image], np.ndarray],
    size: tuple[int, int],
    black: Float[np.ndarray, "h w"],
    contrast: Float[np.ndarray, "h w"],
    axis: int,
) -> tuple[float, float] | None:
    """Return where the output begins and ends along an axis of the picture, as shares of it.

    A ramp of brightness gives the position that each cell shows. None if position = a * (index + 0.5) + b does not fit.

    Args:
        brightness: the preprocessing.
        size: the width and height of the picture.
        black: a black picture, as ``brightness`` returns it.
        contrast: how much brighter a white one is; NaN where cells do not show the picture alone.
        axis: 1 across, 0 down.
    """
    length = size[1 - axis]
    ramp = (np.arange(length) + 0.5) / length
    lines = [np.rint(line * 255).astype(np.uint8) for line in (ramp, 0.25 + ramp / 2)]
    striped = [np.broadcast_to(line if axis == 1 else line[:, None], size[::-1]) for line in lines]
    seen = [brightness(Image.fromarray(grey).convert("RGB")) for grey in striped]
    position, check = ((levels - black) / contrast for levels in seen)
    # A preprocessing that stretches contrasts makes both ramps equal. Then the levels do not show positions.
    if np.nanmax(np.abs(0.25 + position / 2 - check)) > 2 * _POSITION_TOLERANCE:
        return None
    across = position if axis == 1 else position.T
    used = np.isfinite(across).any(0)
    mean = np.nanmean(across[:, used], axis=0)
    if used.sum() < 3:
        return None
    spread = np.nanmax(np.abs(across[:, used] - mean))
    index = np.flatnonzero(used) + 0.5
    middle = slice(1, -1)  # at the edges of the picture, resizing filters are cut off; few positions are all needed
    fitted = middle if used.sum() > 8 else slice(None)
    slope, offset = np.polyfit(index[fitted], mean[fitted], 1)
    residual = np.abs(slope * index + offset - mean)[middle].max()
    if max(spread, residual) > _POSITION_TOLERANCE or slope <= 0:
        return None
    return float(offset), float(offset + slope * len(used))


_TOLERANCE = 0.5
"""How far a region may overshoot 0 and 1. Bicubic and Lanczos resizing overshoot by less."""


@dataclass(frozen=True, eq=False)
class Shades:
    """The tensors (C, H, W) into which a preprocessing turns a black and a white picture.

    If the preprocessing only resizes, crops, pads and changes colours, every pixel of a picture lies between the two.
    """

    black: Float[Tensor, "c h w"]
    white: Float[Tensor, "c h w"]

    @functools.cached_property
    def contrast(self) -> Float[Tensor, "c h w"]:
        """The difference between white and black."""
        return self.white - self.black

    @functools.cached_property
    def view(self) -> Bool[Tensor, "h w"]:
        """True where the model sees the picture, False where it sees padding."""
        contrast = self.contrast.abs().amax(0)
        return contrast > 0.5 * contrast.amax()

    @functools.cached_property
    def _scale(self) -> Float[Tensor, "c h w"]:
        """What turns a difference from black into brightness; zero where the model sees padding."""
        return torch.where(self.view & (self.contrast != 0), 1 / self.contrast, 0)

    def pixels(self, tensor: Float[Tensor, "c h w"]) -> Float[Tensor, "c h w"]:
        """Return a model's input as brightness from 0 to 1, with black padding."""
        return (tensor - self.black).mul_(self._scale).clamp_(0, 1)

    @functools.cached_property
    def _weights(self) -> Float[Tensor, "c h w"]:
        """The weight of each channel in the brightness, so that a channel with more contrast counts more."""
        # The division stays finite where the model sees padding: there black and white look the same.
        return self.contrast / self.contrast.square().sum(0).clamp_min(1e-12)

    def brightness(self, tensor: Float[Tensor, "c h w"]) -> Float[Tensor, "h w"]:
        """Return the brightness of a black and white picture, without limits; near 0 where the model sees padding."""
        return (tensor - self.black).mul_(self._weights).sum(0)


class ShadesBySize:
    """The shades of one preprocessing, measured once for each size of picture.

    Pictures of all sizes have the same shades if the preprocessing crops and does not pad. These are kept once. Several
    threads may share one.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        self._preprocess = preprocess
        self._of_size: dict[tuple[int, int], Shades] = {}

    def of(self, size: tuple[int, int]) -> Shades:
        """Return the shades for a picture of ``size`` (width, height); errors are those of ``measure_shades``."""
        shades = self._of_size.get(size)
        if shades is None:
            measured = measure_shades(self._preprocess, size)
            different = dict.fromkeys(list(self._of_size.values()))
            alike = (each for each in different if torch.equal(each.black, measured.black))
            shades = next((each for each in alike if torch.equal(each.white, measured.white)), measured)
            if len(different) == 64:  # so many large tensors are kept
                self._of_size = {}
            self._of_size[size] = shades
        return shades


def measure_shades(preprocess: Preprocess, size: tuple[int, int]) -> Shades:
    """Return what a preprocessing makes of a black and a white picture of ``size`` (width, height).

    Raises:
        InputError: regions cannot be followed, because both become the same or the preprocessing is random.
    """
    before = generators()
    black = _apply(preprocess, Image.new("RGB", size, "black"))
    white = _apply(preprocess, Image.new("RGB", size, "white"), black.shape[1:])
    if not bool(torch.isfinite(white - black).all()) or torch.equal(black, white):
        raise InputError(f"{_CANNOT_FOLLOW}: black and white pictures become the same")
    if generators() != before:  # an asymmetric picture then shows whether it draws them by chance
        across, down = np.meshgrid(*(np.linspace(0, end, side) for end, side in zip((155, 100), size, strict=True)))
        picture = Image.fromarray((across + down).astype(np.uint8)).convert("RGB")
        # A flip with probability 1/2 shows in all but 0.4 % of 8 repetitions.
        first, *others = (_apply(preprocess, picture) for _ in range(1 + 8))
        if not all(torch.equal(first, other) for other in others):
            raise InputError(
                f"{_CANNOT_FOLLOW}: its result is random; pass the preprocessing for evaluation, without augmentation"
            )
    return Shades(black, white)


_CANNOT_FOLLOW = "regions cannot be followed through this preprocessing"


def _apply(preprocess: Preprocess, picture: Image.Image, size: Sequence[int] | None = None) -> Float[Tensor, "c h w"]:
    """Return the model's input for an artificial picture, if it has this size (h, w)."""
    said = f"{_CANNOT_FOLLOW}: it fails on a picture that shows a region"
    with as_error(InputError, lambda error: f"{said} ({type(error).__name__})"):
        tensor: Tensor = preprocess(picture)
    tensor = (tensor[0] if tensor.dim() == 4 else tensor).detach().float().cpu()
    if size is not None and tuple(tensor.shape[1:]) != tuple(size):
        raise InputError(f"{_CANNOT_FOLLOW}: the size of its output varies")
    return tensor


def preprocess_region(
    region: Bool[np.ndarray, "H W"], preprocess: Preprocess, shades: Shades | None = None
) -> Float[Tensor, "h w"]:
    """Return how much of each pixel of the model's input a region of the picture covers, from 0 to 1.

    The region passes through the preprocessing itself, as a black and white picture. ``shades`` are those of the
    preprocessing for a picture of this size; None measures them.

    Raises:
        InputError: the preprocessing does more than resize, crop, pad and change colours.
    """
    if shades is None:
        shades = measure_shades(preprocess, (region.shape[1], region.shape[0]))
    drawn = Image.fromarray(np.where(region, 255, 0).astype(np.uint8)).convert("RGB")
    share = shades.brightness(_apply(preprocess, drawn, shades.black.shape[1:]))
    lowest, highest = torch.aminmax(share)  # NaN if any value is
    if not (lowest >= -_TOLERANCE and highest <= 1 + _TOLERANCE):
        raise InputError(f"{_CANNOT_FOLLOW}: it does more than resize, crop, pad and change colours")
    return share.clamp(0, 1) * shades.view


def extent(region: Bool[Tensor, "h w"]) -> tuple[int, int, int, int]:
    """Return the left, top, right and bottom of the box around a region, which must not be empty."""
    rows, columns = (torch.nonzero(region.any(axis)).flatten() for axis in (1, 0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
