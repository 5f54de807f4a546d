"""Judges the methods on networks with real weights and photos, and writes the tables into scripts/results/judged.md.

    .venv/bin/python -m scripts.truth.judge_methods --data ../shared/data --out judged/ mobilenet_v2

With ``--methods gradcam refinecam`` it judges these alone, and prints their tables instead.

Each seed draws 50 photos of its own and shuffles the weights anew, in a process of its own. The reports go into a
folder; those that are there already are not made again. Each network has its own section of the page.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import camkit
from scripts.lab.lab_run import write_between
from scripts.weights import WEIGHTS, load_network

PAGE = Path(__file__).parents[1] / "results" / "judged.md"

METHODS = (
    "gradcam",
    "gradcam++",
    "hirescam",
    "layercam",
    "finercam",
    "refinecam",
    "ablationcam",
    "reciprocam",
    "fullgrad",
    "eigencam",
    "kpcacam",
    "guidedbackprop",
    "guidedgradcam",
)
"""The usual methods of ``judge`` for convolutional networks, less ``shapleycam``, whose maps are those of ``gradcam``
here, since these networks are piecewise linear after the layer; and guided backpropagation in both forms."""

SEEDS = (0, 1)
PHOTOS = 50


def photos(data: Path) -> list[Path]:
    """Return the photos whose class ImageNet has, in a fixed order."""
    classes = json.loads((data / "caltech" / "to_imagenet.json").read_text("utf-8"))
    caltech = [path for name in classes if classes[name] for path in sorted((data / "caltech" / name).glob("*.jpg"))]
    licences = json.loads((data / "open_photos" / "LICENCES.json").read_text("utf-8"))
    others = {data / "open_photos" / entry["file"] for entry in licences if entry.get("imagenet_labels")}
    return sorted(caltech) + sorted(others)


def section(network: str, reports: Sequence[Path]) -> str:
    """Return what the page says about one network: the table of the first seed, and what each seed recommends.

    Args:
        network: its name.
        reports: the folder with the reports of each seed.
    """
    judged = [json.loads((report / "judge.json").read_text("utf-8")) for report in reports]
    table = [line for line in (reports[0] / "judge.md").read_text("utf-8").splitlines() if line.startswith("|")]
    notes = [f"Seed {one['seed']}: {one['recommendation']['sentence']}" for one in judged]
    recommended = {one["seed"]: one["recommendation"]["row"] or "none" for one in judged}
    if len(set(recommended.values())) == 1:
        notes.append("Both samples of photos give the same recommendation.")
    else:
        each = " and ".join(f"`{row}` with seed {seed}" for seed, row in recommended.items())
        notes.append(f"The recommendation depends on the sample of photos: {each}.")
    for one in judged:
        unmoved = ", ".join(f"`{row['name']}`" for row in one["rows"] if row["hardly_changes"]) or "none"
        notes.append(f"Seed {one['seed']}: maps that hardly change under shuffled weights: {unmoved}.")
    about = f"{len(judged[0]['pictures'])} photos, seed {judged[0]['seed']}:"
    return "\n".join([f"### {network}", "", about, "", *table, "", *(f"- {note}" for note in notes), ""])


def _judge(seed: int, network: str, methods: Sequence[str], data: Path, out: Path, pictures: int) -> Path:
    """Return the folder with the reports of one network and seed; they are made if they are not there."""
    report = out / f"{network.removeprefix('timm:')}-{seed}"
    if (report / "judge.html").exists():  # it is written last
        return report
    torch.set_num_threads(1)  # the seeds run side by side
    model = load_network(data, network)

    def tell(done: int, of: int) -> None:
        print(f"{network}, seed {seed}: {done} of {of}", flush=True)

    camkit.judge(model, photos(data), methods, pictures=pictures, seed=seed, progress=tell).save(report)
    return report


def main() -> None:
    """Judge the networks one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(WEIGHTS)}; default: all")
    parser.add_argument("--data", type=Path, required=True, help="the folder of weights and photos")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the reports of each network and seed")
    parser.add_argument("--pictures", type=int, default=PHOTOS)
    parser.add_argument("--methods", nargs="+", help="judge these alone, and only print their tables")
    given = parser.parse_args()
    settings = {"methods": given.methods or METHODS, "data": given.data, "out": given.out, "pictures": given.pictures}
    for network in given.networks or WEIGHTS:
        with ProcessPoolExecutor(len(SEEDS)) as processes:
            reports = list(processes.map(functools.partial(_judge, network=network, **settings), SEEDS))
        text = section(network, reports)
        if given.methods:
            print(text, flush=True)
        else:
            write_between(PAGE, f"judged {network}", text)


if __name__ == "__main__":
    main()
