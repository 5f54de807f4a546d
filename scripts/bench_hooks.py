"""What watching a training costs: a step with a watch that does not record, and steps that are recorded.

    python scripts/bench_hooks.py --steps 200

Steps with and without are taken in turn, in one process, with one network each of the same weights and the same batch:
what counts are the ratios, as medians over the steps, with the interval of the middle half.
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


def network() -> nn.Module:
    """Return a seeded ResNet-18 of ten classes, in training."""
    torch.manual_seed(0)
    net: nn.Module = resnet18(num_classes=10)
    return net.train()


def stepping(net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """Return what takes one step of a training."""
    optimiser = torch.optim.SGD(net.parameters(), 1e-3)

    def step() -> None:
        optimiser.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(net(inputs), labels))
        optimiser.step()

    return step


def ratios(plain: Callable[[], None], other: Callable[[], None], steps: int) -> list[float]:
    """Return the time of the second over that of the first, pair by pair, the first of a pair in turn."""
    found = []
    for number in range(steps + 3):
        order = (plain, other) if number % 2 == 0 else (other, plain)
        taken = {}
        for work in order:
            start = time.perf_counter()
            work()
            taken[work] = time.perf_counter() - start
        if number >= 3:  # the first warm up
            found.append(taken[other] / taken[plain])
    return found


def told(name: str, found: list[float]) -> None:
    """Print a median with its middle half."""
    low, middle, high = statistics.quantiles(found, n=4)
    print(f"{name}: {middle:.3f} x a plain step ({low:.3f} to {high:.3f}, {len(found)} pairs)", flush=True)


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
    told("two plain steps", ratios(plain, other, options.steps))
    with watching(second, inputs, every=NEVER) as watch:
        other()
        watch.step()  # the first is recorded
        told("watched, not recorded", ratios(plain, watched(other, watch), options.steps))
    norms = recorded(other, second, torch.linalg.vector_norm)
    told("norms of all layers' gradients recorded", ratios(plain, norms, options.steps))
    told("their mean, deviation, range and norm", ratios(plain, recorded(other, second, five), options.steps))
    with watching(second, inputs, every=1) as watch:
        told("watched and recorded, with all histograms", ratios(plain, watched(other, watch), options.steps))


@contextmanager
def watching(net: nn.Module, inputs: torch.Tensor, every: int) -> Iterator[TrainingWatch]:
    """Watch a network without pictures, with events that are thrown away."""
    with (
        tempfile.TemporaryDirectory() as folder,
        TrainingWatch(net, inputs[:2], folder, every=every, pictures_every=0, graph=False) as watch,
    ):
        yield watch


def watched(step: Callable[[], None], watch: TrainingWatch) -> Callable[[], None]:
    """Return a step that the watch takes note of."""

    def both() -> None:
        step()
        watch.step()

    return both


def recorded(
    step: Callable[[], None], net: nn.Module, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], None]:
    """Return a step of which a statistic of the gradient of every layer's output is kept."""

    def both() -> None:
        with record(net, "*", outputs=False, gradients=True, reduce=reduce):
            step()

    return both


def five(gradient: torch.Tensor) -> torch.Tensor:
    """Return the mean, deviation, least, greatest and norm of a gradient, one after the other."""
    mean, norm = gradient.mean(), torch.linalg.vector_norm(gradient)  # several times as fast as torch.std_mean
    deviation = (norm.square() / gradient.numel() - mean.square()).clamp(min=0).sqrt()
    return torch.stack([mean, deviation, *gradient.aminmax(), norm])


if __name__ == "__main__":
    main()
