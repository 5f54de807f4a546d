"""Finds the part of a picture that a preprocessing shows the model."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image
from torchvision.transforms._presets import ImageClassification

from camkit.engine.interrupts import interruptible, undisturbed
from camkit.engine.randomness import generators, same_randomness
from camkit.types import Box, Preprocess


def crop_box(preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int]) -> Box | None:
    """Return the part of a picture that a preprocessing shows the model.

    torchvision's presets are read. For any other function the box is measured, with pictures whose brightness encodes
    the position.

    Args:
        preprocess: turns a PIL picture into the model's input.
        size: width and height of the picture.
        output: width and height of the model's input.

    Returns:
        The box, or None if the function does more than resize, crop, pad and change colours.
    """
    if isinstance(preprocess, ImageClassification):
        return _preset_box(preprocess, size)
    return _measured_box(preprocess, size, output)


class CropBoxes:
    """Crop boxes that were measured before, as long as their preprocessing lives."""

    def __init__(self) -> None:
        self._boxes: weakref.WeakKeyDictionary[Any, dict[Any, Box | None]] = weakref.WeakKeyDictionary()

    def of(self, preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int]) -> Box | None:
        """Return what ``crop_box`` returns; it is measured the first time."""
        # Python creates a bound method anew at each access, so the boxes are kept for the object it belongs to.
        owner, key = getattr(preprocess, "__self__", preprocess), (getattr(preprocess, "__name__", ""), size, output)
        try:
            boxes = self._boxes.setdefault(owner, {})
        except TypeError:  # it cannot be hashed or weakly referenced, so its boxes are not kept
            return crop_box(preprocess, size, output)
        if key not in boxes:
            while len(boxes) >= _MOST_SIZES:
                del boxes[next(iter(boxes))]
            boxes[key] = crop_box(preprocess, size, output)
        return boxes[key]


_MOST_SIZES = 4096
"""Sizes of pictures whose boxes are kept: more than a folder of photos has, and less than a megabyte."""


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


_SMALLEST_SIDE = 8
"""Pixels that each side of a picture needs: on fewer, a ramp has too few levels to measure a position."""

_POSITION_TOLERANCE = 0.006
"""How far positions may deviate from a straight line, as a share of the picture: 1.5 steps of an 8-bit ramp."""

_FULL_CONTRAST = 0.99
"""Share of the largest contrast from which a cell counts as picture; padding and blended edges have less."""

_SMALLEST_VIEW = 0.02
"""Share of the output that must show the picture for its position to be measured."""

_FEW_POSITIONS = 8
"""Up to this many positions along an axis, the line is fitted through the outermost ones too."""


def _measured_box(preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int]) -> Box | None:
    """Measure the box with pictures whose brightness encodes the position; None if the result makes no sense."""
    if min(size) < _SMALLEST_SIDE:
        return None
    with undisturbed(), same_randomness(), interruptible():
        before = generators()
        across, down = _positions(preprocess, size, output, axis=1), _positions(preprocess, size, output, axis=0)
        if across is None or down is None or generators() != before:
            return None  # a preprocessing that draws random numbers may have cropped the user's picture elsewhere
    horizontal, vertical = _span(across, axis=1), _span(down, axis=0)
    if horizontal is None or vertical is None:
        return None
    width, height = size
    return Box(horizontal[0] * width, vertical[0] * height, horizontal[1] * width, vertical[1] * height)


def _positions(
    preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int], axis: int
) -> Float[np.ndarray, "h w"] | None:
    """Return the position on the picture that each cell of the output shows, 0..1 along an axis; NaN in the padding."""
    length = size[1 - axis]
    ramp = (np.arange(length) + 0.5) / length
    levels = (np.zeros(length), np.ones(length), ramp, 0.25 + ramp / 2)
    shown = [
        _shown(preprocess, np.broadcast_to(line if axis == 1 else line[:, None], size[::-1]), output) for line in levels
    ]
    black, white, full, half = shown
    if black is None or white is None or full is None or half is None:
        return None
    contrast = white - black
    inside = np.abs(contrast) > _FULL_CONTRAST * np.abs(contrast).max(initial=0)
    if inside.mean() < _SMALLEST_VIEW or not np.abs(contrast).max(initial=0) > 0:
        return None
    position, check = (
        np.where(inside, (ramp - black) / np.where(inside, contrast, 1), np.nan) for ramp in (full, half)
    )
    # A preprocessing that stretches contrasts makes both ramps equal, and then the levels are no positions.
    is_stretched = np.nanmax(np.abs(0.25 + position / 2 - check)) > 2 * _POSITION_TOLERANCE
    return None if is_stretched else position


def _shown(preprocess: Preprocess, levels: np.ndarray, output: tuple[int, int]) -> np.ndarray | None:
    """Preprocess a grey picture with levels 0..1 and return the mean of its channels; None if that fails."""
    try:
        tensor = preprocess(Image.fromarray(np.rint(levels * 255).astype(np.uint8)).convert("RGB"))
    except Exception:  # the user's function may refuse an artificial picture
        return None
    tensor = tensor[0] if tensor.dim() == 4 else tensor
    shown = tensor.detach().double().mean(0).cpu().numpy()
    return shown if shown.shape == (output[1], output[0]) else None


def _span(position: Float[np.ndarray, "h w"], axis: int) -> tuple[float, float] | None:
    """Fit position = a * (index + 0.5) + b along an axis; return where the axis begins and ends, None if not linear."""
    lines = position if axis == 1 else position.T
    used = np.isfinite(lines).any(0)
    mean = np.nanmean(lines[:, used], axis=0)
    if used.sum() < 3:
        return None
    spread = np.nanmax(np.abs(lines[:, used] - mean))
    index = np.flatnonzero(used) + 0.5
    middle = slice(1, -1)  # at the edges of the picture, resizing filters are cut off
    fitted = middle if used.sum() > _FEW_POSITIONS else slice(None)
    slope, offset = np.polyfit(index[fitted], mean[fitted], 1)
    residual = np.abs(slope * index + offset - mean)[middle].max()
    if max(spread, residual) > _POSITION_TOLERANCE or slope <= 0:
        return None
    return float(offset), float(offset + slope * len(used))
