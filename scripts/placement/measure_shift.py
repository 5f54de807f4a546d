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
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

import camkit
from scripts.weights import load_network

SIDE, MOST = 352, 80
"""The side of the photos, a multiple of all strides; and the largest shift that is tried, in pixels."""

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}

Spread = Literal["even", "measured"]
SPREADS: tuple[Spread, ...] = ("even", "measured")


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


def shift_of(model: nn.Module, images: list[Tensor], axis: int, spread: Spread) -> int:
    """Return how far the maps of mirrored pictures lie from the others' along an axis, in pixels."""
    explainer = camkit.Explainer(model, method="gradcam", spread=spread)
    total = np.zeros(2 * MOST + 1)
    for image in images:
        target = int(model(image[None]).argmax())
        first, second = (explainer(version, target).heatmap for version in (image, image.flip(1 + axis)))
        total += likenesses(np.moveaxis(first, axis, 1), np.moveaxis(np.flip(second, axis), axis, 1))
    return int(total.argmax()) - MOST


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--photos", type=int, default=24, metavar="N", help="photos for the shifts")
    given = parser.parse_args()
    classes = json.loads((given.data / "caltech/to_imagenet.json").read_text())
    files = [file for file in sorted((given.data / "caltech").glob("*/*.jpg")) if classes.get(file.parent.name)]
    photos = [ImageOps.exif_transpose(Image.open(file)) for file in files[:: len(files) // given.photos]]
    squares = [ImageOps.fit(photo.convert("RGB"), (SIDE, SIDE)) for photo in photos]
    print("| network | padding | spread | shift down | shift right |\n|---|---|---|---:|---:|")
    for name, values, changes in (
        ("squeezenet1_1", IMAGENET, {"none": None}),
        ("mobilenet_v2", IMAGENET, {"equal": None, "more at the end": True}),
        ("timm:tf_efficientnet_lite0", HALF, {"more at the end": None, "equal": False}),
    ):
        to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(**values)])
        images = [to_tensor(square) for square in squares]
        for padding, at_the_end in changes.items():
            model = load_network(given.data, name).module
            model = model if at_the_end is None else padded(model, at_the_end=at_the_end).eval()
            for spread in SPREADS:
                down, right = (shift_of(model, images, axis, spread) for axis in (0, 1))
                print(f"| {name} | {padding} | {spread} | {down} | {right} |", flush=True)


if __name__ == "__main__":
    main()
