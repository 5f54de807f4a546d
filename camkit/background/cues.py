"""Statistics that a camera, an editor or a file format leaves on the whole picture, including its objects.

Pasting carries such a cue along with the object, so the background gap does not see it. Each statistic has two pure
functions of pictures (H, W, 3) with values 0..1: ``measure`` returns its value, and ``impose`` returns the picture
changed so that it has another value. The objects stay in the picture. The value is measured beside them, because an
object's own texture and colour are no cue, but it is imposed on the whole picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import Bool, Float

from camkit.images.read import LOSSLESS

Picture = Float[np.ndarray, "h w 3"]
Where = Bool[np.ndarray, "h w"]
Value = Float[np.ndarray, " k"]

_BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)
"""The weights of red, green and blue in the brightness (ITU-R BT.601)."""

_BLUR = 1.0
"""Sharpness and noise compare a picture with a copy that is blurred by this deviation, in pixels."""

_MOST_BLUR = 4.0
"""The largest deviation in pixels of the blur that is imposed; beyond it objects of 48 pixels are unrecognisable."""

_MOST_SHARPENING = 3.0
"""The largest weight of the detail that is added to a picture to sharpen it; beyond it edges get halos."""

_STEPS = 8
"""Steps of the bisection: the value is met to within 1/256 of the range."""

_MOST_GAIN = 2.0
"""The largest factor by which a colour channel is changed; a stronger cast is rare and would clip."""

_FEW_PIXELS = 64
"""If fewer pixels lie beside the objects, a statistic is measured over the whole picture."""

_NOISE_SEED = 1
"""Seeds the noise that is added. All pictures may have the same noise."""


def brightness(picture: Picture) -> Float[np.ndarray, "h w"]:
    """Return the brightness of each pixel."""
    return np.asarray(picture @ _BRIGHTNESS, np.float32)


def _blurred(picture: Float[np.ndarray, "h w *c"], deviation: float) -> Float[np.ndarray, "h w *c"]:
    return np.asarray(cv2.GaussianBlur(picture, (0, 0), deviation, borderType=cv2.BORDER_REFLECT))


def _sharpness(bright: Float[np.ndarray, "h w"], where: Where) -> float:
    """Return how much of the variation between neighbours a second blur removes (Crete et al. 2007, 10.1117/12.702790).

    It is near 1 for the sharpest picture, and near 0 for a blurred one. It hardly depends on what the picture shows.
    """
    again = _blurred(bright, _BLUR)
    before = after = 1e-6
    for (own, inside), (blurred, _) in zip(_neighbours(bright, where), _neighbours(again, where), strict=True):
        before += float(_sums(own, inside)[0])
        after += float(_sums(np.minimum(own, blurred), inside)[0])
    return 1 - after / before


def _neighbours(values: Float[np.ndarray, "h w *c"], where: Where) -> Iterator[tuple[np.ndarray, Where]]:
    """Yield how much neighbours differ, along the rows and along the columns, and where both are inside."""
    yield cv2.absdiff(values[1:], values[:-1]), where[1:] & where[:-1]
    yield cv2.absdiff(values[:, 1:], values[:, :-1]), where[:, 1:] & where[:, :-1]


def _sums(values: Float[np.ndarray, "h w *c"], where: Where) -> Value:
    """Return the sum of each channel over some pixels. OpenCV does this in a tenth of the time of NumPy's indexing."""
    channels = values.shape[2] if values.ndim == 3 else 1
    return np.array(cv2.mean(values, where.view(np.uint8))[:channels]) * np.count_nonzero(where)


def measure_sharpness(picture: Picture, where: Where) -> Value:
    """Return the sharpness, 0..1."""
    return np.array([_sharpness(brightness(picture), where)])


def impose_sharpness(picture: Picture, where: Where, value: Value) -> Picture:
    """Blur or sharpen a picture until it has the given sharpness, within the largest blur and sharpening."""
    bright, target = brightness(picture), float(value[0])
    if _sharpness(bright, where) > target:
        deviation = _bisected(0.05, _MOST_BLUR, lambda strength: _sharpness(_blurred(bright, strength), where) > target)
        return _blurred(picture, deviation)
    detail = bright - _blurred(bright, _BLUR)
    weight = _bisected(0.0, _MOST_SHARPENING, lambda strength: _sharpness(bright + strength * detail, where) < target)
    return np.asarray((picture + weight * (picture - _blurred(picture, _BLUR))).clip(0, 1), np.float32)


def _bisected(low: float, high: float, goes_on: Callable[[float], bool]) -> float:
    """Return the largest strength at which a condition still holds; it holds for small strengths."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if goes_on(middle) else (low, middle)
    return (low + high) / 2


_SECOND_DIFFERENCES = np.array([[1, -2, 1], [-2, 4, -2], [1, -2, 1]], np.float32) / 6
"""Immerkaer's mask (1996, 10.1006/cviu.1996.0060): it removes everything that is linear, and white noise keeps its
deviation."""

_MAD = 0.6745
"""The median of the absolute values of normal numbers with deviation 1."""


def _residual(bright: Float[np.ndarray, "h w"]) -> Float[np.ndarray, "h w"]:
    return np.asarray(cv2.filter2D(bright, -1, _SECOND_DIFFERENCES, borderType=cv2.BORDER_REFLECT))


def _deviation(residual: Float[np.ndarray, " n"]) -> float:
    return float(np.median(np.abs(residual))) / _MAD


def _is_below(residual: Float[np.ndarray, " n"], deviation: float) -> bool:
    """Whether the deviation is below a value. Counting is faster than finding the median."""
    return 2 * int(np.count_nonzero(np.abs(residual) < deviation * _MAD)) > len(residual)


def measure_noise(picture: Picture, where: Where) -> Value:
    """Return the deviation of the noise in the brightness, by the median, which edges hardly move."""
    return np.array([_deviation(_residual(brightness(picture))[where])])


def impose_noise(picture: Picture, where: Where, value: Value) -> Picture:
    """Add grey noise to a picture, or smooth it, until its noise has the given deviation."""
    residual, target = _residual(brightness(picture))[where], float(value[0])
    if _deviation(residual) < target:
        noise = np.random.default_rng(_NOISE_SEED).standard_normal(picture.shape[:2], dtype=np.float32)
        of_noise = _residual(noise)[where]
        strength = _bisected(0.0, 2 * target, lambda much: _is_below(residual + much * of_noise, target))
        return np.asarray((picture + strength * noise[..., None]).clip(0, 1), np.float32)
    smooth = _blurred(picture, _BLUR)
    change = _residual(brightness(smooth))[where] - residual
    share = _bisected(0.0, 1.0, lambda much: not _is_below(residual + much * change, target))
    return np.asarray(picture + share * (smooth - picture), np.float32)


def measure_colour(picture: Picture, where: Where) -> Value:
    """Return the colour cast: the contrast of each channel at edges, as shares of their sum.

    Edges show the colour of the light better than means, which show the colours of the things in the picture (van de
    Weijer, Gevers and Gijsenij 2007, 10.1109/TIP.2007.901808).
    """
    contrast = sum(
        (_sums(differences, inside) for differences, inside in _neighbours(picture, where)), np.full(3, 1e-3)
    )
    return np.asarray(contrast / contrast.sum())


def impose_colour(picture: Picture, where: Where, value: Value) -> Picture:
    """Multiply the channels of a picture to give it a colour cast; the mean brightness stays the same."""
    gains = (value / measure_colour(picture, where)).clip(1 / _MOST_GAIN, _MOST_GAIN)
    cast = np.asarray(picture * gains, np.float32)
    same = float(brightness(picture).mean()) / max(1e-6, float(brightness(cast).mean()))
    return np.asarray((cast * same).clip(0, 1), np.float32)


def impose_compression(picture: Picture, where: Where, value: Value) -> Picture:  # noqa: ARG001 - as all others
    """Compress a picture as a JPEG of the given quality; LOSSLESS leaves it as it is."""
    if float(value[0]) >= LOSSLESS:
        return picture
    levels = np.round(picture[..., ::-1] * 255).astype(np.uint8)
    _, encoded = cv2.imencode(".jpg", levels, [cv2.IMWRITE_JPEG_QUALITY, round(float(value[0]))])
    decoded = np.asarray(cv2.imdecode(encoded, cv2.IMREAD_COLOR), np.float32)
    return np.asarray(decoded[..., ::-1] / 255, np.float32)


class Cue(NamedTuple):
    """One statistic. ``measure`` is None if the value belongs to the picture's file and not to its pixels."""

    measure: Callable[[Picture, Where], Value] | None
    impose: Callable[[Picture, Where, Value], Picture]


COMPRESSION = "compression"

CUES: Mapping[str, Cue] = MappingProxyType(
    {
        "sharpness": Cue(measure_sharpness, impose_sharpness),
        "noise": Cue(measure_noise, impose_noise),
        "colour": Cue(measure_colour, impose_colour),
        COMPRESSION: Cue(None, impose_compression),
    }
)
"""The statistics that are exchanged, by name."""


def beside(hole: Where, view: Where) -> Where:
    """Return where a statistic is measured: beside the objects, or everywhere if too little lies beside them."""
    outside = view & ~hole
    return outside if np.count_nonzero(outside) >= _FEW_PIXELS else view
