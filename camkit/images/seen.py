"""Which part of a picture a preprocessing shows the model."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image
from torchvision.transforms._presets import ImageClassification

from camkit.engine.restore import generators, same_randomness
from camkit.types import Box, Preprocess


def seen_box(preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int]) -> Box | None:
    """Return the part of a picture of ``size`` (width, height) that a preprocessing shows the model.

    torchvision's own presets are read; any other function is asked, with ramps whose brightness tells the position.

    Returns:
        The box, or None where the function does anything but resize, crop, pad and change colours.
    """
    if isinstance(preprocess, ImageClassification):
        return _preset_box(preprocess, size)
    # A bound method is made anew at each access, so its owner is what the answer is remembered for, while it lives.
    owner, key = getattr(preprocess, "__self__", preprocess), (getattr(preprocess, "__name__", ""), size, output)
    try:
        known = _boxes.setdefault(owner, {})
    except TypeError:  # cannot be hashed or weakly referenced, so is not remembered
        return _ask_box(preprocess, size, output)
    if key not in known:
        known[key] = _ask_box(preprocess, size, output)
    return known[key]


def _preset_box(preset: ImageClassification, size: tuple[int, int]) -> Box:
    crops = preset.crop_size[-1], preset.crop_size[0]
    shorter, resize = min(size), preset.resize_size[0]
    resized = [resize if side == shorter else int(resize * side / shorter) for side in size]
    if len(preset.resize_size) == 2:
        resized = [preset.resize_size[1], preset.resize_size[0]]
    # A picture smaller than the crop is padded evenly, the odd pixel at the end, and then cropped from the start.
    both = zip(resized, crops, strict=True)
    starts = [-((crop - side) // 2) if side < crop else round((side - crop) / 2.0) for side, crop in both]
    left, top = (start * side / small for start, side, small in zip(starts, size, resized, strict=True))
    return Box(left, top, left + crops[0] * size[0] / resized[0], top + crops[1] * size[1] / resized[1])


_LEAST_SIDE = 8
"""Pixels a picture must have on each side for its box to be asked for."""


_MOST_BENT = 0.006
"""How far positions may be from a straight line, as a share of the picture: a bit more than 8-bit levels can tell."""


_boxes: weakref.WeakKeyDictionary[Any, dict[Any, Box | None]] = weakref.WeakKeyDictionary()


def _ask_box(preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int]) -> Box | None:
    """Find the box by passing pictures through whose brightness tells the position; None where that makes no sense."""
    if min(size) < _LEAST_SIDE:
        return None
    with same_randomness():
        before = generators()
        across, down = _positions(preprocess, size, output, axis=1), _positions(preprocess, size, output, axis=0)
        if across is None or down is None or generators() != before:
            return None  # what a preprocessing that draws random numbers did to another picture says nothing
    horizontal, vertical = _span(across, axis=1), _span(down, axis=0)
    if horizontal is None or vertical is None:
        return None
    width, height = size
    return Box(horizontal[0] * width, vertical[0] * height, horizontal[1] * width, vertical[1] * height)


def _positions(
    preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int], axis: int
) -> Float[np.ndarray, "h w"] | None:
    """Return for each cell of the output where on the picture it was, 0..1 along an axis; NaN outside the picture."""
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
    inside = np.abs(contrast) > 0.99 * np.abs(contrast).max(initial=0)
    if inside.mean() < 0.02 or not np.abs(contrast).max(initial=0) > 0:
        return None
    position, check = (
        np.where(inside, (ramp - black) / np.where(inside, contrast, 1), np.nan) for ramp in (full, half)
    )
    # A preprocessing that stretches contrasts would show any ramp as the same one.
    bent = np.nanmax(np.abs(0.25 + position / 2 - check)) > 2 * _MOST_BENT
    return None if bent else position


def _shown(preprocess: Preprocess, levels: np.ndarray, output: tuple[int, int]) -> np.ndarray | None:
    """Return the mean channel of what the preprocessing makes of a grey picture with levels 0..1."""
    try:
        tensor = preprocess(Image.fromarray(np.rint(levels * 255).astype(np.uint8)).convert("RGB"))
    except Exception:  # made for other pictures than ramps
        return None
    tensor = tensor[0] if tensor.dim() == 4 else tensor
    shown = tensor.detach().double().mean(0).cpu().numpy()
    return shown if shown.shape == (output[1], output[0]) else None


def _span(position: Float[np.ndarray, "h w"], axis: int) -> tuple[float, float] | None:
    """Fit position = a * (index + 0.5) + b along an axis; return where the axis begins and ends, None if it bends."""
    lines = position if axis == 1 else position.T
    used = np.isfinite(lines).any(0)
    mean = np.nanmean(lines[:, used], axis=0)
    if used.sum() < 3:
        return None
    spread = np.nanmax(np.abs(lines[:, used] - mean))
    index = np.flatnonzero(used) + 0.5
    middle = slice(1, -1)  # at the picture's edges, filters see less than they weigh
    slope, offset = np.polyfit(index[middle] if used.sum() > 8 else index, mean[middle] if used.sum() > 8 else mean, 1)
    residual = np.abs(slope * index + offset - mean)[middle].max()
    if max(spread, residual) > _MOST_BENT or slope <= 0:
        return None
    return float(offset), float(offset + slope * len(used))
