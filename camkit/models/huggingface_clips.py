"""Prepares clips as the video processors of Hugging Face do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor
from transformers.video_utils import VideoMetadata

from camkit.models.clips import ClipPreprocess, refuse_short
from camkit.types import Pixels


class PrepareClip(ClipPreprocess):
    """Prepares clips with a video processor.

    Args:
        processor: the video processor.
        frames: how many frames the model takes. If the processor names a rate, that decides in its place.
    """

    def __init__(self, processor: Any, frames: int) -> None:
        self.processor = processor
        self.frames = frames

    def chosen(self, count: int, rate: float) -> list[int]:
        """Return the numbers of the frames that the processor samples, from 0."""
        at_rate = getattr(self.processor, "fps", None)
        if at_rate is None:
            refuse_short(count, self.frames)
        metadata = VideoMetadata(total_num_frames=count, fps=rate)
        wanted = {"num_frames": self.frames} if at_rate is None else {"fps": at_rate}
        return [int(number) for number in self.processor.sample_frames(metadata, **wanted)]

    def of_frames(self, frames: Sequence[Pixels]) -> Float[Tensor, "c t h w"]:
        """Return the model's input for these frames."""
        processed = self.processor(videos=[np.stack(frames)], do_sample_frames=False, return_tensors="pt")
        clip: Tensor = next(processed[name] for name in ("pixel_values", "pixel_values_videos") if name in processed)[0]
        return clip.transpose(0, 1)
