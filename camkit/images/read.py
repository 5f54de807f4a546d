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
from pathlib import Path
from typing import NamedTuple, TypeAlias

import cv2
import numpy as np
from jaxtyping import Float
from PIL import ExifTags, Image, ImageCms, ImageSequence, UnidentifiedImageError
from torch import Tensor

from camkit.errors import ImageError, as_error, brief, refuse_pipe
from camkit.images.files import about_address, is_regular
from camkit.models.modules import ClipPreprocess
from camkit.types import ClipFrame, Pixels

VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".3gp", ".ts", ".mts"),
    ".m2ts",
)
"""The files that are videos."""

LOSSLESS = 100.0
"""The quality of a file that is not a JPEG, or that cannot be read."""


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

    def said(error: Exception) -> str:
        if isinstance(error, IsADirectoryError):
            return f"{path} is a folder; pass the picture files in it"
        if isinstance(error, FileNotFoundError):
            return about_address(str(path)) or f"there is no file {path}"
        if isinstance(error, UnidentifiedImageError):
            is_empty = not (path.stat().st_size if data is None else data)
            return (
                f"{path} is {'an empty file' if is_empty else _OTHER_FORMATS.get(path.suffix.lower(), 'not a picture')}"
            )
        return f"{brief(path)} cannot be read: {brief(error)}"

    with as_error(ImageError, said), opened(path, data) as picture:
        longest = max(picture.size)
        # These formats are decoded at a reduced size; MPO is a JPEG with further views, as many phones write it.
        if shorter is not None and picture.format in ("JPEG", "MPO"):
            ratio = shorter / min(picture.size)
            picture.draft(None, (math.ceil(picture.width * ratio), math.ceil(picture.height * ratio)))
            reduction = longest / max(picture.size)
        picture.load()
        read = as_rgb(turned(picture), str(path), copy=False)
        several = _has_several_frames(picture)
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
_ANIMATED = {".gif": "GIF", ".png": "PNG", ".apng": "PNG", ".webp": "WEBP", ".avif": "AVIF"}
"""The suffixes of pictures that may be animated, with the names that Pillow has for their formats."""


def is_animated(path: Path) -> bool:
    """Tell whether a file is an animated picture; False if it cannot be read."""
    if path.suffix.lower() in _ANIMATED:
        with contextlib.suppress(Exception), opened(path) as picture:  # reading a damaged file reports the error
            return picture.format in _ANIMATED.values() and _has_several_frames(picture)
    return False


def _has_several_frames(picture: Image.Image) -> bool:
    """Tell whether a picture is animated or has several pages; False if what follows the first is damaged."""
    if picture.format in (*_ANIMATED.values(), "TIFF"):  # the second picture of other formats is for another device
        with contextlib.suppress(Exception):  # a damaged file can make its decoder fail in any way
            return bool(getattr(picture, "is_animated", False))
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


def turned(picture: Image.Image) -> Image.Image:
    """Return a picture upright, as the orientation in its EXIF data says, and without that data if it was turned."""
    picture.load()  # Pillow turns a TIFF itself when it decodes it
    transposition = _TO_UPRIGHT.get(picture.getexif().get(ExifTags.Base.Orientation, 1))
    if transposition is None:
        return picture
    upright = picture.transpose(transposition)
    # getexif finds an orientation under these: whoever reads the picture again would turn it twice.
    for key in ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"):
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
    if picture.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N", "F"):
        picture = _grey(picture, source)
    elif picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    if profile:
        picture = _from_profile(picture, profile, source)
    return picture if picture.mode == "RGB" and not copy else picture.convert("RGB")


def _grey(picture: Image.Image, source: str) -> Image.Image:
    values = np.asarray(picture, np.float64)
    low, high = values.min(initial=0), values.max(initial=0)
    if picture.mode == "F":
        is_clear, levels = low >= 0 and high <= 255, values * 255 if high <= 1 else values
    else:
        # Before version 11.3, Pillow also gave 16-bit PNG the mode of 32 bits.
        is_wide = picture.mode == "I" and picture.format != "PNG"
        is_clear = not is_wide or (low >= 0 and (high == 0 or 255 < high <= 65535))
        levels = values / 65535 * 255
    if not is_clear:  # also for NaN
        kind = "floating-point" if picture.mode == "F" else "32-bit"
        raise ImageError(
            f"{source} holds {kind} numbers from {low:.10g} to {high:.10g}, so it is not clear which number is white; "
            "save it with 8 or 16 bits, or as floating point up to 1 or 255"
        )
    return Image.fromarray(np.rint(levels).astype(np.uint8))


def _from_profile(picture: Image.Image, profile: bytes, source: str) -> Image.Image:
    """Convert colours from a colour profile to sRGB; a profile that cannot be used is ignored with a warning."""
    mode = _PROFILED.get(picture.mode)
    try:
        transform = None if mode is None else _transform_to_srgb(profile, mode)
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


@functools.lru_cache(maxsize=16)  # the pictures of a folder come from a few cameras and programs
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
    # The sRGB profiles of cameras and editors moved a colour by 0 or 1 of 255 levels, other profiles by 64 and more.
    return None if moved <= 2 else transform


def from_array(array: np.ndarray) -> Image.Image:
    """Return an array as a PIL picture.

    Args:
        array: H x W, or H x W x 1, 3 or 4; uint8, or floating point from 0 to 1.

    Raises:
        ImageError: the array has another shape, type or range.
    """
    is_picture = array.size > 0 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4)))
    is_float = np.issubdtype(array.dtype, np.floating) and is_picture
    if not is_picture or not (array.dtype == np.uint8 or (is_float and array.min() >= 0 and array.max() <= 1)):
        raise ImageError(
            "an array must be uint8 (0 to 255) or floating point from 0 to 1, and have the shape H x W x 3 (or x 1, "
            f"x 4, or H x W), unlike this one of {array.dtype} and shape {array.shape}; pass channels-first and "
            "normalised images as a torch.Tensor"
        )
    if is_float:
        array = np.rint(array * 255).astype(np.uint8)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array)).convert("RGB")


def jpeg_quality(path: Path) -> float:
    """Return the quality of a JPEG, 1..100, as the Independent JPEG Group's library scales its table.

    The library multiplies the standard table by 50 / quality below 50, and by 2 - quality / 50 above. This function
    compares the means of the tables, so it is right to about one step from 25 on; below, entries are cut at 255.
    """
    table = None
    with contextlib.suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError), opened(path) as picture:
        table = getattr(picture, "quantization", {}).get(0)
    if not table:  # it is not a JPEG, or reading it reports the error
        return LOSSLESS
    # 57.625 is the mean of the standard table for brightness (ITU-T T.81, Annex K.1), which has the quality 50.
    scale = sum(table) / len(table) / 57.625
    quality = 100 - 50 * scale if scale <= 1 else 50 / scale
    return float(min(max(round(quality), 1), 100))


_RATES = (0.1, 1000.0)
"""What is taken for a number of frames per second; files without one say 0, NaN, or the ticks of their clock."""


Frames: TypeAlias = Iterator[tuple[ClipFrame, Pixels]]
"""Frames with their pixels."""


class Video(NamedTuple):
    """A video that is open for reading.

    Attributes:
        rate: frames per second.
        length: how many frames the file announces; 0 if it does not say.
        frames: its frames with their pixels, in order; reading them raises an ImageError where the file breaks off.
    """

    rate: float
    length: int
    frames: Frames


def is_video(path: Path) -> bool:
    """Tell whether a file is a video by its suffix, or an animated picture by its content."""
    return is_animated(path) or (path.suffix.lower() in VIDEO_SUFFIXES and not path.is_dir())


@contextlib.contextmanager
def opened_video(path: Path, every: int = 1) -> Iterator[Video]:
    """Open a video or an animated picture, and yield a ``Video`` that reads every ``every``-th frame, from the first.

    Raises:
        ImageError: there is no such file, or it cannot be read as a video, or it has no frames.
    """
    if not is_regular(path):
        said = f"{path} is not a file, but a folder, a pipe or a device; save the video to a file and pass that"
        raise ImageError(about_address(str(path)) or (said if path.exists() else f"there is no file {path}"))
    if path.suffix.lower() not in VIDEO_SUFFIXES:
        with _animated(path, every) as video:
            yield video
        return
    # If OpenCV may choose, it also tries its own AVI reader, and that prints bytes of damaged files.
    has_ffmpeg = cv2.videoio_registry.hasBackend(cv2.CAP_FFMPEG)
    with quiet_decoders():
        capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG if has_ffmpeg else cv2.CAP_ANY)
    try:
        if not capture.isOpened():
            raise ImageError(
                f"{brief(path)} cannot be read as a video: it is damaged, or this OpenCV has no decoder for it"
            )
        rate, count = capture.get(cv2.CAP_PROP_FPS), capture.get(cv2.CAP_PROP_FRAME_COUNT)
        rate = rate if _RATES[0] <= rate <= _RATES[1] else 25.0  # the usual rate, if a file names none
        count = int(count) if math.isfinite(count) and count > 0 else 0
        yield Video(rate, count, _captured(capture, path, rate, count, every))
    finally:
        capture.release()


def _captured(capture: cv2.VideoCapture, path: Path, rate: float, count: int, every: int) -> Frames:
    number = 0
    while capture.grab():
        number += 1
        if (number - 1) % every:
            continue
        is_read, pixels = capture.retrieve()
        if not is_read or not pixels.size:  # OpenCV's own reader returns damaged frames as empty ones
            break
        yield ClipFrame(number, (number - 1) / rate), np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))
    # Containers that announce an estimate from the duration, such as Matroska, are off by a frame or two in a hundred.
    if number < max(math.floor(0.98 * count), 1):
        none = "has no frame that can be read: it is damaged, or this OpenCV has no decoder for it"
        raise ImageError(f"{path} {f'breaks off after {number} of {count} frames' if number else none}")


@contextlib.contextmanager
def _animated(path: Path, every: int) -> Iterator[Video]:
    durations: list[float] = []
    problem = ""
    with contextlib.ExitStack() as stack:
        try:
            picture = stack.enter_context(opened(path))
            for frame in ImageSequence.Iterator(picture):
                frame.load()  # some formats say how long a frame is shown only when it is decoded
                durations.append(
                    float(frame.info.get("duration") or 100)
                )  # what browsers take for one that is not said
        except Exception as error:  # a damaged file can make its decoder fail in any way
            if not durations:
                raise ImageError(f"{brief(path)} cannot be read: {brief(error)}") from error
            problem = f"{path} breaks off after {len(durations)} frames: {brief(error)}"
        rate = 1000 * len(durations) / sum(durations)
        rate = min(max(rate, _RATES[0]), _RATES[1])
        yield Video(rate, len(durations), _animation(picture, path, durations, every, problem))


def _animation(picture: Image.Image, path: Path, durations: list[float], every: int, problem: str) -> Frames:
    for place in range(0, len(durations), every):
        picture.seek(place)
        shown = np.asarray(as_rgb(picture.copy(), str(path)))
        yield ClipFrame(place + 1, sum(durations[:place]) / 1000), shown
    if problem:
        raise ImageError(problem)


@contextlib.contextmanager
def quiet_decoders() -> Iterator[None]:
    """Keep OpenCV and FFmpeg from printing lines of their own about damaged files; camkit's error is enough.

    FFmpeg's level is read from the environment when OpenCV opens its first video.
    """
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    level = cv2.utils.logging.getLogLevel()
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(level)


def read_clip(file: Path, preprocess: ClipPreprocess) -> tuple[Float[Tensor, "c t h w"], tuple[ClipFrame, ...]]:
    """Return the model's input for a video, and its frames.

    Raises:
        ImageError: the file is not a video, cannot be read, or is too short for the model.
    """
    if file.exists() and not is_video(file):
        raise ImageError(f"{file} is not a video, and the model takes clips; pass a video file")
    with opened_video(file) as video:
        count, rate = video.length or sum(1 for _ in video.frames), video.rate
    frames, read = _frames(file, preprocess.chosen(count, rate))
    if not frames:  # the file announces more frames than it has
        frames, _ = _frames(file, preprocess.chosen(read, rate))
    shown, pixels = zip(*frames, strict=True)
    return preprocess.of_frames(pixels), shown


def _frames(file: Path, numbers: list[int]) -> tuple[list[tuple[ClipFrame, Pixels]], int]:
    """Return the frames with these numbers, from 0, and how many were read; none if the video ends before."""
    kept, read = {}, 0
    with opened_video(file) as video:
        for frame, pixels in video.frames:
            read = frame.number
            if read - 1 in numbers:
                kept[read - 1] = frame, pixels
            if kept.keys() == {*numbers}:
                return [kept[number] for number in numbers], read
    return [], read
