"""Measure a table of very many small pictures: memory, speed, and what is left after a run was killed again and again.

    python -m scripts.bench.bench_table --pictures 200000 --kills 20 --folder /tmp/many

The network is tiny and the pictures have 32 x 32 pixels, so that listing, reading and the table cost the most. The
resident set is read after 2,000 pictures and at the end. Then the same run is killed at random moments and resumed, and
its table must equal the first one, row for row.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import nn
from torchvision.transforms._presets import ImageClassification

from camkit.images.listing import Pictures
from camkit.models.loaded import LoadedModel
from camkit.scale.folder import explain_files
from camkit.scale.job import How, Job

SIDE = 32
PER_FOLDER = 50_000
EARLY = 2000


def write_pictures(folder: Path, count: int) -> None:
    """Write small JPEG files, 50,000 in a folder."""
    generator = np.random.default_rng(0)
    for number in range(count):
        file = folder / f"{number // PER_FOLDER:03d}" / f"{number:07d}.jpg"
        if number % PER_FOLDER == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), np.uint8))
            coarse.resize((SIDE, SIDE), Image.Resampling.BILINEAR).save(file, quality=80)


def network() -> LoadedModel:
    """Return a tiny network with random weights."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU())
    module = nn.Sequential(trunk, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).eval()
    return LoadedModel(module, "tiny", ImageClassification(crop_size=SIDE, resize_size=SIDE), None)


def resident() -> float:
    """Return the resident set of this process in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def run(folder: Path, table: Path) -> None:
    """Explain the folder into a table, continuing one that exists, and print memory and speed."""
    pa.array([0])  # pyarrow's first array imports pandas where it is installed, which takes memory
    started, count, early = time.perf_counter(), 0, 0.0
    job = Job(Pictures([folder]), how=How(layers=["0"]), table=table, resume=True)
    with explain_files(network(), job) as rows:
        for count, row in enumerate(rows, start=1):
            assert not hasattr(row, "error"), row
            if count == 1:
                print("started", flush=True)
            if count == EARLY:
                early = resident()
    seconds = time.perf_counter() - started
    memory = f"{early:.0f} MiB after {EARLY}, {resident():.0f} MiB at the end"
    print(f"{count} pictures, {count / seconds:.0f} a second; {memory}")


def same_rows(one: Path, other: Path) -> tuple[int, int]:
    """Return how many rows two tables have, after checking that they are the same."""
    tables = [pq.read_table(path) for path in (one, other)]
    assert tables[0].num_rows == tables[1].num_rows, [table.num_rows for table in tables]
    first, second = (table.sort_by("path") for table in tables)
    assert len(set(first.column("path").to_pylist())) == first.num_rows
    for name in first.column_names:
        assert first.column(name).to_pylist() == second.column(name).to_pylist(), name
    return first.num_rows, len(list(other.glob("part-*")))


def main() -> None:
    """Write the pictures, measure one run, and kill another again and again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=200_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    pictures = options.folder / "in"
    if options.run:
        run(pictures, options.run)
        return
    write_pictures(pictures, options.pictures)
    whole, killed = options.folder / "whole.parquet", options.folder / "killed.parquet"
    call = [sys.executable, __file__, "--folder", str(options.folder), "--run"]
    started = time.perf_counter()
    print(subprocess.run([*call, str(whole)], check=True, capture_output=True, text=True).stdout, flush=True)
    usual, chance, kills = time.perf_counter() - started, random.Random(0), 0
    while kills < options.kills:
        with subprocess.Popen([*call, str(killed)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(chance.random() * 1.6 * usual / options.kills)  # the last kill still finds work to do
            if process.poll() is not None:
                break
            kills += 1
            process.send_signal(signal.SIGKILL)
        print(f"killed {kills} times, {len(list(killed.glob('part-*')))} parts", flush=True)
    subprocess.run([*call, str(killed)], check=True)
    rows, parts = same_rows(whole, killed)
    print(f"after {kills} kills, the table has the same {rows} rows, in {parts} parts")


if __name__ == "__main__":
    main()
