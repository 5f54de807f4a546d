"""Measure where the cells of trained networks look: mirror a photo, explain it, and mirror the map back.

    python -m scripts.placement.measure_shift --data ../shared/data --photos 24

If cells lie where they are drawn, the two maps agree. Otherwise they are apart by twice the distance between the two.
Each network runs with the padding that it was trained with, and with another. Weights from TensorFlow were trained with
one pixel more at the end of each side; PyTorch's networks pad both ends equally.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

import camkit
from scripts.lab.real_models import HALF, IMAGENET, NETWORKS

SIDE, MOST = 352, 80
"""The side of the photos, a multiple of all strides; and the largest shift that is tried, in pixels."""


class AtTheEnd(nn.Module):
    """A convolution that pads as TensorFlow does: if the padding is odd, the end gets one pixel more."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution
        convolution.padding = (0, 0)

    def forward(self, maps: Tensor) -> Tensor:
        """Pad and convolve feature maps (N, C, H, W)."""
        amounts: list[int] = []
        sizes = zip(maps.shape[:1:-1], self.convolution.kernel_size[::-1], self.convolution.stride[::-1], strict=True)
        for side, kernel, stride in sizes:
            missing = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            amounts += [missing // 2, missing - missing // 2]
        padded: Tensor = self.convolution(functional.pad(maps, amounts))
        return padded


def plain(convolution: nn.Conv2d) -> nn.Conv2d:
    """Return a convolution with the same weights that pads both ends equally."""
    side = convolution.kernel_size[0]
    found = nn.Conv2d(
        convolution.in_channels,
        convolution.out_channels,
        side,
        convolution.stride[0],
        side // 2,
        groups=convolution.groups,
        bias=convolution.bias is not None,
    )
    found.load_state_dict(convolution.state_dict())
    return found


def padded(model: nn.Module, *, at_the_end: bool) -> nn.Module:
    """Return the model with the other padding in its strided convolutions."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.Conv2d) and module.stride[0] > 1 and module.kernel_size[0] > 1:
                setattr(parent, name, AtTheEnd(module) if at_the_end else plain(module))
    return model


def likenesses(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the correlation of two maps for each shift of the second along the last axis."""
    start, end = MOST + 8, first.shape[1] - MOST - 8
    middle = first[:, start:end].ravel()
    shifts = range(-MOST, MOST + 1)
    found = [np.corrcoef(middle, second[:, start + by : end + by].ravel())[0, 1] for by in shifts]
    return np.asarray(np.nan_to_num(np.array(found)))


def shift_of(model: nn.Module, images: list[Tensor], axis: int) -> int:
    """Return how far the maps of mirrored pictures lie from the others' along an axis, in pixels."""
    total = np.zeros(2 * MOST + 1)
    for image in images:
        target = int(model(image[None]).argmax())
        explainer = camkit.Explainer(model, method="gradcam")
        first, second = (explainer(version, target).heatmap for version in (image, image.flip(1 + axis)))
        total += likenesses(np.moveaxis(first, axis, 1), np.moveaxis(np.flip(second, axis), axis, 1))
    return int(total.argmax()) - MOST


@torch.no_grad()
def accuracy(model: nn.Module, photos: list[tuple[Image.Image, list[int]]], preprocess: v2.Compose) -> float:
    """Return the share of photos whose best class is one of the right ones."""
    right = [int(model(preprocess(photo)[None]).argmax()) in classes for photo, classes in photos]
    return sum(right) / len(right)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--photos", type=int, default=24, metavar="N", help="photos for the shifts")
    given = parser.parse_args()
    classes = json.loads((given.data / "caltech/to_imagenet.json").read_text())
    files = [file for file in sorted((given.data / "caltech").glob("*/*.jpg")) if classes.get(file.parent.name)]
    photos = [(ImageOps.exif_transpose(Image.open(file)), classes[file.parent.name]) for file in files]
    squares = [ImageOps.fit(photo.convert("RGB"), (SIDE, SIDE)) for photo, _ in photos[:: len(photos) // given.photos]]
    print("| network | padding | top-1 | shift down | shift right |\n|---|---|---|---|---|")
    for name, values, changes in (
        ("SqueezeNet 1.1", IMAGENET, {"none": None}),
        ("MobileNetV2", IMAGENET, {"equal": None, "more at the end": True}),
        ("EfficientNet-Lite0", HALF, {"more at the end": None, "equal": False}),
    ):
        to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(**values)])
        images = [to_tensor(square) for square in squares]
        for padding, at_the_end in changes.items():
            model, preprocess = NETWORKS[name](given.data)
            model = model if at_the_end is None else padded(model, at_the_end=at_the_end).eval()
            top1 = accuracy(model, photos[::2], preprocess)
            down, right = (shift_of(model, images, axis) for axis in (0, 1))
            print(f"| {name} | {padding} | {top1:.1%} | {down} | {right} |", flush=True)


if __name__ == "__main__":
    main()
