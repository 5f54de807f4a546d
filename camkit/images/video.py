"""Reads the frames of videos and animated pictures one by one, so that a long video needs no more memory than a short.

OpenCV reads videos, Pillow reads animated GIF, PNG, WebP and AVIF files.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import Float
from PIL import Image, ImageSequence
from torch import Tensor

from camkit.errors import ImageError, brief
from camkit.images.files import about_address, is_regular
from camkit.images.read import VIDEO_SUFFIXES, as_rgb, is_animated, opened
from camkit.models.clips import ClipPreprocess
from camkit.types import ClipFrame, Pixels

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
    if path.stat().st_size == 0:
        raise ImageError(f"{path} is an empty file")
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
    frames, read = _frames(file, _chosen(file, preprocess, count, rate))
    if not frames:  # the file announces more frames than it has
        frames, _ = _frames(file, _chosen(file, preprocess, read, rate))
    shown = tuple(ClipFrame(frame.number, frame.time) for frame in frames)
    return preprocess.of_frames([frame.pixels for frame in frames]), shown


def _chosen(file: Path, preprocess: ClipPreprocess, count: int, rate: float) -> list[int]:
    try:
        return preprocess.chosen(count, rate)
    except ImageError as error:
        raise ImageError(f"{file}: {error}") from error


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
