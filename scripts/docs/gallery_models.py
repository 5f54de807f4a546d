"""Models for the contact sheet: a detector, a segmenter and a preprocessing that trims, made from the demo's network.

``camkit PICTURE --model scripts/docs/gallery_models.py:segmenter`` takes them.
"""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import functional

from camkit.models.scene_net import INPUT_SIZE, MEAN, STD, load_scene_net

SIDE = 2 * INPUT_SIZE
"""The side of the dense models' input: their maps have 32 x 32 cells."""
_BLUR = 7
"""The cells over which a region's logits are averaged, since the network was trained on whole pictures."""
_FEWEST_CELLS = 16
"""A region of fewer cells is no object."""
_MOST_BOXES = 5


def prepared(picture: Image.Image, side: int = SIDE) -> Tensor:
    """Resize a picture to a square and normalise it."""
    values = functional.to_tensor(functional.resize(picture, [side, side], antialias=True))
    normalised: Tensor = functional.normalize(values, list(MEAN), list(STD))
    return normalised


class Segmenter(nn.Module):
    """Applies the classifier's head to every cell: maps (N, 4, 32, 32) of logits."""

    def __init__(self) -> None:
        super().__init__()
        network = load_scene_net("demo-fair")
        self.features = network.features
        self.pool = nn.AvgPool2d(_BLUR, 1, _BLUR // 2, count_include_pad=False)
        self.head = network.head

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each cell."""
        cells = self.pool(self.features(images)).permute(0, 2, 3, 1)
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
        rows, columns = (np.nonzero((levels > 0).any(axis))[0] for axis in (1, 0))
        box = (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)
        return prepared(picture.crop(box), INPUT_SIZE)

    return load_scene_net("demo-fair"), trimmed
