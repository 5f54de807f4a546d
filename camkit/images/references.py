"""The reference pictures with which a picture is compared: the caller's, or smooth noise."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from camkit.engine.guard import interruptible, same_randomness, undisturbed
from camkit.engine.heatmap import upsample
from camkit.engine.passes import ReferencePictures, keep_last
from camkit.errors import ImageError
from camkit.images.listing import Pictures
from camkit.images.prepare import prepare, unbatched
from camkit.types import ImageLike, Preprocess, ReferencesLike

MOST = 16
"""The most reference pictures: each costs as much as a training step of the head."""

_OCTAVES = (2, 4, 8, 16, 32)
"""Cells of the grids whose noise is enlarged and summed: each has half the contrast of the one before, as in photos."""

_PLAIN_SIZE = (256, 256)
"""The size of the black and the white picture that show the range of a model's inputs."""

_MOST_MADE = 4
"""Sizes of input, or ranges of its values, for which the reference pictures are kept."""


def chosen(references: ReferencesLike, rank: int = 2) -> tuple[list[ImageLike], str]:
    """Return the reference pictures, and what they are as a phrase. Of more than ``MOST``, some at equal distances.

    Raises:
        ImageError: there are none.
    """
    if isinstance(references, (str, Path)):
        found: list[ImageLike] = [file.path for file in Pictures([references])]
        origin = f" of {references}"
    else:
        several = [references] if isinstance(references, Tensor) else references
        found, origin = list(unbatched(several, rank)), ", passed as references"
    if not found:
        raise ImageError(f"there are no reference pictures: {references!r} is empty; pass 8 to {MOST} pictures")
    count = min(len(found), MOST)
    of_all = "" if count == len(found) else f" of {len(found):,}"
    words = f"{count}{of_all} {'picture' if len(found) == 1 else 'pictures'}{origin}"
    return [found[number * len(found) // count] for number in range(count)], words


class References:
    """The reference pictures of one model, ready for inputs of any size.

    Args:
        references: the caller's; None for smooth noise in the range of the inputs.
        preprocess: turns a PIL picture into the model's input.
        rank: the number of axes after the channels.

    Raises:
        ImageError, InputError: as ``chosen``.
    """

    def __init__(self, references: ReferencesLike | None, preprocess: Preprocess | None, rank: int) -> None:
        self._chosen = None if references is None else chosen(references, rank)
        self._preprocess, self._rank = preprocess, rank
        self._prepared: list[Tensor] | None = None
        self._made: dict[object, ReferencePictures] = {}

    def __call__(self, image: Float[Tensor, "1 c *size"]) -> ReferencePictures:
        """Return the reference pictures for a model's input, at its size.

        Raises:
            ImageError: a reference picture cannot be read, or does not fit the input.
        """
        image = image.detach().float().cpu()
        low_high = () if self._chosen is not None else self._limits(image)
        key = tuple(image.shape), *(tuple(values.tolist()) for values in low_high)
        made = self._made.get(key) or (self._noise(image, *low_high) if low_high else self._given(image))
        return keep_last(self._made, key, made, _MOST_MADE)

    def _given(self, image: Tensor) -> ReferencePictures:
        assert self._chosen is not None
        pictures, words = self._chosen
        if self._prepared is None:
            with same_randomness():
                self._prepared = [self._read(picture, number) for number, picture in enumerate(pictures, start=1)]
        size = tuple(image.shape[2:])
        sized = [each if tuple(each.shape[1:]) == size else upsample(each, size) for each in self._prepared]
        for each in sized:
            if each.shape != image.shape[1:]:
                raise ImageError(f"a reference picture has {len(each)} channels, but the picture has {image.shape[1]}")
        return ReferencePictures(torch.stack(sized), words)

    def _read(self, picture: ImageLike, number: int) -> Tensor:
        name = str(picture) if isinstance(picture, (str, Path)) else f"reference picture {number}"
        tensor = prepare(picture, self._preprocess, name, self._rank).tensor.detach().float().cpu()
        if not bool(tensor.isfinite().all()):
            raise ImageError(f"{name} holds NaN or infinite values where the model would see it")
        return tensor

    def _noise(self, image: Tensor, low: Float[Tensor, " c"], high: Float[Tensor, " c"]) -> ReferencePictures:
        """Return noise that fills the range of each channel."""
        size = tuple(image.shape[2:])
        shares = smooth_noise(MOST * image.shape[1], size).reshape(MOST, *image.shape[1:])
        low, high = (values.reshape(-1, *[1] * len(size)) for values in (low, high))
        return ReferencePictures(low + (high - low) * shares, f"{MOST} pictures of smooth noise, made by camkit")

    def _limits(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest value of each channel (c,): from black to white, or in this very picture."""
        if self._plain is not None and len(self._plain[0]) == image.shape[1]:
            return self._plain
        return image[0].flatten(1).amin(1), image[0].flatten(1).amax(1)

    @functools.cached_property
    def _plain(self) -> tuple[Tensor, Tensor] | None:
        """The values (c,) of a black and of a white picture; None if the preprocessing does not keep them apart."""
        if self._preprocess is None:
            return None
        try:
            with undisturbed(), same_randomness(), interruptible():
                plain = [Image.new("RGB", _PLAIN_SIZE, level) for level in ("black", "white")]
                low, high = (prepare(each, self._preprocess, "a plain picture").tensor for each in plain)
            low, high = (values.detach().float().cpu().flatten(1).mean(1) for values in (low, high))
        except Exception:  # the preprocessing is the caller's
            return None
        return (low, high) if bool(((high - low).abs() > 0).all()) else None


def smooth_noise(count: int, size: tuple[int, ...]) -> Float[Tensor, "count *size"]:
    """Return smooth noise from 0 to 1, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(count, *size)
    for cells in _OCTAVES:
        grid = torch.rand(count, *[min(cells, side) for side in size], generator=generator)
        total += upsample(grid, size) * (2 / cells)
    flat = total.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return ((flat - low) / torch.where(high > low, high - low, 1)).reshape(total.shape)
