"""Run the tests that need a GPU, and compare camkit's speed there with plain inference and with its peers.

    python -m scripts.bench.on_gpu --markdown scripts/results/gpu.md
    python -m scripts.bench.on_gpu --device cpu --models resnet18 --batches 1 4 --seconds 60

It takes about six minutes. First ``pytest -m cuda`` runs. Then all contenders explain each network at each batch size
in turn, in fp32 and, if the device computes in it, in bf16. The script skips a measurement if the slowest one so far
would not fit into the time left, and the page lists what it skipped. It uses no CUDA graphs. Peers that are installed
are measured on convolutional networks.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

import camkit
from scripts.bench.bench_peers import CONTENDERS, PEERS, Case, measure
from scripts.bench.timing import processor, table

IN_ALL, FOR_TESTS = 340.0, 120.0
"""Seconds for everything, which is six minutes less the time to start and to write the page; and for the tests."""

ROUNDS = 5


def tested(seconds: float) -> str:
    """Run the tests that need a GPU, and return pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-n", "0", "tests"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"not finished after {seconds:.0f} s"
    print(done.stdout[-4000:], done.stderr[-2000:], flush=True)
    return done.stdout.strip().rpartition("\n")[2].strip("= ")


def names_for(model: str, bf16: bool) -> list[str]:
    """Return the names of the contenders. A peer takes part if it is installed and the network is not a ViT."""
    peers = [peer for peer, module in PEERS.items() if find_spec(module) and not model.startswith("vit")]
    names = ["plain", "plain-last", "camkit", "auto", "plain-bf16", "bf16", *peers]
    return [name for name in names if bf16 or not CONTENDERS[name].bf16]


def main() -> None:
    """Test, measure until the time is up, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=["resnet50", "vit_b_16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=IN_ALL)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    begin = time.monotonic()
    name, units = processor(given.device)
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "torchvision"))
    peers = ", ".join(f"{peer} {version(peer)}" for peer, module in PEERS.items() if find_spec(module)) or "no peer"
    tests = tested(min(FOR_TESTS, given.seconds / 2))
    rows, missing, slowest = [], [], 0.0
    for batch, model in itertools.product(sorted(given.batches), given.models):
        started = time.monotonic()
        if started - begin + slowest > given.seconds:
            missing.append(f"{model} x {batch}")
            continue
        case = Case(model, batch, 224, given.device, torch.get_num_threads())
        contenders = measure(case, names_for(model, any("bf16" in unit for unit in units)), ROUNDS, ())["contenders"]
        for row in contenders.values():
            rate = 1000 * batch / row["ms"]
            ratios = [f"{row[key]:.2f}" for key in ("time", "low", "high")]
            agree = f"{row['correlation']:.5f}" if "correlation" in row else ""
            rows.append((model, f"{batch}", row["title"], f"{row['ms']:.1f}", f"{rate:.1f}", *ratios, agree))
            print(*rows[-1], sep=" | ", flush=True)
        slowest = max(slowest, time.monotonic() - started)
    heads = ("network", "pictures", "", "ms", "pictures a second", "x plain", "from", "to", "correlation")
    about = f"{datetime.now(UTC):%Y-%m-%d}, {name}: camkit {camkit.__version__}, {versions}, {peers}; {ROUNDS} rounds."
    left = f"\n\nNot measured, for lack of time: {', '.join(missing)}." if missing else ""
    page = f"# On a GPU\n\n{about}\n\n`pytest -m cuda`: {tests}.\n\n{table(heads, rows)}{left}\n"
    print(page)
    if given.markdown:
        given.markdown.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
