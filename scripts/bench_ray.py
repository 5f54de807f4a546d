"""Measure what a Ray cluster of one and of two workers explains, and what scheduling a batch costs.

    python scripts/bench_ray.py --pictures 1600

A local cluster on the loopback device has a head without cores and workers with one core each, so that two workers need
a machine with two idle cores. The network takes at least 50 ms a picture. The rate is counted from the first finished
block to the last, without the start of Ray and of the actors, which does not grow with the pictures; the time of a
whole job with its table is printed beside it.

The cost of scheduling is the time of a job of very many blocks of one picture that an actor passes on as they are,
divided by the blocks. From it and from the other steps follows what 10^9 pictures take on 1,000 nodes; see
scripts/results/cluster.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray listens on the loopback device only
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from PIL import Image
from ray.cluster_utils import Cluster
from torchvision.models import resnet50
from torchvision.transforms._presets import ImageClassification

from camkit.images.listing import Pictures
from camkit.images.read import open_picture
from camkit.models.loaded import LoadedModel
from camkit.scale.actors import ModelSource, Pool
from camkit.scale.cluster import explain_on_cluster, prepared_job
from camkit.scale.folder import Drawing, explain_files
from camkit.scale.table import Finished, key_of

SIDE = 227
MEMORY = 200 * 2**20


def write_pictures(folder: Path, count: int) -> None:
    """Write JPEG files of coarse noise."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        file = folder / f"{number:06d}.jpg"
        if not file.exists():
            coarse = Image.fromarray(generator.integers(0, 256, (16, 16, 3), np.uint8))
            coarse.resize((SIDE, SIDE), Image.Resampling.BILINEAR).save(file, quality=90)


def network() -> LoadedModel:
    """Return ResNet-50 with random weights, which takes 50 to 100 ms of one core for a map."""
    torch.manual_seed(0)
    return LoadedModel(resnet50().eval(), "resnet50", ImageClassification(crop_size=224), None)


@contextmanager
def cluster(workers: int) -> Iterator[None]:
    """Start a cluster, and end it."""
    given = {"object_store_memory": MEMORY, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **given})
    try:
        for _ in range(workers):
            started.add_node(num_cpus=1, object_store_memory=MEMORY)
        started.wait_for_nodes()
        ray.init(started.address, log_to_driver=False, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
    finally:
        ray.shutdown()
        started.shutdown()


def alone(folder: Path, count: int) -> float:
    """Return the pictures a second of one process with one thread, without Ray."""
    torch.set_num_threads(1)
    pictures = Pictures([folder]).first(count)
    with tempfile.TemporaryDirectory() as out:
        options: dict[str, Any] = {"layers": ["layer4"], "batch_size": 8, "table": Path(out) / "table.parquet"}
        run = explain_files(network(), pictures, None, Drawing(), **options)
        next(run)
        started = time.perf_counter()
        explained = sum(1 for _ in run)
        return explained / (time.perf_counter() - started)


def scaled(workers: int, folder: Path) -> tuple[float, float]:
    """Return the pictures a second between the first and the last block, and the seconds of the whole job."""
    with cluster(workers):
        job = prepared_job(ModelSource(network()), "layer4", batch_size=8)
        pool = Pool.of_cluster(None, 1.0, None)
        with tempfile.TemporaryDirectory() as out:
            started = time.perf_counter()
            done = explain_on_cluster(job, Pictures([folder]), Path(out) / "table", pool)
            whole = time.perf_counter() - started
            paths = pq.read_table(Path(out) / "table", columns=["path"]).column("path").to_pylist()
        assert done.failed == 0
        assert len(paths) == len(set(paths)) == done.explained
        dataset = ray.data.from_arrow([pa.table({"path": part}) for part in _parts(list(set(paths)), 16)])
        return steady_rate(job.explained(dataset, pool, Finished([]))), whole


def _parts(items: list[str], size: int) -> list[list[str]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def steady_rate(rows: Any) -> float:
    """Return the rows a second after the first block, without the start of the actors."""
    stamps: list[tuple[float, int]] = []
    for batch in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
        stamps.append((time.perf_counter(), batch.num_rows))
    return sum(count for _, count in stamps[1:]) / (stamps[-1][0] - stamps[0][0])


class Nothing:
    """Takes the place of the model where only the scheduling is measured."""

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the batch."""
        return batch


def per_block(blocks: int) -> tuple[float, float]:
    """Return the seconds that a block takes if its actor does nothing, and those that the driver computes for it."""
    with cluster(1):
        tables = [pa.table({"path": [f"/photos/{number:09d}.jpg"]}) for number in range(blocks)]
        rows = ray.data.from_arrow(tables).map_batches(
            Nothing, compute=ray.data.ActorPoolStrategy(size=1), batch_size=1, num_cpus=1
        )
        computed = time.process_time()
        rate = steady_rate(rows)
        return 1 / rate, (time.process_time() - computed) / blocks


def per_picture(folder: Path, count: int) -> dict[str, float]:
    """Return the seconds of one core that the other steps take for a picture; waiting for the disk does not count."""
    files = Pictures([folder]).first(count)
    steps: dict[str, Any] = {
        "reading and decoding": open_picture,
        "reading and checksum": lambda file: hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest(),
        "key of a finished picture": lambda file: key_of(str(file), "0" * 32),
    }
    seconds = {}
    for name, step in steps.items():
        started = time.process_time()
        for file in files:
            step(file)
        seconds[name] = (time.process_time() - started) / len(files)
    started = time.process_time()
    listed = sum(1 for _ in Pictures([folder]))
    seconds["listing"] = (time.process_time() - started) / listed
    names = [key_of(f"/photos/{number:09d}.jpg", "0" * 32) for number in range(200_000)]
    started = time.process_time()
    Finished(names)
    seconds["manifest"] = (time.process_time() - started) / len(names)
    return seconds


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1600)
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "camkit-bench-ray")
    parser.add_argument("--only", choices=["workers", "scheduling"])
    options = parser.parse_args()
    write_pictures(options.folder, options.pictures)
    if options.only != "scheduling":
        rate = alone(options.folder, min(options.pictures, 200))
        print(f"one process without Ray: {rate:.2f} pictures a second, {1000 / rate:.0f} ms each", flush=True)
        rates = {}
        for workers in (1, 2):
            rates[workers], seconds = scaled(workers, options.folder)
            print(f"{workers} workers: {rates[workers]:.2f} pictures a second; {seconds:.0f} s in all", flush=True)
        print(f"2 workers: {rates[2] / rates[1]:.2f} x the rate of one", flush=True)
    if options.only != "workers":
        whole, computed = per_block(options.blocks)
        print(f"scheduling a block: {whole * 1000:.2f} ms, {computed * 1000:.2f} ms of them computed by the driver")
        for name, seconds in per_picture(options.folder, min(options.pictures, 500)).items():
            print(f"{name}: {seconds * 1e6:.1f} us a picture")


if __name__ == "__main__":
    main()
