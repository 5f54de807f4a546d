"""Measure how much the networks of the lab's marked worlds rely on the animals' natural backgrounds.

    python -m scripts.lab.natural_backgrounds --data DATA --state photo-lab/

The lab's truth knows nothing of that, because it redraws the marks alone. Here, animals of the truth part are cut out
and put on other photos of that part, whose own animal is painted over: on photos of the same class, and on photos of
the other classes, with marks drawn at random in both. The difference of the two accuracies is the true gap of natural
backgrounds. Its interval is a bootstrap over the animals' photos.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from scripts.lab.lab_photos import (
    USUAL_SCALE,
    WORLDS,
    Picture,
    World,
    cover_of,
    cut_out,
    photos_of,
    put_on,
    read_photo,
    with_mark,
)
from scripts.lab.lab_trunks import answers, load_trunk, maps_of
from scripts.lab.validate_photos import HELD_OUT_MARKS, MARK_TIES, ModelSpec, load_network

EACH = 8
"""Backgrounds of each kind that an animal is put on."""

_MARGIN, _RADIUS = 9, 5
"""In pixels: how far beyond its outline an animal is painted over, and how far the painting looks."""

_DRAWS = 2000


def emptied(data: Path, photo: str) -> Picture:
    """Return a photo whose animal is painted over from what surrounds it (Telea 2004)."""
    picture = read_photo(data / "caltech" / photo)
    covered = (cover_of(data, photo, picture.shape[:2]) > 0).astype(np.uint8)
    covered = cv2.dilate(covered, np.ones((_MARGIN, _MARGIN), np.uint8))
    return np.asarray(cv2.inpaint(picture, covered, _RADIUS, cv2.INPAINT_TELEA), np.uint8)


def composites(data: Path, world: World) -> Iterator[tuple[Picture, int, str, bool]]:
    """Return each animal on other backgrounds: the picture, the class, the photo, and whether they are of its class."""
    photos = {label: photos_of(data, name, "truth") for label, name in enumerate(world.classes)}
    backgrounds = {photo: emptied(data, photo) for of_class in photos.values() for photo in of_class}
    random = np.random.default_rng([29, *map(ord, world.name)])
    for label, of_class in photos.items():
        others = [photo for other, rest in photos.items() if other != label for photo in rest]
        for photo in of_class:
            same = [background for background in of_class if background != photo]
            for own, pool in ((True, same), (False, others)):
                for background in random.choice(pool, EACH):
                    picture, _ = put_on(cut_out(data, photo), backgrounds[str(background)], USUAL_SCALE, random)
                    mark = int(random.integers(len(world.cues)))
                    marked = with_mark(picture.astype(np.float32), world.mark, mark)
                    yield np.round(np.clip(marked, 0, 255)).astype(np.uint8), label, photo, own


def gap_of(
    right: NDArray[np.bool_], photos: list[str], own: NDArray[np.bool_]
) -> tuple[float, float, float, float, float]:
    """Return both accuracies, and their difference with its 95 % interval over the photos."""
    by_photo: dict[str, list[int]] = defaultdict(list)
    for number, photo in enumerate(photos):
        by_photo[photo].append(number)
    arms = np.array(
        [[right[of][own[of]].mean(), right[of][~own[of]].mean()] for of in map(np.array, by_photo.values())]
    )
    draws = np.random.default_rng(0).integers(len(arms), size=(_DRAWS, len(arms)))
    low, high = np.quantile((arms[:, 0] - arms[:, 1])[draws].mean(1), [0.025, 0.975])
    same, other = arms.mean(0)
    return float(same), float(other), float(same - other), float(low), float(high)


def gaps_of(
    right: NDArray[np.bool_], labels: NDArray[np.int64], own: NDArray[np.bool_], world: World
) -> dict[str, float]:
    """Return the gap of each class."""
    arms = {name: [right[(labels == label) & arm].mean() for arm in (own, ~own)]
            for label, name in enumerate(world.classes)}  # fmt: skip
    return {name: float(same - other) for name, (same, other) in arms.items()}


def main() -> None:
    """Measure each network of the marked worlds, and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="the folder of weights and photos")
    parser.add_argument("--state", type=Path, default=Path("photo-lab"))
    parser.add_argument("--out", type=Path, default=Path("natural.jsonl"), help="the file with a line for each network")
    options = parser.parse_args()
    torch.set_num_threads(1)
    done = (
        {json.loads(line)["name"] for line in options.out.read_text().splitlines()} if options.out.exists() else set()
    )
    for trunk_name, world_name in HELD_OUT_MARKS:
        world = WORLDS[world_name]
        pictures, labels, photos, own = zip(*composites(options.data, world), strict=True)
        front_maps = maps_of(load_trunk(trunk_name, options.data), np.stack(pictures))
        for tie in MARK_TIES:
            for head in ("linear", "fine-tuned"):
                spec = ModelSpec(trunk_name, head, world_name, tie, tie)
                if spec.name in done:
                    continue
                trunk = load_trunk(trunk_name, options.data)
                network = load_network(spec, options.state, options.data, trunk)
                right = answers(network, front_maps) == np.array(labels)
                same, other, gap, low, high = gap_of(right, list(photos), np.array(own))
                row = {"name": spec.name, "same": same, "other": other, "gap": gap, "low": low, "high": high}
                row["classes"] = gaps_of(right, np.array(labels), np.array(own), world)
                with options.out.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
                print(f"{spec.name}: {same:.3f} - {other:.3f} = {gap:+.3f} ({low:+.3f} to {high:+.3f})", flush=True)


if __name__ == "__main__":
    main()
