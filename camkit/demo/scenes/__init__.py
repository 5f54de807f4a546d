"""Drawn scenes and two small networks, so that you can try camkit without a download."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from camkit.demo.scenes.drawing import BACKGROUNDS, HOME, THINGS, Scene, draw, draw_background
from camkit.models.scene_net import (
    INPUT_SIZE,
    LABELS,
    SceneNet,
    load_scene_net,
    preprocess,
)

__all__ = [
    "BACKGROUNDS",
    "HOME",
    "INPUT_SIZE",
    "LABELS",
    "THINGS",
    "Scene",
    "SceneNet",
    "draw",
    "draw_background",
    "load_scene_net",
    "preprocess",
    "scene_mask",
    "scene_paths",
]


def scene_paths() -> dict[str, Path]:
    """Return the pictures that ship with camkit, by name: the object, then its background, as in ``"plane-sky"``."""
    folder = Path(str(files("camkit.demo.scenes").joinpath("files")))
    return {path.stem: path for path in sorted(folder.glob("*.jpg"))}


def scene_mask(name: str) -> NDArray[np.bool_]:
    """Return the object's region in one of these pictures, bool (H, W)."""
    path = scene_paths()[name].with_name(f"{name}-mask.png")
    with Image.open(path) as mask:
        return np.asarray(mask.convert("1"))
