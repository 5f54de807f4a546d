"""Turns a file, a PIL picture, an array or a tensor into a model's input, and a model's input back into a picture.

``batches_of`` does so for many pictures: it reads files ahead in other threads, and joins those of one size.
``References`` are the pictures with which a picture is compared: the caller's, or smooth noise.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from torchvision.transforms._presets import ImageClassification

from camkit.drawing.encode import bytes_of
from camkit.engine.guard import interruptible, same_randomness, undisturbed
from camkit.engine.heatmap import upsample
from camkit.engine.passes import ReferencePictures, keep_last
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError, ImageError, advice
from camkit.images.listing import Pictures
from camkit.images.read import from_array, open_draft, read_clip, upright
from camkit.images.regions import CropBoxes
from camkit.models.modules import CLIPS, ClipPreprocess
from camkit.types import Box, ClipFrame, Failure, ImageLike, Preprocess, ReferencesLike


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
    if isinstance(image, Tensor):
        return _prepare_tensor(image, source, rank, isinstance(preprocess, ClipPreprocess))
    if isinstance(preprocess, ClipPreprocess) and isinstance(image, (str, Path)):
        clip, frames = read_clip(Path(image), preprocess)
        return Prepared(clip, None, None, source, frames=frames)
    reduction = 1.0
    if isinstance(image, (str, Path)):
        side = _resized_side(preprocess) if draft and preprocess is not None else None
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
    shorter, longer = sorted(picture.size)
    side = _resized_side(preprocess) or 0
    if side * (side * longer // shorter) > (Image.MAX_IMAGE_PIXELS or math.inf):  # what Pillow considers safe
        raise ImageError(
            f"{source} has {picture.width} x {picture.height} pixels and is too thin for this model: its preprocessing "
            f"resizes the shorter side to {side} pixels, so that the longer would have {side * longer // shorter}"
        )
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


def _resized_side(preprocess: Preprocess) -> int | None:
    """Return the length to which a preprocessing of torchvision, timm or transformers resizes the shorter side.

    None if it resizes to a fixed size, if a step before it depends on the picture's size, such as a crop of so many
    pixels, or if it is another kind of function.
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
        # The result of these steps is the same picture at any size.
        if kind not in ("PILToTensor", "ToDtype", "ToImage", "ToPILImage", "ToTensor", "Grayscale", "RGB"):
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


def _prepare_tensor(tensor: Tensor, source: str, rank: int, is_clip: bool) -> Prepared:
    if tensor.dim() != rank + 1 or 0 in tensor.shape or not tensor.is_floating_point():
        axes = {1: "L", 2: "H, W", 3: "D, H, W"}[rank]
        raise ImageError(
            f"a tensor must be a normalised image (C, {axes}) or a batch (N, C, {axes}) of floating-point numbers, "
            f"not {tensor.dtype} of shape {tuple(tensor.shape)}" + f"; {CLIPS}" * (rank == 2 and tensor.dim() == 5)
        )
    box = Box(0, 0, tensor.shape[2], tensor.shape[1]) if rank == 2 else None
    frames = tuple(map(ClipFrame, range(1, tensor.shape[1] + 1))) if is_clip else ()
    return Prepared(tensor, None, box, source, frames=frames)


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


MOST_BYTES = 72 * 2**20
"""At most this many bytes of pictures are read ahead, and at most as many are in passes, so that memory does not grow
with the size of the pictures. They suffice for 90 pictures of 227 x 227. One picture at a time may be larger, such as a
picture of 20 megapixels."""

_MOST_BYTES_PER_BATCH = MOST_BYTES // 2

Batch: TypeAlias = "list[Prepared] | Failure"
"""Pictures of one size, or a picture that cannot be read."""


def batches_of(
    images: Iterable[ImageLike],
    preprocess: Preprocess | None,
    rank: int,
    boxes: CropBoxes,
    batch_size: int,
    *,
    draft: bool = False,
) -> Iterator[Batch]:
    """Join the pictures of a call into batches of one size, in their order; a failure comes in its place.

    If the caller's iterable fails, what came before is returned first.

    Args:
        images: what ``prepare`` takes, and batches (N, C, H, W).
        preprocess, rank, draft: as for ``prepare``.
        boxes: finds the part of a picture that the model sees.
        batch_size: the most pictures in a batch; large ones fill it earlier.
    """
    batch: list[Prepared] = []
    held = 0
    read = functools.partial(_read, preprocess=preprocess, rank=rank, draft=draft)
    try:
        for item in _ahead(unbatched(images, rank), read, batch_size):
            size = _bytes(item)
            is_full = len(batch) == batch_size or held + size > _MOST_BYTES_PER_BATCH
            if batch and (not isinstance(item, Prepared) or is_full or item.tensor.shape != batch[0].tensor.shape):
                yield batch
                batch, held = [], 0
            if isinstance(item, Prepared):
                batch.append(located(item, preprocess, boxes))
                held += size
                continue
            yield item
            del item  # while the batch is explained, only its list and its rows hold the pictures
    except Exception:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _read(
    image: ImageLike, number: int, preprocess: Preprocess | None, rank: int, *, draft: bool
) -> Prepared | Failure:
    try:
        return replace(prepare(image, preprocess, source_of(image, number), rank, draft=draft), number=number)
    except CamkitError as error:
        return Failure(source_of(image, number), error)


def _ahead(
    images: Iterable[ImageLike], read: Callable[[ImageLike, int], Prepared | Failure], ahead: int
) -> Iterator[Prepared | Failure]:
    """Read pictures in their order; files are read ahead in other threads."""

    def tasks() -> Iterator[Task[Prepared | Failure]]:
        for number, image in enumerate(images, start=1):
            if isinstance(image, (str, Path)):
                yield Task(functools.partial(read, image, number), in_thread=True)
            else:  # the caller may close it, or write into it, as soon as the next one is taken
                yield Task(functools.partial(lambda item: item, read(image, number)), in_thread=False)

    readers = min(4, os.cpu_count() or 1)  # with four threads, decoding keeps up with most models
    return in_order(tasks(), workers=readers, ahead=ahead, most=MOST_BYTES, size_of=_bytes)


def in_rounds(batches: Iterable[Batch], workers: int) -> Iterator[tuple[Batch, bool]]:
    """Yield the batches in rounds of one for each worker, and tell of each whether the workers run it.

    They run all rounds except a last one that would leave some of them idle: one of fewer batches, or of batches of
    different lengths. A last picture alone, whose memory format would be slower, gets one from the batch before.
    """
    held: list[Batch] = []
    for batch in batches:
        if len(held) == workers:
            yield from ((held.pop(0), True) for _ in range(workers))
        held.append(batch)
    match held:
        case [*_, [_, _, _, *_] as before, [_] as last] if before[-1].tensor.shape == last[0].tensor.shape:
            last.insert(0, before.pop())
    lengths = {len(batch) if isinstance(batch, list) else 0 for batch in held}
    are_equal = len(held) == workers and len(lengths) == 1
    yield from ((held.pop(0), are_equal) for _ in range(len(held)))


def leaves_room(batch: Batch) -> bool:
    """Tell whether a batch leaves room in memory for others; a batch that does not is a single photo."""
    return bytes_of_batch(batch) <= _MOST_BYTES_PER_BATCH


def bytes_of_batch(batch: Batch) -> int:
    """Return the bytes that the pictures of a batch hold in memory."""
    return sum(map(_bytes, batch)) if isinstance(batch, list) else 0


def _bytes(item: Prepared | Failure) -> int:
    if not isinstance(item, Prepared):
        return 0
    return item.tensor.nbytes + (0 if item.picture is None else bytes_of(item.picture))


MOST_REFERENCES = 16
"""The most reference pictures: each costs as much as a training step of the head."""


def chosen_references(references: ReferencesLike, rank: int = 2) -> tuple[list[ImageLike], str]:
    """Return the reference pictures, some at equal distances of too many, and what they are as a phrase.

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
        raise ImageError(
            f"there are no reference pictures: {references!r} is empty; pass 8 to {MOST_REFERENCES} pictures"
        )
    count = min(len(found), MOST_REFERENCES)
    of_all = "" if count == len(found) else f" of {len(found):,}"
    words = f"{count}{of_all} {'picture' if len(found) == 1 else 'pictures'}{origin}"
    return [found[number * len(found) // count] for number in range(count)], words


class ReferencesError(ImageError):
    """A reference picture cannot be used, so no picture can be compared with it."""


class References:
    """The reference pictures of one model, ready for inputs of any size.

    Args:
        references: the caller's; None for smooth noise in the range of the inputs.
        preprocess: turns a PIL picture into the model's input.
        rank: the number of axes after the channels.

    Raises:
        ImageError, InputError: as ``chosen_references``.
    """

    def __init__(self, references: ReferencesLike | None, preprocess: Preprocess | None, rank: int) -> None:
        self._pictures, self._words = ([], "") if references is None else chosen_references(references, rank)
        self._preprocess, self._rank = preprocess, rank
        self._made: dict[object, ReferencePictures] = {}

    def __call__(self, image: Float[Tensor, "1 c *size"]) -> ReferencePictures:
        """Return the reference pictures for a model's input, at its size.

        Raises:
            ReferencesError: a reference picture cannot be read, or does not fit the input.
        """
        image = image.detach().float().cpu()
        low_high = () if self._pictures else self._plain
        if low_high is None or (low_high and len(low_high[0]) != image.shape[1]):
            low_high = image[0].flatten(1).amin(1), image[0].flatten(1).amax(1)
        key = tuple(image.shape), *(tuple(values.tolist()) for values in low_high)
        try:
            made = self._made.get(key) or (self._noise(image, *low_high) if low_high else self._given(image))
        except ImageError as error:
            raise ReferencesError(str(error)) from error
        return keep_last(self._made, key, made, 4)

    def _given(self, image: Tensor) -> ReferencePictures:
        size = tuple(image.shape[2:])
        sized = [each if tuple(each.shape[1:]) == size else upsample(each, size) for each in self._prepared]
        for each in sized:
            if each.shape != image.shape[1:]:
                raise ImageError(f"a reference picture has {len(each)} channels, but the picture has {image.shape[1]}")
        return ReferencePictures(torch.stack(sized), self._words)

    @functools.cached_property
    def _prepared(self) -> list[Tensor]:
        with same_randomness():
            return [self._read(picture, number) for number, picture in enumerate(self._pictures, start=1)]

    def _read(self, picture: ImageLike, number: int) -> Tensor:
        name = str(picture) if isinstance(picture, (str, Path)) else f"reference picture {number}"
        tensor = prepare(picture, self._preprocess, name, self._rank).tensor.detach().float().cpu()
        if not bool(tensor.isfinite().all()):
            raise ImageError(f"{name} holds NaN or infinite values where the model would see it")
        return tensor

    def _noise(self, image: Tensor, low: Float[Tensor, " c"], high: Float[Tensor, " c"]) -> ReferencePictures:
        """Return noise that fills the range of each channel."""
        size = tuple(image.shape[2:])
        shares = smooth_noise(MOST_REFERENCES * image.shape[1], size).reshape(MOST_REFERENCES, *image.shape[1:])
        low, high = (values.reshape(-1, *[1] * len(size)) for values in (low, high))
        return ReferencePictures(
            low + (high - low) * shares, f"{MOST_REFERENCES} pictures of smooth noise, made by camkit"
        )

    @functools.cached_property
    def _plain(self) -> tuple[Tensor, Tensor] | None:
        """The values (c,) of a black and of a white picture; None if the preprocessing does not keep them apart."""
        if self._preprocess is None:
            return None
        with contextlib.suppress(Exception), undisturbed(), same_randomness(), interruptible():  # it is the caller's
            plain = [Image.new("RGB", (256, 256), level) for level in ("black", "white")]
            inputs = [prepare(each, self._preprocess, "a plain picture").tensor for each in plain]
            low, high = (values.detach().float().cpu().flatten(1).mean(1) for values in inputs)
            return (low, high) if bool(((high - low).abs() > 0).all()) else None
        return None


def smooth_noise(count: int, size: tuple[int, ...]) -> Float[Tensor, "count *size"]:
    """Return smooth noise from 0 to 1, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(count, *size)
    for cells in (2, 4, 8, 16, 32):  # each grid has half the contrast of the one before, as in photos
        grid = torch.rand(count, *[min(cells, side) for side in size], generator=generator)
        total += upsample(grid, size) * (2 / cells)
    flat = total.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return ((flat - low) / torch.where(high > low, high - low, 1)).reshape(total.shape)
