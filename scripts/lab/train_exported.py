"""Train drawn networks on the pictures that ``camkit mend --export`` writes, and measure what they lose then.

    python -m scripts.lab.train_exported --state lab/ --workers 2 --markdown scripts/results/validation.md

Mending only trains the last layer. Here all layers are trained on: on the exported pictures alone, with as many
pictures of the network's own training set in each batch, or for comparison on its own training set alone. The true loss
is that of ``validate_mend.py``.
"""

from __future__ import annotations

import argparse
import copy
import csv
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.io import ImageReadMode, decode_image

from camkit.background.check import plan_check
from camkit.mending import export_composites
from scripts.demo.drawn_scenes.drawing import THINGS
from scripts.lab.lab_models import BATCH, PICTURES, WEIGHT_DECAY, normalised, preprocess
from scripts.lab.lab_run import Row, run_models, write_between
from scripts.lab.lab_scenes import Parts, Recipe, draw, load_parts, write_folder
from scripts.lab.validate_check import ModelSpec, folder_scenes, model_specs, network_of, truth_of

MARK = "train_exported"
STEPS, RATE = 600, 2e-3


def train_one(spec: ModelSpec, state: str) -> Row:
    """Train one network on exported pictures, and measure its accuracy with and without the shortcut."""
    torch.set_num_threads(1)
    parts = load_parts(Path(state), 1)
    recipe = Recipe(spec.shortcut, spec.correlation, spec.layout)
    network = network_of(spec, recipe, parts, Path(state))
    images, labels = exported(network, parts, spec)
    own = draw(parts, recipe, PICTURES, torch.Generator().manual_seed(1000 + spec.seed), measuring=False)
    alone = truth_of(trained(network, [(images, labels)]), parts, spec)
    mixed = truth_of(trained(network, [(images, labels), (own.images, own.labels)]), parts, spec)
    control = truth_of(trained(network, [(own.images, own.labels)]), parts, spec)
    return {
        **asdict(spec),
        "name": spec.name,
        "exported": len(labels),
        "before": truth_of(network, parts, spec),
        "alone": alone,
        "mixed": mixed,
        "control": control,
        "matched": mixed[0],  # the run prints these three
        "redrawn": mixed[1],
        "verdict": "",
    }


def exported(network: nn.Module, parts: Parts, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Export the pictures of a folder like that of the check; return them (N, 3, H, W), 0 to 1, and their classes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "pasted"
        pictures = write_folder(folder_scenes(parts, spec), Path(place) / "own")
        plan = plan_check(network, pictures, preprocess=preprocess, labels=THINGS)
        export_composites(plan, folder, lambda *_: None)
        with (folder / "labels.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        images = torch.stack([decode_image(str(folder / row["path"]), ImageReadMode.RGB) for row in rows])
    return images.float() / 255, torch.tensor([THINGS.index(row["label"]) for row in rows])


def trained(network: nn.Module, sources: Sequence[tuple[Tensor, Tensor]]) -> nn.Module:
    """Return a copy trained on; each batch has as many pictures of each source (images, labels)."""
    trained = copy.deepcopy(network).train()
    optimiser = torch.optim.AdamW(trained.parameters(), RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=STEPS)
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    for _ in range(STEPS):
        rows = [torch.randint(len(labels), (BATCH // len(sources),), generator=random) for _, labels in sources]
        drawn = [(images[some], labels[some]) for (images, labels), some in zip(sources, rows, strict=True)]
        images, labels = (torch.cat(each) for each in zip(*drawn, strict=True))
        loss = nn.functional.cross_entropy(trained(normalised(images)), labels)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    return trained.eval()


def table(rows: Sequence[Row]) -> str:
    """Return a line for each network, and one with the medians."""

    def shown(of: Sequence[Row], name: str) -> str:
        matched, redrawn = np.median([row[name] for row in of], axis=0)
        loss = np.median([row[name][0] - row[name][1] for row in of])
        return f"{loss:.2f} ({matched:.2f}, {redrawn:.2f})"

    names = "before", "control", "alone", "mixed"
    lines = [
        "True loss; in brackets, the accuracy with the shortcut, and with the shortcut redrawn at random.",
        "",
        "| network | before | trained on its own pictures | on exported pictures | on both |",
        "|---|---|---|---|---|",
    ]
    for title, of in [(row["name"], [row]) for row in rows] + [(f"median of {len(rows)}", list(rows))]:
        lines.append(f"| {title} | {' | '.join(shown(of, name) for name in names)} |")
    return "\n".join(lines)


def main() -> None:
    """Train the networks, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--state", type=Path, default=Path("lab"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write when all networks are trained")
    parser.add_argument("--networks", nargs="+", default=None, help="names of networks; by default, all biased ones")
    options = parser.parse_args()
    load_parts(options.state, options.workers)
    specs = [spec for spec in model_specs() if spec.correlation > 0]
    specs = [spec for spec in specs if options.networks is None or spec.name in options.networks]
    rows = run_models(options.state / "exported.jsonl", specs, train_one, (str(options.state),), options.workers, None)
    if options.markdown is not None:
        write_between(options.markdown, MARK, table(rows))


if __name__ == "__main__":
    main()
