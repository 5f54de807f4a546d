"""Drawn scenes and two small networks, so that you can try camkit without a download."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from camkit.models.scene_net import INPUT_SIZE, LABELS, SceneNet, load_scene_net, preprocess

__all__ = [
    "INPUT_SIZE",
    "LABELS",
    "SceneNet",
    "labelled_scenes",
    "load_scene_net",
    "preprocess",
    "scene_mask",
    "scene_paths",
    "words_model",
    "words_pictures",
    "write_scenes",
]


def scene_paths() -> dict[str, Path]:
    """Return the pictures that ship with camkit, by name: the object, then its background, as in ``"plane-sky"``."""
    return {path.stem: path for path in sorted(_shipped().glob("*.jpg"))}


def scene_mask(name: str) -> NDArray[np.bool_]:
    """Return the object's region in one of these pictures, bool (H, W)."""
    path = scene_paths()[name].with_name(f"{name}-mask.png")
    with Image.open(path) as mask:
        return np.asarray(mask.convert("1"))


def labelled_scenes() -> Path:
    """Return a folder to check: 40 pictures per class, every object on its usual background.

    The objects' masks are in the folder ``masks`` beside it.

        >>> import camkit
        >>> sorted(folder.name for folder in camkit.scenes.labelled_scenes().iterdir())
        ['bird', 'car', 'plane', 'ship']
    """
    return _shipped() / "labelled" / "pictures"


def words_model() -> Path:
    """Return the folder of a tiny LLaVA, which describes scenes with one or two toys; transformers loads it."""
    return _shipped() / "words" / "model"


def words_pictures() -> list[Path]:
    """Return drawn scenes for it, 64 pixels wide."""
    return sorted((_shipped() / "words" / "pictures").glob("*.png"))


def write_scenes(folder: str | Path, per_class: int = 40) -> Path:
    """Copy the first labelled scenes of each class, and their masks, into a folder of your own.

    Returns:
        The folder of the pictures. The masks are in the folder ``masks`` beside it.
    """
    for kind in ("pictures", "masks"):
        for shipped in (labelled_scenes().parent / kind).iterdir():
            own = Path(folder) / kind / shipped.name
            own.mkdir(parents=True, exist_ok=True)
            for file in sorted(shipped.iterdir())[:per_class]:
                shutil.copy(file, own)
    return Path(folder) / "pictures"


def _shipped() -> Path:
    return Path(str(files("camkit.demo").joinpath("files")))
