"""Measure masks from boxes: how well they fit outlined animals, and what the check then says of networks.

    python -m scripts.lab.measure_regions --data DATA --state regions-lab/ --markdown scripts/results/regions.md

The networks are some of ``validate_photos.py``, trained in the same way. Each is checked three times on the same
folder: with the animals' outlines, with the boxes around these, and with what ``camkit.regions`` makes of the boxes.
An interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import camkit
from camkit.background.regions import object_region, read_boxes, read_coco
from camkit.kit.wording import number
from scripts.lab.lab_photos import WORLDS
from scripts.lab.lab_run import Row, row_of, run_models, write_between
from scripts.lab.lab_trunks import load_trunk
from scripts.lab.validate_photos import ModelSpec, folder_rows, load_network, load_part, true_behaviour, write_folder

SPECS = [
    ModelSpec(trunk, head, world, tie, folder, photos)
    for trunk, world in (
        ("SqueezeNet", "two places, small"),
        ("SqueezeNet", "two places"),
        ("MobileNetV2", "pair, small"),
    )
    for head, tie, folder, photos in (
        ("linear", 1.0, 1.0, 0),
        ("two layers", 0.95, 0.95, 2),
        ("linear", 0.0, 0.95, 0),
        ("linear", 0.0, 0.0, 0),
    )
]
"""Networks that learned the place and networks that did not. Neither their trunks nor their worlds were looked at
during development."""

PER_CLASS = 10
"""Outlined animals of each class, of which there are 12."""

WITH = ("outlines", "boxes", "GrabCut")


def check_with_each(spec: ModelSpec, state: Path, data: Path) -> Row:
    """Train a network, measure its truth, and check it with each kind of regions."""
    torch.set_num_threads(1)
    world, trunk = WORLDS[spec.world], load_trunk(spec.trunk, data)
    validate, truth = (load_part(state, data, world, part, spec.trunk, trunk) for part in ("validate", "truth"))
    network = load_network(spec, state, data, trunk)
    folder = state / "folders" / f"{world.name} {spec.folder_correlation:g}".replace(" ", "_")
    table, boxes, outlined = folder / "pictures.csv", folder / "boxes/boxes.csv", folder / "outlined/instances.json"
    if not boxes.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(folder, data, world, folder_rows(validate, world.shares(spec.folder_correlation), spec.seed))
        masks = sorted((folder / "masks").glob("*/*.png"))
        around = ((mask.relative_to(folder / "masks"), Image.open(mask).getbbox()) for mask in masks)
        rows = [(f"pictures/{name}", name.parent, *(box or ())) for name, box in around]
        write_table(boxes, ("path", "class", "xmin", "ymin", "xmax", "ymax"), rows)
    if not outlined.exists():
        camkit.regions(table, regions=boxes, out=outlined.parent)
    row: Row = {"name": spec.name, **true_behaviour(network, truth, world, spec.folder_correlation)}
    sources = dict(zip(WITH, (folder / "masks", boxes, outlined), strict=True))
    for name, regions in sources.items():
        module = nn.Sequential(trunk.front, *network)
        labels = list(world.classes)
        result = camkit.check(module, table, regions=regions, preprocess=trunk.preprocess, labels=labels)
        row[name] = row_of(result)
    return row


def write_table(file: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table as CSV."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([header, *rows])


def fit(state: Path, data: Path) -> str:
    """Return a table of how well boxes, their ellipses and camkit's masks fit outlined animals."""
    photos = data / "caltech"
    truth, by_class = read_coco(photos / "instances.json").objects, defaultdict[str, list[str]](list)
    for name in sorted(truth):
        by_class[name.partition("/")[0]].append(name)
    names = [name for of_class in by_class.values() for name in of_class[:PER_CLASS]]
    rows = [(name, *animal.box) for name in names for animal in truth[name] if animal.box is not None]
    boxes = state / "animals.csv"
    write_table(boxes, ("path", "xmin", "ymin", "xmax", "ymax"), rows)
    start = time.process_time()
    found = read_coco(camkit.regions(photos, regions=boxes, out=state / "animals")).objects
    seconds, given = time.process_time() - start, read_boxes(boxes).objects
    overlaps = defaultdict[str, list[float]](list)
    for name in names:
        size = Image.open(photos / name).size
        true = object_region(truth[name], size)
        ellipse = object_region(given[name], size, round_boxes=True)
        drawn = {"the box": object_region(given[name], size), "its ellipse": ellipse}
        for kind, region in {**drawn, "GrabCut": object_region(found[name], size)}.items():
            overlaps[kind].append(float((region & true).sum() / (region | true).sum()))
    lines = ["| mask | mean IoU | median | IoU below 0.4 |", "|---|---|---|---|"]
    for kind, values in overlaps.items():
        low = np.mean(np.array(values) < 0.4)
        lines.append(f"| {kind} | {np.mean(values):.2f} | {np.median(values):.2f} | {low:.0%} |")
    spent = f"{len(names)} animals; {seconds / len(names):.2f} s of one core for each picture, with the page."
    return "\n".join([*lines, "", spent])


def verdicts(rows: list[Row]) -> str:
    """Return a table of what the check says with each kind of regions."""
    lines = [f"| network | true loss | {' | '.join(WITH)} |", "|---|---|" + "---|" * len(WITH)]
    for row in rows:
        gaps = [row[name]["overall"]["mean"]["gap"]["effect"] for name in WITH]
        cells = [
            f"{number(gap['value'])} [{number(gap['low'])}, {number(gap['high'])}] {row[name]['verdict']}"
            for name, gap in zip(WITH, gaps, strict=True)
        ]
        lines.append(f"| {row['name']} | {row['matched'] - row['redrawn']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Check the networks, and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder with photos and weights")
    parser.add_argument("--state", type=Path, default=Path("regions-lab"))
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write the tables into")
    parser.add_argument("--limit", type=int, default=None, help="check at most this many networks in this run")
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    file, arguments = options.state / "models.jsonl", (options.state, options.data)
    rows = run_models(file, SPECS, check_with_each, arguments, 1, options.limit, lambda row: str(row["name"]))
    if options.markdown is not None:
        write_between(options.markdown, "measure_regions", f"{fit(options.state, options.data)}\n\n{verdicts(rows)}\n")


if __name__ == "__main__":
    main()
