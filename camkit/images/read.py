"""Turns a picture file, a PIL picture or an array into 8-bit sRGB."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageCms, TiffImagePlugin, UnidentifiedImageError

from camkit.errors import ImageError, as_error, brief, refuse_pipe
from camkit.images.files import about_address

_WHITE_OF_16_BITS = 65535

VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".3gp", ".ts", ".mts"),
    ".m2ts",
)
"""The files that are videos."""

LOSSLESS = 100.0
"""The quality of a file that is not a JPEG, or that cannot be read."""

_STANDARD_MEAN = 57.625
"""The mean of the standard table for brightness (ITU-T T.81, Annex K.1), which has the quality 50."""

_SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")


def open_picture(path: str | Path, data: bytes | None = None) -> Image.Image:
    """Read a picture file as RGB, turned upright by its EXIF orientation.

    16-bit greyscale is scaled to 8 bits, and colours are converted from the file's colour profile to sRGB. Transparency
    is dropped, as in ordinary training pipelines.

    Args:
        path: the file.
        data: the file's bytes, if they are in memory already; ``path`` is only their name then.

    Raises:
        ImageError: the file is missing, is not a picture, is damaged, or is so large that it looks like a
            decompression bomb.
    """
    return open_draft(path, None, data)[0]


def open_draft(path: str | Path, shorter: int | None, data: bytes | None = None) -> tuple[Image.Image, float]:
    """Read a picture file, and a JPEG at a half, a quarter or an eighth of its size if that is large enough.

    Args:
        path, data: as for ``open_picture``.
        shorter: the least length of the shorter side, in pixels; None for the whole size.

    Returns:
        The picture as ``open_picture`` returns it, and how many times the sides of the file's picture are longer.
    """
    path, reduction = Path(path), 1.0
    try:
        with opened(path, data) as picture:
            longest = max(picture.size)
            if shorter is not None and picture.format in _DRAFTED:
                ratio = shorter / min(picture.size)
                picture.draft(None, (math.ceil(picture.width * ratio), math.ceil(picture.height * ratio)))
                reduction = longest / max(picture.size)
            picture.load()
            read = _upright_rgb(picture, str(path), copy=False)
            several = _has_several_frames(picture)
    except ImageError:
        raise
    except IsADirectoryError as error:
        raise ImageError(f"{path} is a folder; pass the picture files in it") from error
    except FileNotFoundError as error:
        raise ImageError(about_address(str(path)) or f"there is no file {path}") from error
    except UnidentifiedImageError as error:
        is_empty = not (path.stat().st_size if data is None else data)
        kind = "an empty file" if is_empty else _OTHER_FORMATS.get(path.suffix.lower(), "not a picture")
        raise ImageError(f"{path} is {kind}") from error
    except Exception as error:  # a damaged file can make its decoder fail in any way
        raise ImageError(f"{brief(path)} cannot be read: {brief(error)}") from error
    if several:
        warnings.warn(f"{path} holds several pictures, and camkit uses the first", stacklevel=2)
    return read, reduction


_OTHER_FORMATS = {
    **dict.fromkeys((".heic", ".heif", ".hif"), "HEIC; install pillow-heif, or convert it to JPEG"),
    **dict.fromkeys(
        VIDEO_SUFFIXES,
        "a video; pass its frames to explain_many, or draw it in a shell with camkit VIDEO --model NAME",
    ),
}
"""Formats that Pillow alone does not read, and what to do."""
_DRAFTED = ("JPEG", "MPO")
"""Formats that are decoded at a reduced size; MPO is a JPEG with further views, as many phones write it."""
_ANIMATED = {".gif": "GIF", ".png": "PNG", ".apng": "PNG", ".webp": "WEBP", ".avif": "AVIF"}
"""The suffixes of pictures that may be animated, with the names that Pillow has for their formats."""
_PAGED = ("TIFF",)
"""Formats of several pages. The second picture of other formats is a view for another device, such as MPO's."""


def is_animated(path: Path) -> bool:
    """Tell whether a file is an animated picture; False if it cannot be read."""
    if path.suffix.lower() not in _ANIMATED:
        return False
    try:
        with opened(path) as picture:
            return picture.format in _ANIMATED.values() and _has_several_frames(picture)
    except Exception:  # a damaged file can make its decoder fail in any way; reading it reports the error
        return False


def _has_several_frames(picture: Image.Image) -> bool:
    """Tell whether a picture is animated or has several pages; False if what follows the first is damaged."""
    if picture.format not in (*_ANIMATED.values(), *_PAGED):
        return False
    try:
        return bool(getattr(picture, "is_animated", False))
    except Exception:  # a damaged file can make its decoder fail in any way
        return False


def opened(path: Path, data: bytes | None = None) -> Image.Image:
    """Open a picture file, or its bytes, to be decoded later.

    Raises:
        ImageError: the path is a pipe or a device, or the file is a program: Pillow would run PostScript.
        OSError: Pillow cannot open the file.
    """
    if data is None:
        refuse_pipe(path, ImageError)
    try:
        picture = Image.open(path if data is None else io.BytesIO(data))
    except UnidentifiedImageError:
        _register_heif()
        picture = Image.open(path if data is None else io.BytesIO(data))
    if picture.format == "EPS":
        picture.close()
        raise ImageError(f"{path} is PostScript, a program that camkit does not run; save the picture as PNG")
    return picture


@functools.cache
def _register_heif() -> None:
    """Let Pillow read HEIC if pillow-heif is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("pillow_heif").register_heif_opener()


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


_WITH_ORIENTATION = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")
"""The entries of a Pillow picture's ``info`` in which ``getexif`` finds an orientation."""


def turned(picture: Image.Image) -> Image.Image:
    """Return a picture upright, as the orientation in its EXIF data says, and without that data if it was turned."""
    picture.load()  # Pillow turns a TIFF itself when it decodes it
    transposition = _TO_UPRIGHT.get(picture.getexif().get(ExifTags.Base.Orientation, 1))
    if transposition is None:
        return picture
    upright = picture.transpose(transposition)
    for key in _WITH_ORIENTATION:  # otherwise whoever reads it again would turn the picture twice
        upright.info.pop(key, None)
    return upright


def upright(picture: Image.Image, source: str) -> Image.Image:
    """Return a PIL picture as RGB, turned upright by its EXIF orientation.

    Raises:
        ImageError: the picture is empty, or its data is damaged, which shows only when PIL decodes it.
    """
    if 0 in picture.size:
        raise ImageError(f"{source} has {picture.width} x {picture.height} pixels")
    with as_error(ImageError, lambda error: f"{source} cannot be read: {brief(error)}"):
        return _upright_rgb(picture, source)


def _upright_rgb(picture: Image.Image, source: str, *, copy: bool = True) -> Image.Image:
    tags: Mapping[int, Any] = getattr(picture, "tag_v2", {})  # turning a picture loses its tags
    white = 2 ** tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0] - 1
    # 0 means "white is 0" (TIFF 6.0, section 4), which Pillow does not apply to 16 bits.
    is_inverted = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
    return as_rgb(turned(picture), source, (white, 0) if is_inverted else (0, white), copy=copy)


def as_rgb(
    picture: Image.Image,
    source: str = "the picture",
    levels: tuple[int, int] = (0, _WHITE_OF_16_BITS),
    *,
    copy: bool = True,
) -> Image.Image:
    """Return any PIL picture as 8-bit sRGB.

    Args:
        picture: the picture.
        source: its name for messages.
        levels: the numbers of black and white in greyscale of up to 16 bits.
        copy: return another object also if the picture is RGB already, since its owner may change it.

    Raises:
        ImageError: the picture holds 32-bit numbers, and their range does not show which are black and white.
    """
    profile = picture.info.get("icc_profile")
    if picture.mode in _SIXTEEN_BIT:
        picture = _from_whole_numbers(picture, source, levels)
    elif picture.mode == "F":
        picture = _from_floating_point(picture, source)
    elif picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    if profile:
        picture = _from_profile(picture, profile, source)
    return picture if picture.mode == "RGB" and not copy else picture.convert("RGB")


def _from_whole_numbers(picture: Image.Image, source: str, levels: tuple[int, int]) -> Image.Image:
    values = np.asarray(picture)
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    # Before version 11.3, Pillow also gave 16-bit PNG the mode of 32 bits.
    is_wide = picture.mode == "I" and picture.format != "PNG"
    if is_wide and not (low >= 0 and (high == 0 or 255 < high <= _WHITE_OF_16_BITS)):
        raise ImageError(
            f"{source} holds 32-bit numbers from {low} to {high}, so it is not clear which number is white; save it "
            "with 8 or 16 bits"
        )
    black, white = (0, _WHITE_OF_16_BITS) if picture.mode == "I" else levels
    return _grey((values.astype(np.float64) - black) / (white - black) * 255)


def _from_floating_point(picture: Image.Image, source: str) -> Image.Image:
    values = np.asarray(picture, dtype=np.float64)
    if not np.isfinite(values).all() or values.min(initial=0) < 0 or values.max(initial=0) > 255:
        raise ImageError(f"{source} is floating point; its values must be from 0 to 1 or from 0 to 255")
    return _grey(values * 255 if values.max(initial=0) <= 1 else values)


def _from_profile(picture: Image.Image, profile: bytes, source: str) -> Image.Image:
    """Convert colours from a colour profile to sRGB; a profile that cannot be used is ignored with a warning."""
    mode = _PROFILED.get(picture.mode)
    if mode is None:
        return picture
    try:
        transform = _transform_to_srgb(profile, mode)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        warnings.warn(f"the colour profile of {source} cannot be used; its colours are taken as sRGB", stacklevel=2)
        return picture
    if transform is None:
        return picture
    converted = ImageCms.applyTransform(picture.convert(transform.input_mode), transform)
    assert converted is not None
    return converted


_PROFILED = {
    **dict.fromkeys(("1", "L", "LA"), "L"),
    **dict.fromkeys(("P", "PA", "RGB", "RGBA", "RGBX", "YCbCr"), "RGB"),
    "CMYK": "CMYK",
}
"""The mode in which pictures of each mode are converted. Other modes, such as LAB, define their colours themselves."""

_SRGB_TOLERANCE = 2
"""A profile that moves no colour by more than this many levels of 255 is sRGB, and the pixels stay as they are: the
sRGB profiles of cameras and editors measured 0 or 1, other profiles 64 and more."""

_PROFILES = 16
"""This many conversions are kept: the pictures of a folder come from a few cameras and programs."""


@functools.lru_cache(maxsize=_PROFILES)
def _transform_to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion to sRGB; None if the profile is sRGB."""
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    space = opened.profile.xcolor_space.strip()
    if mode == "L" and space == "RGB":  # greyscale that was saved with the profile of a colour picture
        mode = "RGB"
    if space != {"L": "GRAY"}.get(mode, mode):
        raise ValueError(f"a profile for {space} on a picture of {mode}")
    transform = ImageCms.buildTransform(
        opened,
        ImageCms.createProfile("sRGB"),
        mode,
        "RGB",
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
        ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    levels = np.linspace(0, 255, 9).astype(np.uint8)
    chart = np.stack(np.meshgrid(*[levels] * len(mode)), -1).reshape(1, -1, len(mode))
    colours = Image.fromarray(chart[..., 0] if mode == "L" else chart, mode)
    converted = ImageCms.applyTransform(colours, transform)
    moved = np.abs(np.asarray(converted, int) - np.asarray(colours.convert("RGB"), int)).max()
    return None if moved <= _SRGB_TOLERANCE else transform


def _grey(values: np.ndarray) -> Image.Image:
    return Image.fromarray(np.rint(values).astype(np.uint8))


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


def jpeg_quality(path: Path) -> float:
    """Return the quality of a JPEG, 1..100, as the Independent JPEG Group's library scales its table.

    The library multiplies the standard table by 50 / quality below 50, and by 2 - quality / 50 above. This function
    compares the means of the tables, so it is right to about one step from 25 on; below, entries are cut at 255.
    """
    try:
        with opened(path) as picture:
            table = getattr(picture, "quantization", {}).get(0)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # reading it reports the error
        return LOSSLESS
    if not table:
        return LOSSLESS
    scale = sum(table) / len(table) / _STANDARD_MEAN
    quality = 100 - 50 * scale if scale <= 1 else 50 / scale
    return float(min(max(round(quality), 1), 100))
