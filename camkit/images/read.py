"""Turns a picture file, a PIL picture or an array into 8-bit RGB."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from camkit.errors import ImageError
from camkit.images.files import find_pictures

_SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")


def open_picture(path: str | Path) -> Image.Image:
    """Read a picture file as RGB, turned upright by its EXIF orientation.

    16-bit greyscale is scaled to 8 bits. Transparency is dropped, as in ordinary training pipelines.

    Raises:
        ImageError: the file is missing, is not a picture, is damaged, or is so large that it looks like a
            decompression bomb.
    """
    path = Path(path)
    try:
        _refuse_pipe(path)
        with Image.open(path) as picture:
            picture.load()
            return as_rgb(_turned(picture))
    except ImageError:
        raise
    except IsADirectoryError as error:
        is_empty = find_pictures([path]) == [path]
        reason = "a folder without pictures" if is_empty else "a folder; pass the picture files in it"
        raise ImageError(f"{path} is {reason}") from error
    except FileNotFoundError as error:
        raise ImageError(f"there is no file {path}") from error
    except UnidentifiedImageError as error:
        size = path.stat().st_size
        raise ImageError(f"{path} is {'an empty file' if size == 0 else 'not a picture'}") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{path} is too large to open safely: {error}") from error
    except Exception as error:  # a damaged file can make its decoder fail in any way
        raise ImageError(f"{_shortened(path)} cannot be read: {error}") from error


def _refuse_pipe(path: Path) -> None:
    """Refuse what is neither a file nor a folder: opening a pipe waits until somebody writes into it."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ImageError(f"{path} is a pipe or a device; save the picture to a file and pass that")


_LONGEST_PATH = 300
"""Characters of a path that an error repeats; a path the file system refuses can be much longer."""


def _shortened(path: Path) -> str:
    text = str(path)
    return text if len(text) < _LONGEST_PATH else f"{text[:120]}...{text[-40:]}"


_TO_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that turns a picture upright, by its EXIF orientation."""


def _turned(picture: Image.Image) -> Image.Image:
    transposition = _TO_UPRIGHT.get(picture.getexif().get(ExifTags.Base.Orientation, 1))
    return picture if transposition is None else picture.transpose(transposition)


def upright(picture: Image.Image, source: str) -> Image.Image:
    """Return a PIL picture as RGB, turned upright by its EXIF orientation.

    Raises:
        ImageError: the picture is empty, or its data is damaged, which shows only when PIL decodes it.
    """
    if 0 in picture.size:
        raise ImageError(f"{source} has {picture.width} x {picture.height} pixels")
    try:
        return as_rgb(_turned(picture))
    except ImageError:
        raise
    except Exception as error:  # a damaged file can make its decoder fail in any way
        raise ImageError(f"{source} cannot be read: {error}") from error


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return any PIL picture as 8-bit RGB.

    Raises:
        ImageError: the picture is floating point and its values are neither 0..1 nor 0..255.
    """
    if picture.mode in _SIXTEEN_BIT:
        return _grey(np.clip(np.asarray(picture, dtype=np.float64) / 257, 0, 255))
    if picture.mode == "F":
        values = np.asarray(picture, dtype=np.float64)
        if not np.isfinite(values).all() or values.min(initial=0) < 0 or values.max(initial=0) > 255:
            raise ImageError("a floating-point picture must have values from 0 to 1 or from 0 to 255")
        return _grey(values * 255 if values.max(initial=0) <= 1 else values)
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def _grey(values: np.ndarray) -> Image.Image:
    return Image.fromarray(np.rint(values).astype(np.uint8)).convert("RGB")


def from_array(array: np.ndarray) -> Image.Image:
    """Return an array as a PIL picture.

    Args:
        array: H x W, or H x W x 1, 3 or 4; uint8, or floating point from 0 to 1.

    Raises:
        ImageError: the array has another shape, type or range.
    """
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)) or 0 in array.shape:
        raise ImageError(
            f"an array must have the shape H x W x 3 (or x 1, x 4, or H x W), not {array.shape}; "
            "pass channels-first images as a torch.Tensor"
        )
    if array.dtype != np.uint8:
        if not np.issubdtype(array.dtype, np.floating):
            raise ImageError(f"an array must be uint8 (0 to 255) or floating point (0 to 1), not {array.dtype}")
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise ImageError(
                "a floating-point array must have values from 0 to 1; pass normalised images as a torch.Tensor"
            )
        array = np.rint(array * 255).astype(np.uint8)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array)).convert("RGB")
