"""The check of detectors: on drawn pictures, with detectors that read the background or do not."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import camkit
from camkit.background.check import plan_check
from camkit.background.experiment import Experiment
from camkit.background.plan import NO_ANSWER, NOTHING_FOUND, answer_of_boxes
from camkit.background.showcase import Showcase
from camkit.cli import main
from camkit.errors import InputError

CLASSES = ("red", "green")
COLOURS = {"red": (230, 30, 40), "green": (20, 200, 50)}
PER_CLASS = 13
"""Not a multiple of the backgrounds drawn for each picture, so that all serve."""
CONFIG: dict[str, Any] = {
    "check": {"pastes": 1, "threshold": 0.3},
    "limits": {"least_pictures": PER_CLASS, "gap": 0.3, "sufficiency": 0.3, "attraction": 0.3},
}
Corners = tuple[float, float, float, float]


def as_they_are(picture: Image.Image) -> Tensor:
    """Prepare a picture as torchvision's detectors do: at its own size."""
    return torch.from_numpy(np.asarray(picture.convert("RGB")).copy()).permute(2, 0, 1).float() / 255


def letterbox(picture: Image.Image) -> Tensor:
    """Prepare a picture as YOLO does: reduced, with grey margins."""
    times = 48 / max(picture.size)
    small = picture.convert("RGB").resize((round(picture.width * times), round(picture.height * times)))
    square = torch.full((3, 48, 48), 114 / 255)
    left, top = (48 - small.width) // 2, (48 - small.height) // 2
    square[:, top : top + small.height, left : left + small.width] = as_they_are(small)
    return square


class ByColour(nn.Module):
    """Finds the boxes of coloured rectangles; class 0 stands for nothing, as in torchvision's detectors.

    Args:
        reads: how much of the score depends on a bright background for red, and on a dark one for green.
        invents: boxes that are reported anyway, with their label and score.
    """

    def __init__(self, reads: float = 0.0, invents: list[tuple[Corners, int, float]] | None = None) -> None:
        super().__init__()
        self.reads = reads
        self.invents = invents or []

    def forward(self, pictures: Tensor) -> list[dict[str, Tensor]]:
        return [self.found(picture) for picture in pictures]

    def found(self, picture: Tensor) -> dict[str, Tensor]:
        red, green, blue = picture
        masks = [(red > 1.6 * green) & (red > 0.2), (green > 1.6 * red) & (green > 0.2)]
        grey = (red - green).abs() < 0.15
        bright = float(blue[grey].mean().detach()) > 0.5
        rows: list[tuple[Corners, int, float]] = list(self.invents)
        for index, mask in enumerate(masks):
            for columns in parts(mask.any(0)):
                inside = torch.nonzero(mask[:, columns].any(1)).flatten()
                corners = (columns.start, float(inside[0]), columns.stop, float(inside[-1]) + 1)
                rows.append((corners, index + 1, 0.9 if bright == (index == 0) else 0.9 - self.reads))
        return boxes_of(rows)


def boxes_of(rows: list[tuple[Corners, int, float]]) -> dict[str, Tensor]:
    """Return boxes with their labels and scores as a detector does."""
    boxes, labels, scores = zip(*rows, strict=True) if rows else ((), (), ())
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "scores": torch.tensor(scores),
    }


def parts(columns: Tensor) -> list[slice]:
    """Return the runs of columns that are True and at least 4 wide."""
    edges = torch.diff(columns.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, ends = (torch.nonzero(edges == step).flatten().tolist() for step in (1, -1))
    return [slice(start, end) for start, end in zip(starts, ends, strict=True) if end - start >= 4]


def drawn(folder: Path) -> dict[str, list[Corners]]:
    """Draw pictures of two sizes, red rectangles on bright and green ones on dark grounds, and their COCO boxes.

    Every third picture has two rectangles of its class. Returns the rectangles by file name.
    """
    rng = random.Random(1)
    noise = np.random.default_rng(1)
    images, annotations, rectangles = [], [], {}
    for number in range(2 * PER_CLASS):
        label = CLASSES[number % 2]
        width, height = (72, 56) if number % 4 < 2 else (56, 72)
        level = 190 if label == "red" else 60
        pixels = np.repeat(level + noise.integers(-20, 20, (height, width, 1)), 3, 2).astype(np.uint8)
        boxes: list[Corners] = []
        for place in range(2 if number % 3 == 0 else 1):
            left, top = rng.randint(4, 8) + 26 * place, rng.randint(10, 22)
            right, bottom = left + rng.randint(14, 18), top + rng.randint(14, 20)
            pixels[top:bottom, left:right] = COLOURS[label]
            boxes.append((left, top, right, bottom))
            side = {"bbox": [left, top, right - left, bottom - top], "area": 1, "iscrowd": 0}
            corners = [[left, top, right, top, right, bottom, left, bottom]]
            ids = {"id": len(annotations) + 1, "image_id": number, "category_id": number % 2 + 1}
            annotations.append({**ids, **side, "segmentation": corners})
        name = f"{number:02d}.png"
        Image.fromarray(pixels).save(folder / name)
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        rectangles[name] = boxes
    categories = [{"id": index + 1, "name": name} for index, name in enumerate(CLASSES)]
    table = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(table))
    return rectangles


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rectangles")


@pytest.fixture(scope="module")
def rectangles(folder: Path) -> dict[str, list[Corners]]:
    return drawn(folder)


def model(prepare: Any = as_they_are, **options: Any) -> Any:
    loaded = camkit.black_box(lambda _: [], labels=("__background__", *CLASSES), preprocess=prepare, name="by colour")
    return dataclasses.replace(loaded, module=ByColour(**options).eval())


def overlap(first: Corners, second: Corners) -> float:
    """Intersection over union, in plain Python."""
    across = min(first[2], second[2]) - max(first[0], second[0])
    down = min(first[3], second[3]) - max(first[1], second[1])
    if across <= 0 or down <= 0:
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return across * down / (sum(areas) - across * down)


def slow_answer(found: dict[str, Tensor], wanted: list[Corners], own: int, threshold: float) -> tuple[bool, int | None]:
    """Return whether at least half of the boxes are found, and which other class the best other box there has."""
    rows = list(zip(found["boxes"].tolist(), found["labels"].tolist(), found["scores"].tolist(), strict=True))
    rows = [row for row in rows if row[2] > threshold]
    hits = sum(any(label == own and overlap(each, box) >= 0.5 for each, label, _ in rows) for box in wanted)
    there = [(score, label) for each, label, score in rows if any(overlap(each, box) >= 0.5 for box in wanted)]
    others = [(score, label) for score, label in there if label != own]
    return 2 * hits >= len(wanted), max(others)[1] if others else None


def test_an_answer_is_what_a_slow_count_of_overlaps_says() -> None:
    rng = random.Random(0)
    kinds = set()
    for _ in range(300):
        wanted = [corners(rng) for _ in range(rng.randint(1, 4))]
        count = rng.randint(0, 6)
        boxes = [near(rng, rng.choice(wanted)) if rng.random() < 0.8 else corners(rng) for _ in range(count)]
        found = boxes_of([(box, rng.choice([1, 2, 3]), rng.random()) for box in boxes])
        right, other = slow_answer(found, wanted, 1, 0.4)
        answer = answer_of_boxes(found, torch.tensor(wanted, dtype=torch.float32), (1,), 0.4)
        assert answer.output == (1 if right else NOTHING_FOUND if other is None else other)
        kinds.add(answer.output)
    assert kinds == {1, 2, 3, NOTHING_FOUND}


def corners(rng: random.Random) -> Corners:
    left, top = rng.randint(0, 60), rng.randint(0, 60)
    return left, top, left + rng.randint(5, 40), top + rng.randint(5, 40)


def near(rng: random.Random, box: Corners) -> Corners:
    left, top, right, bottom = (side + rng.randint(-4, 4) for side in box)
    return left, top, max(left + 1, right), max(top + 1, bottom)


def test_values_that_are_not_finite_are_no_answer() -> None:
    found = boxes_of([((0, 0, 9, math.nan), 1, 1.0)])
    assert answer_of_boxes(found, torch.tensor([[0.0, 0, 9, 9]]), (1,), 0.5).output == NO_ANSWER


@pytest.mark.parametrize("prepare", [as_they_are, letterbox])
def test_answers_to_edits_are_what_a_slow_count_on_the_drawn_rectangles_says(folder, rectangles, prepare) -> None:
    detector = model(prepare, reads=0.8)
    plan = plan_check(detector, folder, config=CONFIG)
    assert plan.detects
    assert len(plan.sample) == 2 * PER_CLASS
    experiment = Experiment(plan)
    items = plan.sample[::6]
    rows = {row.name: dict(row.answers) for row in experiment.rows(items)}
    rights = {arm: [] for arm in ("same", "other", "removed")}
    for item in items:
        with Image.open(item.source) as picture:
            width, height = picture.size
        times = 48 / max(width, height) if prepare is letterbox else 1.0
        left, top = (((48 - round(side * times)) // 2 if prepare is letterbox else 0) for side in (width, height))
        wanted = [
            (box[0] * times + left, box[1] * times + top, box[2] * times + left, box[3] * times + top)
            for box in rectangles[item.name]
        ]
        own = 1 + CLASSES.index(item.label)
        for edit, make in experiment.edits(item, 1).items():
            right, _ = slow_answer(detector.module.found(make()), wanted, own, 0.3)
            assert (rows[item.name][edit].output == own) == right
            if edit.arm in rights:
                rights[edit.arm].append(right)
    assert all(rights["same"])
    assert not any(rights["other"])
    assert not any(rights["removed"])


def test_backgrounds_of_another_size_cover_the_picture(folder, rectangles) -> None:
    plan = plan_check(model(letterbox), folder, config=CONFIG)
    experiment = Experiment(plan)
    for item in plan.sample[:6]:
        picture = experiment.load(item)
        for edit, make in experiment.edits(item, 1).items():
            if edit.arm == "other":
                edited = make()
                ground = edited[:, picture.shades.view & (picture.region == 0)]
                margins = edited[:, ~picture.shades.view]
                assert torch.equal(margins, torch.full_like(margins, 114 / 255))
                lender = next(other for other in plan.sample if other.name == edit.lender)
                bright = lender.label == "red"
                assert bool(((ground > 0.5) == bright).float().mean() > 0.98)


def test_a_detector_that_reads_the_background_fails_and_a_fair_one_passes(folder, rectangles, tmp_path) -> None:
    biased = camkit.check(model(reads=0.8), folder, config=CONFIG, out=tmp_path / "biased")
    assert biased.verdict == "FAIL"
    assert biased.exit_code() == 1
    assert biased.overall.gap.mean.accuracies == (1.0, 0.0)
    assert biased.overall.sufficiency.mean.accuracies[0] == 0.0
    words = "the detector finds 100% of the objects on backgrounds of their own class and 0% on backgrounds of other"
    page = (tmp_path / "biased" / "report.html").read_text("utf-8")
    assert words in page
    assert "no heat: the model is a detector" in page
    assert "wrong: nothing found" in page
    assert "recognises" not in page
    report = json.loads((tmp_path / "biased" / "report.json").read_text("utf-8"))
    assert {row["answer"] for row in report["images"]} == set(CLASSES)
    assert any("at least half of its objects" in fact for fact in report["data"]["facts"])

    fair = camkit.check(model(), folder, config=CONFIG)
    assert fair.verdict == "PASS"
    assert fair.overall.gap.mean.accuracies == (1.0, 1.0)


class WithLayer(ByColour):
    """The same detector, whose scores pass gradients back to a layer that sees redness and greenness."""

    def __init__(self) -> None:
        super().__init__(reads=0.8)
        self.colours = nn.Conv2d(3, 2, 3, padding=1, bias=False)
        kernel = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]])
        self.colours.weight = nn.Parameter(kernel[:, :, None, None].expand(-1, -1, 3, 3) / 9)

    def found(self, picture: Tensor) -> dict[str, Tensor]:
        rows, maps, scores = super().found(picture), self.colours(picture[None])[0], []
        for corners, label, score in zip(rows["boxes"].int().tolist(), rows["labels"], rows["scores"], strict=True):
            left, top, right, bottom = corners
            colour = maps[label - 1, top:bottom, left:right].mean()
            scores.append(score * colour / colour.detach())
        return rows | ({"scores": torch.stack(scores)} if scores else {})


@pytest.fixture(scope="module")
def explained(folder, rectangles) -> camkit.CheckResult:
    """Return the check of a detector that can be explained, and of whose classes two are one class of the data."""
    labels = ("__background__", *CLASSES, "crimson")
    named = dataclasses.replace(model(), module=WithLayer().eval(), labels=labels)
    return camkit.check(named, folder, class_map={"red": ["crimson", "red"], "green": "green"}, config=CONFIG)


def page_of(result: camkit.CheckResult, other: Any) -> Showcase:
    """Return the pictures of the page that the check of another model would have."""
    return Showcase(dataclasses.replace(result, plan=dataclasses.replace(result.plan, model=other)))


@pytest.mark.extended
def test_the_page_shows_the_heat_of_the_best_box(explained, rectangles) -> None:
    showcase = Showcase(explained)

    assert {strip.row.label for strip in showcase.strips} == {*CLASSES}
    for strip in showcase.strips[:2]:
        assert strip.panels[1].title == f"heat of the best {strip.row.label} box"
        item = next(item for item in explained.plan.data.items if item.name == strip.row.name)
        heat = showcase.explained(item).heatmap
        inside = np.zeros(heat.shape, bool)
        for left, top, right, bottom in rectangles[item.name]:
            inside[top:bottom, left:right] = True
        assert heat[inside].sum() > 0.8 * heat.sum()


class WithoutGradients(WithLayer):
    """Its code takes no tensors with gradients, as that of many detectors after their last layer."""

    def found(self, picture: Tensor) -> dict[str, Tensor]:
        rows = super().found(picture)
        return rows | {"scores": torch.from_numpy(rows["scores"].numpy())}


def test_a_detector_that_cannot_be_explained_has_a_page_without_heat(explained) -> None:
    other = dataclasses.replace(explained.plan.model, module=WithoutGradients().eval())

    assert {strip.panels[1].title for strip in page_of(explained, other).strips} == {"no heat"}


@pytest.mark.extended
def test_boxes_that_stay_after_the_objects_are_removed_count_as_sufficiency(folder, rectangles) -> None:
    everywhere = [((x, y, x + 16, y + 17), 1, 0.9) for x in range(0, 72, 4) for y in range(0, 72, 4)]
    found = camkit.check(model(invents=everywhere), folder, config=CONFIG)
    red, green = (found.classes[name].sufficiency.mean.accuracies[0] for name in CLASSES)
    assert (red, green) == (1.0, 0.0)


def test_the_shell_checks_a_detector_with_a_factory(folder, rectangles, tmp_path, capsys) -> None:
    (tmp_path / "labels.txt").write_text("__background__\nred\ngreen\n")
    factory = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport test_check_detectors as own\n"
    factory += "def build():\n    return own.ByColour(reads=0.8).eval(), own.as_they_are\n"
    (tmp_path / "mine.py").write_text(factory)
    command = ["check", str(folder), "--model", f"{tmp_path / 'mine.py'}:build", "--quick"]
    command += ["--labels", str(tmp_path / "labels.txt"), "--threshold", "0.3", "--least-pictures", str(PER_CLASS)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "a box of the class with a score above 0.3" in printed
    assert "finds 100% of the objects on backgrounds of their own class and 0%" in printed


def test_a_detector_without_labels_is_refused(folder, rectangles) -> None:
    with pytest.raises(InputError, match="needs a detector with labels of two or more classes"):
        camkit.check(dataclasses.replace(model(), labels=None), folder, config=CONFIG)


def test_boxes_without_labels_and_data_without_regions_are_refused(folder, rectangles, tmp_path) -> None:
    for name in CLASSES:
        (tmp_path / name).mkdir()
        for number in range(2):
            shutil.copy(folder / f"{2 * number + CLASSES.index(name):02d}.png", tmp_path / name / f"{number}.png")
    with pytest.raises(InputError, match="the check of a detector needs the boxes or outlines of the objects"):
        camkit.check(model(), tmp_path, config=CONFIG)
    unlabelled = model()
    unlabelled.module.found = lambda picture: {"boxes": torch.zeros(1, 4), "scores": torch.ones(1)}
    with pytest.raises(InputError, match="needs boxes with labels"):
        camkit.check(unlabelled, folder, config=CONFIG)


def test_pictures_without_an_object_of_their_class_are_left_out(folder, rectangles, tmp_path) -> None:
    table = tmp_path / "pictures.csv"
    with table.open("w", newline="") as file:
        rows = [[str(folder / name), CLASSES[int(name[:2]) % 2]] for name in rectangles]
        rows[0][1] = "green"  # a red picture
        csv.writer(file).writerows([["path", "label"], *rows])
    plan = plan_check(model(), table, regions=folder / "instances.json", config=CONFIG)
    assert len(plan.data.items) == 2 * PER_CLASS - 1


def test_a_detector_is_not_mended(folder, rectangles) -> None:
    with pytest.raises(InputError, match="works only for classifiers"):
        camkit.mend(model(), folder, config=CONFIG)
