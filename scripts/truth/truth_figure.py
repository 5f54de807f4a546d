"""Draw the maps of Grad-CAM and of auto beside scenes of the planted-truth lab, for networks that it trained.

python -m scripts.truth.lab_truth --only colour --keep trained/
python -m scripts.truth.truth_figure --keep trained/ --out docs/gallery/defaults.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
import torch

import camkit
from camkit.types import Pixels
from scripts.truth.lab_truth import kept_file
from scripts.truth.truth_networks import build, logits
from scripts.truth.truth_scenes import draw, normalised

NETWORKS = {"ResNet, last grid 2 x 2": "ResNet", "ViT, class token": "ViT"}
CAUSE = "colour"
SCENES, SIDE, GAP, LINE = 2, 192, 12, 22


def main() -> None:
    """Write the figure: a row for each network that was trained, with each scene beside its two maps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--keep", type=Path, required=True, help="the folder with the trained weights")
    parser.add_argument("--out", type=Path, required=True, help="the picture to write")
    parser.add_argument("--width", type=int, default=128, help="of the networks")
    given = parser.parse_args()
    rows = [
        row_of(kind, name, given.keep, given.width)
        for kind, name in NETWORKS.items()
        if kept_file(given.keep, kind, CAUSE, given.width).exists()
    ]
    cv2.imwrite(str(given.out), np.concatenate(rows)[..., ::-1])


def row_of(kind: str, name: str, folder: Path, width: int) -> Pixels:
    """Return a row of pictures (H, W, 3): scenes that the network has right, and their maps."""
    kept = torch.load(kept_file(folder, kind, CAUSE, width), map_location="cpu", weights_only=True)
    network = build(kind, CAUSE, width)
    network.load_state_dict(kept["weights"])
    network.eval()
    scenes = draw(CAUSE, 32, torch.Generator().manual_seed(7))
    right = logits(network, scenes.images).argmax(1) == scenes.labels[:, 0]
    scenes = scenes.rows(right.nonzero()[:SCENES, 0])
    tiles = []
    for image, label in zip(scenes.images, scenes.labels[:, 0].tolist(), strict=True):
        picture = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
        tiles.append(titled(picture, name))
        for method in ("gradcam", "auto"):
            found = camkit.Explainer(network, method=method)(normalised(image), target=label)
            colours = cv2.applyColorMap((255 * found.heatmap).astype(np.uint8), cv2.COLORMAP_TURBO)[..., ::-1]
            mixed = cv2.addWeighted(picture, 0.45, np.ascontiguousarray(colours), 0.55, 0)
            tiles.append(titled(mixed, method if found.method == method else f"{method}: {found.method}"))
    return np.concatenate(tiles, 1)


def titled(picture: Pixels, title: str) -> Pixels:
    """Return a picture, enlarged, with a title over it and a white gap at its right."""
    large = cv2.resize(picture, (SIDE, SIDE), interpolation=cv2.INTER_NEAREST)
    tile = np.full((LINE + SIDE + GAP, SIDE + GAP, 3), 255, np.uint8)
    tile[LINE : LINE + SIDE, :SIDE] = large
    cv2.putText(tile, title, (2, 15), cv2.FONT_HERSHEY_SIMPLEX, 0.42, (0, 0, 0), 1, cv2.LINE_AA)
    return tile


if __name__ == "__main__":
    main()
