"""Measures what it costs to watch a training: steps that the watch only counts, and steps that are recorded.

    python -m scripts.bench.bench_hooks --steps 200

Plain and watched steps alternate in one process, on two networks with the same weights and the same batch. The results
are ratios: the median over the pairs of steps, and the interval of the middle half.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torchvision.models import resnet18

from camkit.hooks import record
from camkit.tensorboard import TrainingWatch

NEVER = 1_000_000
"""More steps than any run here has."""

WARM_UP = 3
"""Pairs of steps before the first that counts."""


def network() -> nn.Module:
    """Return a seeded ResNet-18 with ten classes, in training mode."""
    torch.manual_seed(0)
    net: nn.Module = resnet18(num_classes=10)
    return net.train()


def stepping(net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """Return a function that takes one training step."""
    optimiser = torch.optim.SGD(net.parameters(), 1e-3)

    def step() -> None:
        optimiser.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(net(inputs), labels))
        optimiser.step()

    return step


def ratios(plain: Callable[[], None], other: Callable[[], None], steps: int) -> list[float]:
    """Return the time of the second step divided by that of the first, pair by pair, in alternating order."""
    ratio_by_pair = []
    for number in range(steps + WARM_UP):
        order = (plain, other) if number % 2 == 0 else (other, plain)
        seconds = {}
        for work in order:
            start = time.perf_counter()
            work()
            seconds[work] = time.perf_counter() - start
        if number >= WARM_UP:
            ratio_by_pair.append(seconds[other] / seconds[plain])
    return ratio_by_pair


def report(name: str, values: list[float]) -> None:
    """Print the median and the interval of the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    print(f"{name}: {middle:.3f} x a plain step ({low:.3f} to {high:.3f}, {len(values)} pairs)", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--side", type=int, default=96)
    options = parser.parse_args()
    inputs = torch.randn(options.batch, 3, options.side, options.side)
    labels = torch.randint(0, 10, (options.batch,))
    first, second = network(), network()
    plain, other = stepping(first, inputs, labels), stepping(second, inputs, labels)
    report("two plain steps", ratios(plain, other, options.steps))
    with watching(second, inputs, every=NEVER) as watch:
        other()
        watch.step()  # the first step is always recorded
        report("watched, not recorded", ratios(plain, watched(other, watch), options.steps))
    norms = recorded(other, second, torch.linalg.vector_norm)
    report("norms of all layers' gradients recorded", ratios(plain, norms, options.steps))
    report(
        "their mean, deviation, range and norm", ratios(plain, recorded(other, second, five_statistics), options.steps)
    )
    with watching(second, inputs, every=1) as watch:
        report("watched and recorded, with all histograms", ratios(plain, watched(other, watch), options.steps))


@contextmanager
def watching(net: nn.Module, inputs: torch.Tensor, every: int) -> Iterator[TrainingWatch]:
    """Watch a network without drawing pictures, with events in a temporary folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        TrainingWatch(net, inputs[:2], folder, every=every, pictures_every=0, graph=False) as watch,
    ):
        yield watch


def watched(step: Callable[[], None], watch: TrainingWatch) -> Callable[[], None]:
    """Return a step that the watch counts."""

    def both() -> None:
        step()
        watch.step()

    return both


def recorded(
    step: Callable[[], None], net: nn.Module, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], None]:
    """Return a step that records a statistic of the gradient of every layer's output."""

    def both() -> None:
        with record(net, "*", outputs=False, gradients=True, reduce=reduce):
            step()

    return both


def five_statistics(gradient: torch.Tensor) -> torch.Tensor:
    """Return the mean, standard deviation, smallest value, largest value and norm of a gradient."""
    mean, norm = gradient.mean(), torch.linalg.vector_norm(gradient)  # several times faster than torch.std_mean
    deviation = (norm.square() / gradient.numel() - mean.square()).clamp(min=0).sqrt()
    return torch.stack([mean, deviation, *gradient.aminmax(), norm])


if __name__ == "__main__":
    main()
