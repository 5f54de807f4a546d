"""The demonstration of the check: run the background check on both demo networks, with freshly drawn scenes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from camkit.background.check import CheckResult
from camkit.background.run import check
from camkit.background.values import Progress
from camkit.demo.scenes import HOME, INPUT_SIZE, THINGS, draw
from camkit.models import DEMO_MODELS

PER_CLASS = 40
"""Scenes per class: a few more than the 30 that the check needs by default."""

_SEED = 11

_CONFIG = {"check": {"pastes": 1}}
"""One background of either kind per picture instead of two, to save time."""


def write_scenes(folder: Path, per_class: int = PER_CLASS) -> Path:
    """Draw scenes with every object on its usual background, and write them as one folder per class, with masks.

    Returns:
        The folder of the pictures. The masks lie in a folder beside it.
    """
    for number, thing in enumerate(THINGS):
        for count in range(per_class):
            scene = draw(np.random.default_rng([_SEED, number, count]), thing, HOME[thing], INPUT_SIZE)
            for kind, pixels in (("pictures", scene.image), ("masks", scene.mask)):
                file = folder / kind / thing / f"{count:03d}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
    return folder / "pictures"


def run(out: Path, progress: Callable[[str], Progress]) -> dict[str, CheckResult]:
    """Check both networks on the same drawn scenes, and write a report for each.

    Args:
        out: the folder for the reports; each network gets a folder of its own in it.
        progress: returns the progress callback for a network's check, given the network's name.
    """
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        pictures = write_scenes(Path(folder))
        for name in DEMO_MODELS:
            results[name] = check(name, pictures, out=out / name, config=_CONFIG, progress=progress(name))
    return results
