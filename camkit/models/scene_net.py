"""The demo's network: a small CNN with global average pooling and one linear layer.

Two sets of weights ship with camkit, both from ``scripts/demo/train_demo.py``. They differ only in their
training pictures: ``demo-biased`` saw each object on its usual background only, ``demo-fair`` on every background.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import cast

import safetensors.torch
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from camkit.models.loaded import LoadedModel, Request

DEMO_MODELS = ("demo-biased", "demo-fair")
INPUT_SIZE = 128
MEAN = (0.45, 0.47, 0.47)
STD = (0.25, 0.25, 0.25)
LABELS = ("plane", "ship", "car", "bird")

preprocess: Callable[[Image.Image], Tensor] = v2.Compose(
    [
        v2.RGB(),
        v2.ToImage(),
        v2.Resize(INPUT_SIZE, antialias=True),
        v2.CenterCrop(INPUT_SIZE),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
)
"""Turns a picture into the (3, 128, 128) tensor that the network takes."""


def _convolution(inputs: int, outputs: int, width: int = 3, stride: int = 1) -> nn.Sequential:
    """Build one layer. The width is even if the stride is, so that every cell is centred on its own pixels."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, width, stride, padding=(width - stride) // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class SceneNet(nn.Module):
    """Classifies the object in a drawn scene.

    ``features`` turns pictures (N, 3, 128, 128) into (N, 64, 16, 16). ``head`` turns their mean over the grid into
    logits (N, 4) in the order of ``LABELS``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(3, 24, width=8, stride=4),
            _convolution(24, 32),
            _convolution(32, 48, width=4, stride=2),
            _convolution(48, 64),
            _convolution(64, 64),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(64, len(LABELS))

    def forward(self, images: Float[Tensor, "_ 3 h w"]) -> Float[Tensor, "_ 4"]:
        """Return the logits of a batch of preprocessed pictures."""
        return cast("Tensor", self.head(self.pool(self.features(images)).flatten(1)))


def load_scene_net(name: str) -> SceneNet:
    """Return ``"demo-biased"`` or ``"demo-fair"`` in eval mode, with the weights that ship with camkit."""
    stored = safetensors.torch.load(files("camkit.models").joinpath("files", f"{name}.safetensors").read_bytes())
    network = SceneNet()
    # Weights are stored as float16; counters stay as they are.
    weights = {key: value.float() if value.is_floating_point() else value for key, value in stored.items()}
    network.load_state_dict(weights)
    return network.eval()


def load(request: Request) -> LoadedModel:
    """Load one of the demo's networks."""
    request.refuse("size, mean and std", "has a fixed preprocessing")
    module = load_scene_net(request.name)
    return LoadedModel(module, request.name, preprocess, LABELS, request.fill(module))
