"""Turns a picture file, a PIL picture or an array into 8-bit sRGB, and reads the frames of videos one by one.

A long video needs no more memory than a short one. OpenCV reads videos, Pillow reads animated GIF, PNG, WebP and AVIF
files.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import Float
from PIL import ExifTags, Image, ImageCms, ImageSequence, UnidentifiedImageError
from torch import Tensor

from camkit.errors import ImageError, as_error, brief, refuse_pipe
from camkit.images.files import about_address, is_regular
from camkit.models.modules import ClipPreprocess
from camkit.types import ClipFrame, Pixels

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
            read = as_rgb(turned(picture), str(path), copy=False)
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
        return as_rgb(turned(picture), source)


def as_rgb(picture: Image.Image, source: str = "the picture", *, copy: bool = True) -> Image.Image:
    """Return any PIL picture as 8-bit sRGB.

    Args:
        picture: the picture.
        source: its name for messages.
        copy: return another object also if the picture is RGB already, since its owner may change it.

    Raises:
        ImageError: the picture holds 32-bit numbers, and their range does not show which are black and white.
    """
    profile = picture.info.get("icc_profile")
    if picture.mode in _SIXTEEN_BIT:
        picture = _from_whole_numbers(picture, source)
    elif picture.mode == "F":
        picture = _from_floating_point(picture, source)
    elif picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    if profile:
        picture = _from_profile(picture, profile, source)
    return picture if picture.mode == "RGB" and not copy else picture.convert("RGB")


def _from_whole_numbers(picture: Image.Image, source: str) -> Image.Image:
    values = np.asarray(picture)
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    # Before version 11.3, Pillow also gave 16-bit PNG the mode of 32 bits.
    is_wide = picture.mode == "I" and picture.format != "PNG"
    if is_wide and not (low >= 0 and (high == 0 or 255 < high <= _WHITE_OF_16_BITS)):
        raise ImageError(
            f"{source} holds 32-bit numbers from {low} to {high}, so it is not clear which number is white; save it "
            "with 8 or 16 bits"
        )
    return _grey(values.astype(np.float64) / _WHITE_OF_16_BITS * 255)


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
        if not np.issubdtype(array.dtype, np.floating) or not (array.min() >= 0 and array.max() <= 1):  # NaN is neither
            raise ImageError(
                f"an array must be uint8 (0 to 255) or floating point from 0 to 1, and this one of {array.dtype} is "
                "neither; pass normalised images as a torch.Tensor"
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


_READER = cv2.CAP_FFMPEG if cv2.videoio_registry.hasBackend(cv2.CAP_FFMPEG) else cv2.CAP_ANY
"""OpenCV's way to read videos. If it may choose, it also tries its own AVI reader, and that prints bytes of damaged
files."""
_USUAL_RATE = 25.0
"""Frames per second of a video that does not say how many it has."""
_RATES = (0.1, 1000.0)
"""What is taken for a number of frames per second; files without one say 0, NaN, or the ticks of their clock."""
_USUAL_DURATION = 100
"""Milliseconds of a frame of an animated picture that does not say how long it is shown, as in browsers."""
_FEWEST_READ = 0.98
"""A file whose frames end before this share of the announced number is broken off. Containers that announce an estimate
from the duration, such as Matroska, are off by a frame or two in a hundred."""


@dataclass(frozen=True)
class Frame:
    """One frame: its number in the file, from 1, its time in seconds, and its pixels."""

    number: int
    time: float
    pixels: Pixels


@dataclass(frozen=True)
class Video:
    """A video that is open for reading.

    Attributes:
        rate: frames per second.
        count: how many frames the file announces; 0 if it does not say.
        frames: its frames, in order; reading them raises an ImageError where the file breaks off.
    """

    rate: float
    count: int
    frames: Iterator[Frame]


def is_video(path: Path) -> bool:
    """Tell whether a file is a video by its suffix, or an animated picture by its content."""
    return is_animated(path) or (path.suffix.lower() in VIDEO_SUFFIXES and not path.is_dir())


@contextlib.contextmanager
def opened_video(path: Path, every: int = 1) -> Iterator[Video]:
    """Open a video or an animated picture, and yield a ``Video`` that reads every ``every``-th frame, from the first.

    Raises:
        ImageError: there is no such file, or it cannot be read as a video, or it has no frames.
    """
    if not path.exists():
        raise ImageError(about_address(str(path)) or f"there is no file {path}")
    if not is_regular(path):
        raise ImageError(f"{path} is a folder, a pipe or a device; save the video to a file and pass that")
    if path.suffix.lower() not in VIDEO_SUFFIXES:
        with _animated(path, every) as video:
            yield video
        return
    with quiet_decoders():
        capture = cv2.VideoCapture(str(path), _READER)
    try:
        if not capture.isOpened():
            raise ImageError(
                f"{brief(path)} cannot be read as a video: it is damaged, or this OpenCV has no decoder for it"
            )
        rate = capture.get(cv2.CAP_PROP_FPS)
        count = capture.get(cv2.CAP_PROP_FRAME_COUNT)
        rate = rate if _RATES[0] <= rate <= _RATES[1] else _USUAL_RATE
        count = int(count) if math.isfinite(count) and count > 0 else 0
        yield Video(rate, count, _captured(capture, path, rate, count, every))
    finally:
        capture.release()


def _captured(capture: cv2.VideoCapture, path: Path, rate: float, count: int, every: int) -> Iterator[Frame]:
    number = 0
    while capture.grab():
        number += 1
        if (number - 1) % every:
            continue
        is_read, pixels = capture.retrieve()
        if not is_read or not pixels.size:  # OpenCV's own reader returns damaged frames as empty ones
            break
        yield Frame(number, (number - 1) / rate, np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)))
    if not number:
        raise ImageError(f"{path} has no frame that can be read: it is damaged, or this OpenCV has no decoder for it")
    if number < math.floor(count * _FEWEST_READ):
        raise ImageError(f"{path} breaks off after {number} of {count} frames")


@contextlib.contextmanager
def _animated(path: Path, every: int) -> Iterator[Video]:
    durations: list[float] = []
    problem = ""
    with contextlib.ExitStack() as stack:
        try:
            picture = stack.enter_context(opened(path))
            for frame in ImageSequence.Iterator(picture):
                frame.load()  # some formats say how long a frame is shown only when it is decoded
                durations.append(float(frame.info.get("duration") or _USUAL_DURATION))
        except Exception as error:  # a damaged file can make its decoder fail in any way
            if not durations:
                raise ImageError(f"{brief(path)} cannot be read: {brief(error)}") from error
            problem = f"{path} breaks off after {len(durations)} frames: {brief(error)}"
        rate = 1000 * len(durations) / sum(durations)
        rate = min(max(rate, _RATES[0]), _RATES[1])
        yield Video(rate, len(durations), _animation(picture, path, durations, every, problem))


def _animation(picture: Image.Image, path: Path, durations: list[float], every: int, problem: str) -> Iterator[Frame]:
    for place in range(0, len(durations), every):
        picture.seek(place)
        yield Frame(place + 1, sum(durations[:place]) / 1000, np.asarray(as_rgb(picture.copy(), str(path))))
    if problem:
        raise ImageError(problem)


@contextlib.contextmanager
def quiet_decoders() -> Iterator[None]:
    """Keep OpenCV and FFmpeg from printing lines of their own about damaged files; camkit's error is enough.

    FFmpeg's level is read from the environment when OpenCV opens its first video.
    """
    name, level = "OPENCV_FFMPEG_LOGLEVEL", cv2.utils.logging.getLogLevel()
    is_set = name in os.environ
    os.environ.setdefault(name, "-8")
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(level)
        if not is_set:
            os.environ.pop(name, None)


def read_clip(file: Path, preprocess: ClipPreprocess) -> tuple[Float[Tensor, "c t h w"], tuple[ClipFrame, ...]]:
    """Return the model's input for a video, and its frames.

    Raises:
        ImageError: the file is not a video, cannot be read, or is too short for the model.
    """
    if file.exists() and not is_video(file):
        raise ImageError(f"{file} is not a video, and the model takes clips; pass a video file")
    with opened_video(file) as video:
        count, rate = video.count or sum(1 for _ in video.frames), video.rate
    frames, read = _frames(file, preprocess.chosen(count, rate))
    if not frames:  # the file announces more frames than it has
        frames, _ = _frames(file, preprocess.chosen(read, rate))
    shown = tuple(ClipFrame(frame.number, frame.time) for frame in frames)
    return preprocess.of_frames([frame.pixels for frame in frames]), shown


def _frames(file: Path, numbers: list[int]) -> tuple[list[Frame], int]:
    """Return the frames with these numbers, from 0, and how many were read; none if the video ends before."""
    wanted, kept, read = set(numbers), {}, 0
    with opened_video(file) as video:
        for frame in video.frames:
            read = frame.number
            if read - 1 in wanted:
                kept[read - 1] = frame
            if len(kept) == len(wanted):
                return [kept[number] for number in numbers], read
    return [], read
