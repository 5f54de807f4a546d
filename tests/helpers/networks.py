"""Small networks and pictures that tests of several packages use."""

import base64
import functools
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

import camkit


class Net(nn.Module):
    """Named parts and the function that runs them: ``Net(run, head=head)(images)`` is ``run(net, images)``."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)
        self.eval()

    def forward(self, images: Any) -> Any:
        return self.run(self, images)


class Tally:
    """Counts passes outside of a module, whose own attributes camkit restores."""

    count = 0


def sizes_of_passes(model: nn.Module) -> list[int]:
    """Return a list that gets the size of each batch that the model sees."""
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    return sizes


def means(maps: Tensor) -> Tensor:
    return maps.mean((2, 3))


def classifier(*layers: nn.Module, classes: int = 5) -> nn.Sequential:
    """Return layers, the mean over their cells and a linear layer, in evaluation mode."""
    last = [module for layer in layers for module in layer.modules() if hasattr(module, "out_channels")][-1]
    pool = getattr(nn, f"AdaptiveAvgPool{len(last.kernel_size)}d")(1)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(last.out_channels, classes)).eval()


def features_and_head(classes: int = 4, channels: int = 3) -> Net:
    """Return a network of the layers ``features`` and, behind the mean over its cells, ``head``."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(channels, 6, 3, stride=2, padding=1), nn.ReLU())
    return Net(lambda net, images: net.head(means(net.features(images))), features=features, head=nn.Linear(6, classes))


def stage(channels: int, out: int, stride: int = 1, kernel: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, kernel, stride, kernel // 2), nn.BatchNorm2d(out), nn.ReLU())


class Maps(nn.Module):
    """A segmentation network that knows nothing: its classes lie elsewhere in a mirror image.

    Args:
        factor: what its scores are multiplied by.
    """

    def __init__(self, factor: float = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.factor = factor
        self.layer = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())
        self.head = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.factor * self.head(self.layer(x))
        return {"out": nn.functional.interpolate(scores, size=x.shape[2:], mode="bilinear")}


class Parts(nn.Module):
    """A small network with two pure functions that compute the parts before and after ``layer``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=4, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.layer: nn.Module = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout()
        self.head = nn.Linear(8, 5)

    def trunk(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x)).relu()

    def tail(self, maps: Tensor, x: Tensor) -> Tensor:
        """Return the logits for ``layer``'s output, without any in-place operation."""
        return self.head(self.drop(maps.relu().mean((2, 3))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return self.tail(self.layer(x), x)


class SmallNet(nn.Module):
    """A piecewise linear classifier; a further convolution after the explained layer, or the plain CAM head."""

    def __init__(self, cam_head: bool = False, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Identity() if cam_head else nn.Conv2d(6, 5, 3, padding=1)
        self.act2 = nn.Identity() if cam_head else activation()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(6 if cam_head else 5, 4)
        generator = torch.Generator().manual_seed(40)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        self.eval()

    def trunk(self, x: Tensor) -> Tensor:
        return self.relu1(self.conv1(x))

    def head(self, features: Tensor) -> Tensor:
        return self.fc(self.pool(self.act2(self.conv2(features))).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def small_picture() -> Tensor:
    return torch.randn(1, 3, 6, 10, generator=torch.Generator().manual_seed(41))


def heat_at(found: camkit.Explanation, place: tuple[int, int, int]) -> float:
    _, row, column = place
    return float(found.heatmap[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].mean())


@functools.cache
def network(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "vgg11":  # its own head is 120 million numbers
        model: nn.Module = torchvision.models.vgg11(num_classes=10, init_weights=False)
        model.classifier = nn.Sequential(
            nn.Linear(512 * 49, 32), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(32, 10)
        )
    elif name == "vit_b_32":
        model = torchvision.models.vit_b_32(num_classes=10, image_size=64)
        nn.init.normal_(model.heads.head.weight)  # torchvision starts with a head of zeros
    else:
        model = torchvision.models.get_model(name, weights=None, num_classes=10)
    return model.eval()


def shown_in(html: str) -> np.ndarray:
    data = re.search(r'src="data:image/png;base64,([^"]+)"', html)
    assert data
    with Image.open(io.BytesIO(base64.b64decode(data[1]))) as picture:
        return np.asarray(picture.convert("RGB"))


def planted_picture() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(1, 3, 8, 8, generator=generator) * 0.2 + 0.4


class Flat(nn.Module):
    """Has no head of pooling and one linear layer, so CAM does not work on it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).relu().flatten(1))
