"""Measure what a check costs beside plain inference: its heat, and the whole.

    python -m scripts.bench.bench_check --model resnet50 --pictures 96 --rounds 5

Both run in one process, in alternating rounds, because only their ratio counts. Plain inference reads, preprocesses and
classifies the same files, with as many reader threads and in the memory format that camkit uses.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision.models import get_model

from camkit.background.check import finish_check, plan_check
from camkit.background.data import Item
from camkit.background.experiment import heat_rows
from camkit.background.plan import Plan
from camkit.engine.passes import faster_format, quiet_pass
from camkit.engine.streams import Task, in_order
from camkit.images.prepare import prepare
from camkit.models.loaded import LoadedModel
from scripts.bench.timing import quartiles, ready, take_turns
from scripts.demo.drawn_scenes import HOME, draw

READERS = 2
SIDE = 320


def seeded(name: str) -> LoadedModel:
    """Return a torchvision network with random weights from a fixed seed, and its usual preprocessing."""
    torch.manual_seed(0)
    weights = torchvision.models.get_model_weights(name)
    preset = next(iter(weights)).transforms()
    return LoadedModel(get_model(name, num_classes=len(HOME)).eval(), name, preset, tuple(sorted(HOME)))


def write_scenes(folder: Path, pictures: int) -> Path:
    """Draw labelled scenes with masks; return the folder of pictures."""
    for number in range(pictures):
        label = sorted(HOME)[number % len(HOME)]
        scene = draw(np.random.default_rng(number), label, HOME[label], SIDE)
        for kind, pixels, extension in (("pictures", scene.image, "jpg"), ("masks", scene.mask, "png")):
            file = folder / kind / label / f"{number:05d}.{extension}"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    return folder / "pictures"


def classify(plan: Plan) -> None:
    """Classify the folder and do nothing else."""
    module, preprocess = plan.model.module, plan.model.preprocess
    assert preprocess is not None

    def read(item: Item) -> torch.Tensor:
        return prepare(item.open(), preprocess, item.name).tensor

    tasks = (Task(functools.partial(read, item), in_thread=True) for item in plan.data.items)
    prepared = in_order(tasks, workers=READERS, ahead=plan.batch_size)
    batch: list[torch.Tensor] = []
    with quiet_pass(module, torch.device("cpu"), "fp32"):
        for tensor in itertools.chain(prepared, [None]):
            if batch and (tensor is None or len(batch) == plan.batch_size):
                inputs = torch.stack(batch)
                module(inputs.contiguous(memory_format=faster_format(module, inputs, "fp32", plan.memory.record)))
                batch = []
            if tensor is not None:
                batch.append(tensor)


def silent(stage: str, done: int, of: int) -> None:
    """Report no progress."""


def main() -> None:
    """Run the rounds and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--pictures", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = write_scenes(Path(folder), options.pictures)
        config = {"check": {"pastes": 1}, "run": {"out": Path(folder) / "out"}}
        plan = plan_check(seeded(options.model), data, config=config)
        runs = {
            "plain": ready(lambda: classify(plan)),
            "heat": ready(lambda: list(heat_rows(plan, plan.data.items))),
        }
        seconds = take_turns(runs, options.rounds, warm_ups=1)
        low, middle, high = quartiles(seconds["heat"], seconds["plain"])
        print(f"the heat takes {middle:.2f} x plain inference ({low:.2f} to {high:.2f})")
        started = time.perf_counter()
        finish_check(plan, progress=silent)
        taken, plain = time.perf_counter() - started, statistics.median(seconds["plain"])
        print(f"the check takes {taken / plain:.1f} x plain inference")


if __name__ == "__main__":
    main()
