"""Measure the cost of an Explainer relative to a plain inference pass in the same run: one picture at a time, or many.

    python -m scripts.bench.bench_explainer --rounds 40 --threads 1 2 --json explainer.json --markdown explainer.md
    python -m scripts.bench.bench_explainer --rounds 11 --threads 2 --networks resnet50 --pictures 1 2 4 8 16 64

Each round runs every variant once, in random order; the table shows the medians of the rounds' ratios. First calls are
measured on fresh copies of the model. The networks have random weights, since the cost does not depend on
them. torchcam is measured if it is installed (``pip install '.[bench]'``); ``--pictures`` needs it.
"""

from __future__ import annotations

import argparse
import collections
import copy
import cProfile
import functools
import io
import json
import operator
import platform
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import camkit

NETWORKS = {
    "mobilenet_v3_small": "features.12",
    "mobilenet_v2": "features.18",
    "resnet18": "layer4",
    "resnet50": "layer4",
    "vit_b_16": "encoder.layers.encoder_layer_11.ln_1",
}
"""The networks, and the layer to explain in each."""

VARIANTS = {
    "plain": "plain inference",
    "backward": "the head's backward pass alone",
    "explainer": "Explainer, named layer",
    "chosen": "Explainer, chosen layer",
    "explain": "explain(), named layer",
    "torchcam": "torchcam 0.5.0",
    "first_named": "first call on a fresh model, named layer",
    "first_chosen": "first call on a fresh model, chosen layer",
}

_ALLOWED = 1.05
"""The goal for an Explainer, relative to the plain pass and without the head's backward pass."""

_WARM_UP = 3
"""Unmeasured calls of each variant: the first allocates memory, the next ones fill the caches."""


class _Bench:
    """One network and its variants."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        model = torchvision.models.get_model(name).eval()
        for module in model.modules():  # torchvision's ViT starts with a head of zeros
            if isinstance(module, nn.Linear) and not bool(module.weight.any()):
                nn.init.normal_(module.weight, std=0.02)
        self.model, self.layer = model, NETWORKS[name]
        self.image = torch.randn(1, 3, 224, 224)
        self.named = camkit.Explainer(model, self.layer, method="gradcam")
        self.chosen = camkit.Explainer(model, method="gradcam")
        self.torchcam = _torchcam(copy.deepcopy(model), self.layer)
        self.backward_seconds = 0.0

    def runs(self) -> dict[str, Callable[[], float]]:
        """Return each variant as a function that returns its seconds."""
        runs: dict[str, Callable[[], float]] = {
            "plain": lambda: _timed(self.plain),
            "backward": self.backward,
            "explainer": lambda: _timed(lambda: self.named(self.image)),
            "chosen": lambda: _timed(lambda: self.chosen(self.image)),
            "explain": lambda: _timed(lambda: camkit.explain(self.model, self.image, self.layer, method="gradcam")),
        }
        if self.torchcam is not None and not self.layer.startswith("encoder"):
            runs["torchcam"] = lambda: _timed(lambda: self.torchcam(self.image))  # type: ignore[misc]
        return runs

    def plain(self) -> Tensor:
        with torch.inference_mode():
            scores: Tensor = self.model(self.image)
        return scores

    def backward(self) -> float:
        """Return the seconds of the head's backward pass alone, measured with the benchmark's own hooks."""
        leaves: list[Tensor] = []

        def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            leaves.append(output.detach().requires_grad_())
            torch.set_grad_enabled(True)
            return leaves[-1].clone()

        handle = self.model.get_submodule(self.layer).register_forward_hook(hook)
        try:
            with torch.no_grad():
                scores = self.model(self.image)
                return _timed(lambda: torch.autograd.grad(scores.max(), leaves))
        finally:
            handle.remove()

    def first(self, layer: str | None) -> float:
        """Return the seconds it takes to build an Explainer for a fresh copy of the model and explain one picture."""
        model = copy.deepcopy(self.model)
        return _timed(lambda: camkit.Explainer(model, layer, method="gradcam")(self.image))


def _torchcam(model: nn.Module, layer: str) -> Callable[[Tensor], Any] | None:
    try:
        from torchcam.methods import GradCAM  # noqa: PLC0415 - optional
    except ImportError:
        return None
    extractor = GradCAM(model, layer)

    def run(image: Tensor) -> Any:
        scores = model(image.clone().requires_grad_())
        return extractor(scores.argmax(1).tolist(), scores)

    return run


def table_of_batches(networks: Sequence[str], counts: Sequence[int], rounds: int) -> str:
    """Return a Markdown table of the cost of several pictures in one call."""
    lines = [
        "| | pictures | plain, ms | plain, channels last, ms | camkit, ms | camkit / better plain | torchcam, ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in networks:
        for count, seconds in measure_batches(name, counts, rounds).items():
            ms = {variant: 1e3 * statistics.median(values) for variant, values in seconds.items()}
            better = min(("plain", "channels last"), key=ms.__getitem__)
            ratio = statistics.median(map(operator.truediv, seconds["camkit"], seconds[better]))
            own = f"{ms['camkit']:.1f} | {ratio:.2f} | {ms['torchcam']:.1f}"
            lines.append(f"| {name} | {count} | {ms['plain']:.1f} | {ms['channels last']:.1f} | {own} |")
    return "\n".join(lines)


def measure_batches(name: str, counts: Sequence[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return the seconds of each variant for each number of pictures; they take turns in each round.

    torchcam comes after the others: the graph that it keeps changes which memory the passes after it reuse.
    """
    model = torchvision.models.get_model(name).eval()
    peer = _torchcam(copy.deepcopy(model), NETWORKS[name])
    if peer is None:
        sys.exit("--pictures compares camkit with torchcam, which is not installed: pip install '.[bench]'")
    plain = torch.inference_mode()(model)
    runs: dict[tuple[int, str], Callable[[], object]] = {}
    peers: dict[tuple[int, str], Callable[[], object]] = {}
    for count in counts:
        images = torch.randn(count, 3, 224, 224)
        channels_last = images.contiguous(memory_format=torch.channels_last)
        runs[count, "plain"] = functools.partial(plain, images)
        runs[count, "channels last"] = functools.partial(plain, channels_last)
        runs[count, "camkit"] = functools.partial(camkit.explain, model, images, method="gradcam")
        peers[count, "torchcam"] = functools.partial(peer, images)
    seconds: dict[int, dict[str, list[float]]] = {count: collections.defaultdict(list) for count in counts}
    shuffled = random.Random(0)
    for variants in (runs, peers):
        for number in range(-1, rounds):
            for (count, variant), run in shuffled.sample(list(variants.items()), len(variants)):
                spent = _timed(run)
                if number >= 0:  # the round before the first is a warm-up
                    seconds[count][variant].append(spent)
    return seconds


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(name: str, rounds: int, first_rounds: int) -> dict[str, Any]:
    """Return one network's medians: the milliseconds of the plain pass, and each variant's ratio to it."""
    bench = _Bench(name)
    runs = bench.runs()
    for _ in range(_WARM_UP):
        for run in runs.values():
            run()
    seconds: dict[str, list[float]] = {variant: [] for variant in runs}
    order = list(runs)
    shuffled = random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for variant in order:
            seconds[variant].append(runs[variant]())
    firsts: dict[str, list[float]] = {"first_named": [], "first_chosen": []}
    for _ in range(first_rounds):
        for variant, layer in (("first_named", bench.layer), ("first_chosen", None)):
            plain = _timed(bench.plain)
            firsts[variant].append(bench.first(layer) / plain)
    ratios = {
        variant: statistics.median(value / plain for value, plain in zip(values, seconds["plain"], strict=True))
        for variant, values in seconds.items()
    }
    ratios |= {variant: statistics.median(values) for variant, values in firsts.items()}
    extra = [shell - inner for shell, inner in zip(seconds["explain"], seconds["explainer"], strict=True)]
    return {
        "plain_ms": 1e3 * statistics.median(seconds["plain"]),
        "ratios": ratios,
        "allowed": _ALLOWED + ratios["backward"],
        "explain_more_ms": 1e3 * statistics.median(extra),
    }


def profile(name: str, calls: int = 200, rows: int = 25) -> str:
    """Return a profile of calls to an Explainer with a named layer, including the model's own forward pass."""
    bench = _Bench(name)
    bench.named(bench.image)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        bench.named(bench.image)
    profiler.disable()
    stream = io.StringIO()
    pstats.Stats(profiler, stream=stream).sort_stats("tottime").print_stats(rows)
    return stream.getvalue()


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| | threads | plain, ms | Explainer | allowed | explain() | more, ms | torchcam | 1st, named | 1st, chosen |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, result in results.items():
        name, threads = key.split("@")
        ratios = result["ratios"]
        peer = f"{ratios['torchcam']:.2f}" if "torchcam" in ratios else "-"
        named = ratios["first_named"] / ratios["explainer"]
        chosen = ratios["first_chosen"] / ratios["chosen"]
        lines.append(
            f"| {name} | {threads} | {result['plain_ms']:.1f} | {ratios['explainer']:.2f} | {result['allowed']:.2f} | "
            f"{ratios['explain']:.2f} | {result['explain_more_ms']:.2f} | {peer} | {named:.2f} | {chosen:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--first-rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--pictures", type=int, nargs="+", help="measure calls with these numbers of pictures instead")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--profile", choices=list(NETWORKS), help="print a profile of this network's calls instead")
    options = parser.parse_args()
    if options.profile:
        torch.set_num_threads(options.threads[0])
        print(profile(options.profile))
        return
    if options.pictures:
        torch.set_num_threads(options.threads[0])
        print(table_of_batches(options.networks, options.pictures, options.rounds))
        return
    results: dict[str, dict[str, Any]] = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name in options.networks:
            results[f"{name}@{threads}"] = measure(name, options.rounds, options.first_rounds)
            print(f"{name}, {threads} thread(s): {results[f'{name}@{threads}']}", file=sys.stderr, flush=True)
    text = table(results)
    print(text)
    if options.json:
        machine = {"torch": torch.__version__, "processor": platform.processor() or platform.machine()}
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
