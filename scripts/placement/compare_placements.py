"""Compare ways to place a map's cells on real photos: is the heat more faithful, and is it more on the object?

    python -m scripts.placement.compare_placements --data ../shared/data --out placements.jsonl \
        --device cuda --workers 16 --seconds 165
    python -m scripts.placement.compare_placements --out placements.jsonl --table
    python -m scripts.placement.compare_placements --data ../shared/data --out tiny.jsonl \
        --photos 4 --faithful 1 --device cpu

Each map is made once and drawn in each placement: "even" as other toolkits do, and "measured" where drawn objects
change the cells. All metrics are camkit's own.

First, each photo is explained at each size, and so are its mirror images: energy and pointing on the outlines, and the
likeness of a map to that of the mirror image, mirrored back. Then the photos are judged by SRG, insertion, deletion and
ROAD, in random order, until ``--faithful`` photos are judged or ``--seconds`` have passed. ROAD takes five times as
long as the others, so it judges every third of these photos. A line is written for each photo, size and network; a cut
run goes on where it stopped. ``--table`` prints the table of the lines that are there.

The class is the best one of those that name the outlined object; if ImageNet has none, the network's best class.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision.transforms import v2

import camkit
from camkit.metrics import Evaluator
from camkit.types import CellPositions
from scripts.lab.lab_photos import outlines
from scripts.lab.real_models import HALF, IMAGENET, NETWORKS
from scripts.placement.measure_shift import padded
from scripts.placement.placements import EVEN, MEASURED, best_shift, differ, drawn, likenesses, placements_of, profiles

Size = tuple[int, int]
Row = dict[str, Any]

SIZES: tuple[Size, ...] = ((224, 224), (225, 225), (256, 256), (288, 384))
"""Heights and widths of the inputs."""

VARIANTS: Mapping[str, tuple[str, bool | None]] = {
    "SqueezeNet 1.1": ("SqueezeNet 1.1", None),
    "MobileNetV2, TensorFlow's padding": ("MobileNetV2", True),
    "MobileNetV2, torchvision's padding": ("MobileNetV2", None),
    "EfficientNet-Lite0": ("EfficientNet-Lite0", None),
}
"""The networks, and whether their padding is replaced by one that is larger at the end."""

PLACING, FAITHFUL, SLOW = ("energy", "pointing"), ("srg", "insertion", "deletion"), ("road",)
SLOW_EVERY = 3
"""Of how many photos one is judged by the slow metric as well."""

MOST, STEP = 64, 4
"""The largest shift of a mirrored photo's map that is tried, and every how many pixels; in pixels."""

BORDER = 1 / 16
"""The share of each side of a photo that is cropped: 224 of 256 pixels stay, as in the usual preprocessing."""

RESAMPLES = 2000
FEWEST = 10
"""A difference of fewer photos is never marked."""


@dataclass(frozen=True)
class Thing:
    """Outlined objects: the classes of ImageNet that name them (none if it has none), and polygons (points, 2)."""

    classes: tuple[int, ...]
    polygons: tuple[NDArray[np.float64], ...]


@dataclass(frozen=True)
class Photo:
    """A file and what is outlined in it."""

    file: Path
    things: tuple[Thing, ...]

    @property
    def name(self) -> str:
        """Its folder and name."""
        return f"{self.file.parent.name}/{self.file.name}"


@functools.cache
def load_photos(data: Path) -> tuple[Photo, ...]:
    """Return the animals of Caltech-101, and the photos of COCO in which ImageNet has a class; in random order."""
    classes = json.loads((data / "caltech/to_imagenet.json").read_text())
    photos = [
        Photo(data / "caltech" / name, (Thing(tuple(classes[name.split("/")[0]] or ()), tuple(polygons)),))
        for name, polygons in sorted(outlines(data).items())
    ]
    photos += _coco(data / "coco")
    return tuple(photos[number] for number in np.random.default_rng(0).permutation(len(photos)))


def _coco(folder: Path) -> Iterator[Photo]:
    """Yield the photos with their polygons; crowds, which have none, are left out."""
    annotated = json.loads((folder / "instances.json").read_text())
    classes = json.loads((folder / "coco_to_imagenet.json").read_text())
    names = {category["id"]: category["name"] for category in annotated["categories"]}
    polygons: dict[tuple[int, str], list[NDArray[np.float64]]] = defaultdict(list)
    for row in annotated["annotations"]:
        if isinstance(row["segmentation"], list):
            parts = [np.reshape(points, (-1, 2)).astype(float) for points in row["segmentation"]]
            polygons[row["image_id"], names[row["category_id"]]] += parts
    for image in annotated["images"]:
        things = [
            Thing(tuple(classes[name]), tuple(parts))
            for (photo, name), parts in polygons.items()
            if photo == image["id"] and classes.get(name)
        ]
        if things:
            yield Photo(folder / Path(image["file_name"]).name, tuple(things))


def load_network(variant: str, data: Path, device: str) -> nn.Module:
    """Return a network in evaluation mode."""
    name, at_the_end = VARIANTS[variant]
    network = NETWORKS[name](data)[0]
    if at_the_end is not None:
        network = padded(network, at_the_end=at_the_end)
    return network.eval().to(device)


@dataclass(frozen=True)
class Judge:
    """A network with its Explainer, which this process keeps."""

    variant: str
    explainer: camkit.Explainer

    @classmethod
    @functools.cache
    def load(cls, variant: str, data: Path, device: str) -> Judge:
        """Return the network; each process loads it once."""
        return cls(variant, camkit.Explainer(load_network(variant, data, device), method="gradcam", device=device))

    @functools.cache  # noqa: B019 - the process keeps its networks
    def placements(self, size: Size, device: str) -> dict[str, CellPositions]:
        """Return the placements that differ at a size."""
        ways = placements_of(self.explainer.model, size, torch.device(device))
        return {way: places for way, places in ways.items() if way != MEASURED or differ(places, ways[EVEN])}

    def picture(self, photo: Image.Image, size: Size) -> Tensor:
        """Return a photo as the network sees it (3, H, W)."""
        is_lite = self.variant.startswith("EfficientNet")
        way = Image.Resampling.BICUBIC if is_lite else Image.Resampling.BILINEAR
        fitted = ImageOps.fit(photo, size[::-1], way, bleed=BORDER)
        values = HALF if is_lite else IMAGENET
        to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(**values)])
        picture: Tensor = to_tensor(fitted)
        return picture

    @torch.inference_mode()
    def target(self, picture: Tensor, things: Sequence[Thing], device: str) -> tuple[int, bool]:
        """Return the class to explain, and whether the network's best class names an outlined object."""
        scores = self.explainer.model(picture[None].to(device))[0].float().cpu()
        best = int(scores.argmax())
        classes = sorted({index for thing in things for index in thing.classes})
        return (max(classes, key=lambda index: float(scores[index])) if classes else best), best in classes


def region_of(photo: Photo, whole: tuple[int, int], size: Size, target: int) -> NDArray[np.bool_]:
    """Return the outlined objects that a class names, as the network sees them (H, W).

    Args:
        photo: the photo.
        whole: its width and height.
        size: the input's height and width.
        target: the class.
    """
    cover = np.zeros(whole[::-1], np.uint8)
    for thing in photo.things:
        if target in thing.classes or not thing.classes:
            for polygon in thing.polygons:
                cv2.fillPoly(cover, [np.round((polygon - 0.5) * 16).astype(np.int32)], 255, cv2.LINE_AA, 4)
    fitted = ImageOps.fit(Image.fromarray(cover), size[::-1], Image.Resampling.BILINEAR, bleed=BORDER)
    return np.asarray(fitted) > 127


@dataclass(frozen=True)
class Task:
    """What one process does next: some of the networks' work on a photo. ``faithful`` tells the metrics."""

    number: int
    sizes: tuple[Size, ...]
    faithful: bool
    data: Path
    device: str
    ends: float
    done: frozenset[tuple[str, Size]]


def opened_photo(number: int, data: Path) -> tuple[Photo, Image.Image]:
    """Return a photo with its pixels; this process then uses one core."""
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    photo = load_photos(data)[number]
    with Image.open(photo.file) as opened:
        return photo, ImageOps.exif_transpose(opened).convert("RGB")


def work(task: Task) -> list[Row]:
    """Return a row for each size and network; fewer if time is over."""
    photo, pixels = opened_photo(task.number, task.data)
    rows: list[Row] = []
    for size in task.sizes:
        for variant in VARIANTS:
            if time.time() > task.ends:
                return rows
            if (variant, size) not in task.done:
                judge = Judge.load(variant, task.data, task.device)
                rows.append(_row(judge, photo, pixels, size, task))
    return rows


def _row(judge: Judge, photo: Photo, pixels: Image.Image, size: Size, task: Task) -> Row:
    picture = judge.picture(pixels, size)
    target, right = judge.target(picture, photo.things, task.device)
    row: Row = {
        "photo": photo.name, "network": judge.variant, "size": size, "faithful": task.faithful, "right": right,
    }  # fmt: skip
    ways = judge.placements(size, task.device)
    region = region_of(photo, pixels.size, size, target)
    evaluator = Evaluator(judge.explainer, picture, target, region=region, batch_size=32)
    again = [] if task.faithful else [picture.flip(1), picture.flip(2)]
    raws = [torch.from_numpy(made.raw) for made in judge.explainer.batch([picture, *again], target)]
    names = [*FAITHFUL, *([] if task.number % SLOW_EVERY else SLOW)] if task.faithful else [*PLACING]
    row["by"] = {}
    for way, places in ways.items():
        heats = drawn(torch.stack(raws), size, places)
        values = evaluator(heats[0], names)
        row["by"][way] = {name: values[name].number for name in names}
        if not task.faithful:
            row["by"][way] |= _mirror(heats)
    return row


def _mirror(heats: Tensor) -> dict[str, Any]:
    """Return the likeness of a map to those of the mirrored photos, mirrored back, and how it changes with a shift."""
    found: dict[str, Any] = {}
    for axis, name in enumerate(AXES):
        back = heats[1 + axis].flip(axis)
        one, other = (values.flatten().numpy() for values in (heats[0], back))
        constant = one.std() < 1e-12 or other.std() < 1e-12
        found[f"mirror {name}"] = None if constant else float(np.corrcoef(one, other)[0, 1])
        curve = likenesses(profiles(heats[:1], axis), profiles(back[None], axis), MOST, STEP)[0]
        found[f"curve {name}"] = [round(100 * float(value)) for value in curve]
    return found


AXES = ("down", "right")


def interval(differences: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the mean of paired differences and its 95 % interval by bootstrap over photos."""
    random = np.random.default_rng(0)
    means = differences[random.integers(len(differences), size=(RESAMPLES, len(differences)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(differences.mean()), float(low), float(high)


def table(rows: Sequence[Row]) -> str:
    """Return a table of each metric's values, and of their differences from the even placement with intervals."""
    groups: dict[tuple[str, Size], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["network"], tuple(row["size"])].append(row)
    metrics = (*FAITHFUL, *SLOW, *PLACING, "mirror down", "mirror right")
    lines = [
        "| network | size | placement | distance down / right | " + " | ".join(metrics) + " |",
        "|---|---|---|---:|" + "---:|" * len(metrics),
    ]
    for variant in VARIANTS:
        for size in SIZES:
            group = groups.get((variant, size), [])
            for way in dict.fromkeys(way for row in group for way in row["by"]):
                cells = [_cell(group, way, metric) for metric in metrics]
                head = f"{variant} | {size[0]} x {size[1]} | {way} | {_distances(group, way)}"
                lines.append(f"| {head} | {' | '.join(cells)} |")
    counts = {
        faithful: len({row["photo"] for row in rows if row["faithful"] is faithful}) for faithful in (True, False)
    }
    return "\n".join(
        [f"{counts[False]} photos for places and mirrors, {counts[True]} for faithfulness (fewer if cut).", "", *lines]
    )


def _cell(group: Sequence[Row], way: str, metric: str) -> str:
    """Return a mean in the even placement, or a difference from it with its interval; and the number of photos."""
    pairs = [
        (float(row["by"][EVEN][metric]), float(row["by"][way][metric]))
        for row in group
        if way in row["by"] and None not in (row["by"][EVEN].get(metric), row["by"][way].get(metric))
    ]
    if not pairs:
        return ""
    values = np.array(pairs)
    if way == EVEN:
        return f"{values[:, 1].mean():.3f} (n {len(values)})"
    return difference(values[:, 1] - values[:, 0])


def difference(differences: NDArray[np.float64]) -> str:
    """Return the mean of paired differences with its interval, bold if the interval leaves out 0."""
    mean, low, high = interval(differences)
    mark = "**" if len(differences) >= FEWEST and (low > 0 or high < 0) else ""
    return f"{mark}{mean:+.3f}{mark} ({low:+.3f} to {high:+.3f})"


def _distances(group: Sequence[Row], way: str) -> str:
    """Return how far the maps of mirrored photos lie from the others, in pixels: twice the error."""
    found = []
    for name in AXES:
        curves = [
            row["by"][way][f"curve {name}"] for row in group if way in row["by"] and f"curve {name}" in row["by"][way]
        ]
        found.append(f"{STEP * best_shift(np.mean(curves, 0)):+.0f}" if curves else "")
    return " / ".join(found)


def tasks(given: argparse.Namespace, rows: Sequence[Row], ends: float) -> Iterator[Task]:
    """Yield what is left to do: first places and mirrors of all photos, then faithfulness, photo by photo."""
    done: dict[tuple[str, bool], set[tuple[str, Size]]] = defaultdict(set)
    for row in rows:
        done[row["photo"], row["faithful"]].add((row["network"], tuple(row["size"])))
    photos = load_photos(given.data)
    for faithful, count in ((False, given.photos), (True, given.faithful)):
        for number, photo in enumerate(photos[:count]):
            found = frozenset(done[photo.name, faithful])
            for sizes in [(size,) for size in SIZES] if faithful else [SIZES]:
                if any((variant, size) not in found for variant in VARIANTS for size in sizes):
                    yield Task(number, sizes, faithful, given.data, given.device, ends, found)


def arguments(description: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of a command that judges photos, and writes to ``out`` by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder with photos and weights")
    parser.add_argument("--out", type=Path, default=Path(out), help="the file with a line for each result")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--photos", type=int, default=None, metavar="N", help="explain N photos; all if not given")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing new after this time")
    parser.add_argument("--table", action="store_true", help="print the table of the file and end")
    return parser


def lines_of(file: Path) -> list[Row]:
    """Return the results of a file. A line without its end comes from an interrupted write."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def run(work: Callable[[Any], list[Row]], tasks: Iterable[object], out: Path, workers: int) -> None:
    """Run tasks in processes, and append a line for each result at once. A task that fails is left out."""
    start = time.time()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool, out.open("a") as lines:
        futures = [pool.submit(work, task) for task in tasks]
        for count, future in enumerate(as_completed(futures), start=1):
            if (error := future.exception()) is not None:
                print(f"a photo is left out: {type(error).__name__}: {error}", flush=True)
                continue
            lines.writelines(f"{json.dumps(row)}\n" for row in future.result())
            lines.flush()
            if count % 100 == 0:
                print(f"{time.time() - start:.0f} s: {count} of {len(futures)} tasks", flush=True)
    print(f"{time.time() - start:.0f} s", flush=True)


def main() -> None:
    """Judge the photos, or print the table."""
    parser = arguments(__doc__, "placements.jsonl")
    parser.add_argument("--faithful", type=int, default=400, metavar="N", help="judge the faithfulness on N photos")
    given = parser.parse_args()
    rows = lines_of(given.out)
    if given.table:
        print(table(rows))
    else:
        run(work, tasks(given, rows, time.time() + given.seconds), given.out, given.workers)


if __name__ == "__main__":
    main()
