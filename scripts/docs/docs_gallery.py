"""Draws the pictures of the gallery and of the page on reading the heat.

    .venv/bin/python -m scripts.docs.docs_gallery

All show drawn scenes and networks that ship with camkit, but for the places of a network's cells.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import torch
import torchvision
from PIL import Image

import camkit
from camkit.types import Fusion, Pixels, Spread

FOLDER = Path(__file__).parents[2] / "docs" / "gallery"

SIDE = 384
"""The longer side of each scene in pixels, as large as the scenes themselves."""

OFF_STRIDE, SCALE = 225, 2
"""The side of a picture that a stride of 32 does not divide, and how much larger it is drawn."""

JPEG_QUALITY = 85
"""At this quality no block edges are visible."""


def draw() -> dict[str, Pixels]:
    """Return all pictures by name."""
    scenes = camkit.scenes.scene_paths()
    fair, biased = (camkit.Explainer(name, device="cpu") for name in ("demo-fair", "demo-biased"))
    drawn = {
        "object": fair(scenes["plane-wood"]).captioned(side=SIDE),
        "background": biased(scenes["plane-wood"]).captioned(side=SIDE),
        "empty": biased(scenes["plane-wood"], "plane").captioned(side=SIDE),
        "contrast": biased(scenes["plane-wood"], camkit.targets.contrast("bird", "plane")).captioned(side=SIDE),
    }
    for explanation in fair.batch([scenes["plane-sky"]], ["plane", "bird", "ship", "car"]):
        drawn[f"target-{explanation.label}"] = explanation.captioned(side=SIDE)
    for layer in ("features.0", "features.1", "features.2", "features.3"):
        explainer = camkit.Explainer("demo-fair", layer, method="layercam", device="cpu")
        drawn[f"layer-{layer[-1]}"] = explainer(scenes["car-road"]).captioned(side=SIDE)
    for method in ("gradcam", "layercam"):
        explainer = camkit.Explainer("demo-fair", "features.2", method=method, device="cpu")
        drawn[f"method-{method}"] = explainer(scenes["ship-sea"]).captioned(side=SIDE)
    fuses: tuple[Fusion, ...] = ("mean", "product")
    for fuse in fuses:
        explainer = camkit.Explainer(
            "demo-fair", ["features.1", "features.3"], method="layercam", fuse=fuse, device="cpu"
        )
        drawn[f"fused-{fuse}"] = explainer(scenes["bird-wood"]).captioned(side=SIDE)
    drawn["style-side-by-side"] = fair(scenes["bird-wood"]).overlay(style="side-by-side")
    drawn["feature-maps"] = camkit.feature_maps("demo-fair", scenes["car-road"], "features.2", top=12).sheet()
    diagnosis = camkit.diagnose("demo-fair", list(scenes.values()), device="cpu")
    drawn["diagnosis"] = diagnosis.sheet()
    drawn["cells"] = cells(scenes["plane-wood"])
    return drawn


def cells(scene: Path) -> Pixels:
    """Draw where the cells of a network look at 225 x 225 pixels, and where an even spread has them."""
    with Image.open(scene) as image:
        drawn = np.asarray(image.convert("RGB").resize((SCALE * OFF_STRIDE, SCALE * OFF_STRIDE)), np.uint8).copy()
    torch.manual_seed(0)
    network, inputs = torchvision.models.mobilenet_v2(), torch.rand(3, OFF_STRIDE, OFF_STRIDE)
    spreads: tuple[Spread, ...] = ("even", "measured")
    for spread, colour, line in zip(spreads, ((255, 255, 255), (255, 60, 0)), (2, cv2.FILLED), strict=True):
        rows, columns = camkit.Explainer(network, method="gradcam", spread=spread)(inputs).positions
        for row in rows:
            for column in columns:
                place = round(SCALE * (column + 0.5)), round(SCALE * (row + 0.5))
                cv2.circle(drawn, place, 5, colour, line, cv2.LINE_AA)
    return drawn


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, pixels in draw().items():
        Image.fromarray(pixels).save(FOLDER / f"{name}.jpg", quality=JPEG_QUALITY)


if __name__ == "__main__":
    main()
