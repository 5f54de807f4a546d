"""Compare default maps on real photos: `auto`, and other methods at the deepest grid and at the finer one.

    python -m scripts.truth.compare_defaults --data ../shared/data --out defaults.jsonl --device cuda --workers 12
    python -m scripts.truth.compare_defaults --data ../shared/data --out tiny.jsonl --photos 4 --device cpu

Each network runs with the padding that it was trained with. The metrics are camkit's own: SRG, insertion, deletion and
ROAD, and energy and pointing on the outlines of the objects. A line is written for each photo and network; a cut run
goes on where it stopped, and ``--table`` prints the table of the lines that are there. The class is the best one of
those that name the outlined object; photos whose object has no class in ImageNet are left out.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import camkit
from camkit.errors import CamkitError
from camkit.layers.choose import decide
from camkit.metrics import Evaluator
from scripts.placement.compare_placements import (
    Judge,
    Photo,
    arguments,
    difference,
    lines_of,
    load_photos,
    opened_photo,
    region_of,
    run,
)

Row = dict[str, Any]

NETWORKS = ("SqueezeNet 1.1", "MobileNetV2, TensorFlow's padding", "EfficientNet-Lite0")
SIZE = (224, 224)
OLD, AUTO = "gradcam, deepest", "auto"
DEEPEST = ("gradcam", "gradcam-elementwise", "layercam", "expected")
FINER = ("gradcam", "gradcam-elementwise", "layercam", "hirescam", "expected")
"""The methods that are compared at the deepest grid, and at the finer one."""

METRICS = ("srg", "insertion", "deletion", "road", "energy", "pointing")
SLOW, SLOW_EVERY = "road", 3
"""A metric that takes several times as long as the others, and of how many photos it judges one."""


@functools.cache
def ways(variant: str, data: Path, device: str) -> dict[str, camkit.Explainer]:
    """Return an Explainer for each way to make a map; each process makes them once."""
    judge = Judge.load(variant, data, device)
    decision = decide(judge.explainer.model, torch.zeros(1, 3, *SIZE, device=device))
    found = {AUTO: judge.explainer.using("auto")}
    for where, layer, methods in (("deepest", decision.chosen(), DEEPEST), ("finer", decision.finer, FINER)):
        for method in methods if layer is not None else ():
            if method in camkit.METHODS:
                found[f"{method}, {where}"] = judge.explainer.using(method, layer)
    return found


@dataclass(frozen=True)
class Task:
    """A photo and the networks that explain it."""

    number: int
    networks: tuple[str, ...]
    data: Path
    device: str
    ends: float


def work(task: Task) -> list[Row]:
    """Return a row for each network; fewer if time is over."""
    photo, pixels = opened_photo(task.number, task.data)
    return [_row(photo, pixels, variant, task) for variant in task.networks if time.time() < task.ends]


def _row(photo: Photo, pixels: Image.Image, variant: str, task: Task) -> Row:
    judge = Judge.load(variant, task.data, task.device)
    picture = judge.picture(pixels, SIZE)
    target, right = judge.target(picture, photo.things, task.device)
    region = region_of(photo, pixels.size, SIZE, target)
    evaluator = Evaluator(judge.explainer, picture, target, region=region, batch_size=32)
    names = METRICS if task.number % SLOW_EVERY == 0 else tuple(name for name in METRICS if name != SLOW)
    row: Row = {"photo": photo.name, "network": variant, "right": right, "by": {}, "failed": {}}
    for way, explainer in ways(variant, task.data, task.device).items():
        try:
            made = explainer(picture, target)
        except CamkitError as error:
            row["failed"][way] = str(error)
            continue
        values = evaluator(made, names)
        row["by"][way] = {name: values[name].number for name in names} | {"made": f"{made.method}, {made.layer}"}
    return row


def table(rows: Sequence[Row]) -> str:
    """Return a table of each metric's mean, and of the differences from the old default with their intervals."""
    lines = ["| network | map | " + " | ".join(METRICS) + " |", "|---|---|" + "---:|" * len(METRICS)]
    for variant in NETWORKS:
        group = [row for row in rows if row["network"] == variant]
        for way in dict.fromkeys(way for row in group for way in row["by"]):
            made = next(row["by"][way]["made"] for row in group if way in row["by"])
            name = f"{way} ({made})" if way == AUTO else way
            cells = [_cell(group, way, metric) for metric in METRICS]
            lines.append(f"| {variant} | {name} | {' | '.join(cells)} |")
    photos = len({row["photo"] for row in rows})
    return "\n".join([f"{photos} photos; differences from `{OLD}` with 95 % intervals over photos.", "", *lines])


def _cell(group: Sequence[Row], way: str, metric: str) -> str:
    both = [(row["by"].get(OLD, {}).get(metric), row["by"].get(way, {}).get(metric)) for row in group]
    pairs = np.array([pair for pair in both if None not in pair], float)
    if not len(pairs):
        return ""
    if way == OLD:
        return f"{pairs[:, 1].mean():.3f} (n {len(pairs)})"
    return f"{pairs[:, 1].mean():.3f}; {difference(pairs[:, 1] - pairs[:, 0])}"


def tasks(given: argparse.Namespace, rows: Sequence[Row], ends: float) -> Iterator[Task]:
    """Yield what is left to do, photo by photo."""
    done: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        done[row["photo"]].add(row["network"])
    photos = [(number, photo) for number, photo in enumerate(load_photos(given.data)) if _has_class(photo)]
    for number, photo in photos[: given.photos]:
        networks = tuple(name for name in NETWORKS if name not in done[photo.name])
        if networks:
            yield Task(number, networks, given.data, given.device, ends)


def main() -> None:
    """Judge the photos and print the table."""
    given = arguments(__doc__, "defaults.jsonl").parse_args()
    if not given.table:
        left = tasks(given, lines_of(given.out), time.time() + given.seconds)
        run(work, left, given.out, given.workers)
    print(table(lines_of(given.out)))


def _has_class(photo: Photo) -> bool:
    return any(thing.classes for thing in photo.things)


if __name__ == "__main__":
    main()
