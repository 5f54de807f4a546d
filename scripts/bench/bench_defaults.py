"""Measures what the default method costs beside Grad-CAM and expected gradients, in plain passes.

    python -m scripts.bench.bench_defaults --rounds 5 --markdown defaults.md

Each row is a network with seeded random weights and a batch of noise. The calls of a row take turns, so that a slow
moment of the machine affects all. A number is the median over the rounds of the ratio to the round's plain pass. That
pass runs under ``inference_mode`` in the memory format that camkit would choose. ``expected`` compares with 16 pictures
that are passed to it; after the first call, it keeps what the network returns for them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import timm
import torch
import torchvision
from torch import nn

import camkit
from scripts.bench.bench_methods import plain

NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "ResNet-50": lambda: torchvision.models.resnet50(weights=None),
    "MobileNetV2": lambda: torchvision.models.mobilenet_v2(weights=None),
    "ViT-S/16": lambda: timm.create_model("vit_small_patch16_224"),
    "Swin-T": lambda: timm.create_model("swin_tiny_patch4_window7_224"),
}

METHODS = ("gradcam", "auto", "expected")
BATCHES = (1, 4, 16, 64)

_SIDE = 224


def measure(name: str, batch: int, rounds: int, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of a plain pass, and each method's ratio to it."""
    torch.manual_seed(0)
    model = NETWORKS[name]().eval().to(device)
    pictures = torch.randn(batch, 3, _SIDE, _SIDE, device=device)
    calls: dict[str, Callable[[], object]] = {"plain": plain(model, pictures)}
    references = torch.randn(16, 3, _SIDE, _SIDE)
    for method in METHODS:
        explainer = camkit.Explainer(model, method=method, references=references if method == "expected" else None)
        calls[method] = lambda explainer=explainer: explainer.batch(pictures, batch_size=batch)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {call: [] for call in calls}
    for number in range(rounds + 1):
        for call, run in calls.items():
            begin = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:  # the first round is not measured
                seconds[call].append(time.perf_counter() - begin)
    ratios = {
        call: statistics.median(one / base for one, base in zip(seconds[call], seconds["plain"], strict=True))
        for call in METHODS
    }
    return {"plain": 1000 * statistics.median(seconds["plain"]), **ratios}


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    lines = [
        f"| network | pictures | plain pass, ms | {' | '.join(f'`{method}`' for method in METHODS)} |",
        f"|---|---:|---:|{'---:|' * len(METHODS)}",
    ]
    print(*lines, sep="\n")
    for name in options.networks:
        for batch in options.batches:
            found = measure(name, batch, options.rounds, torch.device(options.device))
            numbers = [f"{found['plain']:.0f}", *(f"{found[method]:.2f}" for method in METHODS)]
            lines.append(f"| {name} | {batch} | {' | '.join(numbers)} |")
            print(lines[-1], flush=True)
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
