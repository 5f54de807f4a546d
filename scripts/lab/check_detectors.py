"""Check two detectors whose truth is known, and a real one: do their boxes survive another background?

Two tiny detectors are trained on drawn scenes: for one, each class always stands on its own kind of background; for the
other, backgrounds are drawn at random. NanoDet with COCO weights is checked on photos. ``drawn`` and ``photos`` choose
the parts; the rows of all chosen parts go into the page.

    python -m scripts.lab.check_detectors drawn photos --state lab/ --markdown scripts/results/validation.md
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as runs
from torch import Tensor, nn
from torchvision.ops import generalized_box_iou_loss, masks_to_boxes, sigmoid_focal_loss

import camkit
from camkit.background.pictures import ImageRow
from camkit.models.loaded import LoadedModel
from scripts.demo.drawn_scenes.drawing import THINGS
from scripts.lab.lab_models import BATCH, Residual, preprocess
from scripts.lab.lab_run import write_between
from scripts.lab.lab_scenes import CLASSES, SIDE, Parts, Recipe, Scenes, draw, load_parts
from scripts.truth.judge_boxes import best_boxes, letterboxed, load_detector

PHOTOS = Path(os.environ.get("CAMKIT_TEST_DATA", "../shared/data"))

STRIDE = 4
"""Pixels of a picture for each cell of the tiny detector's grid."""

PICTURES, EPOCHS, LEARNING_RATE = 4096, 6, 5e-3
CHECKED = 160
"""Pictures of the folder that is checked."""

CHECK = {"threshold": 0.3}
"""The score above which boxes count: all three detectors find most objects with it, and few with 0.5."""


class TinyDetector(nn.Module):
    """A detector without anchors: each cell has the logits of the classes and the distances to its box's four sides."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(_halve(3, 16), _halve(16, 32), Residual(32))
        self.coarse = nn.Sequential(_halve(32, 48), Residual(48), Residual(48), nn.Conv2d(48, 32, 1))
        self.head = nn.Sequential(Residual(32), nn.Conv2d(32, CLASSES + 4, 1))
        self.classes = CLASSES

    def cells(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (N, cells, classes) and boxes (N, cells, 4) of all cells."""
        fine = self.fine(images)
        output: Tensor = self.head(fine + nn.functional.interpolate(self.coarse(fine), fine.shape[2:])).flatten(2).mT
        x, y = centres()
        left, top, right, bottom = (STRIDE * nn.functional.softplus(output[..., self.classes :])).unbind(-1)
        return output[..., : self.classes] - 3, torch.stack([x - left, y - top, x + right, y + bottom], -1)

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        """Return each picture's boxes, as torchvision's detectors do."""
        logits, boxes = self.cells(images)
        return [best_boxes(own, of_cells.sigmoid()) for of_cells, own in zip(logits, boxes, strict=True)]


def _halve(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def centres() -> tuple[Tensor, Tensor]:
    """Return x and y of the middle of each cell, in pixels."""
    places = (torch.arange(SIDE // STRIDE) + 0.5) * STRIDE
    return places.repeat(len(places)), places.repeat_interleave(len(places))


def boxes_of(scenes: Scenes) -> Tensor:
    """Return the box (N, 4) around the object of each scene."""
    boxes: Tensor = masks_to_boxes(scenes.opacities > 0.2)
    return boxes + torch.tensor([0, 0, 1, 1])


def train(scenes: Scenes, seed: int) -> TinyDetector:
    """Train a detector: focal loss for the classes, and generalised IoU for the boxes of the cells in the middle."""
    torch.manual_seed(seed)
    network, boxes = TinyDetector(), boxes_of(scenes)
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=0.02)
    steps = EPOCHS * -(-len(boxes) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    x, y = centres()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(boxes)).split(BATCH):
            wanted = boxes[rows]
            middle = (wanted[:, :2] + wanted[:, 2:]) / 2
            near = ((x - middle[:, :1]).abs() < STRIDE) & ((y - middle[:, 1:]).abs() < STRIDE)
            logits, found = network.cells(_normalised(scenes.images[rows]))
            classes = nn.functional.one_hot(scenes.labels[rows], CLASSES)[:, None] * near[..., None]
            loss = sigmoid_focal_loss(logits, classes.float(), reduction="sum") / near.sum()
            of_cells = wanted[:, None].expand_as(found)[near]
            loss = loss + generalized_box_iou_loss(found[near], of_cells, reduction="mean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval().requires_grad_(requires_grad=False)


def _normalised(images: Tensor) -> Tensor:
    normalise: Any = preprocess.transforms[-1]
    return torch.as_tensor(normalise(images))


def write_coco(scenes: Scenes, folder: Path) -> Path:
    """Write a folder of pictures with the boxes and outlines of their objects as COCO JSON; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number, (image, opacity, box) in enumerate(zip(scenes.images, scenes.opacities, boxes_of(scenes), strict=True)):
        name = f"{number:04d}.png"
        levels = (image.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
        Image.fromarray(levels).save(folder / name)
        left, top, right, bottom = box.tolist()
        encoded: Any = runs.encode(np.asfortranarray((opacity > 0.2).numpy().astype(np.uint8)))
        outline = {"size": [SIDE, SIDE], "counts": encoded["counts"].decode()}
        images.append({"id": number, "file_name": name, "width": SIDE, "height": SIDE})
        annotations.append(
            {
                "id": number + 1, "image_id": number, "category_id": int(scenes.labels[number]) + 1, "iscrowd": 0,
                "bbox": [left, top, right - left, bottom - top], "segmentation": outline,
            }
        )  # fmt: skip
    categories = [{"id": index + 1, "name": name} for index, name in enumerate(THINGS)]
    table = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(table))
    return folder


@dataclass(frozen=True)
class Row:
    """What was measured of one detector on one set of pictures."""

    name: str
    pictures: str
    result: camkit.CheckResult

    def cells(self) -> list[str]:
        """Return the cells of the table's row."""
        overall, rows = self.result.overall, [row for row in self.result.images if row.same]
        found = [row for row in rows if row.right]
        gap = overall.gap.mean
        return [
            self.name,
            self.pictures,
            f"{overall.accuracy.value:.0%} of {overall.pictures}",
            *(_shares(rows, arm) for arm in ARMS),
            *(_shares(found, arm) for arm in ARMS),
            "-" if gap is None else f"{gap.effect.value:.2f} ({gap.effect.low:.2f} to {gap.effect.high:.2f})",
            self.result.verdict,
        ]


def _shares(rows: Sequence[ImageRow], arm: Callable[[ImageRow], Sequence[float | bool]]) -> str:
    values = [float(np.mean(of_picture)) for row in rows if (of_picture := list(arm(row)))]
    return f"{np.mean(values):.0%}" if values else "-"


ARMS: tuple[Callable[[ImageRow], Sequence[float | bool]], ...] = (
    lambda row: list(row.same.values()),
    lambda row: list(row.other.values()),
    lambda row: list(row.removed.values()),
)
"""The answers to a picture pasted on backgrounds of its own class, on others, and without its objects."""

HEADER = (
    "| detector | pictures | found as they are | own scenes | other scenes | removed | of those found: own | other "
    "| removed | gap (95% interval) | verdict |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---|---|"
)


def drawn(state: Path) -> Iterator[Row]:
    """Train a detector with a planted shortcut and one without, and check both on pictures drawn in the same way."""
    parts: Parts = load_parts(state, 1)
    for name, correlation in (("planted: each class on its own scene", 1.0), ("the same, scenes at random", 0.0)):
        recipe, random = Recipe(correlation=correlation), torch.Generator().manual_seed(1)
        network = train(draw(parts, recipe, PICTURES, random, measuring=False), seed=0)
        scenes = draw(parts, recipe, CHECKED, random, measuring=True)
        with tempfile.TemporaryDirectory() as folder:
            model = LoadedModel(network, name, preprocess, tuple(THINGS))
            data = write_coco(scenes, Path(folder) / "scenes")
            out = state / ("drawn-planted" if correlation else "drawn-fair")
            yield Row(name, "drawn scenes", camkit.check(model, data, config={"check": CHECK}, out=out))


def nanodet() -> LoadedModel:
    """Return NanoDet with COCO weights, as ``camkit check --model FILE.py:nanodet`` takes it."""
    with tempfile.TemporaryDirectory() as folder:
        network = load_detector(PHOTOS, Path(folder))
    categories = json.loads((PHOTOS / "coco/instances.json").read_text())["categories"]
    return LoadedModel(network, "NanoDet", letterboxed, tuple(category["name"] for category in categories))


def photos(state: Path) -> Iterator[Row]:
    """Check NanoDet on the photos of COCO; a class needs only two photos."""
    few = {"check": CHECK, "limits": {"least_pictures": 2}}
    yield Row("NanoDet", "COCO", camkit.check(nanodet(), PHOTOS / "coco", config=few, out=state / "nanodet-coco"))


def main() -> None:
    """Check the detectors, print a row for each, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["drawn", "photos"])
    parser.add_argument("--state", type=Path, required=True, help="folder for the parts of scenes and the reports")
    parser.add_argument("--markdown", type=Path, help="page to write the table into")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for part in options.parts:
        for row in {"drawn": drawn, "photos": photos}[part](options.state):
            rows.append(f"| {' | '.join(row.cells())} |")
            print(rows[-1], flush=True)
    if options.markdown is not None:
        write_between(options.markdown, "check_detectors", "\n".join([HEADER, *rows]))


if __name__ == "__main__":
    main()
