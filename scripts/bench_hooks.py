"""What watching a training costs: a step with a watch that does not record, and one whose gradients are recorded.

    python scripts/bench_hooks.py --steps 200

Steps with and without are taken in turn, in one process, with one network each of the same weights and the same batch:
what counts are the ratios, as medians over the steps, with the interval of the middle half.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

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
    with (
        tempfile.TemporaryDirectory() as folder,
        TrainingWatch(second, inputs[:2], folder, every=NEVER, pictures_every=0, graph=False) as watch,
    ):
        other()
        watch.step()  # the first is recorded

        def watched() -> None:
            other()
            watch.step()

        told("watched, not recorded", ratios(plain, watched, options.steps))

    def recorded() -> None:
        with record(second, "*", outputs=False, gradients=True, reduce=torch.linalg.vector_norm):
            other()

    told("norms of all layers' gradients recorded", ratios(plain, recorded, options.steps))


if __name__ == "__main__":
    main()
