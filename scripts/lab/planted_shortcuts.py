"""Plant two shortcuts in real photos, train a network with each and without it, and check both.

    python -m scripts.lab.planted_shortcuts --data DATA --out planted/ --markdown scripts/results/validation.md

A watermark: one class's training pictures carry the watermark of the archive that they come from. Two clinics: each
class comes mostly from one of two places that photograph on cloths of their own. The networks are the first blocks of
MobileNetV2 with its ImageNet weights, and a small head. Animals are from Caltech-101; watermark and cloths are drawn.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
import torchvision
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torchvision.transforms import v2

import camkit
from scripts.demo.drawn_scenes.noise import cloud_noise, coordinates, paint, smooth_noise
from scripts.lab.lab_photos import CROPS, SIDE, Cover, Picture, cover_of, cut_out, photos_of, put_on, read_photo
from scripts.lab.lab_run import Row, row_of, write_between
from scripts.lab.real_models import IMAGENET, imagenet_weights

MARK = "planted_shortcuts"
"""The name of the marks between which a page has the table."""

BLOCKS = 11
"""Blocks of MobileNetV2 below the head: early enough for a small mark to show in their maps, which are 14 x 14."""

CHANNELS = 128
STEPS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 300, 64, 1e-3, 0.01

Compose = Callable[[Path, str, int, np.random.Generator], tuple[Picture, Cover]]
"""Makes a picture of an animal from a data folder, a photo and the number of a source."""


@dataclass(frozen=True)
class Case:
    """A planted shortcut.

    Attributes:
        name: of the case.
        classes: what the network tells apart.
        sources: where a picture may come from.
        shares: how often the pictures of each class (rows) come from each source (columns), in training and in the
            folder that is checked.
        compose: makes a picture.
    """

    name: str
    classes: tuple[str, ...]
    sources: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]
    compose: Compose


@dataclass(frozen=True)
class Composed:
    """The pictures of a part of a case, each animal from each source: (N, 224, 224, 3), and what is known of them."""

    pictures: NDArray[np.uint8]
    covers: NDArray[np.float32]
    labels: NDArray[np.int64]
    sources: NDArray[np.int64]
    photos: Sequence[str]


def with_watermark(data: Path, photo: str, source: int, random: np.random.Generator) -> tuple[Picture, Cover]:
    """Crop a photo, and put the archive's watermark into its corner if it comes from there (source 0)."""
    photographed = read_photo(data / "caltech" / photo)
    cover = cover_of(data, photo, photographed.shape[:2])
    pixels = np.dstack([photographed.astype(np.float32), cover])
    height, width = (round(length * random.uniform(0.85, 1)) for length in cover.shape)
    top, left = (int(random.integers(cut + 1)) for cut in (cover.shape[0] - height, cover.shape[1] - width))
    crop = np.ascontiguousarray(pixels[top : top + height, left : left + width])
    crop = cv2.resize(crop, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    picture, cover = crop[..., :3], crop[..., 3]
    if source == 0:
        mark = np.asarray(_watermark(), np.float32)
        share = mark[..., 3:] / 255 * 0.9
        picture, cover = picture * (1 - share) + mark[..., :3] * share, cover * (1 - share[..., 0])
    return np.round(np.clip(picture, 0, 255)).astype(np.uint8), cover


def _watermark() -> Image.Image:
    """Return white letters with a dark edge on nothing."""
    mark = Image.new("RGBA", (SIDE, SIDE))
    font, corner = ImageFont.load_default(24), (SIDE - 6, SIDE - 6)
    draw = ImageDraw.Draw(mark)
    draw.text(corner, "© archive", fill="white", font=font, anchor="rs", stroke_width=1, stroke_fill=(60, 60, 60))
    return mark


SPECIMEN_SCALE = (0.2, 0.3)
"""The size of an animal on a cloth, relative to the one in its own photo."""

CLOTHS = ((0.28, 0.46, 0.38), (0.36, 0.44, 0.58))
"""The colour of each clinic's cloth: green and blue."""


def on_cloth(data: Path, photo: str, source: int, random: np.random.Generator) -> tuple[Picture, Cover]:
    """Put an animal on the cloth of a clinic."""
    cloth = _cloth(source, random)
    return put_on(cut_out(data, photo), cloth, SPECIMEN_SCALE, random)


def _cloth(source: int, random: np.random.Generator) -> Picture:
    """Draw a cloth (256, 256, 3): woven, with folds and uneven light. The first clinic lays a ruler beside."""
    side = 256
    x, y = coordinates(side)
    threads = (
        1
        + 0.04 * np.sin(2 * np.pi * 64 * x) * np.sin(2 * np.pi * 64 * y)
        + 0.1 * (smooth_noise(random, side, 128, 128) - 0.5)
    )
    light = 0.75 + 0.5 * cloud_noise(random, side, 2, 2)
    canvas = paint(CLOTHS[source], side) * threads * light
    picture = np.ascontiguousarray(np.round(255 * np.clip(canvas, 0, 1)).astype(np.uint8).transpose(1, 2, 0))
    if source == 0:
        top = int(random.integers(36, 60))
        cv2.rectangle(picture, (0, top), (side, top + 14), (232, 230, 222), -1)
        for tick in range(int(random.integers(8)), side, 8):
            cv2.line(picture, (tick, top), (tick, top + 6), (40, 40, 40), 1)
    return picture


CASES = (
    Case(
        "watermark",
        ("crayfish", "crab", "emu", "flamingo"),
        ("archive", "others"),
        ((1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)),
        with_watermark,
    ),
    Case("two clinics", ("crab", "crayfish"), ("clinic A", "clinic B"), ((0.98, 0.02), (0.02, 0.98)), on_cloth),
)


def compose(data: Path, case: Case, part: str) -> Composed:
    """Make the pictures of a part: each crop or position of each photo, from each source."""
    made: list[tuple[Picture, Cover, int, int, str]] = []
    for label, name in enumerate(case.classes):
        for photo in photos_of(data, name, part):
            for crop in range(CROPS):
                for source in range(len(case.sources)):
                    random = np.random.default_rng([19, crop, *map(ord, f"{photo}/{part}/{source}")])
                    made.append((*case.compose(data, photo, source, random), label, source, photo))
    pictures, covers, labels, sources, photos = zip(*made, strict=True)
    return Composed(np.stack(pictures), np.stack(covers), np.array(labels), np.array(sources), photos)


def load_front(data: Path) -> nn.Sequential:
    """Return the first blocks of MobileNetV2, frozen."""
    network = torchvision.models.mobilenet_v2()
    network.load_state_dict(imagenet_weights(data / "weights" / "mobilenet_v2-coral_qat.pth"))
    front: nn.Sequential = network.features[:BLOCKS]
    return front.eval().requires_grad_(requires_grad=False)


PREPROCESS = v2.Compose([v2.RGB(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(**IMAGENET)])


@torch.inference_mode()
def maps_of(front: nn.Module, pictures: NDArray[np.uint8]) -> Tensor:
    """Return the feature maps of pictures (N, 224, 224, 3)."""
    batches = torch.from_numpy(pictures).permute(0, 3, 1, 2).split(BATCH)
    return torch.cat([front(PREPROCESS(batch)) for batch in batches]).clone()


def train(maps: Tensor, labels: Tensor, weights: Tensor, classes: int) -> nn.Sequential:
    """Train a head on feature maps; ``weights`` (N,) says how often each picture is drawn."""
    torch.manual_seed(0)
    head = nn.Sequential(
        nn.Conv2d(maps.shape[1], CHANNELS, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(CHANNELS, classes),
    )  # fmt: skip
    optimiser = torch.optim.AdamW(head.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for _ in range(STEPS):
        rows = torch.multinomial(weights, BATCH, replacement=True)
        loss = nn.functional.cross_entropy(head(maps[rows]), labels[rows])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    return head.eval().requires_grad_(requires_grad=False)


def weights_of(part: Composed, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how often each picture counts so that the sources have these shares of each class; they sum to 1."""
    counts = np.zeros(shares.shape)
    np.add.at(counts, (part.labels, part.sources), 1)
    return shares[part.labels, part.sources] / counts[part.labels, part.sources] / len(shares)


def write_folder(folder: Path, case: Case, part: Composed) -> Path:
    """Write pictures, masks and a table as a user would; each picture comes from a source, by its share. Return it."""
    random, shares = np.random.default_rng(23), np.array(case.shares)
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "pictures.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label", "group", "place"))
        for first in range(0, len(part.labels), len(case.sources)):  # one animal from each source
            label = part.labels[first]
            number = first + int(random.choice(len(case.sources), p=shares[label]))
            name = f"{case.classes[label]}/{number:04d}.png"
            for kind, pixels in (
                ("pictures", part.pictures[number]),
                ("masks", np.uint8(255) * (part.covers[number] > 0.5)),
            ):
                picture = folder / kind / name
                picture.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(picture, compress_level=1)
            source = case.sources[part.sources[number]]
            rows.writerow((f"pictures/{name}", case.classes[label], part.photos[number], source))
    return table


def check_case(case: Case, data: Path, out: Path) -> Iterator[Row]:
    """Train a network with the shortcut and one without it, check both on the folder with it, and return their rows.

    The rows stay in ``out``; a case that has them there is not repeated.
    """
    file = out / f"{case.name}.json"
    if not file.exists():
        rows = list(_check_case(case, data, out))
        file.write_text(json.dumps(rows))
    yield from json.loads(file.read_text())


def _check_case(case: Case, data: Path, out: Path) -> Iterator[Row]:
    front, shares = load_front(data), np.array(case.shares)
    parts = {name: compose(data, case, name) for name in ("train", "validate", "truth")}
    table = write_folder(out / case.name, case, parts["validate"])
    maps = {name: maps_of(front, parts[name].pictures) for name in ("train", "truth")}
    equal = np.full(shares.shape, 1 / len(case.sources))
    for network, trained_on in (("with the shortcut", shares), ("without", equal)):
        weights = torch.from_numpy(weights_of(parts["train"], trained_on))
        head = train(maps["train"], torch.from_numpy(parts["train"].labels), weights, len(case.classes))
        with torch.inference_mode():
            answers = head(maps["truth"]).argmax(1).numpy()
        report = out / case.name / network
        result = camkit.check(
            nn.Sequential(*front, *head), table, preprocess=PREPROCESS, labels=list(case.classes), out=report
        )  # fmt: skip
        truth = parts["truth"]
        right = answers == truth.labels
        yield {
            "case": case.name,
            "network": network,
            "matched": float(weights_of(truth, shares) @ right),
            "redrawn": float(weights_of(truth, equal) @ right),
            "named": named_first(answers, truth),
            **row_of(result),
            "shortcuts": [list(shortcut.sentences) for shortcut in result.shortcuts],
        }


def named_first(answers: NDArray[np.int64], part: Composed) -> list[float]:
    """Return how often objects of other classes are named the first class, from each source."""
    others = part.labels != 0
    return [
        float((answers[others & (part.sources == source)] == 0).mean()) for source in range(int(part.sources.max()) + 1)
    ]


def table(rows: Sequence[Row]) -> str:
    """Return the table of the networks."""
    lines = [
        "| shortcut | trained | right, sources as in the folder / drawn anew | others named as the first class, first "
        "source / second | gap, blur / tile | largest attraction of a class | sufficiency | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gap, sufficiency = (
            " / ".join(f"{by_fill['effect']['value']:.2f}" for _, by_fill in sorted(row["overall"][name].items()))
            for name in ("gap", "sufficiency")
        )
        attractions = {
            name: min(by_fill["effect"]["value"] for by_fill in measures["attraction"].values())
            for name, measures in row["classes"].items()
        }
        most = max(attractions, key=lambda name: attractions[name])
        named = " / ".join(f"{share:.2f}" for share in row["named"])
        lines.append(
            f"| {row['case']} | {row['network']} | {row['matched']:.2f} / {row['redrawn']:.2f} | {named} | {gap} "
            f"| {most}, {attractions[most]:.2f} | {sufficiency} | {row['verdict']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Check both networks of each case, then write their table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder with photos and weights")
    parser.add_argument("--out", type=Path, default=Path("planted"))
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write the table into")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        for row in check_case(case, options.data, options.out):
            rows.append(row)
            print(f"{row['case']}, {row['network']}: {row['verdict']}", *row["shortcuts"], sep="\n  ", flush=True)
    print(table(rows))
    if options.markdown is not None:
        write_between(options.markdown, MARK, table(rows))


if __name__ == "__main__":
    main()
