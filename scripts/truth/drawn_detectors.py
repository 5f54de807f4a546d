"""Train small detectors of Hugging Face and ultralytics on drawn scenes, and judge the heat of their boxes.

    OMP_NUM_THREADS=1 python -m scripts.truth.drawn_detectors yolos --out detectors/ --minutes 15
    python -m scripts.truth.drawn_detectors --out detectors/ --markdown scripts/results/boxes.md

A scene has two to four toys of two shapes, in their own colours, so most boxes have another toy of their class beside
them. The shape is the class. The heat of a box must lie on its own toy. ``yolo`` needs the package ultralytics, whose
training reads the scenes from a folder. Without the name of a network, all trained ones in ``--out`` are judged.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.ops import box_iou

import camkit
from camkit import targets
from camkit.errors import TargetError
from camkit.images.regions import extent
from scripts.lab.lab_run import write_between
from scripts.truth.judge_boxes import blob, on_object
from scripts.words.word_scenes import COLOURS, GROUNDS, SHAPES, SIDE, Toy, covered, painted

MARK = "drawn_detectors"
TRAINING, JUDGED = 1, 2
"""The first number of the scenes' seeds."""
SCENES, PICTURES = 12_000, 60
BATCH, RATE = 32, 1e-3
SCORE, OVERLAP = 0.5, 0.5
METHODS = ("auto", "gradcam", "layercam")
"""The first is camkit's choice; the others explain the same box at the layers that it takes, or at the deepest grid."""
BLOB, FOUND = "a blob in the box", "found"
_COLUMNS = ("AUROC", "maximum", "share", "right one")


@dataclass(frozen=True, eq=False)
class Scene:
    """A picture (64, 64, 3), and the class and the visible pixels of each toy: (K,), (K, 64, 64)."""

    picture: NDArray[np.uint8]
    labels: tuple[int, ...]
    masks: NDArray[np.bool_]

    @property
    def boxes(self) -> NDArray[np.float32]:
        """The toys' boxes: left, top, right, bottom in pixels (K, 4)."""
        return np.array([extent(torch.from_numpy(mask)) for mask in self.masks], np.float32)


def draw(seed: tuple[int, ...]) -> Scene:
    """Draw one scene: each toy lies in a quarter of its own."""
    rng = np.random.default_rng(seed)
    picture = painted(rng, str(rng.choice(list(GROUNDS))))
    two = rng.choice(len(SHAPES), 2, replace=False)
    labels, masks = [], []
    for place in rng.permutation(4)[: rng.integers(2, 5)]:
        middle = (np.array([place % 2, place // 2]) + 0.5) * SIDE / 2 + rng.uniform(-4, 4, 2)
        label, colour = int(rng.choice(two)), str(rng.choice(list(COLOURS)))
        toy = Toy(
            SHAPES[label], colour, (middle[0], middle[1]), float(rng.uniform(8, 11)), float(rng.uniform(-0.25, 0.25))
        )
        mask = covered(toy)
        picture[mask] = np.asarray(COLOURS[colour]) + rng.normal(0, 8, 3)
        labels.append(label)
        masks.append(mask)
    picture = np.clip(picture * rng.uniform(0.85, 1.1) + rng.normal(0, 6, picture.shape), 0, 255)
    return Scene(picture.astype(np.uint8), tuple(labels), np.stack(masks))


def untrained() -> Any:
    """Return a small YOLOS with random weights."""
    return hf.YolosForObjectDetection(
        hf.YolosConfig(
            hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
            image_size=[SIDE, SIDE], patch_size=8, num_detection_tokens=8, use_mid_position_embeddings=False,
            id2label=dict(enumerate(SHAPES)), label2id={shape: number for number, shape in enumerate(SHAPES)},
        )
    )  # fmt: skip


def train_yolos(folder: Path, seconds: float) -> None:
    """Train a YOLOS, and write it with its processor."""
    scenes = [draw((TRAINING, number)) for number in range(SCENES)]
    model, processor = untrained(), hf.YolosImageProcessor(size={"height": SIDE, "width": SIDE}, do_pad=False)
    pixels = torch.from_numpy(np.stack([scene.picture for scene in scenes])).permute(0, 3, 1, 2).float() / 255
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (processor.image_mean, processor.image_std))
    pixels = (pixels - mean) / deviation
    wanted = [
        {"class_labels": torch.tensor(scene.labels), "boxes": _centred(torch.from_numpy(scene.boxes)) / SIDE}
        for scene in scenes
    ]
    print(f"{sum(each.numel() for each in model.parameters()):,} weights", flush=True)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-4)
    start = shown = time.monotonic()
    step = 0
    while True:
        for rows in torch.randperm(SCENES).split(BATCH):
            done = min((time.monotonic() - start) / seconds, 1)
            optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / 200, 1) * (1 - done + 0.01)
            output = model(pixel_values=pixels[rows], labels=[wanted[row] for row in rows.tolist()])
            optimizer.zero_grad()
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            step += 1
            if time.monotonic() - shown > 60 or done >= 1:
                shown = time.monotonic()
                model.save_pretrained(folder / "yolos")
                processor.save_pretrained(folder / "yolos")
                print(f"{step} at {done:.0%}: {output.loss.item():.2f}", flush=True)
            if done >= 1:
                return


def _centred(boxes: Tensor) -> Tensor:
    """Return boxes as middles and sides."""
    return torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)


def judged(source: str, pictures: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the row of the table and its columns, for each box of the pictures that matches a toy.

    The first row of each picture is how many toys have a box, and how many there are.
    """
    explainers = {METHODS[0]: camkit.Explainer(source)}
    for seed in range(pictures):
        scene = draw((JUDGED, seed))
        picture, every = [Image.fromarray(scene.picture)], targets.boxes(SCORE)
        try:
            maps: dict[str, Sequence[camkit.Explanation]] = {
                METHODS[0]: explainers[METHODS[0]].batch(picture, target=every)
            }
        except TargetError:  # no box has this score
            yield FOUND, {"found": 0, "all": len(scene.labels)}
            continue
        for method in METHODS[1:]:
            if method not in explainers:
                chosen = maps[METHODS[0]][0].layer
                layers = None if chosen == "whole model" else chosen.split("+")
                explainers[method] = camkit.Explainer(source, layers, method=method)
            maps[method] = explainers[method].batch(picture, target=every)
        toys = [matching(scene, each) for each in maps[METHODS[0]]]
        yield FOUND, {"found": len({toy for toy in toys if toy is not None}), "all": len(scene.labels)}
        for method, explanations in maps.items():
            for toy, each in zip(toys, explanations, strict=True):
                if toy is not None:
                    yield method, measures(scene, toy, torch.from_numpy(each.heatmap_on_picture()))
                    if method == METHODS[-1] and each.detection is not None:
                        yield BLOB, measures(scene, toy, blob(torch.tensor(tuple(each.detection)), SIDE))


def matching(scene: Scene, found: camkit.Explanation) -> int | None:
    """Return the toy of its class that a box overlaps enough, or None."""
    if found.detection is None:
        return None
    alike = torch.tensor([SHAPES[label] == found.label for label in scene.labels])
    overlaps = box_iou(torch.tensor([tuple(found.detection)]), torch.from_numpy(scene.boxes))[0] * alike
    return int(overlaps.argmax()) if overlaps.max() >= OVERLAP else None


def measures(scene: Scene, toy: int, heat: Tensor) -> dict[str, float]:
    """Return the columns of the table for one box; those that do not apply are missing."""
    rivals = [number for number, label in enumerate(scene.labels) if label == scene.labels[toy] and number != toy]
    region, others = torch.from_numpy(scene.masks[toy]), torch.from_numpy(scene.masks[rivals].any(0))
    return on_object(heat, region, others)


def table(of_networks: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> str:
    """Return a line for each network and kind of heat; each number is a mean over boxes."""
    lines = [
        f"| detector | toys found | heat | boxes | {' | '.join(_COLUMNS)} |",
        f"|---|---|---|---:|{'---:|' * len(_COLUMNS)}",
    ]
    for network, rows in of_networks.items():
        found, everything = (sum(row[name] for row in rows[FOUND]) for name in ("found", "all"))
        for name in (*METHODS, BLOB):
            cells = [np.mean([row[column] for row in rows[name] if column in row]) for column in _COLUMNS]
            numbers = " | ".join(f"{cell:.2f}" for cell in cells)
            lines.append(f"| {network} | {found / everything:.0%} | {name} | {len(rows[name])} | {numbers} |")
    return "\n".join(lines)


def train_yolo(folder: Path, epochs: int) -> None:
    """Write the scenes as ultralytics reads them, and train its smallest detector."""
    ultralytics = importlib.import_module("ultralytics")  # the reader's own package
    data = folder / "scenes"
    for part, count in (("train", 3000), ("val", 100)):
        for kind in ("images", "labels"):
            (data / kind / part).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            scene = draw((TRAINING if part == "train" else JUDGED, number))
            Image.fromarray(scene.picture).save(data / f"images/{part}/{number}.png")
            middles = _centred(torch.from_numpy(scene.boxes)) / SIDE
            rows = [
                f"{label} {' '.join(map(str, box))}" for label, box in zip(scene.labels, middles.tolist(), strict=True)
            ]
            (data / f"labels/{part}/{number}.txt").write_text("\n".join(rows))
    names = "".join(f"  {number}: {shape}\n" for number, shape in enumerate(SHAPES))
    (data / "data.yaml").write_text(f"path: {data.resolve()}\ntrain: images/train\nval: images/val\nnames:\n{names}")
    ultralytics.YOLO("yolo11n.yaml").train(
        data=str(data / "data.yaml"), epochs=epochs, imgsz=SIDE, batch=BATCH, device="cpu", workers=0, mosaic=0.0,
        project=str(folder.resolve()), name="yolo", exist_ok=True, plots=False, val=False,
    )  # fmt: skip


def main() -> None:
    """Train one detector, or judge all that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("network", nargs="?", choices=["yolos", "yolo"], help="train this one")
    parser.add_argument("--out", type=Path, default=Path("detectors"))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--epochs", type=int, default=10, help="of yolo")
    parser.add_argument("--pictures", type=int, default=PICTURES)
    parser.add_argument("--markdown", type=Path, help="the page to write the table into")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.network == "yolo":
        train_yolo(given.out, given.epochs)
    elif given.network is not None:
        train_yolos(given.out, 60 * given.minutes)
    else:
        sources = {"yolos": f"hf:{given.out / 'yolos'}", "yolo": str(given.out / "yolo/weights/last.pt")}
        results: dict[str, dict[str, list[dict[str, float]]]] = {}
        for name, source in sources.items():
            if Path(source.removeprefix("hf:")).exists():
                results[name] = defaultdict(list)
                for row, columns in judged(source, given.pictures):
                    results[name][row].append(columns)
        print(table(results))
        if given.markdown is not None:
            write_between(given.markdown, MARK, table(results))


if __name__ == "__main__":
    main()
