"""A segmenter and a detector made of the network that camkit ships, and the scenes that they see."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import camkit
from camkit.demo import scenes
from scripts.demo.drawn_scenes import draw

SIDE = 128


class Segmenting(nn.Module):
    """The demo's trained network as a fully convolutional one: its head applied to each cell (Zhou et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        net = scenes.load_scene_net("demo-fair")
        self.features, linear = net.features, net.head
        self.head = nn.Conv2d(linear.in_features, len(camkit.scenes.LABELS), 1)
        with torch.no_grad():
            self.head.weight.copy_(linear.weight[:, :, None, None])
            self.head.bias.copy_(linear.bias)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.head(self.features(images))
        background = torch.full_like(maps[:, :1], 6.0)
        maps = torch.cat([background, maps], dim=1)
        return {"out": functional.interpolate(maps, size=images.shape[2:], mode="bilinear", align_corners=False)}


class Detecting(nn.Module):
    """Finds one box in each 128 columns of a picture: around the cells that speak for the best class there."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = Segmenting()

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        return [self.boxes(maps) for maps in self.maps(images)["out"]]

    def boxes(self, maps: Tensor) -> dict[str, Tensor]:
        found: list[tuple[Tensor, int, list[float]]] = []
        for start in range(0, maps.shape[2], SIDE):
            part = maps[1:, :, start : start + SIDE]
            label = int(part.detach().mean((1, 2)).argmax()) + 1
            there = part[label - 1].detach()
            rows, columns = torch.nonzero(there > 0.5 * there.max(), as_tuple=True)
            left, right = int(columns.min()), int(columns.max()) + 1
            top_, bottom = int(rows.min()), int(rows.max()) + 1
            score = part[label - 1, top_:bottom, left:right].mean().div(10).sigmoid()
            found.append((score, label, [left + start, top_, right + start, bottom]))
        found.sort(key=lambda one: -float(one[0].detach()))
        return {
            "boxes": torch.tensor([one[2] for one in found]).float(),
            "labels": torch.tensor([one[1] for one in found]),
            "scores": torch.stack([one[0] for one in found]),
        }


class Blobs(nn.Module):
    """Finds one box around what is red, and one around what is blue, in pictures of values from 0 to 1."""

    LABELS = ("nothing", "red", "blue")

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.AvgPool2d(4)

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        return [self.boxes(maps) for maps in self.cells(images)]

    def boxes(self, maps: Tensor) -> dict[str, Tensor]:
        corners, scores, labels = [], [], []
        for label, channel in ((1, 0), (2, 2)):
            colour = maps[channel] * 2 - maps.sum(0)
            rows, columns = torch.nonzero(colour.detach() > 0.3, as_tuple=True)
            if len(rows):
                ends = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                left, top, right, bottom = (int(end) for end in ends)
                corners.append([left * 4.0, top * 4.0, right * 4.0, bottom * 4.0])
                scores.append((colour[top:bottom, left:right].mean() * (4 - label)).sigmoid())
                labels.append(label)
        return {
            "boxes": torch.tensor(corners).reshape(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.long),
            "scores": torch.stack(scores) if scores else maps.sum() * torch.zeros(0),
        }

    @staticmethod
    def prepare(picture: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255

    @staticmethod
    def picture() -> Image.Image:
        """A red square at the left, a blue one at the right."""
        drawn = Image.new("RGB", (256, 128), (120, 120, 120))
        drawn.paste((230, 30, 30), (24, 32, 88, 96))
        drawn.paste((30, 30, 230), (168, 32, 232, 96))
        return drawn


def scene(thing: str, background: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    drawn = draw(np.random.default_rng(seed), thing, background, SIDE)
    return drawn.image, drawn.mask


def beside(*things: tuple[str, str, int]) -> tuple[Tensor, list[np.ndarray]]:
    """Return scenes side by side as a model's input, and each object's mask on the whole."""
    drawn = [scene(*thing) for thing in things]
    picture = np.concatenate([picture for picture, _ in drawn], axis=1)
    masks = []
    for number, (_, mask) in enumerate(drawn):
        whole = np.zeros(picture.shape[:2], bool)
        whole[:, number * SIDE : (number + 1) * SIDE] = mask
        masks.append(whole)
    tensor = torch.from_numpy(picture.copy()).permute(2, 0, 1).float() / 255
    mean = torch.tensor((0.45, 0.47, 0.47))[:, None, None]  # of the networks on drawn scenes
    return (tensor - mean) / 0.25, masks


class Padding(nn.Module):
    """Resizes its input to twice its size and pads it at the right, as detectors do; the grid shows the padding too."""

    class Batch:
        def __init__(self, tensors: Tensor, sizes: list[tuple[int, int]]) -> None:
            self.tensors, self.image_sizes = tensors, sizes

    class Transform(nn.Module):
        def forward(self, images: Tensor) -> Any:
            resized = functional.interpolate(images, scale_factor=2.0)
            sizes = [(resized.shape[2], resized.shape[3])] * len(images)
            return Padding.Batch(functional.pad(resized, (0, resized.shape[3])), sizes), None

    def __init__(self) -> None:
        super().__init__()
        self.transform = Padding.Transform()
        self.patches = nn.Conv2d(3, 4, 8, 8)
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        batch, _ = self.transform(images)
        return self.head(self.patches(batch.tensors).mean((2, 3)))
