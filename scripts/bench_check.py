"""What a check costs: its heat part beside plain inference over the same folder, and its estimate beside the truth.

    python scripts/bench_check.py --model resnet50 --pictures 96 --rounds 5

All is measured in one process, in turn, round after round: what counts are the ratios. Plain inference reads, prepares
and classifies the same files, with the same readers ahead of it and in the memory format that camkit takes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision.models import get_model

from camkit.background.cost import estimate_cost
from camkit.background.heat import heat_pass
from camkit.background.journal import Journal
from camkit.background.plan import Plan
from camkit.background.run import finish_check, plan_check
from camkit.background.values import Item
from camkit.demo.scenes import HOME, draw
from camkit.engine.capture import faster_format, quiet_pass
from camkit.engine.streams import in_order
from camkit.images.prepare import prepare
from camkit.models.loaded import LoadedModel

READERS = 2
SIDE = 320


def seeded(name: str) -> LoadedModel:
    """Return a network of torchvision with seeded random weights, and the preprocessing of its published ones."""
    torch.manual_seed(0)
    weights = torchvision.models.get_model_weights(name)
    preset = next(iter(weights)).transforms()
    return LoadedModel(get_model(name, num_classes=len(HOME)).eval(), name, preset, tuple(sorted(HOME)))


def write_scenes(folder: Path, pictures: int) -> Path:
    """Draw labelled scenes with masks."""
    for number in range(pictures):
        annotation = sorted(HOME)[number % len(HOME)]
        scene = draw(np.random.default_rng(number), annotation, HOME[annotation], SIDE)
        for place, pixels, ending in (("pictures", scene.image, "jpg"), ("masks", scene.mask, "png")):
            file = folder / place / annotation / f"{number:05d}.{ending}"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    return folder / "pictures"


def plain(plan: Plan) -> None:
    """Classify the folder, no more."""
    module, preprocess = plan.model.module, plan.model.preprocess
    assert preprocess is not None
    size = plan.settings.check.batch_size

    def read(item: Item) -> torch.Tensor:
        return prepare(item.path, preprocess, item.name).tensor

    tasks = ((functools.partial(read, item), True) for item in plan.data.items)
    prepared = in_order(tasks, workers=READERS, ahead=size)
    batch: list[torch.Tensor] = []
    with quiet_pass(module, torch.device("cpu"), "fp32"):
        for tensor in itertools.chain(prepared, [None]):
            if batch and (tensor is None or len(batch) == size):
                inputs = torch.stack(batch)
                module(inputs.contiguous(memory_format=faster_format(module, inputs, "fp32")))
                batch = []
            if tensor is not None:
                batch.append(tensor)


def silent(stage: str, done: int, of: int) -> None:
    """Say nothing."""


def timed(work: Callable[[], object]) -> float:
    """Return how long something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--pictures", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = write_scenes(Path(folder), options.pictures)
        plan = plan_check(seeded(options.model), data, config={"check": {"pastes": 1}})
        ratios = []
        for number in range(options.rounds + 1):
            first = timed(lambda: plain(plan))
            second = timed(lambda: heat_pass(plan, Journal(None, "", resume=False), silent))
            if number:  # the first round finds the layer and warms up
                ratios.append(second / first)
                print(f"round {number}: plain {first:.1f} s, heat {second:.1f} s, {second / first:.2f}", flush=True)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"heat is {middle:.2f} x plain inference ({low:.2f} to {high:.2f})")
        told = estimate_cost(plan).seconds
        out = Path(folder) / "out"
        taken = timed(lambda: finish_check(plan, out, progress=silent))
        print(f"the check was to take {told:.0f} s and took {taken:.0f} s: {told / taken:.2f}")


if __name__ == "__main__":
    main()
