"""The lab: trains many small classifiers with a known shortcut and without one, and asks the check about each.

    python scripts/validate_check.py --state lab/ --workers 2 --markdown docs/validation.md

A model's truth is its own behaviour: its accuracy on pictures drawn like its training set, minus that on pictures whose
shortcut is redrawn at random. The check sees only a validation folder drawn like the training set. Every finished model
is a line of the state, and every network a file; an interrupted run goes on where it stopped. Without the lines, the
same networks are checked again, as after a change of the rule.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from lab_models import ARCHITECTURES, accuracy, preprocess, train
from lab_report import judged_again, page, plots
from lab_scenes import LAYOUTS, ONE_CLASS, SHORTCUTS, Parts, Recipe, draw, load_parts, write_folder

import camkit
from camkit.background.check import CheckResult
from camkit.background.config import LimitsSection
from camkit.background.measures import Measures
from camkit.demo.scenes.drawing import THINGS

CORRELATIONS = (0.25, 0.5, 0.75, 0.9, 1.0)
ONE_CLASS_CORRELATIONS = (0.9, 1.0)
CLEAN_SEEDS = 2
MEASURED = 2000
PER_CLASS = 100
BEGIN, END = "<!-- validate_check -->", "<!-- end of validate_check -->"


@dataclass(frozen=True)
class Order:
    """One model to train and check."""

    architecture: str
    shortcut: str
    correlation: float
    layout: str
    seed: int
    folder_correlation: float

    @property
    def name(self) -> str:
        """What the model is called in the state."""
        parts = (self.architecture, self.shortcut, self.correlation, self.layout, self.seed, self.folder_correlation)
        return " ".join(map(str, parts))


def orders() -> Iterator[Order]:
    """List the models, the kinds in turn, so that an unfinished run has some of each."""
    for layout in LAYOUTS:
        for seed in range(CLEAN_SEEDS):
            for architecture in ARCHITECTURES:
                yield Order(architecture, "background", 0.0, layout, seed, 0.0)
    for correlation in reversed(CORRELATIONS):
        for shortcut in SHORTCUTS:
            for architecture in ARCHITECTURES:
                yield Order(architecture, shortcut, correlation, "usual", 0, correlation)
        if correlation in ONE_CLASS_CORRELATIONS:
            for architecture in ARCHITECTURES:
                yield Order(architecture, ONE_CLASS, correlation, "usual", 0, correlation)
    for layout in LAYOUTS[1:]:
        for architecture in ARCHITECTURES:
            yield Order(architecture, "background", 0.9, layout, 0, 0.9)
    for architecture in ARCHITECTURES:  # clean models, asked about in a folder where the background tells the class
        for seed in range(CLEAN_SEEDS):
            yield Order(architecture, "background", 0.0, "usual", 10 + seed, 0.9)


def examine(order: Order, state: str) -> dict[str, Any]:
    """Train one model, measure its truth, and ask the check."""
    torch.set_num_threads(1)
    parts = load_parts(Path(state), 1)
    start = time.perf_counter()
    recipe = Recipe(order.shortcut, order.correlation, order.layout)
    network = _network(order, recipe, parts, Path(state))
    trained = time.perf_counter()
    matched, redrawn = _truth(network, parts, order)
    result = _checked(network, parts, order)
    return {
        **asdict(order),
        "name": order.name,
        "matched": matched,
        "redrawn": redrawn,
        "verdict": result.verdict,
        "reasons": list(result.reasons),
        "overall": _plain(result.overall),
        "classes": {
            name: {**_plain(one), "verdict": result.judged[name].verdict} for name, one in result.classes.items()
        },
        "sanity": asdict(result.sanity),
        "seconds": [round(trained - start, 1), round(time.perf_counter() - trained, 1)],
    }


def _network(order: Order, recipe: Recipe, parts: Parts, state: Path) -> torch.nn.Module:
    """Train a network, or take up one that was trained before: another rule is then judged on the same networks."""
    trained = (order.architecture, order.shortcut, order.correlation, order.layout, order.seed)
    file = state / "networks" / f"{'_'.join(map(str, trained))}.pt"
    if file.exists():
        network = ARCHITECTURES[order.architecture]()
        network.load_state_dict(torch.load(file, weights_only=True))
        return network.to(memory_format=torch.channels_last).eval()
    network = train(parts, recipe, order.architecture, order.seed)
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_suffix(".new")
    torch.save(network.state_dict(), unfinished)
    unfinished.replace(file)
    return network


def train_one(order: Order, state: str) -> str:
    """Train one network and keep it; return its name."""
    torch.set_num_threads(1)
    recipe = Recipe(order.shortcut, order.correlation, order.layout)
    _network(order, recipe, load_parts(Path(state), 1), Path(state))
    return order.name


def _truth(network: torch.nn.Module, parts: Parts, order: Order) -> tuple[float, float]:
    """Return the accuracy on pictures like those of the folder, and with the shortcut redrawn."""
    found = []
    for correlation in (order.folder_correlation, 0.0):
        random = torch.Generator().manual_seed(7)
        recipe = Recipe(order.shortcut, correlation, order.layout)
        found.append(accuracy(network, draw(parts, recipe, MEASURED, random, measuring=True)))
    return found[0], found[1]


def _checked(network: torch.nn.Module, parts: Parts, order: Order) -> CheckResult:
    recipe = Recipe(order.shortcut, order.folder_correlation, order.layout)
    drawn = draw(
        parts, recipe, PER_CLASS * len(THINGS), torch.Generator().manual_seed(100 + order.seed), measuring=True
    )
    with tempfile.TemporaryDirectory() as folder:
        pictures = write_folder(drawn, Path(folder))
        return camkit.check(network, pictures, preprocess=preprocess, labels=THINGS)


def _plain(one: Measures) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(one)))
    return plain


def finished(file: Path) -> dict[str, dict[str, Any]]:
    """Return the finished models of a state, by name."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {row["name"]: row for row in rows}


def main() -> None:
    """Examine every model that has no row yet, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--state", type=Path, default=Path("lab"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write when all models are known")
    parser.add_argument("--train-only", action="store_true", help="train the networks, and check none yet")
    parser.add_argument("--most", type=int, default=None, help="models in this run")
    options = parser.parse_args()
    load_parts(options.state, options.workers)
    if options.train_only:
        with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
            trained = [pool.submit(train_one, order, str(options.state)) for order in orders()]
            for done in as_completed(trained):
                print(f"trained {done.result()}", flush=True)
        return
    file = options.state / "models.jsonl"
    known = finished(file)
    todo = [order for order in orders() if order.name not in known][: options.most]
    print(f"{len(known)} models are known, {len(todo)} are to come", flush=True)
    with (
        ProcessPoolExecutor(options.workers, get_context("spawn")) as pool,
        file.open("a") as lines,
    ):
        waiting = {pool.submit(examine, order, str(options.state)): order for order in todo}
        for count, future in enumerate(as_completed(waiting), start=1):
            row = future.result()
            lines.write(f"{json.dumps(row)}\n")
            lines.flush()
            known[row["name"]] = row
            print(
                f"{count}/{len(todo)} {row['name']}: {row['matched']:.2f} {row['redrawn']:.2f} {row['verdict']}",
                flush=True,
            )
    if options.markdown is not None:
        write_page(options.markdown, list(known.values()))


def write_page(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write the tables between the marks of a page, and the plots beside it; what people wrote around them stays."""
    judged = [judged_again(row, LimitsSection()) for row in rows]
    plots(judged, file.parent)
    text = file.read_text("utf-8") if file.exists() else f"# Validation\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    file.write_text(f"{before}{BEGIN}\n\n{page(judged)}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
