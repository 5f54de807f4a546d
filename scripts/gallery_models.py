"""Models for the contact sheet: a detector, a segmenter and a preprocessing that trims, made from one classifier.

``camkit PICTURE --model scripts/gallery_models.py:segmenter`` takes them. The weights lie in CAMKIT_TEST_DATA.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import functional

import camkit

SIDE = 448
"""The side of the dense models' input: their maps have 14 x 14 cells."""
_FEWEST_CELLS = 4
"""A region of fewer cells is no object."""
_MOST_BOXES = 5


def data_folder() -> Path:
    """Return the folder with weights and photos."""
    return Path(os.environ.get("CAMKIT_TEST_DATA", Path(__file__).parents[1] / "../shared/data")).resolve()


def classifier() -> nn.Module:
    """Return MobileNetV2 with its ImageNet weights."""
    return camkit.load_model("mobilenet_v2", str(data_folder() / "weights/mobilenet_v2-coral_qat.pth"), "cpu").module


def prepared(picture: Image.Image) -> Tensor:
    """Resize a picture to a square and normalise it."""
    values = functional.to_tensor(functional.resize(picture, [SIDE, SIDE], antialias=True))
    normalised: Tensor = functional.normalize(values, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    return normalised


class Segmenter(nn.Module):
    """Applies the classifier's head to every cell: maps (N, 1000, 14, 14) of logits."""

    def __init__(self) -> None:
        super().__init__()
        network = classifier()
        self.features: nn.Module = network.get_submodule("features")
        self.head: nn.Module = network.get_submodule("classifier")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each cell."""
        cells = self.features(images).permute(0, 2, 3, 1)
        maps: Tensor = self.head(cells).permute(0, 3, 1, 2)
        return maps


class Detector(nn.Module):
    """Frames the regions in which the segmenter finds one class; their score is the mean probability inside."""

    def __init__(self) -> None:
        super().__init__()
        self.segmenter = Segmenter()

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        """Return boxes, labels and scores of each image, best first."""
        return [self._boxes(maps) for maps in self.segmenter(images).softmax(1)]

    def _boxes(self, maps: Tensor) -> dict[str, Tensor]:
        best = maps.detach().argmax(0).numpy()
        found: list[tuple[Tensor, int, list[float]]] = []
        for label in np.unique(best):
            _, regions, boxes, _ = cv2.connectedComponentsWithStats((best == label).astype(np.uint8))
            for number, (left, top, width, height, cells) in enumerate(boxes[1:].tolist(), start=1):
                if cells >= _FEWEST_CELLS:
                    score = maps[int(label)][torch.from_numpy(regions == number)].mean()
                    corners = [left, top, left + width, top + height]
                    found.append((score, int(label), [side * SIDE / len(best) for side in corners]))
        found = sorted(found, key=lambda row: -float(row[0].detach()))[:_MOST_BOXES]
        scores = torch.stack([score for score, _, _ in found]) if found else maps.new_zeros(0)
        boxes = torch.tensor([box for _, _, box in found]).reshape(-1, 4)
        return {"boxes": boxes, "labels": torch.tensor([label for _, label, _ in found]), "scores": scores}


def segmenter() -> tuple[nn.Module, Callable[[Image.Image], Tensor]]:
    """Return the segmenter and its preprocessing."""
    return Segmenter(), prepared


def detector() -> tuple[nn.Module, Callable[[Image.Image], Tensor]]:
    """Return the detector and its preprocessing."""
    return Detector(), prepared


def trimming() -> tuple[nn.Module, Callable[[Image.Image], Tensor]]:
    """Return the classifier with a preprocessing that first cuts off borders, wherever they are."""

    def trimmed(picture: Image.Image) -> Tensor:
        levels = np.asarray(picture).max(2)
        rows, columns = (np.nonzero((levels > 90).any(axis))[0] for axis in (1, 0))
        box = (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)
        values: Tensor = functional.resize(prepared(picture.crop(box)), [224, 224], antialias=True)
        return values

    return classifier(), trimmed
