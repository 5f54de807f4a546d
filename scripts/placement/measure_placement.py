"""Train small networks on drawn scenes, and measure where their cells look: evenly over the picture, or elsewhere?

    python -m scripts.placement.measure_placement --out placement.jsonl --device cuda --workers 8
    python -m scripts.placement.measure_placement --out tiny.jsonl --device cpu --workers 2 \
        --side 64 --levels 3 --steps 100

On one GPU with 16 processors this takes about two minutes. A network that has lines in ``--out`` is not trained again;
``--table`` prints the table of the lines that are there.

In a scene, one object lies anywhere, turned by any angle, so on average heat lies neither further to the right nor
further down than the object. The networks have strides with the paddings of real ones: the same at both ends as in
torchvision, more at the end as in TensorFlow, and none. Each is trained with mirrored pictures and without. It is then
measured on objects that it never saw, at sizes that are multiples of its stride and at others:

- "cells": the place with which each cell's heat varies over many scenes (reverse correlation), less its drawn place.
- "heat": how far the drawn heat lies from the object's mask, by the best correlation.
- "mirror": how far the heat of a mirrored picture, mirrored back, lies from that of the picture: twice the error.
- "gradient": the centre of the squared gradient of one cell at the picture, less its drawn place.

All are in cells; down and to the right are positive.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import camkit
from scripts.demo.drawn_scenes.birds import bird
from scripts.demo.drawn_scenes.drawing import BACKGROUNDS, paint_backdrop
from scripts.demo.drawn_scenes.vehicles import car, plane, ship
from scripts.placement.measure_shift import padded
from scripts.placement.placements import (
    MEASURED,
    best_shift,
    centre_of_gradients,
    drawn,
    likenesses,
    placements_of,
    profiles,
    seen_by_cells,
)

MAKERS = (plane, ship, car, bird)
SPRITES, BACKDROPS = 1200, 160
SPRITE_SIDE, BACKDROP_SIDE = 96, 256
SMALLEST, LARGEST = 0.25, 0.5
"""Side of the square around an object, as a share of the usual picture's."""

BATCH = 64
LEARNING_RATE, WEIGHT_DECAY = 4e-3, 0.02
MEAN, STD = 0.46, 0.25
AT_ONCE = 128


@dataclass(frozen=True)
class Settings:
    """How large networks and pictures are, how long is trained, and on how many scenes is measured."""

    side: int
    levels: int
    steps: int
    scenes: int
    device: str

    @property
    def stride(self) -> int:
        """Pixels from cell to cell."""
        return int(2**self.levels)

    @property
    def sides(self) -> tuple[int, ...]:
        """The sizes that are measured."""
        return (self.side, self.side + 1, self.side + self.stride // 2, self.side + self.stride)


@dataclass(frozen=True)
class Parts:
    """Objects (N, 4, 96, 96), colour times opacity and opacity, and backgrounds (M, 3, 256, 256); uint8.

    Object i shows class i % 4. The last quarter of both is never trained on.
    """

    sprites: Tensor
    backdrops: Tensor


def draw_parts(file: Path, workers: int) -> None:
    """Draw the parts of the scenes into a file."""
    with ProcessPoolExecutor(workers, get_context("spawn"), cv2.setNumThreads, (1,)) as pool:
        sprites = np.stack(list(pool.map(_sprite, range(SPRITES), chunksize=25)))
        backdrops = np.stack(list(pool.map(_backdrop, range(BACKDROPS), chunksize=4)))
    np.savez(file, sprites=sprites, backdrops=backdrops)


def _sprite(number: int) -> NDArray[np.uint8]:
    """Paint an object that heads to the right; its outermost point touches the circle within the square."""
    shapes = MAKERS[number % len(MAKERS)](np.random.default_rng([7, number]))
    points = np.concatenate([shape.points for shape in shapes])
    middle = (points.max(0) + points.min(0)) / 2
    radius = float(np.linalg.norm(points - middle, axis=1).max())
    large = 3 * SPRITE_SIDE
    painted = np.zeros((large, large, 4), np.float32)
    for shape in shapes:
        corners = [np.round((((shape.points - middle) / radius + 1) * large / 2 - 0.5) * 16).astype(np.int32)]
        cv2.fillPoly(painted, corners, (*shape.colour, 1.0), cv2.LINE_8, 4)
    return _as_bytes(cv2.resize(painted, (SPRITE_SIDE, SPRITE_SIDE), interpolation=cv2.INTER_AREA))


def _backdrop(number: int) -> NDArray[np.uint8]:
    kind = BACKGROUNDS[number % len(BACKGROUNDS)]
    return _as_bytes(paint_backdrop(np.random.default_rng([8, number]), kind, BACKDROP_SIDE))


def _as_bytes(picture: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.asarray(np.round(np.clip(picture, 0, 1) * 255), np.uint8).transpose(2, 0, 1).copy()


def load_parts(file: Path, device: str) -> Parts:
    """Read the parts that were drawn."""
    with np.load(file) as arrays:
        return Parts(*(torch.from_numpy(arrays[name]).to(device) for name in ("sprites", "backdrops")))


@dataclass(frozen=True)
class Scenes:
    """Normalised pictures (N, 3, S, S), the opacity of their objects (N, S, S), and their classes (N,)."""

    images: Tensor
    covers: Tensor
    labels: Tensor

    def mirrored(self, which: Tensor) -> Scenes:
        """Return the scenes, some of them mirrored."""
        images = torch.where(which[:, None, None, None], self.images.flip(3), self.images)
        return Scenes(images, torch.where(which[:, None, None], self.covers.flip(2), self.covers), self.labels)


def compose(
    parts: Parts, count: int, side: int, settings: Settings, random: torch.Generator, *, measuring: bool
) -> Scenes:
    """Compose scenes of ``side`` pixels: an object anywhere, turned by any angle, on any background.

    ``measuring`` uses the parts that are never trained on.
    """
    device = parts.sprites.device
    uniform = functools.partial(torch.rand, generator=random)
    labels = torch.randint(len(MAKERS), (count,), generator=random)

    def chosen(total: int) -> Tensor:
        groups = total // len(MAKERS)
        low, high = (groups * 3 // 4, groups) if measuring else (0, groups * 3 // 4)
        return torch.randint(low, high, (count,), generator=random) * len(MAKERS)

    sprites = parts.sprites[(chosen(len(parts.sprites)) + labels).to(device)].float() / 255
    share = (SMALLEST + (LARGEST - SMALLEST) * uniform(count)) * settings.side / side
    centre = (2 * uniform(count, 2) - 1) * (1 - share)[:, None]
    angle = 2 * math.pi * uniform(count)
    turn = (
        torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], 1).reshape(-1, 2, 2) / share[:, None, None]
    )
    theta = torch.cat([turn, -turn @ centre[:, :, None]], 2).to(device)
    grid = functional.affine_grid(theta, [count, 4, side, side], align_corners=False)
    placed = functional.grid_sample(sprites, grid, align_corners=False)
    backdrops = chosen(len(parts.backdrops)) + torch.randint(len(BACKGROUNDS), (count,), generator=random)
    starts = torch.randint(BACKDROP_SIDE - side + 1, (2, count), generator=random)
    rows, columns = (start[:, None] + torch.arange(side) for start in starts)
    places = (backdrops[:, None, None], slice(None), rows[:, :, None], columns[:, None, :])
    cut = parts.backdrops[tuple(part if isinstance(part, slice) else part.to(device) for part in places)]
    images = cut.movedim(3, 1).float() / 255 * (1 - placed[:, 3:]) + placed[:, :3]
    gain = (0.8 + 0.4 * uniform(count, 1, 1, 1)).to(device)
    noise = 0.03 * torch.randn(count, 1, side, side, device=device)
    return Scenes(((images * gain + noise).clamp(0, 1) - MEAN) / STD, placed[:, 3], labels.to(device))


def _convolution(inputs: int, outputs: int, width: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    padding = 0 if width == stride else width // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, width, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Residual(nn.Module):
    """A block of ResNet-18: two convolutions, and a shortcut that takes every second cell if there is a stride."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(inputs, outputs, 3, stride),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, maps: Tensor) -> Tensor:
        """Return the block's maps."""
        return torch.relu(self.body(maps) + self.shortcut(maps))


WIDTHS = (24, 32, 64, 96, 128)


def residual(levels: int) -> nn.Module:
    """Build a small ResNet: a wide convolution, a max pooling, and residual blocks."""
    layers: list[nn.Module] = [_convolution(3, WIDTHS[1], 7, 2), nn.MaxPool2d(3, 2, 1)]
    for level in range(1, levels):
        inputs = WIDTHS[max(1, level - 1)]
        layers += [Residual(inputs, WIDTHS[level], 1 if level == 1 else 2), Residual(WIDTHS[level], WIDTHS[level], 1)]
    return nn.Sequential(*layers)


def mobile(levels: int) -> nn.Module:
    """Build a small MobileNet: depthwise separable convolutions, of which every second one has a stride."""

    def pair(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(_convolution(inputs, inputs, 3, stride, inputs), _convolution(inputs, outputs, 1))

    layers: list[nn.Module] = [_convolution(3, WIDTHS[0], 3, 2)]
    for level in range(1, levels):
        layers += [pair(WIDTHS[level - 1], WIDTHS[level], 2), pair(WIDTHS[level], WIDTHS[level], 1)]
    return nn.Sequential(*layers, _convolution(WIDTHS[levels - 1], WIDTHS[levels - 1], 3))


def mobile_tensorflow(levels: int) -> nn.Module:
    """Build the same network with TensorFlow's padding."""
    return padded(mobile(levels), at_the_end=True)


def patches(levels: int) -> nn.Module:
    """Build a network in which each stride is as wide as its kernel, as in ConvNeXt."""
    layers: list[nn.Module] = [_convolution(3, WIDTHS[1], 4, 4), Residual(WIDTHS[1], WIDTHS[1], 1)]
    for level in range(2, levels):
        layers += [_convolution(WIDTHS[level - 1], WIDTHS[level], 2, 2), Residual(WIDTHS[level], WIDTHS[level], 1)]
    return nn.Sequential(*layers)


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "residual, same padding at both ends": residual,
    "mobile, same padding at both ends": mobile,
    "mobile, TensorFlow's padding": mobile_tensorflow,
    "patches, no padding": patches,
}


def build(kind: str, settings: Settings, seed: int) -> nn.Sequential:
    """Build an untrained classifier: features, and a head of global average pooling and one linear layer."""
    torch.manual_seed(seed)
    features = KINDS[kind](settings.levels)
    width = features(torch.zeros(2, 3, settings.side, settings.side)).shape[1]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, len(MAKERS)))
    network = nn.Sequential(features, head).to(memory_format=torch.channels_last)
    return network.to(settings.device)


def train(network: nn.Module, parts: Parts, settings: Settings, seed: int, *, mirror: bool) -> None:
    """Train a network on scenes that are drawn anew at each step."""
    random = torch.Generator().manual_seed(1000 + seed)
    network.train()
    on_gpu = settings.device != "cpu"
    optimiser = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=on_gpu)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=settings.steps)
    for _ in range(settings.steps):
        scenes = compose(parts, BATCH, settings.side, settings, random, measuring=False)
        if mirror:
            scenes = scenes.mirrored((torch.rand(BATCH, generator=random) < 0.5).to(settings.device))
        with torch.autocast(settings.device.split(":")[0], torch.bfloat16, enabled=on_gpu):
            scores = network(scenes.images.contiguous(memory_format=torch.channels_last))
        loss = functional.cross_entropy(scores.float(), scenes.labels)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    network.eval()


@dataclass(frozen=True)
class Run:
    """A network to train."""

    kind: str
    mirror: bool
    seed: int


def train_and_measure(run: Run, settings: Settings, file: Path) -> list[dict[str, Any]]:
    """Train a network and return a row for each size."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    parts = load_parts(file, settings.device)
    network = build(run.kind, settings, run.seed)
    before = gradient_centres(network, parts, settings)
    train(network, parts, settings, run.seed, mirror=run.mirror)
    trained = time.perf_counter() - start
    gradient = gradient_centres(network, parts, settings)
    rows = []
    for side in settings.sides:
        row = {**asdict(run), "side": side, "stride": settings.stride, **measure(network, parts, side, settings)}
        rows.append({**row, "gradient_before": before, "gradient": gradient, "trained": round(trained, 1)})
    rows[-1]["seconds"] = round(time.perf_counter() - start, 1)
    return rows


def gradient_centres(network: nn.Sequential, parts: Parts, settings: Settings) -> list[float]:
    """Return the centre of one cell's squared gradient, less its even place; down and to the right, in cells."""
    random = torch.Generator().manual_seed(5)
    scenes = compose(parts, AT_ONCE, settings.side, settings, random, measuring=True)
    images = scenes.images.requires_grad_()
    was_training = network.training
    network.eval()
    maps = network[0](images)
    weights = class_weights(network)[scenes.labels]
    cell = maps.shape[2] // 2
    (gradients,) = torch.autograd.grad((maps[:, :, cell, cell] * weights).sum(), images)
    network.train(was_training)
    even = (cell + 0.5) * settings.side / maps.shape[2] - 0.5
    return [(place - even) / settings.stride for place in centre_of_gradients(gradients)]


def class_weights(network: nn.Sequential) -> Tensor:
    """Return the weights of the last layer (classes, C)."""
    return next(module.weight for module in network.modules() if isinstance(module, nn.Linear))


def raws_of(network: nn.Sequential, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Grad-CAM of pictures for their best classes (N, h, w), and whether these are right (N,).

    With this head, Grad-CAM is the sum of the maps, weighted by the class's weights and divided by the number of cells.
    """
    raws, named = [], []
    with torch.inference_mode():
        for part in images.split(AT_ONCE):
            maps = network[0](part)
            best = network[1](maps).argmax(1)
            weights = class_weights(network)[best] / maps[0, 0].numel()
            raws.append(torch.einsum("nchw,nc->nhw", maps, weights))
            named.append(best)
    explained = camkit.Explainer(network, method="gradcam", device=images.device)(images[0])
    if not np.allclose(explained.raw, raws[0][0].cpu().numpy(), rtol=5e-2, atol=5e-2 * float(raws[0][0].abs().max())):
        raise RuntimeError(f"Grad-CAM at {explained.layer} differs from what is measured")
    return torch.cat(raws), torch.cat(named) == labels


def measure(network: nn.Sequential, parts: Parts, side: int, settings: Settings) -> dict[str, Any]:
    """Return where cells look and where heat lies at one size, in cells; see the top."""
    size, stride = (side, side), settings.stride
    random = torch.Generator().manual_seed(9)
    made = [
        compose(parts, AT_ONCE, side, settings, random, measuring=True)
        for _ in range(max(1, settings.scenes // AT_ONCE))
    ]
    scenes = Scenes(*(torch.cat([getattr(part, name) for part in made]) for name in ("images", "covers", "labels")))
    raws, right = raws_of(network, scenes.images, scenes.labels)
    mirrored, right_mirrored = raws_of(network, scenes.images.flip(3), scenes.labels)
    flipped, right_flipped = raws_of(network, scenes.images.flip(2), scenes.labels)
    places = placements_of(network, size, torch.device(settings.device))
    row: dict[str, Any] = {"accuracy": float(right.double().mean()), "cells": raws.shape[1], "by": {}}
    for axis, name in enumerate(("down", "right")):
        objects = profiles(scenes.covers[right], axis)
        seen = seen_by_cells(profiles(raws[right].relu(), axis), objects, stride)
        there = np.array(places[MEASURED][axis])
        inner = (there >= 1.4 * stride) & (there <= side - 1 - 1.4 * stride)
        row[f"seen {name}"] = seen.round(2).tolist()
        row[f"spacing {name}"] = float(np.polyfit(np.flatnonzero(inner), seen[inner], 1)[0] / stride)
        again, both = (flipped, right & right_flipped) if axis == 0 else (mirrored, right & right_mirrored)
        for way, positions in places.items():
            heat = drawn(raws, size, positions)
            back = drawn(again, size, positions).flip(1 + axis)
            to_object = likenesses(objects, profiles(heat[right], axis), stride).mean(0)
            to_mirror = likenesses(profiles(heat[both], axis), profiles(back[both], axis), stride * 5 // 4).mean(0)
            row["by"][f"{way} {name}"] = {
                "cells": float((seen - np.array(positions[axis]))[inner].mean() / stride),
                "largest": float(np.abs(seen - np.array(positions[axis]))[inner].max() / stride),
                "heat": -best_shift(to_object) / stride,
                "mirror": best_shift(to_mirror) / stride,
                "likeness": float(to_object[len(to_object) // 2]),
            }
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table: a line for each network, size and placement, with means over seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["kind"], row["mirror"], row["side"], row["stride"]].append(row)
    lines = [
        "| network | trained with mirrored pictures | side | named right | cells apart, of the stride | placement "
        "| cells look beside, down / right | heat beside the object, down / right | mirror, down / right |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for (kind, mirror, side, _), group in groups.items():
        accuracy = np.mean([row["accuracy"] for row in group])
        spacing = np.mean([row[f"spacing {name}"] for row in group for name in ("down", "right")])
        ways = dict.fromkeys(key.rsplit(" ", 1)[0] for key in group[0]["by"])
        for way in ways:
            cells = [
                " / ".join(f"{np.mean([row['by'][f'{way} {name}'][what] for row in group]):+.2f}" for name in AXES)
                for what in ("cells", "heat", "mirror")
            ]
            head = f"{kind} | {'yes' if mirror else 'no'} | {side} | {accuracy:.0%} | {spacing:.2f}"
            lines.append(f"| {head} | {way} | {' | '.join(cells)} |")
    lines += [
        "",
        "Centre of one cell's squared gradient, less its even place, in cells (down / right):",
        "",
        "| network | trained with mirrored pictures | before training | after training |",
        "|---|---|---:|---:|",
    ]
    for (kind, mirror, side, _), group in groups.items():
        if side == min(row["side"] for row in rows):
            values = [np.mean([row[key] for row in group], 0) for key in ("gradient_before", "gradient")]
            texts = [" / ".join(f"{number:+.2f}" for number in pair) for pair in values]
            lines.append(f"| {kind} | {'yes' if mirror else 'no'} | {' | '.join(texts)} |")
    return "\n".join(lines)


AXES = ("down", "right")


def main() -> None:
    """Train and measure all networks that have no lines yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("placement.jsonl"), help="the file with a line for each result"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--side", type=int, default=192, help="side of the pictures in training")
    parser.add_argument("--levels", type=int, default=5, help="how often the stride doubles: 3 to 5")
    parser.add_argument("--steps", type=int, default=1000, help=f"steps of training, with {BATCH} pictures each")
    parser.add_argument("--scenes", type=int, default=1024, help=f"scenes to measure on, a multiple of {AT_ONCE}")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kind", action="append", choices=KINDS, help="train these networks alone")
    parser.add_argument("--table", action="store_true", help="print the table of the file and end")
    given = parser.parse_args()
    settings = Settings(given.side, given.levels, given.steps, given.scenes, given.device)
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(row["kind"], row["mirror"], row["seed"]) for row in rows}
    wanted = itertools.product(range(given.seeds), given.kind or KINDS, (True, False))
    runs = [Run(kind, mirror, seed) for seed, kind, mirror in wanted if (kind, mirror, seed) not in done]
    if runs and not given.table:
        start = time.perf_counter()
        file = given.out.with_suffix(".npz")
        if not file.exists():
            draw_parts(file, given.workers)
        print(f"parts drawn in {time.perf_counter() - start:.0f} s; {len(runs)} networks follow", flush=True)
        with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool, given.out.open("a") as lines:
            futures = [pool.submit(train_and_measure, run, settings, file) for run in runs]
            for future in as_completed(futures):
                if (error := future.exception()) is not None:
                    print(f"a network is left out: {type(error).__name__}: {error}", flush=True)
                    continue
                made = future.result()
                rows += made
                lines.writelines(f"{json.dumps(row)}\n" for row in made)
                lines.flush()
                last = made[-1]
                print(f"{time.perf_counter() - start:.0f} s: {last['kind']}, {last['accuracy']:.2f}, "
                      f"{last['trained']} + {last['seconds'] - last['trained']:.1f} s", flush=True)  # fmt: skip
    print(table(rows))


if __name__ == "__main__":
    main()
