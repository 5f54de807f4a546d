"""From what a person has (a file, a PIL picture, an array, a tensor) to a model's input, and back to the picture."""

from __future__ import annotations

import glob
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms._presets import ImageClassification

from camkit.errors import ImageError
from camkit.state import generators, same_randomness
from camkit.values import Box, ImageLike, Prepared, Preprocess

_SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_GLOB = "*?["
_ENDINGS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".png", ".apng", ".webp", ".avif", ".gif", ".bmp", ".dib"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".qoi"),
)
"""Which files of a folder are taken for pictures; a file named by itself may have any name."""


def find_pictures(patterns: Iterable[str | Path], skip: Path | None = None) -> list[Path]:
    """List picture files from files, folders (searched through, in order of name) and glob patterns.

    Hidden files and folders are left out of a search, and so is the folder ``skip`` where it lies within the one
    searched or is met by a pattern. A pattern that matches nothing stays in the list as it is, so that it is reported
    where it would have been read. A file reached in two ways is listed once.
    """
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        matches = [path]
        if not os.path.lexists(path) and any(sign in str(pattern) for sign in _GLOB):
            matches = _matches(str(pattern))
            matches = [match for match in matches if not _within(match, skip)] or matches or [path]
        for match in matches:
            inside = _inside(match, skip) if os.path.isdir(match) else []
            found.extend(inside or [match])
    once: dict[Path, Path] = {}
    for path in found:
        once.setdefault(path.absolute(), path)
    return list(once.values())


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.name == "**":  # all there is below a folder, as for the folder itself
        return _matches(str(path.parent)) if glob.has_magic(str(path.parent)) else [path.parent]
    found = sorted(map(Path, glob.glob(pattern, recursive=True)))
    if path.name == "*":
        found = [match for match in found if match.suffix.lower() in _ENDINGS or os.path.isdir(match)] or found
    return found


def _within(path: Path, folder: Path | None) -> bool:
    return folder is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _inside(folder: Path, skip: Path | None) -> list[Path]:
    left_out = None if skip is None else skip.resolve()
    pictures: list[Path] = []
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and Path(where, name).resolve() != left_out]
        pictures += [Path(where, name) for name in files if name[0] != "." and Path(name).suffix.lower() in _ENDINGS]
    return sorted(pictures)


def open_picture(path: str | Path) -> Image.Image:
    """Read a picture file as RGB, turned upright by its EXIF orientation.

    16-bit greyscale is scaled to 8 bits; transparency is dropped, as ordinary training pipelines do.

    Raises:
        ImageError: the file is missing, not a picture, damaged, or so large that it looks like a decompression bomb.
    """
    path = Path(path)
    try:
        with Image.open(path) as picture:
            picture.load()
            return as_rgb(_turned(picture))
    except ImageError:
        raise
    except IsADirectoryError as error:
        raise ImageError(f"there is no picture in the folder {path}") from error
    except FileNotFoundError as error:
        raise ImageError(f"there is no file {path}") from error
    except UnidentifiedImageError as error:
        size = path.stat().st_size
        raise ImageError(f"{path} is not a picture{' but an empty file' if size == 0 else ''}") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{path} is too large to open safely: {error}") from error
    except Exception as error:  # a damaged file can make its decoder fail in any way
        raise ImageError(f"{_short(path)} cannot be read: {error}") from error


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) < 300 else f"{text[:120]}...{text[-40:]}"


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns a picture upright, by the number of its EXIF orientation."""


def _turned(picture: Image.Image) -> Image.Image:
    turn = _TURNS.get(picture.getexif().get(ExifTags.Base.Orientation, 1))
    return picture if turn is None else picture.transpose(turn)


def _upright(picture: Image.Image, source: str) -> Image.Image:
    """Return a PIL picture as RGB, turned upright; reading it may fail only now."""
    if 0 in picture.size:
        raise ImageError(f"{source} has {picture.width} x {picture.height} pixels")
    try:
        return as_rgb(_turned(picture))
    except ImageError:
        raise
    except Exception as error:  # a damaged file can make its decoder fail in any way
        raise ImageError(f"{source} cannot be read: {error}") from error


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return any PIL picture as 8-bit RGB.

    Raises:
        ImageError: a floating-point picture whose values are neither 0..1 nor 0..255.
    """
    if picture.mode in _SIXTEEN_BIT:
        return _grey(np.clip(np.asarray(picture, dtype=np.float64) / 257, 0, 255))
    if picture.mode == "F":
        values = np.asarray(picture, dtype=np.float64)
        if not np.isfinite(values).all() or values.min(initial=0) < 0 or values.max(initial=0) > 255:
            raise ImageError("a floating-point picture must have values 0..1 or 0..255")
        return _grey(values * 255 if values.max(initial=0) <= 1 else values)
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def _grey(values: np.ndarray) -> Image.Image:
    return Image.fromarray(np.rint(values).astype(np.uint8)).convert("RGB")


def from_array(array: np.ndarray) -> Image.Image:
    """Return an array as a PIL picture: H x W, or H x W x 1, 3 or 4; uint8, or floating point 0..1.

    Raises:
        ImageError: another shape, type or range.
    """
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)) or 0 in array.shape:
        raise ImageError(
            f"an array must be H x W x 3 (or x 1, x 4, or H x W), not of shape {array.shape}; "
            "a channels-first picture belongs into a tensor"
        )
    if array.dtype != np.uint8:
        if not np.issubdtype(array.dtype, np.floating):
            raise ImageError(f"an array must be uint8 (0..255) or floating point (0..1), not {array.dtype}")
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise ImageError("a floating-point array must have values 0..1; a normalised picture belongs into a tensor")
        array = np.rint(array * 255).astype(np.uint8)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array)).convert("RGB")


def unbatched(images: Iterable[ImageLike], rank: int = 2) -> Iterator[ImageLike]:
    """Walk through images, taking batches (N, C, H, W) apart without copying them; ``rank`` counts the axes after C."""
    for image in images:
        if isinstance(image, Tensor) and image.dim() == rank + 2:
            yield from image
        else:
            yield image


def prepare(image: ImageLike, preprocess: Preprocess | None, source: str, rank: int = 2) -> Prepared:
    """Make one image ready for the model.

    Args:
        image: a path, a PIL picture, an array (H, W, C), or a normalised tensor (C, H, W), which is used as it is.
        preprocess: turns a PIL picture into the model's input; not used for a tensor.
        source: the name to report.
        rank: axes of a tensor after the channels: 2, for a signal 1, for a volume 3.

    Raises:
        ImageError: the image cannot be read or has the wrong form, or there is no ``preprocess`` and one is needed.
            That its values are finite is checked for a whole batch at once, see ``extremes``.
    """
    if isinstance(image, Tensor):
        return _prepare_tensor(image, source, rank)
    if isinstance(image, (str, Path)):
        picture = open_picture(image)
    elif isinstance(image, Image.Image):
        picture = _upright(image, source)
    elif isinstance(image, np.ndarray):
        picture = from_array(image)
    else:
        raise ImageError(
            f"an image is a path, a PIL picture, an H x W x C array or a C x H x W tensor, not a {type(image).__name__}"
        )
    if preprocess is None:
        raise ImageError(
            "this model does not say how its pictures are prepared; pass preprocess=..., for torchvision weights "
            "theirs (preprocess=weights.transforms()), or pass a normalised tensor; in a shell --size, --mean and --std"
        )
    if isinstance(preprocess, ImageClassification):
        _check_not_thin(picture, preprocess, source)
    tensor = preprocess(picture)
    if (
        not isinstance(tensor, Tensor)
        or tensor.dim() not in (3, 4)
        or (tensor.dim() == 4 and len(tensor) != 1)
        or not tensor.numel()
    ):
        seen = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ImageError(f"preprocess must turn a PIL picture into a tensor (C, H, W), but it returned {seen}")
    return Prepared(tensor[0] if tensor.dim() == 4 else tensor, np.asarray(picture), None, source)


def _check_not_thin(picture: Image.Image, preset: ImageClassification, source: str) -> None:
    """Refuse a picture that the preset would first enlarge beyond what Pillow takes for safe."""
    shorter, longer = sorted(picture.size)
    resize = preset.resize_size[0]
    if len(preset.resize_size) == 2:
        return
    if Image.MAX_IMAGE_PIXELS is not None and resize * (resize * longer // shorter) > Image.MAX_IMAGE_PIXELS:
        raise ImageError(
            f"{source} has {picture.width} x {picture.height} pixels and is too thin for this model: its preprocessing "
            f"makes the shorter side {resize}, and the longer would become {resize * longer // shorter}"
        )


def located(prepared: Prepared, preprocess: Preprocess | None) -> Prepared:
    """Add the box that the preprocessing showed; where it cannot be followed, take the original picture away.

    Belongs into the caller's thread, since the caller's preprocessing and random generators take part in it.
    """
    if prepared.pixels is None or preprocess is None:
        return prepared
    size, output = prepared.pixels.shape[1::-1], prepared.tensor.shape[:0:-1]
    box = seen_box(preprocess, (size[0], size[1]), (output[0], output[1]))
    return replace(prepared, box=box) if box is not None else replace(prepared, pixels=None)


def _prepare_tensor(tensor: Tensor, source: str, rank: int) -> Prepared:
    if tensor.dim() != rank + 1 or 0 in tensor.shape or not tensor.is_floating_point():
        axes = {1: "L", 2: "H, W", 3: "D, H, W"}[rank]
        raise ImageError(
            f"a tensor must be a normalised picture (C, {axes}) or a batch (N, C, {axes}) of floating-point numbers, "
            f"not {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ImageError(
            f"a tensor must hold its numbers in the ordinary way; this one is {tensor.layout} on {tensor.device}"
        )
    box = Box(0, 0, tensor.shape[2], tensor.shape[1]) if rank == 2 else None
    return Prepared(tensor, None, box, source)


def stacked(tensors: list[Float[Tensor, "c *size"]]) -> Float[Tensor, "n c *size"]:
    """Return the tensors as one batch, without a copy where they lie behind each other in memory already."""
    first = tensors[0]
    step = first.numel()
    in_a_row = first.is_contiguous() and all(
        tensor.is_contiguous()
        and tensor.dtype == first.dtype
        and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and tensor.storage_offset() == first.storage_offset() + number * step
        for number, tensor in enumerate(tensors)
    )
    if in_a_row:
        return first.detach().as_strided((len(tensors), *first.shape), (step, *first.stride()))
    return torch.stack([tensor.detach() for tensor in tensors])


def extremes(inputs: Float[Tensor, "n c *size"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the least and the largest value of each input; NaN where it holds one."""
    low, high = inputs.detach().flatten(1).aminmax(dim=1)
    return low.float(), high.float()


def as_pixels(
    inputs: Float[Tensor, "n c h w"], low: Float[Tensor, " n"], high: Float[Tensor, " n"]
) -> UInt8[np.ndarray, "n h w 3"] | None:
    """Draw a model's inputs, each one's own range stretched to 0..255; None where they are neither grey nor RGB."""
    if inputs.shape[1] not in (1, 3):
        return None
    slope = 255 / (high - low).clamp_min(torch.finfo(torch.float32).tiny)
    levels = (inputs.detach() * slope.reshape(-1, 1, 1, 1)).add_((0.5 - low * slope).reshape(-1, 1, 1, 1))
    return levels.clamp_(0, 255).to("cpu", torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()


def seen_box(preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int]) -> Box | None:
    """Return the part of a picture of ``size`` (width, height) that a preprocessing shows the model.

    torchvision's own presets are read; any other function is asked, with ramps whose brightness tells the position.

    Returns:
        The box, or None where the function does anything but resize, crop, pad and change colours.
    """
    if isinstance(preprocess, ImageClassification):
        return _preset_box(preprocess, size)
    # A bound method is made anew at each access, so its owner is what the answer is remembered for, while it lives.
    owner, key = getattr(preprocess, "__self__", preprocess), (getattr(preprocess, "__name__", ""), size, output)
    try:
        known = _boxes.setdefault(owner, {})
    except TypeError:  # cannot be hashed or weakly referenced, so is not remembered
        return _ask_box(preprocess, size, output)
    if key not in known:
        known[key] = _ask_box(preprocess, size, output)
    return known[key]


def _preset_box(preset: ImageClassification, size: tuple[int, int]) -> Box:
    crops = preset.crop_size[-1], preset.crop_size[0]
    shorter, resize = min(size), preset.resize_size[0]
    resized = [resize if side == shorter else int(resize * side / shorter) for side in size]
    if len(preset.resize_size) == 2:
        resized = [preset.resize_size[1], preset.resize_size[0]]
    # A picture smaller than the crop is padded evenly, the odd pixel at the end, and then cropped from the start.
    both = zip(resized, crops, strict=True)
    starts = [-((crop - side) // 2) if side < crop else round((side - crop) / 2.0) for side, crop in both]
    left, top = (start * side / small for start, side, small in zip(starts, size, resized, strict=True))
    return Box(left, top, left + crops[0] * size[0] / resized[0], top + crops[1] * size[1] / resized[1])


_LEAST_SIDE = 8
"""Pixels a picture must have on each side for its box to be asked for."""

_MOST_BENT = 0.006
"""How far positions may be from a straight line, as a share of the picture: a bit more than 8-bit levels can tell."""

_boxes: weakref.WeakKeyDictionary[Any, dict[Any, Box | None]] = weakref.WeakKeyDictionary()


def _ask_box(preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int]) -> Box | None:
    """Find the box by passing pictures through whose brightness tells the position; None where that makes no sense."""
    if min(size) < _LEAST_SIDE:
        return None
    with same_randomness():
        before = generators()
        across, down = _positions(preprocess, size, output, axis=1), _positions(preprocess, size, output, axis=0)
        if across is None or down is None or generators() != before:
            return None  # what a preprocessing that draws random numbers did to another picture says nothing
    horizontal, vertical = _span(across, axis=1), _span(down, axis=0)
    if horizontal is None or vertical is None:
        return None
    width, height = size
    return Box(horizontal[0] * width, vertical[0] * height, horizontal[1] * width, vertical[1] * height)


def _positions(
    preprocess: Preprocess, size: tuple[int, int], output: tuple[int, int], axis: int
) -> Float[np.ndarray, "h w"] | None:
    """Return for each cell of the output where on the picture it was, 0..1 along an axis; NaN outside the picture."""
    length = size[1 - axis]
    ramp = (np.arange(length) + 0.5) / length
    levels = (np.zeros(length), np.ones(length), ramp, 0.25 + ramp / 2)
    shown = [
        _shown(preprocess, np.broadcast_to(line if axis == 1 else line[:, None], size[::-1]), output) for line in levels
    ]
    black, white, full, half = shown
    if black is None or white is None or full is None or half is None:
        return None
    contrast = white - black
    inside = np.abs(contrast) > 0.99 * np.abs(contrast).max(initial=0)
    if inside.mean() < 0.02 or not np.abs(contrast).max(initial=0) > 0:
        return None
    position, check = (
        np.where(inside, (ramp - black) / np.where(inside, contrast, 1), np.nan) for ramp in (full, half)
    )
    # A preprocessing that stretches contrasts would show any ramp as the same one.
    bent = np.nanmax(np.abs(0.25 + position / 2 - check)) > 2 * _MOST_BENT
    return None if bent else position


def _shown(preprocess: Preprocess, levels: np.ndarray, output: tuple[int, int]) -> np.ndarray | None:
    """Return the mean channel of what the preprocessing makes of a grey picture with levels 0..1."""
    try:
        tensor = preprocess(Image.fromarray(np.rint(levels * 255).astype(np.uint8)).convert("RGB"))
    except Exception:  # made for other pictures than ramps
        return None
    tensor = tensor[0] if tensor.dim() == 4 else tensor
    shown = tensor.detach().double().mean(0).cpu().numpy()
    return shown if shown.shape == (output[1], output[0]) else None


def _span(position: Float[np.ndarray, "h w"], axis: int) -> tuple[float, float] | None:
    """Fit position = a * (index + 0.5) + b along an axis; return where the axis begins and ends, None if it bends."""
    lines = position if axis == 1 else position.T
    used = np.isfinite(lines).any(0)
    mean = np.nanmean(lines[:, used], axis=0)
    if used.sum() < 3:
        return None
    spread = np.nanmax(np.abs(lines[:, used] - mean))
    index = np.flatnonzero(used) + 0.5
    middle = slice(1, -1)  # at the picture's edges, filters see less than they weigh
    slope, offset = np.polyfit(index[middle] if used.sum() > 8 else index, mean[middle] if used.sum() > 8 else mean, 1)
    residual = np.abs(slope * index + offset - mean)[middle].max()
    if max(spread, residual) > _MOST_BENT or slope <= 0:
        return None
    return float(offset), float(offset + slope * len(used))
