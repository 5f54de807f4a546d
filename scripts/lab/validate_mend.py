"""Validate mending: mend the networks of the drawn lab, and measure what they truly lose before and after.

    python -m scripts.lab.validate_mend --state lab/ --workers 2 --markdown scripts/results/mending.md

The networks are those of ``validate_check.py``; they are trained if ``--state`` does not have them. A network's true
loss is its accuracy on new pictures drawn like its training set, minus its accuracy on new pictures whose shortcut is
redrawn at random. Mending sees only half of a folder of other pictures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from camkit.mending import Pair, mend
from scripts.demo.drawn_scenes.drawing import THINGS
from scripts.lab.lab_models import preprocess
from scripts.lab.lab_run import Row, run_models, write_between
from scripts.lab.lab_scenes import Recipe, draw, load_parts, write_folder
from scripts.lab.validate_check import PER_CLASS, ModelSpec, model_specs, network_of, truth_of

MARK = "validate_mend"
"""The name of the marks between which the page has the table."""

BIASED, CLEAN = 0.15, 0.03
"""A network that loses more than the first is biased, one that loses less than the second is clean."""

_GOAL = 0.4
"""The share of the loss that may stay."""

_SHOWN = 10
"""Networks in the second table."""


def mend_one(spec: ModelSpec, state: str) -> Row:
    """Mend one network, and measure its true loss before and after."""
    torch.set_num_threads(1)
    parts = load_parts(Path(state), 1)
    recipe = Recipe(spec.shortcut, spec.correlation, spec.layout)
    network = network_of(spec, recipe, parts, Path(state))
    before = truth_of(network, parts, spec)
    folder_recipe = Recipe(spec.shortcut, spec.folder_correlation, spec.layout)
    scenes = draw(
        parts, folder_recipe, PER_CLASS * len(THINGS), torch.Generator().manual_seed(100 + spec.seed), measuring=True
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        pictures = write_folder(scenes, Path(folder))
        found = mend(network, pictures, preprocess=preprocess, labels=THINGS)
    after = truth_of(found.model, parts, spec)
    return {
        **asdict(spec),
        "name": spec.name,
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
        "seconds": round(time.perf_counter() - start, 1),
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
        "| networks | true loss | stays | of these at most 0.4 | accuracy with the shortcut | worst pair | gained |",
        "|---|---|---:|---:|---|---|---:|",
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
    return f"| {len(rows)} {name} | {_medians(losses)} | {share} | {few} | {seen} | {worst} | {gained} |"


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
    options = parser.parse_args()
    load_parts(options.state, options.workers)
    sample = list(model_specs())[:: options.every]
    specs = [spec for spec in sample if options.shortcuts is None or spec.shortcut in options.shortcuts]
    file = options.state / "mended.jsonl"
    rows = run_models(file, specs, mend_one, (str(options.state),), options.workers, options.most)
    if options.markdown is not None:
        write_between(options.markdown, MARK, table(rows))


if __name__ == "__main__":
    main()
