"""Folders of pictures: writes them, and explains them as the command does."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from camkit.images.listing import Pictures
from camkit.models import LoadedModel
from camkit.options import Explain, Results
from camkit.scale.folder import Run
from camkit.scale.job import Job


def run_folder(model: LoadedModel, pictures: Iterable[Path], out: Path | None, **options: Any) -> Run:
    """Explain pictures, and draw overlays of their size; each option is one of the command, or ``target``."""
    files, target = Pictures(pictures, skip=out), options.pop("target", None)
    names = {field.name for field in dataclasses.fields(Results)}
    results = {name: options.pop(name) for name in options.keys() & names}
    how = {"style": "overlay", "max_side": 0, **({} if out is None else {"out": out}), **options}
    return Run(model, Job(files, Explain(**how), Results(no_pictures=out is None, **results), target))


def write_pictures(folder: Path, count: int, side: int = 24, suffix: str = "png") -> list[Path]:
    """Write noise as pictures, 20 into each of the folders 000, 001 and so on."""
    generator = np.random.default_rng(0)
    files = [folder / f"{number // 20:03d}" / f"{number:05d}.{suffix}" for number in range(count)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (side, side + 4, 3), np.uint8)).save(file)
    return files


def write_masked(folder: Path, name: str, pixels: Any, inside: Any) -> Path:
    """Write a picture below ``pictures`` and the mask of its object below ``masks``; return the folder of pictures."""
    for kind, values in (("pictures", pixels), ("masks", np.where(inside, 255, 0))):
        file = folder / kind / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(values).astype(np.uint8)).save(file)
    return folder / "pictures"
