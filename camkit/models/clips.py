"""Models that take clips, and what turns the frames of a video into their input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from camkit.errors import ImageError
from camkit.types import Pixels


class TakesClips(nn.Module):
    """Lets a model that reads clips frame by frame, (N, T, C, H, W), take them as (N, C, T, H, W).

    Args:
        model: the model.
        argument: the name of its argument for the clips.
    """

    spatial_axes: ClassVar[int] = 3

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model = model
        self.argument = argument

    def forward(self, clips: Float[Tensor, "n c t h w"]) -> object:
        """Return the model's output."""
        return self.model(**{self.argument: clips.transpose(1, 2)})


class ClipPreprocess(ABC):
    """Chooses frames of a video, and turns them into the input of a model."""

    @abstractmethod
    def chosen(self, count: int, rate: float) -> list[int]:
        """Return the numbers of the frames that the model sees, from 0.

        Args:
            count: how many frames the video has.
            rate: how many of them a second has.

        Raises:
            ImageError: the video is too short.
        """

    @abstractmethod
    def of_frames(self, frames: Sequence[Pixels]) -> Float[Tensor, "c t h w"]:
        """Return the model's input for these frames, (H, W, 3) each."""

    def __call__(self, picture: Image.Image) -> Tensor:  # noqa: ARG002
        """Refuse a single picture.

        Raises:
            ImageError: always.
        """
        raise ImageError("the model takes clips, and this is one picture; pass a video file, or a tensor (C, T, H, W)")


def refuse_short(count: int, needed: int) -> None:
    """Refuse a video with fewer frames than a model takes.

    Raises:
        ImageError: it has fewer.
    """
    if count < needed:
        raise ImageError(f"the model takes {needed} frames, but the video has {count}")
