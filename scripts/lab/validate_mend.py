"""Validate mending: mend the networks of a lab, and measure what they truly lose before and after.

    python -m scripts.lab.validate_mend --state lab/ --workers 2 --markdown scripts/results/mending.md
    python -m scripts.lab.validate_mend --data DATA --state photo-lab/ --markdown scripts/results/mending.md

The networks are those of ``validate_check.py``, or with ``--data`` the biased ones of ``validate_photos.py``; they are
trained if ``--state`` does not have them. A network's true loss is its accuracy on new pictures drawn like its training
set, minus its accuracy on new pictures whose shortcut is redrawn at random. Mending sees only half of a folder of other
pictures. *The most* is what the network reaches if its last layer is trained on thousands of scenes without the
shortcut; mending this layer can hardly reach more.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from camkit.mending import MendResult, Pair, mend
from scripts.demo.drawn_scenes.drawing import THINGS
from scripts.lab import validate_photos
from scripts.lab.lab_models import normalised, preprocess
from scripts.lab.lab_photos import WORLDS
from scripts.lab.lab_report import kind
from scripts.lab.lab_run import Row, run_models, write_between
from scripts.lab.lab_scenes import Parts, Recipe, draw, load_parts, write_folder
from scripts.lab.lab_trunks import RememberingFront, load_trunk
from scripts.lab.rejudge_photos import stored
from scripts.lab.validate_check import ModelSpec, folder_scenes, model_specs, network_of, truth_of

MARK, PHOTO_MARK = "validate_mend", "validate_mend on photos"
"""The names of the marks between which the page has the tables."""

BIASED, CLEAN = 0.15, 0.03
"""A network that loses more than the first is biased, one that loses less than the second is clean."""

_GOAL = 0.4
"""The share of the loss that may stay."""

_SHOWN = 10
"""Networks in the second table."""

_SCENES, _PULL = 3000, 1e-4
"""Scenes without the shortcut that show the most a last layer can do, and the decay of its weights."""


def mend_one(spec: ModelSpec, state: str) -> Row:
    """Mend one network, and measure its true loss before and after."""
    torch.set_num_threads(1)
    parts = load_parts(Path(state), 1)
    recipe = Recipe(spec.shortcut, spec.correlation, spec.layout)
    network = network_of(spec, recipe, parts, Path(state))
    before = truth_of(network, parts, spec)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        pictures = write_folder(folder_scenes(parts, spec), Path(folder))
        found = mend(network, pictures, preprocess=preprocess, labels=THINGS)
    after = truth_of(found.model, parts, spec)
    row = _row(found, before, after, time.perf_counter() - start)
    return {
        **asdict(spec),
        "name": spec.name,
        **row,
        "most": truth_of(best_last_layer(network, parts, spec), parts, spec),
    }


def best_last_layer(network: nn.Module, parts: Parts, spec: ModelSpec) -> nn.Module:
    """Return a copy whose last linear layer is trained on drawn scenes without the shortcut."""
    best = copy.deepcopy(network)
    layer = [module for module in best.modules() if isinstance(module, nn.Linear)][-1]
    scenes = draw(
        parts, Recipe(spec.shortcut, 0.0, spec.layout), _SCENES, torch.Generator().manual_seed(3), measuring=False
    )
    found: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda _module, inputs, _output: found.append(inputs[0]))
    with torch.no_grad():
        for images in scenes.images.split(256):
            best(normalised(images))
    handle.remove()
    features = torch.cat(found)
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimiser.zero_grad()
        value = nn.functional.cross_entropy(layer(features), scenes.labels) + _PULL * layer.weight.square().sum()
        torch.autograd.backward(value)
        return float(value)

    optimiser.step(loss)
    return best


def mend_photo_network(spec: validate_photos.ModelSpec, state: str, data: str) -> Row:
    """Mend one network of the photo lab, and measure its true loss before and after."""
    torch.set_num_threads(1)
    world = WORLDS[spec.world]
    trunk = load_trunk(spec.trunk, Path(data))
    validate, truth = (
        validate_photos.load_part(Path(state), Path(data), world, part, spec.trunk, trunk)
        for part in ("validate", "truth")
    )  # before training, which changes the back of a trunk that is fine-tuned
    network = validate_photos.load_network(spec, Path(state), Path(data), trunk)
    before = _accuracies(network, truth, spec)
    chosen = validate_photos.folder_rows(validate, world.shares(spec.folder_correlation), spec.seed)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        pictures = validate_photos.write_folder(Path(folder), Path(data), world, chosen)
        front = RememberingFront(trunk.front, validate_photos.front_outputs(spec.folder))
        module = nn.Sequential(front, *network)
        found = mend(module, pictures, preprocess=trunk.preprocess, labels=list(world.classes))
    assert isinstance(found.model, nn.Sequential)
    after = _accuracies(found.model[1:], truth, spec)
    return {**asdict(spec), "name": spec.name, **_row(found, before, after, time.perf_counter() - start)}


def _accuracies(network: nn.Module, truth: validate_photos.Part, spec: validate_photos.ModelSpec) -> tuple[float, ...]:
    true = validate_photos.true_behaviour(network, truth, WORLDS[spec.world], spec.folder_correlation)
    return true["matched"], true["redrawn"], true["worst_group"]


def biased_photo_networks() -> list[validate_photos.ModelSpec]:
    """Return the networks that lost more than 0.15 when the photo lab was made, those of one folder together."""
    names = {row["name"] for row in stored() if kind(row) == "biased"}
    return [spec for spec in validate_photos.model_specs() if spec.name in names]


def _row(found: MendResult, before: Sequence[float], after: Sequence[float], seconds: float) -> Row:
    return {
        "before": before,
        "after": after,
        "gap": list(found.gaps),
        "worst": [_accuracy(found.worst_before), _accuracy(found.worst_after)],
        "originals": [found.before.overall.accuracy.value, found.after.overall.accuracy.value],
        "verdicts": [found.before.verdict, found.after.verdict],
        "strength": found.strength,
        "problem": found.problem,
        "matched": after[0],  # the run prints these three
        "redrawn": after[1],
        "verdict": found.after.verdict,
        "seconds": round(seconds, 1),
    }


def _accuracy(pair: Pair | None) -> float | None:
    return None if pair is None else pair.accuracy


def table(rows: Sequence[Row]) -> str:
    """Return a line for each group of networks, and the ten biased ones whose loss stays largest."""
    biased = [row for row in rows if _loss(row["before"]) > BIASED]
    clean = [row for row in rows if _loss(row["before"]) < CLEAN]
    between = [row for row in rows if row not in biased and row not in clean]
    lines = [
        "Medians, before and after. *Stays* is the share of the true loss that is left.",
        "",
        "| networks | true loss | stays | of these at most 0.4 | the most: loss | accuracy with the shortcut | "
        "the most | worst pair | gained |",
        "|---|---|---:|---:|---:|---|---:|---|---:|",
        *(_line(name, group) for name, group in (("biased", biased), ("between", between), ("clean", clean)) if group),
        "",
        "The biased networks whose loss stays largest:",
        "",
        "| network | true loss | gap | worst pair | accuracy on the folder | problem |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(biased, key=lambda row: _loss(row["after"]), reverse=True)[:_SHOWN]:
        pairs = ([_loss(row["before"]), _loss(row["after"])], row["gap"], row["worst"], row["originals"])
        shown = " | ".join(" to ".join("" if value is None else f"{value:.2f}" for value in pair) for pair in pairs)
        lines.append(f"| {row['name']} | {shown} | {row['problem']} |")
    return "\n".join(lines)


def _line(name: str, rows: Sequence[Row]) -> str:
    losses = [[_loss(row["before"]), _loss(row["after"])] for row in rows]
    stays = [after / before for before, after in losses if before > CLEAN]
    share, few = (
        (f"{np.median(stays):.2f}", f"{sum(of <= _GOAL for of in stays)} of {len(stays)}") if stays else ("", "")
    )
    seen = _medians([[row["before"][0], row["after"][0]] for row in rows])
    worst = _medians([row["worst"] for row in rows if None not in row["worst"]])
    gained = sum(not row["problem"] for row in rows)
    most = [row["most"] for row in rows if "most" in row]
    left, kept = (
        f"{np.median(values):.2f}" if most else "" for values in ([_loss(of) for of in most], [of[0] for of in most])
    )
    return (
        f"| {len(rows)} {name} | {_medians(losses)} | {share} | {few} | {left} | {seen} | {kept} | {worst} | {gained} |"
    )


def _loss(truth: Sequence[float]) -> float:
    return truth[0] - truth[1]


def _medians(pairs: Sequence[Sequence[float]]) -> str:
    return " to ".join(f"{value:.2f}" for value in np.median(pairs, axis=0)) if pairs else ""


def main() -> None:
    """Mend the networks, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--state", type=Path, default=Path("lab"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write when all networks are mended")
    parser.add_argument("--most", type=int, default=None, help="mend at most this many networks in this run")
    parser.add_argument("--every", type=int, default=1, help="mend a sample: every so many of the networks, in order")
    parser.add_argument("--shortcuts", nargs="+", default=None, help="mend only networks with these shortcuts")
    parser.add_argument("--data", type=Path, default=None, help="real photos: mend the photo lab's biased networks")
    options = parser.parse_args()
    file = options.state / "mended.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if options.data is None:
        load_parts(options.state, options.workers)
        sample = list(model_specs())[:: options.every]
        specs = [spec for spec in sample if options.shortcuts is None or spec.shortcut in options.shortcuts]
        rows = run_models(file, specs, mend_one, (str(options.state),), options.workers, options.most)
    else:
        places = (str(options.state), str(options.data))
        rows = run_models(
            file, biased_photo_networks(), mend_photo_network, places, options.workers, options.most,
            group=lambda spec: spec.folder,
        )  # fmt: skip
    if options.markdown is not None:
        write_between(options.markdown, MARK if options.data is None else PHOTO_MARK, table(rows))


if __name__ == "__main__":
    main()
