"""Reads the frames of a video that a model for clips sees."""

from __future__ import annotations

from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from camkit.errors import ImageError
from camkit.images.video import Frame, is_video, opened_video
from camkit.models.clips import ClipPreprocess
from camkit.types import ClipFrame


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
