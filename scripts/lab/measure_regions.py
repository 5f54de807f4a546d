"""Measure masks from boxes: how well they fit outlined animals, and which verdicts the check gives with them.

    python -m scripts.lab.measure_regions --data DATA --state regions-lab/ --markdown scripts/results/regions.md

The networks are held-out ones of ``validate_photos.py``. Each is checked (``--quick``) with the animals' outlines, with
the boxes around these, and with what ``camkit.regions`` makes of the boxes. An interrupted run can continue.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
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

PLACES = (("SqueezeNet", "two places, small"), ("SqueezeNet", "two places"), ("MobileNetV2", "pair, small"))
LINEAR = ((1.0, 1.0), (0.0, 0.95), (0.0, 0.0))
SPECS = [
    *(ModelSpec(trunk, "linear", world, *ties) for trunk, world in PLACES for ties in LINEAR),
    *(ModelSpec(trunk, "two layers", world, 0.95, 0.95, photos=2) for trunk, world in PLACES),
]

WITH = ("outlines", "boxes", "GrabCut")
PER_CLASS = 10  # outlined animals whose masks are measured; there are 12 classes


def check_with_each(spec: ModelSpec, state: Path, data: Path) -> Row:
    """Train a network, measure its truth, and check it with each kind of regions."""
    torch.set_num_threads(1)
    world, trunk = WORLDS[spec.world], load_trunk(spec.trunk, data)
    validate, truth = (load_part(state, data, world, part, spec.trunk, trunk) for part in ("validate", "truth"))
    network = load_network(spec, state, data, trunk)
    folder = state / "folders" / f"{world.name} {spec.folder_correlation:g}".replace(" ", "_")
    table, masks, boxes, cut = (folder / name for name in ("pictures.csv", "masks", "boxes.csv", "cut/instances.json"))
    if not cut.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(folder, data, world, folder_rows(validate, world.shares(spec.folder_correlation), spec.seed))
        around = {mask.relative_to(masks): Image.open(mask).getbbox() for mask in sorted(masks.glob("*/*.png"))}
        write_boxes(boxes, [(f"pictures/{name}", name.parent, *(box or ())) for name, box in around.items()])
        camkit.regions(table, regions=boxes, out=cut.parent)
    row: Row = {"name": spec.name, **true_behaviour(network, truth, world, spec.folder_correlation)}
    model, how = nn.Sequential(trunk.front, *network), {"preprocess": trunk.preprocess, "labels": list(world.classes)}
    for name, regions in zip(WITH, (masks, boxes, cut), strict=True):
        row[name] = row_of(camkit.check(model, table, regions=regions, quick=True, **how))
    return row


def write_boxes(file: Path, rows: list[tuple[object, ...]]) -> Path:
    """Write a table of boxes."""
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([("path", "class", "xmin", "ymin", "xmax", "ymax"), *rows])
    return file


def fit(state: Path, photos: Path) -> str:
    """Return a table of how well boxes, their ellipses and camkit's masks fit outlined animals."""
    truth, by_class = read_coco(photos / "instances.json").objects, defaultdict[str, list[str]](list)
    for name in sorted(truth):
        by_class[name.partition("/")[0]].append(name)
    names = [name for of_class in by_class.values() for name in of_class[:PER_CLASS]]
    rows = [(name, each.category, *each.box) for name in names for each in truth[name] if each.box is not None]
    boxes = write_boxes(state / "animals.csv", list(rows))
    start = time.process_time()
    found = read_coco(camkit.regions(photos, regions=boxes, out=state / "animals")).objects
    seconds, given = (time.process_time() - start) / len(names), read_boxes(boxes).objects
    overlaps = defaultdict[str, list[float]](list)
    for name in names:
        size = Image.open(photos / name).size
        true, box = object_region(truth[name], size), object_region(given[name], size)
        ellipse, cut = object_region(given[name], size, round_boxes=True), object_region(found[name], size)
        for kind, region in (("the box", box), ("its ellipse", ellipse), ("`camkit regions`", cut)):
            overlaps[kind].append(float((region & true).sum() / (region | true).sum()))
    lines = ["| mask | mean IoU | median | IoU below 0.4 |", "|---|---|---|---|"]
    for kind, values in overlaps.items():
        low = np.mean(np.array(values) < 0.4)
        lines.append(f"| {kind} | {np.mean(values):.2f} | {np.median(values):.2f} | {low:.0%} |")
    return "\n".join([*lines, "", f"{len(names)} animals; {seconds:.2f} s of a core for each picture, with the page."])


def verdicts(rows: list[Row]) -> str:
    """Return a table of what the check says with each kind of regions."""
    lines = [f"| network | true loss | {' | '.join(WITH)} |", "|---|---|---|---|---|"]
    for row in rows:
        gaps = {name: row[name]["overall"]["mean"]["gap"]["effect"] for name in WITH}
        shown = (f"{number(of['value'])} [{number(of['low'])}, {number(of['high'])}] " for of in gaps.values())
        cells = [f"{gap}{row[name]['verdict']}" for name, gap in zip(WITH, shown, strict=True)]
        lines.append(f"| {row['name']} | {number(row['matched'] - row['redrawn'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Check the networks, and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder with photos and weights")
    parser.add_argument("--state", type=Path, default=Path("regions-lab"))
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write the tables into")
    options = parser.parse_args()
    file, arguments = options.state / "models.jsonl", (options.state, options.data)
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = run_models(file, SPECS, check_with_each, arguments, 1, None, lambda row: str(row["name"]))
    if options.markdown is not None:
        tables = f"{fit(options.state, options.data / 'caltech')}\n\n{verdicts(rows)}\n"
        write_between(options.markdown, "measure_regions", tables)


if __name__ == "__main__":
    main()
