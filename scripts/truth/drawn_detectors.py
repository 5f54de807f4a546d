"""Judge the heat of small detectors' boxes on drawn scenes: is it on the box's own toy, not on another of its class?

    python -m scripts.truth.drawn_detectors --detectors detectors/ --markdown scripts/results/boxes.md

``train_detectors`` writes the detectors. All that are in the folder are judged.
``box_curves`` says what insertion and deletion are here.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import box_iou

import camkit
from camkit import targets
from camkit.errors import TargetError
from scripts.lab.lab_run import write_between
from scripts.truth.box_curves import AT_ONCE, COLUMNS, areas, drise, evaluator_of
from scripts.truth.drawn_toys import JUDGED, Scene, draw
from scripts.truth.judge_boxes import BLOB, DRISE, RANDOM, blob, on_object, written
from scripts.words.word_scenes import SHAPES, SIDE

MARK = "drawn_detectors"
PICTURES = 40
CURVES = 12
"""Scenes for the rows of D-RISE, and for insertion and deletion."""
SCORE, OVERLAP = 0.5, 0.5
METHODS = ("auto", "gradcam", "layercam")
"""The first is camkit's choice; the others explain the same box at the layers that it takes, or at the deepest grid."""
MASK, FOUND = "auto, of the mask", "found"
WHOLE = "layercam, of all boxes"
"""One map for the picture, as ultralytics draws it."""
_COLUMNS = ("AUROC", "maximum", "share", "right one", *COLUMNS)


def judged(source: str, pictures: int, curves: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the row of the table and its columns, for each box of the pictures that matches a toy.

    The first row of each picture is how many toys have a box, and how many there are. Only the first ``curves``
    pictures have the rows of D-RISE and the columns of insertion and deletion, which take many passes.
    """
    explainers = {METHODS[0]: camkit.Explainer(source)}
    for seed in range(pictures):
        scene = draw((JUDGED, seed))
        picture, every = Image.fromarray(scene.picture), targets.boxes(SCORE)
        try:
            maps: dict[str, Sequence[camkit.Explanation]] = {
                METHODS[0]: explainers[METHODS[0]].batch([picture], target=every)
            }
        except TargetError:  # no box has this score
            yield FOUND, {"found": 0, "all": len(scene.labels)}
            continue
        only_masks = "segment" in source  # its boxes are those of ``detect``
        for method in METHODS[1:] if not only_masks else ():
            if method not in explainers:
                chosen = maps[METHODS[0]][0].layer
                layers = None if chosen == "whole model" else chosen.split("+")
                explainers[method] = camkit.Explainer(source, layers, method=method)
            maps[method] = explainers[method].batch([picture], target=every)
        if not only_masks:
            of_all = explainers[METHODS[-1]].batch([picture], target=sum_of_logits)
            maps[WHOLE] = [*of_all] * len(maps[METHODS[0]])  # the same map for each of the boxes
        if seed < curves and not only_masks:
            explainers.setdefault(DRISE, camkit.Explainer(source, method=drise()))
            maps[DRISE] = explainers[DRISE].batch([picture], target=every, batch_size=AT_ONCE)
        if only_masks:
            of_masks = [targets.box(number, part="mask") for number in range(len(maps[METHODS[0]]))]
            maps[MASK] = explainers[METHODS[0]].batch([picture], target=of_masks)
        toys = [matching(scene, each) for each in maps[METHODS[0]]]
        yield FOUND, {"found": len({toy for toy in toys if toy is not None}), "all": len(scene.labels)}
        for number, (toy, explained) in enumerate(zip(toys, maps[METHODS[0]], strict=True)):
            if toy is None or explained.detection is None or explained.target is None:
                continue
            corners = tuple(explained.detection)  # pictures have the size of the detectors' input
            heats = {name: torch.from_numpy(rows[number].heatmap_on_picture()) for name, rows in maps.items()}
            if only_masks:
                heats = {MASK: heats[MASK]}
            else:
                heats[BLOB] = blob(torch.tensor(corners), SIDE)
                heats[RANDOM] = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(1000 * seed + number))
            columns = {name: measures(scene, toy, heat) for name, heat in heats.items()}
            if seed < curves:
                evaluator = evaluator_of(explainers[METHODS[0]], picture, corners, explained.target)
                columns = {name: row | areas(evaluator, heats[name]) for name, row in columns.items()}
            yield from columns.items()


def sum_of_logits(output: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the sum of the logits of all boxes above the limit, for each picture (N,)."""
    return torch.stack([found["logits"][found["scores"] > SCORE].sum() for found in output])


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
        for name in (*METHODS, WHOLE, MASK, DRISE, BLOB, RANDOM):
            if name in rows:
                numbers = " | ".join(written(rows[name], column) for column in _COLUMNS)
                lines.append(f"| {network} | {found / everything:.0%} | {name} | {len(rows[name])} | {numbers} |")
    return "\n".join(lines)


def sources(folder: Path) -> dict[str, str]:
    """Return the trained detectors of a folder, as camkit loads them; the DETR finds too few toys to be judged."""
    found = {}
    for name in ("yolos", "conditional", "detect", "segment", "obb"):
        file = folder / name / "weights/last.pt"
        if file.exists() or (folder / name / "config.json").exists():
            found[name] = str(file) if file.exists() else f"hf:{folder / name}"
    return found


def main() -> None:
    """Judge all detectors, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--detectors", type=Path, default=Path("detectors"))
    parser.add_argument("--pictures", type=int, default=PICTURES)
    parser.add_argument("--curves", type=int, default=CURVES, help="pictures with D-RISE, insertion and deletion")
    parser.add_argument("--markdown", type=Path, help="the page to write the table into")
    given = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name, source in sources(given.detectors).items():
        results[name] = defaultdict(list)
        for row, columns in judged(source, given.pictures, given.curves):
            results[name][row].append(columns)
        print(table({name: results[name]}), flush=True)
    if given.markdown is not None:
        write_between(given.markdown, MARK, table(results))


if __name__ == "__main__":
    main()
