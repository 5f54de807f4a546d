"""Runs the evaluations of two papers on the words of any Hugging Face model: TAM's, and EAGLE's.

    python -m scripts.words.protocols --model hf:llava-hf/llava-1.5-7b-hf --coco coco/ --prompt "Describe this picture."
    OMP_NUM_THREADS=1 python -m scripts.words.protocols --model trained/ --captions

The folder ``--coco`` has COCO's pictures and ``instances_*.json``, at any depth. ``--captions`` explains sentences that
people wrote, from ``captions_*.json``, instead of the model's. Without ``--coco``, drawn scenes are written in this
layout, for the tiny models; their classes are toys and grounds.

TAM (Li et al. 2025, arXiv:2506.23270). An object word is the name of a COCO class that the picture has, or a synonym.
Obj-IoU compares its map, above Otsu's threshold, with the outlines of the class; precision and recall are of the same
pixels. Func-IoU is the share of the picture in which the map of a function word ("the", "and", but no preposition)
stays below the mean threshold of the sentence's object words. F1-IoU is the harmonic mean of both.

EAGLE (Chen et al. 2025, arXiv:2509.22496). Superpixels are ranked by their mean heat. Insertion is the area under the
word's probability while they are shown on black in this order, and deletion while they are blacked out. The pointing
game asks whether a word's maximum lies in an outline of its class, or in a box.

What differs from the papers' code: words and synonyms are found in a list instead of by a tagger. For TAM, the maps of
a sentence share one scale (there, a map is scaled together with the relevance of earlier words), nouns outside COCO's
classes set no threshold, and a word of several tokens has one map (there, the best of its tokens' maps counts). For
EAGLE, superpixels are made by k-means over colour and place, in as many steps as ``--steps``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.cluster.vq import kmeans2
from torch import Tensor

from camkit.background.regions.annotations import ObjectAnnotation
from camkit.background.render import object_region
from camkit.errors import ModelError
from camkit.sentences.explain import explanation_of
from camkit.sentences.heat import attention_rows, expected_gradients
from camkit.sentences.loading import load
from camkit.sentences.reading import Reading, SentenceReader
from camkit.sentences.references import read
from camkit.sentences.tam import activation_maps, filtered
from camkit.sentences.word_methods import WORD_METHODS
from scripts.words.word_model import PROMPT
from scripts.words.word_scenes import Mask, draw

SEED = 7
SUPERPIXELS, ROUNDS = 64, 8
SYNONYMS = {
    "man": "person", "woman": "person", "people": "person", "men": "person", "women": "person", "boy": "person",
    "girl": "person", "child": "person", "children": "person", "plane": "airplane", "motorbike": "motorcycle",
    "sofa": "couch", "television": "tv", "bike": "bicycle", "phone": "cell phone", "table": "dining table",
    "plant": "potted plant", "racket": "tennis racket", "glove": "baseball glove", "bat": "baseball bat",
}  # fmt: skip
FUNCTION = re.compile(
    r"a|an|the|this|that|these|those|some|any|no|every|each|all|both|and|or|but|there|can|could|may|might|will|would|"
    r"should|must|he|she|it|they|his|her|its|their|which|who|what|where|when"
)
METHODS = (*WORD_METHODS, "random", "centre")
Heat = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Example:
    """A picture, its first caption by people, and for each class the outlines and boxes together."""

    file: Path
    caption: str | None
    masks: Mapping[str, Mask]
    boxes: Mapping[str, Mask]


def main() -> None:
    """Run both protocols and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", required=True, help="hf:NAME, or a folder")
    parser.add_argument("--coco", type=Path, help="a folder in COCO's layout; default: drawn scenes")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--captions", action="store_true", help="explain captions by people")
    parser.add_argument("--references", help="a folder of other pictures; default: noise")
    parser.add_argument("--pictures", type=int, default=20)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = parser.parse_args()
    model, processor = load(given.model)
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    used = 0
    with tempfile.TemporaryDirectory() as folder:
        if given.coco is None:
            write_scenes(Path(folder), given.pictures)
        reader = SentenceReader(model, processor, given.prompt)
        for example in list(examples(given.coco or Path(folder)))[: given.pictures]:
            sentence = example.caption if given.captions else None
            picture = read(example.file, str(example.file))
            reading = reader.read(picture, sentence, given.references, given.max_new_tokens)
            used += judge(example, reading, given.steps, rows)
    print(f"{used} object words in {given.pictures} pictures\n\n{table(rows)}")


def examples(folder: Path) -> Iterator[Example]:
    """Yield the pictures that have outlines, in the order of the file."""
    content = json.loads(next(iter(sorted(folder.rglob("instances*.json")))).read_text())
    captions: dict[int, str] = {}
    for file in sorted(folder.rglob("captions*.json")):
        captions |= {row["image_id"]: row["caption"] for row in reversed(json.loads(file.read_text())["annotations"])}
    names = {row["id"]: row["name"] for row in content["categories"]}
    files = {file.name: file for file in folder.rglob("*") if file.suffix in (".jpg", ".png")}
    parts: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in content["annotations"]:
        parts[row["image_id"]].append(row)
    for row in content["images"]:
        size = row["width"], row["height"]
        masks: dict[str, Mask] = defaultdict(lambda size=size: np.zeros(size[::-1], bool))  # type: ignore[misc]
        boxes: dict[str, Mask] = defaultdict(lambda size=size: np.zeros(size[::-1], bool))  # type: ignore[misc]
        for part in parts[row["id"]]:
            name = names[part["category_id"]]
            masks[name] |= object_region([ObjectAnnotation(name, outline=part["segmentation"])], size)
            left, top, width, height = (round(value) for value in part["bbox"])
            boxes[name][top : top + height, left : left + width] = True
        if masks and row["file_name"] in files:
            yield Example(files[row["file_name"]], captions.get(row["id"]), dict(masks), dict(boxes))


def write_scenes(folder: Path, count: int) -> None:
    """Write drawn scenes as COCO does: pictures, instances (the toys and the ground), and a caption for each."""
    ids: dict[str, int] = {}
    images, annotations, captions = [], [], []
    for number in range(count):
        scene = draw((SEED, number))
        name, (height, width) = f"{number:012d}.png", scene.picture.shape[:2]
        Image.fromarray(scene.picture).save(folder / name)
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        captions.append({"image_id": number, "caption": scene.sentence})
        for word in scene.words:
            if word.cause in ("shape", "ground") and word.truth is not None:
                rows, columns = np.nonzero(word.truth)
                box = columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1
                ends = np.flatnonzero(np.diff(word.truth.T.ravel(), prepend=False, append=False))
                runs = np.diff([0, *ends, word.truth.size])
                annotations.append({
                    "image_id": number, "category_id": ids.setdefault(word.text, len(ids) + 1), "iscrowd": 0,
                    "bbox": [int(value) for value in box],
                    "segmentation": {"size": [height, width], "counts": [int(run) for run in runs]},
                })  # fmt: skip
    categories = [{"id": number, "name": name} for name, number in ids.items()]
    instances = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances_scenes.json").write_text(json.dumps(instances))
    (folder / "captions_scenes.json").write_text(json.dumps({"images": images, "annotations": captions}))


def judge(example: Example, reading: Reading, steps: int, rows: Any) -> int:
    """Add the measures of a sentence's words to the rows, and return the number of its object words."""
    objects = object_words([span.text.lower() for span in reading.spans], example.masks)
    function = [number for number, span in enumerate(reading.spans) if FUNCTION.fullmatch(span.text.lower())]
    if not objects:
        return 0
    regions = superpixels(np.asarray(reading.picture))
    for method, maps in heat_of(reading, [*objects, *function]).items():
        top = max((each.max() for each in maps.values()), default=0) or 1
        limits = []
        for number, name in objects.items():
            heat, mask, found = maps[number], example.masks[name], rows[method]
            limits.append(otsu(heat / top))
            hot = heat / top > limits[-1]
            both = (hot & mask).sum()
            found["obj"].append(both / (hot | mask).sum())
            found["precision"].append(both / max(hot.sum(), 1))
            found["recall"].append(both / mask.sum())
            where = np.unravel_index(int(heat.argmax()), heat.shape)
            found["outline"].append(float(mask[where]) if heat.any() else 0.0)
            found["box"].append(float(example.boxes[name][where]) if heat.any() else 0.0)
            for name_of_curve, area in curves(reading, regions, heat, number, steps).items():
                found[name_of_curve].append(area)
        rows[method]["func"] += [float((maps[number] / top <= np.mean(limits)).mean()) for number in function]
    return len(objects)


def object_words(words: Sequence[str], classes: Mapping[str, Any]) -> dict[int, str]:
    """Return the numbers of words that end the name of a class, also in the plural, and the class."""
    found = {}
    for number, word in enumerate(words):
        for single in (word, word.removesuffix("s"), word.removesuffix("es")):
            text = " ".join([*words[:number], single])
            name = SYNONYMS.get(single, next((each for each in classes if f" {text}".endswith(f" {each}")), ""))
            if name in classes:
                found[number] = name
    return found


def heat_of(reading: Reading, numbers: list[int]) -> dict[str, dict[int, Heat]]:
    """Return each method's heat of some words on the picture's pixels; the slow expected gradients are made once."""
    of_tokens = expected_gradients(reading, numbers)
    raw = {"expected": [reading.places.drawn(each) for each in of_tokens]}
    try:
        rows = attention_rows(reading, numbers)
        raw["attention"] = [reading.places.drawn(each) for each in rows]
        raw["attention-expected"] = [reading.places.drawn(each) for each in rows * of_tokens.clamp(min=0)]
        raw["tam"] = [filtered(reading.places.drawn(each)) for each in activation_maps(reading, numbers)]
    except ModelError as error:  # a family without rows of attention, or without logits at the picture
        print(error)
    height, width = raw["expected"][0].shape
    generator = torch.Generator().manual_seed(len(numbers))
    down, across = (torch.linspace(-1, 1, count) for count in (height, width))
    raw["random"] = [torch.rand(height, width, generator=generator) for _ in numbers]
    raw["centre"] = [(-(down[:, None] ** 2) - across**2).exp() for _ in numbers]
    return {name: {number: enlarged(each, reading) for number, each in zip(numbers, maps, strict=True)}
            for name, maps in raw.items()}  # fmt: skip


def enlarged(raw: Tensor, reading: Reading) -> Heat:
    """Return the positive part of a map in its own units, on the picture's pixels."""
    drawn = explanation_of(reading, 0, raw, WORD_METHODS["expected"], source="").heatmap_on_picture()
    return np.asarray(drawn * max(float(raw.max()), 0), np.float32)


def otsu(heat: Heat) -> float:
    """Return the threshold that divides values of 0 to 1 into two groups with the least variance inside of them."""
    levels = np.minimum(256 * heat, 255).astype(np.uint8)
    return float((cv2.threshold(levels, 0, 255, cv2.THRESH_OTSU)[0] + 1) / 256)


def superpixels(pixels: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Return the number of each pixel's superpixel: k-means over colour and place, from an even grid."""
    height, width = pixels.shape[:2]
    step = math.sqrt(height * width / SUPERPIXELS)
    y, x = np.mgrid[:height, :width]
    points = np.dstack([pixels / 20.0, y[..., None] / step * 2, x[..., None] / step * 2]).reshape(-1, 5)
    rows, columns = (np.arange(step / 2, side, step).astype(int) for side in (height, width))
    centres = points.reshape(height, width, 5)[rows][:, columns].reshape(-1, 5)
    _, owner = kmeans2(points, centres, ROUNDS, minit="matrix")
    return np.asarray(owner.reshape(height, width))


@torch.no_grad()
def curves(reading: Reading, regions: NDArray[np.intp], heat: Heat, number: int, steps: int) -> dict[str, float]:
    """Return the areas under a word's probability while the hottest regions are shown on black, and blacked out."""
    counts = np.bincount(regions.ravel())
    order = np.argsort(-(np.bincount(regions.ravel(), heat.ravel()) / np.maximum(counts, 1)), kind="stable")
    rank = np.argsort(order)[regions]
    parts = np.linspace(0, len(counts), steps + 1)
    shown = [rank < part for part in parts]
    pixels, areas = np.asarray(reading.picture), [float(mask.mean()) for mask in shown]
    found = {}
    for name, masks in (("insertion", shown), ("deletion", [~mask for mask in shown])):
        versions = [Image.fromarray(np.where(mask[..., None], pixels, 0).astype(np.uint8)) for mask in masks]
        arguments = [reading.inputs.with_text(reading.inputs.of(each), reading.text) for each in versions]
        tokens = [reading.cut.tokens_of(each) for each in arguments]
        likely = [float(reading.score(each[None], [number]).exp()) for each in tokens]
        found[name] = float(np.trapezoid(likely, areas))
    return found


def table(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return the table in Markdown."""
    columns = ("obj", "precision", "recall", "func", "F1", "insertion", "deletion", "outline", "box")
    heads = "Obj-IoU | precision | recall | Func-IoU | F1-IoU | insertion | deletion | maximum in outline | in box"
    lines = [f"| heat | {heads} |", f"|---{'|---' * len(columns)}|"]
    for method in (each for each in METHODS if each in rows):
        means = {name: float(np.mean(values)) for name, values in rows[method].items() if values}
        if "func" in means:
            means["F1"] = 2 * means["obj"] * means["func"] / max(means["obj"] + means["func"], 1e-9)
        lines.append(f"| {method} | {' | '.join(f'{means[name]:.2f}' if name in means else '' for name in columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
