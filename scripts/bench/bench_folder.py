"""Measure what explaining a folder costs, beside the best plain code for the same pictures with the same libraries.

    python -m scripts.bench.bench_folder --rounds 3 --markdown folder.md

Large photos: decode, classify and encode each as JPEG, against explaining and drawing them. Small pictures: decode and
classify, against explaining them. Every measurement runs in a fresh process, in alternating rounds; "x plain" is the
ratio to the fastest plain code of the same round. Extra memory is the peak of the resident set beyond what the process
held after it had loaded the network and run it on one small picture. The network has random weights: the cost does not
depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor

from camkit.images.listing import Pictures
from camkit.models.loaded import LoadedModel
from camkit.options import Explain, Results
from camkit.scale.folder import Run
from camkit.scale.job import Job
from camkit.types import Preprocess
from scripts.bench.timing import processor, reset_peak, resident

LARGE, SMALL = (4000, 3000), (227, 227)
QUALITY = 90
THREADS = os.cpu_count() or 1
OCTAVES = ((8, 60), (32, 40), (125, 25), (500, 12), (2000, 7), (4000, 3))
"""The cells across the picture and the strength of each octave of noise: its JPEG is as large as that of a photo."""

Files = list[Path]


def write_photos(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Draw pictures with as much detail as photos."""
    width, height = size
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        generator, pixels = np.random.default_rng(number), np.full((height, width, 3), 120, np.float32)
        for cells, strength in ((min(cells, width), strength) for cells, strength in OCTAVES):
            noise = generator.normal(0, strength, (max(2, height * cells // width), cells, 3)).astype(np.float32)
            pixels += cv2.resize(noise, size, interpolation=cv2.INTER_CUBIC)
        drawn = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        drawn.save(folder / f"{number:05d}.jpg", quality=92)


class Classifier(Protocol):
    """A network with its preprocessing."""

    @property
    def preprocess(self) -> Preprocess:
        """What makes a picture the network's input."""

    def classify(self, inputs: list[Tensor], /) -> list[int]:
        """Return the best class of each input."""


class Network:
    """MobileNetV2 with its usual preprocessing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = torchvision.models.mobilenet_v2().eval().to(memory_format=torch.channels_last)
        self.preprocess = torchvision.models.MobileNet_V2_Weights.DEFAULT.transforms()
        self.loaded = LoadedModel(self.module, "mobilenet_v2", self.preprocess, None)

    def classify(self, inputs: list[Tensor]) -> list[int]:
        """Return the best class of each input."""
        with torch.inference_mode():
            batch = torch.stack(inputs).contiguous(memory_format=torch.channels_last)
            classes: list[int] = self.module(batch).argmax(1).tolist()
            return classes


def plain_each(network: Network, files: Files, out: Path | None, side: int | None = None) -> None:
    """Let each thread do everything for one picture at a time, the network included."""
    torch.set_num_threads(1)

    def work(file: Path) -> None:
        with Image.open(file) as picture:
            picture.load()
        network.classify([network.preprocess(picture)])
        save(picture, out, file, side)

    with ThreadPoolExecutor(THREADS) as pool:
        deque(pool.map(work, files), maxlen=0)


def plain_batches(network: Classifier, files: Files, out: Path | None, side: int | None = None, *, batch: int) -> None:
    """Decode and encode in threads, and classify batches in between."""

    def read(file: Path) -> tuple[Image.Image, Tensor]:
        with Image.open(file) as picture:
            picture.load()
        return picture, network.preprocess(picture)

    with ThreadPoolExecutor(THREADS) as readers, ThreadPoolExecutor(THREADS) as writers:
        coming: deque[tuple[Path, Future[Any]]] = deque()
        writing: deque[Future[None]] = deque()
        names = iter(files)
        while True:
            for file in names:
                coming.append((file, readers.submit(read, file)))
                if len(coming) >= 2 * batch:
                    break
            if not coming:
                break
            ready = [
                (file, *future.result()) for file, future in (coming.popleft() for _ in range(min(batch, len(coming))))
            ]
            network.classify([tensor for _, _, tensor in ready])
            for file, picture, _ in ready:
                writing.append(writers.submit(save, picture, out, file, side))
            while len(writing) > 2 * batch:
                writing.popleft().result()
        for future in writing:
            future.result()


def save(picture: Image.Image, out: Path | None, file: Path, side: int | None) -> None:
    """Encode a picture as JPEG, reduced to a longer side; do nothing without a folder."""
    if out is None:
        return
    if side is not None:
        picture.thumbnail((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)
    picture.save(out / file.name, quality=QUALITY)


def camkit_run(network: Network, folder: Path, out: Path | None, how: Explain, table: Path | None = None) -> None:
    """Explain a folder."""
    how = replace(how, out=out or how.out)
    job = Job(Pictures([folder], skip=out), how, Results(table=table, no_pictures=out is None))
    for row in Run(network.loaded, job):
        assert not hasattr(row, "error"), row


def variants(task: str, folder: Path, out: Path) -> dict[str, Callable[[Network], None]]:
    """Return each variant for large or for small pictures, with the plain ones first."""
    files = sorted(folder.glob("*.jpg"))
    table = out / "results.parquet"
    full, reduced = (Explain(style="overlay", max_side=side) for side in (0, 2048))
    figure, draft = Explain(max_side=0), replace(reduced, draft=True)
    if task == "small":
        return {
            "plain, a thread for each picture": lambda network: plain_each(network, files, None),
            "plain, batches of 32": lambda network: plain_batches(network, files, None, batch=32),
            "camkit, table alone": lambda network: camkit_run(network, folder, None, full, table),
            "camkit, overlay and table": lambda network: camkit_run(network, folder, out, full, table),
            "camkit, figure": lambda network: camkit_run(network, folder, out, figure),
        }
    return {
        "plain, JPEG, a thread for each picture": lambda network: plain_each(network, files, out),
        "plain, JPEG, batches of 2": lambda network: plain_batches(network, files, out, batch=2),
        "camkit, overlay": lambda network: camkit_run(network, folder, out, full),
        "plain, JPEG of 2048": lambda network: plain_each(network, files, out, 2048),
        "camkit, overlay, max side 2048": lambda network: camkit_run(network, folder, out, reduced),
        "camkit, overlay, max side 2048, draft": lambda network: camkit_run(network, folder, out, draft),
        "camkit, figure": lambda network: camkit_run(network, folder, out, figure),
        "camkit, table alone": lambda network: camkit_run(network, folder, None, full, table),
        "camkit, table alone, draft": lambda network: camkit_run(network, folder, None, draft, table),
    }


TASKS = ("large", "small")
PLAIN = 2
"""The first variants of a task: the fastest of them in the same round is what all are divided by."""


def measure(task: str, name: str, folder: Path) -> dict[str, float]:
    """Run one variant in this process."""
    network = Network()
    with tempfile.TemporaryDirectory() as scratch:
        write_photos(Path(scratch, "one"), 1, SMALL)
        warm_up, out = variants(task, Path(scratch, "one"), Path(scratch, "warm")), Path(scratch, "out")
        for place in (out, Path(scratch, "warm")):
            place.mkdir()
        warm_up[name](network)
        before = resident("VmRSS")
        reset_peak()
        started, worked = time.perf_counter(), time.process_time()
        variants(task, folder, out)[name](network)
        seconds, worked = time.perf_counter() - started, time.process_time() - worked
        return {"seconds": seconds, "cpu": worked, "extra": (resident("VmHWM") - before) / 2**20}


def in_fresh_process(task: str, name: str, folder: Path) -> dict[str, float]:
    """Run one variant in a process of its own."""
    call = [
        sys.executable,
        "-m",
        "scripts.bench.bench_folder",
        "--tasks",
        task,
        "--measure",
        name,
        "--folder",
        str(folder),
    ]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def table_of(task: str, rounds: list[dict[str, dict[str, float]]], count: int) -> Iterator[str]:
    """Return the lines of a table."""
    width, height = LARGE if task == "large" else SMALL
    yield f"### {count} pictures of {width} x {height}"
    yield ""
    yield "| | seconds | pictures a second | CPU, ms a picture | x plain | extra MiB |"
    yield "|---|---:|---:|---:|---:|---:|"
    names = list(rounds[0])
    for name in names:
        seconds = statistics.median(run[name]["seconds"] for run in rounds)
        worked = statistics.median(run[name]["cpu"] for run in rounds) / count * 1000
        ratio = statistics.median(
            run[name]["seconds"] / min(run[plain]["seconds"] for plain in names[:PLAIN]) for run in rounds
        )
        extra = max(run[name]["extra"] for run in rounds)
        yield f"| {name} | {seconds:.2f} | {count / seconds:.1f} | {worked:.0f} | {ratio:.2f} | {extra:.0f} |"
    yield ""


def main() -> None:
    """Run the measurements and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=24)
    parser.add_argument("--small", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "camkit-bench"))
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.tasks[0], options.measure, options.folder)))
        return
    lines = [f"{processor('cpu')[0]}, {THREADS} cores, torch {torch.__version__}", ""]
    for task in options.tasks:
        count, size = (options.photos, LARGE) if task == "large" else (options.small, SMALL)
        folder = options.folder / f"{task}-{count}"
        if len(list(folder.glob("*.jpg"))) != count:
            write_photos(folder, count, size)
        rounds = []
        for number in range(options.rounds):
            names = variants(task, folder, folder)
            rounds.append({name: in_fresh_process(task, name, folder) for name in names})
            print(f"{task}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        lines += table_of(task, rounds, count)
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
