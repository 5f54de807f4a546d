"""Compare default maps on real photos: `auto`, and other methods at the deepest grid and at the finer one.

    python scripts/compare_defaults.py --data ../shared/data --out defaults.jsonl --device cuda --workers 12
    python scripts/compare_defaults.py --data ../shared/data --out tiny.jsonl --photos 4 --device cpu

Each network runs with the padding that it was trained with. The metrics are camkit's own: SRG, insertion, deletion and
ROAD, and energy and pointing on the outlines of the objects. A line is written for each photo and network; a cut run
goes on where it stopped, and ``--table`` prints the table of the lines that are there. The class is the best one of
those that name the outlined object; photos whose object has no class in ImageNet are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from compare_placements import Judge, Photo, interval, load_photos, region_of
from PIL import Image, ImageOps

import camkit
from camkit.errors import CamkitError
from camkit.layers.choose import decide
from camkit.metrics import Evaluator

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
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    photo = load_photos(task.data)[task.number]
    with Image.open(photo.file) as opened:
        pixels = ImageOps.exif_transpose(opened).convert("RGB")
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
    mean, low, high = interval(pairs[:, 1] - pairs[:, 0])
    mark = "**" if low > 0 or high < 0 else ""
    return f"{pairs[:, 1].mean():.3f}; {mark}{mean:+.3f}{mark} ({low:+.3f} to {high:+.3f})"


def main() -> None:
    """Judge the photos and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder with photos and weights")
    parser.add_argument("--out", type=Path, default=Path("defaults.jsonl"), help="the file with a line for each result")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--photos", type=int, default=None, metavar="N", help="judge N photos; all if not given")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing new after this time")
    parser.add_argument("--table", action="store_true", help="print the table of the file and end")
    given = parser.parse_args()
    start = time.time()
    rows: list[Row] = []
    if given.out.exists():
        rows = [json.loads(line) for line in given.out.read_text().splitlines(keepends=True) if line.endswith("\n")]
    if not given.table:
        done: defaultdict[str, set[str]] = defaultdict(set)
        for row in rows:
            done[row["photo"]].add(row["network"])
        photos = [(number, photo) for number, photo in enumerate(load_photos(given.data)) if _has_class(photo)]
        left = [(number, [name for name in NETWORKS if name not in done[photo.name]]) for number, photo in photos]
        ends = start + given.seconds
        tasks = [Task(number, tuple(names), given.data, given.device, ends) for number, names in left[: given.photos]]
        with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool, given.out.open("a") as lines:
            for future in as_completed([pool.submit(work, task) for task in tasks]):
                made = future.result()
                rows += made
                lines.writelines(f"{json.dumps(row)}\n" for row in made)
                lines.flush()
        print(f"{time.time() - start:.0f} s", flush=True)
    print(table(rows))


def _has_class(photo: Photo) -> bool:
    return any(thing.classes for thing in photo.things)


if __name__ == "__main__":
    main()
