"""Measure what a Ray cluster of one and of two workers explains, beside one process without Ray.

    python -m scripts.bench.bench_ray --pictures 1600

A local cluster on the loopback device has a head without cores and workers with one core each, so that two workers need
a machine with two idle cores. ResNet-50 takes 50 to 150 ms of one core for a picture. The rate is counted from the
first finished piece to the last, without the start of the actors, which does not grow with the pictures.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray listens on the loopback device only
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")

import numpy as np
import ray
import torch
from PIL import Image
from ray.cluster_utils import Cluster as LocalCluster
from torchvision.models import resnet50
from torchvision.transforms._presets import ImageClassification

from camkit.images.listing import Pictures
from camkit.kit.fingerprint import fingerprint
from camkit.models.loaded import LoadedModel
from camkit.scale.cluster import Cluster, Pool
from camkit.session import explain_many

SIDE = 227
MEMORY = 200 * 2**20
BATCH = 8


def write_pictures(folder: Path, count: int) -> None:
    """Write JPEG files of coarse noise."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        file = folder / f"{number:06d}.jpg"
        if not file.exists():
            coarse = Image.fromarray(generator.integers(0, 256, (16, 16, 3), np.uint8))
            coarse.resize((SIDE, SIDE), Image.Resampling.BILINEAR).save(file, quality=90)


def network(device: str = "cpu") -> LoadedModel:
    """Return ResNet-50 with random weights."""
    torch.manual_seed(0)
    return LoadedModel(resnet50().eval().to(device), "resnet50", ImageClassification(crop_size=224), None)


@contextmanager
def workers(count: int) -> Iterator[None]:
    """Start a cluster, and end it."""
    given = {"object_store_memory": MEMORY, "include_dashboard": False}
    started = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 0, **given})
    try:
        for _ in range(count):
            started.add_node(num_cpus=1, object_store_memory=MEMORY)
        started.wait_for_nodes()
        ray.init(started.address, log_to_driver=False, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
    finally:
        ray.shutdown()
        started.shutdown()


def rate(rows: Iterator[object]) -> float:
    """Return the rows a second after the first one."""
    next(rows)
    started = time.perf_counter()
    count = sum(1 for _ in rows)
    return count / (time.perf_counter() - started)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1600)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "camkit-bench-ray")
    options = parser.parse_args()
    write_pictures(options.folder, options.pictures)
    files = Pictures([options.folder]).first(options.pictures)
    torch.set_num_threads(1)
    alone = rate(explain_many(network(), files[:200], "layer4", batch_size=BATCH, on_error="yield"))
    print(f"one process without Ray: {alone:.2f} pictures a second, {1000 / alone:.0f} ms each", flush=True)
    rates = {}
    for count in (1, 2):
        with workers(count):
            cluster = Cluster(Pool.of_cluster(), network, fingerprint(network()))
            rates[count] = rate(cluster.explain(files, target_layer="layer4", batch_size=BATCH))
        print(f"{count} workers: {rates[count]:.2f} pictures a second", flush=True)
    print(f"2 workers: {rates[2] / rates[1]:.2f} x the rate of one")


if __name__ == "__main__":
    main()
