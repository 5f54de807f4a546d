"""The networks whose ImageNet weights are in the folder of test data, and its photos."""

from __future__ import annotations

from pathlib import Path

import camkit

WEIGHTS = {
    "squeezenet1_1": "squeezenet1_1-winml_fp16.pth",
    "mobilenet_v2": "mobilenet_v2-coral_qat.pth",
    "timm:tf_efficientnet_lite0": "tf_efficientnet_lite0-tpu.pth",
}
"""For each network, by the name that ``camkit.load_model`` takes, the file of its weights."""

OF_TORCHVISION = ("squeezenet1_1", "mobilenet_v2")
PHOTOS = (
    "bird.png",
    "bird_segmentation.png",
    "cat.png",
    "chelsea.png",
    "coffee.png",
    "dog_segmentation_256.png",
    "dragonfly.png",
    "hot_dog.jpg",
    "parrot.jpg",
)


def load_network(data: Path, name: str) -> camkit.LoadedModel:
    """Return a network with its weights and its preprocessing."""
    return camkit.load_model(name, str(data / "weights" / WEIGHTS[name]), "cpu")
