"""Measures what methods cost, as ratios to a plain pass in the same run, on one thread.

    python -m scripts.bench.bench_head_methods --rounds 9 --markdown methods.md

Each row is one claim. In a round, everything a row needs runs once, in random order; a ratio is the median of the
rounds' ratios. The networks have random weights, since the cost does not depend on them. grad-cam's Ablation-CAM takes
minutes, so it runs ``--peer-rounds`` times, each beside one run of camkit's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import camkit

Run = Callable[[], object]

_WARM_UP = 2
"""Unmeasured rounds: the first call chooses memory and layouts."""


@dataclass(frozen=True)
class Row:
    """One claim: what is measured, against what, and the goal for the ratio of the two.

    Attributes:
        name: the claim's left side.
        against: what it is divided by.
        goal: the goal in words.
        work, base: what is timed.
        rounds: True for many rounds; False for a peer's few.
    """

    name: str
    against: str
    goal: str
    work: Run
    base: Run
    rounds: bool = True


@cache
def network(name: str) -> nn.Module:
    """Return a seeded network in evaluation mode."""
    torch.manual_seed(0)
    net: nn.Module = torchvision.models.get_model(name).eval()
    return net.requires_grad_(requires_grad=False)


@cache
def picture() -> Tensor:
    """Return one picture of 224 x 224."""
    return torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def plain(name: str) -> Run:
    """Return a plain pass of one picture."""
    net = network(name)

    def run() -> Tensor:
        with torch.inference_mode():
            scores: Tensor = net(picture())
        return scores

    return run


def explained(name: str, layer: str, method: str) -> Run:
    """Return one call of an Explainer with a named layer."""
    explainer = camkit.Explainer(network(name), layer, method=method)
    return partial(explainer, picture(), 0)


def grad_cams_ablation(name: str, layer: str) -> Run:
    """Return grad-cam's Ablation-CAM with its own batch size."""
    from pytorch_grad_cam import AblationCAM  # noqa: PLC0415 - optional
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget  # noqa: PLC0415 - as above

    net = network(name)

    def run() -> object:
        with contextlib.redirect_stderr(io.StringIO()), AblationCAM(net, [net.get_submodule(layer)]) as cam:
            return cam(picture(), [ClassifierOutputTarget(0)])

    return run


def rows() -> list[Row]:
    """Return the claims."""
    ablation = explained("resnet18", "layer4", "ablationcam")
    return [
        Row("Ablation-CAM, ResNet-18, all 512 channels", "a plain pass", "at most 3", ablation, plain("resnet18")),
        Row(
            "Recipro-CAM, ResNet-18, all 49 cells",
            "a plain pass",
            "at most 1.5",
            explained("resnet18", "layer4", "reciprocam"),
            plain("resnet18"),
        ),
        Row(
            "grad-cam's Ablation-CAM, ResNet-18",
            "camkit's",
            "at least 100",
            grad_cams_ablation("resnet18", "layer4"),
            ablation,
            rounds=False,
        ),
    ]


def timed(work: Run) -> float:
    """Return the seconds that a run takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(row: Row, rounds: int) -> tuple[float, float, float]:
    """Return the median ratio, and the median milliseconds of both sides."""
    runs = [row.work, row.base]
    for work in runs * (_WARM_UP if row.rounds else 0):
        work()
    seconds: list[tuple[float, float]] = []
    order = [0, 1]
    for _ in range(rounds):
        random.shuffle(order)
        found = {number: timed(runs[number]) for number in order}
        seconds.append((found[0], found[1]))
    ratio = statistics.median(first / second for first, second in seconds)
    return ratio, *(1e3 * statistics.median(column) for column in zip(*seconds, strict=True))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peer-rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    lines = ["| | divided by | ratio | goal | ms | by ms |", "|---|---|---:|---|---:|---:|"]
    for row in rows():
        if options.only not in row.name:
            continue
        ratio, work, base = measure(row, options.rounds if row.rounds else options.peer_rounds)
        lines.append(f"| {row.name} | {row.against} | {ratio:.2f} | {row.goal} | {work:.1f} | {base:.1f} |")
        print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
