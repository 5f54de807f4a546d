"""Turns a file, a PIL picture, an array or a tensor into a model's input, and a model's input back into a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms._presets import ImageClassification

from camkit.errors import ImageError, advice
from camkit.images.crop import CropBoxes
from camkit.images.read import from_array, open_draft, upright
from camkit.images.video import read_clip
from camkit.models.clips import ClipPreprocess
from camkit.models.modules import CLIPS
from camkit.types import Box, ClipFrame, ImageLike, Preprocess


def unbatched(images: Iterable[ImageLike], rank: int = 2) -> Iterator[ImageLike]:
    """Yield single images; a tensor with a batch axis, (N, C, H, W) for ``rank`` 2, is split without copying."""
    for image in images:
        if isinstance(image, Tensor) and image.dim() == rank + 2:
            yield from image
        else:
            yield image


def source_of(image: ImageLike, number: int) -> str:
    """Return the file of a picture; if it has no file, a name for it."""
    file = image if isinstance(image, (str, Path)) else getattr(image, "filename", None)
    return str(file) if file else f"picture {number}"


def prepare(
    image: ImageLike, preprocess: Preprocess | None, source: str, rank: int = 2, *, draft: bool = False
) -> Prepared:
    """Prepare one image for the model.

    Whether its values are finite is checked later, for a whole batch at once; see ``extremes``.

    Args:
        image: a path, a PIL picture, an array (H, W, C), or a normalised tensor (C, H, W), which is used unchanged; for
            a model of clips, a video's path or a tensor (C, T, H, W).
        preprocess: turns a PIL picture, or the frames of a clip, into the model's input; not used for a tensor.
        source: the name to report.
        rank: the number of axes after the channels in a tensor: 1 for a signal, 2 for a picture, 3 for a volume.
        draft: read a large JPEG file at a half, a quarter or an eighth of its size, if that is at least
            ``DRAFT_MARGIN`` times the size to which the preprocessing resizes it.

    Raises:
        ImageError: the image cannot be read or has the wrong form, or it needs ``preprocess`` and there is none.
    """
    is_clip = isinstance(preprocess, ClipPreprocess)
    if isinstance(image, Tensor):
        prepared = _prepare_tensor(image, source, rank)
        return replace(prepared, frames=tuple(map(ClipFrame, range(1, image.shape[1] + 1)))) if is_clip else prepared
    if isinstance(preprocess, ClipPreprocess) and isinstance(image, (str, Path)):
        clip, frames = read_clip(Path(image), preprocess)
        return Prepared(clip, None, None, source, frames=frames)
    reduction = 1.0
    if isinstance(image, (str, Path)):
        side = _resized_side(preprocess, at_once=True) if draft and preprocess is not None else None
        picture, reduction = open_draft(image, None if side is None else DRAFT_MARGIN * side)
    elif isinstance(image, Image.Image):
        picture = upright(image, source)
    elif isinstance(image, np.ndarray):
        picture = from_array(image)
    else:
        raise ImageError(
            f"an image is a path, a PIL picture, an array (H, W, C) or a tensor (C, H, W), not {type(image).__name__}"
        )
    if preprocess is None:
        raise ImageError(
            "camkit does not know how to prepare pictures for this model; pass "
            + advice(
                "a normalised tensor, or preprocess=... (for torchvision weights: weights.transforms())",
                "--size, --mean and --std, or let the factory return the module and its preprocessing",
            )
        )
    _check_not_thin(picture, preprocess, source)
    tensor = preprocess(picture)
    if (
        not isinstance(tensor, Tensor)
        or tensor.dim() not in (3, 4)
        or (tensor.dim() == 4 and len(tensor) != 1)
        or not tensor.numel()
    ):
        returned = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ImageError(f"preprocess must turn a PIL picture into a tensor (C, H, W), but it returned {returned}")
    return Prepared(tensor[0] if tensor.dim() == 4 else tensor, picture, None, source, reduction=reduction)


DRAFT_MARGIN = 2
"""A draft has at least this many times the pixels per side that the preprocessing keeps, so that its own resizing still
averages over several pixels. docs/folders.md has what drafts change in the maps."""


def _check_not_thin(picture: Image.Image, preprocess: Preprocess, source: str) -> None:
    """Refuse a picture that the preprocessing would enlarge beyond the size that Pillow considers safe."""
    shorter, longer = sorted(picture.size)
    resize = _resized_side(preprocess)
    if resize is None or Image.MAX_IMAGE_PIXELS is None:
        return
    if resize * (resize * longer // shorter) > Image.MAX_IMAGE_PIXELS:
        raise ImageError(
            f"{source} has {picture.width} x {picture.height} pixels and is too thin for this model: its preprocessing "
            f"resizes the shorter side to {resize} pixels, so that the longer would have {resize * longer // shorter}"
        )


_KEEPING_SIZE = ("PILToTensor", "ToDtype", "ToImage", "ToPILImage", "ToTensor", "Grayscale", "RGB")
"""Steps of a preprocessing whose result is the same picture at any size."""


def _resized_side(preprocess: Preprocess, *, at_once: bool = False) -> int | None:
    """Return the length to which a preprocessing of torchvision, timm or transformers resizes the shorter side.

    None if it resizes to a fixed size, or is another kind of function.

    Args:
        preprocess: the preprocessing.
        at_once: return None also if a step before it depends on the size of the picture, such as a crop of so many
            pixels.
    """
    if isinstance(preprocess, ImageClassification):
        return preprocess.resize_size[0] if len(preprocess.resize_size) == 1 else None
    processor = getattr(preprocess, "processor", None)
    processor_size = getattr(processor, "size", None)
    if processor_size is not None:
        edges = dict(processor_size) if getattr(processor, "do_resize", True) else {}
        return edges.get("shortest_edge") if edges.get("longest_edge") is None else None
    for step in getattr(preprocess, "transforms", ()):
        kind, size = type(step).__name__, getattr(step, "size", 0)
        sides: list[int] = list(size) if isinstance(size, Sequence) else [size]
        if kind == "Resize" and getattr(step, "max_size", None) is None:
            return sides[0] if len(sides) == 1 else None
        if kind == "ResizeKeepRatio" and not getattr(step, "longest", 0):
            return max(sides)
        if at_once and kind not in _KEEPING_SIZE:
            return None
    return None


def located(prepared: Prepared, preprocess: Preprocess | None, boxes: CropBoxes) -> Prepared:
    """Add the crop box of the preprocessing; if there is none to be found, remove the original picture.

    Call it in the caller's thread: it runs the caller's preprocessing and touches the random generators.
    """
    if prepared.picture is None or preprocess is None:
        return prepared
    box = boxes.of(preprocess, prepared.picture, prepared.tensor)
    return replace(prepared, box=box) if box is not None else replace(prepared, picture=None)


def _prepare_tensor(tensor: Tensor, source: str, rank: int) -> Prepared:
    if tensor.dim() != rank + 1 or 0 in tensor.shape or not tensor.is_floating_point():
        axes = {1: "L", 2: "H, W", 3: "D, H, W"}[rank]
        raise ImageError(
            f"a tensor must be a normalised image (C, {axes}) or a batch (N, C, {axes}) of floating-point numbers, "
            f"not {tensor.dtype} of shape {tuple(tensor.shape)}" + f"; {CLIPS}" * (rank == 2 and tensor.dim() == 5)
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ImageError(
            f"a tensor must be dense and hold values, but this one is {tensor.layout} on device {tensor.device}"
        )
    box = Box(0, 0, tensor.shape[2], tensor.shape[1]) if rank == 2 else None
    return Prepared(tensor, None, box, source)


def stacked(tensors: list[Float[Tensor, "c *size"]]) -> Float[Tensor, "n c *size"]:
    """Return the tensors as one batch; a single one is not copied."""
    detached = [tensor.detach() for tensor in tensors]
    return detached[0][None] if len(detached) == 1 else torch.stack(detached)


def as_pixels(inputs: Float[Tensor, "n c h w"]) -> UInt8[np.ndarray, "n h w 3"] | None:
    """Draw a model's inputs, the range of each stretched to 0..255.

    Returns:
        Pictures (N, h, w, 3), or None if the inputs are neither grey nor RGB.
    """
    if inputs.shape[1] not in (1, 3):
        return None
    values = inputs.detach().flatten(1)
    low, high = values.amin(1).float(), values.amax(1).float()
    slope = 255 / (high - low).clamp_min(torch.finfo(torch.float32).tiny)
    levels = (inputs.detach() * slope.reshape(-1, 1, 1, 1)).add_((0.5 - low * slope).reshape(-1, 1, 1, 1))
    return levels.clamp_(0, 255).to("cpu", torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()


def as_volume_pixels(volume: Float[Tensor, "c d h w"]) -> UInt8[np.ndarray, "d h w 3"] | None:
    """Draw the slices of a volume along its first axis, the range of the volume stretched to 0..255.

    Returns:
        Pictures (D, h, w, 3), or None if the volume is neither grey nor RGB.
    """
    drawn = as_pixels(volume.flatten(1, 2)[None])
    return None if drawn is None else drawn[0].reshape(*volume.shape[1:], 3)


@dataclass(frozen=True, eq=False)
class Prepared:
    """One picture, ready for the model.

    Attributes:
        tensor: the model's input (C, H, W).
        picture: the original picture, RGB; None if there is none, or if the crop box could not be found.
        box: the part of the original picture that the tensor shows.
        source: the name to report.
        number: which picture of the call this is, from 1.
        reduction: how many times the sides of the file's picture are longer than those of ``picture``.
        frames: the frames of a clip.
    """

    tensor: Float[Tensor, "c *size"]
    picture: Image.Image | None
    box: Box | None
    source: str
    number: int = 1
    reduction: float = 1.0
    frames: tuple[ClipFrame, ...] = ()

    def to_input(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point of the picture's file lies on the tensor, in pixels; without a picture, the point.

        Raises:
            ImageError: the crop box of the picture could not be found.
        """
        if self.box is None and self.tensor.dim() == 3:
            raise ImageError(
                "camkit cannot follow a place on the picture through this preprocessing, because it does more than "
                "resize, crop, pad and change colours; pass the prepared tensor, and the place in its pixels"
            )
        if self.box is None:  # a volume or a clip
            return x, y
        height, width = self.tensor.shape[-2:]
        box = self.box
        across, down = width / (box.right - box.left), height / (box.bottom - box.top)
        return (x / self.reduction - box.left) * across, (y / self.reduction - box.top) * down
