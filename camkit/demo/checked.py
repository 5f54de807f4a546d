"""The check's demonstration: both demo networks, asked about scenes drawn on the spot."""

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
_SEED = 11


def write_scenes(folder: Path, per_class: int = PER_CLASS) -> Path:
    """Draw scenes, every object on its usual background, as a user keeps them: a folder per class, and masks.

    Returns:
        The pictures' folder.
    """
    for number, thing in enumerate(THINGS):
        for count in range(per_class):
            scene = draw(np.random.default_rng([_SEED, number, count]), thing, HOME[thing], INPUT_SIZE)
            for place, pixels in (("pictures", scene.image), ("masks", scene.mask)):
                file = folder / place / thing / f"{count:03d}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
    return folder / "pictures"


def run(out: Path, progress: Callable[[str], Progress]) -> dict[str, CheckResult]:
    """Check both networks on the same drawn scenes, and write a report for each.

    Args:
        out: the folder of the reports; each network has its own below it.
        progress: from a network's name to what is told how far its check is.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        pictures = write_scenes(Path(folder))
        for name in DEMO_MODELS:
            found[name] = check(name, pictures, out=out / name, config=_CONFIG, progress=progress(name))
    return found


_CONFIG = {"check": {"pastes": 1}}
