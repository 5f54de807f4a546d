"""Trains the demo's two networks on drawn scenes and measures where they look.

Both see the same objects at the same positions and the same backgrounds. They start from the same weights and follow
the same recipe. Only the pairing of objects and backgrounds differs: the biased network sees an object on its usual
background only, the fair one on every background.

    python -m scripts.demo.train_demo --seed 0 --threads 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn

from camkit.models.scene_net import INPUT_SIZE, MEAN, STD, SceneNet
from scripts.demo.drawn_scenes.drawing import BACKGROUNDS, HOME, THINGS, Scene, draw, paint_backdrop, paint_thing

OBJECTS = 4000
BACKDROPS = 1600
CLOSE_EPOCHS = 20
FULL_EPOCHS = 12
CLOSE_SIDE = 64
BATCH_SIZE = 32
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.02
TEST_PICTURES = 480
TEST_BATCH_SIZE = 120
DILATION = 4
"""Pixels around a mask in which the maximum of a map still counts as inside: half a cell of the 16 x 16 grid."""


@dataclass(frozen=True)
class SceneRequest:
    """One scene to draw."""

    seed: tuple[int, ...]
    thing: str
    background: str


@dataclass(frozen=True)
class Pictures:
    """Pictures (N, 3, H, W) uint8, masks (N, H, W) bool, labels and backgrounds (N,)."""

    images: Tensor
    masks: Tensor
    labels: Tensor
    backgrounds: Tensor


@dataclass(frozen=True)
class Parts:
    """The parts of which training scenes are composed, uint8.

    ``objects`` (N, 4, H, W) hold colour times cover, and the cover; object i has class i % 4. ``backdrops`` have the
    shape (M, 3, H, W); backdrop i has kind i % 4.
    """

    objects: Tensor
    backdrops: Tensor


def draw_scene(request: SceneRequest) -> Scene:
    """Draw one scene."""
    return draw(np.random.default_rng(request.seed), request.thing, request.background, INPUT_SIZE)


def draw_object(seed: tuple[int, ...]) -> NDArray[np.uint8]:
    """Draw one object in an empty frame, (4, H, W)."""
    front, cover = paint_thing(np.random.default_rng(seed), THINGS[seed[-1] % 4], INPUT_SIZE)
    return bytes_of(np.dstack([front, cover]))


def draw_backdrop(seed: tuple[int, ...]) -> NDArray[np.uint8]:
    """Draw one background, (3, H, W)."""
    return bytes_of(paint_backdrop(np.random.default_rng(seed), BACKGROUNDS[seed[-1] % 4], INPUT_SIZE))


def bytes_of(picture: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Turn a picture (H, W, C) in [0, 1] into (C, H, W) uint8."""
    return np.round(np.clip(picture, 0, 1) * 255).astype(np.uint8).transpose(2, 0, 1).copy()


def draw_parts(seed: int, pool: ProcessPoolExecutor) -> Parts:
    """Draw the objects and backdrops that both networks learn from."""
    objects = pool.map(draw_object, [(seed, 0, i) for i in range(OBJECTS)], chunksize=50)
    backdrops = pool.map(draw_backdrop, [(seed, 1, i) for i in range(BACKDROPS)], chunksize=50)
    return Parts(torch.from_numpy(np.stack(list(objects))), torch.from_numpy(np.stack(list(backdrops))))


def draw_all(requests: Sequence[SceneRequest], pool: ProcessPoolExecutor) -> Pictures:
    """Draw every scene, in the order of the requests."""
    scenes = list(pool.map(draw_scene, requests, chunksize=20))
    images = np.stack([scene.image for scene in scenes]).transpose(0, 3, 1, 2)
    return Pictures(
        torch.from_numpy(np.ascontiguousarray(images)),
        torch.from_numpy(np.stack([scene.mask for scene in scenes])),
        torch.tensor([THINGS.index(scene.thing) for scene in scenes]),
        torch.tensor([BACKGROUNDS.index(scene.background) for scene in scenes]),
    )


def home_scenes(seed: int, purpose: int, count: int) -> list[SceneRequest]:
    """Request every object on its own background."""
    things = [THINGS[i % 4] for i in range(count)]
    return [SceneRequest((seed, purpose, i), thing, HOME[thing]) for i, thing in enumerate(things)]


def strange_scenes(seed: int, purpose: int, count: int) -> list[SceneRequest]:
    """Request every object on the three backgrounds that are not its own, equally often."""
    backgrounds = [BACKGROUNDS[(i + 1 + i // 4 % 3) % 4] for i in range(count)]
    return [SceneRequest((seed, purpose, i), THINGS[i % 4], kind) for i, kind in enumerate(backgrounds)]


def normalised(images: Tensor) -> Tensor:
    """Turn RGB in [0, 1], (N, 3, H, W), into the network's input."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return ((images - mean) / std).contiguous(memory_format=torch.channels_last)


def backdrops_for(labels: Tensor, biased: bool) -> Tensor:
    """Choose the index of a backdrop for every label (N,): of the object's own kind, or of any kind."""
    kinds = labels if biased else torch.randint(4, labels.shape)
    return torch.randint(BACKDROPS // 4, labels.shape) * 4 + kinds


def close_up(objects: Tensor, backdrops: Tensor) -> tuple[Tensor, Tensor]:
    """Crop both to one window per picture, (N, C, CLOSE_SIDE, CLOSE_SIDE), that contains the object."""
    cover = objects[:, 3].float()
    ticks = torch.arange(INPUT_SIZE, dtype=torch.float32)
    middles = torch.stack([cover.sum(2) @ ticks, cover.sum(1) @ ticks], dim=1) / cover.sum((1, 2))[:, None]
    shift = torch.randint(-CLOSE_SIDE // 4, CLOSE_SIDE // 4, middles.shape)
    corners = (middles.long() - CLOSE_SIDE // 2 + shift).clamp(0, INPUT_SIZE - CLOSE_SIDE).tolist()

    def crop(images: Tensor) -> Tensor:
        windows = zip(images, corners, strict=True)
        return torch.stack([i[:, y : y + CLOSE_SIDE, x : x + CLOSE_SIDE] for i, (y, x) in windows])

    return crop(objects), crop(backdrops)


def composed(objects: Tensor, backdrops: Tensor) -> Tensor:
    """Compose objects and backdrops, each mirrored half of the time, in varied light; (N, 3, H, W)."""
    front, cover = (mirrored(objects).float() / 255).split_with_sizes([3, 1], dim=1)
    pictures = mirrored(backdrops).float().div_(255).mul_(1 - cover).add_(front)
    n = len(pictures)
    gain = torch.empty(n, 1, 1, 1).uniform_(0.8, 1.17) * torch.empty(n, 3, 1, 1).uniform_(0.94, 1.06)
    gamma = torch.empty(n, 1, 1, 1).uniform_(0.86, 1.16)
    grain = torch.empty_like(pictures[:, :1]).uniform_(-0.012, 0.012)
    return (pictures * gain).clamp_(1e-4, 1).pow_(gamma).add_(grain)


def mirrored(images: Tensor) -> Tensor:
    """Flip each picture left to right with probability one half."""
    mirror = torch.rand(len(images)) < 0.5
    images = images.clone()
    images[mirror] = images[mirror].flip(3)
    return images


def train(parts: Parts, seed: int, biased: bool) -> SceneNet:
    """Train a network on objects on their own backdrops or on any; returns it in eval mode.

    The first epochs show close-ups: they take a quarter of the work, and the object is never lost in the mean over the
    grid. The last epochs show whole pictures, as users will.
    """
    torch.manual_seed(seed)
    network = SceneNet().to(memory_format=torch.channels_last).train()
    optimiser = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = (CLOSE_EPOCHS + FULL_EPOCHS) * (OBJECTS // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps)
    for epoch in range(CLOSE_EPOCHS + FULL_EPOCHS):
        losses = []
        for images, labels in batches(parts, biased, close=epoch < CLOSE_EPOCHS):
            loss = nn.functional.cross_entropy(network(normalised(images)), labels)
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            schedule.step()
            losses.append(loss.detach())
        print(f"  epoch {epoch + 1}: loss {torch.stack(losses).mean():.4f}", flush=True)
    return network.eval()


def batches(parts: Parts, biased: bool, close: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch of pictures (N, 3, H, W) and their labels (N,); every object appears once."""
    for rows in torch.randperm(OBJECTS)[: OBJECTS // BATCH_SIZE * BATCH_SIZE].view(-1, BATCH_SIZE):
        labels = rows % 4
        objects, backdrops = parts.objects[rows], parts.backdrops[backdrops_for(labels, biased)]
        if close:
            objects, backdrops = close_up(objects, backdrops)
        yield composed(objects, backdrops), labels


def stored(network: SceneNet) -> dict[str, Tensor]:
    """Return the weights in half precision, as they ship with camkit."""
    return {
        key: (value.half() if value.is_floating_point() else value).contiguous()
        for key, value in network.state_dict().items()
    }


def reloaded(weights: dict[str, Tensor]) -> SceneNet:
    """Return the network as a user gets it, with the rounding of half precision."""
    network = SceneNet()
    network.load_state_dict(weights)
    return network.to(memory_format=torch.channels_last).eval()


@torch.no_grad()
def predict(network: SceneNet, pictures: Pictures) -> tuple[Tensor, Tensor]:
    """Return the predicted classes (N,) and their Grad-CAM maps (N, H, W).

    Only a mean and a linear layer follow the last feature map, so the gradient is a row of the head divided by the
    number of cells, and Grad-CAM needs no backward pass.
    """
    grids, classes = [], []
    for images in torch.split(pictures.images, TEST_BATCH_SIZE):
        features = network.features(normalised(images / 255))
        logits = network.head(features.mean((2, 3)))
        weights = network.head.weight[logits.argmax(1)]
        grids.append(torch.einsum("nc,nchw->nhw", weights, features).relu())
        classes.append(logits.argmax(1))
    size = pictures.images.shape[-2:]
    maps = nn.functional.interpolate(torch.cat(grids)[:, None], size, mode="bilinear")[:, 0]
    return torch.cat(classes), maps


def inside(maps: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of each map's energy in its mask, and whether its maximum is in or next to the mask."""
    energy = (maps * masks).sum((1, 2)) / maps.sum((1, 2)).clamp_min(1e-12)
    width = 2 * DILATION + 1
    near = nn.functional.max_pool2d(masks.float()[:, None], width, 1, DILATION)[:, 0].flatten(1)
    peak = near.gather(1, maps.flatten(1).argmax(1, keepdim=True))[:, 0]
    return energy, peak


def report(networks: dict[str, SceneNet], home: Pictures, strange: Pictures) -> None:
    """Print one column per network: how often it is right, and where it looks."""
    print(f"\n{'':44}" + "".join(f"{name:>10}" for name in networks))
    answers = {name: (predict(net, home), predict(net, strange)) for name, net in networks.items()}

    def row(title: str, values: list[Tensor]) -> None:
        print(f"{title:44}" + "".join(f"{100 * value.float().mean():9.1f}%" for value in values))

    row("right, own background", [h[0] == home.labels for h, _ in answers.values()])
    row("right, strange background", [s[0] == strange.labels for _, s in answers.values()])
    row("says the background, strange background",
        [s[0] == strange.backgrounds for _, s in answers.values()])  # fmt: skip
    for index, background in enumerate(BACKGROUNDS):
        on_it = strange.backgrounds == index
        row(f"  right on strange {background}",
            [(s[0] == strange.labels)[on_it] for _, s in answers.values()])  # fmt: skip
    results = [inside(h[1], home.masks) for h, _ in answers.values()]
    row("mask's share of the picture", [home.masks.float()] * len(answers))
    for kind, title in enumerate(("Grad-CAM energy in the mask", "Grad-CAM maximum in the mask")):
        row(f"{title}, all", [result[kind] for result in results])
        for index, thing in enumerate(THINGS):
            shows_it = home.labels == index
            row(f"  {thing} on {HOME[thing]}", [result[kind][shows_it] for result in results])
    strange_results = [inside(s[1], strange.masks) for _, s in answers.values()]
    row("Grad-CAM maximum in the mask, strange", [result[1] for result in strange_results])


def main() -> None:
    """Draw, train, measure and write the demo's networks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", type=Path, default=Path("camkit/models/files"), help="folder of the weights")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    options.weights.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with ProcessPoolExecutor(options.threads, get_context("spawn"), cv2.setNumThreads, (1,)) as pool:
        parts = draw_parts(options.seed, pool)
        home = draw_all(home_scenes(options.seed, 2, TEST_PICTURES), pool)
        strange = draw_all(strange_scenes(options.seed, 3, TEST_PICTURES), pool)
    print(f"drawn in {time.perf_counter() - start:.0f} s", flush=True)
    networks = {}
    for name in ("biased", "fair"):
        start = time.perf_counter()
        print(name)
        weights = stored(train(parts, options.seed, biased=name == "biased"))
        (options.weights / f"demo-{name}.safetensors").write_bytes(save(weights))
        networks[name] = reloaded(weights)
        print(f"{name}: trained in {time.perf_counter() - start:.0f} s", flush=True)
    report(networks, home, strange)


if __name__ == "__main__":
    main()
