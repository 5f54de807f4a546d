"""Models that take clips, and what turns the frames of a video into their input."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from camkit.errors import ImageError
from camkit.models.inputs import Adapter
from camkit.types import Pixels


def taking_clips(model: nn.Module, argument: str) -> Adapter:
    """Return a model that reads clips frame by frame, (N, T, C, H, W), as one that takes them as (N, C, T, H, W).

    Args:
        model: the model.
        argument: the name of its argument for the clips.
    """
    module = Adapter(model, functools.partial(_by_frames, argument=argument))
    module.spatial_axes = 3
    return module


def _by_frames(model: nn.Module, clips: Float[Tensor, "n c t h w"], *, argument: str) -> object:
    return model(**{argument: clips.transpose(1, 2)})


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
