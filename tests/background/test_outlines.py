"""Masks from boxes: on drawn pictures, read back by COCO's own tools, by the check and in a browser."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from pycocotools.coco import COCO
from refusals import refused
from torch import Tensor, nn
from torchvision.transforms import v2

import camkit
from camkit.cli import main
from camkit.errors import InputError, TargetError

if TYPE_CHECKING:
    from playwright.sync_api import Browser

COLOURS = {"red": (220, 40, 30), "blue": (40, 60, 210)}
ELLIPSES = {
    "a.png": [("red", (20, 15, 80, 75)), ("blue", (100, 40, 150, 110))],
    "sub/b.png": [("blue", (30, 20, 130, 90))],
    "c.png": [("red", (60, 10, 110, 100))],
}
"""The objects of each picture, which has 160 x 120 pixels: the category, and the box of an ellipse."""
SIZE = (160, 120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of pictures with coloured ellipses on grey noise."""
    noise = np.random.default_rng(0)
    for name, ellipses in ELLIPSES.items():
        grey = np.repeat(noise.integers(90, 150, (*SIZE[::-1], 1), np.uint8), 3, 2)
        picture = Image.fromarray(grey)
        for colour, box in ellipses:
            ImageDraw.Draw(picture).ellipse(box, fill=COLOURS[colour])
        (file := tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        picture.save(file)
    return tmp_path / "data"


def true_mask(box: tuple[int, ...]) -> np.ndarray:
    drawn = Image.new("1", SIZE)
    ImageDraw.Draw(drawn).ellipse(box, fill=1)
    return np.asarray(drawn)


def as_csv(folder: Path) -> Path:
    rows = [(name, colour, *box) for name, ellipses in ELLIPSES.items() for colour, box in ellipses]
    return write_boxes(folder.parent / "boxes.csv", rows)


def write_boxes(file: Path, rows: list[Any]) -> Path:
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([("path", "class", "xmin", "ymin", "xmax", "ymax"), *rows])
    return file


def as_yolo(folder: Path) -> Path:
    labels = folder.parent / "labels"
    for name, ellipses in ELLIPSES.items():
        (file := labels / name).parent.mkdir(parents=True, exist_ok=True)
        rows = ((list(COLOURS).index(colour), np.divide(box, SIZE * 2)) for colour, box in ellipses)
        lines = [f"{index} {(x + r) / 2} {(y + b) / 2} {r - x} {b - y}" for index, (x, y, r, b) in rows]
        file.with_suffix(".txt").write_text("\n".join(lines))
    (labels / "classes.txt").write_text("\n".join(COLOURS))
    return labels


def overlap(region: np.ndarray, other: np.ndarray) -> float:
    return float((region & other).sum() / (region | other).sum())


@pytest.mark.parametrize("written", [as_csv, as_yolo])
def test_coco_tools_read_the_objects_that_were_drawn(folder: Path, written: Callable[[Path], Path]):
    (folder / "broken.png").write_bytes(b"no picture")
    boxes = written(folder)
    if boxes.is_file():
        boxes.write_text(f"{boxes.read_text()}broken.png,red,1,1,9,9\n")
    else:
        (boxes / "broken.txt").write_text("0 0.5 0.5 0.1 0.1")
    with pytest.warns(UserWarning, match="broken.png") as warned:
        made = camkit.regions(folder, regions=boxes, out=folder.parent / "out")
    assert len(warned) == 1
    coco = COCO(made)
    assert {image["file_name"] for image in coco.imgs.values()} == ELLIPSES.keys()
    for image in coco.imgs.values():
        found = coco.imgToAnns[image["id"]]
        assert [coco.cats[each["category_id"]]["name"] for each in found] == [
            c for c, _ in ELLIPSES[image["file_name"]]
        ]
        for each, (_, box) in zip(found, ELLIPSES[image["file_name"]], strict=True):
            left, top, right, bottom = box
            assert each["bbox"] == pytest.approx([left, top, right - left, bottom - top])
            mask = coco.annToMask(each).astype(bool)
            assert each["area"] == mask.sum()
            assert overlap(mask, true_mask(box)) > 0.93
            assert each["fit"] > 0.7


def test_an_object_that_is_not_found_has_the_ellipse_and_an_outline_stays(folder: Path):
    # A plain part of the picture shows no object, and a box over all of it leaves no background.
    Image.new("RGB", SIZE, "grey").save(folder / "c.png")
    corners = [0, 0, 60, 0, 0, 60]  # from the first pixel on, so that the mask's first run has no pixel
    rows: list[dict[str, Any]] = [{"bbox": [0, 0, 60, 60], "segmentation": [corners]}, {"bbox": [0, 0, *SIZE]}]
    sides = {"width": SIZE[0], "height": SIZE[1]}
    images = [{"id": number, "file_name": name, **sides} for number, name in ((1, "a.png"), (2, "c.png"))]
    annotations = [{"id": number, "image_id": 1, "category_id": 1, **row} for number, row in enumerate(rows)]
    annotations.append({"id": 9, "image_id": 2, "category_id": 1, "bbox": [40, 30, 60, 60]})
    table = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "red"}]}
    (boxes := folder.parent / "boxes.json").write_text(json.dumps(table))
    coco = COCO(camkit.regions(folder, regions=boxes, out=folder.parent / "out"))
    kept, whole, plain = (coco.annToMask(each).astype(bool) for each in coco.anns.values())
    assert np.array_equal(kept, COCO(boxes).annToMask(COCO(boxes).anns[0]).astype(bool))
    assert [each.get("from_box") for each in coco.anns.values()] == [None, "ellipse", "ellipse"]
    assert overlap(whole, true_mask((0, 0, 159, 119))) > 0.98
    assert overlap(plain, true_mask((40, 30, 99, 89))) > 0.98


class Fixed(nn.Module):
    """A detector that finds the ellipses of a.png in a picture of half the size, and one more with a low score."""

    def forward(self, pictures: Tensor) -> list[dict[str, Tensor]]:
        boxes = torch.tensor([[*map(float, box)] for _, box in ELLIPSES["a.png"]] + [[2.0, 2.0, 30.0, 30.0]]) / 2
        labels, scores = torch.tensor([1, 2, 1]), torch.tensor([0.9, 0.8, 0.3])
        return [{"boxes": boxes, "labels": labels, "scores": scores} for _ in pictures]


def interrupt(*_: int) -> None:
    raise KeyboardInterrupt


HALF = v2.Compose([v2.ToImage(), v2.Resize((60, 80)), v2.ToDtype(torch.float32, scale=True)])


def test_the_boxes_of_a_detector_are_outlined(folder: Path):
    named = camkit.load_model("demo-fair")
    detector = dataclasses.replace(named, module=Fixed(), preprocess=HALF, labels=("nothing", *COLOURS))
    shutil.rmtree(folder / "sub")
    (folder / "c.png").unlink()
    coco = COCO(camkit.regions(folder, boxes_of=detector, out=folder.parent / "out"))
    found = [coco.cats[each["category_id"]]["name"] for each in coco.anns.values()]
    assert found == ["red", "blue"]
    for each, (_, box) in zip(coco.anns.values(), ELLIPSES["a.png"], strict=True):
        assert overlap(coco.annToMask(each).astype(bool), true_mask(box)) > 0.9
    run = functools.partial(camkit.regions, folder, out=folder.parent / "out")
    few = dataclasses.replace(detector, labels=("nothing", "red"))
    assert [each["name"] for each in COCO(run(boxes_of=few)).cats.values()] == ["2", "red"]
    with refused("from 0 to 1, not 7", TargetError):
        run(boxes_of=detector, threshold=7)
    with pytest.raises(KeyboardInterrupt):
        run(boxes_of=detector, progress=interrupt)
    with refused("detector", InputError):
        run(boxes_of=detector, threshold=0.2, resume=True)
    turned = dataclasses.replace(detector, preprocess=lambda picture: HALF(picture.rotate(3)))
    unknown = "a.png: camkit cannot follow the detector's boxes to the picture"
    with refused(unknown, InputError), pytest.warns(UserWarning, match=unknown):
        run(boxes_of=turned)
    with refused("such as SAM", TargetError), pytest.warns(UserWarning, match="3 annotated pictures, 1 of them found"):
        camkit.regions(folder, regions=as_csv(folder), by=detector, out=folder.parent / "out")


def test_an_interrupted_run_continues_and_writes_no_half_result(folder: Path):
    boxes, out = as_csv(folder), folder.parent / "out"
    run = functools.partial(camkit.regions, folder, regions=boxes, out=out)
    whole = json.loads(run().read_text())
    calls: list[tuple[int, int]] = []

    def interrupt(*counts: int) -> None:
        calls.append(counts)
        if counts[0] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(progress=interrupt)
    assert json.loads((out / "instances.json").read_text()) == whole
    assert calls == [(0, 3), (1, 3), (2, 3)]
    assert json.loads(run(resume=True, progress=lambda *counts: calls.append(counts)).read_text()) == whole
    assert calls[3:] == [(2, 3), (3, 3)]
    assert json.loads((out / "before-instances.json").read_text()) == whole
    with pytest.raises(KeyboardInterrupt):
        run(progress=interrupt)
    boxes.write_text(boxes.read_text().replace("60,10,110", "61,10,110"))
    with refused("pictures and boxes", InputError):
        run(resume=True)


def test_the_shell_outlines_and_says_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]):
    out = folder.parent / "out"
    assert main(["regions", str(folder), "--regions", str(as_csv(folder)), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "outlined the object in 4 of 4 boxes" in said
    assert str(out / "regions.html") in said
    wrong = ["--by", "no.pt2"], ["--boxes-of", "x"], ["--regions", "nope.csv"]
    for arguments in ([folder / "sub"], [folder / "none"], *([folder, *options] for options in wrong)):
        assert main(["regions", *map(str, arguments), "--out", str(out)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_shell_names_the_classes_and_the_size_of_a_detector(folder: Path):
    (labels := folder.parent / "labels.txt").write_text("nothing\nred\nblue")
    typed = ["--boxes-of", f"{__file__}:Fixed", "--size", "60x80", "--labels", str(labels)]
    typed += ["--mean", "0,0,0", "--std", "1,1,1"]
    assert main(["regions", str(folder), *typed, "--out", str(folder.parent / "out")]) == 0
    coco = COCO(folder.parent / "out/instances.json")
    assert [each["name"] for each in coco.cats.values()] == ["blue", "red"]
    assert coco.anns[1]["bbox"] == pytest.approx([20, 15, 60, 60])


def test_the_same_box_gets_the_same_outline(folder: Path):
    clouds = np.random.default_rng(0).integers(0, 256, (3, 4, 3), np.uint8)
    Image.fromarray(clouds).resize(SIZE).save(folder / "c.png")
    boxes = write_boxes(folder.parent / "boxes.csv", [("c.png", name, 60, 10, 110, 100) for name in "abc"])
    first, *others = COCO(camkit.regions(folder, regions=boxes, out=folder.parent / "out")).anns.values()
    assert first["from_box"] == "cut"
    assert [each["segmentation"] for each in others] == [first["segmentation"]] * 2


def test_a_page_that_fails_loses_no_mask(folder: Path, monkeypatch: pytest.MonkeyPatch):
    boxes, out = as_csv(folder), folder.parent / "out"
    camkit.regions(folder, regions=boxes, out=out)
    whole = (out / "instances.json").read_bytes()
    shutil.rmtree(out)

    def fail(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr("camkit.background.outlines._page", fail)
    with pytest.raises(MemoryError):
        camkit.regions(folder, regions=boxes, out=out)
    assert (out / "instances.json").read_bytes() == whole


@pytest.mark.extended
def test_what_a_person_chooses_on_the_page_reaches_the_check(tmp_path: Path, browser: Browser):
    scenes = camkit.scenes.write_scenes(tmp_path / "scenes", 12)
    rows = []
    for mask in sorted((tmp_path / "scenes/masks").glob("*/*.png")):
        with Image.open(mask) as opened:
            rows.append((f"{mask.parent.name}/{mask.stem}.jpg", mask.parent.name, *(opened.getbbox() or ())))
    boxes = write_boxes(tmp_path / "boxes.csv", rows)
    made = camkit.regions(scenes, regions=boxes, out=tmp_path / "out")
    content = json.loads(made.read_text())
    by_id = {each["id"]: each for each in content["annotations"]}
    names = {image["id"]: image["file_name"] for image in content["images"]}
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(made.with_name("regions.html").as_uri())
    shown = page.locator(".card").evaluate_all("cards => cards.map(card => Number(card.dataset.id))")
    fits = [by_id[number]["fit"] for number in shown]
    assert fits == sorted(fits)
    assert len(shown) == len(rows)
    for key in ("d", "b", "k", "ArrowRight", "d", "ArrowLeft", "k"):
        page.keyboard.press(key)
    page.reload()  # the browser remembers
    assert page.locator("[aria-current]").get_attribute("data-id") == str(shown[3])  # the first without a choice
    page.locator("button[value=drop]").nth(5).click()
    counts = [page.locator(f"#{choice}").inner_text() for choice in ("keep", "box", "drop")]
    assert counts == [str(len(shown) - 3), "1", "2"]
    with page.expect_download() as download:
        page.keyboard.press("s")
    download.value.save_as(saved := tmp_path / download.value.suggested_filename)
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests)

    first, second, sixth = (names[by_id[shown[place]]["image_id"]] for place in (0, 1, 5))
    result = camkit.check("demo-fair", scenes, regions=saved, quick=True)
    kinds = {item.name: [each.kind for each in item.objects] for item in result.plan.data.items}
    assert {name for name, of_picture in kinds.items() if not of_picture} == {first, sixth}
    assert {name for name, of_picture in kinds.items() if of_picture == ["box"]} == {second}
    assert {first, sixth} <= result.untested.keys()
    assert second not in result.untested
