"""Validate the check: train many small classifiers, with a known shortcut and without one, and check each of them.

    python -m scripts.lab.validate_check --state lab/ --workers 2 --markdown scripts/results/validation.md

A model's truth is its own behaviour: its accuracy on pictures drawn like its training set, minus its accuracy on
pictures whose shortcut is redrawn at random. The check sees only a validation folder drawn like the training set.

The state folder holds one file per network, and ``models.jsonl`` with one line per finished model. An interrupted run
continues where it stopped. To check the same networks again, as after a change of the rule, delete ``models.jsonl``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import camkit
from camkit.background.result import CheckResult
from scripts.demo.drawn_scenes.drawing import THINGS
from scripts.lab.lab_models import ARCHITECTURES, accuracy, preprocess, train
from scripts.lab.lab_report import write_page
from scripts.lab.lab_run import Row, row_of, run_models, verdict_line
from scripts.lab.lab_scenes import LAYOUTS, ONE_CLASS, SHORTCUTS, Parts, Recipe, draw, load_parts, write_folder

CORRELATIONS = (0.25, 0.5, 0.75, 0.9, 1.0)
"""How often a shortcut goes with the class in the training set."""

ONE_CLASS_CORRELATIONS = (0.9, 1.0)
"""The same for a mark on one class alone."""

CLEAN_SEEDS = 2
"""Clean networks of each kind."""

MEASURED = 2000
"""Pictures on which an accuracy is measured: its standard error is at most 0.011."""

PER_CLASS = 100
"""Pictures per class in the folder that is checked."""

_FOLDER_WITH_SHORTCUT = 0.9
"""Correlation in a folder with a shortcut that is shown to clean networks, and for the layouts other than the usual."""


@dataclass(frozen=True)
class ModelSpec:
    """One model to train and check.

    ``correlation`` is that of the training set, ``folder_correlation`` that of the folder that is checked.
    """

    architecture: str
    shortcut: str
    correlation: float
    layout: str
    seed: int
    folder_correlation: float

    @property
    def name(self) -> str:
        """The model's name in the state."""
        parts = (self.architecture, self.shortcut, self.correlation, self.layout, self.seed, self.folder_correlation)
        return " ".join(map(str, parts))


def model_specs() -> Iterator[ModelSpec]:
    """List the models. The kinds take turns, so that an unfinished run has some of each."""
    for layout in LAYOUTS:
        for seed in range(CLEAN_SEEDS):
            for architecture in ARCHITECTURES:
                yield ModelSpec(architecture, "background", 0.0, layout, seed, 0.0)
    for correlation in reversed(CORRELATIONS):
        for shortcut in SHORTCUTS:
            for architecture in ARCHITECTURES:
                yield ModelSpec(architecture, shortcut, correlation, "usual", 0, correlation)
        if correlation in ONE_CLASS_CORRELATIONS:
            for architecture in ARCHITECTURES:
                yield ModelSpec(architecture, ONE_CLASS, correlation, "usual", 0, correlation)
    for layout in LAYOUTS[1:]:
        for architecture in ARCHITECTURES:
            yield ModelSpec(architecture, "background", _FOLDER_WITH_SHORTCUT, layout, 0, _FOLDER_WITH_SHORTCUT)
    for architecture in ARCHITECTURES:  # clean models, checked on a folder in which the background gives the class away
        for seed in range(CLEAN_SEEDS):
            yield ModelSpec(architecture, "background", 0.0, "usual", 10 + seed, _FOLDER_WITH_SHORTCUT)


def train_and_check(spec: ModelSpec, state: str) -> Row:
    """Train one model, measure its truth, and check it."""
    torch.set_num_threads(1)
    parts = load_parts(Path(state), 1)
    start = time.perf_counter()
    recipe = Recipe(spec.shortcut, spec.correlation, spec.layout)
    network = network_of(spec, recipe, parts, Path(state))
    trained = time.perf_counter()
    matched, redrawn = truth_of(network, parts, spec)
    result = _check(network, parts, spec)
    return {
        **asdict(spec),
        "name": spec.name,
        "matched": matched,
        "redrawn": redrawn,
        **row_of(result),
        "seconds": [round(trained - start, 1), round(time.perf_counter() - trained, 1)],
    }


def network_of(spec: ModelSpec, recipe: Recipe, parts: Parts, state: Path) -> torch.nn.Module:
    """Return the trained network. It is trained only once, so that another rule is judged on the same networks."""
    training = (spec.architecture, spec.shortcut, spec.correlation, spec.layout, spec.seed)
    file = state / "networks" / f"{'_'.join(map(str, training))}.pt"
    if file.exists():
        network = ARCHITECTURES[spec.architecture]()
        network.load_state_dict(torch.load(file, weights_only=True))
        return network.to(memory_format=torch.channels_last).eval()
    network = train(parts, recipe, spec.architecture, spec.seed)
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    torch.save(network.state_dict(), unfinished)
    unfinished.replace(file)
    return network


def truth_of(network: torch.nn.Module, parts: Parts, spec: ModelSpec) -> tuple[float, float]:
    """Return the accuracy on pictures like those of the folder, and on pictures whose shortcut is redrawn."""
    accuracies = []
    for correlation in (spec.folder_correlation, 0.0):
        random = torch.Generator().manual_seed(7)
        recipe = Recipe(spec.shortcut, correlation, spec.layout)
        accuracies.append(accuracy(network, draw(parts, recipe, MEASURED, random, measuring=True)))
    return accuracies[0], accuracies[1]


def _check(network: torch.nn.Module, parts: Parts, spec: ModelSpec) -> CheckResult:
    """Draw the folder, and check the network on it."""
    recipe = Recipe(spec.shortcut, spec.folder_correlation, spec.layout)
    random = torch.Generator().manual_seed(100 + spec.seed)
    scenes = draw(parts, recipe, PER_CLASS * len(THINGS), random, measuring=True)
    with tempfile.TemporaryDirectory() as folder:
        pictures = write_folder(scenes, Path(folder))
        return camkit.check(network, pictures, preprocess=preprocess, labels=THINGS)


def main() -> None:
    """Train and check the models, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--state", type=Path, default=Path("lab"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write when all models are checked")
    parser.add_argument("--most", type=int, default=None, help="check at most this many models in this run")
    options = parser.parse_args()
    load_parts(options.state, options.workers)
    file, workers = options.state / "models.jsonl", options.workers
    rows = run_models(file, model_specs(), train_and_check, (str(options.state),), workers, options.most, verdict_line)
    if options.markdown is not None:
        write_page(options.markdown, "validate_check", "validation.png", rows)


if __name__ == "__main__":
    main()
