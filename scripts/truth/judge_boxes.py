"""Judge the heat of a trained detector's boxes: is it on the box's own object, not on another one of its class?

    python -m scripts.truth.judge_boxes --data ../shared/data --markdown scripts/results/boxes.md --sheet boxes.png

The detector is NanoDet with COCO weights, an ONNX file that camkit runs as a PyTorch module. The script judges the
boxes with a score above ``SCORE`` that match an outline of their class in a photo of COCO (intersection over union of
0.5). The columns of the table, each a mean over boxes:

AUROC: the probability that a pixel of the object is hotter than another one of the photo (equal heat counts half).
maximum: the hottest pixel belongs to the object.
share: the share of the heat on the object.
right one: of the heat on objects of this class, the share on this object; for boxes whose photo has another one.
drop: how much of the box's score is lost if the hottest pixels, half as many as the object has, are blurred.

A second table is of the first photos (``--curves``) only, with D-RISE, and with insertion and deletion: areas under the
box's score, as ``box_curves`` says.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torchvision.ops import batched_nms, box_iou

import camkit
from camkit import targets
from camkit.images.regions import extent
from camkit.models import as_model
from scripts.lab.lab_run import write_between
from scripts.truth.box_curves import AT_ONCE, COLUMNS, areas, drise, evaluator_of
from scripts.truth.truth_measures import auroc, share_of_maxima

SIDE = 416
SCORE = 0.35
OVERLAP = 0.5
MARK = "judge_boxes"

_STRIDES = (8, 16, 32)
_BINS = 11
_LEAST = 0.05
"""Boxes with a lower score are dropped, as detectors do."""
_MEAN = torch.tensor([103.53, 116.28, 123.675]).view(3, 1, 1)
_DEVIATION = torch.tensor([57.375, 57.12, 58.395]).view(3, 1, 1)
_BLUR = 51
"""Side of the kernel, in pixels, that blurs what is removed."""

METHODS = ("auto", "gradcam", "layercam")
"""The first is camkit's choice. The others explain the same box at the layers that it takes, fused."""
DRISE, BLOB, RANDOM = "drise", "a blob in the box", "random"
_COLUMNS = ("AUROC", "maximum", "share", "right one", "drop")


class NanoDet(nn.Module):
    """The network with its boxes: classes are numbered in the order of COCO's names, from 0."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Float[Tensor, "n 3 h w"]) -> list[dict[str, Tensor]]:
        """Return each picture's boxes in pixels of the input, without duplicates, best first."""
        outputs = self.network(images)
        scores, distances = torch.cat(outputs[:3], 1), torch.cat(outputs[3:], 1)
        centres = torch.cat([_centres(SIDE // stride, stride) for stride in _STRIDES])
        strides = torch.cat([torch.full((1, (SIDE // stride) ** 2, 1), stride) for stride in _STRIDES], 1)
        sides = distances.reshape(len(images), -1, 4, _BINS).softmax(-1) @ torch.arange(_BINS).float() * strides
        boxes = torch.cat([centres - sides[..., :2], centres + sides[..., 2:]], -1)
        return [best_boxes(*of_picture) for of_picture in zip(boxes, scores, strict=True)]


def _centres(cells: int, stride: int) -> Float[Tensor, "cells 2"]:
    places = torch.arange(cells) * stride + (stride - 1) / 2
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    return torch.stack([columns, rows], -1).reshape(-1, 2)


def best_boxes(boxes: Float[Tensor, "cells 4"], scores: Float[Tensor, "cells classes"]) -> dict[str, Tensor]:
    """Return the boxes that no better one of their class overlaps by half, best first."""
    cells, labels = torch.nonzero(scores > _LEAST, as_tuple=True)
    found, at = scores[cells, labels], boxes[cells]
    keep = batched_nms(at.detach(), found.detach(), labels, OVERLAP)
    best = found[keep]
    return {"boxes": at[keep], "scores": best, "labels": labels[keep], "logits": torch.logit(best, 1e-6)}


def letterboxed(picture: Image.Image) -> Float[Tensor, "3 side side"]:
    """Return a photo as the network takes it: in the middle of a black square, with the channels blue, green, red."""
    scale, left, top = _placing(picture.size)
    width, height = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    pixels = np.zeros((SIDE, SIDE, 3), np.float32)
    resized = picture.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    pixels[top : top + height, left : left + width] = np.asarray(resized)
    return (torch.from_numpy(pixels[..., ::-1].copy()).permute(2, 0, 1) - _MEAN) / _DEVIATION


def _placing(size: tuple[int, int]) -> tuple[float, int, int]:
    """Return the scale, and the left and upper border, of a photo of a size (width, height)."""
    scale = SIDE / max(size)
    return scale, (SIDE - round(size[0] * scale)) // 2, (SIDE - round(size[1] * scale)) // 2


def load_detector(data: Path, folder: Path) -> NanoDet:
    """Unpack the file and return the detector."""
    file = folder / "nanodet.onnx"
    file.write_bytes(lzma.decompress((data / "detectors/nanodet.onnx.xz").read_bytes()))
    return NanoDet(as_model(str(file)).module).eval()


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo as the network takes it, and its objects: classes as numbers, and where they are in the input."""

    name: str
    tensor: Float[Tensor, "3 side side"]
    labels: tuple[int, ...]
    regions: Bool[Tensor, "k side side"]


def load_photos(data: Path) -> Iterator[Photo]:
    """Yield the photos of COCO with their outlines; crowds have none."""
    annotated = json.loads((data / "coco/instances.json").read_text())
    order = {category["id"]: number for number, category in enumerate(annotated["categories"])}
    objects = defaultdict(list)
    for row in annotated["annotations"]:
        if isinstance(row["segmentation"], list):
            objects[row["image_id"]].append((order[row["category_id"]], row["segmentation"]))
    for image in annotated["images"]:
        picture = Image.open(data / "coco" / Path(image["file_name"]).name)
        of_photo = objects[image["id"]]
        regions = [_region(polygons, picture.size) for _, polygons in of_photo]
        if regions:
            labels = tuple(label for label, _ in of_photo)
            yield Photo(image["file_name"], letterboxed(picture), labels, torch.from_numpy(np.stack(regions)))


def _region(polygons: Sequence[Sequence[float]], size: tuple[int, int]) -> NDArray[np.bool_]:
    scale, left, top = _placing(size)
    points = [np.reshape(polygon, (-1, 2)) * scale + (left, top) for polygon in polygons]
    drawn = np.zeros((SIDE, SIDE), np.uint8)
    cv2.fillPoly(drawn, [np.rint(part).astype(np.int32) for part in points], 1)
    return drawn > 0


@dataclass(frozen=True, eq=False)
class Judged:
    """A box that matches an object."""

    photo: Photo
    number: int
    region: Bool[Tensor, "side side"]
    others: Bool[Tensor, "side side"]
    box: Float[Tensor, " 4"]
    label: int
    score: float


def matched(photo: Photo, found: dict[str, Tensor]) -> Iterator[Judged]:
    """Yield the good boxes of a photo that match an object of their class."""
    corners = torch.stack([_box(region) for region in photo.regions])
    for number in torch.nonzero(found["scores"] > SCORE).flatten().tolist():
        label, box = int(found["labels"][number]), found["boxes"][number].detach()
        alike = torch.tensor([own == label for own in photo.labels])
        overlaps = box_iou(box[None], corners)[0] * alike
        best = int(overlaps.argmax())
        if overlaps[best] >= OVERLAP:
            alike[best] = False
            others = photo.regions[alike].any(0) & ~photo.regions[best]
            yield Judged(photo, number, photo.regions[best], others, box, label, float(found["scores"][number]))


def _box(region: Bool[Tensor, "side side"]) -> Float[Tensor, " 4"]:
    return torch.tensor(extent(region) if bool(region.any()) else (0, 0, 0, 0), dtype=torch.float32)


def measures(detector: NanoDet, judged: Judged, heat: Float[Tensor, "side side"]) -> dict[str, float]:
    """Return the columns of the table for one box; those that do not apply are missing."""
    return {**on_object(heat, judged.region, judged.others), "drop": _drop(detector, judged, heat)}


def on_object(heat: Float[Tensor, "h w"], region: Bool[Tensor, "h w"], others: Bool[Tensor, "h w"]) -> dict[str, float]:
    """Return the columns that say where a box's heat lies: on its object, or on others of its class, if any."""
    total, on_own, on_others = (float(part.sum()) for part in (heat, heat[region], heat[others]))
    found = {
        "AUROC": float(auroc(heat[None], region[None])),
        "maximum": float(share_of_maxima(heat[None], region[None])),
        "share": on_own / total if total else 0.0,
    }
    if bool(others.any()):
        found["right one"] = on_own / (on_own + on_others) if on_own + on_others else 0.5
    return found


def _drop(detector: NanoDet, judged: Judged, heat: Float[Tensor, "side side"]) -> float:
    count = max(1, int(judged.region.sum()) // 2)
    hottest = torch.zeros(SIDE * SIDE, dtype=torch.bool)
    hottest[heat.flatten().argsort(descending=True)[:count]] = True
    pixels = judged.photo.tensor.permute(1, 2, 0).numpy()
    blurred = torch.from_numpy(cv2.GaussianBlur(pixels, (_BLUR, _BLUR), 0)).permute(2, 0, 1)
    with torch.no_grad():
        (found,) = detector(torch.where(hottest.view(SIDE, SIDE), blurred, judged.photo.tensor)[None])
    same = found["labels"] == judged.label
    overlaps = box_iou(judged.box[None], found["boxes"])[0] >= OVERLAP
    left = found["scores"][same & overlaps]
    return 1 - (float(left.max()) if len(left) else 0.0) / judged.score


def heats_of(detector: NanoDet, photo: Photo, judged: Judged) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each row of the table, and the heat of the box."""
    layers: list[str] | None = None
    for method in METHODS:
        target = targets.box(judged.number)
        found = camkit.explain(detector, photo.tensor, layers, method=method, target=target)
        assert isinstance(found, camkit.Explanation)
        layers = layers or found.layer.split("+")
        yield method, torch.from_numpy(found.heatmap)
    yield BLOB, blob(judged.box, SIDE)
    yield RANDOM, torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(judged.number))


def masked_heats(detector: NanoDet, photo: Photo, boxes: Sequence[Judged]) -> list[Tensor]:
    """Return D-RISE's heat of each box; all boxes share the masks."""
    found = camkit.Explainer(detector, method=drise()).batch(
        [photo.tensor], target=[targets.box(judged.number) for judged in boxes], batch_size=AT_ONCE
    )
    return [torch.from_numpy(each.heatmap) for each in found]


def blob(box: Float[Tensor, " 4"], side: int) -> Float[Tensor, "side side"]:
    """Return a Gaussian as large as a box: its deviations are a quarter of the sides."""
    places = torch.arange(side) + 0.5
    left, top, right, bottom = box.tolist()
    across = torch.exp(-8 * ((places - (left + right) / 2) / max(right - left, 1)) ** 2)
    down = torch.exp(-8 * ((places - (top + bottom) / 2) / max(bottom - top, 1)) ** 2)
    return down[:, None] * across


def main() -> None:
    """Judge all boxes, and write the table and a sheet of maps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="the folder with coco/ and detectors/")
    parser.add_argument("--photos", type=int, default=None, help="at most this many photos")
    parser.add_argument("--curves", type=int, default=10, help="photos with D-RISE, insertion and deletion")
    parser.add_argument("--markdown", type=Path, help="the page to write the table into")
    parser.add_argument("--sheet", type=Path, help="a picture with the best box of each of the first 20 photos")
    given = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    with_curves: dict[str, list[dict[str, float]]] = defaultdict(list)
    sheet: list[NDArray[np.uint8]] = []
    with tempfile.TemporaryDirectory() as folder:
        detector = load_detector(given.data, Path(folder))
    explainer = camkit.Explainer(detector)
    for place, photo in enumerate(list(load_photos(given.data))[: given.photos]):
        with torch.no_grad():
            boxes = list(matched(photo, detector(photo.tensor[None])[0]))
        masked = masked_heats(detector, photo, boxes) if place < given.curves and boxes else []
        for number, judged in enumerate(boxes):
            heats = dict(heats_of(detector, photo, judged))
            heats |= {DRISE: masked[number]} if masked else {}
            of_heats = {row: measures(detector, judged, heat) for row, heat in heats.items()}
            for row, found in of_heats.items():
                if row != DRISE:
                    rows[row].append(found)
            if place < given.curves:
                evaluator = evaluator_of(explainer, photo.tensor, tuple(judged.box.tolist()), judged.label)
                for row, found in of_heats.items():
                    with_curves[row].append(found | areas(evaluator, heats[row]))
            if judged is boxes[0]:
                sheet.append(_drawn(judged, heats[METHODS[0]]))
        print(photo.name, len(boxes), flush=True)
    table = _table(rows, _COLUMNS)
    if with_curves:
        table += f"\n\n{_table(with_curves, (*_COLUMNS, *COLUMNS))}"
    print(table)
    if given.sheet is not None:
        shown = sheet[:20]
        shown += [np.zeros_like(shown[0])] * (-len(shown) % 5)
        columns = [np.concatenate(shown[start : start + 5], 1) for start in range(0, len(shown), 5)]
        cv2.imwrite(str(given.sheet), np.concatenate(columns))
    if given.markdown is not None:
        write_between(given.markdown, MARK, table)


def _drawn(judged: Judged, heat: Float[Tensor, "side side"]) -> NDArray[np.uint8]:
    pixels = (judged.photo.tensor * _DEVIATION + _MEAN).permute(1, 2, 0).numpy()
    colours = cv2.applyColorMap((heat.numpy() * 255).astype(np.uint8), cv2.COLORMAP_TURBO)
    picture = np.ascontiguousarray((0.5 * pixels + 0.5 * colours).clip(0, 255).astype(np.uint8))
    left, top, right, bottom = np.rint(judged.box.numpy()).astype(int).tolist()
    small: NDArray[np.uint8] = cv2.resize(
        cv2.rectangle(picture, (left, top), (right, bottom), (255, 255, 255), 2), (256, 256)
    )
    return small


def _table(rows: Mapping[str, Sequence[Mapping[str, float]]], columns: Sequence[str]) -> str:
    lines = [f"| heat | boxes | {' | '.join(columns)} |", f"|---|---:|{'---:|' * len(columns)}"]
    for name in (*METHODS, DRISE, BLOB, RANDOM):
        if name in rows:
            numbers = " | ".join(written(rows[name], column) for column in columns)
            lines.append(f"| {name} | {len(rows[name])} | {numbers} |")
    return "\n".join(lines)


def written(rows: Sequence[Mapping[str, float]], column: str) -> str:
    """Return the mean of a column over the boxes that have it."""
    values = [row[column] for row in rows if column in row]
    return f"{np.mean(values):.2f}" if values else "-"


if __name__ == "__main__":
    main()
