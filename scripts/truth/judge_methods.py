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
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

import camkit
from camkit.comparison.judge import at_least_chance, recommended
from camkit.comparison.judgement import DECIDING
from camkit.comparison.recommendation import REFERENCES, UNMOVED
from camkit.comparison.standings import standings
from camkit.metrics import METRICS
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
DIVISIONS = 40
"""How many times the photos of all seeds are divided into halves, to see how much a recommendation depends on them."""


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
    same, of = agreement(judged)
    notes.append(
        f"The {of} photos of all seeds, divided {DIVISIONS} times at random into halves: in {same} divisions both "
        "halves give the same recommendation."
    )
    about = f"{len(judged[0]['pictures'])} photos, seed {judged[0]['seed']}:"
    return "\n".join([f"### {network}", "", about, "", *table, "", *(f"- {note}" for note in notes), ""])


def agreement(judged: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return in how many divisions both halves of the photos recommend the same row, and the number of photos.

    Args:
        judged: the report of each seed. A photo that several samples have counts once.
    """
    photos = [photo for one in judged for photo in one["pictures"]]
    _, first = np.unique(photos, return_index=True)
    rows = [{row["name"]: row for row in one["rows"]} for one in judged]
    methods = [name for name, row in rows[0].items() if not row["reference"]]
    costs = {name: rows[0][name]["plain_passes"] for name in methods}
    shuffled = {name: [of[name]["correlation_with_shuffled_weights"] for of in rows] for name in methods}
    unmoved = [name for name, values in shuffled.items() if np.mean(values) > UNMOVED]
    values = {
        metric: at_least_chance(
            {
                name: np.array([value for of in rows for value in of[name]["metrics"][metric]["values"]], float)[first]
                for name in rows[0]
            },
            methods,
        )
        for metric in DECIDING
    }

    def row(half: Float[np.ndarray, " n"], seed: int) -> str | None:
        part = {metric: {name: known[half] for name, known in of.items()} for metric, of in values.items()}
        found = {metric: standings(of, list(REFERENCES), METRICS[metric].better, seed) for metric, of in part.items()}
        return recommended(part, found, methods, costs, unmoved, seed).row

    same = 0
    for seed in range(DIVISIONS):
        halves = np.array_split(np.random.default_rng(seed).permutation(len(first)), 2)
        same += len({row(half, seed) for half in halves}) == 1
    return same, len(first)


def write(network: str, text: str) -> None:
    """Replace a network's section of the page."""
    page = PAGE.read_text("utf-8")
    start, end = f"<!-- judged {network} -->\n", f"<!-- end of {network} -->\n"
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    PAGE.write_text(before + start + text + end + after, "utf-8")


def _judge(seed: int, network: str, methods: Sequence[str], data: Path, out: Path, pictures: int) -> Path:
    """Return the folder with the reports of one network and seed; they are made if they are not there."""
    report = out / f"{network}-{seed}"
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
        print(text, flush=True) if given.methods else write(network, text)


if __name__ == "__main__":
    main()
