"""Trains a small network on drawn scenes and shows in TensorBoard how its heat moves onto the object.

    pip install 'camkit[tensorboard]'
    python examples/train_and_watch.py --logdir runs/scenes
    tensorboard --logdir runs

Every object appears on every background, so only the object reveals the class. In addition to what the watch writes,
one scalar shows how much of the heat lies on the object, and another how much would if it were spread evenly.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from camkit import explain, targets
from camkit.demo.scenes import BACKGROUNDS, THINGS, draw
from camkit.tensorboard import TrainingWatch

FRAME, SIDE = 80, 64
"""The side of a drawn scene and of the network's input, in pixels."""

BATCH = 32
SHIFT = 6
"""How far a training picture is shifted at most, in pixels."""

FOLLOWED = 36
"""The number of scenes that are not used for training and whose heat is followed."""


@dataclass(frozen=True)
class Scenes:
    """Pictures (N, 3, H, W) with values -1..1, their objects' classes (N,), and the objects' regions (N, H, W)."""

    pictures: Tensor
    labels: Tensor
    regions: Tensor


def network() -> nn.Sequential:
    """Return a small network whose last feature maps have one cell for every 4 x 4 pixels."""

    def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 4 if stride == 2 else 3, stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    features = nn.Sequential(block(3, 24, 2), block(24, 48, 2), block(48, 64), block(64, 64))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(THINGS)))


def draw_scenes(count: int, seed: int) -> Scenes:
    """Draw scenes, each object on each background equally often."""
    pictures, regions = zip(*(_drawn((seed, number)) for number in range(count)), strict=True)
    colours = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return Scenes(colours, torch.arange(count) % 4, torch.from_numpy(np.stack(regions)) > 0)


def _drawn(seed: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw a scene and crop it to a square twice as wide as its object; return the crop and the object's region."""
    random, number = np.random.default_rng(seed), seed[1]
    scene = draw(random, THINGS[number % 4], BACKGROUNDS[number // 4 % 4], FRAME)
    rows, columns = (np.flatnonzero(scene.mask.any(axis)) for axis in (1, 0))
    side = min(FRAME, 2 * max(np.ptp(rows), np.ptp(columns)))
    top, left = (
        random.integers(max(0, cells[-1] + 1 - side), min(cells[0], FRAME - side) + 1) for cells in (rows, columns)
    )
    crop = slice(top, top + side), slice(left, left + side)
    picture = cv2.resize(scene.image[crop], (SIDE, SIDE))
    region = cv2.resize(scene.mask[crop].astype(np.uint8), (SIDE, SIDE), interpolation=cv2.INTER_NEAREST)
    return picture, region


def heat_on_objects(model: nn.Module, scenes: Scenes) -> float:
    """Return the average share of the heat for the true class that lies on the object."""
    explanations = explain(model, scenes.pictures, target=targets.each(scenes.labels.tolist()))
    shares = [
        float(explanation.heatmap[region].sum() / explanation.heatmap.sum()) if explanation.heatmap.any() else 0.0
        for explanation, region in zip(explanations, scenes.regions.numpy(), strict=True)
    ]
    return float(np.mean(shares))


def train(logdir: Path, epochs: int, count: int) -> None:
    """Train the network and watch it."""
    torch.manual_seed(0)
    scenes, followed = draw_scenes(count, seed=0), draw_scenes(FOLLOWED, seed=1)
    model = network()
    steps = epochs * (count // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    true_classes = targets.each(followed.labels.tolist())
    with (
        SummaryWriter(str(logdir)) as events,
        TrainingWatch(model, followed.pictures, events, every=50, pictures_every=0, target=true_classes) as watch,
    ):
        events.add_scalar("heat/spread evenly", followed.regions.float().mean(), 0)
        for epoch in range(epochs + 1):
            recognised = accuracy(model, followed)
            on_objects = heat_on_objects(model, followed)
            events.add_scalar("heat/on objects", on_objects, watch.steps)
            watch.pictures()
            print(
                f"epoch {epoch}: {recognised:.0%} recognised, {on_objects:.0%} of the heat on the objects", flush=True
            )
            if epoch == epochs:
                break
            for batch in torch.randperm(count).split(BATCH)[: count // BATCH]:
                pictures = scenes.pictures[batch]
                pictures = torch.where(torch.rand(len(batch), 1, 1, 1) < 0.5, pictures.flip(3), pictures)
                pictures = pictures.roll(torch.randint(-SHIFT, SHIFT + 1, (2,)).tolist(), (2, 3))
                loss = nn.functional.cross_entropy(model(pictures), scenes.labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                events.add_scalar("loss", loss.item(), watch.steps)
                watch.step()


@torch.no_grad()
def accuracy(model: nn.Module, scenes: Scenes) -> float:
    """Return the share of pictures that the network classifies correctly."""
    model.eval()
    correct = (model(scenes.pictures).argmax(1) == scenes.labels).float().mean()
    model.train()
    return float(correct)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--logdir", type=Path, default=Path("runs/scenes"))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--scenes", type=int, default=1600, help="how many scenes to draw")
    options = parser.parse_args()
    train(options.logdir, options.epochs, options.scenes)


if __name__ == "__main__":
    main()
