"""Measure what a metric costs, relative to the forward passes that it makes, in the same run.

    python -m scripts.bench.bench_metrics --rounds 5 --networks resnet18 mobilenet_v2 --markdown metrics.md

The passes of each metric are recorded once: how many pictures each had, and in which memory format. Each round runs
every metric, the same passes alone under ``inference_mode``, and one plain pass of one picture, in random order. The
table shows ratios of the median processor times, which other programs on the machine disturb less than the clock. Each
metric starts with a new Evaluator, so preparing the picture counts as well. The networks have random weights, since the
cost does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import camkit
from camkit.metrics import Evaluator, Heat
from camkit.metrics.reference_maps import random_map

NETWORKS = {"mobilenet_v2": "features.18", "resnet18": "layer4", "resnet50": "layer4"}
"""The networks, and the layer of the metrics in feature space."""

SCORING = ("srg", "insertion", "deletion", "average-drop", "road", "feature-srg")
"""The metrics that score changed pictures. All others make maps, whose cost bench_explainer.py measures."""

FILLED = ("mean", "inpaint")
"""The fills with which SRG is measured as well; blur is its own, and "linear" is ROAD's."""

STEPS = 10
"""Steps of the curves: half as many as by default, so that what is done once for a picture weighs more."""


class _Bench:
    """One network and the metrics that are measured on it."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = torchvision.models.get_model(name).eval().requires_grad_(requires_grad=False)
        self.image = torch.randn(3, 224, 224)
        self.explainer = camkit.Explainer(self.model, NETWORKS[name], method="gradcam")
        self.explainer(self.image, 0)
        self.variants: dict[str, Callable[[], object]] = {}
        for metric in SCORING:
            self.variants[metric] = self._variant(metric, None)
        prepared = Evaluator(self.explainer, self.image, 0, steps=STEPS)
        self.variants["feature-srg, picture prepared"] = lambda: prepared(Heat(random_map((224, 224))), "feature-srg")
        for fill in FILLED:
            self.variants[f"srg, {fill}"] = self._variant("srg", fill)
        self.passes = {variant: self._recorded(run) for variant, run in self.variants.items()}

    def _variant(self, metric: str, fill: str | None) -> Callable[[], object]:
        def run() -> object:
            evaluator = Evaluator(self.explainer, self.image, 0, fill=fill, steps=STEPS)
            value = evaluator(Heat(random_map((224, 224))), metric)[metric]
            assert value.status == "ok", value
            return value

        return run

    def _recorded(self, run: Callable[[], object]) -> list[Tensor]:
        """Return an input of each pass's shape and memory format."""
        seen: list[Tensor] = []

        def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen.append(torch.empty_like(arguments[0]).normal_())

        handle = self.model.register_forward_pre_hook(note)
        try:
            run()  # a model with a new hook is examined again
            seen.clear()
            run()
        finally:
            handle.remove()
        return seen

    def replay(self, variant: str) -> None:
        """Run the passes of a metric alone."""
        with torch.inference_mode():
            for inputs in self.passes[variant]:
                self.model(inputs)

    def plain(self) -> None:
        """Run one picture."""
        with torch.inference_mode():
            self.model(self.image[None])


def _timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return for each variant its pictures, its ratio to its own passes and its ratio to one plain pass."""
    bench = _Bench(name)
    plain: list[float] = []
    alone: dict[str, list[float]] = {variant: [] for variant in bench.variants}
    taken: dict[str, list[float]] = {variant: [] for variant in bench.variants}
    order, shuffled = list(bench.variants), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for variant in order:
            plain.append(_timed(bench.plain))
            alone[variant].append(_timed(lambda chosen=variant: bench.replay(chosen)))  # type: ignore[misc]
            taken[variant].append(_timed(bench.variants[variant]))
    return {
        variant: {
            "pictures": float(sum(len(inputs) for inputs in bench.passes[variant])),
            "own": statistics.median(taken[variant]) / statistics.median(alone[variant]),
            "plain": statistics.median(taken[variant]) / statistics.median(plain),
        }
        for variant in bench.variants
    }


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| network | metric | pictures | x its own passes | x one plain pass |", "|---|---|---|---|---|"]
    for name, variants in results.items():
        for variant, row in variants.items():
            own = "" if variant.startswith("feature") else f"{row['own']:.2f}"
            lines.append(f"| {name} | {variant} | {row['pictures']:.0f} | {own} | {row['plain']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="more count the time in which threads wait, too")
    parser.add_argument("--networks", nargs="+", default=["resnet18", "mobilenet_v2"], choices=list(NETWORKS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for name in options.networks:
        results[name] = measure(name, options.rounds)
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    text = table(results)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
