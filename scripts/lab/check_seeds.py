"""Check one network with several seeds, and say how the verdict and the largest gap change with them.

    OMP_NUM_THREADS=1 python -m scripts.lab.check_seeds --data ../shared/data --out seeds/ --seeds 10 \
        --markdown scripts/results/validation.md

The network is EfficientNet-Lite0, the pictures are the first photos of four animals of Caltech-101 with their outlines.
The seed draws the backgrounds. The check does not search for shortcuts, because they do not change the verdict. A seed
whose row is in ``--out`` is not checked again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import camkit
from scripts.lab.lab_run import Row, row_of, write_between
from scripts.lab.real_models import FILLS, NETWORKS

MARK = "check_seeds"
ANIMALS = ("crab", "dragonfly", "flamingo", "kangaroo")
NETWORK = "EfficientNet-Lite0"
LEAST = 20
"""Testable pictures that a class needs: fewer than by default, because there are few photos."""


def write_folder(data: Path, folder: Path, count: int) -> None:
    """Write a folder with links to the first photos of each animal, and their outlines."""
    animals = data.resolve() / "caltech"
    outlined: dict[str, Any] = json.loads((animals / "instances.json").read_text("utf-8"))
    for animal in ANIMALS:
        (folder / animal).mkdir(parents=True, exist_ok=True)
        for photo in sorted((animals / animal).glob("*.jpg"))[:count]:
            if not (folder / animal / photo.name).exists():
                (folder / animal / photo.name).symlink_to(photo)
    images = [image for image in outlined["images"] if (folder / image["file_name"]).exists()]
    numbers = {image["id"] for image in images}
    kept = [each for each in outlined["annotations"] if each["image_id"] in numbers]
    (folder / "instances.json").write_text(json.dumps({**outlined, "images": images, "annotations": kept}))
    (folder / "to_imagenet.json").write_text((animals / "to_imagenet.json").read_text("utf-8"))


def check(data: Path, folder: Path, seed: int) -> Row:
    """Check the network with one seed."""
    network, preprocess = NETWORKS[NETWORK](data)
    result = camkit.check(
        network,
        folder,
        preprocess=preprocess,
        class_map=folder / "to_imagenet.json",
        config={"check": {"seed": seed, "shortcuts": 0}, "limits": {"least_pictures": LEAST}},
    )
    return {"seed": seed, **row_of(result)}


def table(rows: Sequence[Row]) -> str:
    """Return a line for each seed: the gaps of all classes and of each, and the class with the largest one."""
    lines = [
        f"| seed | verdict | all classes | {' | '.join(ANIMALS)} | largest |",
        f"|---:|---|---:|{'---|' * len(ANIMALS)}---|",
    ]
    for row in rows:
        gaps = {name: _gaps(measures) for name, measures in row["classes"].items()}
        cells = [f"{_mean(gaps[name]):.2f} ({', '.join(f'{gap:.2f}' for gap in gaps[name])})" for name in ANIMALS]
        largest = max(gaps, key=lambda name: _mean(gaps[name]))
        overall = _mean(_gaps(row["overall"]))
        lines.append(f"| {row['seed']} | {row['verdict']} | {overall:.2f} | {' | '.join(cells)} | {largest} |")
    return "\n".join(lines)


def _gaps(measures: Row) -> list[float]:
    return [float(measures["gap"][fill]["effect"]["value"]) for fill in FILLS]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    """Check with each seed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("seeds"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--photos", type=int, default=24, help="photos of each animal")
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write the table into")
    options = parser.parse_args()
    write_folder(options.data, options.out / "photos", options.photos)
    rows = []
    for seed in range(options.seeds):
        file = options.out / f"{seed}.json"
        if not file.exists():
            file.write_text(json.dumps(check(options.data, options.out / "photos", seed)))
        rows.append(json.loads(file.read_text()))
        print(table(rows).splitlines()[-1], flush=True)
    if options.markdown is not None:
        write_between(options.markdown, MARK, table(rows))


if __name__ == "__main__":
    main()
