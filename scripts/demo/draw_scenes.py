"""Draws the pictures that ship with camkit, with the regions of their objects. The seeds are fixed."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from camkit.models.scene_net import INPUT_SIZE
from scripts.demo.drawn_scenes import HOME, THINGS, Scene, draw

SIDE = 384
SEEDS = {"plane-sky": 7, "ship-sea": 22, "car-road": 36, "bird-wood": 77, "plane-wood": 7, "car-sea": 36}
"""The scenes to explain, by name, and their seeds."""

PER_CLASS = 40
"""Scenes to check per class: a few more than the 30 that the check needs by default."""
CHECK_SEED = 11


def scene_to_explain(name: str) -> Scene:
    """Draw one of the scenes in ``SEEDS``."""
    thing, background = name.split("-")
    return draw(np.random.default_rng(SEEDS[name]), thing, background, SIDE)


def scene_to_check(thing: str, number: int) -> Scene:
    """Draw one object on its usual background, as large as the networks' input."""
    random = np.random.default_rng([CHECK_SEED, THINGS.index(thing), number])
    return draw(random, thing, HOME[thing], INPUT_SIZE)


def main() -> None:
    """Write the scenes to explain into one folder, and the scenes to check into one folder per class."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("camkit/demo/files"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name in SEEDS:
        scene = scene_to_explain(name)
        Image.fromarray(scene.image).save(out / f"{name}.jpg", quality=90, subsampling=0)
        Image.fromarray(scene.mask).save(out / f"{name}-mask.png", optimize=True)
    for thing in THINGS:
        pictures, masks = out / "labelled/pictures" / thing, out / "labelled/masks" / thing
        for folder in (pictures, masks):
            folder.mkdir(parents=True, exist_ok=True)
        for number in range(PER_CLASS):
            scene = scene_to_check(thing, number)
            Image.fromarray(scene.image).save(pictures / f"{number:03d}.jpg", quality=80, optimize=True)
            Image.fromarray(scene.mask).save(masks / f"{number:03d}.png", optimize=True)


if __name__ == "__main__":
    main()
