"""The lab's networks: four small architectures and their training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from scripts.lab.lab_run import DEVICE
from scripts.lab.lab_scenes import CLASSES, Parts, Recipe, Scenes, batches, draw

MEAN, STD = (0.45, 0.47, 0.47), (0.25, 0.25, 0.25)
EPOCHS = 5
PICTURES = 8192
BATCH = 64
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.02

preprocess = v2.Compose([v2.RGB(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def _convolution(inputs: int, outputs: int, stride: int = 1, width: int = 3, groups: int = 1) -> nn.Sequential:
    padding = (width - stride) // 2 if stride > 1 else width // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, width, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(channels, channels), nn.Conv2d(channels, channels, 3, padding=1))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps of the same shape."""
        return torch.relu(maps + self.norm(self.body(maps)))


def _head(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def plain() -> nn.Module:
    """Build a stack of convolutions."""
    return nn.Sequential(
        _convolution(3, 16, 2, 4), _convolution(16, 24, 2, 4), _convolution(24, 32), _convolution(32, 48, 2, 4),
        _convolution(48, 64), _convolution(64, 64), _head(64),
    )  # fmt: skip


def residual() -> nn.Module:
    """Build residual blocks (He et al. 2016)."""
    return nn.Sequential(
        _convolution(3, 16, 2, 4), _convolution(16, 24, 2, 4), Residual(24), _convolution(24, 48, 2, 4),
        Residual(48), Residual(48), _head(48),
    )  # fmt: skip


def separable() -> nn.Module:
    """Build depthwise separable convolutions (Howard et al. 2017)."""

    def pair(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        depthwise = _convolution(inputs, inputs, stride, 4 if stride > 1 else 3, groups=inputs)
        return nn.Sequential(depthwise, _convolution(inputs, outputs, width=1))

    return nn.Sequential(
        _convolution(3, 24, 2, 4), pair(24, 48, 2), pair(48, 64), pair(64, 96, 2), pair(96, 128), _head(128)
    )


def dense_head() -> nn.Module:
    """Build convolutions, max pooling and a head of two linear layers that sees positions, as in VGG."""
    return nn.Sequential(
        _convolution(3, 16), nn.MaxPool2d(2), _convolution(16, 32), nn.MaxPool2d(2), _convolution(32, 48),
        nn.MaxPool2d(2), _convolution(48, 64), nn.Flatten(), nn.Linear(64 * 36, 96), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(96, CLASSES),
    )  # fmt: skip


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "residual": residual,
    "separable": separable,
    "dense-head": dense_head,
}


def normalised(images: Tensor) -> Tensor:
    """Return images from 0 to 1 normalised, with the channels last in memory."""
    mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return ((images - mean) / std).contiguous(memory_format=torch.channels_last)


def train(parts: Parts, recipe: Recipe, architecture: str, seed: int) -> nn.Module:
    """Train a network on drawn scenes and return it in evaluation mode."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(1000 + seed)
    network = ARCHITECTURES[architecture]().to(DEVICE).to(memory_format=torch.channels_last).train()
    optimiser = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=EPOCHS * PICTURES // BATCH)
    drawn = draw(parts, recipe, PICTURES, random, measuring=False)
    scenes = Scenes(*(tensor.to(DEVICE) for tensor in (drawn.images, drawn.opacities, drawn.labels)))
    for _ in range(EPOCHS):
        for images, labels in batches(scenes, BATCH, random):
            loss = nn.functional.cross_entropy(network(normalised(images)), labels)
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            schedule.step()
    return network.to("cpu").eval()


@torch.inference_mode()
def accuracy(network: nn.Module, scenes: Scenes) -> float:
    """Return the share of scenes that a network classifies correctly."""
    right = [
        network(normalised(images)).argmax(1) == labels
        for images, labels in zip(scenes.images.split(256), scenes.labels.split(256), strict=True)
    ]
    return float(torch.cat(right).double().mean())
