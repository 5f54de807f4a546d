"""The photo lab's networks: heads on frozen features of ImageNet networks, and fine-tuned last stages.

A network is front, back and head. The feature maps that leave the front are computed once for each world and kept in
the state, so that training and measuring run the back and the head alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.transforms import v2

from scripts.lab.lab_run import DEVICE
from scripts.weights import load_network

BATCH = 64
STEPS = {"linear": 400, "two layers": 400, "fine-tuned": 300}
LEARNING_RATE = {"linear": 3e-3, "two layers": 1e-3, "fine-tuned": 2e-4}
WEIGHT_DECAY = 0.01
HIDDEN = 128
HEADS = tuple(STEPS)


@dataclass(frozen=True)
class Trunk:
    """A pretrained network without its classifier.

    Attributes:
        front: from the picture to the feature maps that are kept.
        back: from there to the last feature maps; this is what is fine-tuned.
        channels: of the last feature maps.
        mean, std: the normalisation of the three colours.
    """

    front: nn.Module
    back: nn.Module
    channels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def preprocess(self) -> v2.Compose:
        """The preprocessing of a picture that has the right size."""
        return v2.Compose(
            [v2.RGB(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.std)]
        )


_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def _lite0(data: Path) -> Trunk:
    network: Any = load_network(data, "timm:tf_efficientnet_lite0").module
    front = nn.Sequential(network.conv_stem, network.bn1, *network.blocks[:6])
    back = nn.Sequential(network.blocks[6], network.conv_head, network.bn2)
    return Trunk(front, back, 1280, **_HALF)


def _mobilenet(data: Path) -> Trunk:
    network: Any = load_network(data, "mobilenet_v2").module
    return Trunk(network.features[:17], network.features[17:], 1280, **_IMAGENET)


def _squeezenet(data: Path) -> Trunk:
    network: Any = load_network(data, "squeezenet1_1").module
    return Trunk(network.features[:11], network.features[11:], 512, **_IMAGENET)


TRUNKS: dict[str, Callable[[Path], Trunk]] = {
    "EfficientNet-Lite0": _lite0,
    "MobileNetV2": _mobilenet,
    "SqueezeNet": _squeezenet,
}


def load_trunk(name: str, data: Path) -> Trunk:
    """Load a trunk with its ImageNet weights, in evaluation mode, on the device."""
    trunk = TRUNKS[name](data)
    for module in (trunk.front, trunk.back):
        module.to(DEVICE).eval().requires_grad_(requires_grad=False)
    return trunk


def head_of(kind: str, channels: int, classes: int) -> nn.Module:
    """Return an untrained head on the mean of the last feature maps."""
    layers: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if kind == "two layers":
        return nn.Sequential(
            *layers, nn.Linear(channels, HIDDEN), nn.ReLU(), nn.Dropout(0.2), nn.Linear(HIDDEN, classes)
        )
    return nn.Sequential(*layers, nn.Linear(channels, classes))


@torch.inference_mode()
def maps_of(trunk: Trunk, pictures: NDArray[np.uint8]) -> NDArray[np.float16]:
    """Return the feature maps that leave the front, for pictures (N, H, W, 3)."""
    mean, std = (torch.tensor(values, device=DEVICE).view(1, 3, 1, 1) * 255 for values in (trunk.mean, trunk.std))
    parts = []
    for start in range(0, len(pictures), BATCH):
        batch = torch.from_numpy(pictures[start : start + BATCH]).to(DEVICE).permute(0, 3, 1, 2).float()
        parts.append(trunk.front((batch - mean) / std).half().cpu().numpy())
    return np.concatenate(parts)


def train(
    trunk: Trunk, kind: str, maps: NDArray[np.float16], labels: Tensor, weights: Tensor, seed: int
) -> nn.Sequential:
    """Train a head on the feature maps of the front, and for "fine-tuned" the back too; return back and head.

    ``weights`` (N,) says how often each picture is drawn. Batch normalisation keeps its statistics.
    """
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(1000 + seed)
    classes = int(labels.max()) + 1
    head = head_of(kind, trunk.channels, classes).train().to(DEVICE)
    tuned = kind == "fine-tuned"
    inputs = torch.from_numpy(maps).to(DEVICE) if tuned else _pooled(trunk.back, maps)
    labels = labels.to(DEVICE)
    network = nn.Sequential(trunk.back.requires_grad_(requires_grad=tuned), head) if tuned else head
    optimiser = torch.optim.AdamW(network.parameters(), LEARNING_RATE[kind], weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS[kind])
    for _ in range(STEPS[kind]):
        rows = torch.multinomial(weights, BATCH, replacement=True, generator=random)
        loss = nn.functional.cross_entropy(network(inputs[rows].float()), labels[rows])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    return nn.Sequential(trunk.back, head).requires_grad_(requires_grad=False).eval()


@torch.inference_mode()
def _pooled(back: nn.Module, maps: NDArray[np.float16]) -> Tensor:
    """Return the mean of the last feature maps as (N, C, 1, 1)."""
    batches = torch.from_numpy(maps).to(DEVICE).split(BATCH)
    return torch.cat([back(batch.float()).mean((2, 3), keepdim=True) for batch in batches]).clone()


@torch.inference_mode()
def answers(back_and_head: nn.Module, maps: NDArray[np.float16]) -> NDArray[np.int64]:
    """Return the class that a network names for each feature map of its front."""
    batches = torch.from_numpy(maps).to(DEVICE).split(BATCH)
    return torch.cat([back_and_head(batch.float()).argmax(1) for batch in batches]).cpu().numpy()
