"""Validate the check on real photos: train many networks with a known shortcut and without one, and check each of them.

    python -m scripts.lab.validate_photos --data DATA --state photo-lab/ --markdown scripts/results/validation.md

This is ``validate_check.py`` with real pixels and ImageNet weights. A model's truth is its own behaviour: its accuracy
on pictures whose cue (a place or a mark) goes with the class as often as in the folder, minus its accuracy on pictures
whose cue is drawn anew. Both are measured on pictures composed from photos that neither training nor folder uses.

The state folder holds the feature maps of each world, a file per network, and ``models.jsonl`` with a line per finished
model. An interrupted run continues where it stopped. To check the same networks again, delete ``models.jsonl``.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import camkit
from scripts.lab.lab_photos import LOOKED_AT_WORLDS, WORLDS, World, compose
from scripts.lab.lab_report import SCORES, write_page
from scripts.lab.lab_run import DEVICE, Row, row_of, run_models, verdict_line
from scripts.lab.lab_trunks import HEADS, Trunk, answers, head_of, load_trunk, maps_of, train

TIES = (1.0, 0.95, 0.8, 0.6, 0.0)
"""How often the cue goes with the class; otherwise it is drawn at random."""

ALL_PHOTOS, FEW_PHOTOS = 0, 2
"""Animals of each class in training: all of the part's photos, or so few that the place is easier to learn."""

MARK_TIES = (1.0, 0.8, 0.6)

PER_CLASS = 75
"""Pictures per class in the folder that is checked."""

FOLDER_TIE = 0.95
"""The tie in a folder that is shown to networks trained without a shortcut, as a hard case."""

LOOKED_AT_ARCHITECTURES = ("EfficientNet-Lite0, linear", "EfficientNet-Lite0, two layers")


@dataclass(frozen=True)
class ModelSpec:
    """One model to train and check.

    ``correlation`` ties the cue in training, ``folder_correlation`` in the folder that is checked. ``photos`` is the
    number of animals of each class in training.
    """

    trunk: str
    head: str
    world: str
    correlation: float
    folder_correlation: float
    photos: int = ALL_PHOTOS
    seed: int = 0

    @property
    def name(self) -> str:
        """The model's name in the state."""
        return f"{self.trained}, folder {self.folder_correlation:g}"

    @property
    def trained(self) -> str:
        """The name of the network, whatever folder it is checked on."""
        photos = f", {self.photos} photos" if self.photos != ALL_PHOTOS else ""
        return f"{self.architecture}, {self.world}, {self.correlation:g}{photos}, seed {self.seed}"

    @property
    def architecture(self) -> str:
        """The trunk and the head."""
        return f"{self.trunk}, {self.head}"

    @property
    def held_out(self) -> bool:
        """Whether neither the architecture nor the world was looked at during development."""
        return self.world not in LOOKED_AT_WORLDS and self.architecture not in LOOKED_AT_ARCHITECTURES


def model_specs() -> Iterator[ModelSpec]:
    """List the models: those that were looked at during development, and then the others, tie by tie.

    Each folder is used for several heads, and for networks that were trained on other pictures than the folder's.
    """
    few = {"photos": FEW_PHOTOS}
    for world in ("places", "small"):
        yield ModelSpec("EfficientNet-Lite0", "linear", world, 1.0, 1.0)
        yield ModelSpec("EfficientNet-Lite0", "linear", world, 0.0, 0.0)
        for head in ("linear", "two layers"):
            yield ModelSpec("EfficientNet-Lite0", head, world, 0.95, 0.95)
            yield ModelSpec("EfficientNet-Lite0", head, world, 0.8, 0.8, **few)
    for tie in TIES:
        for trunk, world in HELD_OUT_PLACES:
            for head in HEADS:
                yield ModelSpec(trunk, head, world, tie, tie)
            if tie == FOLDER_TIE:
                yield ModelSpec(trunk, "two layers", world, tie, tie, **few)
                yield ModelSpec(trunk, "linear", world, 0.0, FOLDER_TIE)
                yield ModelSpec(trunk, "fine-tuned", world, 0.0, FOLDER_TIE)
        for trunk, world in HELD_OUT_MARKS if tie in MARK_TIES else ():
            for head in ("linear", "fine-tuned"):
                yield ModelSpec(trunk, head, world, tie, tie)


HELD_OUT_PLACES = (
    ("MobileNetV2", "two places"),
    ("SqueezeNet", "two places, small"),
    ("MobileNetV2", "pair, small"),
    ("SqueezeNet", "two places"),
    ("MobileNetV2", "two places, small"),
)
HELD_OUT_MARKS = (
    ("MobileNetV2", "logo, other animals"),
    ("SqueezeNet", "border, other animals"),
    ("MobileNetV2", "cast, other animals"),
)
"""Trunks and worlds of which none was looked at during development."""


@dataclass(frozen=True)
class Part:
    """The pictures of a part of a world: classes, cues and photos, and the feature maps of one trunk."""

    labels: NDArray[np.int64]
    cues: NDArray[np.int64]
    photos: Sequence[str]
    maps: NDArray[np.float16]

    def weights(self, shares: NDArray[np.float64], photos: int = ALL_PHOTOS) -> NDArray[np.float64]:
        """Return how often each picture counts if the cells have these shares of a class; they sum to 1.

        Only the first ``photos`` animals of each class count.
        """
        order: dict[int, dict[str, int]] = defaultdict(dict)
        rank = [
            order[label].setdefault(photo, len(order[label]))
            for label, photo in zip(self.labels.tolist(), self.photos, strict=True)
        ]
        counted = np.array(rank) < (photos or len(rank))
        counts = np.zeros(shares.shape)
        np.add.at(counts, (self.labels, self.cues), counted)
        return counted * shares[self.labels, self.cues] / counts[self.labels, self.cues] / len(shares)


def load_part(state: Path, data: Path, world: World, part: str, trunk_name: str, trunk: Trunk) -> Part:
    """Return a part of a world. Its feature maps are computed only once."""
    file = state / "maps" / f"{world.name} {part} {trunk_name}.npz".replace(" ", "_")
    if not file.exists():
        composed = list(compose(data, world, part))
        maps = maps_of(trunk, np.stack([scene.picture for scene in composed]))
        file.parent.mkdir(parents=True, exist_ok=True)
        label, cue, photo = (
            np.array([getattr(scene, name) for scene in composed]) for name in ("label", "cue", "photo")
        )
        unfinished = file.with_name(f"{os.getpid()}_{file.name}")
        np.savez(unfinished, maps=maps, label=label, cue=cue, photo=photo)
        unfinished.replace(file)
    with np.load(file) as arrays:
        return Part(arrays["label"], arrays["cue"], arrays["photo"].tolist(), arrays["maps"])


def train_and_check(spec: ModelSpec, state: Path, data: Path) -> Row:
    """Train one model, measure its truth, and check it."""
    torch.set_num_threads(1)
    world, start = WORLDS[spec.world], time.perf_counter()
    trunk = load_trunk(spec.trunk, data)
    validate, truth = (
        load_part(state, data, world, part, spec.trunk, trunk) for part in ("validate", "truth")
    )  # before training, which changes the back of a trunk that is fine-tuned
    network = load_network(spec, state, data, trunk)
    trained = time.perf_counter()
    chosen = folder_rows(validate, world.shares(spec.folder_correlation), spec.seed)
    with tempfile.TemporaryDirectory() as folder:
        table = write_folder(Path(folder), data, world, chosen)
        result = camkit.check(
            nn.Sequential(trunk.front, *network),
            table,
            preprocess=trunk.preprocess,
            labels=list(world.classes),
        )
    return {
        **asdict(spec),
        "name": spec.name,
        "architecture": spec.architecture,
        "held_out": spec.held_out,
        "shortcut": world.mark or "place",
        "layout": world.name,
        **true_behaviour(network, truth, world, spec.folder_correlation),
        **row_of(result),
        "seconds": [round(trained - start, 1), round(time.perf_counter() - trained, 1)],
    }


def load_network(spec: ModelSpec, state: Path, data: Path, trunk: Trunk) -> nn.Sequential:
    """Return the back and the head of a network. They are trained only once."""
    world = WORLDS[spec.world]
    file = state / "networks" / f"{spec.trained}.pt".replace(" ", "_")
    if file.exists():
        head = head_of(spec.head, trunk.channels, len(world.classes))
        network = nn.Sequential(trunk.back, head).to(DEVICE)
        stored = torch.load(file, map_location=DEVICE, weights_only=True)
        (network if spec.head == "fine-tuned" else head).load_state_dict(stored)
        return network.eval()
    part = load_part(state, data, world, "train", spec.trunk, trunk)
    weights = torch.from_numpy(part.weights(world.shares(spec.correlation), spec.photos))
    network = train(trunk, spec.head, part.maps, torch.from_numpy(part.labels), weights, spec.seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    stored = (network if spec.head == "fine-tuned" else network[1]).state_dict()
    torch.save({name: tensor.cpu().clone() for name, tensor in stored.items()}, unfinished)
    unfinished.replace(file)
    return network


def true_behaviour(network: nn.Module, truth: Part, world: World, tie: float) -> Row:
    """Return the accuracies on the photos of the third part: cues tied as in the folder, and drawn anew.

    ``own`` and ``others`` are those on the class's own cue and on all others, ``worst_group`` that of the worst pair of
    class and cue.
    """
    right = answers(network, truth.maps) == truth.labels
    cells = np.array(
        [
            [right[(truth.labels == label) & (truth.cues == cue)].mean() for cue in range(len(world.cues))]
            for label in range(len(world.classes))
        ]
    )
    own = world.shares(1.0)
    others = (1 - own) / (1 - own).sum(1, keepdims=True)
    accuracies = {"matched": world.shares(tie), "redrawn": world.shares(0.0), "own": own, "others": others}
    means = {name: float((cells * shares).sum(1).mean()) for name, shares in accuracies.items()}
    return {**means, "worst_group": float(cells.min())}


def folder_rows(validate: Part, shares: NDArray[np.float64], seed: int) -> NDArray[np.int64]:
    """Draw the pictures of the folder that is checked, their cues by their shares.

    There are PER_CLASS of each class, or as many as there are of each class and cue: marks are put on few photos.
    """
    random = np.random.default_rng([17, seed])
    counts = np.zeros(shares.shape, int)
    np.add.at(counts, (validate.labels, validate.cues), 1)
    pictures = min(PER_CLASS, int(counts.min()))
    rows: list[int] = []
    for label, of_class in enumerate(shares):
        left = {cue: random.permutation(np.flatnonzero((validate.labels == label) & (validate.cues == cue))).tolist()
                for cue in range(len(of_class))}  # fmt: skip
        for cue in random.choice(len(of_class), pictures, p=of_class):
            rows.append(left[cue].pop())
    return np.array(rows)


def write_folder(folder: Path, data: Path, world: World, chosen: NDArray[np.int64]) -> Path:
    """Write pictures, masks and a table with the animals' photos as groups, as a user would; return the table."""
    wanted = set(chosen.tolist())
    table = folder / "pictures.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label", "group", "place"))
        for number, scene in enumerate(compose(data, world, "validate")):
            if number not in wanted:
                continue
            name = f"{world.classes[scene.label]}/{number:04d}.png"
            for kind, pixels in (("pictures", scene.picture), ("masks", np.uint8(255) * (scene.cover > 0.5))):
                picture = folder / kind / name
                picture.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(picture, compress_level=1)
            rows.writerow((f"pictures/{name}", world.classes[scene.label], scene.photo, world.cues[scene.cue]))
    return table


RULES = {
    **SCORES,
    "worst group's accuracy < 0.5, groups known": (lambda row: -row["worst_group"], -0.5),
}
"""The rules of the drawn lab, and what known groups would show."""


def held_out(row: Row) -> bool:
    """Whether neither the network's architecture nor its world was looked at during development."""
    return bool(row["held_out"])


def main() -> None:
    """Train and check the models, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder with photos and weights")
    parser.add_argument("--state", type=Path, default=Path("photo-lab"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write the tables into")
    parser.add_argument("--limit", type=int, default=None, help="check at most this many models in this run")
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    file, arguments = options.state / "models.jsonl", (options.state, options.data)
    rows = run_models(file, model_specs(), train_and_check, arguments, options.workers, options.limit, verdict_line)
    if options.markdown is not None:
        write_page(options.markdown, "validate_photos", "validation-photos.png", rows, held_out, RULES)


if __name__ == "__main__":
    main()
